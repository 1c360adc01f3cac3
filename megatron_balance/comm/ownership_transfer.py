"""Transfer: experts and their optimizer state move permanently to other home slots.

Moves permute home slots, so an element keeps its offset within its slot. Each round moves a window of offsets. A rank
packs outgoing elements before it overwrites them, and messages stay small regardless of the experts' size.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import post, wait_for
from megatron_balance.planning.ownership import OwnerChange

STAGING_BYTES = 64 * 2**20
"""Maximum bytes that a rank sends and receives in one round; latency is negligible at this size."""

Interval = tuple[int, int]
"""Range of elements: first, and last plus one."""


class Field(NamedTuple):
    """A tensor [S, ...] with a part for each home slot: a parameter, its main parameter or an optimizer moment. All
    ranks have the same fields in the same order, but the distributed optimizer shards them: a rank may keep a part, or
    nothing."""

    slot_size: int
    """Number of elements per slot."""
    kept: Interval
    """Elements of the flattened tensor that this rank keeps."""
    values: torch.Tensor
    """Contiguous view of the kept elements, [stop - start]."""

    def bytes_of(self, start: int, size: int) -> torch.Tensor:
        """Return a byte view of `size` elements of the flattened tensor, from element `start` on."""
        first = start - self.kept[0]
        return self.values[first : first + size].view(torch.uint8)


class Extent(NamedTuple):
    """A field of any rank, without its values."""

    slot_size: int
    kept: Interval
    itemsize: int

    @classmethod
    def of(cls, field: Field) -> "Extent":
        start, stop = field.kept
        assert field.values.shape == (stop - start,) and field.values.is_contiguous(), "a field's values are those kept"
        return cls(field.slot_size, field.kept, field.values.element_size())

    def in_slot(self, slot: int) -> Interval:
        """Return a slot's kept elements as offsets within it; an empty interval may end before it starts."""
        start = slot * self.slot_size
        return max(0, self.kept[0] - start), min(self.slot_size, self.kept[1] - start)


class Place(NamedTuple):
    """Place of a rank among those that keep a layer's experts: its expert-parallel and expert-data-parallel rank."""

    rank: int
    replica: int


class FieldMessage(NamedTuple):
    """Consecutive elements of one field that one rank sends to another, or copies within itself."""

    source: int
    target: int
    field: int
    offset: int
    """Offset of the first element within its slot, equal on source and target."""
    size: int
    """Number of elements."""
    taken: int
    """Index of the first element in the source's flattened tensor."""
    put: int
    """Index of the first element in the target's flattened tensor."""
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return self.size * self.itemsize

    def cut(self, start: int, stop: int) -> "FieldMessage":
        """Return the part of the message within a window of slot offsets."""
        skipped = start - self.offset
        return self._replace(offset=start, size=stop - start, taken=self.taken + skipped, put=self.put + skipped)


class Moved(NamedTuple):
    """Bytes sent to other ranks, by this rank and by all ranks of the group."""

    sent_bytes: int
    total_bytes: int


def plan_messages(
    moves: Sequence[OwnerChange], places: Sequence[Place], extents: Sequence[Sequence[Extent]]
) -> list[FieldMessage]:
    """Return the messages that bring every rank the elements that it keeps after the moves; the same on every rank.

    Elements come from the source's replica with the target's replica number if it keeps them, otherwise from the first
    replica that keeps them. `places` and `extents`, [ranks][fields], cover all ranks of the group.
    """
    messages = []
    for move in moves:
        for target, place in enumerate(places):
            if place.rank != move.target:
                continue
            sources = [rank for rank, other in enumerate(places) if other.rank == move.source]
            sources.sort(key=lambda rank: (places[rank].replica != place.replica, rank))
            for field, wanted in enumerate(extents[target]):
                kept = [(source, *extents[source][field].in_slot(move.source_slot)) for source in sources]
                first, end = wanted.in_slot(move.target_slot)
                while first < end:
                    # The replicas of the source together keep every element
                    source, stop = next(
                        (source, min(end, last)) for source, start, last in kept if start <= first < last
                    )
                    taken, put = (first + slot * wanted.slot_size for slot in (move.source_slot, move.target_slot))
                    message = FieldMessage(source, target, field, first, stop - first, taken, put, wanted.itemsize)
                    messages.append(message)
                    first = stop
    return messages


