"""Check that the members of process groups enter the same operations in the same order; find where they first differ.

Pure functions of the records that `job/collectives.py` made on every rank. Groups name their members by global rank.
"""

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, NamedTuple

MAX_NAMED = 4
"""Number of groups for which a report names the ranks that wait for others."""


class Operation(NamedTuple):
    """One operation on a channel, as one rank entered it."""

    verb: str
    """Kind of the operation, for example `all-gathers`."""
    sizes: tuple[int, ...]
    """Elements of each tensor that must have the same size on all ranks."""
    dtype: str
    detail: str
    """Another property that must be equal, for example `bucket 2` or a message's tag; may be empty."""
    caller: str
    """Function that called torch: `start_param_sync (param_and_grad_buffer.py)`."""
    ours: str
    """Function and line of this package that led to the call; may be empty."""
    sent: tuple[int, ...] = ()
    """Elements or rows sent to each member, in an exchange whose sizes differ by member."""
    received: tuple[int, ...] = ()
    """Elements or rows received from each member, in such an exchange."""
    time: float = 0.0
    """Unix time in seconds at which the rank entered the operation."""

    def agrees(self, other: "Operation") -> bool:
        """Return whether two ranks entered the same operation. `_exchange_mismatch` compares the sizes of exchanges."""
        return self[:5] == other[:5]

    def __str__(self) -> str:
        sizes = " + ".join(map(str, self.sizes)) if self.sizes else ""
        uneven = f"rows {list(self.sent)} for {list(self.received)}" if self.sent or self.received else ""
        what = " ".join(part for part in (sizes or uneven, self.dtype, self.detail) if part)
        by = self.caller if not self.ours else f"{self.caller} < {self.ours}"
        return f"{self.verb} {what} ({by})" if what else f"{self.verb} ({by})"


@dataclass
class Channel:
    """A sequence of operations with one order: a group's collectives, or its messages from one rank to another."""

    name: str
    """Name for people, for example `expert-data-parallel` or `tensor-parallel, 0 -> 1`."""
    ranks: tuple[int, ...]
    """Global ranks that enter its operations, in the group's order."""
    _: KW_ONLY
    is_message: bool = False
    first: int = 1
    """Number of the first operation that is still kept, counting from 1."""
    operations: list[Operation] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Number of the last operation that was entered; 0 if there was none."""
        return self.first + len(self.operations) - 1

    def at(self, number: int) -> Operation:
        return self.operations[number - self.first]


Record = Mapping[str, Channel]
"""The operations that one rank entered, by a key of the channel that is the same on all ranks."""


def pack(record: Record, last: int) -> bytes:
    """Pack the last operations of each channel into bytes, small enough for a key-value store."""
    channels = {}
    for key, channel in record.items():
        kept = channel.operations[-last:]
        channels[key] = asdict(channel) | {"first": channel.last + 1 - len(kept), "operations": kept}
    return zlib.compress(json.dumps(channels).encode())


def unpack(packed: bytes) -> Record:
    """Unpack what `pack` returned."""
    return {key: _channel(**fields) for key, fields in json.loads(zlib.decompress(packed)).items()}


def _channel(ranks: list[int], operations: list[list[Any]], **fields: Any) -> Channel:
    read = [Operation(*(tuple(value) if isinstance(value, list) else value for value in one)) for one in operations]
    return Channel(ranks=tuple(ranks), operations=read, **fields)


class Difference(NamedTuple):
    """A sentence about ranks that entered different operations, and its time."""

    time: float
    text: str

    def __str__(self) -> str:
        return self.text


def differences(records: Mapping[int, Record]) -> list[Difference]:
    """Return the first operation of each channel in which its ranks differ, the earliest in time first.

    Args:
        records: records by global rank, without the ranks that gave none.
    """
    found = []
    for key, channel in _channels(records).items():
        sides = _sides(key, channel, records)
        if len(sides) < 2:
            continue
        first = max(side.first for side in sides.values())
        last = min(side.last for side in sides.values())
        for number in range(first, last + 1):
            entered = {rank: side.at(number) for rank, side in sides.items()}
            text = _mismatch(channel, entered)
            if text is not None:
                place = f"group {channel.name}, operation {number}: {text}"
                found.append(Difference(min(operation.time for operation in entered.values()), place))
                break
    return sorted(found)


def waits(records: Mapping[int, Record]) -> list[str]:
    """Return at most MAX_NAMED channels with an operation that only some ranks entered, the longest wait first.

    Messages that were sent but not received come last, because a sender often continues without its receiver.
    """
    found: list[tuple[bool, float, str]] = []
    for key, channel in _channels(records).items():
        sides = _sides(key, channel, records)
        last = max(side.last for side in sides.values())
        missing = [rank for rank, side in sides.items() if side.last < last]
        number = min(side.last for side in sides.values()) + 1
        ahead = {rank: side.at(number) for rank, side in sides.items() if side.first <= number <= side.last}
        if not missing or not ahead:
            continue
        lagging = [rank for rank in missing if sides[rank].last == number - 1]
        text = f"{_each(ahead)}, but {_named(lagging)} did not: {'; '.join(_latest(records, lagging))}"
        time = min(operation.time for operation in ahead.values())
        was_sent = channel.is_message and channel.ranks[0] in ahead
        found.append((was_sent, time, f"group {channel.name}, operation {number}: {text}"))
    return [text for *_, text in sorted(found)[:MAX_NAMED]]


def report(records: Mapping[int, Record]) -> str | None:
    """Describe why a job hangs: the first difference, or else which ranks wait for which; None if the ranks agree."""
    first = next(iter(differences(records)), None)
    return str(first) if first is not None else "; ".join(waits(records)) or None


def _channels(records: Mapping[int, Record]) -> dict[str, Channel]:
    return {key: channel for record in records.values() for key, channel in record.items()}


def _sides(key: str, channel: Channel, records: Mapping[int, Record]) -> dict[int, Channel]:
    """Return each rank's side of the channel; an empty one for a rank that never used the channel."""
    nothing = Channel(channel.name, channel.ranks, is_message=channel.is_message)
    return {rank: records[rank].get(key, nothing) for rank in channel.ranks if rank in records}


