"""The runtime of schedules: starts and waits, the loads that it plans for, and when plans take effect."""

import copy
import dataclasses
import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_balance.device.host_memory import Reading
from megatron_balance.observe.balance import evenness
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.manager import INVALID, Decision
from megatron_balance.timeline.actions import Action, Operation
from megatron_balance.timeline.planner import Plan, Planner
from tests.unit.balancers import (
    COST,
    EXPERTS,
    LAYERS,
    MICROBATCHES,
    OWNERS,
    RANK,
    RANKS,
    Group,
    Hottest,
    World,
    build,
    grouped,
    hottest,
    loads,
    total,
)
from tests.unit.exact_modes import EXACT

MODES = {
    "blocking": {"overlap": "none"},
    "blockwise": {"overlap": "blockwise"},
    "late": {"overlap": "blockwise", "late": True},
}


def expected_journal(world: World) -> list[tuple]:
    """Return the schedule's entries for the latest iteration, with the rounds of every Trans and Agg."""
    found = []

    def noted(action: Action, *kind: str) -> list[tuple]:
        if action.operation is Operation.PLAN:
            # A plan for the exact load is made at once
            return [] if kind and action.microbatch is not None else [(*kind, "PLAN", action.block)]
        state = copy.copy(world.balancer.layers[action.block])
        assert state.last is not None
        state.manager = copy.copy(state.manager)
        state.manager.placement = state.last.placements[action.microbatch or 0]
        rounds = state.rounds.of(action).rounds
        name = str(action.operation).removeprefix("B")
        return [(*kind, name, action.block, rounds)] if rounds else []

    for step in world.balancer.schedule(MICROBATCHES):
        started = step.planning + step.communication
        # Plans are concluded together, after Trans and Agg
        waits = sorted(step.waits, key=lambda action: action.operation is Operation.PLAN)
        for action in waits:
            found += noted(action, "waited") if action not in started else []
        for action in started:
            found += noted(action)
        for action in waits:
            found += noted(action, "waited") if action in started else []
        found.append(("computes", step.computation))
    return found


def told(entry: tuple) -> tuple:
    """Return the part of a journal entry that the schedule decides. Trans and Agg without rounds do nothing."""
    if entry[0] == "waited":
        return ("waited", *told(entry[1:]))
    if entry[0] in ("TRANS", "AGG"):
        return (entry[0], entry[1], entry[2].rounds)
    return entry[:2]


@pytest.mark.parametrize("mode", MODES | EXACT)
def test_everything_is_started_and_waited_for_where_the_schedule_says(monkeypatch, mode: str) -> None:
    world = build(monkeypatch, **(MODES | EXACT)[mode])
    for iteration in (1, 2, 3):
        world.journal.clear()
        world.iterate(iteration, loads(iteration))
        found = [told(entry) for entry in world.journal]
        found = [entry for entry in found if entry[-1] != ()]
        assert found == expected_journal(world)
    sent = {entry[:2] for entry in found if entry[0] in ("TRANS", "AGG")}
    assert sent == {(operation, layer) for operation in ("TRANS", "AGG") for layer in LAYERS}
    if mode == "blockwise":
        parts = [entry for entry in found if entry[:2] == ("TRANS", 5)]
        assert len(parts) == 2 and len(parts[0][2]) != len(parts[1][2]), "both parts have rounds, and not as many"


