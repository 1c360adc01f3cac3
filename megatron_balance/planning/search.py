"""The search of the policy `quota` for the fastest of many plans: one compiled loop.

1. After a few first ways, the neighbors of the fastest way are tried, then those of the next fastest one, and so on:
   ways in which one number is a step higher or lower. So prices and loads decide which ways are tried.
2. In the fastest plan, guests are replaced (`planning/replacing.py`) and tokens shift between hosts
   (`planning/tuning.py`), until that makes the layer no faster. The next fastest plan of another kind follows, as long
   as steps are left. Ways of one kind differ in their target alone.

In shapes, A counts ways, N the numbers of a way, K kinds of ways, and F costs of a guest on another node.
"""

from typing import Annotated, NamedTuple

import numpy as np

from megatron_balance.cost.core import COMPUTED, Prices, sum_work
from megatron_balance.cost.layer import layer_seconds
from megatron_balance.cost.messages import Messages, fastest_sending
from megatron_balance.device.compiled import compiled
from megatron_balance.planning.fit import BUSIEST, ORDERS
from megatron_balance.planning.plans import NOBODY, Layer, Way, add_some, guests_of, level_all, localize
from megatron_balance.planning.replacing import replace_guests
from megatron_balance.planning.tuning import tune

LOCALIZED = (0, 1, 2, 3, 4, 6, 9)
"""Values of `Way.sent` that are tried."""

TARGETS = (1.0, 1.005, 1.01, 1.02, 1.035, 1.06, 1.1, 1.17, 1.3, 1.5)
"""Values of `Way.target` that are tried."""

MISSED = 1.002
"""A plan misses its target if the busiest rank has more tokens than the target, times this number."""

PROMISING = 1.05
"""The next higher target is tried if a plan that misses its own takes less than the fastest plan, times this number."""

NEGLIGIBLE = 0.0005
"""Share of a layer's seconds that guests must save, because the cost model omits part of their cost."""


class Found(NamedTuple):
    """The fastest plan."""

    guest_DG: Annotated[np.ndarray, "int64[:,::1]"]
    """The expert in each guest slot; all are `NOBODY` if no guests pay."""
    taken_DG: Annotated[np.ndarray, "int64[:,::1]"]
    """Tokens of all microbatches that the guest takes over."""
    seconds: float
    """Seconds of the layer."""


@compiled(None)
def _tried(way_AN: np.ndarray, sents: int, fars: int) -> np.ndarray:
    """Return whether each way is among some ways, by its numbers' places."""
    is_tried = np.zeros((sents, len(TARGETS), len(ORDERS), fars), np.bool_)
    for way_N in way_AN:
        is_tried[way_N[0], way_N[1], way_N[2], way_N[3]] = True
    return is_tried


@compiled(None)
def _add_neighbor(way_AN: np.ndarray, near: int, n: int, step: int, number: int, is_tried: np.ndarray) -> int:
    """Add the way with one number a step higher or lower, if it is not tried yet and there is room for it; return the
    number of ways."""
    way_N = way_AN[near].copy()
    way_N[n] += step
    if number == len(way_AN) or not 0 <= way_N[n] < is_tried.shape[n]:
        return number
    if is_tried[way_N[0], way_N[1], way_N[2], way_N[3]]:
        return number
    is_tried[way_N[0], way_N[1], way_N[2], way_N[3]] = True
    way_AN[number] = way_N
    return number + 1


_Costs = tuple[np.ndarray, np.ndarray, Prices, np.ndarray, np.ndarray]
"""The arguments `degrees`, `messages_1`, `prices`, `rate_D` and `per_token_D` of `fastest_plan`."""


@compiled(None)
def _improve(
    layer: Layer,
    guest_DG: np.ndarray,
    taken_DG: np.ndarray,
    seconds: float,
    steps: int,
    costs: _Costs,
) -> tuple[float, int]:
    """Replace guests and shift tokens in place, until that makes the layer no faster, or no steps are left. Return the
    layer's seconds, which are `seconds` before, and the number of steps that are left."""
    degrees, _, prices, rate_D, per_token_D = costs
    shifted_DG = np.empty_like(taken_DG)
    while steps > 0:
        replaced, tried = replace_guests(layer, guest_DG, taken_DG, steps, *costs)
        steps -= tried
        shifted_DG[:] = taken_DG
        exchanging, computed, tried = tune(layer, guest_DG, shifted_DG, steps, prices, rate_D, per_token_D)
        steps -= tried
        seconds = layer_seconds(exchanging, computed, replaced.trans, replaced.agg, degrees, prices.layer)
        if seconds >= replaced.layer:
            return replaced.layer, steps
        taken_DG[:] = shifted_DG
    return seconds, steps


