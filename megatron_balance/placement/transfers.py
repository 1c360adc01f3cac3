"""Plans of messages for Trans and Agg: which rank sends which piece of which expert to which rank, in rounds."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megatron_balance.placement.placement import EMPTY, Placement


class Message(NamedTuple):
    """A piece of one expert's weights from a rank that holds it to a guest slot of another."""

    expert: int
    source: int
    target: int
    chunk: int
    """Index of the piece: 0 .. chunks - 1."""


@dataclass(frozen=True)
class TransferPlan:
    """The messages that bring experts from their owners to guest slots, piece by piece, in consecutive rounds.

    In one round a rank sends at most one message and receives at most one. A source is the expert's owner or a relay
    that received the piece in an earlier round. Every piece reaches every occupied guest slot once.

    Trans runs the rounds forward: the source sends weights to the target. Agg runs them backward: the target sends
    gradients to the source, which adds what it receives to its own, so a relay passes on the sum of its subtree.
    """

    rounds: tuple[tuple[Message, ...], ...]

    chunks: int
    """Number of pieces that every expert is sent in."""

    @property
    def experts_sent(self) -> float:
        """Number of experts that cross links, counted per link; part of a plan may send a fraction."""
        return sum(map(len, self.rounds)) / self.chunks

    def split(self, rounds: int) -> tuple["TransferPlan", "TransferPlan"]:
        """Split after `rounds` rounds. Trans runs the first part first, Agg the second part first."""
        return TransferPlan(self.rounds[:rounds], self.chunks), TransferPlan(self.rounds[rounds:], self.chunks)


class Link(NamedTuple):
    """One hop on an expert's route from its owner to its guests."""

    source: int
    target: int
    before: int
    """Number of links between the owner and the source."""
    behind: int
    """Number of rounds that a piece takes from the target to all guests behind it."""


Route = tuple[Link, ...]
"""A tree with the owner at its root: a link's source is the owner or the target of an earlier link."""


def plan_transfers(placement: Placement, node_size: int, chunks: int, fanout: int = 1) -> TransferPlan:
    """Schedule every expert's pieces along its route, where each rank relays a piece to at most `fanout` others.

    Greedy list scheduling sends the most urgent piece first: the one with the most rounds left on its link and on the
    links behind it. Ties go to the earlier piece, then to the lower expert. `LinkLoads` is a lower bound on the rounds.

    Args:
        node_size, fanout: as in `route_of`.
    """
    flows = [
        flow for expert, route in routes(placement, node_size, fanout).items() for flow in _flows(expert, route, chunks)
    ]
    rounds = []
    while flows:
        rounds.append(_advance(flows, chunks))
        flows = [flow for flow in flows if flow.left]
    return TransferPlan(tuple(rounds), chunks)


def routes(placement: Placement, node_size: int, fanout: int = 1) -> dict[int, Route]:
    """Return the route of each expert that has guests."""
    return {
        expert: route_of(
            placement.owner(expert), ranks, num_ranks=placement.num_ranks, node_size=node_size, fanout=fanout
        )
        for expert, ranks in sorted(_guests_of(placement).items())
    }