def _mismatch(channel: Channel, entered: Mapping[int, Operation]) -> str | None:
    operations = list(entered.values())
    if channel.is_message:
        # One end sends what the other receives
        alike = all(one[1:4] == operations[0][1:4] for one in operations)
    else:
        alike = all(one.agrees(operations[0]) for one in operations)
    if not alike:
        return _each(entered)
    return _exchange_mismatch(channel, entered)


def _exchange_mismatch(channel: Channel, entered: Mapping[int, Operation]) -> str | None:
    """Describe two members of which one sends another number of rows than the other expects; None if all match."""
    for number, rank in enumerate(channel.ranks):
        for other_number, other in enumerate(channel.ranks):
            if rank not in entered or other not in entered or not entered[rank].sent:
                continue
            sent = entered[rank].sent[other_number]
            expected = entered[other].received[number]
            if sent != expected:
                by = entered[rank].ours or entered[rank].caller
                verb = entered[rank].verb
                return f"rank {rank} {verb} {sent} rows to rank {other}, which expects {expected} ({by})"
    return None


def _each(entered: Mapping[int, Operation]) -> str:
    """Return `rank 3 all-gathers 8 float32 bucket 2 (...), ranks 0, 1 ...`, grouped by operation."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, operation in entered.items():
        by_text[str(operation)].append(rank)
    return ", ".join(f"{_named(ranks)} {text}" for text, ranks in by_text.items())


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _latest(records: Mapping[int, Record], ranks: Iterable[int]) -> Iterator[str]:
    """Describe the last operation that each of the ranks entered, on any channel."""
    for rank in ranks:
        last = [(channel.at(channel.last), channel) for channel in records[rank].values() if channel.operations]
        if not last:
            yield f"rank {rank} has entered no operation yet"
            continue
        operation, channel = max(last, key=lambda pair: pair[0].time)
        yield f"the latest of rank {rank} in group {channel.name} is operation {channel.last}, {operation}"


class Event(NamedTuple):
    """An operation that a rank's thread issued on a channel, or its wait for such an operation."""

    thread: str
    channel: str
    number: int
    is_wait: bool = False


def find_cycle(events: Mapping[int, Sequence[Event]], messages: Iterable[str] = ()) -> list[tuple[str, int]]:
    """Find a cycle of operations: each is issued before the next on some rank, and the last before the first.

    A thread issues collectives one after the other. NCCL requires all ranks to issue the collectives of different
    communicators in the same order, because the device may run only one at a time. Messages are posted ahead: an
    operation counts as issued after a message only once its thread has waited for the message.

    Args:
        events: events by rank, in order.
        messages: channels of messages between two ranks.

    Returns:
        The operations (channel, number) along the cycle; empty if there is none.
    """
    after: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    posted = set(messages)
    for ordered in events.values():
        before: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for event in ordered:
            operation = (event.channel, event.number)
            earlier = before[event.thread]
            if event.is_wait:
                if event.channel in posted:
                    earlier.append(operation)
                continue
            for one in earlier:
                after[one].add(operation)
            if event.channel not in posted:
                # Later operations follow this one, and through it all earlier ones
                earlier[:] = [operation]
    return _find_cycle(after)


def _find_cycle(after: Mapping[Any, set[Any]]) -> list[Any]:
    """Return the nodes along a cycle of a graph, by depth-first search without recursion."""
    done: set[Any] = set()
    for start in list(after):
        if start in done:
            continue
        path = [start]
        on_path = {start}
        stack = [iter(sorted(after[start]))]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
                left = path.pop()
                on_path.remove(left)
                done.add(left)
            elif node in on_path:
                return path[path.index(node) :]
            elif node not in done:
                path.append(node)
                on_path.add(node)
                stack.append(iter(sorted(after.get(node, ()))))
    return []
