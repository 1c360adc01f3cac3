"""Replacements of a plan's guests, while they make the layer faster: compiled loops.

A replacement gives a guest slot to another expert: one that relieves the rank that computes longest or the rank that
exchanges longest. The tokens of the guest that leaves return to their owner.

In shapes, K counts candidates.
"""

from typing import NamedTuple

import numpy as np

from megatron_balance.cost.candidates import add_guests
from megatron_balance.cost.core import COMPUTED, FAR_IN, FAR_OUT, Prices, sum_work
from megatron_balance.cost.layer import layer_seconds
from megatron_balance.cost.messages import fastest_sending
from megatron_balance.device.compiled import compiled
from megatron_balance.planning.plans import NOBODY, Layer, add_some, guests_of, slot_of
from megatron_balance.planning.tuning import LEAST_GAIN, busiest

CHOICES = 8
"""Number of replacements that are priced before the fastest one is made."""

RETURNED = 0.25
"""Tokens that a replacement must move for each token that returns to its owner, to be as promising."""


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
        computed_D[rank] = (layer.owned_FBD[COMPUTED, :, rank] + added_FBD[COMPUTED, :, rank]).sum()
    return State(guest_DG, taken_DG, left_E, computed_D)


@compiled(None)
def _offer(choices: Choices, state: State, layer: Layer, rank: int, expert: int, tokens: int, relief: float, most: float) -> None:
    """Consider a rank as a new host of an expert, which takes over tokens from the owner, in each of its slots. `most`:
    tokens that no rank may exceed; `relief`: tokens by which the busiest rank is relieved."""
    for slot in range(state.guest_DG.shape[1]):
        guest = state.guest_DG[rank, slot]
        back = state.taken_DG[rank, slot] if guest != NOBODY else 0
        moved = min(tokens, int(most - state.computed_D[rank] + back))
        if moved <= 0:
            continue
        if guest != NOBODY and state.computed_D[layer.owner_E[guest]] + back > most:
            continue
        promise = relief * moved / tokens - RETURNED * back
        k = choices.promise_K.argmin()
        if promise > choices.promise_K[k]:
            choices.promise_K[k] = promise
            choices.rank_K[k] = rank
            choices.slot_K[k] = slot
            choices.expert_K[k] = expert
            choices.tokens_K[k] = moved


@compiled(None)
def _for_computing(choices: Choices, state: State, layer: Layer, busy: int, rate_D: np.ndarray) -> None:
    """Offer guests for the largest expert of the rank that computes longest."""
    expert = layer.home_DS[busy, 0]
    for other in layer.home_DS[busy]:
        if state.left_E[other] > state.left_E[expert]:
            expert = other
    excess = state.computed_D[busy] - state.computed_D.sum() * rate_D[busy] / rate_D.sum()
    for rank in range(len(rate_D)):
        if rank == busy or slot_of(state.guest_DG, rank, expert) >= 0:
            continue
        # A receiver ends with as many tokens as the giver, at most
        tokens = int(min(float(state.left_E[expert]), excess))
        if tokens > 0:
            most = max(state.computed_D[busy] - tokens, (state.computed_D[busy] + state.computed_D[rank]) / 2)
            _offer(choices, state, layer, rank, expert, tokens, float(tokens), most)


@compiled(None)
def _is_on(state: State, expert: int, first: int, after: int) -> bool:
    for rank in range(first, after):
        if slot_of(state.guest_DG, rank, expert) >= 0:
            return True
    return False


