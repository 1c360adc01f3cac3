"""The hosts of a layer's experts during a search, and the layer's seconds under these hosts and many alternatives.

K counts the experts whose hosts an alternative changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_balance.cost.candidates import change, involve, try_
from megatron_balance.cost.core import COMPUTED, CandidateCosts, add_loads
from megatron_balance.cost.loads import by_microbatch, owner_loads, placement_loads
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import Placement

DOUBT = 2.0
"""Bound on the ratio of the time of Trans and Agg to their time on the busiest rank alone, in searches over many ranks.
In 126 plans for 48 and 64 ranks, the ratio was at most 1.30."""


def prepare() -> None:
    """Compile the loops of searches now, so that the first plan does not wait for numba."""
    for loop in (add_loads, change, try_, involve):
        loop.prepare()


class LayerLoad:
    """Values that are constant during a search."""

    def __init__(self, counts: np.ndarray, placement: Placement, cost: CostModel) -> None:
        """`counts`: loads [D, E] or [B, D, E]. `placement`, which is in use, gives the owners and the guest slots."""
        self.counts_EBD = np.ascontiguousarray(by_microbatch(counts).transpose(2, 0, 1), dtype=np.float64)
        self.placement = placement
        self.cost = cost

    @cached_property
    def owner_E(self) -> np.ndarray:
        """The rank that owns each expert."""
        return owners(self.placement)

    @cached_property
    def owned_ED(self) -> np.ndarray:
        """[E, D] bool: whether the rank owns the expert."""
        return self.owner_E[:, None] == np.arange(self.counts_EBD.shape[2])

    @cached_property
    def tokens_E(self) -> np.ndarray:
        """Number of tokens of each expert."""
        return self.counts_EBD.sum((1, 2))

    @cached_property
    def mean(self) -> float:
        """Tokens per rank if all ranks computed for the same time."""
        return float(self.tokens_E.sum() / self.cost.rate_D.sum())

    def seconds(self, costs: CandidateCosts) -> np.ndarray:
        """Return [A]: seconds of the layer by Eq. 6 or 8, with the busiest rank's Trans and Agg."""
        return self.cost.time_of(costs.exchanging_A, costs.computed_A, costs.trans_A, costs.agg_A).total


