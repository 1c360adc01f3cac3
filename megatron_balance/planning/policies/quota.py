"""The quota policy: few guests with exact numbers of tokens, chosen by the layer's seconds."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.core import COMPUTED
from megatron_balance.cost.loads import by_microbatch, owner_loads
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.fit import BUSIEST, FILLING, PARTS, WHOLE
from megatron_balance.planning.policies.interface import Policy, owners_host
from megatron_balance.planning.search import NOBODY, Layer, Way, make_plans, way_record
from megatron_balance.planning.tuning import tune

EVEN = 1.01
"""Tokens of the busiest rank, over the mean, of loads that are even."""

NEGLIGIBLE = 0.0005
"""Share of a layer's seconds that guests must save, because the cost model omits part of their cost."""

HIDDEN = 0.05
"""Fraction of hidden Trans and Agg that is charged, if the profile does not say how much they slow down computation."""

TARGET = 1.02
"""Tokens of the busiest rank, over the mean, at which the first way aims."""

LOOSE = 1.3
"""The same, if several microbatches are leveled."""

PART = 0.7
"""Fraction of a node's guest slots that localized experts may use at first, because leveling needs slots, too."""

LOCALIZED = (0, 1, 2, 4)
"""Numbers of experts that the first ways may send to, or from, a rank to localize them."""

EXCESSES = (0.0, 0.5, 1.5, 2.5)
"""Excesses of targets over the mean that are tried, relative to the best so far."""

FINE_EXCESSES = (0.7, 0.85, 1.2, 1.4)

WORK = 600
"""Number of ways, times ranks, that are tried while they make the layer faster."""

TUNING = 2000
"""Number of shifts of tokens, times ranks, that are tried."""

QUICK_TARGETS = (1.005, 1.03, 1.15)
"""Targets that are tried while a forward pass waits for the plan."""


