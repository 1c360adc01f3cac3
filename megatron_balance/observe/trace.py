"""Trace of a rank's activities for Perfetto and chrome://tracing (`--balance-timeline`).

Each rank writes `rank00000.json` in the Trace Event Format: a process per rank, a thread per stream, a complete event
per span. A stream with overlapping spans gets more threads, because Perfetto drops overlapping events. Files of several
ranks share a time axis, and can be merged by concatenating their `traceEvents`.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from megatron_balance.device import clock
from megatron_balance.files.writing import whole_file
from megatron_balance.observe.optional import Attempts, writable

Stream = Literal["computation", "waits", "communication", "planning"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
"""Streams in the order of their rows."""

_ERA_SECONDS = 2**23
"""Times are relative to a multiple of this (97 days), equal on all ranks, so that a double is exact to 1 ns."""

_TICKS = 8
"""Times are whole eighths of a microsecond, so that sums and nanoseconds are exact and neighbors never overlap."""

# Thread ids reserved for each stream
_THREADS = 1000


@dataclass(frozen=True, eq=False)
class TraceSpan:
    """An activity on one stream, such as "L3 TRANS.1/2". Its marks are on the device or on the host."""

    iteration: int
    stream: Stream
    name: str
    start: clock.Mark
    end: clock.Mark
    issued: clock.Mark | None = None
    """Mark at which the host issued the activity, if it started later."""
    num_bytes: int = 0
    """Bytes sent by this rank."""


@dataclass(frozen=True)
class TraceEvent:
    """A span in a file; times are in microseconds since the file's base, in whole eighths."""

    rank: int
    iteration: int
    stream: Stream
    name: str
    start_us: float
    end_us: float
    issued_us: float | None
    num_bytes: int


class Timeline:
    """Keeps the spans of the latest iterations and writes all of them to one file at every `flush`.

    `rank` is this process's rank in the whole job; `iterations` is the number of iterations to keep.

    Raises:
        ValueError: the directory cannot be written to.
    """

    def __init__(self, directory: Path, rank: int, iterations: int = 10) -> None:
        self.path = directory / f"rank{rank:05d}.json"
        self.rank = rank
        self.iterations = iterations
        self._base = time.time() // _ERA_SECONDS * _ERA_SECONDS
        flag = f"--balance-timeline {directory}"
        self._attempts = Attempts(flag)
        self._pending: dict[int, tuple[clock.Mark, list[TraceSpan]]] = {}
        """By iteration: its spans, whose marks the device may not have reached yet, and a mark close to theirs. The
        device measures the time between two marks as a float32, which is less precise the further they are apart."""
        self._finished: dict[int, list[TraceEvent]] = {}
        with writable(flag):
            self._write()

    def add(self, span: TraceSpan) -> None:
        """Add a span; the device need not have reached its marks yet."""
        if span.iteration not in self._pending:
            self._pending[span.iteration] = clock.mark(), []
            _keep_latest(self._pending, self.iterations)
        if span.iteration in self._pending:
            self._pending[span.iteration][1].append(span)

    def flush(self, last: bool = False) -> None:
        """Wait for the device and write the latest iterations, if any were added; a file appears only when complete.

        Each flush reads the wall clock again, because the clocks of device and hosts drift apart over days.
        """
        if not self._pending and not self._attempts.failing:
            return
        # The device has finished all work, so its next mark has no delay
        torch.cuda.synchronize()
        wall, host, device = time.time() - self._base, time.perf_counter(), clock.mark()
        torch.cuda.synchronize()
        for number, (anchor, spans) in self._pending.items():

            def microseconds(mark: clock.Mark, anchor: clock.Mark = anchor) -> float:
                if isinstance(mark, float):
                    seconds = wall + (mark - host)
                else:
                    seconds = wall - clock.seconds(anchor, device) + clock.seconds(anchor, mark)
                return round(seconds * 1e6 * _TICKS) / _TICKS

            for span in spans:
                issued = None if span.issued is None else microseconds(span.issued)
                ends = microseconds(span.start), microseconds(span.end)
                event = TraceEvent(self.rank, number, span.stream, span.name, *ends, issued, span.num_bytes)
                self._finished.setdefault(number, []).append(event)
        self._pending = {}
        _keep_latest(self._finished, self.iterations)
        self._attempts.run(self._write, last)

    def _write(self) -> None:
        events = [event for iteration in self._finished.values() for event in iteration]
        trace = {
            "traceEvents": _trace_events(self.rank, events),
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": int(self._base) * 10**9,
        }
        with whole_file(self.path) as unfinished:
            unfinished.write_text(json.dumps(trace), encoding="utf-8")


def _trace_events(rank: int, events: Sequence[TraceEvent]) -> list[dict[str, Any]]:
    def metadata(thread: int, kind: str, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": args}

    found = [metadata(0, "process_name", name=f"rank {rank}"), metadata(0, "process_sort_index", sort_index=rank)]
    for row, stream in enumerate(STREAMS):
        for number, lane in enumerate(lanes_of([event for event in events if event.stream == stream])):
            thread = 1 + row * _THREADS + number
            found.append(metadata(thread, "thread_name", name=f"{stream} {number + 1}" if number else stream))
            found.append(metadata(thread, "thread_sort_index", sort_index=thread))
            found.extend(_complete_event(event, thread) for event in lane)
    return found


def lanes_of(events: Sequence[TraceEvent]) -> list[list[TraceEvent]]:
    """Divide events among the fewest lists without overlaps; each list is in ascending order."""
    lanes: list[list[TraceEvent]] = []
    for event in sorted(events, key=lambda event: (event.start_us, event.end_us)):
        lane = next((lane for lane in lanes if lane[-1].end_us <= event.start_us), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(event)
    return lanes


def _complete_event(event: TraceEvent, thread: int) -> dict[str, Any]:
    microseconds = event.end_us - event.start_us
    args: dict[str, Any] = {"iteration": event.iteration}
    if event.issued_us is not None:
        args |= {"issued_us": event.issued_us, "queued_us": event.start_us - event.issued_us}
    if event.num_bytes:
        args["bytes"] = event.num_bytes
        if microseconds > 0:
            args["GB/s"] = event.num_bytes / microseconds / 1e3
    return {
        "ph": "X",
        "pid": event.rank,
        "tid": thread,
        "cat": event.stream,
        "name": event.name,
        "ts": event.start_us,
        "dur": microseconds,
        "args": args,
    }


def _keep_latest(by_iteration: dict[int, Any], keep: int) -> None:
    for iteration in sorted(by_iteration)[:-keep]:
        del by_iteration[iteration]
