"""FlexMoE's vExperts: the modifications that add, remove and move them, and the cost of a layer by Eq. 5."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.loads import COMPUTED, by_microbatch, expert_loads, placement_loads
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.splits import shares


class Expand(NamedTuple):
    """Add a vExpert to an expert."""

    expert: int
    rank: int

    @property
    def changes(self) -> tuple[tuple[int, int, int], ...]:
        """(expert, rank, change of the number of vExperts)."""
        return ((self.expert, self.rank, 1),)

    def __str__(self) -> str:
        return f"Expand {self.expert}@{self.rank}"


class Shrink(NamedTuple):
    """Remove a vExpert from an expert that has several."""

    expert: int
    rank: int

    @property
    def changes(self) -> tuple[tuple[int, int, int], ...]:
        """See Expand."""
        return ((self.expert, self.rank, -1),)

    def __str__(self) -> str:
        return f"Shrink {self.expert}@{self.rank}"


class Migrate(NamedTuple):
    """Move a vExpert to another rank, in exchange for a vExpert of `partner` if there is one."""

    expert: int
    source: int
    target: int
    partner: int = EMPTY

    @property
    def changes(self) -> tuple[tuple[int, int, int], ...]:
        """See Expand."""
        there = ((self.expert, self.source, -1), (self.expert, self.target, 1))
        back = ((self.partner, self.target, -1), (self.partner, self.source, 1))
        return there if self.partner == EMPTY else there + back

    def __str__(self) -> str:
        partner = "" if self.partner == EMPTY else f" {self.partner}"
        return f"Migrate {self.expert}@{self.source} <->{partner}@{self.target}"


Modification = Expand | Shrink | Migrate


def modify(placement: Placement, modifications: Iterable[Modification]) -> Placement:
    """Return the placement after modifications in this order.

    FlexMoE's queue groups modifications that share no source and no target into one step. `plan_transfers` does the
    same here: in each of its rounds a rank sends and receives at most one message.

    Raises:
        ValueError: a rank lacks a free guest slot, or a Shrink names a vExpert that does not exist or is the last one.
    """
    hosts = [list(ranks) for ranks in placement.hosts]
    touched = False
    for modification in modifications:
        for expert, rank, change in modification.changes:
            hosts[expert].append(rank) if change > 0 else hosts[expert].remove(rank)
            touched = True
    return placement.rehost(hosts) if touched else placement


@dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """The values that modifications do not change: loads and owners."""

    cost: CostModel
    counts_EBD: np.ndarray
    owner_E: np.ndarray
    owned_ED: np.ndarray
    """[E, D] bool: whether the rank owns the expert."""

    primary_E: np.ndarray
    guest_slots: int
    limit: int
    """Maximum number of vExperts per rank."""

    @classmethod
    def of(cls, counts: np.ndarray, placement: Placement, cost: CostModel, limit: int) -> "Layer":
        """Return the layer that starts from `placement`."""
        owner_E = owners(placement)
        return cls(
            cost=cost,
            counts_EBD=np.ascontiguousarray(by_microbatch(counts).transpose(2, 0, 1), dtype=np.float64),
            owner_E=owner_E,
            owned_ED=owner_E[:, None] == np.arange(placement.num_ranks),
            primary_E=np.asarray(placement.primary),
            guest_slots=placement.guest_slots,
            limit=limit,
        )

    def loads(self, expert_A: np.ndarray, vexperts_AD: np.ndarray) -> np.ndarray:
        """Return [A, 5, B, D], the loads of experts with these vExperts; primary hosts follow `Placement.rehost`."""
        row_A, owner_A, primary_A = np.arange(len(expert_A)), self.owner_E[expert_A], self.primary_E[expert_A]
        first_A = np.where(vexperts_AD[row_A, owner_A], owner_A, (vexperts_AD > 0).argmax(1))
        primary_A = np.where(vexperts_AD[row_A, primary_A], primary_A, first_A)
        return expert_loads(self.cost.network, self.cost.split, self.counts_EBD[expert_A], vexperts_AD, primary_A)

    def sent(self, expert_A: np.ndarray, vexperts_AD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `SendingModel.link_times`."""
        guests_AD = (vexperts_AD > 0) & ~self.owned_ED[expert_A]
        return self.cost.transport.link_times(self.owner_E[expert_A], guests_AD)


