"""Shifts of tokens between the hosts of a plan, while they make the layer faster: compiled loops.

Guests stay where they are, so Trans and Agg take as long as before. In shapes, M counts guests.
"""

import numpy as np

from megatron_balance.cost.core import COMPUTED, Prices, sum_work
from megatron_balance.device.compiled import compiled
from megatron_balance.planning.plans import Guests, Layer, add_hosts, add_some, guests_of

LEAST_GAIN = 2e-4
"""Share of the seconds of exchanges and computation that a shift must save."""

SIZES = (0.3, 0.1, 0.03, 0.01)
"""Tokens of a shift, over the mean of a rank."""


@compiled(None)
def _seconds(
    layer: Layer,
    added_FBD: np.ndarray,
    work_BD: np.ndarray,
    prices: Prices,
    rate_D: np.ndarray,
    per_token_D: np.ndarray,
) -> float:
    """Return the seconds of four exchanges and of computation; set `work_BD` as `sum_work`."""
    exchanging, computed = sum_work(layer.owned_FBD, added_FBD, work_BD, prices, rate_D, per_token_D)
    return 4 * exchanging + per_token_D[0] * rate_D[0] * computed


@compiled(None)
def busiest(layer: Layer, added_FBD: np.ndarray, work_BD: np.ndarray, per_token_D: np.ndarray) -> tuple[int, int]:
    """Return the rank that computes longest, and the one that exchanges longest, in one microbatch."""
    computing = -1
    exchanging = -1
    most = -1.0
    longest = -1.0
    for b in range(len(work_BD)):
        for rank in range(len(per_token_D)):
            seconds = (layer.owned_FBD[COMPUTED, b, rank] + added_FBD[COMPUTED, b, rank]) * per_token_D[rank]
            if seconds > most:
                most = seconds
                computing = rank
            if work_BD[b, rank] - seconds > longest:
                longest = work_BD[b, rank] - seconds
                exchanging = rank
    return computing, exchanging


@compiled(None)
def _shift(guests: Guests, taken_DG: np.ndarray, left_E: np.ndarray, m: int, other: int, tokens: int) -> None:
    """Let a guest take over tokens from another guest of the expert, or from the owner if `other` is `m`."""
    taken_DG[guests.rank_M[m], guests.slot_M[m]] += tokens
    if other == m:
        left_E[guests.expert_M[m]] -= tokens
    else:
        taken_DG[guests.rank_M[other], guests.slot_M[other]] -= tokens


@compiled(None)
def _best_size(
    layer: Layer,
    guests: Guests,
    tables: tuple[np.ndarray, np.ndarray, np.ndarray],
    added_FBD: np.ndarray,
    pair: tuple[int, int],
    gives: tuple[bool, bool],
    least: float,
    prices: Prices,
    rate_D: np.ndarray,
    per_token_D: np.ndarray,
) -> tuple[float, int, int]:
    """Return the seconds after the best shift between two hosts (see `_shift`), its tokens, and the number of shifts
    that were tried. Without a shift that takes less than `least` seconds, return `least` and no tokens. `gives`:
    whether the guest and the other host may give tokens; `tables`: `guest_DG`, `taken_DG` and `left_E`."""
    m, other = pair
    _, taken_DG, left_E = tables
    size = prices.links.node_size
    expert = guests.expert_M[m]
    owns = other == m
    ends = guests.rank_M[m], layer.owner_E[expert] if owns else guests.rank_M[other]
    mean = layer.total_E.sum() / len(rate_D)
    rest_FBD = added_FBD.copy()
    add_hosts(rest_FBD, -1.0, layer, *tables, expert, ends, size)
    next_FBD = np.empty_like(rest_FBD)
    work_BD = np.empty(rest_FBD.shape[1:])
    # A guest keeps a token, so that it stays
    there = left_E[expert] if owns else taken_DG[guests.rank_M[other], guests.slot_M[other]] - 1
    has = taken_DG[guests.rank_M[m], guests.slot_M[m]] - 1, there
    best = 0
    tried = 0
    for way in range(2):
        for part in SIZES:
            tokens = min(int(part * mean), int(has[way]))
            if not gives[way] or tokens <= 0:
                continue
            tokens = tokens if way else -tokens
            next_FBD[:] = rest_FBD
            _shift(guests, taken_DG, left_E, m, other, tokens)
            add_hosts(next_FBD, 1.0, layer, *tables, expert, ends, size)
            _shift(guests, taken_DG, left_E, m, other, -tokens)
            seconds = _seconds(layer, next_FBD, work_BD, prices, rate_D, per_token_D)
            tried += 1
            if seconds < least:
                least = seconds
                best = tokens
    return least, best, tried


@compiled(None)
def tune(
    layer: Layer,
    guest_DG: np.ndarray,
    taken_DG: np.ndarray,
    most: int,
    prices: Prices,
    rate_D: np.ndarray,
    per_token_D: np.ndarray,
) -> tuple[float, float, int]:
    """Shift tokens between hosts of one expert in place, while that shortens exchanges and computation. Each shift
    relieves the rank that computes longest or the one that exchanges longest. About `most` shifts are tried. Return
    `CostModel.work_of`, and the number of shifts that were tried."""
    size = prices.links.node_size
    guests = guests_of(guest_DG, taken_DG, layer.total_E)
    number = len(guests.expert_M)
    left_E = layer.total_E.copy()
    for m in range(number):
        left_E[guests.expert_M[m]] -= taken_DG[guests.rank_M[m], guests.slot_M[m]]
    tables = guest_DG, taken_DG, left_E
    added_FBD = np.zeros_like(layer.owned_FBD)
    work_BD = np.empty(added_FBD.shape[1:])
    add_some(added_FBD, 1.0, layer, guests, 0, number, size)
    tried = 0
    while tried < most:
        least = _seconds(layer, added_FBD, work_BD, prices, rate_D, per_token_D) * (1 - LEAST_GAIN)
        computing, exchanging = busiest(layer, added_FBD, work_BD, per_token_D)
        best = 0, 0, 0
        for m in range(number):
            for other in range(m, guests.first_E[guests.expert_M[m] + 1]):
                rank = guests.rank_M[m]
                peer = layer.owner_E[guests.expert_M[m]] if other == m else guests.rank_M[other]
                if tried >= most or (rank not in (computing, exchanging) and peer not in (computing, exchanging)):
                    continue
                # Computation becomes shorter only if the rank gives tokens; an exchange, also if it takes tokens
                gives = peer != computing or rank == exchanging, rank != computing or peer == exchanging
                args = layer, guests, tables, added_FBD, (m, other), gives, least
                least, tokens, more = _best_size(*args, prices, rate_D, per_token_D)
                tried += more
                if tokens:
                    best = m, other, tokens
        m, other, tokens = best
        if not tokens:
            break
        expert = guests.expert_M[m]
        ends = guests.rank_M[m], layer.owner_E[expert] if other == m else guests.rank_M[other]
        add_hosts(added_FBD, -1.0, layer, *tables, expert, ends, size)
        _shift(guests, taken_DG, left_E, m, other, tokens)
        add_hosts(added_FBD, 1.0, layer, *tables, expert, ends, size)
    return *sum_work(layer.owned_FBD, added_FBD, work_BD, prices, rate_D, per_token_D), tried
