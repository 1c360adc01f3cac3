"""--balance-certify: the rows of certified passes have memory of constant size, and nothing that is learned changes."""

import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from megatron_balance.flow.chunks import pipeline
from megatron_balance.flow.chunks.pipeline import ChunkTasks
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.training.loop import evaluate, train_step
from tests.distributed import runs
from tests.distributed.runs import Curve, curve_of, modules

CERTIFY = "--balance-certify 0.1"

EVEN = 128
"""Rows of each rank under even routing: 64 tokens have two experts each."""

ROOM = 141
"""1.1 times as many, rounded up."""

BURSTS = (
    "--expert-model-parallel-size 4 --moe-router-force-workload burst --global-batch-size 16 --balance-guest-slots 1"
)
"""Six iterations with uniform loads, then two with hot experts."""

EXACT = "--balance-policy quota --balance-load exact"
TWO_SCALES = "--balance-policy pro_prophet --balance-inner-policy quota"

ITERATIONS = 8


class Pass(NamedTuple):
    """One pass of the experts of a layer on this rank."""

    is_training: bool
    arrived: int
    """Rows that arrived."""
    received: int
    """Rows for which the receive buffer has memory."""
    computed: int
    """Rows for which the experts' inputs have memory."""


class Outcome(NamedTuple):
    curve: Curve
    certified: float
    """Mean of `LayerReport.certified`."""
    ratio: float
    """Mean of `LayerReport.ratio_after`."""
    passes: list[Pass]
    """Forward and backward passes."""


def memory(rows: torch.Tensor) -> int:
    """Return the number of rows in a tensor's memory, given a tensor of at least one row."""
    return rows.untyped_storage().nbytes() // rows[0].nbytes if len(rows) else 0


def trained(flags: str, iterations: int = ITERATIONS, evaluates: bool = False) -> Outcome:
    """Train, with NaN in all undefined rows that experts receive and compute."""
    run = runs.build(flags)
    passes: list[Pass] = []
    computed: list[int] = []

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def compute(tasks: ChunkTasks, chunk: int, rows: torch.Tensor) -> torch.Tensor:
            arrived = tasks.route.arriving_C[chunk]
            received = memory(rows)
            rows[arrived:] = torch.nan
            results = original(tasks, chunk, rows)
            assert len(results) == arrived and (not arrived or memory(results) == len(rows))
            training = not isinstance(tasks, pipeline._Forward) or tasks.experts.training
            passes.append(Pass(training, arrived, received, computed.pop()))
            return results

        return compute

    def spoil(experts: GroupedExperts, inputs: tuple[torch.Tensor, ...]) -> None:
        rows, sizes, probs, *_ = inputs
        assert len(probs) == len(rows) == memory(rows)
        for tensor in (rows, probs):
            tensor.data[int(sizes.sum()) :] = torch.nan
        computed.append(len(rows))

    backward = pipeline.ExpertGraph.backward

    def spoiled_backward(graph: pipeline.ExpertGraph, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        computed.append(memory(gradient))
        assert gradient.shape == graph.rows_RH.shape
        gradient[~graph.rows_RH.isfinite().all(1)] = torch.nan
        return backward(graph, gradient)

    for experts in modules(run, ".experts"):
        experts.register_forward_pre_hook(spoil)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline.ExpertGraph, "backward", spoiled_backward)
        for tasks in (pipeline._Forward, pipeline._Backward):
            patch.setattr(tasks, "compute", watched(tasks.compute))
        reports = []
        for _ in range(iterations):
            reports.append(train_step(run))
            if evaluates:
                evaluate(run, run.data.valid)
    layers = [layer for report in reports for layer in report.balance.values()]
    certified = statistics.fmean(layer.certified for layer in layers)
    ratio = statistics.fmean(layer.ratio_after for layer in layers)
    return Outcome(curve_of(reports), certified, ratio, passes)


@pytest.mark.parametrize(
    ("flags", "evens_out"),
    [
        # The built-in profile has slow links
        pytest.param(f"{EXACT} --balance-profile builtin --eval-iters 1", False, marks=pytest.mark.slow),
        (
            f"{TWO_SCALES} --balance-overlap blockwise --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1 --swiglu --disable-bias-linear",
            True,
        ),
    ],
    ids=["exact", "two scales, recomputed"],
)
def test_certified_passes_have_constant_memory_and_change_nothing(ranks, profiles, flags: str, evens_out: bool) -> None:
    flags = f"--balance-profile {profiles[4]} {flags}"
    evaluates = "--eval-iters" in flags
    plain = ranks(4).run(trained, f"{BURSTS} {flags}", ITERATIONS, evaluates)
    outcomes = ranks(4).run(trained, f"{BURSTS} {flags} {CERTIFY}", ITERATIONS, evaluates)
    assert outcomes[0].curve == plain[0].curve
    for outcome, without in zip(outcomes, plain, strict=True):
        assert [one[:2] for one in outcome.passes] == [one[:2] for one in without.passes], "no row is dropped"
        assert all(one.arrived == one.received == one.computed for one in without.passes)
    # All ranks saw the same passes in the same order
    counts = Counter[bool]()
    busiest = []
    for same in zip(*(outcome.passes for outcome in outcomes), strict=True):
        most = max(one.arrived for one in same)
        is_certified = same[0].is_training and most <= ROOM
        if same[0].is_training:
            counts[is_certified] += 1
            busiest.append(most)
        for one in same:
            size = ROOM if is_certified else one.arrived
            assert (one.received, one.computed) == (size, size)
    assert counts[True] > 0 and (counts[False] == 0) == evens_out
    assert outcomes[0].certified == counts[True] / counts.total()
    # Loads in reports are not whole numbers
    assert outcomes[0].ratio == pytest.approx(statistics.fmean(busiest) / EVEN, rel=1e-3)