@pytest.mark.parametrize("slow", [False, True], ids=["quick", "slow"])
@pytest.mark.parametrize("mode", MODES)
def test_a_plan_is_in_force_from_the_iteration_on_that_it_is_for(monkeypatch, mode: str, slow: bool) -> None:
    """This holds even if every plan takes longer than an iteration."""
    seconds, iterations = (0.02, 3) if slow else (0.0, 5)
    waits = threading.Event()
    deadline = Planner.deadline

    class Policy(Hottest):
        def plan(self, *arguments) -> Placement:
            if slow:
                # However slow the main thread is, it waits for the plan
                assert waits.wait(60)
                time.sleep(seconds)
            return super().plan(*arguments)

    def waiting(planner: Planner) -> float:
        waits.set()
        return deadline(planner)

    monkeypatch.setattr(Planner, "deadline", waiting)
    world = build(monkeypatch, **MODES[mode], threads=slow, policy=Policy)
    for iteration in range(1, iterations + 1):
        world.journal.clear()
        waits.clear()
        used = world.iterate(iteration, loads(iteration))
        for layer in LAYERS:
            if not slow:
                ((counts_BDE, _, microbatches),) = world.entries("PLAN", layer)
                assert np.array_equal(counts_BDE, grouped(loads(iteration), layer))
                assert microbatches == MICROBATCHES
            placement = hottest(grouped(loads(iteration - 1), layer)) if iteration > 1 else OWNERS
            assert used[layer] == [placement.trimmed] * MICROBATCHES
            assert world.balancer.loads()[layer][1] == placement
            sent = [entry for kind in ("TRANS", "AGG") for entry in world.entries(kind, layer)]
            assert all(carried == placement for _, carried in sent)
            report = world.balancer.report()[layer]
            assert report.hosts_added == placement.added_hosts == (2 if iteration > 1 else 0)
            assert report.plan_seconds >= seconds
        if slow:
            waited = sum(report.plan_wait_seconds for report in world.balancer.report().values())
            assert waited > seconds


def test_plans_come_at_intervals(monkeypatch) -> None:
    world = build(monkeypatch, interval=3)
    for iteration in range(1, 8):
        used = world.iterate(iteration, loads(iteration))
        planned = (iteration - 2) // 3 * 3 + 1
        for layer in LAYERS:
            placement = hottest(total(loads(planned), layer)) if iteration > 1 else OWNERS
            assert used[layer] == [placement.trimmed] * MICROBATCHES


@pytest.mark.parametrize("mode", MODES)
def test_all_microbatches_are_observed_and_reported(monkeypatch, mode: str) -> None:
    """This holds even if their number differs between iterations."""
    world = build(monkeypatch, **MODES[mode])
    for iteration, world.microbatches in enumerate((5, 7, 4), 1):
        load = loads(iteration, world.microbatches)
        world.iterate(iteration, load)
        for layer in LAYERS:
            state = world.balancer.layers[layer]
            counts_DE = total(load, layer)
            assert np.array_equal(state.manager.history.latest, counts_DE)
            reported_DE, placement = world.balancer.loads()[layer]
            assert np.array_equal(reported_DE, counts_DE)
            report = world.balancer.report()[layer]
            cost = dataclasses.replace(COST, microbatches=world.microbatches)
            counts_BDE = grouped(load, layer)
            assert report.predicted_seconds == cost.layer_seconds(counts_BDE, placement)
            tokens = [cost.traffic(counts_BDE, one).sum(1) for one in (OWNERS, placement)]
            assert (report.ratio_before, report.ratio_after, report.rb) == evenness(*tokens)


@pytest.mark.parametrize("mode", MODES)
def test_predictions_are_compared_with_the_iteration_that_they_were_for(monkeypatch, mode: str) -> None:
    world = build(monkeypatch, **MODES[mode])
    errors = []
    for iteration in (1, 2, 3):
        world.iterate(iteration, loads(iteration))
        errors.append({layer: report.prediction_error for layer, report in world.balancer.report().items()})
    for iteration, layer in ((iteration, layer) for iteration in (2, 3) for layer in LAYERS):
        load = loads(iteration)
        expected_DE = total(loads(iteration - 1), layer)
        wrong = np.abs(expected_DE - total(load, layer)).sum() / (2 * total(load, layer).sum())
        assert errors[iteration - 1][layer] == wrong > 0


