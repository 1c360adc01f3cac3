"""Check that the members of process groups enter the same operations in the same order; find their first difference.

Pure functions of the records that `job/collectives.py` made on every rank. Members are named by their global ranks.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from typing import NamedTuple

from megatron_balance.job.agreement import in_words

MAX_NAMED = 4
"""Maximum number of operations in a report about ranks that wait for others."""


class RecordedOperation(NamedTuple):
    """One operation on a channel, as one rank entered it.

    Attributes:
        verb: kind of the operation, for example `all-gathers`.
        sizes: elements of each tensor whose size must be equal on all ranks.
        detail: another property that must be equal, for example `bucket 2` or a message's tag; may be empty.
        caller: function that called torch: `start_param_sync (param_and_grad_buffer.py)`.
        ours: function and line of this package that led to the call; may be empty.
        sent, received: elements or rows for each member, in an exchange whose sizes differ by member.
        time: Unix time in seconds at which the rank entered the operation.
        number: number of the operation in its channel, from 1.
    """

    verb: str
    sizes: tuple[int, ...]
    dtype: str
    detail: str = ""
    caller: str = ""
    ours: str = ""
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    time: float = 0.0
    number: int = 1

    def __str__(self) -> str:
        uneven = f"rows {list(self.sent)} for {list(self.received)}" if self.sent or self.received else ""
        parts = [self.verb, " + ".join(map(str, self.sizes)) or uneven, self.dtype, self.detail]
        return f"{' '.join(filter(None, parts))} ({' < '.join(filter(None, [self.caller, self.ours]))})"


class Channel(NamedTuple):
    """A sequence of operations with one order: a group's collectives, or its messages from one rank to another.

    Attributes:
        name: for people, such as `expert-data-parallel` or `tensor-parallel, 0 -> 1`.
        ranks: global ranks that enter the operations, in the group's order.
        operations: the latest operations, with ascending numbers.
    """

    name: str
    ranks: Sequence[int]
    operations: MutableSequence[RecordedOperation]
    is_message: bool = False

    @property
    def first(self) -> int:
        """Number of the first operation still kept."""
        return self.operations[0].number if self.operations else 1

    @property
    def last(self) -> int:
        """Number of the last operation entered; 0 if there was none."""
        return self.operations[-1].number if self.operations else 0

    def at(self, number: int) -> RecordedOperation:
        return self.operations[number - self.first]


BARRIER = "waits for all"
"""Verb of a barrier."""

Recording = Mapping[str, Channel]
"""Operations that one rank entered, by a key of the channel that is the same on all ranks."""


def differences(records: Mapping[int, Recording]) -> list[str]:
    """Return, for each channel, a sentence on the first operation in which its ranks differ, the earliest first.

    `records` has recordings by global rank, without the ranks that gave none.
    """
    found = []
    for channel, sides in _sides(records):
        first = max(side.first for side in sides.values())
        last = min(side.last for side in sides.values()) if len(sides) > 1 else 0
        for number in range(first, last + 1):
            entered = {rank: side.at(number) for rank, side in sides.items()}
            text = _mismatch(channel, entered)
            if text is not None:
                time = min(operation.time for operation in entered.values())
                found.append((time, f"group {channel.name}, operation {number}: {text}"))
                break
    return [text for _, text in sorted(found)]


def waits(records: Mapping[int, Recording]) -> list[str]:
    """Describe at most MAX_NAMED operations that only some ranks entered, the longest wait first.

    Messages sent but not received come last, because a sender often continues without its receiver.
    """
    found: list[tuple[bool, float, str]] = []
    for channel, sides in _sides(records):
        number = min(side.last for side in sides.values()) + 1
        ahead = {rank: side.at(number) for rank, side in sides.items() if side.first <= number <= side.last}
        if not ahead:
            continue
        lagging = [rank for rank, side in sides.items() if side.last == number - 1]
        text = f"{_each(ahead)}, but {in_words(lagging)} did not: {'; '.join(_latest(records, lagging))}"
        time = min(operation.time for operation in ahead.values())
        was_sent = channel.is_message and channel.ranks[0] in ahead
        found.append((was_sent, time, f"group {channel.name}, operation {number}: {text}"))
    return [text for *_, text in sorted(found)[:MAX_NAMED]]


def report(records: Mapping[int, Recording]) -> str | None:
    """Describe why a job hangs: the first difference, or else which ranks wait for which; None if the ranks agree."""
    return next(iter(differences(records)), None) or "; ".join(waits(records)) or None


def _sides(records: Mapping[int, Recording]) -> Iterator[tuple[Channel, dict[int, Channel]]]:
    """Yield each channel with its ranks' sides; the side of a rank that never used the channel is empty."""
    channels = {key: channel for record in records.values() for key, channel in record.items()}
    for key, channel in channels.items():
        unused = channel._replace(operations=[])
        yield channel, {rank: records[rank].get(key, unused) for rank in channel.ranks if rank in records}


def _mismatch(channel: Channel, entered: Mapping[int, RecordedOperation]) -> str | None:
    first, *others = (_meaning(operation, channel.is_message) for operation in entered.values())
    return _each(entered) if any(other != first for other in others) else _exchange_mismatch(channel, entered)


def _meaning(operation: RecordedOperation, is_message: bool) -> tuple:
    """Return what must be equal on all ranks that enter an operation."""
    if is_message:
        # The two ends have different verbs and callers
        return operation[1:4]
    caller = operation.caller
    if operation.verb == BARRIER:
        # Ranks without data sets wait in another function of megatron-core's builder than those that build them
        caller = caller.rpartition(" ")[2]
    return *operation[:4], caller


def _exchange_mismatch(channel: Channel, entered: Mapping[int, RecordedOperation]) -> str | None:
    """Describe a sender and a receiver that disagree on the number of rows; None if all agree."""
    members = [(number, rank) for number, rank in enumerate(channel.ranks) if rank in entered and entered[rank].sent]
    for (sender, rank), (receiver, other) in itertools.product(members, members):
        operation = entered[rank]
        sent = operation.sent[receiver]
        expected = entered[other].received[sender]
        if sent != expected:
            by = operation.ours or operation.caller
            return f"rank {rank} {operation.verb} {sent} rows to rank {other}, which expects {expected} ({by})"
    return None


def _each(entered: Mapping[int, RecordedOperation]) -> str:
    """Return a text such as `rank 3 all-gathers 8 float32 bucket 2 (...), ranks 0, 1 ...`, grouped by operation."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, operation in entered.items():
        by_text[str(operation)].append(rank)
    return ", ".join(f"{in_words(ranks)} {text}" for text, ranks in by_text.items())


def _latest(records: Mapping[int, Recording], ranks: Sequence[int]) -> Iterator[str]:
    for rank in ranks:
        used = [channel for channel in records[rank].values() if channel.operations]
        if used:
            channel = max(used, key=lambda channel: channel.operations[-1].time)
            operation = channel.operations[-1]
            yield f"the latest of rank {rank} in group {channel.name} is operation {operation.number}, {operation}"
        else:
            yield f"rank {rank} has entered no operation yet"
