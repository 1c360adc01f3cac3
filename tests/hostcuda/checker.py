"""A device's activity, kernel by kernel -> races, memory freed in use, host waits, and the work that is queued.

Every kernel reports the bytes that it read and wrote, and its stream. Two accesses to the same bytes from two streams,
at least one of them a write, are a race unless the second access's stream has waited for the first access. The pure
Python part of torch's own CUDA sanitizer keeps track of which stream has waited for what.
"""

import functools
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
import torch.distributed
from torch.cuda._sanitizer import StreamSynchronizations

from megatron_balance.job import collectives
from tests import issue_order

_PACKAGE = str(Path(__file__).parents[2] / "megatron_balance")
_SKIPPED = (
    *(__file__, str(Path(__file__).with_name("torch_cuda.py")), collectives.__file__, issue_order.__file__),
    str(Path(torch.__file__).parent) + os.sep,
)
"""Files whose functions are plumbing: the device's, the collective recorders', and torch's."""


class Place(NamedTuple):
    """A place in the host program, by function name, because line numbers change."""

    function: str
    ours: str
    """The innermost function of megatron_balance; the same one or a caller."""

    def __str__(self) -> str:
        return self.ours if self.function == self.ours else f"{self.function} < {self.ours}"


def here() -> Place:
    """Return the innermost function that is not plumbing."""
    frame: FrameType | None = sys._getframe(1)
    function: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if function is None and not file.startswith(_SKIPPED):
            function = frame
        if file.startswith(_PACKAGE) and file != collectives.__file__:
            break
        frame = frame.f_back
    return Place(*("?" if found is None else _name(found.f_code) for found in (function, frame)))


@functools.cache
def _name(code: CodeType) -> str:
    # Name the function that contains a comprehension or lambda
    function = code.co_qualname.split(".<locals>.<")[0].removesuffix(".<listcomp>")
    return f"{Path(code.co_filename).stem}.{function}"


class Access(NamedTuple):
    """Bytes [begin, end) of some memory that a kernel reads or writes."""

    begin: int
    end: int
    writes: bool
    stream: int
    number: int
    """Number of the kernel, in the host's launch order."""
    op: str
    place: Place


WORK = ("kernels", "launches", "messages", "copied bytes", "host bytes")
"""Kinds of work that the host queues: kernels, without views; collectives and batches of messages; the messages
themselves; what copy and cat kernels write on the device; what is copied between the device and the host."""


def _work(op: str, ranges: list[tuple[int, int, int, bool]]) -> Iterator[tuple[str, int]]:
    """Return the kinds and amounts of work in one kernel, given its accesses (memory, begin, end, writes)."""
    if op.startswith("c10d::"):
        yield ("messages" if op in ("c10d::send", "c10d::recv_") else "launches"), 1
        return
    yield "kernels", 1
    written, read = (sum(end - begin for _, begin, end, writes in ranges if writes == kind) for kind in (True, False))
    if op in ("aten::copy_", "aten::_local_scalar_dense") and not (written and read):
        yield "host bytes", written + read
    elif op in ("aten::copy_", "aten::cat"):
        yield "copied bytes", written


