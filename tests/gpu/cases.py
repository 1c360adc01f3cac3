"""Training runs that a GPU must compute as a CPU does: by name, their flags, ranks, iterations and tolerance."""

from collections.abc import Mapping
from typing import NamedTuple

from tests import features, layouts
from tests.hostcuda.test_features import TOGETHER_AT_ONCE


class Case(NamedTuple):
    """Flags on top of `runs.BASE`, and how far a loss or gradient norm may be from the CPU's, relatively."""

    flags: str
    world_size: int
    iterations: int
    tolerance: float

    @property
    def balanced(self) -> bool:
        """Whether a policy must add hosts or move experts."""
        return "--balance-policy" in self.flags


FLOAT32 = 1e-5
BFLOAT16 = 1e-2
CODED = 1e-3
"""Tolerances. A code of 8 bits turns the last bit of a number now and then into a step of its own."""

SAME_KERNELS = "--no-bias-swiglu-fusion --no-bias-dropout-fusion"
"""Without megatron-core's fusions, which torch.compile would compile in each process."""

ONE_RANK = (
    "--hidden-size 128 --moe-ffn-hidden-size 256 --swiglu --disable-bias-linear --seq-length 64 --micro-batch-size 4"
)
MISTAKEN = "blockwise, replicas"
"""The case in which curves.py makes mistakes. It sends weights while parameters are gathered."""

FEW = "--num-layers 2"
EP4 = f"{features.PLAIN} {FEW} --tensor-model-parallel-size 1 --expert-model-parallel-size 4 --moe-comm-node-size 2"


def _one_rank() -> dict[str, Case]:
    more = {
        "float32": "",
        "distributed optimizer": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "chunks": "--moe-comm-chunks 4",
        "full recomputation": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "capacity": "--moe-expert-capacity-factor 1.5",
    }
    cases = {name: Case(f"{ONE_RANK} {flags}", 1, 20, FLOAT32) for name, flags in more.items()}
    # Transformer Engine packs documents that are kept apart
    half = {"bfloat16": "--bf16", "documents apart": "--bf16 --reset-attention-mask"}
    return cases | {name: Case(f"{ONE_RANK} {flags}", 1, 20, BFLOAT16) for name, flags in half.items()}


def _four_ranks() -> dict[str, Case]:
    gathered = layouts.layout_of(*layouts.REPLICAS, *layouts.GATHER, "top2", "blockwise")
    cases = {MISTAKEN: Case(f"{layouts.flags_of(gathered)} {FEW} {SAME_KERNELS}", 4, 4, FLOAT32)}
    for names in TOGETHER_AT_ONCE:
        few = "" if "interleaved pipeline" in names else FEW
        tolerance = CODED if "codec" in names else FLOAT32
        cases[", ".join(names)] = Case(f"{features.flags_of(*names)} {few} {SAME_KERNELS}", 4, 4, tolerance)
    others = {
        "2dh, int8, chunks": f"{EP4} --moe-comm-alltoall 2dh --moe-comm-codec int8 --moe-comm-codec-directions all "
        "--moe-comm-chunks 3",
        "pipe, fp8, recomputation": f"{EP4} --moe-comm-alltoall pipe --moe-comm-codec fp8 --recompute-granularity "
        "selective --recompute-modules moe",
        "quota, blockwise, 1dh": f"{EP4} --moe-comm-alltoall 1dh --balance-policy quota --balance-overlap blockwise",
    }
    coded = {name for name, flags in others.items() if "--moe-comm-codec" in flags}
    for name, flags in others.items():
        cases[name] = Case(f"{flags} {SAME_KERNELS}", 4, 4, CODED if name in coded else FLOAT32)
    return cases


CASES: Mapping[str, Case] = {**_one_rank(), **_four_ranks()}
