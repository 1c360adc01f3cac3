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
    movable, slots = [[*row] for row in experts], [*slots]
    above = sorted((load - capacity, rank) for rank, (load, capacity) in enumerate(zip(loads, capacities, strict=True)))
    rooms = _Rooms(len(loads), node_size)
    for excess, rank in above:
        if excess < 0 and slots[rank]:
            rooms.add(-excess, rank)
    found, stuck = Fitted([], [above[-1][0]]), above[0][0]
    while above[-1][0] > 0:
        excess, source = above.pop()
        size, expert = movable[source][-1] if movable[source] else (0, 0)
        wanted = size if fills else min(size, excess)
        room, target = rooms.take(source, wanted, round(far * PARTS) if reaches_far else None)
        moved = min(wanted, room)
        if not moved:
            stuck = max(stuck, excess)
            if not above:
                break
            continue
        movable[source].pop()
        if size > moved:
            insort(movable[source], (size - moved, expert))
        slots[target] -= 1
        if slots[target] and room > moved:
            rooms.add(room - moved, target)
        insort(above, (excess - moved, source))
        if moved > excess and slots[source]:
            rooms.add(moved - excess, source)
        found.moves.append(Move(expert, source, target, moved))
        found.excess.append(max(above[-1][0], stuck))
    return found


class _Rooms:
    """The ranks that can take tokens, by node."""

    def __init__(self, num_ranks: int, node_size: int) -> None:
        self.node_size = node_size
        self.ranks: list[list[tuple[int, int]]] = [[] for _ in range(0, num_ranks, node_size)]
        """Pairs (room, rank), ascending."""
        self.most = [0] * len(self.ranks)
        """The largest room of each node."""

    def add(self, room: int, rank: int) -> None:
        node = rank // self.node_size
        insort(self.ranks[node], (room, rank))
        self.most[node] = self.ranks[node][-1][0]

    def take(self, source: int, wanted: int, far: int | None) -> tuple[int, int]:
        """Remove the room and the rank that take most of the wanted tokens for their cost; (0, 0) if there are none.

        They are on the source's node if that takes all, if nothing may leave it (`far` None), or if `far` / PARTS times
        as many are not taken elsewhere.
        """
        node = source // self.node_size
        near = min(wanted, self.most[node])
        if far is not None and near < wanted:
            other = max(range(len(self.most)), key=self.most.__getitem__)
            if min(wanted, self.most[other]) * PARTS > near * far:
                node = other
        if not wanted or not self.most[node]:
            return 0, 0
        found = self.ranks[node].pop()
        self.most[node] = self.ranks[node][-1][0] if self.ranks[node] else 0
        return found
