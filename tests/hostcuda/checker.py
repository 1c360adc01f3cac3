"""What a device does, kernel by kernel -> races, freed memory in use, and waits of the host.

Every kernel says which bytes it read and wrote, and in which stream. Two accesses to the same bytes, at least one of
them a write, from two streams, are a race unless the second one's stream has waited for the first one. Which stream
has waited for what is kept by the pure half of torch's own CUDA sanitizer.
"""

import os
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed
from torch.cuda._sanitizer import StreamSynchronizations

from megatron_balance.job import collectives

_PACKAGE = str(Path(__file__).parents[2] / "megatron_balance")
_SKIPPED = (
    *(__file__, str(Path(__file__).with_name("torch_cuda.py")), collectives.__file__),
    str(Path(torch.__file__).parent) + os.sep,
)
"""Whose functions are plumbing: the device's, the recorder's of collectives, and torch's."""


class Place(NamedTuple):
    """Where the host was: functions by name, because lines move."""

    function: str
    ours: str
    """The innermost function of megatron_balance; the same one or a caller."""

    def __str__(self) -> str:
        return self.ours if self.function == self.ours else f"{self.function} < {self.ours}"


def here() -> Place:
    """The innermost function that is no plumbing."""
    frame: FrameType | None = sys._getframe(1)
    function: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if function is None and not file.startswith(_SKIPPED):
            function = frame
        if file.startswith(_PACKAGE) and file != collectives.__file__:
            break
        frame = frame.f_back
    return Place(_name(function), _name(frame))


def _name(frame: FrameType | None) -> str:
    if frame is None:
        return "?"
    # A comprehension or lambda is the function that it stands in
    function = frame.f_code.co_qualname.split(".<locals>.<")[0].removesuffix(".<listcomp>")
    return f"{Path(frame.f_code.co_filename).stem}.{function}"


class Access(NamedTuple):
    """Bytes [begin, end) of some memory that a kernel reads or writes."""

    begin: int
    end: int
    writes: bool
    stream: int
    number: int
    """Of the kernel, in the order of the host."""
    op: str
    place: Place


class Conflict(NamedTuple):
    """Two accesses that nothing orders."""

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
        self.synchronisations: Counter[tuple[str, Place]] = Counter()
        """By operator and place."""
        self.kernels: Counter[int] = Counter()
        """By stream."""
        self.names = {0: "the default stream"}
        self._lock = threading.RLock()
        self._order = StreamSynchronizations()
        self._number = 0
        self._accesses: dict[int, list[Access]] = defaultdict(list)
        self._owner: dict[int, int] = {}
        """Memory -> the stream that it was allocated for, which may use it again as soon as it is free."""
        self._kept: dict[int, set[int]] = defaultdict(set)

    def kernel(self, op: str, stream: int, ranges: list[tuple[int, int, int, bool]]) -> None:
        """A kernel with its accesses (memory, begin, end, writes) was queued on a stream."""
        if not self.on:
            return
        place = here()
        with self._lock:
            self._number += 1
            self.kernels[stream] += 1
            self._order.update_seq_num(stream, self._number)
            for base, begin, end, writes in ranges:
                new = Access(begin, end, writes, stream, self._number, op, place)
                self._accesses[base] = [old for old in self._accesses[base] if not self._replaces(new, old)]
                self._accesses[base].append(new)

    def _replaces(self, new: Access, old: Access) -> bool:
        """Whether what comes after `new`, if ordered after it, is ordered after `old`; notes a race."""
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
        """A stream has new memory."""
        with self._lock:
            self._accesses.pop(base, None)
            self._kept.pop(base, None)
            self._owner[base] = stream

    def kept(self, base: int, stream: int) -> None:
        """Memory is not used again before a stream has done what was queued on it."""
        with self._lock:
            self._kept[base].add(stream)

    def freed(self, base: int) -> None:
        """Nobody refers to some memory any more."""
        with self._lock:
            owner, kept = self._owner.pop(base, None), self._kept.pop(base, set())
            for access in self._accesses.pop(base, ()):
                used = owner is not None and access.stream not in (owner, *kept)
                if self.on and used and not self._order.is_ordered_after(owner, access.number, access.stream):
                    self.freed_in_use[f"{self._text(access)}; freed in {here()}"] += 1

    def recorded(self, event: int, stream: int) -> None:
        """A stream recorded an event."""
        with self._lock:
            self._order.record_state(event, stream)

    def waited(self, event: int, stream: int) -> None:
        """A stream waits for an event."""
        with self._lock:
            self._order.stream_wait_for_event(stream, event)

    def synchronized(self, op: str, stream: int | None = None, event: int | None = None) -> None:
        """The host waited for all streams, for one or for an event."""
        with self._lock:
            if self.on:
                self.synchronisations[op, here()] += 1
            if event is not None:
                self._order.all_streams_wait_for_event(event)
            elif stream is not None:
                self._order.all_streams_wait_for_stream(stream)
            else:
                self._order.sync_all_streams()

    def named(self, stream: int, name: str) -> None:
        """A stream for people."""
        self.names[stream] = name

    def clear(self) -> None:
        """Forget what was found and counted."""
        for counter in (self.races, self.freed_in_use, self.synchronisations, self.kernels):
            counter.clear()

    def complaints(self) -> list[str]:
        """What is wrong, each once."""
        freed = [f"freed in use: {text}" for text in self.freed_in_use]
        return [*(f"race: {conflict}" for conflict in self.races), *freed]
