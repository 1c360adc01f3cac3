"""timeline/agreement.py: ranks that plan for each other decide as if each of them planned everything."""

import pickle
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from megatron_balance.planning.manager import Decision, Manager, PolicyFailure, Question
from megatron_balance.planning.policies import load_policy
from megatron_balance.planning.predictor import Predictor
from megatron_balance.timeline import agreement
from megatron_balance.timeline.agreement import LEAST_BYTES, Compared, Outcome, Shared, packed
from megatron_balance.timeline.planner import Plan, plan_for
from tests.unit.balancers import COST, EXPERTS, LAYERS, OWNERS, RANKS, loads


@dataclass
class Job:
    """Stand-in for torch.distributed: the threads of a job exchange tensors."""

    size: int
    exchanges: int = 0
    num_bytes: int = 0
    """Size of the tensors that are added up."""
    content: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)

    def all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor, group: "Member") -> None:
        self.content[group.rank()] = own
        if self.barrier.wait() == 0:
            self.exchanges += 1
            self.num_bytes += output.nbytes
        output.copy_(torch.cat([self.content[rank] for rank in range(self.size)]))
        self.barrier.wait()

    def all_reduce(self, total: torch.Tensor, group: "Member") -> None:
        self.content[group.rank()] = total.clone()
        if self.barrier.wait() == 0:
            self.exchanges += 1
            self.num_bytes += total.nbytes
        total.copy_(torch.stack([self.content[rank] for rank in range(self.size)]).sum(0))
        self.barrier.wait()

    def each(self, task: Callable[["Member"], Any]) -> list[Any]:
        """Return the task's result on each rank."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(task, [Member(self, rank) for rank in range(self.size)]))


@dataclass
class Member:
    """Stand-in for a process group, as one rank sees it."""

    job: Job
    rank_: int

    def rank(self) -> int:
        return self.rank_

    def size(self) -> int:
        return self.job.size


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job(RANKS)
    monkeypatch.setattr(agreement, "dist", job)
    return job


def questions(policy: Any, transfers: bool = False) -> dict[int, Question]:
    load = loads(1)
    managers = {number: Manager(policy, COST, Predictor("last"), OWNERS, transfers=transfers) for number in LAYERS}
    return {number: managers[number].question(np.stack(load[number]), 5) for number in LAYERS}


def content(outcomes: Mapping[int, Outcome]) -> dict[int, tuple]:
    """Return all that decides what happens next, and whether the rank has to speak."""
    found = {}
    for number, (plan, agreed, final, problem) in outcomes.items():
        decision = plan.decision
        decided = decision.placement, decision.settlement, decision.wanted, decision.expected_BDE.tolist()
        found[number] = (agreed, final, plan.sending, plan.beside, *decided, problem)
    return found


@pytest.mark.parametrize("policy", ["pro_prophet", "flexmoe", "demi", "quota", "none"])
@pytest.mark.parametrize("transfers", [False, True])
def test_shared_plans_are_those_that_every_rank_makes(job: Job, policy: str, transfers: bool) -> None:
    asked = questions(load_policy(policy), transfers)

    def shared(group: Any) -> dict[int, tuple]:
        agreement = Shared(group, LAYERS)
        mine = {number: plan_for(question) for number, question in asked.items() if agreement.plans(number)}
        assert len(mine) in (1, 2), "4 layers on 3 ranks"
        return content(agreement.reach(mine, asked))

    def compared(group: Any) -> dict[int, tuple]:
        return content(Compared(group).reach({n: plan_for(question) for n, question in asked.items()}, asked))

    results = job.each(shared)
    assert results == [results[0]] * RANKS == job.each(compared)
    assert list(results[0]) == LAYERS and all(agreed for agreed, *_ in results[0].values())


class Broken:
    """Fails for the layer with the given load."""

    def __init__(self, counts_BDE: np.ndarray, final: bool) -> None:
        self.counts_BDE = counts_BDE
        self.final = final

    def plan(self, counts: np.ndarray, *_: Any) -> Any:
        if np.array_equal(counts, self.counts_BDE):
            raise PolicyFailure("lost its way", self.final)
        return OWNERS


@pytest.mark.parametrize("final", [False, True])
def test_a_failure_is_known_to_all_and_told_by_the_rank_that_planned(job: Job, final: bool) -> None:
    fails = LAYERS[1]
    asked = questions(Broken(np.stack(loads(1)[fails]), final))

    def task(group: Any) -> dict[int, Outcome]:
        agreement = Shared(group, LAYERS)
        return agreement.reach({n: plan_for(asked[n]) for n in LAYERS if agreement.plans(n)}, asked)

    for rank, outcomes in enumerate(job.each(task)):
        assert [number for number, outcome in outcomes.items() if not outcome.agreed] == [fails]
        assert outcomes[fails][1:] == (False, final, "lost its way" if rank == 1 else None)
    assert job.exchanges == 1


def test_room_grows_on_all_ranks_alike_and_stays(job: Job) -> None:
    """One rank's long plans cost one more exchange, once."""
    asked = questions(load_policy("top2"))
    long = "x" * (5 * LEAST_BYTES)

    def plan(number: int) -> Plan:
        decision = Decision(asked[number].expected_BDE, None, problem=long if number == LAYERS[2] else "short")
        return Plan(decision, None, 1.0, 1.5)

    def task(group: Any) -> tuple[int, list[int]]:
        agreement = Shared(group, LAYERS)
        rooms = []
        for _ in range(3):
            outcomes = agreement.reach({n: plan(n) for n in LAYERS if agreement.plans(n)}, asked)
            assert [len(outcome.plan.decision.problem) for outcome in outcomes.values()] == [5, 5, len(long), 5]
            assert all(outcome.plan.end - outcome.plan.start == 0.5 for outcome in outcomes.values())
            rooms.append(agreement._room)
        return job.exchanges, rooms

    assert job.each(task) == [(4, [8 * LEAST_BYTES] * 3)] * RANKS


@pytest.mark.parametrize("ranks", [4, 12])
def test_bytes_do_not_grow_with_the_ranks_that_plan_nothing(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    job = Job(ranks)
    asked = questions(load_policy("quota"))
    monkeypatch.setattr(agreement, "dist", job)

    def task(group: Any) -> None:
        shared = Shared(group, LAYERS)
        shared.reach({n: plan_for(asked[n]) for n in LAYERS if shared.plans(n)}, asked)

    job.each(task)
    assert job.exchanges == 1 and job.num_bytes <= len(LAYERS) * (8 + LEAST_BYTES)


def test_loads_are_not_sent() -> None:
    plan = plan_for(questions(load_policy("top2"))[LAYERS[0]])
    assert plan.decision.expected_BDE.shape == (5, RANKS, EXPERTS)
    assert len(packed({2: plan})) < len(pickle.dumps({2: plan})) - plan.decision.expected_BDE.nbytes
