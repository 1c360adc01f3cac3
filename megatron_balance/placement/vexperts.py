"""FlexMoE's vExperts: the modifications of where they are, and what a layer costs with them by Eq. 5.

Shape suffixes: D expert-parallel ranks, E logical experts, K choices.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_balance.placement.cost_model import CostModel, ExpertTimes, owners
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.splits import vexperts


class Expand(NamedTuple):
    """A vExpert more for an expert."""

    expert: int
    rank: int

    @property
    def changes(self) -> tuple[tuple[int, int, int], ...]:
        """(expert, rank, vExperts more or fewer)."""
        return ((self.expert, self.rank, 1),)

    def __str__(self) -> str:
        return f"Expand {self.expert}@{self.rank}"


class Shrink(NamedTuple):
    """A vExpert less for an expert that has several."""

    expert: int
    rank: int

    @property
    def changes(self) -> tuple[tuple[int, int, int], ...]:
        """As of Expand."""
        return ((self.expert, self.rank, -1),)

    def __str__(self) -> str:
        return f"Shrink {self.expert}@{self.rank}"


class Migrate(NamedTuple):
    """A vExpert moves to another rank, in exchange for a vExpert of `partner` or into the place of none."""

    expert: int
    source: int
    target: int
    partner: int = EMPTY

    @property
    def changes(self) -> tuple[tuple[int, int, int], ...]:
        """As of Expand."""
        there = ((self.expert, self.source, -1), (self.expert, self.target, 1))
        back = ((self.partner, self.target, -1), (self.partner, self.source, 1))
        return there if self.partner == EMPTY else there + back

    def __str__(self) -> str:
        partner = "" if self.partner == EMPTY else f" {self.partner}"
        return f"Migrate {self.expert}@{self.source} <->{partner}@{self.target}"


Modification = Expand | Shrink | Migrate


def modify(placement: Placement, modifications: Iterable[Modification]) -> Placement:
    """The placement after modifications in this order.

    Those that follow each other and share no source and no target are one step of FlexMoE's queue. Here that is left to
    `plan_transfers`, whose rounds send at most one message from and to each rank.

    Raises:
        ValueError: a rank without a free guest slot, a Shrink of a vExpert that is not there or the last of its expert.
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
    """What modifications do not change: a load, the owners, and the placement that adjustments are counted from."""

    cost: CostModel
    counts_ED: np.ndarray
    owner_E: np.ndarray
    owned_ED: np.ndarray
    """[E, D] bool."""

    primary_E: np.ndarray
    arrival_ED: np.ndarray
    """[E, D] seconds in which the owner sends an expert to a rank that does not keep it."""

    guest_slots: int
    limit: int
    """vExperts per rank."""

    @classmethod
    def of(cls, counts_DE: np.ndarray, placement: Placement, cost: CostModel, limit: int) -> "Layer":
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
        """What experts add to each rank's time with these vExperts; primary hosts as `Placement.rehost` has them."""
        if not len(expert_A):
            return ExpertTimes(np.zeros(vexperts_AD.shape), np.zeros(vexperts_AD.shape))
        row_A, owner_A, primary_A = np.arange(len(expert_A)), self.owner_E[expert_A], self.primary_E[expert_A]
        first_A = np.where(vexperts_AD[row_A, owner_A], owner_A, (vexperts_AD > 0).argmax(1))
        primary_A = np.where(vexperts_AD[row_A, primary_A], primary_A, first_A)
        return self.cost.expert_times(self.counts_ED[expert_A], vexperts_AD, primary_A, owner_A)


@dataclass(frozen=True, eq=False)
class VExperts:
    """The vExperts of a layer, and what they cost."""

    layer: Layer
    vexperts_ED: np.ndarray
    times: ExpertTimes
    """[E, D] each."""

    @classmethod
    def of(cls, layer: Layer, placement: Placement) -> "VExperts":
        vexperts_ED = vexperts(placement)
        return cls(layer, vexperts_ED, layer.times(np.arange(len(vexperts_ED)), vexperts_ED))

    def after(self, modifications: Iterable[Modification]) -> "VExperts":
        """The vExperts with modifications made."""
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
        """[K, D] seconds more on each rank in each of K choices of an expert that gets more vExperts.

        Args:
            moves: ranks [K], and how many vExperts more each gets (or fewer, below 0).
        """
        vexperts_AD = self.vexperts_ED[expert_A]
        for rank_A, more in moves:
            vexperts_AD[np.arange(len(expert_A)), rank_A] += more
        return self.layer.times(expert_A, vexperts_AD).seconds_AD - self.times.seconds_AD[expert_A]

    @cached_property
    def members_ED(self) -> np.ndarray:
        """[E, D] bool: ranks that keep an expert, and sum up its gradients: hosts and owner."""
        return (self.vexperts_ED > 0) | self.layer.owned_ED

    @cached_property
    def seconds_D(self) -> np.ndarray:
        """Eq. 5 by rank."""
        return self.times.seconds_AD.sum(0)

    @cached_property
    def tokens_D(self) -> np.ndarray:
        """Tokens that each rank computes."""
        return self.times.tokens_AD.sum(0)

    @cached_property
    def guests_ED(self) -> np.ndarray:
        """[E, D] bool: whether an expert takes a guest slot of a rank."""
        return (self.vexperts_ED > 0) & ~self.layer.owned_ED

    @cached_property
    def seconds(self) -> float:
        """Eq. 5 and the adjustments since the start: they come to different ranks at the same time."""
        return float(self.seconds_D.max() + (self.guests_ED * self.layer.arrival_ED).sum(0).max())

    @cached_property
    def number_E(self) -> np.ndarray:
        """vExperts of each expert."""
        return self.vexperts_ED.sum(1)

    @cached_property
    def capacity_E(self) -> np.ndarray:
        """Tokens of each expert per vExpert."""
        return self.layer.counts_ED.sum(1) / self.number_E

    @cached_property
    def free_vexperts_D(self) -> np.ndarray:
        """Left on each rank; below 0 where a placement from elsewhere has more than the limit."""
        return self.layer.limit - self.vexperts_ED.sum(0)

    @cached_property
    def free_slots_D(self) -> np.ndarray:
        """Guest slots left on each rank."""
        return self.layer.guest_slots - self.guests_ED.sum(0)