def plan_rounds(messages: Sequence[FieldMessage], staging_bytes: int) -> list[list[FieldMessage]]:
    """Split the messages into rounds to execute in place, one after another; the same on every rank. A round has whole
    windows of slot offsets, so no later round needs elements that it overwrites. `staging_bytes` limits the bytes that
    a rank sends and receives in a round, except for a round with a single offset."""
    rounds: list[list[FieldMessage]] = [[]]
    used: Counter[int] = Counter()
    for field in sorted({message.field for message in messages}):
        part = [message for message in messages if message.field == field]
        ends = {end for message in part for end in (message.offset, message.offset + message.size)}
        for start, stop in pairwise(sorted(ends)):
            crossing = [message for message in part if message.offset <= start < message.offset + message.size]
            # Bytes of one offset on each rank; elements that stay on a rank count once
            row = Counter[int]()
            for message in crossing:
                row.update(dict.fromkeys((message.source, message.target), message.itemsize))
            while row and start < stop:
                fitting = min((staging_bytes - used[rank]) // size for rank, size in row.items())
                # An offset above the limit gets a round of its own, even if other ranks have room left
                if rounds[-1] and (fitting < 1 or max(used.values()) > staging_bytes):
                    rounds.append([])
                    used.clear()
                    continue
                end = min(stop, start + max(1, fitting))
                rounds[-1] += [message.cut(start, end) for message in crossing]
                used.update({rank: (end - start) * size for rank, size in row.items()})
                start = end
    return rounds if rounds[-1] else []


class ExpertMover:
    """Executes moves between home slots of the ranks that keep a layer's experts: expert-parallel ranks and replicas.
    Every rank of the group calls `transfer` together, between an optimizer step and the next forward pass."""

    def __init__(self, group: dist.ProcessGroup, own: Place, staging_bytes: int = STAGING_BYTES) -> None:
        """`group` has all replicas of an expert-parallel group; every rank of it passes its own place."""
        self.group = group
        self.staging_bytes = staging_bytes
        self.places: list[Place] = [own] * group.size()
        dist.all_gather_object(self.places, own, group=group)

    @torch.no_grad()
    def transfer(self, moves: Sequence[OwnerChange], fields: Sequence[Field]) -> Moved:
        """Move the experts' parts of all fields. With NCCL, the current stream waits for messages, not the host."""
        extents: list[list[Extent]] = [[]] * self.group.size()
        dist.all_gather_object(extents, [Extent.of(field) for field in fields], group=self.group)
        messages = plan_messages(moves, self.places, extents)
        # No barrier between rounds: each rank overwrites only elements that it has packed
        for part in plan_rounds(messages, self.staging_bytes):
            self._exchange(part, fields)
        others = [message for message in messages if message.source != message.target]
        sent = sum(message.num_bytes for message in others if message.source == self.group.rank())
        return Moved(sent, sum(message.num_bytes for message in others))

    def _exchange(self, messages: Sequence[FieldMessage], fields: Sequence[Field]) -> None:
        """Execute this rank's part of a round, with one message per peer."""
        rank = self.group.rank()
        leaving: defaultdict[int, list[FieldMessage]] = defaultdict(list)
        arriving: defaultdict[int, list[FieldMessage]] = defaultdict(list)
        for message in messages:
            if message.source == rank:
                leaving[message.target].append(message)
            if message.target == rank:
                arriving[message.source].append(message)
        sends = {peer: _pack(leaving[peer], fields) for peer in sorted(leaving)}
        received = {rank: sends.pop(rank)} if rank in sends else {}
        receives = {}
        for peer in sorted(arriving.keys() - {rank}):
            size = sum(message.num_bytes for message in arriving[peer])
            receives[peer] = torch.empty(size, dtype=torch.uint8, device=torch.cuda.current_device())
        wait_for(post(self.group, receives, sends))
        for peer, values in (received | receives).items():
            _unpack(arriving[peer], values, fields)


def _pack(messages: Sequence[FieldMessage], fields: Sequence[Field]) -> torch.Tensor:
    return torch.cat([fields[message.field].bytes_of(message.taken, message.size) for message in messages])


def _unpack(messages: Sequence[FieldMessage], values: torch.Tensor, fields: Sequence[Field]) -> None:
    parts = values.split([message.num_bytes for message in messages])
    for message, part in zip(messages, parts, strict=True):
        fields[message.field].bytes_of(message.put, message.size).copy_(part)
