"""Blockwise scheduling: late ranks do not change the result, and execution follows the schedule exactly."""

import random
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_balance.observe.trace import Timeline, TraceEvent
from megatron_balance.timeline.actions import Action, Operation, Schedule, Step
from megatron_balance.training.loop import evaluate, train_step
from megatron_balance.training.run import Run
from tests.distributed import runs
from tests.distributed.policies import TOLERANCE, with_policy
from tests.distributed.runs import Curve, deviation
from timeline_picture import load_timeline

EP4 = "--expert-model-parallel-size 4"
EP2 = "--expert-model-parallel-size 2"
MANY = 100
ITERATIONS = 3


def with_delays(seed: int, run: Run) -> None:
    """Delay every rank independently: before computations, and before Trans and Agg."""
    generator = random.Random(1000 * seed + dist.get_rank())
    balancer = run.balancer

    def late(function: Callable, often: float) -> Callable:
        def delayed(*args):
            if generator.random() < often:
                time.sleep(generator.expovariate(1 / 2e-3))
            return function(*args)

        return delayed

    balancer.enter = late(balancer.enter, 0.1)
    balancer.trans_agg.trans = late(balancer.trans_agg.trans, 0.5)
    balancer.trans_agg.agg = late(balancer.trans_agg.agg, 0.5)


@pytest.mark.slow
def test_ranks_that_are_late_now_and_then(ranks, curve_of, profiles) -> None:
    """Two patterns of delays give the same result while hosts keep changing."""
    flags = f"{EP4} --moe-router-force-workload rotating_hotspot --seq-length 16"
    flags = with_policy(flags, "pro_prophet", "blockwise", profiles)
    one, other = (ranks(4).run(runs.train_hosts, flags, MANY, partial(with_delays, seed))[0] for seed in (1, 2))
    curve, hosts = one
    assert sum(added > 0 for added in hosts) >= 0.9 * MANY
    # Sums have a fixed order, so curves agree bit for bit
    assert other == one
    assert curve_of(flags, 20) == curve[:20]


def edited(edit: Callable[[list[Step]], None]) -> Callable[[Run], None]:
    """Return a mutation that changes a run's schedules after their validation."""

    def mutate(run: Run) -> None:
        original = run.balancer.schedule

        def schedule(microbatches: int) -> Schedule:
            steps = list(original(microbatches))
            edit(steps)
            return tuple(steps)

        run.balancer.schedule = schedule

    return mutate


def move(steps: list[Step], column: str, action: Action, target: Action) -> None:
    for number, step in enumerate(steps):
        actions = list(getattr(step, column))
        if action in actions:
            actions.remove(action)
        if step.computation == target:
            actions.append(action)
        steps[number] = step._replace(**{column: tuple(actions)})


def agg_before_the_gradients_are_there(run: Run) -> None:
    def edit(steps: list[Step]) -> None:
        move(steps, "communication", Action(2, Operation.AGG, 1, 2), Action(2, Operation.BNEC, microbatch=0))
        move(steps, "communication", Action(2, Operation.AGG, 2, 2), Action(2, Operation.BNEC, microbatch=0))

    edited(edit)(run)


def agg_after_the_gradients_are_used(run: Run) -> None:
    def edit(steps: list[Step]) -> None:
        for column in ("communication", "waits"):
            move(steps, column, Action(1, Operation.AGG), Action(0, Operation.STEP))

    edited(edit)(run)


def trans_after_the_experts(run: Run) -> None:
    def edit(steps: list[Step]) -> None:
        for column in ("communication", "waits"):
            move(steps, column, Action(1, Operation.TRANS), Action(1, Operation.A2A, 2, 4, 0))

    edited(edit)(run)


@pytest.mark.parametrize(
    "mistake", [agg_before_the_gradients_are_there, agg_after_the_gradients_are_used, trans_after_the_experts]
)
def test_schedules_matter(ranks, curve_of, profiles, mistake: Callable[[Run], None]) -> None:
    plain = f"{EP2} --moe-router-force-workload hot_experts"
    flags = with_policy(plain, "top2", "blockwise", profiles)
    curve = ranks(2).run(runs.train_curve, flags, ITERATIONS, mistake)[0]
    assert deviation(curve, curve_of(plain, ITERATIONS, 2)) > 10 * TOLERANCE


