"""FlexMoE's vExperts: the modifications that add, remove and move them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.core import COMPUTED
from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.planning.hosting import Hosting, Layer, Tried


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
    changed: dict[int, list[int]] = {}
    for modification in modifications:
        for expert, rank, change in modification.changes:
            ranks = changed.setdefault(expert, [*placement.hosts[expert]])
            ranks.append(rank) if change > 0 else ranks.remove(rank)
    hosts = [changed.get(expert, ranks) for expert, ranks in enumerate(placement.hosts)]
    return placement.rehost(hosts) if changed else placement


@dataclass(frozen=True, eq=False, kw_only=True)
class VExperts(Hosting):
    """The vExperts of a layer: shares are numbers of vExperts."""

    guest_slots: int
    limit: int
    """Maximum number of vExperts per rank."""

    @classmethod
    def start(cls, counts: np.ndarray, placement: Placement, cost: CostModel, limit: int) -> "VExperts":
        """Return the vExperts of `placement`, which has no quotas."""
        layer = Layer.of(counts, placement, cost)
        return cls.of(layer, placement, guest_slots=placement.guest_slots, limit=limit)

    def after(self, modifications: Iterable[Modification]) -> "VExperts":
        """Return the vExperts after modifications."""
        more: dict[int, np.ndarray] = {}
        for modification in modifications:
            for expert, rank, change in modification.changes:
                more.setdefault(expert, np.zeros(len(self.sent_D), dtype=np.int64))[rank] += change
        if not more:
            return self
        expert_A = np.array(sorted(more))
        shares_AD = self.shares_ED[expert_A] + np.stack([more[expert] for expert in expert_A.tolist()])
        return self.changed(expert_A, shares_AD, self.primary_E[expert_A])

    def tried_with(self, *changes: tuple[np.ndarray, np.ndarray]) -> Tried:
        """Return the layer under candidates that give experts more vExperts or fewer.

        Args:
            changes: pairs of experts [A], -1 for none, and numbers of vExperts that they gain [A, D].
        """
        expert_KA = np.stack([expert_A for expert_A, _ in changes])
        more_KAD = np.stack([more_AD for _, more_AD in changes])
        return self.tried(expert_KA, self.shares_ED[expert_KA] + more_KAD, self.primary_E[expert_KA])

    def computes_other(self, expert_A: np.ndarray, more_AD: np.ndarray) -> np.ndarray:
        """Return [A, D] bool: ranks that compute other tokens if experts gain these vExperts."""
        shares_AD = self.shares_ED[expert_A]
        before_AFBD, after_AFBD = (self.expert_loads(expert_A, each_AD) for each_AD in (shares_AD, shares_AD + more_AD))
        return (before_AFBD != after_AFBD)[:, COMPUTED].any(1)

    @cached_property
    def members_ED(self) -> np.ndarray:
        """[E, D] bool: ranks that have an expert, hosts and owner."""
        return (self.shares_ED > 0) | self.layer.owned_ED

    @cached_property
    def number_E(self) -> np.ndarray:
        """Number of vExperts of each expert."""
        return self.shares_ED.sum(1)

    @cached_property
    def capacity_E(self) -> np.ndarray:
        """Number of tokens per vExpert of each expert."""
        return self.layer.tokens_E / self.number_E

    @cached_property
    def free_vexperts_D(self) -> np.ndarray:
        """Number of unused vExperts on each rank; below 0 if the initial placement exceeds the limit."""
        return self.limit - self.shares_ED.sum(0)

    @cached_property
    def free_slots_D(self) -> np.ndarray:
        """Number of free guest slots on each rank."""
        return self.guest_slots - self.guests_ED.sum(0)


def gaining(rank_A: np.ndarray, more: int | np.ndarray, num_ranks: int) -> np.ndarray:
    """Return [A, D]: numbers of vExperts that each candidate gains on one rank; below 0 it loses them."""
    more_AD = np.zeros((len(rank_A), num_ranks), dtype=np.int64)
    more_AD[np.arange(len(rank_A)), rank_A] = more
    return more_AD