@pytest.mark.parametrize("mode", MODES)
def test_replicas_with_one_placement_plan_for_their_mean(monkeypatch, mode: str) -> None:
    """Half a token is rounded up, and all replicas compute the same mean."""
    replicas = [{1: loads(1), 2: loads(2)}, {1: loads(11), 2: loads(12)}]
    seen = []
    for replica in (0, 1):
        own = replicas[replica]
        other = replicas[1 - replica]
        calls: list[int] = []

        def contribute(rank: int, counts_BDE: torch.Tensor, replica=replica, own=own, other=other, calls=calls):
            if counts_BDE.dtype == torch.uint8:
                return counts_BDE
            (iteration, layer) = next(
                (iteration, layer)
                for iteration, load in own.items()
                for layer in LAYERS
                if np.array_equal(load[layer], counts_BDE)
            )
            calls.append(layer)
            same = rank // RANKS == replica
            return torch.from_numpy(np.stack((own if same else other)[iteration][layer]))

        stage = Group(2 * RANKS, replica * RANKS + RANK, contribute)
        world = build(monkeypatch, **MODES[mode], mover=SimpleNamespace(group=stage))
        for iteration in (1, 2):
            world.iterate(iteration, own[iteration])
        assert set(calls) == set(LAYERS)
        seen.append({layer: [entry[0] for entry in world.entries("PLAN", layer)] for layer in LAYERS})
    for layer in LAYERS:
        for iteration in (1, 2):
            both_BDE = sum(np.stack(replica[iteration][layer]) for replica in replicas)
            assert (both_BDE % 2).any(), "some means are halves"
            mean = {layer: list((both_BDE + 1) // 2)}
            for found in seen:
                assert np.array_equal(found[layer][iteration - 1], grouped(mean, layer))


def test_without_ownership_each_replica_plans_for_itself(monkeypatch) -> None:
    world = build(monkeypatch)
    world.group.others = lambda rank, own: own if own.dtype == torch.uint8 else own + 1
    world.iterate(1, loads(1))
    for layer in LAYERS:
        assert np.array_equal(world.entries("PLAN", layer)[0][0], grouped(loads(1), layer))


class Fails(Hottest):
    """Returns no valid plan for layer 5 in iteration 2."""

    problem = "raises"

    def plan(self, counts_BDE, current, cost):
        planned = super().plan(counts_BDE, current, cost)
        if self.number == 5 and np.array_equal(counts_BDE, grouped(loads(2), 5)):
            if self.problem == "raises":
                raise ZeroDivisionError("no tokens")
            return OWNERS.trimmed
        return planned


class Returns(Fails):
    problem = "returns"


def change_layer_5(world: World, digests: dict[int, int]) -> None:
    """Let other ranks have digests of these bytes for layer 5 in iteration 2."""

    def others(rank: int, own: torch.Tensor) -> torch.Tensor:
        if rank in digests and world.balancer.layers[5].manager.iterations == 2:
            own.view(-1, 16)[LAYERS.index(5)] = digests[rank]
        return own

    world.group.others = others


DIFFERS = "the policy plans differently on different ranks"
FAILURES = {
    "raises-here": (Fails, {0: 55, 2: 55}, 1, "the policy raised ZeroDivisionError: no tokens"),
    "invalid-here": (Returns, {0: 55, 2: 55}, 1, "the policy changed owners or guest slots"),
    "fails-on-a-lower-rank-too": (Fails, {2: 55}, 1, None),
    "fails-elsewhere": (Hottest, {2: INVALID[0]}, 1, None),
    "fails-elsewhere-than-on-rank-0": (Hottest, {2: INVALID[0]}, 0, None),
    "differs-from-rank-0": (Hottest, {2: 77}, 0, DIFFERS),
    "differs": (Hottest, {2: 77}, 1, None),
}
"""The policy, the bytes of other ranks' digests, this rank's number, and its log message."""


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("mode", MODES)
def test_a_plan_that_is_not_everybodys_leaves_the_placement(monkeypatch, caplog, mode: str, failure: str) -> None:
    policy, digests, rank, said = FAILURES[failure]
    world = build(monkeypatch, **MODES[mode], policy=policy)
    world.group.rank_ = rank
    change_layer_5(world, digests)
    for iteration in (1, 2, 3, 4):
        used = world.iterate(iteration, loads(iteration))
        for layer in LAYERS:
            planned = iteration - 1 if (layer, iteration) != (5, 3) else 1
            placement = hottest(total(loads(planned), layer)) if planned else OWNERS
            assert used[layer] == [placement.trimmed] * MICROBATCHES
            assert all(entry[1] == placement for entry in world.entries("TRANS", layer)[-1:])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (said is not None)
    for line in lines:
        assert line.startswith(f"layer 5: {said}") and line.endswith("its last placement stays (not said again)")


def test_guests_get_their_weights_anew_for_an_evaluation_after_a_step(monkeypatch) -> None:
    world = build(monkeypatch)
    counts_DE = torch.ones(RANKS, EXPERTS, dtype=torch.int64)
    for iteration in (1, 2, 3):
        world.iterate(iteration, loads(iteration))
        world.journal.clear()
        for _ in range(2):
            for layer, state in world.balancer.layers.items():
                assert world.balancer.host(layer, Reading(counts_DE.clone), training=False) == state.placement.trimmed
        # Sent once for all passes, and as a whole
        sent = [entry for entry in world.journal if entry[0] != "waited"]
        assert sent == [
            ("TRANS", layer, COST.transport.plan(state.placement), state.placement)
            for layer, state in world.balancer.layers.items()
        ]
        for layer in LAYERS:
            assert np.array_equal(world.balancer.loads()[layer][0], total(loads(iteration), layer))
    used = world.iterate(4, loads(4))
    assert {layer: used[layer][0] for layer in LAYERS} == {
        layer: hottest(total(loads(3), layer)).trimmed for layer in LAYERS
    }


def test_a_placement_adopted_after_an_evaluation_gets_its_weights(monkeypatch) -> None:
    """The fault search evaluates between the end of an iteration and a Transfer of its experts."""
    world = build(monkeypatch)
    world.iterate(1, loads(1))
    layer = LAYERS[0]
    counts_DE = torch.ones(RANKS, EXPERTS, dtype=torch.int64)
    state = world.balancer.layers[layer]
    placement = hottest(loads(7)[layer][0])
    world.balancer.host(layer, Reading(counts_DE.clone), training=False)
    assert placement != state.placement
    decision = Decision(loads(7)[layer][0][None], placement)
    world.balancer._adopt(layer, state, Plan(decision, COST.sending(placement), 0.0, 0.0))
    world.journal.clear()
    assert world.balancer.host(layer, Reading(counts_DE.clone), training=False) == placement.trimmed
    assert ("TRANS", layer, COST.transport.plan(placement), placement) in world.journal


@pytest.mark.parametrize("mode", MODES)
def test_layers_are_told_of_once_all_their_gradients_are_together(monkeypatch, mode: str) -> None:
    world = build(monkeypatch, **MODES[mode])
    world.balancer.aggregated = lambda number: world.journal.append(("told", number))
    for iteration in (1, 2):
        world.journal.clear()
        world.iterate(iteration, loads(iteration))
        told_of = [entry[1] for entry in world.journal if entry[0] == "told"]
        assert sorted(told_of) == LAYERS
        for layer in LAYERS:
            aggregated = [place for place, entry in enumerate(world.journal) if entry[:3] == ("waited", "AGG", layer)]
            assert all(place < world.journal.index(("told", layer)) for place in aggregated)
        assert world.journal.index(("told", told_of[-1])) < world.journal.index(
            ("computes", Action(0, Operation.REDUCE))
        )


def test_a_model_that_computes_in_another_order_is_noticed(monkeypatch) -> None:
    world = build(monkeypatch)
    world.balancer.begin_iteration(1)
    with pytest.raises(AssertionError, match=r"the model computes j:L4 FNEC m0 where its schedule has "):
        world.balancer.enter(4, Operation.FNEC)


@pytest.mark.parametrize("predictor", ["last", "ema", "linear"])
@pytest.mark.parametrize("saved", [0, 1, 4])
def test_a_restored_balancer_goes_on_as_if_nothing_had_been(monkeypatch, predictor: str, saved: int) -> None:
    one, fresh = (build(monkeypatch, predictor=predictor, interval=3) for _ in range(2))
    for iteration in range(1, saved + 1):
        one.iterate(iteration, loads(iteration))
    state = json.loads(json.dumps(one.balancer.state()))
    if saved == 1:
        # Earlier iterations of the fresh balancer are forgotten
        fresh.iterate(1, loads(77))
    fresh.balancer.restore(state)
    assert fresh.balancer.state() == one.balancer.state()
    for layer in LAYERS:
        assert fresh.balancer.layers[layer].slots.home == [OWNERS.experts_of(RANK)]
    counts_DE = torch.ones(RANKS, EXPERTS, dtype=torch.int64)
    for iteration in range(saved + 1, saved + 6):
        both = []
        for world in (one, fresh):
            world.journal.clear()
            world.balancer.host(LAYERS[-1], Reading(counts_DE.clone), training=False)
            used = world.iterate(iteration, loads(iteration))
            both.append((used, [comparable(entry) for entry in world.journal], world.balancer.state()))
        assert both[0] == both[1]
    assert one.balancer.layers[9].manager.held


def comparable(entry: tuple) -> tuple:
    return tuple(part.tolist() if isinstance(part, np.ndarray) else part for part in entry)
