"""The quota policy: few guests with exact numbers of tokens, chosen by the layer's seconds."""

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.core import COMPUTED
from megatron_balance.cost.loads import by_microbatch
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.device.compiled import packed
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.fit import FILLING, ORDERS, PARTS, WHOLE
from megatron_balance.planning.policies.interface import Policy, owners_host
from megatron_balance.planning.search import LOCALIZED, NOBODY, Limit, Way, hosts_of, make_layer, make_plans, way_record
from megatron_balance.planning.tuning import tune

EVEN = 1.01
"""Tokens of the busiest rank, over the mean, of loads that are even."""

NEGLIGIBLE = 0.0005
"""Share of a layer's seconds that guests must save, because the cost model omits part of their cost."""

HIDDEN = 0.05
"""Fraction of hidden Trans and Agg that is charged, if the profile does not say how much they slow down computation."""

TARGETS = (1.0, 1.005, 1.01, 1.02, 1.035, 1.06, 1.1, 1.17, 1.3, 1.5)
"""Tokens of the busiest rank, over the mean, at which leveling aims."""

EVENLY = 1.005
"""Target of the first ways."""

FEWER = 1.02
"""Target of the first way that aims at fewer guests."""

SPARINGLY = 1.06
"""Target of a first way with few guests, for localized experts, and for guests that a forward pass waits for."""

LOOSELY = 1.3
"""Target of more first ways if several microbatches, which share the slots, are leveled."""

WAYS = 12
"""Number of ways that are always tried."""

WORK = 400
"""Number of further ways, times ranks."""

BEAM = 2
"""Number of ways whose neighbors are tried together."""

LONG = 1e6
"""Seconds of Trans and Agg that are never hidden as a whole."""

TUNING = 1600
"""Number of shifts of tokens, times ranks, that are tried."""

QUICK = 9
"""Number of ways that are tried while a forward pass waits for the plan."""


