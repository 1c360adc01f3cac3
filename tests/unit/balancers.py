"""Balancers built from plain objects: one rank in a simulated group, and a journal of all its operations.

No two sizes are equal: 2 model chunks, 3 ranks, 4 layers, 5 microbatches, 12 experts.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megatron_balance.cost.loads import condensed
from megatron_balance.cost.model import CostModel, Overlap, owners
from megatron_balance.device.host_memory import Reading
from megatron_balance.device.side_stream import AsyncWork
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import TransPlan
from megatron_balance.planning.manager import Manager, Question
from megatron_balance.planning.policies.interface import Policy, owners_host
from megatron_balance.planning.predictor import Predictor
from megatron_balance.planning.within import plan_exactly
from megatron_balance.profile.cluster_profile import builtin
from megatron_balance.timeline import agreement, runtime
from megatron_balance.timeline.actions import Operation
from megatron_balance.timeline.guest_ring import GuestRing
from megatron_balance.timeline.layer_state import LayerState
from megatron_balance.timeline.lower import Overlapping, Pass, lower, one_forward_one_backward
from megatron_balance.timeline.planner import Asked, Plan, Planner, plan_for
from megatron_balance.timeline.runtime import Balancer

RANKS = 3
EXPERTS = 12
SLOTS = 2
MICROBATCHES = 5
RANK = 1
"""The rank whose balancer is built."""

BLOCKS = [[3], [4, 5, 9]]
"""MoE layers of each chunk; the second chunk begins with the layer after those of the first."""
LAYERS = [number for chunk in BLOCKS for number in chunk]
BESIDE = Overlap(forward=2.1e-4, backward=8.5e-4)
COST = CostModel(builtin(RANKS, RANKS, 64, 96), token_bytes=128, param_bytes=60e6, grad_bytes=100e6, overlap=BESIDE)
OWNERS = Placement.identity(EXPERTS, RANKS, SLOTS)

Load = dict[int, list[np.ndarray]]
"""For each layer number, the load matrix [D, E] of each microbatch."""

Journal = list[tuple]


@dataclass
class Group:
    """A process group. `others` changes each rank's contribution; by default, all ranks contribute the same."""

    size_: int = RANKS
    rank_: int = RANK
    others: Callable[[int, torch.Tensor], torch.Tensor] = lambda rank, own: own

    def rank(self) -> int:
        return self.rank_

    def size(self) -> int:
        return self.size_

    def contributions(self, own: torch.Tensor) -> list[torch.Tensor]:
        return [own if rank == self.rank_ else self.others(rank, own.clone()) for rank in range(self.size_)]


class Collectives:
    """Stand-in for torch.distributed."""

    @staticmethod
    def all_gather_into_tensor(output: torch.Tensor, own: torch.Tensor, group: Group) -> None:
        output.copy_(torch.cat(group.contributions(own)))

    @staticmethod
    def all_reduce(total: torch.Tensor, group: Group) -> None:
        total.copy_(torch.stack(group.contributions(total)).sum(0))


@dataclass
class JournaledTransAgg:
    """Stand-in for TransAgg."""

    journal: Journal

    def trans(self, plan: TransPlan, placement: Placement, slots: "Slots") -> None:
        self.journal.append(("TRANS", slots.number, plan, placement))

    def agg(self, plan: TransPlan, placement: Placement, slots: "Slots") -> None:
        self.journal.append(("AGG", slots.number, plan, placement))


@dataclass(eq=False)
class Slots:
    """Stand-in for a layer's experts."""

    number: int
    home: list[Sequence[int]] = field(default_factory=list)
    repeats: bool = False

    def ready(self) -> None:
        pass

    def own(self, home_experts: Sequence[int]) -> None:
        self.home.append(home_experts)


class AtOnce:
    """Stand-in for the side stream that executes its work immediately."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def start(self, work: Callable[[], None], prepare: Callable[[], None] = lambda: None) -> AsyncWork:
        prepare()
        work()
        entry = self.journal[-1]

        def wait() -> tuple[float, float]:
            self.journal.append(("waited", *entry))
            return 0.0, 0.0

        return AsyncWork(0.0, wait)


class PlansAtOnce(Planner):
    """Planner that plans as soon as it is asked."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal
        self.entries: dict[int, tuple] = {}
        """The journal entry of each asked question, by its id."""

    def ask(self, question: Question) -> Asked:
        asked = Asked(question, Future())
        asked.plan.set_result(plan_for(question))
        self.entries[id(asked)] = self.journal[-1]
        return asked

    def result(self, asked: Asked, deadline: float) -> Plan:
        self.journal.append(("waited", *self.entries.pop(id(asked))))
        return super().result(asked, deadline)


