"""Replacements of a plan's guests, while they make the layer faster: compiled loops.

A replacement gives a guest slot to another expert, which relieves the rank that computes longest, or the rank that
exchanges longest. The tokens of the guest that leaves return to their owner. The most promising replacements are priced
by the cost model.

In shapes, K counts replacements that are priced.
"""

from typing import NamedTuple

import numpy as np

from megatron_balance.cost.core import COMPUTED, FAR_IN, FAR_OUT, Prices, sum_work
from megatron_balance.cost.layer import layer_seconds
from megatron_balance.cost.messages import fastest_sending
from megatron_balance.device.compiled import compiled
from megatron_balance.planning.plans import NOBODY, Layer, add_hosts, add_some, guests_of, slot_of
from megatron_balance.planning.tuning import LEAST_GAIN, busiest

CHOICES = 8
"""Number of replacements that are priced before the fastest one is made."""

RETURNED = 0.25
"""Cost of each token that returns to its owner, in tokens of relief."""

BUSIER = 1.15
"""Most tokens of a rank after a replacement that shortens an exchange, over those of the busiest rank before it."""


class Seconds(NamedTuple):
    """Seconds of a plan."""

    layer: float
    trans: float
    agg: float
    """Trans and Agg without overlap, on the busiest rank."""


class State(NamedTuple):
    """A plan and the tokens that follow from it."""

    guest_DG: np.ndarray
    taken_DG: np.ndarray
    """See `search.Found`."""
    left_E: np.ndarray
    """Tokens that owners compute."""
    computed_D: np.ndarray


class Choices(NamedTuple):
    """The most promising replacements."""

    promise_K: np.ndarray
    """Tokens of relief, less RETURNED for each token that returns; 0: no replacement."""
    rank_K: np.ndarray
    slot_K: np.ndarray
    expert_K: np.ndarray
    tokens_K: np.ndarray


@compiled(None)
def _state_of(layer: Layer, guest_DG: np.ndarray, taken_DG: np.ndarray, added_FBD: np.ndarray) -> State:
    left_E = layer.total_E.copy()
    computed_D = np.zeros(len(guest_DG))
    for rank in range(len(guest_DG)):
        for slot in range(guest_DG.shape[1]):
            if guest_DG[rank, slot] != NOBODY:
                left_E[guest_DG[rank, slot]] -= taken_DG[rank, slot]
        for b in range(added_FBD.shape[1]):
            computed_D[rank] += layer.owned_FBD[COMPUTED, b, rank] + added_FBD[COMPUTED, b, rank]
    return State(guest_DG, taken_DG, left_E, computed_D)


@compiled(None, inline=True)
def _offer(
    choices: Choices,
    state: State,
    layer: Layer,
    rank: int,
    expert: int,
    tokens: int,
    relief: float,
    most: float,
    limit: float,
) -> None:
    """Consider each slot of a rank for an expert, which takes over tokens from its owner.

    Args:
        relief: tokens by which the busiest rank is relieved.
        most: tokens that the rank may have.
        limit: tokens that the owner of the guest that leaves may have.
    """
    k = choices.promise_K.argmin()
    for slot in range(layer.slots):
        guest = state.guest_DG[rank, slot]
        back = state.taken_DG[rank, slot] if guest != NOBODY else 0
        moved = min(tokens, int(most - state.computed_D[rank] + back))
        if moved <= 0 or (guest != NOBODY and state.computed_D[layer.owner_E[guest]] + back > limit):
            continue
        promise = relief * moved / tokens - RETURNED * back
        if promise > choices.promise_K[k]:
            choices.promise_K[k] = promise
            choices.rank_K[k] = rank
            choices.slot_K[k] = slot
            choices.expert_K[k] = expert
            choices.tokens_K[k] = moved
            k = choices.promise_K.argmin()


