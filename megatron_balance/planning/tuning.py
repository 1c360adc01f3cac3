"""Shifts of tokens between the hosts of a plan, while they make the layer faster: compiled loops.

Guests stay where they are, so Trans and Agg take as long as before. In shapes, M counts guests.
"""

import numpy as np

from megatron_balance.cost.core import COMPUTED, Prices, sum_work
from megatron_balance.device.compiled import compiled
from megatron_balance.planning.plans import Guests, Layer, add_some, guests_of

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
def _shift(guests: Guests, taken_M: np.ndarray, total_E: np.ndarray, m: int, other: int, tokens: int) -> None:
    """Let a guest take over tokens from another guest of the expert, or from the owner if `other` is `m`."""
    total = total_E[guests.expert_M[m]]
    taken_M[m] += tokens
    guests.share_M[m] = taken_M[m] / total
    if other != m:
        taken_M[other] -= tokens
        guests.share_M[other] = taken_M[other] / total


@compiled(None)
def _best_size(
    layer: Layer,
    guests: Guests,
    taken_M: np.ndarray,
    rest_FBD: np.ndarray,
    pair: tuple[int, int],
    gives: tuple[bool, bool],
    least: float,
    prices: Prices,
    rate_D: np.ndarray,
    per_token_D: np.ndarray,
) -> tuple[float, int, int]:
    """Return the seconds after the best shift between two hosts (see `_shift`), its tokens, and the number of shifts
    that were tried. Without a shift that takes less than `least` seconds, return `least` and no tokens. `gives`:
    whether the guest and the other host may give tokens; `rest_FBD`: loads without this expert's guests."""
    m, other = pair
    expert = guests.expert_M[m]
    first = guests.first_E[expert]
    after = guests.first_E[expert + 1]
    mean = layer.total_E.sum() / len(rate_D)
    work_BD = np.empty(rest_FBD.shape[1:])
    # A guest keeps a token, so that it stays
    has = taken_M[m] - 1, layer.total_E[expert] - taken_M[first:after].sum() if other == m else taken_M[other] - 1
    best = 0
    tried = 0
    for way in range(2):
        for size in SIZES:
            tokens = min(int(size * mean), has[way])
            if not gives[way] or tokens <= 0:
                continue
            tokens = tokens if way else -tokens
            _shift(guests, taken_M, layer.total_E, m, other, tokens)
            added_FBD = rest_FBD.copy()
            add_some(added_FBD, 1.0, layer, guests, first, after, prices.links.node_size)
            _shift(guests, taken_M, layer.total_E, m, other, -tokens)
            seconds = _seconds(layer, added_FBD, work_BD, prices, rate_D, per_token_D)
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
) -> tuple[float, float]:
    """Shift tokens between hosts of one expert in place, while that shortens exchanges and computation. Each shift
    relieves the rank that computes longest or the one that exchanges longest. About `most` shifts are tried. Return
    `CostModel.work_of`."""
    size = prices.links.node_size
    guests = guests_of(guest_DG, taken_DG, layer.total_E)
    number = len(guests.expert_M)
    taken_M = np.empty(number, np.int64)
    for m in range(number):
        taken_M[m] = taken_DG[guests.rank_M[m], guests.slot_M[m]]
    added_FBD = np.zeros_like(layer.owned_FBD)
    work_BD = np.empty(added_FBD.shape[1:])
    add_some(added_FBD, 1.0, layer, guests, 0, number, size)
    tried = 0
    while tried < most:
        least = _seconds(layer, added_FBD, work_BD, prices, rate_D, per_token_D) * (1 - LEAST_GAIN)
        computing, exchanging = busiest(layer, added_FBD, work_BD, per_token_D)
        best = 0, 0, 0
        for m in range(number):
            first = guests.first_E[guests.expert_M[m]]
            after = guests.first_E[guests.expert_M[m] + 1]
            rest_FBD = added_FBD
            for other in range(m, after):
                rank = guests.rank_M[m]
                peer = layer.owner_E[guests.expert_M[m]] if other == m else guests.rank_M[other]
                if tried >= most or (rank not in (computing, exchanging) and peer not in (computing, exchanging)):
                    continue
                if rest_FBD is added_FBD:
                    rest_FBD = added_FBD.copy()
                    add_some(rest_FBD, -1.0, layer, guests, first, after, size)
                # Computation becomes shorter only if the rank gives tokens; an exchange, also if it takes tokens
                gives = peer != computing or rank == exchanging, rank != computing or peer == exchanging
                args = layer, guests, taken_M, rest_FBD, (m, other), gives, least
                least, tokens, more = _best_size(*args, prices, rate_D, per_token_D)
                tried += more
                if tokens:
                    best = m, other, tokens
        if not best[2]:
            break
        first = guests.first_E[guests.expert_M[best[0]]]
        after = guests.first_E[guests.expert_M[best[0]] + 1]
        add_some(added_FBD, -1.0, layer, guests, first, after, size)
        _shift(guests, taken_M, layer.total_E, best[0], best[1], best[2])
        add_some(added_FBD, 1.0, layer, guests, first, after, size)
    for m in range(number):
        taken_DG[guests.rank_M[m], guests.slot_M[m]] = taken_M[m]
    return sum_work(layer.owned_FBD, added_FBD, work_BD, prices, rate_D, per_token_D)
