"""The search of the policy `quota` for the fastest of many plans: one compiled loop.

After a few first ways, the neighbors of the fastest way are tried, then those of the next fastest one, and so on: ways
in which one number is a step higher or lower. So prices and loads decide which ways are tried. Finally, tokens shift
between the hosts of the fastest plan (`planning/tuning.py`).

In shapes, A counts ways, N the numbers of a way, and F costs of a guest on another node.
"""

from typing import Annotated, NamedTuple

import numpy as np

from megatron_balance.cost.core import Prices, sum_work
from megatron_balance.cost.layer import layer_seconds
from megatron_balance.cost.messages import Messages, fastest_sending
from megatron_balance.device.compiled import compiled
from megatron_balance.planning.fit import ORDERS
from megatron_balance.planning.plans import NOBODY, Layer, Way, add_some, guests_of, level_all, localize
from megatron_balance.planning.replacing import replace_guests
from megatron_balance.planning.tuning import tune

LOCALIZED = (0, 1, 2, 3, 4, 6, 9)
"""Values of `Way.sent` that are tried."""

TARGETS = (1.0, 1.005, 1.01, 1.02, 1.035, 1.06, 1.1, 1.17, 1.3, 1.5)
"""Values of `Way.target` that are tried."""

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
def _add_neighbors(way_AN: np.ndarray, near: int, number: int, is_tried: np.ndarray) -> int:
    """Add the ways next to one that are not tried yet, as far as there is room; return the number of ways."""
    for n in range(len(is_tried.shape)):
        for step in (-1, 1):
            way_N = way_AN[near].copy()
            way_N[n] += step
            if number == len(way_AN) or not 0 <= way_N[n] < is_tried.shape[n]:
                continue
            if not is_tried[way_N[0], way_N[1], way_N[2], way_N[3]]:
                is_tried[way_N[0], way_N[1], way_N[2], way_N[3]] = True
                way_AN[number] = way_N
                number += 1
    return number


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
        steps: number of replacements of guests, and then of shifts of tokens, that are priced.
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
    best_guest_DG = np.full(shape, NOBODY)
    best_taken_DG = np.zeros(shape, np.int64)
    added_FBD = np.zeros_like(layer.owned_FBD)
    work_BD = np.empty(added_FBD.shape[1:])
    exchanging, computed = sum_work(layer.owned_FBD, added_FBD, work_BD, prices, rate_D, per_token_D)
    least = layer_seconds(exchanging, computed, 0.0, 0.0, degrees, prices.layer) * (1 - NEGLIGIBLE)
    seconds_A = np.full(len(way_AN), np.inf)
    done = 0
    number = first
    while done < number:
        for a in range(done, number):
            place = way_AN[a, 0]
            way = Way(LOCALIZED[place], TARGETS[way_AN[a, 1]], way_AN[a, 2], int(far_F[way_AN[a, 3]]))
            if not is_localized_S[place]:
                is_localized_S[place] = True
                localize(localized_STDG[place, 0], localized_STDG[place, 1], layer, way, size, prices.sending.far)
            guest_DG[:] = localized_STDG[place, 0]
            taken_DG[:] = localized_STDG[place, 1]
            level_all(guest_DG, taken_DG, layer, way, order_B, rate_D, size)
            guests = guests_of(guest_DG, taken_DG, layer.total_E)
            added_FBD[:] = 0.0
            add_some(added_FBD, 1.0, layer, guests, 0, len(guests.expert_M), size)
            exchanging, computed = sum_work(layer.owned_FBD, added_FBD, work_BD, prices, rate_D, per_token_D)
            seconds_A[a] = layer_seconds(exchanging, computed, 0.0, 0.0, degrees, prices.layer)
            if seconds_A[a] >= least:
                continue
            trans, agg = fastest_sending(guests.expert_M, guests.rank_M, layer.owner_E, len(rate_D), messages_1)[:2]
            seconds_A[a] = layer_seconds(exchanging, computed, trans, agg, degrees, prices.layer)
            if seconds_A[a] < least:
                least = seconds_A[a]
                best_guest_DG[:] = guest_DG
                best_taken_DG[:] = taken_DG
        done = number
        while number == done < len(way_AN) and seconds_A[:done].min() < np.inf:
            near = seconds_A[:done].argmin()
            # Its neighbors are tried once
            seconds_A[near] = np.inf
            number = _add_neighbors(way_AN, near, number, is_tried)
    if steps and best_guest_DG.max() != NOBODY:
        args = degrees, messages_1, prices, rate_D, per_token_D
        replaced, tried = replace_guests(layer, best_guest_DG, best_taken_DG, steps, *args)
        taken_DG[:] = best_taken_DG
        exchanging, computed = tune(layer, best_guest_DG, taken_DG, steps - tried, prices, rate_D, per_token_D)
        seconds = layer_seconds(exchanging, computed, replaced.trans, replaced.agg, degrees, prices.layer)
        if seconds < replaced.layer:
            return Found(best_guest_DG, taken_DG, seconds)
        least = replaced.layer
    return Found(best_guest_DG, best_taken_DG, least)
