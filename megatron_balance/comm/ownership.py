"""Transfer: experts with their optimizer state go to other home slots, for good.

    pack, make room -> all ranks ready? -> messages -> all arrived? -> unpack into place

Until the last step nothing has changed on any rank, so that what fails on one of them changes nothing on all.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_balance.placement.ownership import Move

Interval = tuple[int, int]
"""Elements from the first up to the second, which is left out."""


class Field(NamedTuple):
    """A tensor [S, ...] with a part for each home slot: a parameter, its main parameter or a moment of the optimizer.

    Every rank has the same fields in the same order, though it may keep only some, or none, of the elements of one: the
    distributed optimizer shards them.
    """

    slot_size: int
    """Elements of one slot."""

    kept: Interval
    """Which elements of the flattened tensor are kept here."""

    values: torch.Tensor
    """[stop - start], a view of what is kept."""


class Extent(NamedTuple):
    """A Field of any rank, without its values."""

    slot_size: int
    kept: Interval
    itemsize: int


class Place(NamedTuple):
    """Where a rank stands among those that keep a layer's experts."""

    rank: int
    """Expert-parallel rank."""

    replica: int
    """Expert-data-parallel rank."""


class Message(NamedTuple):
    """Elements of one field that go from one rank to another; from a rank to itself, they are copied."""

    source: int
    target: int
    field: int
    taken: Interval
    """Of the flattened tensor on the source."""
    put: int
    """Where they begin in the flattened tensor on the target."""
    num_bytes: int


class Moved(NamedTuple):
    """What a Transfer came to."""

    sent_bytes: int
    """By this rank to others."""
    total_bytes: int
    """By all ranks of the group to others."""


def plan_messages(moves: Sequence[Move], places: Sequence[Place], extents: Sequence[Sequence[Extent]]) -> list[Message]:
    """What has to be sent so that every rank gets the elements that it is to keep.

    Pure; each rank comes to the same list. Elements come from the replica of the same number where that keeps them,
    else from the first one that does.

    Args:
        places: of every rank of the group.
        extents: [ranks][fields].
    """
    messages = []
    for move in moves:
        for target, place in enumerate(places):
            if place.rank != move.target:
                continue
            sources = [rank for rank, other in enumerate(places) if other.rank == move.source]
            sources.sort(key=lambda rank: (places[rank].replica != place.replica, rank))
            for field in range(len(extents[target])):
                messages += _messages_to(target, field, move, sources, extents)
    return messages


def _messages_to(
    target: int, field: int, move: Move, sources: Sequence[int], extents: Sequence[Sequence[Extent]]
) -> Iterator[Message]:
    """Of one field of one expert, to one rank: from the first of the sources that keeps each element."""
    wanted = extents[target][field]
    size, (first, end) = wanted.slot_size, _of_slot(wanted, move.target_slot)
    kept = [(source, *_of_slot(extents[source][field], move.source_slot)) for source in sources]
    while first < end:
        # Together the source's replicas keep every element
        source, stop = next((source, min(end, last)) for source, start, last in kept if start <= first < last)
        taken = first + move.source_slot * size, stop + move.source_slot * size
        put, num_bytes = first + move.target_slot * size, (stop - first) * wanted.itemsize
        yield Message(source, target, field, taken, put, num_bytes)
        first = stop


def _of_slot(extent: Extent, slot: int) -> Interval:
    """What is kept of a slot, counted from its beginning; empty intervals may end before they begin."""
    start = slot * extent.slot_size
    return max(0, extent.kept[0] - start), min(extent.slot_size, extent.kept[1] - start)


