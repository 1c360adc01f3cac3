"""What a machine has: processes, CUDA, and NVIDIA's packages with the kernels that they bring."""

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.requirements import Requirement

KERNELS = {
    "gradient_accumulation_fusion": ("fused_weight_gradient_mlp_cuda",),
    "masked_softmax_fusion": (
        *("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda"),
    ),
}
"""Extension modules of apex that megatron-core's own layers import for a fusion, which it has nobody else for."""

TAKEN_FOR_GRANTED = ("amp_C", "fused_layer_norm_cuda")
"""Those that it expects wherever there is apex."""


@dataclass(frozen=True)
class Machine:
    """What the flags are checked against."""

    world_size: int
    cuda: bool
    transformer_engine: bool
    apex: bool
    unbuilt: frozenset[str] = frozenset()
    """Extension modules that apex was built without."""
    unfit: str | None = None
    """Which version of Transformer Engine is there and which ones megatron-core asks for, unless it is one of them."""

    @classmethod
    def here(cls, world_size: int) -> "Machine":
        """This machine, with `world_size` processes in the job."""
        import torch

        engine, apex = (_is_there(name) for name in ("transformer_engine", "apex"))
        modules = {name for names in (*KERNELS.values(), TAKEN_FOR_GRANTED) for name in names}
        unbuilt = frozenset(name for name in modules if apex and not _is_there(name))
        unfit = unfit_engine(_version_of("transformer-engine"), _requirements_of("megatron-core")) if engine else None
        return cls(world_size, torch.cuda.is_available(), engine, apex, unbuilt, unfit)

    def imagined(self, backend: str) -> "Machine":
        """The one that a dry run stands for: with CUDA and NVIDIA's packages, unless the backend is one for CPUs."""
        return self if self.cuda or backend == "gloo" else Machine(self.world_size, True, True, True)

    def fuses(self, name: str) -> bool:
        """Whether it has apex's kernels for one of `KERNELS`."""
        return self.cuda and self.apex and self.unbuilt.isdisjoint(KERNELS[name])


def unfit_engine(installed: str | None, requirements: Iterable[str]) -> str | None:
    """What is wrong with a version of Transformer Engine; None: nothing is known to be.

    Args:
        installed: None: unknown.
        requirements: of megatron-core, as its metadata have them; those in extras count too.
    """
    if installed is None:
        return None
    ranges = [one.specifier for one in map(Requirement, requirements) if one.name == "transformer-engine"]
    # NVIDIA's containers have development versions
    missed = [str(one) for one in ranges if not one.contains(installed, prereleases=True)]
    return f"Transformer Engine {installed}: this megatron-core asks for {missed[0]}" if missed else None


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements_of(distribution: str) -> list[str]:
    try:
        return importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