class Conflict(NamedTuple):
    """Two unordered accesses."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.first}\n    and {self.second}"


class Checker:
    """Collects what the device reports while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.races: Counter[Conflict] = Counter()
        self.freed_in_use: Counter[str] = Counter()
        self.synchronizations: Counter[tuple[str, Place]] = Counter()
        """Host waits by operator and place."""
        self.kernels: Counter[int] = Counter()
        """Kernels by stream."""
        self.work: Counter[tuple[str, Place]] = Counter()
        """What the host queued, by kind (in WORK) and place."""
        self.names = {0: "the default stream"}
        self._lock = threading.RLock()
        self._order = StreamSynchronizations()
        self._number = 0
        self._accesses: dict[int, list[Access]] = defaultdict(list)
        self._owner: dict[int, int] = {}
        """Memory -> the stream that it was allocated for, which may use it again as soon as it is free."""
        self._kept: dict[int, set[int]] = defaultdict(set)

    def kernel(self, op: str, stream: int, ranges: list[tuple[int, int, int, bool]]) -> None:
        """Record a kernel queued on a stream, with its accesses (memory, begin, end, writes)."""
        if not self.on:
            return
        place = here()
        with self._lock:
            self._number += 1
            self.kernels[stream] += 1
            for kind, amount in _work(op, ranges):
                self.work[kind, place] += amount
            self._order.update_seq_num(stream, self._number)
            for base, begin, end, writes in ranges:
                new = Access(begin, end, writes, stream, self._number, op, place)
                self._accesses[base] = [old for old in self._accesses[base] if not self._replaces(new, old)]
                self._accesses[base].append(new)

    def _replaces(self, new: Access, old: Access) -> bool:
        """Return whether an access ordered after `new` is also ordered after `old`; record a race between the two."""
        if old.begin >= new.end or new.begin >= old.end:
            return False
        ordered = old.stream == new.stream or self._order.is_ordered_after(new.stream, old.number, old.stream)
        if not ordered and (old.writes or new.writes):
            self.races[Conflict(self._text(old), self._text(new))] += 1
        return ordered and new.begin <= old.begin and old.end <= new.end and (new.writes or not old.writes)

    def _text(self, access: Access) -> str:
        verb = "writes" if access.writes else "reads"
        return f"{access.op} {verb} in {self.names.get(access.stream, f'stream {access.stream}')}: {access.place}"

    def allocated(self, base: int, stream: int) -> None:
        """Record memory that was allocated for a stream."""
        with self._lock:
            self._accesses.pop(base, None)
            self._kept.pop(base, None)
            self._owner[base] = stream

    def kept(self, base: int, stream: int) -> None:
        """Record that memory must not be reused before a stream has done what was queued on it."""
        with self._lock:
            self._kept[base].add(stream)

    def freed(self, base: int) -> None:
        """Record that no reference to some memory is left."""
        with self._lock:
            owner = self._owner.pop(base, None)
            kept = self._kept.pop(base, set())
            for access in self._accesses.pop(base, ()):
                used = owner is not None and access.stream not in (owner, *kept)
                if self.on and used and not self._order.is_ordered_after(owner, access.number, access.stream):
                    self.freed_in_use[f"{self._text(access)}; freed in {here()}"] += 1

    def recorded(self, event: int, stream: int) -> None:
        """Record that a stream recorded an event."""
        with self._lock:
            self._order.record_state(event, stream)

    def waited(self, event: int, stream: int) -> None:
        """Record that a stream waits for an event."""
        with self._lock:
            self._order.stream_wait_for_event(stream, event)

    def synchronized(self, op: str, stream: int | None = None, event: int | None = None) -> None:
        """Record that the host waited for all streams, for one, or for an event."""
        with self._lock:
            if self.on:
                self.synchronizations[op, here()] += 1
            if event is not None:
                self._order.all_streams_wait_for_event(event)
            elif stream is not None:
                self._order.all_streams_wait_for_stream(stream)
            else:
                self._order.sync_all_streams()

    def launched_batch(self) -> None:
        """Record that the host launched a batch of messages."""
        if self.on:
            with self._lock:
                self.work["launches", here()] += 1

    def named(self, stream: int, name: str) -> None:
        """Give a stream a readable name."""
        self.names[stream] = name

    def clear(self) -> None:
        """Forget all findings and counts."""
        for counter in (self.races, self.freed_in_use, self.synchronizations, self.kernels, self.work):
            counter.clear()

    def complaints(self) -> list[str]:
        """Return every problem found, each once."""
        freed = [f"freed in use: {text}" for text in self.freed_in_use]
        return [*(f"race: {conflict}" for conflict in self.races), *freed]