class Quota(Policy):
    """Gives each guest the number of tokens that makes the layer fastest by the cost model.

    `planning/search.py` makes plans in many ways: some experts are localized, and then the ranks are leveled. After a
    few first ways, the neighbors of the fastest way are tried, then those of the next fastest one: ways in which one
    number is a step higher or lower. So prices and loads decide which ways are tried. Finally, tokens shift between the
    hosts of the fastest plan. A plan for a load that has just been observed, for which the forward pass waits, is the
    fastest of few ways.
    """

    name = "quota"
    split = "proportional"
    sets_quotas = True
    must_pay = True
    adds_guests = True

    def __init__(self) -> None:
        for loop in (make_layer, make_plans, tune, hosts_of):
            loop.prepare()

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        alone = current if current.is_identity else owners_host(current)
        if not current.guest_slots or current.num_ranks == 1:
            return alone
        search = Search(by_microbatch(counts), owners(current), np.array(current.home), current.guest_slots, cost)
        if search.is_even and not search.can_localize:
            return alone
        best = search.quick() if cost.trans_each else search.best()
        return search.placement(best, alone) if search.pays(best) else alone

    def guests(
        self, counts_DE: np.ndarray, owner_E: np.ndarray, home_DS: np.ndarray, slots: int, cost: CostModel
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        search = Search(counts_DE[None], owner_E, home_DS, slots, cost)
        if not search.is_even and search.pays(best := search.quick()):
            return best.guests
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing


class GuestPlan(NamedTuple):
    """A plan of guests, and its seconds."""

    guest_DG: np.ndarray
    taken_DG: np.ndarray
    """See `search.Plans`."""
    hidden: float
    """Seconds of Trans and Agg that computation hides."""
    charged: float
    """Seconds of the layer, and of the computation that hidden Trans and Agg slow down."""
    trans: float
    agg: float
    """Seconds of Trans and Agg without overlap."""

    @property
    def guests(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[M] the expert, the rank and the tokens of each guest."""
        rank_M, slot_M = (self.guest_DG != NOBODY).nonzero()
        return self.guest_DG[rank_M, slot_M], rank_M, self.taken_DG[rank_M, slot_M]


class Search:
    """A search for the fastest plan."""

    def __init__(
        self, counts_BDE: np.ndarray, owner_E: np.ndarray, home_DS: np.ndarray, slots: int, cost: CostModel
    ) -> None:
        """
        Args:
            counts_BDE: the loads, as in `Policy.plan`.
            owner_E, home_DS: int64, the owner of each expert, and the experts of each rank.
            slots: number of guest slots of a rank.
            cost: seconds of a plan.
        """
        counts_BDE = np.ascontiguousarray(counts_BDE, np.int64)
        layer = make_layer(counts_BDE, owner_E, home_DS, slots, cost.network.node_size)
        busy_BD = layer.owned_FBD[COMPUTED] / cost.rate_D
        mean_B = layer.owned_FBD[COMPUTED].sum(1) / cost.rate_D.sum()
        self.is_even = bool((busy_BD.max(1) <= EVEN * mean_B).all())
        """Whether owners' loads are even."""
        self.can_localize = _can_localize(counts_BDE, cost)
        if self.can_localize:
            pair_P = np.argsort(-layer.pair_tokens_P, kind="stable")
            layer = layer._replace(pair_P=pair_P, pair_tokens_P=layer.pair_tokens_P[pair_P])
        self._cost = cost
        self._layer = layer
        self._order_B = np.argsort(mean_B - busy_BD.max(1), kind="stable")
        self._overhead = float(cost.time_of(0.0, 0.0, 0.0, 0.0).total)
        self._messages = cost.transport.messages_1
        kernels = cost.profile.kernels
        self._slowed = HIDDEN if kernels is None else kernels.occupied
        """Seconds by which a hidden second of Trans or Agg lengthens computation."""
        self._times = max(1, cost.trans_each)
        """Number of Trans for one Agg."""
        self._fars = sorted({0, PARTS, 2 * PARTS, round(cost.transport.far * PARTS)})
        """Costs of a guest on another node that are tried."""
        self._sents = LOCALIZED if self.can_localize else (0,)
        if not cost.network.has_both_levels:
            self._fars = [PARTS]
        # Even loads hide the least
        left = (LONG, LONG) if cost.trans_each else cost.exposed(float(mean_B.sum()), LONG, LONG)
        self._limit = Limit(
            seconds=np.inf,
            is_sum=cost.degrees == (1,),
            trans=LONG - float(left[0]),
            agg=LONG - float(left[1]),
            slowed=self._slowed,
            times=self._times,
        )
        self._fastest: GuestPlan | None = None

    @property
    def num_ranks(self) -> int:
        return len(self._layer.home_DS)

    def pays(self, plan: GuestPlan) -> bool:
        """Return whether a plan makes the layer faster than it is without guests."""
        alone = float(self._cost.time_of(*self._cost.work_of(self._layer.owned_FBD), 0.0, 0.0).total)
        return plan.charged < alone * (1 - NEGLIGIBLE)

    def best(self) -> GuestPlan:
        """Return the fastest plan."""
        return self._tuned(self._search(WAYS + WORK // self.num_ranks))

    def quick(self) -> GuestPlan:
        """Return the fastest plan of few ways."""
        return self._search(QUICK)

    def _search(self, most: int) -> GuestPlan:
        """Return the fastest plan of the first ways and of neighbors of the fastest ones, together at most `most`."""
        waiting = list[tuple[float, Way]]()
        every = [*itertools.product(self._sents, TARGETS, ORDERS, self._fars)]
        ways = [Way(*numbers) for numbers in every] if len(every) <= most else self._first()
        tried = {*ways}
        while True:
            for timed in zip(self._charged(ways), ways, strict=True):
                heapq.heappush(waiting, timed)
            ways = list[Way]()
            while len(tried) < most and waiting and not ways:
                nearest = [heapq.heappop(waiting)[1] for _ in waiting[:BEAM]]
                found = [way for near in nearest for way in self._neighbors(near) if way not in tried]
                ways = [*dict.fromkeys(found)][: most - len(tried)]
            if not ways:
                assert self._fastest is not None
                return self._fastest
            tried.update(ways)

    def _first(self) -> list[Way]:
        """Return the first ways, which differ most."""
        far = round(self._cost.transport.far * PARTS)
        starts = [(1, FILLING, far), (3, FILLING, PARTS)] if self.can_localize else []
        starts += [(0, FILLING, far), (0, FILLING, PARTS), (0, FILLING, 0)]
        targets = (EVENLY,) if len(self._order_B) == 1 else (EVENLY, LOOSELY)
        ways = [
            Way(sent, target, order, reach if reach in self._fars else PARTS)
            for target in targets
            for sent, order, reach in starts
        ]
        if self.can_localize:
            ways.append(Way(2, SPARINGLY, FILLING, ways[0].far))
        if self._cost.trans_each:
            ways.append(ways[0]._replace(target=SPARINGLY))
        return [*dict.fromkeys([*ways, Way(0, FEWER, WHOLE, PARTS)])]

    def _neighbors(self, way: Way) -> Iterator[Way]:
        """Yield the ways in which one number is a step higher or lower."""
        for name, steps in (("target", TARGETS), ("far", self._fars), ("sent", self._sents)):
            step = steps.index(getattr(way, name))
            for other in (*steps[max(0, step - 1) : step], *steps[step + 1 : step + 2]):
                yield way._replace(**{name: other})

    def _charged(self, ways: list[Way]) -> list[float]:
        """Return the seconds of ways' plans, or lower bounds of slower plans than the fastest; remember the fastest."""
        ways_A = np.array(ways, way_record())
        limit_1 = packed(self._limit)
        plans = make_plans(self._layer, ways_A, self._order_B, limit_1, self._messages, *self._cost.prices)
        time = self._cost.time_of(plans.exchanging_A, plans.computed_A, plans.trans_A, plans.agg_A)
        hidden_A = self._times * plans.trans_A + plans.agg_A - time.trans - time.agg
        charged_A = time.total + self._slowed * hidden_A
        a = int(charged_A.argmin())
        if self._fastest is None or charged_A[a] < self._fastest.charged:
            self._fastest = GuestPlan(
                guest_DG=plans.guest_ADG[a],
                taken_DG=plans.taken_ADG[a],
                hidden=float(hidden_A[a]),
                charged=float(charged_A[a]),
                trans=float(plans.trans_A[a]),
                agg=float(plans.agg_A[a]),
            )
            if self._limit.is_sum:
                self._limit = self._limit._replace(seconds=self._fastest.charged - self._overhead)
        return charged_A.tolist()

    def _tuned(self, plan: GuestPlan) -> GuestPlan:
        """Return the plan with other numbers of tokens, if that is faster."""
        taken_DG = plan.taken_DG.copy()
        most = TUNING // self.num_ranks
        exchanging, computed = tune(self._layer, plan.guest_DG, taken_DG, most, *self._cost.prices)
        time = self._cost.time_of(exchanging, computed, plan.trans, plan.agg)
        hidden = self._times * plan.trans + plan.agg - time.trans - time.agg
        charged = float(time.total) + self._slowed * float(hidden)
        found = plan._replace(taken_DG=taken_DG, hidden=float(hidden), charged=charged)
        return found if found.charged < plan.charged else plan

    def placement(self, plan: GuestPlan, alone: Placement) -> Placement:
        """Return the placement with these guests; owners compute the remaining tokens. `alone` has no guests."""
        hosts = hosts_of(plan.guest_DG, plan.taken_DG, self._layer.total_E, self._layer.owner_E)
        return alone.with_quotas(*hosts, kept_slots=0, guest_slots=self._layer.slots)


def _can_localize(counts: np.ndarray, cost: CostModel) -> bool:
    """Return whether experts may be sent to save messages: they are hidden, or smaller than their tokens. A plan that a
    forward pass waits for has no time to find them."""
    # Tokens travel to experts and back, forward and backward
    experts_bytes = counts.shape[-1] * (cost.param_bytes + cost.grad_bytes)
    if cost.trans_each:
        return False
    pays = cost.sends_ahead or 4 * cost.token_bytes * int(counts.sum()) > experts_bytes
    return pays and len(cost.network.first_N) > 1
