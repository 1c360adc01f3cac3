"""Training on one GPU, with one rank over NCCL: tests the CUDA kernels' results, which no CPU test can."""

import os
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_balance.job.layout import destroy_groups
from tests.distributed.runs import Curve, deviation, train_curve
from tests.harness import forget_auxiliary_losses

pytestmark = pytest.mark.gpu

MODEL = (
    "--hidden-size 128 --moe-ffn-hidden-size 256 --swiglu --disable-bias-linear --seq-length 64 --micro-batch-size 4 "
    "--distributed-backend nccl"
)
FLOAT32 = ""
BFLOAT16 = "--bf16"

SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""What docs/checkpoints.md asks for; libraries read it when they are first used."""

TOLERANCE = {FLOAT32: 1e-5, BFLOAT16: 1e-2}
"""Relative, for every loss and gradient norm of 20 iterations; a layer with two experts exchanged is 1e-2 off."""

precisions = pytest.mark.parametrize("precision", TOLERANCE, ids=["float32", "bfloat16"])


@pytest.fixture(scope="module")
def train() -> Iterator[Callable[[str], Curve]]:
    """`train(flags)`: losses and gradient norms of a run."""

    def of(flags: str) -> Curve:
        destroy_groups()
        return train_curve(f"{MODEL} {flags}")

    with mock.patch.dict(os.environ, SAME_BITS):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        yield of
        forget_auxiliary_losses()
        destroy_groups()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ours(train: Callable[[str], Curve]) -> dict[str, Curve]:
    """Precision -> curve of a run with this package's layer."""
    return {precision: train(precision) for precision in TOLERANCE}


@precisions
def test_balanced_follows_megatron(train, ours: dict[str, Curve], precision: str) -> None:
    theirs = train(f"{precision} --moe-layer-impl megatron")
    assert deviation(ours[precision], theirs) <= TOLERANCE[precision]
    assert theirs[-1][0] < theirs[0][0] - 1


@precisions
def test_two_runs_are_equal_bit_for_bit(train, ours: dict[str, Curve], precision: str) -> None:
    assert train(precision) == ours[precision]


@precisions
def test_chunks_change_no_more_than_the_order_of_sums(train, ours: dict[str, Curve], precision: str) -> None:
    assert deviation(train(f"{precision} --moe-comm-chunks 4"), ours[precision]) <= TOLERANCE[precision]
