"""Which rank sends which piece of which expert to whom, round by round: what Trans executes, and Agg backwards."""

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
    """How experts get from their owners to their guest slots, piece by piece, in rounds that follow each other.

    In one round a rank sends at most one message and receives at most one. A source is the expert's owner, or received
    the piece in an earlier round and relays it. Every piece reaches every occupied guest slot once.

    Trans runs the rounds forward: the source sends weights to the target. Agg runs them backward: the target sends
    gradients to the source, which adds what it receives to its own, so a relay passes on the sum of its subtree.
    """

    rounds: tuple[tuple[Message, ...], ...]

    chunks: int
    """Pieces that every expert is sent in."""

    @property
    def experts_sent(self) -> float:
        """Whole experts that cross links, each link counted; a part of a plan may send a fraction."""
        return sum(map(len, self.rounds)) / self.chunks

    def split(self, rounds: int) -> tuple["TransferPlan", "TransferPlan"]:
        """The first so many rounds, and the rest. Trans runs the first part first, Agg the rest first."""
        return TransferPlan(self.rounds[:rounds], self.chunks), TransferPlan(self.rounds[rounds:], self.chunks)


class Link(NamedTuple):
    """One step of an expert's way from its owner to its guests."""

    source: int
    target: int
    before: int
    """Links between the owner and the source."""
    behind: int
    """Rounds that a piece takes from the target on to all guests that get it from there."""


Route = tuple[Link, ...]
"""A tree with the owner at its root: a link's source is the owner or the target of an earlier link."""


def plan_transfers(placement: Placement, node_size: int, chunks: int, fanout: int = 1) -> TransferPlan:
    """Pieces flow along each expert's route, in order, every rank passing on what it has to up to `fanout` others.

    Greedy list scheduling: the most urgent piece first, which has the most rounds to follow on its link and on those
    behind it; ties go to the earlier piece, then to the lower expert. `LinkLoads` bounds the rounds from below.

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
    """The way of each expert that has guests."""
    return {
        expert: route_of(
            placement.owner(expert), ranks, num_ranks=placement.num_ranks, node_size=node_size, fanout=fanout
        )
        for expert, ranks in sorted(_guests_of(placement).items())
    }


def route_of(owner: int, guests: Iterable[int], *, num_ranks: int, node_size: int, fanout: int) -> Route:
    """The way of one expert: a chain with `fanout` 1, a doubling tree where it has no bound.

    In every step each rank that has the expert sends it to one that does not, at most `fanout` times in all. Other
    nodes come first, each entered once, because their links may be slow and all of their guests wait; but the last
    send of a rank is for its own node, until all guests there are provided for. So a chain passes through the owner's
    node first, then node by node, and a tree reaches the nodes in few steps and works inside all of them at the same
    time. Nodes come in cyclic order from the owner's on, and so do the ranks of each node from the owner's number on:
    experts of different owners use different links at the same time.

    Args:
        node_size: ranks per node.
    """
    home, nodes = owner // node_size, -(-num_ranks // node_size)
    ordered = sorted(guests, key=lambda rank: ((rank // node_size - home) % nodes, (rank - owner) % node_size))
    if fanout == 1:
        # What follows comes to the same, but searches ask for chains often
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
    """The ranks with a guest slot for each expert, ascending; experts without guests are left out."""
    guests: defaultdict[int, list[int]] = defaultdict(list)
    for rank, row in enumerate(placement.guests):
        for expert in row:
            if expert != EMPTY:
                guests[expert].append(rank)
    return guests


def _with_rounds_behind(links: Sequence[tuple[int, int, int]]) -> Route:
    """Links of a route, given with what is before them."""
    behind: defaultdict[int, list[int]] = defaultdict(list)
    found = []
    for source, target, before in reversed(links):
        rounds = _rounds_to(behind[target])
        behind[source].append(rounds)
        found.append(Link(source, target, before, rounds))
    return tuple(reversed(found))


def _rounds_to(behind: list[int]) -> int:
    """Rounds of one piece from a rank on to its targets, which need so many from then on; the slowest goes first."""
    if len(behind) < 2:
        return behind[0] + 1 if behind else 0
    return max(index + rounds for index, rounds in enumerate(sorted(behind, reverse=True), start=1))


class LinkLoads:
    """How busy routes keep every rank's links: a bound on the rounds of `plan_transfers` from below.

    A link of a rank carries one piece per round; the first cannot come before it has passed the links ahead of it on
    its route, and the last has those behind it to pass.
    """

    def __init__(self, num_ranks: int) -> None:
        # By rank, senders first: experts, the fewest rounds before the first piece, the fewest after the last one
        self._experts = [0] * (2 * num_ranks)
        self._before, self._after = [num_ranks] * (2 * num_ranks), [num_ranks] * (2 * num_ranks)
        self._alone: dict[int, int] = {}
        """As `lines`, of one rank on one route."""

    def add(self, route: Route) -> None:
        """Count an expert's route in."""
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
        """(m, x) such that experts in c pieces take at least m * c + x rounds, ascending; none without a route."""
        lines = self._alone.copy()
        for experts, before, after in zip(self._experts, self._before, self._after, strict=True):
            if experts and before + after > lines.get(experts, -1):
                lines[experts] = before + after
        return sorted(lines.items())


@dataclass(slots=True, eq=False)
class _Flow:
    """One link of an expert's route while pieces pass."""

    expert: int
    link: Link
    feeder: "_Flow | None"
    """The link that brings the source its pieces."""
    left: int
    """Pieces that it has to send still."""

    @property
    def is_ready(self) -> bool:
        return self.feeder is None or self.feeder.left < self.left

    @property
    def urgency(self) -> tuple[int, int]:
        """The greater, the sooner it should send."""
        return self.left + self.link.behind, self.left


def _flows(expert: int, route: Route, chunks: int) -> Iterator[_Flow]:
    into: dict[int, _Flow] = {}
    for link in route:
        into[link.target] = _Flow(expert, link, into.get(link.source), chunks)
    yield from into.values()


def _advance(flows: Sequence[_Flow], chunks: int) -> tuple[Message, ...]:
    """The messages of the next round, which the links have sent when it returns."""
    # Sorting keeps the order of equals, in reverse as well
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
