"""Moves of tokens from ranks with more than their capacity to ranks with less, with few guests.

Fits differ in their order. With BUSIEST, each move goes from the rank that is then furthest above its capacity to the
rank with the most room. So the first moves of such a fit are themselves a plan, whose busiest rank has what the last of
them left. With LEAST_FIRST and WHOLE, a guest goes where it leaves least room, as in best-fit packing, which mostly
needs fewer guests. Everything is in whole tokens.

Letters that differ: M moves; N states, one before each move and one at the end; F the fields of a Move.
"""

from typing import NamedTuple

import numpy as np

from megatron_balance.cost.core import SendingPrices, few_batches
from megatron_balance.device.compiled import compiled

PARTS = 64
"""Costs of guests are compared in whole parts of that of a guest on its owner's node, so that devices agree."""

BUSIEST, FILLING, LEAST_FIRST, WHOLE = ORDERS = range(4)
"""Orders of moves; see `fit`."""

NOTHING = -(2**62)
"""Excess of ranks that have nothing left to give."""


class Move(NamedTuple):
    """A guest that takes over some tokens of an expert."""

    expert: int
    source: int
    """The expert's owner."""
    target: int
    """The rank of the guest."""
    tokens: int


class Fitted(NamedTuple):
    """The moves of a fit, in order."""

    moves_MF: np.ndarray
    """[M, 4] int64: the fields of each Move."""
    excess_N: np.ndarray
    """[M + 1] int64: tokens by which the busiest rank exceeds its capacity; at most 0 if all fit."""

    @property
    def moves(self) -> list[Move]:
        """The moves one by one."""
        return [Move(*move) for move in self.moves_MF.tolist()]

    @property
    def fits(self) -> bool:
        """Whether no rank exceeds its capacity after all moves."""
        return bool(self.excess_N[-1] <= 0)


def fit(
    tokens_DS: np.ndarray,
    experts_DS: np.ndarray,
    loads_D: np.ndarray,
    capacities_D: np.ndarray,
    slots_D: np.ndarray,
    *,
    node_size: int,
    far: float = 1.0,
    reaches_far: bool = True,
    order: int = BUSIEST,
) -> Fitted:
    """Move tokens until no rank exceeds its capacity, or no rank that does can give any away.

    A move takes the rank's largest expert, or as much of it as the rank exceeds its capacity by. The receiver is on the
    owner's node, unless one on another node takes over more tokens for its cost. Arrays are int64. The orders are:

    BUSIEST: the rank furthest above its capacity gives to the roomiest one.
    FILLING: the same, but a guest takes over as many tokens as it has room for, even if that leaves the source below
        its capacity, so that it can take guests itself. As in Walker's alias method, a receiver is then full after few
        moves, so that slots suffice more often.
    LEAST_FIRST: the rank least above its capacity gives first. The receiver has the least room that takes all of the
        move, if there is such a rank, and otherwise the most.
    WHOLE: the rank furthest above its capacity gives until it does not exceed it, to receivers as in LEAST_FIRST.

    Args:
        tokens_DS: tokens of the experts that a rank may give away, in any order; 0: no such expert.
        experts_DS: numbers of these experts.
        loads_D: tokens of each rank, also those that stay.
        capacities_D: tokens that a rank may have.
        slots_D: number of guests that a rank can take.
        node_size: number of consecutive ranks that share a node.
        far: cost of a guest on another node, rounded to PARTS; one on the owner's node costs 1.
        reaches_far: whether guests may be on other nodes than the owner.
    """
    cost = round(far * PARTS) if reaches_far else 0
    return Fitted(
        *leveled(tokens_DS.copy(), experts_DS, loads_D - capacities_D, slots_D.copy(), node_size, cost, order)
    )


@compiled("int64(int64[::1], int64, int64)")
def _largest(values: np.ndarray, first: int, after: int) -> int:
    """Return the index of the largest value of a range, the last one of equals."""
    found = first
    for index in range(first + 1, min(after, len(values))):
        if values[index] >= values[found]:
            found = index
    return found


