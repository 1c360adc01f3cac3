"""Experts that change owners: training does not change, and their optimizer state really moves."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_balance.training.loop import train_step
from megatron_balance.training.run import Run
from tests.distributed import checkpoints, runs
from tests.distributed.runs import Curve, deviation
from tests.distributed.wandering import wandering

TOLERANCE = 1e-5
"""Relative, for every loss, gradient norm, weight and moment."""

ITERATIONS = 8

LAYOUTS = {
    "EP4-sgd-momentum": (4, "--optimizer sgd --lr 1e-2"),
    "EP4-muon": (4, "--optimizer muon --muon-fp32-matmul-prec high --lr 1e-2 --disable-bias-linear"),
    "EP4-blockwise": (4, "--balance-overlap blockwise --global-batch-size 16"),
    "EP2xDP2-overlap": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --global-batch-size 16",
    ),
    "PP2xEP2": (2, "--pipeline-model-parallel-size 2 --global-batch-size 16"),
    "TP2xEP2": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 --disable-bias-linear",
    ),
}
"""Expert-parallel size and other flags."""

HALF = (2, "--bf16 --clip-grad 0 --use-distributed-optimizer")
"""Sharded optimizer state, main parameters and moments. Unclipped: the last bits of the gradient norm depend on the
owners, and clipping would change the rounding."""


@dataclass
class Trained:
    """What one rank observes in a run."""

    curve: Curve
    moved: list[float]
    """Experts that changed owners, in each iteration."""
    bytes: float
    """Bytes of Transfers, according to the reports."""
    sent: int
    """Bytes that this rank sent in Transfers."""
    homes: dict[int, tuple[int, ...]]
    """Layer -> the experts in this rank's home slots."""
    pieces: list[tuple[tuple[int, int, int], int, torch.Tensor]]
    """((layer, field, expert), first element, values) of all experts' weights and optimizer state on this rank."""


def train(flags: str, iterations: int) -> Trained:
    run = runs.build(flags)
    sent = []
    watch_transfers(run, sent)
    reports = [train_step(run) for _ in range(iterations)]
    moved = [sum(layer.experts_moved for layer in report.balance.values()) for report in reports]
    total = sum(layer.transfer_bytes for report in reports for layer in report.balance.values())
    return Trained(runs.curve_of(reports), moved, total, sum(sent), homes(run), pieces(run))


def watch_transfers(run: Run, sent: list[int]) -> None:
    mover = run.balancer.mover
    if mover is not None:
        transfer = mover.transfer

        def counting(*args: Any) -> Any:
            moved = transfer(*args)
            sent.append(moved.sent_bytes)
            return moved

        mover.transfer = counting


def homes(run: Run) -> dict[int, tuple[int, ...]]:
    return {number: state.slots.home_experts for number, state in run.balancer.layers.items()}


def pieces(run: Run) -> list[tuple[tuple[int, int, int], int, torch.Tensor]]:
    found = []
    for number, state in run.balancer.layers.items():
        for index, part in enumerate(state.fields()):
            for slot, expert in enumerate(state.slots.home_experts):
                start, stop = (element - slot * part.slot_size for element in part.kept)
                start = max(0, start)
                stop = min(part.slot_size, stop)
                if start < stop:
                    first = start + slot * part.slot_size - part.kept[0]
                    values = part.values[first : first + stop - start].clone()
                    found.append(((number, index, expert), start, values))
    return found


def assembled(outcomes: list[Trained]) -> dict[tuple[int, int, int], torch.Tensor]:
    """Return each expert's parameters and state, unsharded; check that replicas agree."""
    parts: dict[tuple, dict[int, torch.Tensor]] = defaultdict(dict)
    for outcome in outcomes:
        for key, start, values in outcome.pieces:
            other = parts[key].setdefault(start, values)
            if len(other) == len(values):
                assert torch.equal(other, values), f"replicas differ in {key}"
    return {key: torch.cat([found[start] for start in sorted(found)]) for key, found in parts.items()}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