@dataclass
class Hottest:
    """Policy of one layer that copies the hottest expert to the ranks before and after its owner."""

    number: int
    journal: Journal

    def plan(self, counts_BDE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        self.journal.append(("PLAN", self.number, counts_BDE.copy(), current, cost.microbatches))
        return hottest(counts_BDE)


def hottest(counts: np.ndarray) -> Placement:
    """Return the placement that `Hottest` plans for loads [D, E] or [B, D, E]."""
    expert = int(counts.reshape(-1, EXPERTS).sum(0).argmax())
    owner = OWNERS.owner(expert)
    return owners_host(OWNERS, [(expert, (owner + step) % RANKS) for step in (1, 2)])


@dataclass
class World:
    """A balancer and the journal of its operations."""

    balancer: Balancer
    journal: Journal
    group: Group
    microbatches: int = MICROBATCHES

    def iterate(self, number: int, load: Load) -> dict[int, list[Placement]]:
        """Run one iteration: enter its computations as hooks do.

        Returns:
            The placement of each microbatch, by layer.
        """
        used: dict[int, list[Placement]] = {layer: [] for layer in LAYERS}
        balancer = self.balancer
        balancer.begin_iteration(number)
        for step in balancer.schedule(self.microbatches):
            layer, operation, part, parts, microbatch, _ = step.computation
            if (operation, part) == (Operation.A2A, 1):
                counts_DE = torch.from_numpy(load[layer][microbatch])
                used[layer].append(balancer.host(layer, Reading(counts_DE.clone), training=True))
            elif operation is Operation.REDUCE:
                balancer.aggregate()
            elif operation is Operation.STEP:
                balancer.finish_iteration()
            else:
                balancer.enter(layer, operation, part, parts)
            # The loads of finished microbatches occupy neither the device nor pinned memory
            assert operation is not Operation.BEC or not balancer.layers[layer].coming
            self.journal.append(("computes", step.computation))
        return used

    def entries(self, kind: str, layer: int) -> list[tuple]:
        """Return the journal's entries of this kind and layer, without these two fields."""
        return [entry[2:] for entry in self.journal if entry[:2] == (kind, layer)]


def loads(seed: int, microbatches: int = MICROBATCHES) -> Load:
    """Return loads that differ between layers, microbatches, ranks and experts."""
    generator = np.random.default_rng(seed)
    tokens = generator.lognormal(0, 1.5, (len(LAYERS), microbatches, RANKS, EXPERTS)) * 20
    return dict(zip(LAYERS, map(list, tokens.astype(np.int64)), strict=True))


def total(load: Load, layer: int) -> np.ndarray:
    return np.sum(load[layer], axis=0)


def grouped(load: Load, layer: int) -> np.ndarray:
    """Return [B, D, E]: the loads of similar microbatches, as plans are made for them."""
    return condensed(np.stack(load[layer]), owners(OWNERS))


def passes(microbatches: int, paired: bool = False) -> list[Pass]:
    """Return the passes of two model chunks, with some forward passes ahead."""
    table = [(chunk, microbatch) for microbatch, chunk in get_schedule_table(microbatches, 2, microbatches)]
    return one_forward_one_backward(table, 2, microbatches + 1, paired)


def build(
    monkeypatch: pytest.MonkeyPatch,
    overlap: Overlapping = "blockwise",
    ring: int = 0,
    paired: bool = False,
    ahead: bool = True,
    late: bool = False,
    threads: bool = False,
    policy: Callable[[int, Journal], Policy] = Hottest,
    predictor: str = "last",
    interval: int = 1,
    **more: Any,
) -> World:
    """Build a balancer of four layers.

    Args:
        paired: whether passes take turns, with guest slots of their own.
        threads: use a side stream and a planning thread; otherwise, the calling thread does all work.
        policy: constructs the policy of a layer.
        more: further arguments of Balancer.
    """
    journal: Journal = []
    monkeypatch.setattr(runtime, "dist", Collectives)
    monkeypatch.setattr(agreement, "dist", Collectives)
    with monkeypatch.context() as patched:
        if not threads:
            patched.setattr(runtime, "SideStream", lambda name: AtOnce(journal))
            more.setdefault("planner", PlansAtOnce(journal))
        states = {
            number: LayerState(
                Manager(policy(number, journal), COST, Predictor(predictor), OWNERS, interval=interval),
                Slots(number),
                BESIDE,
                apart=Slots(number) if paired else None,
            )
            for number in LAYERS
        }
        if not ahead:
            for state in states.values():
                state.within = functools.partial(plan_exactly, manager=state.manager)
        group = Group()
        balancer = Balancer(
            group=group,
            trans_agg=JournaledTransAgg(journal),
            layers=states,
            schedule=lambda microbatches: lower(
                passes(microbatches, paired), BLOCKS, overlap, ring=ring, apart=paired, ahead=ahead, late=late
            ),
            microbatches=lambda: world.microbatches,
            guest_bytes=0,
            ring=GuestRing.of([states[layer] for layer in LAYERS], ring) if ring else None,
            ahead=ahead,
            **more,
        )
    world = World(balancer, journal, group)
    return world