@compiled(None)
def _fastest_of(
    layer: Layer,
    plan_KTDG: np.ndarray,
    seconds_K: np.ndarray,
    alone: float,
    steps: int,
    costs: _Costs,
) -> Found:
    """Improve plans, from the fastest one on, as long as steps are left, and return the fastest one. A plan of at least
    `alone` seconds does not pay."""
    shape = plan_KTDG.shape[2:]
    found = Found(np.full(shape, NOBODY), np.zeros(shape, np.int64), alone)
    while seconds_K.min() < np.inf:
        kind = seconds_K.argmin()
        plan = plan_KTDG[kind, 0], plan_KTDG[kind, 1]
        seconds, steps = _improve(layer, *plan, seconds_K[kind], steps, costs)
        seconds_K[kind] = np.inf
        if seconds < found.seconds:
            found = Found(*plan, seconds)
        if steps <= 0:
            break
    return found


@compiled(
    "Found(Layer, int64[:,::1], int64, int64, int64[::1], int64, int64[::1], int64[::1], Messages[::1], Prices[::1], "
    "float64[::1], float64[::1])",
    Found,
    Layer,
    Messages,
    Prices,
)
def fastest_plan(
    layer: Layer,
    way_AN: np.ndarray,
    first: int,
    sents: int,
    far_F: np.ndarray,
    steps: int,
    order_B: np.ndarray,
    degrees: np.ndarray,
    messages_1: np.ndarray,
    prices_1: np.ndarray,
    rate_D: np.ndarray,
    per_token_D: np.ndarray,
) -> Found:
    """Return the fastest plan; the last arguments are `CostModel.prices`.

    Args:
        way_AN: places of each way's numbers in LOCALIZED, TARGETS, ORDERS and `far_F`. Rows after the `first` ones are
            for the neighbors, which this function chooses.
        sents, far_F: number of values of LOCALIZED, and values of `Way.far`, that may be tried.
        steps: number of replacements of guests and shifts of tokens that are priced.
        order_B: microbatches, in the order in which they are leveled.
        degrees, messages_1: see `CostModel` and `SendingModel`.
    """
    prices = prices_1[0]
    size = prices.links.node_size
    shape = len(rate_D), layer.slots
    is_tried = _tried(way_AN[:first], sents, len(far_F))
    localized_STDG = np.empty((sents, 2, *shape), np.int64)
    is_localized_S = np.zeros(sents, np.bool_)
    guest_DG = np.empty(shape, np.int64)
    taken_DG = np.empty(shape, np.int64)
    seconds_K = np.full(sents * len(ORDERS) * len(far_F), np.inf)
    plan_KTDG = np.empty((len(seconds_K), 2, *shape), np.int64)
    added_FBD = np.zeros_like(layer.owned_FBD)
    work_BD = np.empty(added_FBD.shape[1:])
    mean = layer.owned_FBD[COMPUTED].sum() / rate_D.sum()
    exchanging, computed = sum_work(layer.owned_FBD, added_FBD, work_BD, prices, rate_D, per_token_D)
    alone = layer_seconds(exchanging, computed, 0.0, 0.0, degrees, prices.layer) * (1 - NEGLIGIBLE)
    least = alone
    seconds_A = np.full(len(way_AN), np.inf)
    number = first
    done = 0
    while done < number:
        sent, target, order, far = way_AN[done]
        way = Way(LOCALIZED[sent], TARGETS[target], order, int(far_F[far]))
        if not is_localized_S[sent]:
            is_localized_S[sent] = True
            localize(localized_STDG[sent, 0], localized_STDG[sent, 1], layer, way, size, prices.sending.far)
        guest_DG[:] = localized_STDG[sent, 0]
        taken_DG[:] = localized_STDG[sent, 1]
        level_all(guest_DG, taken_DG, layer, way, order_B, rate_D, size)
        guests = guests_of(guest_DG, taken_DG, layer.total_E)
        added_FBD[:] = 0.0
        add_some(added_FBD, 1.0, layer, guests, 0, len(guests.expert_M), size)
        exchanging, computed = sum_work(layer.owned_FBD, added_FBD, work_BD, prices, rate_D, per_token_D)
        seconds = layer_seconds(exchanging, computed, 0.0, 0.0, degrees, prices.layer)
        if seconds < least:
            trans, agg = fastest_sending(guests.expert_M, guests.rank_M, layer.owner_E, len(rate_D), messages_1)[:2]
            seconds = layer_seconds(exchanging, computed, trans, agg, degrees, prices.layer)
            least = min(least, seconds)
        kind = (sent * len(ORDERS) + order) * len(far_F) + far
        if seconds < min(alone, seconds_K[kind]):
            seconds_K[kind] = seconds
            plan_KTDG[kind, 0] = guest_DG
            plan_KTDG[kind, 1] = taken_DG
        is_missed = order == BUSIEST and not way.sent and computed > MISSED * way.target * mean
        if is_missed and seconds < PROMISING * least:
            number = _add_neighbor(way_AN, done, 1, 1, number, is_tried)
        seconds_A[done] = seconds
        done += 1
        while number == done < len(way_AN) and seconds_A[:done].min() < np.inf:
            near = seconds_A[:done].argmin()
            # Its neighbors are tried once
            seconds_A[near] = np.inf
            for n in range(len(is_tried.shape)):
                for step in (-1, 1):
                    number = _add_neighbor(way_AN, near, n, step, number, is_tried)
    costs = degrees, messages_1, prices, rate_D, per_token_D
    return _fastest_of(layer, plan_KTDG, seconds_K, alone, steps, costs)