@compiled(None, inline=True)
def _offer_for_computing(choices: Choices, state: State, layer: Layer, busy: int, rate_D: np.ndarray) -> None:
    """Offer guests of the largest expert of the rank that computes longest."""
    expert = layer.home_DS[busy, 0]
    for other in layer.home_DS[busy]:
        if state.left_E[other] > state.left_E[expert]:
            expert = other
    share = state.computed_D.sum() * rate_D[busy] / rate_D.sum()
    tokens = int(min(float(state.left_E[expert]), state.computed_D[busy] - share))
    if tokens <= 0:
        return
    for rank in range(len(rate_D)):
        if rank != busy and slot_of(state.guest_DG, rank, expert) < 0:
            # The receiver ends with as many tokens as the giver, at most
            most = max(state.computed_D[busy] - tokens, (state.computed_D[busy] + state.computed_D[rank]) / 2)
            _offer(choices, state, layer, rank, expert, tokens, float(tokens), most, state.computed_D[busy])


@compiled(None, inline=True)
def _hosts(guest_DG: np.ndarray, first: int, after: int, expert: int) -> bool:
    """Return whether one of some ranks has a guest of the expert."""
    found = False
    for rank in range(first, after):
        found |= slot_of(guest_DG, rank, expert) >= 0
    return found


@compiled(None, inline=True)
def _tokens(layer: Layer, expert: int, first: int, after: int) -> float:
    """Return the tokens that some ranks have for the expert, in all microbatches."""
    tokens = 0.0
    for b in range(layer.counts_EBD.shape[1]):
        for rank in range(first, after):
            tokens += layer.counts_EBD[expert, b, rank]
    return tokens


