"""A torch profile has a span for each step of an MoE layer, of the balancer and of the optimizer."""

from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from megatron_balance.training.loop import train_step
from tests.distributed import runs
from tests.distributed.wandering import wandering

LAYER = {"route", "plan", "dispatch", "experts", "combine"}
BACKWARD = {"combine backward", "experts backward", "dispatch backward"}
BALANCER = {"Plan", "Trans", "Agg", "Transfer"}

ONE_LAYER = "--expert-model-parallel-size 2 --num-layers 1"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def spans_of(flags: str, iterations: int = 1) -> tuple[int, dict[str, int]]:
    """Return the microbatches per iteration, and the number of spans by name in `iterations` after the first."""
    run = runs.build(flags)
    train_step(run)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(iterations):
            train_step(run)
    names = {*LAYER, *BACKWARD, *BALANCER, "optimizer"}
    return run.batches.get(), {event.key: event.count for event in profiler.key_averages() if event.key in names}


@pytest.mark.parametrize(
    ("flags", "forward_passes", "chunks", "backward"),
    [
        ("", 1, 1, BACKWARD),
        ("--moe-token-dispatcher-type allgather", 1, 1, set()),
        (f"--moe-comm-chunks 3 {RECOMPUTED}", 2, 3, BACKWARD),
    ],
    ids=["all-to-all", "all-gather", "chunks and recomputation"],
)
def test_spans_without_a_policy(ranks, flags: str, forward_passes: int, chunks: int, backward: set[str]) -> None:
    for microbatches, spans in ranks(2).run(spans_of, f"{ONE_LAYER} {flags}"):
        assert {*spans} == {*LAYER, *backward, "optimizer"}
        passes = forward_passes * microbatches
        counts = {"route": passes, "plan": passes, "experts": chunks * passes, "optimizer": 1}
        assert counts.items() <= spans.items()


@pytest.mark.parametrize("overlap", ["none", "blockwise"])
def test_spans_with_a_policy(ranks, overlap: str) -> None:
    policy = f"--balance-policy top2 --balance-profile builtin --balance-overlap {overlap}"
    for _, spans in ranks(2).run(spans_of, f"{ONE_LAYER} {policy}"):
        assert {*spans} == {*LAYER, *BACKWARD, "Plan", "Trans", "Agg", "optimizer"}


def test_spans_of_experts_that_change_their_owners(ranks, tmp_path: Path) -> None:
    for _, spans in ranks(2).run(spans_of, f"{wandering(2, tmp_path)} --num-layers 1", 4):
        assert {*spans} == {*LAYER, *BACKWARD, *BALANCER, "optimizer"}