def both(ranks, layout: tuple[int, str], profiles: Path) -> list[list[Trained]]:
    """Train a run whose experts change owners, and the same run with fixed owners."""
    size, flags = layout
    outcomes = [
        ranks(4).run(train, f"{wandering(size, profiles, kind)} {flags}", ITERATIONS) for kind in ("transfer", "fixed")
    ]
    moved = [sum(count > 0 for count in outcome[0].moved) for outcome in outcomes]
    assert moved[0] >= ITERATIONS // 3 and moved[1] == 0, moved
    return outcomes


def largest_difference(moving: list[Trained], fixed: list[Trained]) -> float:
    """Return the largest difference of weights, main parameters and moments, relative to each tensor's maximum."""
    left = assembled(moving)
    right = assembled(fixed)
    assert left.keys() == right.keys()
    return max(float((left[key] - right[key]).abs().max() / right[key].abs().max()) for key in left)


def fields_of(outcomes: list[Trained]) -> int:
    return len({key[1] for outcome in outcomes for key, *_ in outcome.pieces})


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_the_same(ranks, profiles, layout: str) -> None:
    moving, fixed = both(ranks, LAYOUTS[layout], profiles)
    assert deviation(moving[0].curve, fixed[0].curve) <= TOLERANCE
    _, flags = LAYOUTS[layout]
    assert fields_of(moving) == (2 if "--disable-bias" in flags else 4) * (3 if "--optimizer" not in flags else 2)
    assert largest_difference(moving, fixed) <= TOLERANCE


@pytest.mark.slow
def test_main_parameters_move_with_half_precision(ranks, profiles) -> None:
    moving, fixed = both(ranks, HALF, profiles)
    assert [loss for loss, _ in moving[0].curve] == [loss for loss, _ in fixed[0].curve]
    assert deviation(moving[0].curve, fixed[0].curve) <= TOLERANCE
    assert fields_of(moving) == 4 * 4, "weights, main parameters and two moments of two matrices and two biases"
    assert largest_difference(moving, fixed) == 0


def test_state_is_really_elsewhere(ranks, profiles) -> None:
    size = 4
    outcomes = ranks(4).run(train, wandering(size, profiles), ITERATIONS // 2)
    holders = {key: rank for rank, outcome in enumerate(outcomes) for key, *_ in outcome.pieces}
    moved = {key for key, rank in holders.items() if rank != key[2] // (8 // size)}
    # If an expert moved, all its parts did
    experts = {(layer, expert) for layer, _, expert in moved}
    assert experts and moved == {(layer, part, expert) for layer, expert in experts for part in range(12)}
    one = outcomes[0].homes[1][0]
    per_expert = sum(
        values.nbytes for (layer, _, expert), _, values in outcomes[0].pieces if (layer, expert) == (1, one)
    )
    assert outcomes[0].bytes == sum(outcomes[0].moved) * per_expert == sum(outcome.sent for outcome in outcomes)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_saved_after_a_move_goes_on_bitwise(ranks, profiles, tmp_path, size: int) -> None:
    flags = f"{wandering(size, profiles)} --use-distributed-optimizer"
    assert ranks(4).run(checkpoints.straight_against_resumed, flags, str(tmp_path), ITERATIONS) == [[]] * 4


def test_another_layout_finds_every_expert(ranks, profiles, tmp_path) -> None:
    """A checkpoint with moved owners has the same tensors by logical expert on other ranks without balancing."""
    there = str(tmp_path / "there")
    here = str(tmp_path / "here")
    ranks(4).run(checkpoints.losses_of, wandering(4, profiles), None, there, 5)
    # The same number of samples gives the same learning rates
    plain = "--expert-model-parallel-size 2 --global-batch-size 8"
    ranks(2).run(checkpoints.losses_of, plain, there, str(tmp_path / "on"), 1, here)
    count, unequal = ranks(1).run(checkpoints.unequal_tensors, there, here)[0]
    assert count and unequal == []
