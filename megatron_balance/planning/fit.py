"""Moves of tokens from ranks above their capacity to ranks below it, with few guests.

All amounts are whole tokens. Fits differ in the order of their moves:

BUSIEST: the rank furthest above its capacity gives to the rank with the most room. So any first moves of this fit are a
  plan, whose busiest rank has the load that the last of these moves leaves.
FILLING: like BUSIEST, but a guest takes as many tokens as it has room for, even if the source falls below its capacity;
  the source can then take guests itself. As in Walker's alias method, few moves fill a receiver, so slots suffice more
  often.
WHOLE: the rank furthest above its capacity gives until it is within it, each time of the same expert while tokens are
  left, so that it sends few experts. The receiver is the rank with the least room that takes all of the move, if there
  is one, and otherwise the one with the most room. As in best-fit packing, this mostly needs fewer guests.
"""

from typing import Annotated, NamedTuple

import numpy as np

from megatron_balance.device.compiled import compiled

PARTS = 64
"""Number of parts of the cost of a guest on its owner's node; costs are whole parts."""

BUSIEST, FILLING, WHOLE = ORDERS = 0, 1, 2

NOTHING = -(2**62)
"""Excess of ranks with nothing left to give."""

_Row = Annotated[np.ndarray, "int64[::1]"]
_Table = Annotated[np.ndarray, "int64[:,::1]"]


class Overload(NamedTuple):
    """Tokens that ranks may give away, and their room for more."""

    tokens_DS: _Table
    """Tokens of the experts that each rank may give away, in any order; 0: no such expert."""
    experts_DS: _Table
    """Numbers of these experts."""
    above_D: _Row
    """Tokens by which each rank exceeds its capacity; negative: its room."""
    slots_D: _Row
    """Number of guests that each rank can take."""
    node_size: int
    """Number of consecutive ranks that share a node."""
    far: int
    """Cost, in PARTS, of a guest on another node than the owner's; 0: such guests are not allowed."""


class TokenMoves(NamedTuple):
    """Guests that take over tokens of experts, in order."""

    expert_M: _Row
    source_M: _Row
    """The experts' owners."""
    target_M: _Row
    """The ranks of the guests."""
    tokens_M: _Row


@compiled("int64(int64[::1], int64, int64)")
def _largest(values: np.ndarray, first: int, after: int) -> int:
    """Return the index of the largest value of a range; the last one wins ties."""
    found = first
    for index in range(first + 1, min(after, len(values))):
        if values[index] >= values[found]:
            found = index
    return found


@compiled("int64(int64[::1], int64, int64, int64, int64)")
def _tightest(room_D: np.ndarray, first: int, after: int, wanted: int, node_size: int) -> int:
    """Return the rank of a range with the least room for all wanted tokens, or -1. Ties: last node, first rank."""
    found = -1
    for rank in range(first, min(after, len(room_D))):
        if room_D[rank] >= wanted and (
            found < 0
            or room_D[rank] < room_D[found]
            or (room_D[rank] == room_D[found] and rank // node_size > found // node_size)
        ):
            found = rank
    return found


@compiled("TokenMoves(Overload, int64)", TokenMoves, Overload)
def fit(overload: Overload, order: int) -> TokenMoves:
    """Move tokens until no rank exceeds its capacity, or the ranks that do have nothing left to give. A move takes the
    rank's largest expert, or the part of it by which the rank exceeds its capacity. The receiver is on the owner's
    node, unless a receiver on another node takes over more tokens relative to its cost. Ties between ranks and experts
    go to the last one, ties between nodes to the first one; see also `_tightest`."""
    tokens_DS = overload.tokens_DS.copy()
    experts_DS = overload.experts_DS
    above_D = overload.above_D.copy()
    slots_D = overload.slots_D.copy()
    node_size = overload.node_size
    far = overload.far
    ranks = len(above_D)
    most = 0
    source = 0
    room_D = np.zeros(ranks, np.int64)
    most_N = np.zeros((ranks - 1) // node_size + 1, np.int64)
    above_N = np.full(len(most_N), NOTHING)
    for rank in range(ranks):
        node = rank // node_size
        most = most + slots_D[rank]
        above_N[node] = max(above_N[node], above_D[rank])
        if slots_D[rank] and above_D[rank] < 0:
            room_D[rank] = -above_D[rank]
            most_N[node] = max(most_N[node], -above_D[rank])
    expert_M = np.zeros(most, np.int64)
    source_M = np.zeros(most, np.int64)
    target_M = np.zeros(most, np.int64)
    tokens_M = np.zeros(most, np.int64)
    number = 0
    place = 0
    while True:
        first = _largest(above_N, 0, len(above_N)) * node_size
        busiest = _largest(above_D, first, first + node_size)
        if above_D[busiest] <= 0:
            return TokenMoves(expert_M[:number], source_M[:number], target_M[:number], tokens_M[:number])
        stays = order == WHOLE and number > 0 and above_D[source] > 0
        source = source if stays else busiest
        excess = above_D[source]
        home = source // node_size
        if not stays or not tokens_DS[source, place]:
            place = 0
            for slot in range(tokens_DS.shape[1]):
                largest = tokens_DS[source, place], experts_DS[source, place]
                if (tokens_DS[source, slot], experts_DS[source, slot]) > largest:
                    place = slot
        tokens = tokens_DS[source, place]
        expert = experts_DS[source, place]
        wanted = tokens if order == FILLING else min(tokens, excess)
        node = home
        if far and most_N[home] < wanted:
            roomiest = int(most_N.argmax())
            if min(wanted, most_N[roomiest]) * PARTS > most_N[home] * far:
                # Another node takes over more tokens for the cost of a guest
                node = roomiest
        moved = min(wanted, most_N[node])
        if not moved:
            above_D[source] = NOTHING
            above_N[home] = above_D[_largest(above_D, home * node_size, (home + 1) * node_size)]
            continue
        if order == WHOLE and moved == wanted:
            first, after = (home, home + 1) if node == home else (0, len(most_N))
            target = _tightest(room_D, first * node_size, after * node_size, wanted, node_size)
            node = target // node_size
        else:
            target = _largest(room_D, node * node_size, (node + 1) * node_size)
        expert_M[number] = expert
        source_M[number] = source
        target_M[number] = target
        tokens_M[number] = moved
        number += 1
        tokens_DS[source, place] -= moved
        above_D[source] -= moved
        slots_D[target] -= 1
        room_D[target] = room_D[target] - moved if slots_D[target] else 0
        if slots_D[source]:
            room_D[source] = max(moved - excess, 0)
        above_N[home] = above_D[_largest(above_D, home * node_size, (home + 1) * node_size)]
        for changed in (node, home):
            most_N[changed] = room_D[_largest(room_D, changed * node_size, (changed + 1) * node_size)]