@compiled(None)
def _for_exchange(choices: Choices, state: State, layer: Layer, busy: int, receives: bool, size: int, most: float) -> None:
    """Offer guests that keep tokens on their node: tokens that the rank receives, or those that it sends."""
    ranks = len(state.computed_D)
    home = busy // size
    for first in range(0, ranks, size):
        if (first // size == home) == receives:
            continue
        after = min(first + size, ranks)
        for expert in range(len(layer.owner_E)):
            owner = layer.owner_E[expert]
            if (owner != busy) if receives else (owner // size == home):
                continue
            tokens = min(int(layer.counts_EBD[expert, :, first:after].sum()), state.left_E[expert])
            relief = float(tokens) if receives else layer.counts_EBD[expert, :, busy].sum()
            if tokens <= 0 or _is_on(state, expert, first, after):
                continue
            for rank in range(first, after):
                _offer(choices, state, layer, rank, expert, tokens, relief, most)


@compiled(None)
def _add_experts(
    added_FBD: np.ndarray, sign: float, layer: Layer, state: State, pair: tuple[int, int], size: int
) -> None:
    """Add, times `sign`, the loads of the guests of two experts."""
    for expert in pair:
        if expert == NOBODY:
            continue
        rank_M = np.empty(len(state.guest_DG), np.int64)
        share_M = np.empty(len(state.guest_DG))
        number = 0
        for rank in range(len(state.guest_DG)):
            slot = slot_of(state.guest_DG, rank, expert)
            if slot >= 0:
                rank_M[number] = rank
                share_M[number] = state.taken_DG[rank, slot] / layer.total_E[expert]
                number += 1
        expert_M = np.full(number, expert)
        some = expert_M, rank_M[:number], share_M[:number]
        add_guests(added_FBD, sign, layer.counts_EBD, layer.tokens_EB, layer.owner_E, *some, size)


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
) -> tuple[float, float, float]:
    """Replace guests in place, while that makes the layer faster. About `most` replacements are priced. Return the
    seconds of the layer, of Trans and of Agg."""
    size = prices.links.node_size
    ranks = len(rate_D)
    guests = guests_of(guest_DG, taken_DG, layer.total_E)
    added_FBD = np.zeros_like(layer.owned_FBD)
    next_FBD = np.zeros_like(layer.owned_FBD)
    work_BD = np.empty(added_FBD.shape[1:])
    add_some(added_FBD, 1.0, layer, guests, 0, len(guests.expert_M), size)
    exchanging, computed = sum_work(layer.owned_FBD, added_FBD, work_BD, prices, rate_D, per_token_D)
    trans, agg = fastest_sending(guests.expert_M, guests.rank_M, layer.owner_E, ranks, messages_1)[:2]
    least = layer_seconds(exchanging, computed, trans, agg, degrees, prices.layer), trans, agg
    whole = np.zeros((4, CHOICES), np.int64)
    choices = Choices(np.zeros(CHOICES), whole[0], whole[1], whole[2], whole[3])
    tried = 0
    relieves = 0
    while tried < most and relieves < 2:
        state = _state_of(layer, guest_DG, taken_DG, added_FBD)
        sum_work(layer.owned_FBD, added_FBD, work_BD, prices, rate_D, per_token_D)
        computing, busy = busiest(layer, added_FBD, work_BD, per_token_D)
        choices.promise_K[:] = 0.0
        if relieves == 0:
            _for_computing(choices, state, layer, computing, rate_D)
        else:
            far_in = (layer.owned_FBD[FAR_IN, :, busy] + added_FBD[FAR_IN, :, busy]).sum()
            far_out = (layer.owned_FBD[FAR_OUT, :, busy] + added_FBD[FAR_OUT, :, busy]).sum()
            _for_exchange(choices, state, layer, busy, far_in > far_out, size, state.computed_D[computing] * 1.15)
        best = -1
        fastest = least[0] * (1 - LEAST_GAIN), 0.0, 0.0
        for k in range(CHOICES):
            if choices.promise_K[k] <= 0.0:
                continue
            tried += 1
            rank = choices.rank_K[k]
            slot = choices.slot_K[k]
            old = guest_DG[rank, slot], taken_DG[rank, slot]
            pair = old[0], choices.expert_K[k]
            next_FBD[:] = added_FBD
            _add_experts(next_FBD, -1.0, layer, state, pair, size)
            guest_DG[rank, slot] = choices.expert_K[k]
            taken_DG[rank, slot] = choices.tokens_K[k]
            _add_experts(next_FBD, 1.0, layer, state, pair, size)
            exchanging, computed = sum_work(layer.owned_FBD, next_FBD, work_BD, prices, rate_D, per_token_D)
            seconds = layer_seconds(exchanging, computed, 0.0, 0.0, degrees, prices.layer)
            if seconds < fastest[0]:
                guests = guests_of(guest_DG, taken_DG, layer.total_E)
                trans, agg = fastest_sending(guests.expert_M, guests.rank_M, layer.owner_E, ranks, messages_1)[:2]
                seconds = layer_seconds(exchanging, computed, trans, agg, degrees, prices.layer)
                if seconds < fastest[0]:
                    fastest = seconds, trans, agg
                    best = k
            guest_DG[rank, slot], taken_DG[rank, slot] = old
        if best < 0:
            relieves += 1
            continue
        relieves = 0
        least = fastest
        rank = choices.rank_K[best]
        slot = choices.slot_K[best]
        pair = guest_DG[rank, slot], choices.expert_K[best]
        _add_experts(added_FBD, -1.0, layer, state, pair, size)
        guest_DG[rank, slot] = choices.expert_K[best]
        taken_DG[rank, slot] = choices.tokens_K[best]
        _add_experts(added_FBD, 1.0, layer, state, pair, size)
    return least
