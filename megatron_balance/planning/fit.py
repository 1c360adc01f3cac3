"""Moves of tokens from ranks with more than their capacity to ranks with less, with few guests: an interleaved fit.

Each move goes from the rank that is then furthest above its capacity to the rank with the most room. So the first moves
of a fit are themselves a plan, whose busiest rank has what the last of them left. Everything is in whole tokens.
"""

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

PARTS = 64
"""Costs of guests are compared in whole parts of that of a guest on its owner's node, so that devices agree."""


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

    moves: list[Move]
    excess: list[int]
    """Tokens by which the busiest rank exceeds its capacity, at first and after each move; at most 0 if all fit."""

    @property
    def fits(self) -> bool:
        """Whether no rank exceeds its capacity after all moves."""
        return self.excess[-1] <= 0


def fit(
    experts: Sequence[Sequence[tuple[int, int]]],
    loads: Sequence[int],
    capacities: Sequence[int],
    slots: Sequence[int],
    *,
    node_size: int,
    far: float = 1.0,
    reaches_far: bool = True,
    fills: bool = False,
) -> Fitted:
    """Move tokens until no rank exceeds its capacity, or no rank that does can give any away.

    A move takes the rank's largest expert, or a part of it. The receiver is on the owner's node, unless one on another
    node takes over more tokens for its cost.

    Args:
        experts: [D] pairs (tokens, expert) of the experts that a rank may give away, ascending.
        loads: [D] tokens of each rank, also those that stay.
        capacities: [D] tokens that a rank may have.
        slots: [D] number of guests that a rank can take.
        node_size: number of consecutive ranks that share a node.
        far: cost of a guest on another node, rounded to PARTS; one on the owner's node costs 1.
        reaches_far: whether guests may be on other nodes than the owner.
        fills: whether a guest takes over as many tokens as it has room for, even if that leaves the source below its
            capacity, so that it can take guests itself. As in Walker's alias method, a receiver is then full after few
            moves. Otherwise a move takes what exceeds the source's capacity at most, which needs fewer moves as long as
            slots suffice.
    """
    over = [(load - capacity, rank) for rank, (load, capacity) in enumerate(zip(loads, capacities, strict=True))]
    return _leveled(over, experts, [*slots], node_size, round(far * PARTS) if reaches_far else None, fills)


def _leveled(
    over: Sequence[tuple[int, int]],
    experts: Sequence[Sequence[tuple[int, int]]],
    free: list[int],
    node_size: int,
    far: int | None,
    fills: bool,
) -> Fitted:
    """Return `fit`, for pairs (excess, rank) and the cost of a guest on another node in PARTS; None: there are none."""
    # The largest of the ranks without excess stands for all of them
    above = sorted(entry for entry in over if entry[0] > 0)
    if len(above) < len(over):
        above.insert(0, max(entry for entry in over if entry[0] <= 0))
    movable, nodes = [*experts], _rooms(over, free, node_size)
    most = [rooms[-1][0] if rooms else 0 for rooms in nodes]
    found, stuck = Fitted([], [above[-1][0]]), above[0][0]
    while above[-1][0] > 0:
        excess, source = above.pop()
        own, node = movable[source], source // node_size
        size, expert = own[-1] if own else (0, 0)
        wanted = size if fills or size < excess else excess
        if far is not None and most[node] < wanted and min(wanted, room := max(most)) * PARTS > most[node] * far:
            # Another node takes over more for the cost of a guest
            node = most.index(room)
        if not wanted or not most[node]:
            stuck = max(stuck, excess)
            if not above:
                break
            continue
        rooms = nodes[node]
        room, target = rooms.pop()
        moved = room if room < wanted else wanted
        if own is experts[source]:
            own = movable[source] = [*own]
        own.pop()
        if size > moved:
            insort(own, (size - moved, expert))
        free[target] -= 1
        if room > moved and free[target]:
            insort(rooms, (room - moved, target))
        most[node] = rooms[-1][0] if rooms else 0
        insort(above, (excess - moved, source))
        if moved > excess and free[source]:
            node = source // node_size
            insort(nodes[node], (moved - excess, source))
            most[node] = nodes[node][-1][0]
        found.moves.append(Move(expert, source, target, moved))
        found.excess.append(max(above[-1][0], stuck))
    return found


def _rooms(over: Sequence[tuple[int, int]], free: Sequence[int], node_size: int) -> list[list[tuple[int, int]]]:
    """Return the ranks of each node that can take tokens: pairs (room, rank), ascending."""
    nodes: list[list[tuple[int, int]]] = [[] for _ in range(0, len(over), node_size)]
    for excess, rank in over:
        if excess < 0 and free[rank]:
            nodes[rank // node_size].append((-excess, rank))
    for rooms in nodes:
        rooms.sort()
    return nodes
