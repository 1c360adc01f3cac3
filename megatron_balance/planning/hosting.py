"""The hosts of a layer's experts during a search, and the seconds of the layer under them and under many others.

A counts candidates, and K the experts whose hosts a candidate changes.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np

from megatron_balance.cost.candidates import change, involve, try_
from megatron_balance.cost.core import COMPUTED
from megatron_balance.cost.loads import by_microbatch, expert_loads, placement_loads
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import Placement

DOUBT = 2.0
"""Searches over many ranks assume that Trans and Agg take at most this many times as long as on the busiest rank alone.
In 126 plans for 48 and 64 ranks, it was at most 1.30."""


@dataclass(frozen=True, eq=False)
class Layer:
    """The values that a search does not change: loads and owners."""

    cost: CostModel
    counts_EBD: np.ndarray
    owner_E: np.ndarray

    @classmethod
    def of(cls, counts: np.ndarray, placement: Placement, cost: CostModel) -> "Layer":
        """Return the layer with these loads, [D, E] or [B, D, E], and the owners of `placement`."""
        counts_EBD = np.ascontiguousarray(by_microbatch(counts).transpose(2, 0, 1), dtype=np.float64)
        return cls(cost, counts_EBD, owners(placement))

    @cached_property
    def owned_ED(self) -> np.ndarray:
        """[E, D] bool: whether the rank owns the expert."""
        return self.owner_E[:, None] == np.arange(self.counts_EBD.shape[2])

    @cached_property
    def tokens_E(self) -> np.ndarray:
        """Number of tokens of each expert."""
        return self.counts_EBD.sum((1, 2))

    @cached_property
    def tokens_B(self) -> np.ndarray:
        """Number of tokens of each microbatch."""
        return self.counts_EBD.sum((0, 2))

    @cached_property
    def mean(self) -> float:
        """Tokens per rank if all ranks computed equally long."""
        return float(self.tokens_E.sum() / self.cost.rate_D.sum())


class Tried(NamedTuple):
    """A layer under each of A candidates."""

    cost: CostModel
    work_ABD: np.ndarray
    """`CostModel.rank_seconds`."""
    exchanging_A: np.ndarray
    computed_A: np.ndarray
    """`CostModel.work_of`."""
    busiest_A: np.ndarray
    extra_A: np.ndarray
    """The arguments of `SendingModel.seconds_of`."""
    more_A: np.ndarray
    """Time of all ranks in Trans that the candidate adds."""
    trans_A: np.ndarray
    agg_A: np.ndarray
    """Seconds of Trans and of Agg, as on the busiest rank."""

    @property
    def seconds_A(self) -> np.ndarray:
        """Seconds of the layer by Eq. 6 or 8."""
        return self.cost.time_of(self.exchanging_A, self.computed_A, self.trans_A, self.agg_A).total


@dataclass(frozen=True, eq=False, kw_only=True)
class Hosting:
    """The hosts of a layer's experts, and what follows from them."""

    layer: Layer
    shares_ED: np.ndarray
    """[E, D] int64: as `Tables.shares_ED`."""
    primary_E: np.ndarray
    """The host of tokens of ranks that are not hosts; if it is no host, that of `Placement.rehost`."""
    loads_FBD: np.ndarray
    """Sum of the experts' loads."""
    sent_D: np.ndarray
    """Time of all experts in Trans: see `SendingModel.link_times`."""
    extra_E: np.ndarray
    """Time on the other links of each expert's chain."""

    @classmethod
    def of(cls, layer: Layer, placement: Placement, **more: Any) -> Self:
        """Return the hosts of `placement`, without quotas."""
        cost = layer.cost
        counts_BDE = layer.counts_EBD.transpose(1, 2, 0)
        loads_FBD = placement_loads(cost.network, cost.split, counts_BDE, placement)
        extra_E = np.zeros(len(layer.owner_E))
        shares_ED = placement.tables.shares_ED
        primary_E = np.array(placement.primary)
        sent_D = np.zeros(placement.num_ranks)
        guest_M = np.flatnonzero(((shares_ED > 0) & ~layer.owned_ED).any(1))
        if len(guest_M):
            guests_MD = (shares_ED[guest_M] > 0) & ~layer.owned_ED[guest_M]
            sent_MD, extra_E[guest_M] = cost.transport.link_times(layer.owner_E[guest_M], guests_MD)
            sent_D = sent_MD.sum(0)
        return cls(
            layer=layer,
            shares_ED=shares_ED,
            primary_E=primary_E,
            loads_FBD=loads_FBD,
            sent_D=sent_D,
            extra_E=extra_E,
            **more,
        )

    def changed(self, expert_A: np.ndarray, shares_AD: np.ndarray, primary_A: np.ndarray, **more: Any) -> Self:
        """Return the state in which experts, each of them once, have other hosts."""
        layer = self.layer
        loads_FBD = np.zeros_like(self.loads_FBD)
        sent_D = np.zeros_like(self.sent_D)
        extra_E = self.extra_E.copy()
        shares_ED = self.shares_ED.copy()
        primary_E = self.primary_E.copy()
        change(
            *(loads_FBD, sent_D, extra_E, layer.counts_EBD, shares_ED, primary_E, layer.owner_E),
            *(expert_A, shares_AD, primary_A, layer.cost.prices[0]),
        )
        return replace(
            self,
            shares_ED=shares_ED,
            primary_E=primary_E,
            loads_FBD=self.loads_FBD + loads_FBD,
            sent_D=self.sent_D + sent_D,
            extra_E=extra_E,
            **more,
        )

    def tried(
        self,
        expert_KA: np.ndarray,
        shares_KAD: np.ndarray,
        primary_KA: np.ndarray,
        begins_A: np.ndarray | None = None,
    ) -> Tried:
        """Return the layer under candidates that give each of K different experts other hosts.

        The longest chain may be one of those before the change.

        Args:
            expert_KA: -1 for none.
            begins_A: whether a candidate is on its own; otherwise it comes after the one before it. None: all are.
        """
        layer = self.layer
        ways = expert_KA.shape[1]
        begins_A = np.ones(ways, dtype=bool) if begins_A is None else begins_A
        costs = try_(
            *(self.loads_FBD, self.sent_D, self.longest, *self._experts),
            *(expert_KA, shares_KAD, primary_KA, begins_A, *layer.cost.prices),
        )
        return Tried(layer.cost, *costs)

    @property
    def _experts(self) -> tuple[np.ndarray, ...]:
        return self.layer.counts_EBD, self.shares_ED, self.primary_E, self.layer.owner_E

    @cached_property
    def longest(self) -> float:
        """Time on the other links of the longest chain."""
        return float(self.extra_E.max())

    @cached_property
    def now(self) -> Tried:
        """The layer under these hosts, as the only candidate."""
        nothing = np.full((1, 1), -1)
        return self.tried(nothing, np.zeros((1, 1, len(self.sent_D)), dtype=np.int64), nothing)

    @property
    def work_BD(self) -> np.ndarray:
        """Seconds of each rank in each microbatch: see `CostModel.rank_seconds`."""
        return self.now.work_ABD[0]

    @cached_property
    def seconds(self) -> float:
        """Seconds of the layer by Eq. 6 or 8, with Trans and Agg as on the busiest rank."""
        return self._seconds(*self._sending)

    @cached_property
    def at_most(self) -> float:
        """Seconds of the layer if Trans and Agg take DOUBT times as long as on the busiest rank."""
        trans, agg = self._sending
        return self._seconds(DOUBT * trans, DOUBT * agg)

    @cached_property
    def at_least(self) -> float:
        """Seconds of the layer without Trans and Agg."""
        return self._seconds(0.0, 0.0)

    def _seconds(self, trans: float, agg: float) -> float:
        exchanging = float(self.now.exchanging_A[0])
        computed = float(self.now.computed_A[0])
        return float(self.layer.cost.time_of(exchanging, computed, trans, agg).total)

    @cached_property
    def floor(self) -> float:
        """Lower bound on the seconds with more guests: even loads, no exchange, the experts already sent."""
        return float(self.layer.cost.time_of(0.0, self.layer.mean, *self._sending).total)

    @cached_property
    def _sending(self) -> tuple[float, float]:
        return float(self.now.trans_A[0]), float(self.now.agg_A[0])

    @property
    def tokens_BD(self) -> np.ndarray:
        """Number of tokens that each rank computes in each microbatch."""
        return self.loads_FBD[COMPUTED]

    @cached_property
    def guests_ED(self) -> np.ndarray:
        """[E, D] bool: whether an expert takes a guest slot of a rank."""
        return (self.shares_ED > 0) & ~self.layer.owned_ED

    def slowest(self) -> tuple[int, int]:
        """Return the microbatch and the rank with the most seconds above the mean."""
        over_BD = self.work_BD - self.work_BD.mean(-1, keepdims=True)
        microbatch, rank = divmod(int(over_BD.argmax()), over_BD.shape[-1])
        return microbatch, rank

    def involved_seconds(self, tried: Tried, expert: int, rank: int, involved_AD: np.ndarray) -> np.ndarray:
        """Return [A] the time of the ranks involved in candidates, Trans and Agg included.

        Other ranks count with the mean: with several slow ranks, relieving one alone would not change the maximum. Nor
        is what the slow `rank` computes of other experts beyond the mean counted, because they are next; it is taken
        off `tried.work_ABD`.
        """
        layer = self.layer
        found_A = np.zeros(len(involved_AD))
        involve(
            *(self.loads_FBD, *self._experts, expert, rank),
            *(involved_AD, *layer.cost.prices, self.work_BD, tried.work_ABD, found_A),
        )
        return found_A + sum(layer.cost.exposed(layer.mean, tried.trans_A, tried.agg_A))

    def expert_loads(self, expert_A: np.ndarray, shares_AD: np.ndarray) -> np.ndarray:
        """Return [A, 5, B, D]: the loads of experts with these hosts."""
        owner_A = self.layer.owner_E[expert_A]
        primary_A = self.primary_E[expert_A]
        row_A = np.arange(len(expert_A))
        first_A = np.where(shares_AD[row_A, owner_A], owner_A, (shares_AD > 0).argmax(1))
        primary_A = np.where(shares_AD[row_A, primary_A], primary_A, first_A)
        cost = self.layer.cost
        counts_ABD = self.layer.counts_EBD[expert_A]
        return expert_loads(cost.network, cost.split, counts_ABD, shares_AD, primary_A)