@dataclass(frozen=True, eq=False, kw_only=True)
class Hosting:
    """The hosts of a layer's experts, and sums that follow from them."""

    layer: LayerLoad
    shares_ED: np.ndarray
    """[E, D] int64: as `Tables.shares_ED`."""
    primary_E: np.ndarray
    """Host of tokens whose source rank is not a host; if it is no host itself, `Placement.rehost` chooses."""
    loads_FBD: np.ndarray
    """Sum of the experts' loads."""
    sent_D: np.ndarray
    """Time of all experts in Trans (`SendingModel.link_times`)."""
    extra_E: np.ndarray
    """Time on the other links of each expert's chain."""

    @classmethod
    def alone(cls, layer: LayerLoad) -> "Hosting":
        """Return the hosting in which owners alone compute their experts."""
        return cls(
            layer=layer,
            shares_ED=layer.owned_ED.astype(np.int64),
            primary_E=layer.owner_E,
            loads_FBD=owner_loads(layer.cost.network, layer.counts_EBD, layer.owner_E),
            sent_D=np.zeros(layer.counts_EBD.shape[2]),
            extra_E=np.zeros(len(layer.owner_E)),
        )

    @classmethod
    def of(cls, layer: LayerLoad) -> "Hosting":
        """Return the hosting of the placement in use. Experts with quotas must keep their hosts."""
        cost = layer.cost
        placement = layer.placement
        shares_ED = placement.tables.shares_ED
        sent_D = np.zeros(placement.num_ranks)
        extra_E = np.zeros(placement.num_experts)
        guest_ED = (shares_ED > 0) & ~layer.owned_ED
        expert_M = np.flatnonzero(guest_ED.any(1))
        if len(expert_M):
            sent_MD, extra_E[expert_M] = cost.transport.link_times(layer.owner_E[expert_M], guest_ED[expert_M])
            sent_D = sent_MD.sum(0)
        return cls(
            layer=layer,
            shares_ED=shares_ED,
            primary_E=np.array(placement.primary),
            loads_FBD=placement_loads(cost.network, cost.split, layer.counts_EBD.transpose(1, 2, 0), placement),
            sent_D=sent_D,
            extra_E=extra_E,
        )

    def changed(self, expert_A: np.ndarray, shares_AD: np.ndarray, primary_A: np.ndarray) -> "Hosting":
        """Return the hosting with other hosts for some experts, each listed once."""
        layer = self.layer
        loads_FBD = np.zeros_like(self.loads_FBD)
        sent_D = np.zeros_like(self.sent_D)
        extra_E = self.extra_E.copy()
        shares_ED = self.shares_ED.copy()
        primary_E = self.primary_E.copy()
        hosts = layer.counts_EBD, shares_ED, primary_E, layer.owner_E
        change(loads_FBD, sent_D, extra_E, *hosts, expert_A, shares_AD, primary_A, layer.cost.prices[0])
        return replace(
            self,
            shares_ED=shares_ED,
            primary_E=primary_E,
            loads_FBD=self.loads_FBD + loads_FBD,
            sent_D=self.sent_D + sent_D,
            extra_E=extra_E,
        )

    def under(
        self,
        expert_KA: np.ndarray,
        shares_KAD: np.ndarray,
        primary_KA: np.ndarray,
        begins_A: np.ndarray | None = None,
    ) -> CandidateCosts:
        """Return the costs of alternatives that each give K different experts (-1: none) other hosts. The longest chain
        may be one from before the change. `begins_A`: whether an alternative starts from this hosting (None: all do) or
        from the preceding alternative."""
        begins_A = np.ones(expert_KA.shape[1], dtype=bool) if begins_A is None else begins_A
        changes = expert_KA, shares_KAD, primary_KA, begins_A
        now = self.loads_FBD, self.sent_D, float(self.extra_E.max())
        return try_(*now, *self._experts, *changes, *self.layer.cost.prices)

    @property
    def _experts(self) -> tuple[np.ndarray, ...]:
        return self.layer.counts_EBD, self.shares_ED, self.primary_E, self.layer.owner_E

    def involved_seconds(
        self, alternatives: CandidateCosts, expert: int, rank: int, involved_AD: np.ndarray
    ) -> np.ndarray:
        """Return [A] the time of the ranks involved in alternatives, including Trans and Agg. Other ranks count with
        the mean: if several ranks are slow, relieving one of them would not change the maximum. The slow `rank`'s work
        beyond the mean on other experts does not count either, because those experts are next; it is subtracted from
        `alternatives.work_ABD`."""
        cost = self.layer.cost
        found_A = np.zeros(len(involved_AD))
        found = self.work_BD, alternatives.work_ABD, found_A
        involve(self.loads_FBD, *self._experts, expert, rank, involved_AD, *cost.prices, *found)
        return found_A + sum(cost.charged(self.layer.mean, alternatives.trans_A, alternatives.agg_A))

    @cached_property
    def _now(self) -> CandidateCosts:
        """Costs under these hosts, as the only alternative."""
        nothing = np.full((1, 1), -1)
        return self.under(nothing, np.zeros((1, 1, len(self.sent_D)), dtype=np.int64), nothing)

    @property
    def work_BD(self) -> np.ndarray:
        """Seconds of each rank in each microbatch (`CandidateCosts.work_ABD`)."""
        return self._now.work_ABD[0]

    @cached_property
    def seconds(self) -> float:
        """See `LayerLoad.seconds`."""
        return float(self.layer.seconds(self._now)[0])

    @cached_property
    def at_most(self) -> float:
        """Seconds of the layer if Trans and Agg take DOUBT times as long as on the busiest rank."""
        return self.seconds_with(DOUBT * float(self._now.trans_A[0]), DOUBT * float(self._now.agg_A[0]))

    def seconds_with(self, trans: float, agg: float) -> float:
        """Return the seconds of the layer if Trans and Agg take so long."""
        exchanging = float(self._now.exchanging_A[0])
        computed = float(self._now.computed_A[0])
        return float(self.layer.cost.time_of(exchanging, computed, trans, agg).total)

    @cached_property
    def floor(self) -> float:
        """Lower bound on the seconds with more guests: even loads, no exchange, only the experts already sent."""
        now = self._now
        return float(self.layer.cost.time_of(0.0, self.layer.mean, now.trans_A, now.agg_A).total[0])

    @property
    def tokens_BD(self) -> np.ndarray:
        """Number of tokens that each rank computes in each microbatch."""
        return self.loads_FBD[COMPUTED]

    @cached_property
    def guests_ED(self) -> np.ndarray:
        """[E, D] bool: whether an expert takes a guest slot of a rank."""
        return (self.shares_ED > 0) & ~self.layer.owned_ED

    @cached_property
    def free_slots_D(self) -> np.ndarray:
        """Number of free guest slots on each rank."""
        return self.layer.placement.guest_slots - self.guests_ED.sum(0)

    def slowest(self) -> tuple[int, int]:
        """Return the microbatch and rank with the most seconds above the mean."""
        over_BD = self.work_BD - self.work_BD.mean(-1, keepdims=True)
        microbatch, rank = divmod(int(over_BD.argmax()), over_BD.shape[-1])
        return microbatch, rank

    def hosts(self) -> list[Sequence[int]]:
        """Return the ranks that compute each expert, in the form of `Placement.rehost`."""
        hosts: list[Sequence[int]] = [*zip(self.layer.owner_E.tolist(), strict=True)]
        ranks = np.arange(len(self.sent_D))
        for expert in (self.shares_ED != self.layer.owned_ED).any(1).nonzero()[0].tolist():
            hosts[expert] = np.repeat(ranks, self.shares_ED[expert]).tolist()
        return hosts
