"""The manager of one layer's placement: predictions, times of planning, refusals and checkpoints."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.manager import INVALID, REMEMBERED, LastPlan, Manager
from megatron_balance.planning.policies import load_policy
from megatron_balance.planning.policies.interface import owners_host
from megatron_balance.planning.predictor import METHODS, Predictor
from megatron_balance.profile.cluster_profile import builtin

RANKS = 4
EXPERTS = 8
SLOTS = 2
OWNERS = Placement.identity(EXPERTS, RANKS, SLOTS)
COST = CostModel(builtin(RANKS, RANKS, 1024, 2048), token_bytes=2048, param_bytes=8e6, grad_bytes=8e6)


class Own:
    """A policy that consists of one function of load, placement and cost."""

    def __init__(self, plan: Callable[[np.ndarray, Placement, CostModel], Any]) -> None:
        self.plan = plan


def manager(policy: Any = None, predictor: str = "last", interval: int = 1) -> Manager:
    return Manager(policy or load_policy("top2"), COST, Predictor(predictor), OWNERS, interval=interval)


def load(seed: int) -> np.ndarray:
    """Return tokens [1, D, E]: many experts have none, and a few have most."""
    return (np.random.default_rng(seed).lognormal(0, 3, (1, RANKS, EXPERTS)) * 10).astype(np.int64)


def listed(loads_BDE: np.ndarray | None) -> list:
    assert loads_BDE is not None
    return loads_BDE.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_it_expects_what_the_predictor_predicts(method: str) -> None:
    one = manager(predictor=method)
    predictor = Predictor(method)
    history = predictor.observe(one.history, load(1))
    assert one.expected_BDE is None
    assert one.observe(load(1)) is None
    assert listed(one.expected_BDE) == listed(predictor.predict(history))
    one.observe(load(2))
    history = predictor.observe(history, load(2))
    assert listed(one.expected_BDE) == listed(predictor.predict(history))
    assert one.iterations == 2


def test_it_tells_how_wrong_the_expectation_was() -> None:
    one = manager()
    counts_BDE = np.full((1, RANKS, EXPERTS), 4)
    one.observe(counts_BDE)
    assert one.observe(counts_BDE) == 0.0
    shifted_BDE = counts_BDE.copy()
    shifted_BDE[0, 0, :2] += [4, -4]
    assert one.observe(shifted_BDE) == 4 / counts_BDE.sum()
    # The expected load counts, whatever its source
    one.expected_BDE = counts_BDE
    assert one.observe(counts_BDE) == 0.0


def test_what_it_has_seen_is_its_own() -> None:
    one = manager()
    counts_BDE = load(1)
    one.observe(counts_BDE)
    counts_BDE[:] = 0
    assert listed(one.expected_BDE) == load(1).tolist()


@pytest.mark.parametrize(("interval", "due"), [(1, [1, 2, 3, 4, 5, 6, 7]), (2, [1, 3, 5, 7]), (3, [1, 4, 7])])
def test_plans_are_due_at_intervals(interval: int, due: list[int]) -> None:
    """The first plan is due after iteration 1, for iteration 2."""
    one = manager(interval=interval)
    found = []
    for iteration in range(1, 8):
        one.observe(load(iteration))
        found += [iteration] if one.is_due() else []
    assert found == due


def test_a_plan_for_an_exact_load_depends_on_nothing_else() -> None:
    one, other = manager(), manager()
    for iteration in (1, 2, 3):
        other.observe(load(iteration))
        other.adopt(other.question(other.expected_BDE, 5).answer())
    first, second = (one.exact_plan(load(4)[0]) for one in (one, other))
    assert first == second


def fail(*_: object) -> Placement:
    raise ZeroDivisionError("no tokens")


def spoil_the_load(counts_BDE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
    counts_BDE[:] = 0
    raise ZeroDivisionError("no tokens left")


def exchange_owners(current: Placement) -> Placement:
    back = [(rank,) for rank in reversed(OWNERS.primary)]
    return dataclasses.replace(current, home=OWNERS.home[::-1], hosts=tuple(back), primary=OWNERS.primary[::-1])


FAILURES: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (fail, "raised ZeroDivisionError: no tokens"),
    "writes-into-its-arguments": (spoil_the_load, "raised ZeroDivisionError: no tokens left"),
    "has-no-room": (
        lambda counts_BDE, current, cost: owners_host(current, [(expert, 0) for expert in range(2, EXPERTS)]),
        "raised ValueError: rank 0: no free guest slot of 2 for experts [4, 5, 6, 7]",
    ),
    "no-load-at-all": (lambda current: current, "raised TypeError: "),
    "none": (lambda *_: None, "returned no Placement: a NoneType"),
    "text": (lambda counts_BDE, current, cost: str(current), "returned no Placement: a str"),
    "owners": (
        lambda counts_BDE, current, cost: exchange_owners(current),
        "changed owners or guest slots: 6 7 + . . | 4 5 + . .",
    ),
    "order-of-home-slots": (
        lambda counts_BDE, current, cost: dataclasses.replace(current, home=((1, 0), *current.home[1:])),
        "changed owners or guest slots: 1 0 + . . | 2 3 + . .",
    ),
    "guest-slots": (
        lambda *_: Placement.identity(EXPERTS, RANKS, SLOTS + 1),
        "changed owners or guest slots: 0 1 + . . . | 2 3 + . . .",
    ),
    "trimmed": (lambda counts_BDE, current, cost: OWNERS.trimmed, "changed owners or guest slots: 0 1 | 2 3"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_policy_that_fails_changes_nothing(failure: str) -> None:
    plan, problem = FAILURES[failure]
    one = manager(Own(plan))
    one.observe(load(1))
    before = json.dumps(one.state())
    assert one.expected_BDE is not None
    decision = one.question(one.expected_BDE, 1).answer()
    assert decision.placement is None
    assert decision.digest == INVALID
    assert decision.problem is not None and decision.problem.startswith(problem)
    assert json.dumps(one.state()) == before


def test_a_decision_is_in_force_once_adopted() -> None:
    one = manager()
    decision = one.question(load(3), 1).answer()
    assert decision.problem is None and decision.placement is not None and decision.placement.added_hosts
    assert decision.digest == bytes.fromhex(decision.placement.digest()) != INVALID
    assert len(decision.digest) == len(INVALID)
    assert one.placement == OWNERS and one.expected_BDE is None
    one.adopt(decision)
    assert one.placement == decision.placement


def test_plans_that_cost_more_than_they_saved_are_left_out() -> None:
    """Two experts are hot in turn, so a guest for the last load is useless; then one stays hot."""
    one = manager(load_policy("quota"))

    def iterate(hot: int) -> None:
        counts_BDE = np.full((1, RANKS, EXPERTS), 100)
        counts_BDE[..., hot] = 20000
        one.observe(counts_BDE)
        assert one.expected_BDE is not None
        one.adopt(one.question(one.expected_BDE, 1).answer())

    used = []
    for iteration in range(12):
        iterate(7 * (iteration % 2))
        used.append(not one.placement.is_identity)
        assert one.last_plan.placement is not None and not one.last_plan.placement.is_identity
    assert used == [True] * 2 + [False] * 10
    assert len(one.last_plan.gains) == REMEMBERED and max(one.last_plan.gains) < 0
    kept = manager(load_policy("quota"))
    kept.restore(json.loads(json.dumps(one.state())))
    assert kept.last_plan == one.last_plan
    for _ in range(REMEMBERED + 1):
        iterate(0)
    assert not one.placement.is_identity and min(one.last_plan.gains) > 0
    # Plans of the paper's policies are used whatever they were worth
    one.policy = load_policy("top2")
    one.last_plan = LastPlan(OWNERS.with_hosts([(0, 1)]), (-1.0,) * REMEMBERED)
    iterate(7)
    assert not one.placement.is_identity


def test_policies_see_load_placement_and_microbatches() -> None:
    seen = []

    def plan(counts_BDE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        seen.append((counts_BDE.tolist(), current, cost))
        return current.with_hosts([(7, 0)]) if current.is_identity else current

    one = manager(Own(plan))
    one.adopt(one.question(load(1), 3).answer())
    one.question(load(2), 8).answer()
    placement = OWNERS.with_hosts([(7, 0)])
    assert seen == [
        (load(1).tolist(), OWNERS, dataclasses.replace(COST, microbatches=3)),
        (load(2).tolist(), placement, dataclasses.replace(COST, microbatches=8)),
    ]


def test_a_plan_is_made_from_what_was_known_when_it_was_asked_for() -> None:
    """The manager and the load's array may change while another thread plans."""
    one = Manager(mover, COST, Predictor("last"), OWNERS, transfers=True)
    one.adopt(one.question(load(1), 1).answer())
    one.observe(load(1))
    expected_BDE = load(2)
    question = one.question(expected_BDE, 3)
    held = dict(question.held)
    expected = question.answer()
    assert held == dict.fromkeys(held, 1) and held
    one.held.clear()
    one.adopt(one.question(load(3), 1).answer())
    one.observe(load(3))
    one.cost, one.policy, one.transfers = dataclasses.replace(COST, microbatches=7), Own(fail), False
    expected_BDE[:] = 0
    decision = question.answer()
    assert decision.digest == expected.digest != INVALID
    assert decision.expected_BDE.tolist() == load(2).tolist()
    assert question.held == held and question.cost == dataclasses.replace(COST, microbatches=3)


