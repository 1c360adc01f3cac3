"""Transfer: experts with their optimizer state move to other home slots, for good.

    fields -> plan -> staging -> all ranks ready? -> rounds: pack -> exchange -> unpack in place

Moves permute home slots, so that an element stays at its offset within a slot. Each round moves one window of offsets:
a rank packs what leaves before it overwrites it, and its staging stays small however large the experts are.

Whatever can fail on one rank alone comes before the first round, and all ranks agree on it: a failure changes nothing
on any rank. From the first round on there is no way back. A rank that dies there ends the job, as in any collective,
and the job resumes from its last checkpoint.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import post
from megatron_balance.placement.ownership import Move

STAGING_BYTES = 64 * 2**20
"""The most that a rank sends and receives in one round: a message of this size is far beyond any link's latency."""

ALIGNMENT = 16
"""Bytes: NCCL copies buffers that begin at other addresses byte by byte."""

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
    """[stop - start], a contiguous view of what is kept."""

    def bytes_of(self, start: int, size: int) -> torch.Tensor:
        """A view of `size` elements from `start` of the flattened tensor, as bytes: messages need no alignment."""
        first = start - self.kept[0]
        return self.values[first : first + size].view(torch.uint8)


class Extent(NamedTuple):
    """A Field of any rank, without its values."""

    slot_size: int
    kept: Interval
    itemsize: int

    @classmethod
    def of(cls, field: Field) -> "Extent":
        start, stop = field.kept
        assert field.values.shape == (stop - start,) and field.values.is_contiguous(), "a field has what it says"
        return cls(field.slot_size, field.kept, field.values.element_size())


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
    offset: int
    """Of the first element within its slot, which is the same at both ends."""
    size: int
    """Elements."""
    taken: int
    """Where they begin in the flattened tensor on the source."""
    put: int
    """Where they begin in the flattened tensor on the target."""
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return self.size * self.itemsize

    def cut(self, start: int, stop: int) -> "Message":
        """The part in a window of slot offsets."""
        skipped = start - self.offset
        return self._replace(offset=start, size=stop - start, taken=self.taken + skipped, put=self.put + skipped)


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
    slot_size, (first, end) = wanted.slot_size, _of_slot(wanted, move.target_slot)
    kept = [(source, *_of_slot(extents[source][field], move.source_slot)) for source in sources]
    while first < end:
        # Together the source's replicas keep every element
        source, stop = next((source, min(end, last)) for source, start, last in kept if start <= first < last)
        taken, put = first + move.source_slot * slot_size, first + move.target_slot * slot_size
        yield Message(source, target, field, first, stop - first, taken, put, wanted.itemsize)
        first = stop


def _of_slot(extent: Extent, slot: int) -> Interval:
    """What is kept of a slot, counted from its beginning; empty intervals may end before they begin."""
    start = slot * extent.slot_size
    return max(0, extent.kept[0] - start), min(extent.slot_size, extent.kept[1] - start)