def route_of(owner: int, guests: Iterable[int], *, num_ranks: int, node_size: int, fanout: int) -> Route:
    """Return the route of one expert: a chain with `fanout` 1, a doubling tree with an unbounded `fanout`.

    In every step each rank that has the expert sends it to a rank that does not, at most `fanout` times in all. Other
    nodes come first, and each is entered once, because links between nodes may be slow and all guests of a node wait
    for them. The last send of a rank is for its own node, until all guests there are served. So a chain passes through
    the owner's node first, then node by node; a tree reaches all nodes in few steps and then works inside all of them
    in parallel. Nodes, and the ranks of each node, follow in cyclic order after the owner, so that experts of different
    owners use different links at the same time.

    Args:
        node_size: ranks per node.
    """
    home, nodes = owner // node_size, -(-num_ranks // node_size)
    ordered = sorted(guests, key=lambda rank: ((rank // node_size - home) % nodes, (rank - owner) % node_size))
    if fanout == 1:
        # A shortcut for the tree below, because searches need many chains
        last = len(ordered) - 1
        return tuple(Link(*pair, index, last - index) for index, pair in enumerate(pairwise((owner, *ordered))))
    local: defaultdict[int, deque[int]] = defaultdict(deque)
    for rank in ordered:
        local[rank // node_size].append(rank)
    far = deque(ranks for node, ranks in local.items() if node != home)
    holders, links = deque([(owner, 0, fanout)]), []
    while holders:
        source, before, left = holders.popleft()
        near = local[source // node_size]
        waiting = far.popleft() if far and (left > 1 or not near) else near
        if waiting:
            target = waiting.popleft()
            links.append((source, target, before))
            holders.append((target, before + 1, fanout))
            if left > 1:
                holders.append((source, before, left - 1))
    return _with_rounds_behind(links)


def _guests_of(placement: Placement) -> dict[int, list[int]]:
    """Return the ranks that have each expert as a guest, ascending; experts without guests are left out."""
    guests: defaultdict[int, list[int]] = defaultdict(list)
    for rank, row in enumerate(placement.guests):
        for expert in row:
            if expert != EMPTY:
                guests[expert].append(rank)
    return guests


def _with_rounds_behind(links: Sequence[tuple[int, int, int]]) -> Route:
    """Build a route from (source, target, links before) triples."""
    behind: defaultdict[int, list[int]] = defaultdict(list)
    found = []
    for source, target, before in reversed(links):
        rounds = _rounds_to(behind[target])
        behind[source].append(rounds)
        found.append(Link(source, target, before, rounds))
    return tuple(reversed(found))


def _rounds_to(behind: list[int]) -> int:
    """Return the rounds of one piece from a rank to all ranks behind it, given the rounds behind each target."""
    if len(behind) < 2:
        return behind[0] + 1 if behind else 0
    # The slowest target is served first
    return max(index + rounds for index, rounds in enumerate(sorted(behind, reverse=True), start=1))


class LinkLoads:
    """How busy routes keep every rank's links: a lower bound on the rounds of `plan_transfers`.

    A rank's link carries one piece per round. The first piece has to pass the links ahead of it on its route first, and
    the last piece has to pass the links behind it afterwards.
    """

    def __init__(self, num_ranks: int) -> None:
        # Per sending rank, then per receiving rank: experts, least rounds before the first piece, least after the last
        self._experts = [0] * (2 * num_ranks)
        self._before, self._after = [num_ranks] * (2 * num_ranks), [num_ranks] * (2 * num_ranks)
        self._alone: dict[int, int] = {}
        """Pairs as in `lines`, from single ranks of single routes."""

    def add(self, route: Route) -> None:
        """Add an expert's route."""
        experts, befores, afters, receiver = self._experts, self._before, self._after, len(self._experts) // 2
        sends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for source, target, before, behind in route:
            sends[source, before].append(behind)
            for end in (source, receiver + target):
                experts[end] += 1
                if before < befores[end]:
                    befores[end] = before
                if behind < afters[end]:
                    afters[end] = behind
        for (_, before), behind in sends.items():
            for count, rounds in enumerate(sorted(behind, reverse=True), start=1):
                self._alone[count] = max(self._alone.get(count, 0), before + rounds)

    @property
    def lines(self) -> list[tuple[int, int]]:
        """Pairs (m, x), ascending: experts in c pieces take at least m * c + x rounds. Empty without a route."""
        lines = self._alone.copy()
        for experts, before, after in zip(self._experts, self._before, self._after, strict=True):
            if experts and before + after > lines.get(experts, -1):
                lines[experts] = before + after
        return sorted(lines.items())


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
    def urgency(self) -> tuple[int, int]:
        """Priority of the link; the link with the greatest one sends first."""
        return self.left + self.link.behind, self.left


def _flows(expert: int, route: Route, chunks: int) -> Iterator[_Flow]:
    into: dict[int, _Flow] = {}
    for link in route:
        into[link.target] = _Flow(expert, link, into.get(link.source), chunks)
    yield from into.values()


def _advance(flows: Sequence[_Flow], chunks: int) -> tuple[Message, ...]:
    """Send the next round: update the links and return their messages."""
    # Sorting keeps the order of equal items, with `reverse` too
    ready = sorted((flow for flow in flows if flow.is_ready), key=lambda flow: flow.urgency, reverse=True)
    sources, targets, chosen = set(), set(), []
    for flow in ready:
        if flow.link.source not in sources and flow.link.target not in targets:
            sources.add(flow.link.source)
            targets.add(flow.link.target)
            chosen.append(flow)
    for flow in chosen:
        flow.left -= 1
    return tuple(
        sorted(Message(flow.expert, flow.link.source, flow.link.target, chunks - flow.left - 1) for flow in chosen)
    )