@given(
    st.sampled_from(["top2", "fastermoe", "pro_prophet", "mover"]),
    st.sampled_from(METHODS),
    st.integers(1, 3),
    st.lists(st.integers(0, 2**32 - 1), max_size=5),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5),
)
def test_a_restored_manager_goes_on_as_if_nothing_had_been(
    policy: str, method: str, interval: int, before: list[int], after: list[int]
) -> None:
    one, fresh = (manager(mover if policy == "mover" else load_policy(policy), method, interval) for _ in range(2))
    steps(one, before)
    # Whatever it did before does not matter
    steps(fresh, [1])
    state = one.state()
    fresh.restore(json.loads(json.dumps(state)))
    assert fresh.state() == state and fresh.placement == one.placement
    assert (fresh.expected_BDE is None) == (not before)
    if before:
        assert listed(fresh.latest_BDE) == listed(one.latest_BDE)
        assert listed(fresh.expected_BDE) == listed(one.expected_BDE)
    assert steps(fresh, after) == steps(one, after)
    assert fresh.state() == one.state()


def steps(one: Manager, seeds: list[int]) -> list[tuple[float | None, str]]:
    """Run iterations with random loads; return the prediction error of each and the placement after it."""
    taken = []
    for seed in seeds:
        error = one.observe(load(seed))
        if one.is_due():
            assert one.expected_BDE is not None
            decision = one.question(one.expected_BDE, 1).answer()
            if decision.placement is not None:
                one.adopt(decision)
        taken.append((error, str(one.placement)))
    return taken


def _move_on(counts_BDE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
    """Add the heaviest expert to the existing guests, as long as there is room."""
    expert = int(counts_BDE.sum((0, 1)).argmax())
    return current.with_hosts([(expert, (current.owner(expert) + 1) % RANKS)])


mover = Own(_move_on)
"""A policy whose plans depend on the placement in use."""
