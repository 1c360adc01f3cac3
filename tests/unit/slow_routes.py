"""Slow reference of `placement.links` and of `plan_transfers`: route by route, link by link, message by message."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.transfers import Message, TransferPlan


class Link(NamedTuple):
    """One hop on an expert's route from its owner to its guests. The unit of time is a hop within a node."""

    source: int
    target: int
    time: float
    """Time of a piece on this link."""
    before: float
    """Time of a piece from the owner to the source."""
    behind: float
    """Time of a piece from the target to all guests behind it."""


Route = tuple[Link, ...]
"""A tree with the owner at its root: a link's source is the owner or the target of an earlier link."""


def slow_plan(placement: Placement, node_size: int, chunks: int, fanout: int = 1, far: float = 1) -> TransferPlan:
    """Schedule every expert's pieces along its route, where each rank relays a piece to at most `fanout` others.

    In one round a rank sends at most one message and receives at most one. Greedy list scheduling sends the most urgent
    piece first: the one with the most rounds left on its link and on the links behind it. Ties go to the earlier piece,
    then to the lower expert.

    Args:
        node_size, fanout, far: as in `route_of`.
    """
    flows = [
        flow
        for expert, route in routes(placement, node_size, fanout, far).items()
        for flow in _flows(expert, route, chunks)
    ]
    rounds = []
    while flows:
        rounds.append(_advance(flows, chunks))
        flows = [flow for flow in flows if flow.left]
    return TransferPlan.of(rounds)


def routes(placement: Placement, node_size: int, fanout: int = 1, far: float = 1) -> dict[int, Route]:
    """Return the route of each expert that has guests."""
    return {
        expert: route_of(
            placement.owner(expert), ranks, num_ranks=placement.num_ranks, node_size=node_size, fanout=fanout, far=far
        )
        for expert, ranks in sorted(_guests_of(placement).items())
    }


def route_of(
    owner: int, guests: Iterable[int], *, num_ranks: int, node_size: int, fanout: int, far: float = 1
) -> Route:
    """Return the route of one expert: a chain with `fanout` 1, a doubling tree with an unbounded `fanout`.

    In every step each rank that has the expert sends it to a rank that does not, at most `fanout` times in all. Other
    nodes come first, and each is entered once, because links between nodes may be slow and all guests of a node wait
    for them. The last send of a rank is for its own node, until all guests there are served. So a chain passes through
    the owner's node first, then node by node; a tree reaches all nodes in few steps and then works inside all of them
    in parallel. Nodes, and the ranks of each node, follow in cyclic order after the owner, so that experts of different
    owners use different links at the same time.

    Args:
        node_size: ranks per node.
        far: time of a piece between nodes; within a node it is 1.
    """
    home = owner // node_size
    nodes = -(-num_ranks // node_size)
    ordered = sorted(guests, key=lambda rank: ((rank // node_size - home) % nodes, (rank - owner) % node_size))
    local: defaultdict[int, deque[int]] = defaultdict(deque)
    for rank in ordered:
        local[rank // node_size].append(rank)
    others = deque(ranks for node, ranks in local.items() if node != home)
    holders: deque[tuple[int, float, int]] = deque([(owner, 0, fanout)])
    links: list[tuple[int, int, float, float]] = []
    while holders:
        source, before, left = holders.popleft()
        near = local[source // node_size]
        waiting = others.popleft() if others and (left > 1 or not near) else near
        if waiting:
            target = waiting.popleft()
            time = 1 if source // node_size == target // node_size else far
            links.append((source, target, time, before))
            holders.append((target, before + time, fanout))
            if left > 1:
                holders.append((source, before, left - 1))
    return _with_time_behind(links)


def _guests_of(placement: Placement) -> dict[int, list[int]]:
    """Return the ranks that have each expert as a guest, ascending; experts without guests are left out."""
    guests: defaultdict[int, list[int]] = defaultdict(list)
    for rank, row in enumerate(placement.guests):
        for expert in row:
            if expert != EMPTY:
                guests[expert].append(rank)
    return guests


def _with_time_behind(links: Sequence[tuple[int, int, float, float]]) -> Route:
    """Build a route from (source, target, time, time before) tuples."""
    behind: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    found = []
    for source, target, time, before in reversed(links):
        after = max((end for _, end in ends(behind[target])), default=0)
        behind[source].append((after, time))
        found.append(Link(source, target, time, before, after))
    return tuple(reversed(found))


def ends(sends: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the time that one rank has spent sending a piece, and when all ranks behind the target have it.

    The target with the most time behind it is served first.

    Args:
        sends: time behind the target, and time of the link, for each target of the rank.
    """
    spent = 0.0
    for after, time in sorted(sends, reverse=True):
        spent += time
        yield spent, spent + after


@dataclass(slots=True, eq=False)
class _Flow:
    """The state of one link of an expert's route during scheduling."""

    expert: int
    link: Link
    feeder: "_Flow | None"
    """The link that brings pieces to the source; None at the owner."""
    left: int
    """Number of pieces left to send."""

    @property
    def is_ready(self) -> bool:
        return self.feeder is None or self.feeder.left < self.left

    @property
    def urgency(self) -> tuple[float, int]:
        """Priority of the link; the link with the greatest one sends first."""
        return self.left * self.link.time + self.link.behind, self.left


def _flows(expert: int, route: Route, chunks: int) -> Iterator[_Flow]:
    into: dict[int, _Flow] = {}
    for link in route:
        into[link.target] = _Flow(expert, link, into.get(link.source), chunks)
    yield from into.values()


def _advance(flows: Sequence[_Flow], chunks: int) -> tuple[Message, ...]:
    """Send the next round: update the links and return their messages."""
    # Sorting keeps the order of equal items, with `reverse` too
    ready = sorted((flow for flow in flows if flow.is_ready), key=lambda flow: flow.urgency, reverse=True)
    sources = set()
    targets = set()
    chosen = []
    for flow in ready:
        if flow.link.source not in sources and flow.link.target not in targets:
            sources.add(flow.link.source)
            targets.add(flow.link.target)
            chosen.append(flow)
    for flow in chosen:
        flow.left -= 1
    return tuple(
        sorted(
            Message(flow.expert, flow.link.source, flow.link.target, chunks - flow.left - 1, chunks) for flow in chosen
        )
    )