def a_block_too_many(run: Run) -> None:
    edited(lambda steps: steps.insert(3, steps[2]))(run)


def test_a_model_that_computes_otherwise_is_noticed(ranks, profiles) -> None:
    flags = with_policy(f"{EP2} --moe-router-force-workload hot_experts", "top2", "blockwise", profiles)
    with pytest.raises(Exception, match=r"the model computes .* where its schedule has "):
        ranks(2).run(runs.train_curve, flags, 1, a_block_too_many)


def recorded(flags: str, directory: Path) -> tuple[Curve, list[dict[str, float]], list[str]]:
    """Train two iterations with an evaluation between them; return curve, logged Trans and Agg, and schedule order."""
    run = runs.build(flags)
    run.balancer.timeline = Timeline(directory, dist.get_rank())
    reports = [train_step(run)]
    evaluate(run, run.data.valid)
    reports.append(train_step(run))
    run.balancer.timeline.flush()
    order = [step.computation.name for step in run.balancer.schedule(run.batches.get())]
    learned = [(report.losses.get("lm loss"), report.grad_norm) for report in reports]
    return learned, [layers_of(report.balance) for report in reports], order


def layers_of(balance: dict) -> dict[str, float]:
    names = ("trans_bytes", "agg_bytes", "plan_wait_seconds", "trans_wait_seconds", "agg_wait_seconds")
    return {name: sum(getattr(report, name) for report in balance.values()) for name in names}


@pytest.mark.parametrize("overlap", [pytest.param("none", marks=pytest.mark.slow), "blockwise"])
def test_the_timeline_shows_what_the_log_tells(ranks, profiles, tmp_path: Path, overlap: str) -> None:
    flags = f"{EP4} --moe-router-force-workload hot_experts --eval-interval 1 --eval-iters 1 --global-batch-size 16"
    flags = f"{with_policy(flags, 'top2', 'predicted', profiles)} --balance-overlap {overlap}"
    outcomes = ranks(4).run(recorded, flags, tmp_path)
    traces = [load_timeline(tmp_path / f"rank{rank:05d}.json") for rank in range(4)]
    for (_, told, order), trace in zip(outcomes, traces, strict=True):
        for iteration in (1, 2):
            rows = {stream: sorted(spans(trace, iteration, stream), key=lambda span: span.start_us)
                    for stream in ("computation", "waits", "communication")}  # fmt: skip
            # The last computation ends with the iteration, after the last mark
            assert [span.name for span in rows["computation"]] == order[:-1]
            for row in rows.values():
                assert all(before.end_us <= after.start_us for before, after in pairwise(row))
            assert all(span.issued_us <= span.start_us for span in rows["communication"])
            assert bool(rows["communication"]) == (told[iteration - 1]["trans_bytes"] > 0)
    for iteration in (1, 2):
        sent = [span for trace in traces for span in spans(trace, iteration, "communication")]
        for name, operation in (("trans_bytes", "TRANS"), ("agg_bytes", "AGG")):
            moved = sum(span.num_bytes for span in sent if operation in span.name)
            assert moved == pytest.approx(outcomes[0][1][iteration - 1][name], abs=4 * len(sent))
        waits = [span for trace in traces for span in spans(trace, iteration, "waits")]
        for name, operation in (("plan", "PLAN"), ("trans", "TRANS"), ("agg", "AGG")):
            waited = sum(span.end_us - span.start_us for span in waits if operation in span.name) / 4e6
            assert waited == pytest.approx(outcomes[0][1][iteration - 1][f"{name}_wait_seconds"], abs=1e-5)
    assert outcomes[0][1][1]["trans_bytes"] > 0


def spans(trace: list[TraceEvent], iteration: int, stream: str) -> list[TraceEvent]:
    return [span for span in trace if (span.iteration, span.stream) == (iteration, stream)]