class OwnershipTransfer:
    """Executes moves of home slots among the ranks that keep a layer's experts: expert-parallel ranks and replicas.

    Every rank of the group calls `transfer` together, between an optimizer step and the next forward pass.
    """

    def __init__(self, group: dist.ProcessGroup, own: Place) -> None:
        """`group` has all replicas of an expert-parallel group; every rank of it calls this."""
        self.group = group
        self.places: list[Place] = [own] * group.size()
        dist.all_gather_object(self.places, own, group=group)

    @torch.no_grad()
    def transfer(self, moves: Sequence[Move], fields: Callable[[], Sequence[Field]]) -> Moved | str:
        """Move experts with all that `fields` has of them; or say why nothing was moved, the same on every rank."""
        own: Sequence[Field] = ()
        try:
            own = fields()
            answer: list[Extent] | str = [Extent(*field[:2], field.values.element_size()) for field in own]
        except Exception as error:  # whatever it is, no rank may wait for this one
            answer = f"{type(error).__name__}: {error}"
        extents = self._gathered(answer)
        if isinstance(extents, str):
            return extents
        messages, rank = plan_messages(moves, self.places, extents), self.group.rank()
        # The largest elements first: what is packed into bytes stays aligned
        messages.sort(key=lambda message: (message.source, message.target, -extents[0][message.field].itemsize))
        try:
            outgoing = _by_peer([message for message in messages if message.source == rank], "target")
            parcels = {peer: _pack(part, own) for peer, part in outgoing.items()}
            incoming = _by_peer([message for message in messages if message.target == rank], "source")
            room = {peer: _room(part, own) for peer, part in incoming.items() if peer != rank}
            problem = None
        except Exception as error:  # above all a lack of memory
            problem, parcels, incoming, room = f"{type(error).__name__}: {error}", {}, {}, {}
        ready = self._gathered(problem)
        if isinstance(ready, str):
            return ready
        self._exchange(parcels, room)
        for peer, part in incoming.items():
            _unpack(part, parcels[peer] if peer == rank else room[peer], own)
        others = [message for message in messages if message.source != message.target]
        sent = sum(message.num_bytes for message in others if message.source == rank)
        return Moved(sent, sum(message.num_bytes for message in others))

    def _gathered(self, answer: list[Extent] | str | None) -> list | str:
        """Every rank's answer, or the first problem."""
        answers: list = [None] * self.group.size()
        dist.all_gather_object(answers, answer, group=self.group)
        problems = (f"on rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str))
        return next(problems, answers)

    def _exchange(self, parcels: dict[int, torch.Tensor], room: dict[int, torch.Tensor]) -> None:
        """Send and receive; returns when everything has arrived on every rank."""
        own = self.group.rank()
        operations = [
            dist.P2POp(verb, tensor, group=self.group, group_peer=peer)
            for verb, tensors in ((dist.isend, parcels), (dist.irecv, room))
            for peer, tensor in sorted(tensors.items())
            if peer != own
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        # No rank changes anything before all have what they need
        done = torch.zeros(1, device=torch.cuda.current_device())
        dist.all_reduce(done, group=self.group)
        done.item()


def _by_peer(messages: Sequence[Message], end: str) -> dict[int, list[Message]]:
    peers: dict[int, list[Message]] = {}
    for message in messages:
        peers.setdefault(getattr(message, end), []).append(message)
    return peers


def _pack(messages: Sequence[Message], own: Sequence[Field]) -> torch.Tensor:
    """The bytes of messages to one rank, one after the other."""
    parts = []
    for message in messages:
        field = own[message.field]
        start, stop = (element - field.kept[0] for element in message.taken)
        parts.append(field.values[start:stop].view(torch.uint8))
    return torch.cat(parts)


def _room(messages: Sequence[Message], own: Sequence[Field]) -> torch.Tensor:
    device = own[messages[0].field].values.device
    return torch.empty(sum(message.num_bytes for message in messages), dtype=torch.uint8, device=device)


def _unpack(messages: Sequence[Message], parcel: torch.Tensor, own: Sequence[Field]) -> None:
    for message, part in zip(messages, parcel.split([message.num_bytes for message in messages]), strict=True):
        field = own[message.field]
        values = part.view(field.values.dtype)
        start = message.put - field.kept[0]
        field.values[start : start + len(values)].copy_(values)
