"""Hardware and packages of a machine: processes, CUDA, and NVIDIA's packages with their kernels."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

from packaging.requirements import Requirement

KERNELS = {
    "gradient_accumulation_fusion": ("fused_weight_gradient_mlp_cuda",),
    "masked_softmax_fusion": (
        *("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda"),
    ),
}
"""Fusion -> apex's extension modules that megatron-core's own layers need for it; no other package provides them."""

EXPECTED_MODULES = ("amp_C", "fused_layer_norm_cuda")
"""apex's extension modules that megatron-core expects wherever apex is installed."""


@dataclass(frozen=True)
class Machine:
    """The hardware and packages that flags are checked against."""

    world_size: int
    _: KW_ONLY
    cuda: bool
    transformer_engine: bool
    apex: bool
    unbuilt: frozenset[str] = frozenset()
    """apex's extension modules that are missing from its build."""
    unfit: str | None = None
    """Why the installed Transformer Engine does not meet megatron-core's requirements; None if it does."""
    wandb: bool = False
    """Whether the package wandb is installed."""
    emerging: str | None = None
    """Version of the package emerging-optimizers, which has Muon; None if it is not installed."""
    connections: str = ""
    """CUDA_DEVICE_MAX_CONNECTIONS, the number of queues to a GPU, which CUDA reads at its start; empty: the default."""

    @classmethod
    def here(cls, world_size: int) -> "Machine":
        """Return this machine, with `world_size` processes in the job."""
        import torch

        engine, apex = (_is_installed(name) for name in ("transformer_engine", "apex"))
        modules = {name for names in (*KERNELS.values(), EXPECTED_MODULES) for name in names}
        unbuilt = frozenset(name for name in modules if apex and not _is_installed(name))
        unfit = unfit_engine(_version_of("transformer-engine"), _requirements_of("megatron-core")) if engine else None
        return cls(
            world_size,
            cuda=torch.cuda.is_available(),
            transformer_engine=engine,
            apex=apex,
            unbuilt=unbuilt,
            unfit=unfit,
            # wandb creates a directory of this name, which can be imported too
            wandb=_version_of("wandb") is not None,
            emerging=_version_of("emerging-optimizers"),
            connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
        )

    def imagined(self, backend: str) -> "Machine":
        """Return the machine that a dry run assumes: with CUDA and NVIDIA's packages, unless the backend is gloo."""
        if self.cuda or backend == "gloo":
            return self
        return Machine(
            self.world_size, cuda=True, transformer_engine=True, apex=True, wandb=True, emerging=self.emerging
        )

    def fuses(self, name: str) -> bool:
        """Return whether the machine has apex's kernels for `name`, a key of `KERNELS`."""
        return self.cuda and self.apex and self.unbuilt.isdisjoint(KERNELS[name])


def unfit_engine(installed: str | None, requirements: Iterable[str]) -> str | None:
    """Return why a version of Transformer Engine violates megatron-core's requirements; None if it does not, or if
    unknown."""
    if installed is None:
        return None
    ranges = [one.specifier for one in map(Requirement, requirements) if one.name == "transformer-engine"]
    # NVIDIA's containers have development versions
    missed = [str(one) for one in ranges if not one.contains(installed, prereleases=True)]
    return f"Transformer Engine {installed}: this megatron-core asks for {missed[0]}" if missed else None


def _is_installed(module: str) -> bool:
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
