"""Trace of a rank's activities for Perfetto and chrome://tracing (`--balance-timeline`).

Each rank writes `rank00000.json` in the Trace Event Format: a process per rank, a thread per stream, a complete event
per span. If spans on a stream overlap, the stream gets more threads, because Perfetto drops overlapping events. Files
of several ranks share a time axis, as far as their hosts' clocks agree, and can be merged by concatenating
`traceEvents`.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from megatron_balance.device import clock
from megatron_balance.files.reading import MIB, number_in, read_object, shown
from megatron_balance.observe.optional import Attempts, write_whole

Stream = Literal["computation", "waits", "communication", "planning"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
"""All streams, in the order of their rows."""

_ERA_SECONDS = 2**23
"""Times are relative to a multiple of this (97 days), the same on all ranks, so that a double is exact to 1 ns."""

_TICKS = 8
"""Times are whole eighths of a microsecond, so that sums and nanoseconds are exact, and neighbors never overlap."""

_THREADS = 1000
"""Number of thread ids reserved for each stream."""

MAX_BYTES = 512 * MIB
"""Maximum size of a file; an event takes about 200 bytes."""

_MOST_US = 2e6 * _ERA_SECONDS
"""Maximum time in a file: two eras, because a run may continue into the next one."""

_MOST = {"pid": 10**6, "iteration": 10**12, "bytes": 2**60}
"""Maximum of each whole number in a file."""


@dataclass(frozen=True, eq=False)
class Span:
    """An activity on one stream; its marks are on the device or on the host."""

    iteration: int
    stream: Stream
    name: str
    """Name of the activity, such as "L3 TRANS.1/2" or "L2 FEC m0"."""
    start: clock.Mark
    end: clock.Mark
    issued: clock.Mark | None = None
    """Mark where the host issued it, if it started later."""
    num_bytes: int = 0
    """Bytes sent by this rank."""


@dataclass(frozen=True)
class Record:
    """A span in a file; times are microseconds since the file's base, in whole eighths."""

    rank: int
    iteration: int
    stream: Stream
    name: str
    start_us: float
    end_us: float
    issued_us: float | None
    num_bytes: int


@dataclass(frozen=True, eq=False)
class _Iteration:
    """Spans of an iteration, whose marks the device may not have reached yet."""

    anchor: clock.Mark
    """A mark close to those of the spans: the device measures the time between two marks as a float32, whose precision
    decreases with their distance."""
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Moment:
    """One moment on all clocks."""

    wall: float
    """Seconds since a file's base."""
    host: float
    device: clock.Mark

    @classmethod
    def now(cls, base: float) -> "_Moment":
        """Mark the present on all clocks, after the device has finished all work, so that its mark has no delay."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        moment = cls(time.time() - base, time.perf_counter(), clock.mark())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return moment

    def microseconds(self, mark: clock.Mark, anchor: clock.Mark) -> float:
        """Return the microseconds from a file's base to a mark."""
        if isinstance(mark, float):
            seconds = self.wall + (mark - self.host)
        else:
            seconds = self.wall - clock.seconds(anchor, self.device) + clock.seconds(anchor, mark)
        return round(seconds * 1e6 * _TICKS) / _TICKS


class Timeline:
    """Keeps the spans of the latest iterations and writes all of them to one file at every `flush`.

    Args:
        rank: rank of this process in the whole job.
        iterations: number of iterations to keep.

    Raises:
        ValueError: the directory cannot be written to.
    """

    def __init__(self, directory: Path, rank: int, iterations: int = 10) -> None:
        self.path = directory / f"rank{rank:05d}.json"
        self.rank = rank
        self.iterations = iterations
        self._base = time.time() // _ERA_SECONDS * _ERA_SECONDS
        self._attempts = Attempts(f"--balance-timeline {directory}")
        self._pending: dict[int, _Iteration] = {}
        self._finished: dict[int, list[Record]] = {}
        try:
            self._write()
        except OSError as error:
            raise ValueError(f"--balance-timeline {directory}: {error}; choose a writable directory") from error

    def add(self, span: Span) -> None:
        """Add a span; the device need not have reached its marks yet."""
        if span.iteration not in self._pending:
            self._pending[span.iteration] = _Iteration(clock.mark())
            _keep_latest(self._pending, self.iterations)
        if span.iteration in self._pending:
            self._pending[span.iteration].spans.append(span)

    def flush(self, last: bool = False) -> None:
        """Wait for the device and write the latest iterations, if any were added; a file appears only when complete.

        If writing fails, they are written at the next flush, as long as they are among the latest iterations.

        Each flush reads the wall clock again: over days, the device's and the hosts' clocks drift apart.
        """
        if not self._pending and not self._attempts.failing:
            return
        now = _Moment.now(self._base)
        for number, iteration in self._pending.items():
            records = [self._record(span, iteration.anchor, now) for span in iteration.spans]
            self._finished.setdefault(number, []).extend(records)
        self._pending = {}
        _keep_latest(self._finished, self.iterations)
        self._attempts.run(self._write, last)

    def _record(self, span: Span, anchor: clock.Mark, now: _Moment) -> Record:
        start = now.microseconds(span.start, anchor)
        end = now.microseconds(span.end, anchor)
        issued = None if span.issued is None else now.microseconds(span.issued, anchor)
        return Record(self.rank, span.iteration, span.stream, span.name, start, end, issued, span.num_bytes)

    def _write(self) -> None:
        records = [record for iteration in self._finished.values() for record in iteration]
        trace = {
            "traceEvents": _trace_events(self.rank, records),
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": int(self._base) * 10**9,
        }
        text = json.dumps(trace)

        def write(unfinished: Path) -> None:
            unfinished.write_text(text, encoding="utf-8")

        write_whole(self.path, write)


