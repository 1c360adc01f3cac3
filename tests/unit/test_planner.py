"""A planner does not wait forever for a policy, and if one rank gives up a policy, all do."""

import math
import threading
import time

import numpy as np
import pytest
import torch

from megatron_balance.planning.manager import GIVEN_UP, Manager
from megatron_balance.planning.predictor import Predictor
from megatron_balance.timeline import planner as planner_module
from megatron_balance.timeline.planner import Planner
from tests.unit.balancers import COST, LAYERS, OWNERS, Hottest, World, build, grouped, hottest, loads, total

AHEAD = {"blocking": {"overlap": "none"}, "blockwise": {"overlap": "blockwise"}}


STALLED = threading.Event()


class Stalls(Hottest):
    """Makes no plan for layer 5 from iteration 2 on."""

    def plan(self, counts_BDE, current, cost):
        if self.number == 5 and np.array_equal(counts_BDE, grouped(loads(2), 5)):
            STALLED.set()
            threading.Event().wait()
        return super().plan(counts_BDE, current, cost)


class PatientUntilAStall(Planner):
    """Planner whose time limit begins once a policy has stalled, because a busy machine may plan for long."""

    def result(self, asked, deadline):
        while not asked.plan.done() and not STALLED.is_set():
            time.sleep(0.01)
        return super().result(asked, deadline if STALLED.is_set() else math.inf)


def others_give_up(world: World) -> None:
    """Let rank 2 give up the plan for layer 5 in iteration 2."""

    def others(rank: int, own: torch.Tensor) -> torch.Tensor:
        if rank == 2 and world.balancer.layers[5].manager.iterations == 2:
            own.view(-1, 16)[LAYERS.index(5)] = torch.tensor(list(GIVEN_UP))
        return own

    world.group.others = others


@pytest.mark.parametrize("here", [True, False], ids=["here", "elsewhere"])
@pytest.mark.parametrize("mode", AHEAD)
def test_a_policy_that_is_given_up_on_any_rank_is_asked_no_more(monkeypatch, caplog, mode: str, here: bool) -> None:
    stopped: list[bool] = []
    STALLED.clear()
    planner = PatientUntilAStall(0.3, lambda: stopped.append(True), "mine:Policy")
    world = build(monkeypatch, **AHEAD[mode], policy=Stalls if here else Hottest, planner=planner)
    world.group.rank_ = 0
    if not here:
        others_give_up(world)
    history = []
    for iteration in (1, 2, 3, 4, 5):
        world.journal.clear()
        world.iterate(iteration, loads(iteration))
        assert iteration <= 2 or not [entry for entry in world.journal if entry[0] == "PLAN"]
        history.append([state.placement for state in world.balancer.layers.values()])
    assert history[0] == [hottest(total(loads(1), layer)) for layer in LAYERS]
    assert history[1] == history[2] == history[4]
    assert history[1][LAYERS.index(5)] == history[0][LAYERS.index(5)] != hottest(total(loads(2), 5))
    assert history[1][LAYERS.index(3)] == hottest(total(loads(2), 3))
    assert stopped == [True]
    said = (
        "layer 5: --balance-policy mine:Policy made no plan within 0.3 s, half of --distributed-timeout-minutes 0.01; "
        "all placements stay, and the policy is not asked again in this run"
    )
    assert [record.getMessage() for record in caplog.records] == ([said] if here else [])


def test_the_log_is_not_flooded_by_a_policy(monkeypatch, caplog) -> None:
    class Inventive(Hottest):
        def plan(self, counts_BDE, current, cost):
            raise type(f"\x1b[31mError{counts_BDE.sum()}", (Exception,), {})("x" * 1000)

    world = build(monkeypatch, policy=Inventive)
    world.group.rank_ = 0
    for iteration in range(1, 15):
        world.iterate(iteration, loads(iteration))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 10 * len(LAYERS)
    assert all(line.isprintable() and len(line) < 400 for line in lines)


def test_an_error_after_the_policy_is_told_to_all_ranks(monkeypatch, caplog) -> None:
    """An exception on one rank would let the others wait for its plan."""

    def fail(*_: object) -> None:
        raise ArithmeticError("no route")

    monkeypatch.setattr(planner_module, "prepare", fail)
    world = build(monkeypatch, policy=Hottest)
    world.group.rank_ = 0
    before = [state.placement for state in world.balancer.layers.values()]
    world.iterate(1, loads(1))
    assert [state.placement for state in world.balancer.layers.values()] == before
    said = "the policy made a plan that failed: ArithmeticError: no route; its last placement stays (not said again)"
    assert [record.getMessage() for record in caplog.records] == [f"layer {layer}: {said}" for layer in LAYERS]


def test_no_plan_is_made_in_a_forward_pass(monkeypatch) -> None:
    """The thread gets what was asked for in forward passes when the next computation of a backward pass begins."""
    planner = Planner()
    world = build(monkeypatch, overlap="blockwise", policy=Hottest, planner=planner)
    journal = world.journal
    begin = planner.begin

    def begun() -> None:
        journal.append(("BEGIN", list(planner._kept)))
        begin()

    monkeypatch.setattr(planner, "begin", begun)
    world.iterate(1, loads(1))
    kept = [entry[1] for entry in journal if entry[0] == "BEGIN"]
    assert sum(map(len, kept)) == len(LAYERS)
    for position, entry in enumerate(journal):
        if entry[0] == "BEGIN":
            following = next(entry[1] for entry in journal[position:] if entry[0] == "computes")
            assert not following.is_forward
    assert planner._kept == []


def test_all_that_is_needed_at_one_time_has_one_deadline() -> None:
    """Other ranks wait for all of this rank's plans until one deadline, instead of one deadline per plan."""
    first = threading.Lock()
    never = threading.Event()

    class Slow(Hottest):
        def plan(self, *arguments):
            if not first.acquire(blocking=False):
                never.wait()
            return super().plan(*arguments)

    manager = Manager(Slow(2, []), COST, Predictor("last"), OWNERS)
    planner = Planner(600.0)
    asked = [planner.ask(manager.question(total(loads(1), 3), 1)) for _ in range(4)]
    decisions = [planner.result(asked[0], planner.deadline()).decision]
    # A result that waited for its own 600 seconds would exceed the time limit of the test
    deadline = time.monotonic() + 0.3
    decisions += [planner.result(one, deadline).decision for one in asked[1:]]
    never.set()
    assert [decision.placement is None for decision in decisions] == [False, True, True, True]
    assert {decision.digest for decision in decisions[1:]} == {GIVEN_UP}


def test_a_planner_that_nobody_keeps_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    planner = Planner()
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "Plan"
    del planner
    thread.join(60)
    assert not thread.is_alive()