@compiled("int64(int64[::1], int64, int64, int64)")
def _giver(above_D: np.ndarray, busiest: int, last: int, order: int) -> int:
    """Return the rank that gives next, after the last one; of equals in LEAST_FIRST, the first one."""
    if order != LEAST_FIRST:
        return last if order == WHOLE and above_D[last] > 0 else busiest
    found = busiest
    for rank in range(len(above_D)):
        if 0 < above_D[rank] < above_D[found] or (rank < found and above_D[rank] == above_D[found]):
            found = rank
    return found


@compiled("int64(int64[::1], int64, int64, int64, int64)")
def _tightest(room_D: np.ndarray, first: int, after: int, wanted: int, node_size: int) -> int:
    """Return the rank of a range with the least room for all wanted tokens, or -1.

    Of equals, it is on the last node, and there the first rank.
    """
    found = -1
    for rank in range(first, min(after, len(room_D))):
        if room_D[rank] >= wanted and (
            found < 0
            or room_D[rank] < room_D[found]
            or (room_D[rank] == room_D[found] and rank // node_size > found // node_size)
        ):
            found = rank
    return found


@compiled("Tuple((int64[:,::1], int64[::1]))(int64[:,::1], int64[:,::1], int64[::1], int64[::1], int64, int64, int64)")
def leveled(
    tokens_DS: np.ndarray,
    experts_DS: np.ndarray,
    above_D: np.ndarray,
    slots_D: np.ndarray,
    node_size: int,
    far: int,
    order: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return `fit`, for each rank's excess and the cost of a guest on another node in PARTS; 0: there are none.

    Of equal ranks and experts, the last one comes first; of nodes with equal room, the first one; see also `_giver` and
    `_tightest`.
    """
    ranks = len(above_D)
    most = 0
    stuck = above_D[0]
    source = _largest(above_D, 0, len(above_D))
    room_D = np.zeros(ranks, np.int64)
    most_N = np.zeros((ranks - 1) // node_size + 1, np.int64)
    for rank in range(ranks):
        most = most + slots_D[rank]
        stuck = min(stuck, above_D[rank])
        if slots_D[rank] and above_D[rank] < 0:
            room_D[rank] = -above_D[rank]
            most_N[rank // node_size] = max(most_N[rank // node_size], -above_D[rank])
    moves_MF = np.zeros((most, 4), np.int64)
    excess_N = np.zeros(most + 1, np.int64)
    number = 0
    while True:
        busiest = _largest(above_D, 0, ranks)
        excess_N[number] = max(above_D[busiest], stuck)
        if above_D[busiest] <= 0:
            return moves_MF[:number], excess_N[: number + 1]
        source = _giver(above_D, busiest, source, order)
        excess = above_D[source]
        home = source // node_size
        tokens = 0
        expert = 0
        place = 0
        for slot in range(tokens_DS.shape[1]):
            if (tokens_DS[source, slot], experts_DS[source, slot]) > (tokens, expert):
                tokens = tokens_DS[source, slot]
                expert = experts_DS[source, slot]
                place = slot
        wanted = tokens if order == FILLING else min(tokens, excess)
        node = home
        if far and most_N[home] < wanted:
            roomiest = most_N.argmax()
            if min(wanted, most_N[roomiest]) * PARTS > most_N[home] * far:
                # Another node takes over more for the cost of a guest
                node = roomiest
        moved = min(wanted, most_N[node])
        if not moved:
            above_D[source], stuck = NOTHING, max(stuck, excess)
            continue
        if order >= LEAST_FIRST and moved == wanted:
            nodes = (home, home + 1) if node == home else (0, len(most_N))
            target = _tightest(room_D, nodes[0] * node_size, nodes[1] * node_size, wanted, node_size)
            node = target // node_size
        else:
            target = _largest(room_D, node * node_size, (node + 1) * node_size)
        moves_MF[number, 0] = expert
        moves_MF[number, 1] = source
        moves_MF[number, 2] = target
        moves_MF[number, 3] = moved
        number += 1
        tokens_DS[source, place] -= moved
        above_D[source] -= moved
        slots_D[target] -= 1
        room_D[target] = room_D[target] - moved if slots_D[target] else 0
        if slots_D[source]:
            room_D[source] = max(moved - excess, 0)
        for changed in (node, home):
            most_N[changed] = room_D[_largest(room_D, changed * node_size, (changed + 1) * node_size)]


@compiled("float64[:,::1](int64[:,::1], int64[::1], int64, int64, float64)")
def sending_times(pairs_K2: np.ndarray, owner_E: np.ndarray, ranks: int, node_size: int, far: float) -> np.ndarray:
    """Return [2, K + 1] how long the busiest rank sends or receives, and how long a piece takes on other links.

    They are the arguments of `SendingModel.seconds_of` for the first guests, from none to all. An owner sends its
    expert once, and guests send it on.

    Args:
        pairs_K2: the expert and the rank of each guest.
        far: time of an expert between nodes; within a node it is 1.
    """
    sent_2K = np.zeros((2, len(pairs_K2) + 1))
    times_D = np.zeros(ranks)
    total_E = np.zeros(len(owner_E))
    longest_E = np.zeros(len(owner_E))
    for index in range(len(pairs_K2)):
        expert, rank = pairs_K2[index]
        owner = owner_E[expert]
        time = 1.0 if owner // node_size == rank // node_size else far
        times_D[rank] += time
        if not total_E[expert]:
            times_D[owner] += time
        total_E[expert] += time
        longest_E[expert] = max(longest_E[expert], time)
        sent_2K[0, index + 1] = max(sent_2K[0, index], times_D[owner], times_D[rank])
        sent_2K[1, index + 1] = max(sent_2K[1, index], total_E[expert] - longest_E[expert])
    return sent_2K


@compiled(
    "int64[:,:](int64[:,:], int64[:,::1], int64[:,::1], int64[::1], int64[::1], int64, int64, int64[:,::1], "
    "int64[::1], SendingPrices[::1], float64)",
    SendingPrices,
)
def cheapest(
    moves_MF: np.ndarray,
    tokens_DS: np.ndarray,
    experts_DS: np.ndarray,
    above_D: np.ndarray,
    slots_D: np.ndarray,
    node_size: int,
    far: int,
    pairs_K2: np.ndarray,
    owner_E: np.ndarray,
    sending_1: np.ndarray,
    negligible: float,
) -> np.ndarray:
    """Return these moves, or those of a fit that leaves no rank above its capacity, whose guests are sent soonest.

    If others are fewer and take negligibly longer, they are returned. A few guests of one rank may take longer than
    more guests of several.

    Args:
        above_D, far: as in `leveled`.
        pairs_K2: the expert and the rank of guests that are sent, too.
        sending_1: as in `few_batches`.
        negligible: seconds.
    """
    best_MF = moves_MF
    least = np.inf
    given = len(pairs_K2)
    ranks = len(above_D)
    for order in range(-1, 4):
        found_MF = moves_MF
        if order >= 0:
            found_MF, excess_N = leveled(
                tokens_DS.copy(), experts_DS, above_D.copy(), slots_D.copy(), node_size, far, order
            )
            if excess_N[-1] > 0:
                continue
        all_K2 = np.empty((given + len(found_MF), 2), np.int64)
        all_K2[:given] = pairs_K2
        all_K2[given:, 0] = found_MF[:, 0]
        all_K2[given:, 1] = found_MF[:, 2]
        sent_2K = sending_times(all_K2, owner_E, ranks, node_size, sending_1[0].far)
        trans, agg = few_batches(sent_2K[0, -1], sent_2K[1, -1], sending_1)
        more = trans + agg - least
        if more < -negligible or (more <= negligible and len(found_MF) < len(best_MF)):
            best_MF = found_MF
            least = trans + agg
    return best_MF
