"""What happens between the iterations of a run with a policy: evaluations, faults and reports."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_balance.observe.balance import LayerReport, mean_over_ranks
from megatron_balance.training.loop import evaluate, train_step
from megatron_balance.training.run import Run
from tests.distributed.runs import Curve, build, deviation, modules

TOLERANCE = 1e-5
"""Relative, for every loss and gradient norm."""

RANKS = 2
ITERATIONS = 5
EVALUATIONS = 3
WORKLOAD = "--expert-model-parallel-size 2 --moe-router-force-workload hot_experts"
EVALUATED = f"{WORKLOAD} --eval-interval 1 --eval-iters 2 --global-batch-size 8"
LOADS = ("predicted", pytest.param("exact", marks=pytest.mark.slow))


def with_top2(flags: str, load: str) -> str:
    return f"{flags} --balance-policy top2 --balance-load {load}"


def count_guests_tokens(run: Run) -> list[int]:
    """Return a list that collects the tokens of this rank's guest slots in each pass without gradients."""
    tokens: list[int] = []

    def count(experts: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not experts.training:
            tokens.append(int(inputs[1][len(experts.home_experts) :].sum()))

    for experts in modules(run, ".experts"):
        experts.register_forward_hook(count)
    return tokens


def keep_guests(run: Run) -> None:
    """A mistake: evaluation uses the guests of the training step, although the optimizer has stepped since."""
    for state in run.balancer.layers.values():
        state.fresh = state.placement.added_hosts > 0


def trained_and_evaluated(flags: str, before_evaluation: Callable[[Run], None] | None = None) -> tuple[Curve, ...]:
    """Return the training curve, and the losses of an evaluation after every iteration; check that guests evaluate."""
    run = build(flags)
    guests = count_guests_tokens(run)
    learned = []
    evaluated = []
    for _ in range(EVALUATIONS):
        report = train_step(run)
        learned.append((report.losses["lm loss"], report.grad_norm))
        if before_evaluation is not None:
            before_evaluation(run)
        del guests[:]
        evaluated.append(evaluate(run, run.data.valid)["lm loss"])
        tokens = torch.tensor(sum(guests))
        dist.all_reduce(tokens)
        assert (tokens > 0) == (run.balancer is not None), "guests evaluate if there are any"
    return learned, [(loss, loss) for loss in evaluated]


def trained(flags: str) -> Curve:
    run = build(flags)
    reports = [train_step(run) for _ in range(EVALUATIONS)]
    return [(report.losses["lm loss"], report.grad_norm) for report in reports]


@pytest.fixture(scope="module")
def plain(ranks) -> tuple[Curve, ...]:
    """Training curve and evaluation losses without a policy."""
    return ranks(RANKS).run(trained_and_evaluated, EVALUATED)[0]


@pytest.mark.parametrize("load", LOADS)
def test_guests_evaluate_as_owners_do(ranks, plain, load: str) -> None:
    learned, evaluated = ranks(RANKS).run(trained_and_evaluated, with_top2(EVALUATED, load))[0]
    assert deviation(evaluated, plain[1]) <= TOLERANCE
    assert deviation(learned, plain[0]) <= TOLERANCE
    # Evaluations do not affect training
    assert learned == ranks(RANKS).run(trained, with_top2(EVALUATED, load))[0]


def test_stale_guests_are_noticed(ranks, plain) -> None:
    _, evaluated = ranks(RANKS).run(trained_and_evaluated, with_top2(EVALUATED, "predicted"), keep_guests)[0]
    assert deviation(evaluated, plain[1]) > 10 * TOLERANCE


def last_row_of_experts(run: Run) -> Callable[[], None]:
    """Put NaN into the last row of the last layer's experts; return the function that undoes this."""

    def spoil(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        spoiled = torch.ones(len(output), 1)
        spoiled[-1] = float("nan")
        return output * spoiled

    return modules(run, ".experts")[-1].register_forward_hook(spoil).remove


def trained_with_a_fault(flags: str, leak: bool = False) -> dict[str, Any]:
    """Train two good iterations, one where a slot of each rank returns NaN, and two good ones."""
    run = build(flags)
    curve = []
    if leak:
        forget_to_empty(run)
    for iteration in range(ITERATIONS):
        repair = last_row_of_experts(run) if iteration == 2 else (lambda: None)
        report = train_step(run)
        repair()
        curve.append((report.losses["lm loss"], report.grad_norm))
        if iteration == 2:
            bad = report
            hosts = sum(layer.hosts_added for layer in report.balance.values())
    left = [] if run.balancer is None else [tensor.abs().max().item() for tensor in guests_of(run)]
    return {"fault": bad.fault, "skipped": bad.skipped, "hosts": hosts, "left": left, "curve": curve[:2] + curve[3:]}


def guests_of(run: Run) -> list[torch.Tensor]:
    """Return the gradients in all guest slots of this rank."""
    return [
        gradient
        for state in run.balancer.layers.values()
        for slot in range(state.placement.home_slots, state.placement.slots_per_rank)
        for gradient in state.slots.gradients_of(slot)
    ]


def forget_to_empty(run: Run) -> None:
    """A mistake: guests keep the gradients that they sent to their owners, into the next iteration."""
    agg = run.balancer.trans_agg.agg

    def keep(plan: Any, placement: Any, slots: Any) -> None:
        guests = range(placement.home_slots, placement.slots_per_rank)
        gradients = [gradient for slot in guests for gradient in slots.gradients_of(slot)]
        sent = [gradient.clone() for gradient in gradients]
        agg(plan, placement, slots)
        for gradient, again in zip(gradients, sent, strict=True):
            gradient.copy_(again)

    run.balancer.trans_agg.agg = keep


@pytest.mark.parametrize("load", LOADS)
def test_a_fault_leaves_nothing_behind(ranks, load: str) -> None:
    (plain, *_), balanced = (
        ranks(RANKS).run(trained_with_a_fault, flags) for flags in (WORKLOAD, with_top2(WORKLOAD, load))
    )
    assert plain["fault"] is not None and plain["skipped"]
    for outcome in balanced:
        assert outcome["skipped"] and outcome["hosts"] > 0
        named = re.findall(r"^  rank (\d): decoder\.layers\.1\.mlp\.experts, expert (\d) turns", outcome["fault"], re.M)
        assert [int(rank) for rank, _ in named] == [0, 1], outcome["fault"]
        assert any(int(expert) // 4 != int(rank) for rank, expert in named), "a guest is to fail"
        assert outcome["left"] and not any(outcome["left"])
        assert deviation(outcome["curve"], plain["curve"]) <= TOLERANCE


def test_gradients_that_leak_are_noticed(ranks) -> None:
    with_leak = ranks(RANKS).run(trained_with_a_fault, with_top2(WORKLOAD, "predicted"), True)
    assert all(outcome["curve"][2][1] is None for outcome in with_leak), "the iteration after the fault is bad as well"


def reports_of(rank: int) -> dict[int, LayerReport]:
    """Return a rank's reports: layer 2 is on both ranks, layer 1 on rank 0 only, layer 3 on none."""
    numbers = LayerReport(*(float(index) for index in range(len(LayerReport._fields))))
    return {1: numbers, 2: numbers} if rank == 0 else {2: LayerReport(*(value + 1 for value in numbers))}


def mean_reports(silent_rank: int | None) -> dict[int, LayerReport]:
    rank = dist.get_rank()
    return mean_over_ranks({} if rank == silent_rank else reports_of(rank), num_layers=3)


@pytest.mark.parametrize(("silent_rank", "layers"), [(None, {1: 0.0, 2: 0.5}), (1, {1: 0.0, 2: 0.0}), (0, {2: 1.0})])
def test_reports_are_means_over_the_ranks_that_have_the_layer(ranks, silent_rank, layers: dict[int, float]) -> None:
    expected = {
        layer: LayerReport(*(index + more for index in range(len(LayerReport._fields))))
        for layer, more in layers.items()
    }
    assert ranks(2).run(mean_reports, silent_rank) == [expected] * 2