def _trace_events(rank: int, records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return one rank's events: names of the process and its threads, then each thread's spans in ascending order."""
    events = [_metadata(rank, 0, "process_name", name=f"rank {rank}")]
    events.append(_metadata(rank, 0, "process_sort_index", sort_index=rank))
    records = list(records)
    for row, stream in enumerate(STREAMS):
        lanes = lanes_of([record for record in records if record.stream == stream])
        for number, lane in enumerate(lanes):
            thread = 1 + row * _THREADS + number
            events.append(_metadata(rank, thread, "thread_name", name=f"{stream} {number + 1}" if number else stream))
            events.append(_metadata(rank, thread, "thread_sort_index", sort_index=thread))
            events.extend(_complete_event(record, thread) for record in lane)
    return events


def lanes_of(records: Sequence[Record]) -> list[list[Record]]:
    """Divide records among the fewest lists without overlaps; each list is in ascending order."""
    lanes: list[list[Record]] = []
    for record in sorted(records, key=lambda record: (record.start_us, record.end_us)):
        lane = next((lane for lane in lanes if lane[-1].end_us <= record.start_us), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(record)
    return lanes


def load_timeline(path: Path) -> list[Record]:
    """Read the spans of a file, or of several merged files, thread by thread.

    Raises:
        ValueError: `Timeline` did not write the file; the error names the path.
    """
    content = read_object(path, MAX_BYTES)
    events = content.get("traceEvents")
    try:
        if not isinstance(events, list):
            raise ValueError("no list of traceEvents")
        return [_read(event) for event in events if not isinstance(event, dict) or event.get("ph") == "X"]
    except ValueError as error:
        raise ValueError(f"{path}: is not a timeline of --balance-timeline ({error})") from error


def _metadata(rank: int, thread: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": args}


def _complete_event(record: Record, thread: int) -> dict[str, Any]:
    microseconds = record.end_us - record.start_us
    args: dict[str, Any] = {"iteration": record.iteration}
    if record.issued_us is not None:
        args |= {"issued_us": record.issued_us, "queued_us": record.start_us - record.issued_us}
    if record.num_bytes:
        args["bytes"] = record.num_bytes
        if microseconds > 0:
            args["GB/s"] = record.num_bytes / microseconds / 1e3
    return {
        "ph": "X",
        "pid": record.rank,
        "tid": thread,
        "cat": record.stream,
        "name": record.name,
        "ts": record.start_us,
        "dur": microseconds,
        "args": args,
    }


def _read(event: Any) -> Record:
    args = event.get("args") if isinstance(event, dict) else None
    if not isinstance(args, dict):
        raise ValueError(f"{shown(event)} among the traceEvents is not an event with args")

    def number(of: dict[str, Any], name: str, high: float = 0) -> Any:
        return number_in(of.get(name), 0, high or _MOST[name], name, whole=name in _MOST)

    if event.get("cat") not in STREAMS or not isinstance(event.get("name"), str):
        raise ValueError(f"an event {shown(event.get('name'))} of a stream {shown(event.get('cat'))}")
    start = float(number(event, "ts", _MOST_US))
    return Record(
        rank=number(event, "pid"),
        iteration=number(args, "iteration"),
        stream=event["cat"],
        name=event["name"],
        start_us=start,
        end_us=start + float(number(event, "dur", _MOST_US)),
        issued_us=float(number(args, "issued_us", _MOST_US)) if "issued_us" in args else None,
        num_bytes=number(args, "bytes") if "bytes" in args else 0,
    )


def _keep_latest(by_iteration: dict[int, Any], keep: int) -> None:
    for iteration in sorted(by_iteration)[:-keep]:
        del by_iteration[iteration]
