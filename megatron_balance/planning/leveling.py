"""Even loads where hosts share an expert's tokens by a fixed rule: a greedy search in plain numbers.

It takes the heaviest rank's heaviest expert, and gives it the fewest guests with which its hosts have room for their
shares. It counts the tokens that ranks compute, and nothing else; a cost model times what it finds.
"""

from typing import NamedTuple

import numpy as np

from megatron_balance.device.compiled import compiled

ANYWHERE, ALL_NODES, NEAR = 0, 1, 2
"""Where an expert gets guests: on the lightest ranks, on one rank of each node first, on its owner's node only."""

ROUNDING = 1e-9
"""Share of an expert below which room is rounding."""


class Moves(NamedTuple):
    """Experts that get guests, one after the other."""

    expert_M: np.ndarray
    primary_M: np.ndarray
    """The owner, or the only guest."""
    guests_MD: np.ndarray
    """bool."""


@compiled(None)
def _heaviest(room_D: np.ndarray, rate_D: np.ndarray) -> int:
    """Return the rank that takes longest for the tokens beyond its limit."""
    heaviest = 0
    least = room_D[0] / rate_D[0]
    for rank in range(1, len(room_D)):
        room = room_D[rank] / rate_D[rank]
        if room < least:
            heaviest = rank
            least = room
    return heaviest


@compiled(None)
def _candidates(
    room_D: np.ndarray, free_D: np.ndarray, owner: int, node_size: int, reach: int
) -> tuple[np.ndarray, int]:
    """Return the ranks that may take an expert, in order, and the least number that should."""
    ranks = len(room_D)
    home = owner // node_size
    able = 0
    able_R = np.empty(ranks, np.int64)
    for d in range(ranks):
        # The owner's room is below 0
        if room_D[d] > 0 and free_D[d] > 0 and (reach != NEAR or d // node_size == home):
            able_R[able] = d
            able += 1
    able_R = able_R[:able]
    able_R = able_R[np.argsort(-room_D[able_R], kind="mergesort")]
    if reach != ALL_NODES:
        return able_R, 1
    is_seen_N = np.zeros(ranks // node_size + 1, np.bool_)
    order_R = np.empty(able, np.int64)
    first = 0
    is_seen_N[home] = True
    is_first_R = np.zeros(able, np.bool_)
    for r in range(able):
        node = able_R[r] // node_size
        if not is_seen_N[node]:
            is_seen_N[node] = is_first_R[r] = True
            order_R[first] = able_R[r]
            first += 1
    place = first
    for r in range(able):
        if not is_first_R[r]:
            order_R[place] = able_R[r]
            place += 1
    return order_R, max(1, first)


@compiled(None)
def _even(able_R: np.ndarray, least: int, room_D: np.ndarray, size: float, kept: float, given_R: np.ndarray) -> int:
    """Choose the fewest guests with room for equal shares, or those whose room is exceeded least: return their number.

    Args:
        kept: tokens that the owner may keep.
        given_R: set to the tokens that each guest computes.
    """
    most = kept - size
    number = 0
    smallest = kept
    for index in range(len(able_R)):
        smallest = min(smallest, room_D[able_R[index]])
        if smallest <= most:
            break
        slack = smallest - size / (index + 2)
        if index + 1 >= least and slack > most:
            most = slack
            number = index + 1
            if slack >= -ROUNDING * size:
                break
    for index in range(number):
        given_R[index] = size / (number + 1)
    return number


@compiled(None)
def _local(
    able_R: np.ndarray,
    least: int,
    room_D: np.ndarray,
    owner: int,
    size: float,
    kept: float,
    tokens_D: np.ndarray,
    given_R: np.ndarray,
) -> int:
    """Choose the fewest guests that compute their own tokens, or one guest that computes all but the owner's.

    The former are the ranks with most of the expert's tokens; they come first in `able_R`. Return their number, or -1
    for the latter, which is then the first in `able_R`.
    """
    left = size
    number = 0
    lightest = -1
    order_R = able_R[np.argsort(-tokens_D[able_R], kind="mergesort")]
    for d in able_R:
        if lightest < 0 or room_D[d] > room_D[lightest]:
            lightest = d
    for d in order_R:
        if left <= kept + ROUNDING * size and number >= least:
            break
        if 0 < tokens_D[d] <= room_D[d]:
            able_R[number] = d
            given_R[number] = tokens_D[d]
            left = left - tokens_D[d]
            number = number + 1
    lent = size - tokens_D[owner]
    if (
        lightest >= 0
        and left > kept + ROUNDING * size
        and max(lent - room_D[lightest], size - lent - kept) < left - kept
    ):
        able_R[0] = lightest
        given_R[0] = lent
        return -1
    return number


@compiled(
    "Tuple((int64[::1], int64[::1], boolean[:,::1]))(float64[::1], int64[::1], int64, int64[:,::1], float64[::1], "
    "float64[::1], float64, int64, float64[:,::1])"
)
def level(
    rate_D: np.ndarray,
    free_D: np.ndarray,
    node_size: int,
    experts_DH: np.ndarray,
    tokens_E: np.ndarray,
    loads_D: np.ndarray,
    busiest: float,
    reach: int,
    tokens_ED: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return Moves in order, until no rank is above its limit or those that are have no other experts.

    Args:
        free_D: int64, number of guests that each rank may take.
        experts_DH: the experts of each rank that get guests if need be, by `tokens_E`, ascending.
        loads_D: tokens that each rank computes.
        busiest: tokens that a rank of rate 1 may compute.
        reach: ANYWHERE, ALL_NODES or NEAR.
        tokens_ED: tokens of each rank: a guest computes its own, as under `local_first`. Without rows, all hosts
            compute equally many.
    """
    ranks = len(rate_D)
    experts = len(tokens_E)
    moves = 0
    free_D = free_D.copy()
    room_D = busiest * rate_D - loads_D
    left_D = np.full(ranks, experts_DH.shape[1])
    expert_M = np.empty(experts, np.int64)
    primary_M = np.empty(experts, np.int64)
    guests_MD = np.zeros((experts, ranks), np.bool_)
    given_R = np.empty(ranks)
    while True:
        owner = _heaviest(room_D, rate_D)
        excess = room_D[owner] / rate_D[owner]
        if excess >= 0 or left_D[owner] == 0:
            break
        left_D[owner] -= 1
        expert = experts_DH[owner, left_D[owner]]
        size = tokens_E[expert]
        if size <= 0:
            # The rank stays the heaviest
            break
        kept = size + room_D[owner]
        primary = owner
        if kept * ranks < size:
            # The owner's other experts alone exceed the limit: all of them are reduced alike
            kept = size * busiest / (busiest - excess)
        able_R, least = _candidates(room_D, free_D, owner, node_size, reach)
        if len(tokens_ED):
            number = _local(able_R, least, room_D, owner, size, kept, tokens_ED[expert], given_R)
            if number < 0:
                number = 1
                primary = able_R[0]
        else:
            number = _even(able_R, least, room_D, size, kept, given_R)
        total = 0.0
        for index in range(number):
            rank = able_R[index]
            free_D[rank] -= 1
            room_D[rank] -= given_R[index]
            total += given_R[index]
            guests_MD[moves, rank] = True
        room_D[owner] += total
        if number:
            expert_M[moves] = expert
            primary_M[moves] = primary
            moves += 1
    return expert_M[:moves], primary_M[:moves], guests_MD[:moves]