@compiled(None, inline=True)
def _offer_for_exchanges(
    choices: Choices, state: State, layer: Layer, busy: int, receives: bool, most: float, size: int
) -> None:
    """Offer guests that keep tokens on their node: tokens that the busy rank receives, or those that it sends."""
    home = busy // size
    experts = layer.home_DS[busy] if receives else np.arange(len(layer.owner_E))
    for first in range(0, len(state.computed_D), size):
        if (first // size == home) == receives:
            continue
        after = min(first + size, len(state.computed_D))
        for expert in experts:
            if not receives and layer.owner_E[expert] // size == home:
                continue
            tokens = min(_tokens(layer, expert, first, after), float(state.left_E[expert]))
            relief = tokens if receives else _tokens(layer, expert, busy, busy + 1)
            if relief > choices.promise_K.min() and tokens > 0 and not _hosts(state.guest_DG, first, after, expert):
                for rank in range(first, after):
                    _offer(choices, state, layer, rank, expert, int(tokens), relief, most, most)


class Guest(NamedTuple):
    """An expert in a guest slot."""

    expert: int
    tokens: int


@compiled(None)
def _give(state: State, rank: int, slot: int, new: Guest) -> Guest:
    """Give a guest slot to an expert, or to `NOBODY`. Return the guest that leaves."""
    old = Guest(int(state.guest_DG[rank, slot]), int(state.taken_DG[rank, slot]))
    if old.expert != NOBODY:
        state.left_E[old.expert] += old.tokens
    if new.expert != NOBODY:
        state.left_E[new.expert] -= new.tokens
    state.guest_DG[rank, slot] = new.expert
    state.taken_DG[rank, slot] = new.tokens
    return old


@compiled(None)
def _replace(loads_FBD: np.ndarray, layer: Layer, state: State, choices: Choices, k: int, size: int) -> Guest:
    """Make a replacement, and add to the loads what it changes. Return the guest that leaves."""
    rank = choices.rank_K[k]
    slot = choices.slot_K[k]
    new = Guest(int(choices.expert_K[k]), int(choices.tokens_K[k]))
    old = Guest(int(state.guest_DG[rank, slot]), int(state.taken_DG[rank, slot]))
    tables = state.guest_DG, state.taken_DG, state.left_E
    for sign in (-1.0, 1.0):
        for expert in (old.expert, new.expert):
            if expert != NOBODY:
                ends = rank, layer.owner_E[expert]
                add_hosts(loads_FBD, sign, layer, *tables, expert, ends, size)
        if sign < 0:
            _give(state, rank, slot, new)
    return old


@compiled(None)
def replace_guests(
    layer: Layer,
    guest_DG: np.ndarray,
    taken_DG: np.ndarray,
    most: int,
    degrees: np.ndarray,
    messages_1: np.ndarray,
    prices: Prices,
    rate_D: np.ndarray,
    per_token_D: np.ndarray,
) -> tuple[Seconds, int]:
    """Replace guests in place, while that makes the layer faster. Return the seconds and the number of replacements
    that were priced, which is about `most`. The other arguments are those of `search.fastest_plan`."""
    size = prices.links.node_size
    ranks = len(rate_D)
    guests = guests_of(guest_DG, taken_DG, layer.total_E)
    added_FBD = np.zeros_like(layer.owned_FBD)
    next_FBD = np.zeros_like(layer.owned_FBD)
    work_BD = np.empty(added_FBD.shape[1:])
    add_some(added_FBD, 1.0, layer, guests, 0, len(guests.expert_M), size)
    exchanging, computed = sum_work(layer.owned_FBD, added_FBD, work_BD, prices, rate_D, per_token_D)
    trans, agg = fastest_sending(guests.expert_M, guests.rank_M, layer.owner_E, ranks, messages_1)[:2]
    least = Seconds(layer_seconds(exchanging, computed, trans, agg, degrees, prices.layer), trans, agg)
    numbers = np.zeros((4, CHOICES), np.int64)
    choices = Choices(np.zeros(CHOICES), numbers[0], numbers[1], numbers[2], numbers[3])
    seconds_K = np.empty(CHOICES)
    work_2K = np.empty((2, CHOICES))
    tried = 0
    relieves_exchanges = False
    while tried < most:
        state = _state_of(layer, guest_DG, taken_DG, added_FBD)
        sum_work(layer.owned_FBD, added_FBD, work_BD, prices, rate_D, per_token_D)
        computing, exchanging_most = busiest(layer, added_FBD, work_BD, per_token_D)
        choices.promise_K[:] = 0.0
        if relieves_exchanges:
            total_FB = layer.owned_FBD[:, :, exchanging_most] + added_FBD[:, :, exchanging_most]
            receives = total_FB[FAR_IN].sum() > total_FB[FAR_OUT].sum()
            room = BUSIER * state.computed_D[computing]
            _offer_for_exchanges(choices, state, layer, exchanging_most, receives, room, size)
        else:
            _offer_for_computing(choices, state, layer, computing, rate_D)
        seconds_K[:] = np.inf
        for k in range(CHOICES):
            if choices.promise_K[k] <= 0.0:
                continue
            tried += 1
            next_FBD[:] = added_FBD
            old = _replace(next_FBD, layer, state, choices, k, size)
            _give(state, choices.rank_K[k], choices.slot_K[k], old)
            exchanging, computed = sum_work(layer.owned_FBD, next_FBD, work_BD, prices, rate_D, per_token_D)
            work_2K[0, k] = exchanging
            work_2K[1, k] = computed
            # Trans and Agg change little, and take longer to time than everything else
            seconds_K[k] = layer_seconds(exchanging, computed, least.trans, least.agg, degrees, prices.layer)
        best = -1
        while best < 0 and seconds_K.min() < least.layer * (1 - LEAST_GAIN):
            k = seconds_K.argmin()
            seconds_K[k] = np.inf
            next_FBD[:] = added_FBD
            old = _replace(next_FBD, layer, state, choices, k, size)
            guests = guests_of(guest_DG, taken_DG, layer.total_E)
            trans, agg = fastest_sending(guests.expert_M, guests.rank_M, layer.owner_E, ranks, messages_1)[:2]
            seconds = layer_seconds(work_2K[0, k], work_2K[1, k], trans, agg, degrees, prices.layer)
            if seconds < least.layer * (1 - LEAST_GAIN):
                least = Seconds(seconds, trans, agg)
                added_FBD[:] = next_FBD
                best = k
            else:
                _give(state, choices.rank_K[k], choices.slot_K[k], old)
        if best < 0 and relieves_exchanges:
            break
        relieves_exchanges = best < 0
    return least, tried
