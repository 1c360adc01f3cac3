"""FlexMoE's vExperts: the modifications that add, remove and move them, and the cost of a layer by Eq. 5."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.model import CostModel, ExpertTimes, owners
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.splits import vexperts


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
    """The values that modifications do not change: load, owners, and the placement that adjustments start from."""

    cost: CostModel
    counts_ED: np.ndarray
    owner_E: np.ndarray
    owned_ED: np.ndarray
    """[E, D] bool: whether the rank owns the expert."""

    primary_E: np.ndarray
    arrival_ED: np.ndarray
    """[E, D] seconds that the owner takes to send an expert to a rank that does not have it."""

    guest_slots: int
    limit: int
    """Maximum number of vExperts per rank."""

    @classmethod
    def of(cls, counts_DE: np.ndarray, placement: Placement, cost: CostModel, limit: int) -> "Layer":
        """Return the layer that starts from `placement`."""
        owner_E, rank_D = owners(placement), np.arange(placement.num_ranks)
        owned_ED = owner_E[:, None] == rank_D
        kept_ED = owned_ED | (vexperts(placement) > 0)
        arrival_ED = np.where(kept_ED, 0.0, cost.adjustment_seconds(owner_E[:, None], rank_D))
        return cls(
            cost=cost,
            counts_ED=counts_DE.T.astype(np.float64),
            owner_E=owner_E,
            owned_ED=owned_ED,
            primary_E=np.asarray(placement.primary),
            arrival_ED=arrival_ED,
            guest_slots=placement.guest_slots,
            limit=limit,
        )

    def times(self, expert_A: np.ndarray, vexperts_AD: np.ndarray) -> ExpertTimes:
        """Return what experts with these vExperts add to each rank's time; primary hosts follow `Placement.rehost`."""
        if not len(expert_A):
            return ExpertTimes(np.zeros(vexperts_AD.shape), np.zeros(vexperts_AD.shape))
        row_A, owner_A, primary_A = np.arange(len(expert_A)), self.owner_E[expert_A], self.primary_E[expert_A]
        first_A = np.where(vexperts_AD[row_A, owner_A], owner_A, (vexperts_AD > 0).argmax(1))
        primary_A = np.where(vexperts_AD[row_A, primary_A], primary_A, first_A)
        return self.cost.expert_times(self.counts_ED[expert_A], vexperts_AD, primary_A, owner_A)


@dataclass(frozen=True, eq=False)
class VExperts:
    """The vExperts of a layer, and their cost."""

    layer: Layer
    vexperts_ED: np.ndarray
    times: ExpertTimes
    """Tokens and seconds of each expert, arrays [E, D]."""

    @classmethod
    def of(cls, layer: Layer, placement: Placement) -> "VExperts":
        """Return the vExperts of `placement`."""
        vexperts_ED = vexperts(placement)
        return cls(layer, vexperts_ED, layer.times(np.arange(len(vexperts_ED)), vexperts_ED))

    def after(self, modifications: Iterable[Modification]) -> "VExperts":
        """Return the vExperts after modifications."""
        vexperts_ED, touched = self.vexperts_ED.copy(), set()
        for modification in modifications:
            for expert, rank, change in modification.changes:
                vexperts_ED[expert, rank] += change
                touched.add(expert)
        expert_A = np.array(sorted(touched), dtype=np.int64)
        times = ExpertTimes(*(part_ED.copy() for part_ED in self.times))
        for part_ED, part_AD in zip(times, self.layer.times(expert_A, vexperts_ED[expert_A]), strict=True):
            part_ED[expert_A] = part_AD
        return VExperts(self.layer, vexperts_ED, times)

    def changes(self, expert_A: np.ndarray, *moves: tuple[np.ndarray, int | np.ndarray]) -> np.ndarray:
        """Return [A, D] the change of each rank's seconds for each of A candidates.

        Args:
            expert_A: the candidates' expert.
            moves: pairs of ranks [A] and the number of vExperts that the expert gains there; below 0 it loses them.
        """
        vexperts_AD = self.vexperts_ED[expert_A]
        for rank_A, more in moves:
            vexperts_AD[np.arange(len(expert_A)), rank_A] += more
        return self.layer.times(expert_A, vexperts_AD).seconds_AD - self.times.seconds_AD[expert_A]

    @cached_property
    def members_ED(self) -> np.ndarray:
        """[E, D] bool: ranks that have an expert and reduce its gradients, hosts and owner."""
        return (self.vexperts_ED > 0) | self.layer.owned_ED

    @cached_property
    def seconds_D(self) -> np.ndarray:
        """Seconds of each rank, Eq. 5."""
        return self.times.seconds_AD.sum(0)

    @cached_property
    def tokens_D(self) -> np.ndarray:
        """Number of tokens that each rank computes."""
        return self.times.tokens_AD.sum(0)

    @cached_property
    def guests_ED(self) -> np.ndarray:
        """[E, D] bool: whether an expert takes a guest slot of a rank."""
        return (self.vexperts_ED > 0) & ~self.layer.owned_ED

    @cached_property
    def seconds(self) -> float:
        """Seconds by Eq. 5 plus those of the adjustments since the start, which reach different ranks in parallel."""
        return float(self.seconds_D.max() + (self.guests_ED * self.layer.arrival_ED).sum(0).max())

    @cached_property
    def number_E(self) -> np.ndarray:
        """Number of vExperts of each expert."""
        return self.vexperts_ED.sum(1)

    @cached_property
    def capacity_E(self) -> np.ndarray:
        """Number of tokens per vExpert of each expert."""
        return self.layer.counts_ED.sum(1) / self.number_E

    @cached_property
    def free_vexperts_D(self) -> np.ndarray:
        """Number of unused vExperts on each rank; below 0 if the initial placement exceeds the limit."""
        return self.layer.limit - self.vexperts_ED.sum(0)

    @cached_property
    def free_slots_D(self) -> np.ndarray:
        """Number of free guest slots on each rank."""
        return self.layer.guest_slots - self.guests_ED.sum(0)