def plan_rounds(messages: Sequence[Message], staging_bytes: int) -> list[list[Message]]:
    """The messages, cut into rounds that can be executed one after the other, in place.

    Pure; each rank comes to the same list. A round has whole windows of slot offsets, of one field or several. What a
    slot gets at an offset was at the same offset of another slot, so that no later round needs what a round overwrites.

    Args:
        staging_bytes: no rank sends and receives more than this in a round, unless the round has one offset alone.
    """
    rounds: list[list[Message]] = [[]]
    used: Counter[int] = Counter()
    for field in sorted({message.field for message in messages}):
        part = [message for message in messages if message.field == field]
        ends = {end for message in part for end in (message.offset, message.offset + message.size)}
        for start, stop in pairwise(sorted(ends)):
            crossing = [message for message in part if message.offset <= start < message.offset + message.size]
            # Bytes of one offset on each rank; what a rank sends itself is staged once
            row = Counter[int]()
            for message in crossing:
                row.update(dict.fromkeys((message.source, message.target), message.itemsize))
            while row and start < stop:
                fitting = min((staging_bytes - used[rank]) // size for rank, size in row.items())
                # One offset may exceed the limit; its round takes nothing else, even if other ranks have room
                if rounds[-1] and (fitting < 1 or max(used.values()) > staging_bytes):
                    rounds.append([])
                    used.clear()
                    continue
                end = min(stop, start + max(1, fitting))
                rounds[-1] += [message.cut(start, end) for message in crossing]
                used.update({rank: (end - start) * size for rank, size in row.items()})
                start = end
    return rounds if rounds[-1] else []


class OwnershipTransfer:
    """Executes moves of home slots among the ranks that keep a layer's experts: expert-parallel ranks and replicas.

    Every rank of the group calls `transfer` together, between an optimizer step and the next forward pass.
    """

    def __init__(self, group: dist.ProcessGroup, own: Place, staging_bytes: int = STAGING_BYTES) -> None:
        """
        Args:
            group: has all replicas of an expert-parallel group; every rank of it calls this.
            staging_bytes: the most that a rank stages in one round.
        """
        self.group, self.staging_bytes = group, staging_bytes
        self.places: list[Place] = [own] * group.size()
        dist.all_gather_object(self.places, own, group=group)

    @torch.no_grad()
    def transfer(self, moves: Sequence[Move], fields: Callable[[], Sequence[Field]]) -> Moved | str:
        """Move experts with all that `fields` has of them; or say why nothing was moved, the same on every rank.

        With NCCL the rounds are queued on the current stream; the host does not wait for them.
        """
        own: Sequence[Field] = ()
        try:
            own = fields()
            answer: list[Extent] | str = [Extent.of(field) for field in own]
        except Exception as error:  # whatever it is, no rank may wait for this one
            answer = _problem(error)
        extents = self._gathered(answer)
        if isinstance(extents, str):
            return extents
        messages, rounds, staging, problem = [], [], torch.empty(0), None
        try:
            messages = plan_messages(moves, self.places, extents)
            rounds = [_Round.of(part, self.group.rank()) for part in plan_rounds(messages, self.staging_bytes)]
            staging = _staging(rounds)
        except Exception as error:  # above all a lack of memory
            problem = _problem(error)
        ready = self._gathered(problem)
        if isinstance(ready, str):
            return ready
        for part in rounds:
            self._execute(part, own, staging)
        others = [message for message in messages if message.source != message.target]
        sent = sum(message.num_bytes for message in others if message.source == self.group.rank())
        return Moved(sent, sum(message.num_bytes for message in others))

    def _gathered(self, answer: list[Extent] | str | None) -> list | str:
        """Every rank's answer, or the first problem."""
        answers: list = [None] * self.group.size()
        dist.all_gather_object(answers, answer, group=self.group)
        problems = (f"on rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str))
        return next(problems, answers)

    def _execute(self, part: "_Round", own: Sequence[Field], staging: torch.Tensor) -> None:
        """Ranks need not wait for each other between rounds: each overwrites only what it has packed itself."""
        for parcel in part.leaving:
            _pack(parcel, own, staging)
        self._exchange(part, staging)
        for parcel in part.arriving:
            _unpack(parcel, own, staging)

    def _exchange(self, part: "_Round", staging: torch.Tensor) -> None:
        """Send and receive, one message for each peer."""
        receives, sends = (
            {parcel.peer: parcel.of(staging) for parcel in parcels if parcel.peer != self.group.rank()}
            for parcels in (part.arriving, part.leaving)
        )
        for work in post(self.group, receives, sends):
            work.wait()


class _Parcel(NamedTuple):
    """What goes to or comes from one rank in a round, one message after the other."""

    peer: int
    messages: list[Message]
    start: int
    """In the staging, bytes."""

    @property
    def stop(self) -> int:
        return self.start + sum(message.num_bytes for message in self.messages)

    def of(self, staging: torch.Tensor) -> torch.Tensor:
        return staging[self.start : self.stop]

    def parts(self, staging: torch.Tensor) -> Iterator[tuple[Message, torch.Tensor]]:
        sizes = [message.num_bytes for message in self.messages]
        return zip(self.messages, self.of(staging).split(sizes), strict=True)


class _Round(NamedTuple):
    """One rank's part of a round; what it sends itself leaves and arrives at one place in the staging."""

    leaving: list[_Parcel]
    arriving: list[_Parcel]

    @classmethod
    def of(cls, messages: Sequence[Message], rank: int) -> "_Round":
        leaving = _parcels([(message.target, message) for message in messages if message.source == rank], 0)
        coming = [(message.source, message) for message in messages if message.target == rank != message.source]
        arriving = _parcels(coming, max((parcel.stop for parcel in leaving), default=0))
        return cls(leaving, [*(parcel for parcel in leaving if parcel.peer == rank), *arriving])

    @property
    def num_bytes(self) -> int:
        return max((parcel.stop for parcel in (*self.leaving, *self.arriving)), default=0)


def _parcels(messages: Sequence[tuple[int, Message]], start: int) -> list[_Parcel]:
    """One for each peer, ascending, in the staging from `start` on."""
    parcels = []
    for peer in sorted({peer for peer, _ in messages}):
        start = -(-start // ALIGNMENT) * ALIGNMENT
        parcels.append(_Parcel(peer, [message for other, message in messages if other == peer], start))
        start = parcels[-1].stop
    return parcels


def _staging(rounds: Sequence[_Round]) -> torch.Tensor:
    """Bytes for any of the rounds."""
    num_bytes = max((part.num_bytes for part in rounds), default=0)
    return torch.empty(num_bytes, dtype=torch.uint8, device=torch.cuda.current_device())


def _pack(parcel: _Parcel, own: Sequence[Field], staging: torch.Tensor) -> None:
    for message, part in parcel.parts(staging):
        part.copy_(own[message.field].bytes_of(message.taken, message.size))


def _unpack(parcel: _Parcel, own: Sequence[Field], staging: torch.Tensor) -> None:
    for message, part in parcel.parts(staging):
        own[message.field].bytes_of(message.put, message.size).copy_(part)


def _problem(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
