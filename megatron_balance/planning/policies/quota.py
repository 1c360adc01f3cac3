"""The quota policy: few guests with exact numbers of tokens, chosen by the layer's seconds."""

from typing import NamedTuple

import numpy as np

from megatron_balance.cost.core import COMPUTED
from megatron_balance.cost.loads import by_microbatch
from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.fit import BUSIEST, FILLING, PARTS, WHOLE
from megatron_balance.planning.plans import NOBODY, Layer, hosts_of, make_layer
from megatron_balance.planning.policies.interface import Policy, owners_host
from megatron_balance.planning.search import LOCALIZED, TARGETS, fastest_plan

EVEN = 1.01
"""Tokens of the busiest rank, over the mean, of loads that are even."""

EVENLY = TARGETS.index(1.005)
"""Target of the first ways."""

LESS_EVENLY = TARGETS.index(1.01)
"""Target of a first way with more guests than FEWER."""

FEWER = TARGETS.index(1.02)
"""Target of first ways that aim at fewer guests."""

SPARINGLY = TARGETS.index(1.06)
"""Target of a first way with few guests, if a forward pass waits for them."""

LOOSELY = TARGETS.index(1.3)
"""Target of more first ways if several microbatches, which share the slots, are leveled."""

WORK = 5040
"""Time of a plan, as a number of ways, times ranks and slots + 2: a way takes time in proportion to both."""

LEAST_WORK = 102
"""Least number of ways, times slots + 2. From 50 ranks on, the number of ways no longer depends on the ranks."""

SET_UP = 5
"""Time to set up, improve and return a plan, in ways."""

TUNING = 4500
"""Number of replacements of guests and shifts of tokens that are priced, times ranks."""

STEPS = 32
"""Least number of these steps."""

QUICK = 9
"""Number of ways that are tried while a forward pass waits for the plan."""


class Quota(Policy):
    """Gives each guest the number of tokens that makes the layer fastest by the cost model.

    It takes the fastest of many plans (`planning/search.py`), or of few where a forward pass waits for the plan.
    """

    name = "quota"
    split = "proportional"
    sets_quotas = True
    must_pay = True
    adds_guests = True

    def __init__(self) -> None:
        for loop in (make_layer, fastest_plan, hosts_of):
            loop.prepare()

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        alone = current if current.is_identity else owners_host(current)
        if not current.guest_slots or current.num_ranks == 1:
            return alone
        homes = current.owner_E, current.home_DS
        plan = search(by_microbatch(counts), *homes, current.guest_slots, cost, is_quick=cost.trans_each > 0)
        return alone if plan is None else plan.placement(alone)

    def guests(
        self, counts_DE: np.ndarray, owner_E: np.ndarray, home_DS: np.ndarray, slots: int, cost: CostModel
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        plan = search(counts_DE[None], owner_E, home_DS, slots, cost, is_quick=True)
        if plan is None:
            nothing = np.zeros(0, np.int64)
            return nothing, nothing, nothing
        return plan.guests


class GuestPlan(NamedTuple):
    """A plan that makes the layer faster."""

    layer: Layer
    guest_DG: np.ndarray
    taken_DG: np.ndarray
    """See `search.Found`."""
    seconds: float

    @property
    def guests(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[M] the expert, the rank and the tokens of each guest."""
        rank_M, slot_M = (self.guest_DG != NOBODY).nonzero()
        return self.guest_DG[rank_M, slot_M], rank_M, self.taken_DG[rank_M, slot_M]

    def placement(self, alone: Placement) -> Placement:
        """Return the placement with these guests; owners compute the remaining tokens. `alone` has no guests."""
        hosts = hosts_of(self.guest_DG, self.taken_DG, self.layer.total_E, self.layer.owner_E)
        return alone.with_quotas(*hosts, kept_slots=0, guest_slots=self.layer.slots)


def search(
    counts_BDE: np.ndarray, owner_E: np.ndarray, home_DS: np.ndarray, slots: int, cost: CostModel, *, is_quick: bool
) -> GuestPlan | None:
    """Return the fastest plan; None if owners alone are as fast.

    Args:
        counts_BDE: the loads, as in `Policy.plan`.
        owner_E, home_DS: int64, the owner of each expert, and the experts of each rank.
        slots: number of guest slots of a rank.
        cost: seconds of a plan.
        is_quick: whether few ways are tried.
    """
    counts_BDE = np.ascontiguousarray(counts_BDE, np.int64)
    ranks = len(home_DS)
    layer = make_layer(counts_BDE, owner_E, home_DS, slots, cost.network.node_size)
    busy_B = (layer.owned_FBD[COMPUTED] / cost.rate_D).max(1)
    mean_B = layer.owned_FBD[COMPUTED].sum(1) / cost.rate_D.sum()
    localizes = _can_localize(counts_BDE, cost)
    if not localizes and (busy_B <= EVEN * mean_B).all():
        return None
    if localizes:
        layer = layer._replace(pair_P=np.sort(layer.pair_P))
    fars = _fars(cost)
    ways = _first_ways(len(counts_BDE), fars, cost, localizes=localizes)
    most = QUICK if is_quick else max(WORK // ranks, LEAST_WORK) // (slots + 2) - SET_UP
    way_AN = np.zeros((max(most, len(ways)), 4), np.int64)
    way_AN[: len(ways)] = ways
    found = fastest_plan(
        layer,
        way_AN,
        len(ways),
        len(LOCALIZED) if localizes else 1,
        np.array(fars),
        0 if is_quick else max(STEPS, TUNING // ranks),
        np.argsort(mean_B - busy_B, kind="stable"),
        np.array(cost.degrees),
        cost.transport.messages_1,
        *cost.prices,
    )
    return GuestPlan(layer, *found) if found.guest_DG.max() != NOBODY else None


def _fars(cost: CostModel) -> list[int]:
    """Return the costs of a guest on another node that are tried."""
    if not cost.network.has_both_levels:
        return [PARTS]
    return sorted({0, PARTS, 2 * PARTS, round(cost.transport.far * PARTS)})


def _first_ways(microbatches: int, fars: list[int], cost: CostModel, *, localizes: bool) -> list[tuple[int, ...]]:
    """Return the first ways, which differ most, as in `search.fastest_plan`."""
    near = fars.index(PARTS)
    far = fars.index(round(cost.transport.far * PARTS)) if len(fars) > 1 else near
    starts = [(1, far), (3, near)] if localizes else []
    starts += [(0, far), (0, near), (0, 0)]
    targets = (EVENLY,) if microbatches == 1 else (EVENLY, LOOSELY)
    ways = [(sent, target, FILLING, reach) for target in targets for sent, reach in starts]
    if localizes:
        ways.append((2, FEWER, FILLING, 0))
    if cost.trans_each:
        ways.append((0, SPARINGLY, FILLING, far))
    return [*dict.fromkeys([*ways, (0, FEWER, WHOLE, near), (0, LESS_EVENLY, BUSIEST, near)])]


def _can_localize(counts: np.ndarray, cost: CostModel) -> bool:
    """Return whether experts may be sent to save messages: they are hidden, or smaller than their tokens. A plan that a
    forward pass waits for has no time to find them."""
    # Tokens travel to experts and back, forward and backward
    experts_bytes = counts.shape[-1] * (cost.param_bytes + cost.grad_bytes)
    if cost.trans_each:
        return False
    pays = cost.sends_ahead or 4 * cost.token_bytes * int(counts.sum()) > experts_bytes
    return pays and len(cost.network.first_N) > 1