class Quota(Policy):
    """Gives each guest the number of tokens that makes the layer fastest by the cost model.

    `planning/search.py` makes plans in many ways: some experts are localized, and then the ranks are leveled. The first
    ways differ in how many experts are localized. Each further step changes one number of the fastest way so far, so
    prices and loads decide which ways are tried. Finally, tokens shift between the hosts of the fastest plan. A plan
    for a load that has just been observed, for which the forward pass waits, is the fastest of few ways.
    """

    name = "quota"
    split = "proportional"
    sets_quotas = True
    must_pay = True
    adds_guests = True

    def __init__(self) -> None:
        make_plans.prepare()
        tune.prepare()

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

    way: Way
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
        counts_EBD = np.ascontiguousarray(counts_BDE.transpose(2, 0, 1), np.float64)
        tokens_EB = counts_EBD.sum(2)
        owned_FBD = owner_loads(cost.network, counts_EBD, owner_E)
        busy_BD = owned_FBD[COMPUTED] / cost.rate_D
        mean_B = owned_FBD[COMPUTED].sum(1) / cost.rate_D.sum()
        self.is_even = bool((busy_BD.max(1) <= EVEN * mean_B).all())
        """Whether owners' loads are even."""
        self.can_localize = _can_localize(counts_BDE, cost)
        self._cost = cost
        self._layer = Layer(
            counts_EBD=counts_EBD,
            tokens_EB=tokens_EB,
            total_E=tokens_EB.sum(1).astype(np.int64),
            owner_E=owner_E,
            home_DS=home_DS,
            owned_FBD=owned_FBD,
            **_pairs(counts_BDE, owner_E, cost if self.can_localize else None),
            slots=slots,
        )
        self._order_B = np.argsort(mean_B - busy_BD.max(1), kind="stable")
        self._overhead = float(cost.time_of(0.0, 0.0, 0.0, 0.0).total)
        self._messages = cost.transport.messages_1
        kernels = cost.profile.kernels
        self._slowed = HIDDEN if kernels is None else kernels.occupied
        """Seconds by which a hidden second of Trans or Agg lengthens computation."""
        self._times = max(1, cost.trans_each)
        """Number of Trans for one Agg."""
        self._tried = dict[Way, None]()
        self._best: GuestPlan | None = None

    @property
    def num_ranks(self) -> int:
        return len(self._layer.home_DS)

    def pays(self, plan: GuestPlan) -> bool:
        """Return whether a plan makes the layer faster than it is without guests."""
        alone = float(self._cost.time_of(*self._cost.work_of(self._layer.owned_FBD), 0.0, 0.0).total)
        return plan.charged < alone * (1 - NEGLIGIBLE)

    def best(self) -> GuestPlan:
        """Return the fastest plan."""
        far = self._cost.transport.far
        start = Way(0.0, PART, TARGET, FILLING, round(far * PARTS))
        sent = LOCALIZED if self.can_localize else (0,)
        ways = [start._replace(sent=experts * far) for experts in sent]
        if len(self._order_B) > 1:
            # Microbatches share the slots
            ways += [way._replace(target=LOOSE) for way in ways]
            ways += self._reach(ways[len(sent)], fine=False)
        best = self._fastest(ways)
        best = self._fastest(self._reach(best.way, fine=False))
        first = best.way.target
        best = self._fastest([*self._level(best.way, EXCESSES), best.way._replace(order=WHOLE)])
        while best.way.target > first:
            # Slots may not suffice for loads that are nearly even
            first = best.way.target
            best = self._fastest(self._level(best.way, (2.0, 5.0)))
        found = None
        while found != best.way and len(self._tried) * self.num_ranks < WORK:
            found = best.way
            best = self._fastest(self._localize(best.way))
            best = self._fastest(self._reach(best.way, fine=True))
            orders = [best.way._replace(order=order) for order in (FILLING, WHOLE, BUSIEST)]
            best = self._fastest([*self._level(best.way, FINE_EXCESSES), *orders])
        return self._tuned(best)

    def quick(self) -> GuestPlan:
        """Return the fastest plan of a fixed number of ways that localize nothing."""
        costs = [PARTS]
        if len(self._cost.network.first_N) > 1:
            costs = [0, round(self._cost.transport.far * PARTS)]
        best = self._fastest(Way(0.0, PART, target, FILLING, far) for far in costs for target in QUICK_TARGETS)
        return self._fastest([best.way._replace(order=WHOLE), *self._level(best.way, (0.4, 2.0))])

    def _localize(self, way: Way) -> list[Way]:
        """Return ways that localize more or fewer experts."""
        if not way.sent:
            return []
        sent = [way._replace(sent=way.sent * factor) for factor in (0.5, 1.5, 2.0)]
        return sent + [way._replace(part=part) for part in (0.4, 0.55, 0.85, 1.0)]

    def _reach(self, way: Way, *, fine: bool) -> list[Way]:
        """Return ways with other costs of a guest on another node."""
        network = self._cost.network
        if len(network.first_N) == 1:
            return []
        costs = [PARTS, 0] if network.has_both_levels else [PARTS]
        if fine:
            costs += [2 * PARTS, round(self._cost.transport.far * PARTS)]
        found = [way._replace(far=far) for far in costs]
        return found if fine else [*found, way._replace(far=PARTS, order=BUSIEST)]

    def _level(self, way: Way, factors: Iterable[float]) -> list[Way]:
        """Return ways with other targets, by the excess over the mean."""
        return [way._replace(target=1 + (way.target - 1) * factor) for factor in factors]

    def _fastest(self, ways: Iterable[Way]) -> GuestPlan:
        """Return the fastest plan so far, after trying these ways."""
        ways = [way for way in dict.fromkeys(ways) if way not in self._tried]
        self._tried.update(dict.fromkeys(ways))
        if ways:
            ways_A = np.array(ways, way_record())
            plans = make_plans(self._layer, ways_A, self._order_B, self._limit, self._messages, *self._cost.prices)
            time = self._cost.time_of(plans.exchanging_A, plans.computed_A, plans.trans_A, plans.agg_A)
            hidden_A = self._times * plans.trans_A + plans.agg_A - time.trans - time.agg
            charged_A = time.total + self._slowed * hidden_A
            a = int(charged_A.argmin())
            found = GuestPlan(
                way=ways[a],
                guest_DG=plans.guest_ADG[a],
                taken_DG=plans.taken_ADG[a],
                hidden=float(hidden_A[a]),
                charged=float(charged_A[a]),
                trans=float(plans.trans_A[a]),
                agg=float(plans.agg_A[a]),
            )
            if self._best is None or found.charged < self._best.charged:
                self._best = found
        assert self._best is not None
        return self._best

    @property
    def _limit(self) -> float:
        """Seconds of exchanges and computation, beyond those without tokens, that are as slow as the best plan."""
        if self._best is None or self._cost.degrees != (1,):
            return np.inf
        return self._best.charged - self._overhead

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
        expert_M, rank_M, taken_M = plan.guests
        shared_X = np.unique(expert_M)
        left_E = self._layer.total_E - np.bincount(expert_M, taken_M, alone.num_experts).astype(np.int64)
        kept_X = shared_X[left_E[shared_X] > 0]
        expert_N = np.append(expert_M, kept_X)
        host_N = np.append(rank_M, self._layer.owner_E[kept_X])
        quota_N = np.append(taken_M, left_E[kept_X])
        order_N = np.lexsort((host_N, expert_N))
        ordered = (column_N[order_N] for column_N in (expert_N, host_N, quota_N))
        return alone.with_quotas(*ordered, kept_slots=0, guest_slots=self._layer.slots)


def _can_localize(counts: np.ndarray, cost: CostModel) -> bool:
    """Return whether experts may be sent to save messages: they are hidden, or smaller than their tokens. A plan that a
    forward pass waits for has no time to find them."""
    # Tokens travel to experts and back, forward and backward
    experts_bytes = counts.shape[-1] * (cost.param_bytes + cost.grad_bytes)
    if cost.trans_each:
        return False
    pays = cost.sends_ahead or 4 * cost.token_bytes * int(counts.sum()) > experts_bytes
    return pays and len(cost.network.first_N) > 1


def _pairs(counts_BDE: np.ndarray, owner_E: np.ndarray, cost: CostModel | None) -> dict[str, np.ndarray]:
    """Return the fields of Layer about experts and other nodes; None: no expert will be localized."""
    if cost is None:
        nothing = np.zeros(0, np.int64)
        return {"pair_P": nothing, "pair_tokens_P": nothing}
    network = cost.network
    tokens_NE = np.add.reduceat(counts_BDE.sum(0), network.first_N, axis=0)
    tokens_NE[network.node_D[owner_E], np.arange(len(owner_E))] = 0
    pair_P = np.argsort(-tokens_NE, axis=None, kind="stable")
    return {"pair_P": pair_P, "pair_tokens_P": tokens_NE.ravel()[pair_P]}