@dataclass(frozen=True, eq=False)
class VExperts:
    """The vExperts of a layer, and their cost."""

    layer: Layer
    vexperts_ED: np.ndarray
    loads_FBD: np.ndarray
    """Sum of the experts' loads."""

    sent_D: np.ndarray
    """Time of all experts in Trans: see `Layer.sent`."""
    extra_E: np.ndarray
    """Time on the other links of each expert's chain."""

    @classmethod
    def of(cls, layer: Layer, placement: Placement) -> "VExperts":
        """Return the vExperts of `placement`."""
        cost, vexperts_ED, extra_E = layer.cost, shares(placement), np.zeros(placement.num_experts)
        loads_FBD = placement_loads(cost.network, cost.split, layer.counts_EBD.transpose(1, 2, 0), placement)
        guest_M = np.flatnonzero(((vexperts_ED > 0) & ~layer.owned_ED).any(1))
        sent_MD, extra_E[guest_M] = layer.sent(guest_M, vexperts_ED[guest_M])
        return cls(layer, vexperts_ED, loads_FBD, sent_MD.sum(0), extra_E)

    def after(self, modifications: Iterable[Modification]) -> "VExperts":
        """Return the vExperts after modifications."""
        vexperts_ED, touched = self.vexperts_ED.copy(), set()
        for modification in modifications:
            for expert, rank, change in modification.changes:
                vexperts_ED[expert, rank] += change
                touched.add(expert)
        if not touched:
            return self
        expert_A = np.array(sorted(touched), dtype=np.int64)
        loads_2AFBD, sent_2AD, extra_2A = self._both(expert_A, expert_A, vexperts_ED[expert_A])
        extra_E = self.extra_E.copy()
        extra_E[expert_A] = extra_2A[0]
        loads_FBD = self.loads_FBD + (loads_2AFBD[0] - loads_2AFBD[1]).sum(0)
        return VExperts(self.layer, vexperts_ED, loads_FBD, self.sent_D + (sent_2AD[0] - sent_2AD[1]).sum(0), extra_E)

    def changed(self, expert_A: np.ndarray, *moves: tuple[np.ndarray, int | np.ndarray]) -> "Change":
        """Return the change of loads and of Trans for each of A candidates.

        Args:
            expert_A: the candidates' expert.
            moves: pairs of ranks [A] and the number of vExperts that the expert gains there; below 0 it loses them.
        """
        more_AD = np.zeros((len(expert_A), self.vexperts_ED.shape[1]), dtype=np.int64)
        for rank_A, more in moves:
            more_AD[np.arange(len(expert_A)), rank_A] += more
        return self.changed_by(expert_A, more_AD)

    def changed_by(self, expert_A: np.ndarray, more_AD: np.ndarray) -> "Change":
        """Return `changed` for vExperts that each candidate gains, [A, D]."""
        kind_K, kind_A = np.unique(expert_A, return_inverse=True)
        loads, sent, extra = self._both(kind_K, expert_A, self.vexperts_ED[expert_A] + more_AD)
        return Change(loads[0] - loads[1][kind_A], sent[0] - sent[1][kind_A], extra[0])

    def loads_of(self, expert: int) -> np.ndarray:
        """Return [5, B, D], the loads of an expert."""
        return self.layer.loads(np.array([expert]), self.vexperts_ED[[expert]])[0]

    def _both(
        self, expert_K: np.ndarray, expert_A: np.ndarray, vexperts_AD: np.ndarray
    ) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """Return loads, `Layer.sent` and extra, each of candidates [A] and of the present vExperts of experts [K]."""
        experts, number = np.concatenate([expert_A, expert_K]), len(expert_A)
        vexperts = np.concatenate([vexperts_AD, self.vexperts_ED[expert_K]])
        values = self.layer.loads(experts, vexperts), *self.layer.sent(experts, vexperts)
        return tuple((value[:number], value[number:]) for value in values)

    def exposed_after(self, change: "Change") -> np.ndarray:
        """Return [A]: exposed seconds of Trans and Agg after a change, on the busiest rank."""
        return sum(self.layer.cost.exposed(self.mean_computed, *self._sending_after(change)))

    def _sending_after(self, change: "Change") -> tuple[np.ndarray, np.ndarray]:
        busiest_A, extra_A = (self.sent_D + change.sent_AD).max(-1), np.maximum(change.extra_A, self.extra_E.max())
        return self.layer.cost.transport.seconds_of(busiest_A, extra_A)

    def work_after(self, change: "Change") -> np.ndarray:
        """Return [A, B, D]: each rank's seconds by Eq. 7 and 8 after a change."""
        return self.layer.cost.rank_seconds(self.loads_FBD + change.loads_AFBD)

    def seconds_after(self, change: "Change") -> np.ndarray:
        """Return [A]: seconds of the layer after a change."""
        cost = self.layer.cost
        return cost.time_of(*cost.work_of(self.loads_FBD + change.loads_AFBD), *self._sending_after(change)).total

    @cached_property
    def mean_computed(self) -> float:
        """Tokens per rank if all ranks computed equally long."""
        return float(self.loads_FBD[COMPUTED].sum() / self.layer.cost.rate_D.sum())

    @cached_property
    def members_ED(self) -> np.ndarray:
        """[E, D] bool: ranks that have an expert, hosts and owner."""
        return (self.vexperts_ED > 0) | self.layer.owned_ED

    @cached_property
    def work_BD(self) -> np.ndarray:
        """Seconds of each rank in each microbatch, Eq. 7 and 8."""
        return self.layer.cost.rank_seconds(self.loads_FBD)

    @cached_property
    def tokens_BD(self) -> np.ndarray:
        """Number of tokens that each rank computes in each microbatch."""
        return self.loads_FBD[COMPUTED]

    @cached_property
    def guests_ED(self) -> np.ndarray:
        """[E, D] bool: whether an expert takes a guest slot of a rank."""
        return (self.vexperts_ED > 0) & ~self.layer.owned_ED

    @cached_property
    def seconds(self) -> float:
        """Seconds of the layer, with Trans and Agg counted as the busiest rank's."""
        cost = self.layer.cost
        return float(cost.time_of(*cost.work_of(self.loads_FBD), *self._sending).total)

    @cached_property
    def _sending(self) -> tuple[np.ndarray, np.ndarray]:
        return self.layer.cost.transport.seconds_of(self.sent_D.max(), self.extra_E.max())

    @cached_property
    def floor(self) -> float:
        """Lower bound on the seconds with more guests: even loads, no exchange, the experts already sent."""
        cost = self.layer.cost
        return float(cost.time_of(0.0, self.mean_computed, *self._sending).total)

    @cached_property
    def number_E(self) -> np.ndarray:
        """Number of vExperts of each expert."""
        return self.vexperts_ED.sum(1)

    @cached_property
    def capacity_E(self) -> np.ndarray:
        """Number of tokens per vExpert of each expert."""
        return self.layer.counts_EBD.sum((1, 2)) / self.number_E

    @cached_property
    def free_vexperts_D(self) -> np.ndarray:
        """Number of unused vExperts on each rank; below 0 if the initial placement exceeds the limit."""
        return self.layer.limit - self.vexperts_ED.sum(0)

    @cached_property
    def free_slots_D(self) -> np.ndarray:
        """Number of free guest slots on each rank."""
        return self.layer.guest_slots - self.guests_ED.sum(0)


class Change(NamedTuple):
    """What A candidates change."""

    loads_AFBD: np.ndarray
    sent_AD: np.ndarray
    extra_A: np.ndarray

    def with_other(self, other: "Change") -> "Change":
        """Return the change of both modifications, which are of different experts."""
        extra_A = np.maximum(self.extra_A, other.extra_A)
        return Change(self.loads_AFBD + other.loads_AFBD, self.sent_AD + other.sent_AD, extra_A)
