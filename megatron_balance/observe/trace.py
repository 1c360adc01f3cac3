"""What a rank did when, for Perfetto and chrome://tracing (`--balance-timeline`).

Each rank writes `rank00000.json` in the Trace Event Format: a process per rank, a thread per stream, a complete event
per span. Spans that overlap on one stream get further threads, because Perfetto drops events that do. Files of several
ranks share a time axis, as far as their hosts' clocks agree, and may be merged by concatenating `traceEvents`.
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
"""In the order of the rows."""

_ERA_SECONDS = 2**23
"""Times count from a multiple of this (97 days), the same on all ranks: a double then holds them to the nanosecond."""

_TICKS = 8
"""Times are whole eighths of a microsecond: sums and nanoseconds are then exact, and neighbours never overlap."""

_THREADS = 1000
"""Thread ids for each stream."""

MAX_BYTES = 512 * MIB
"""Of a file; an event takes about 200 bytes."""

_MOST_US = 2e6 * _ERA_SECONDS
"""Of a time in a file: two eras, because a run may go on into the next one."""

_MOST = {"pid": 10**6, "iteration": 10**12, "bytes": 2**60}
"""Of whole numbers in a file."""


@dataclass(frozen=True, eq=False)
class Span:
    """Something that lasted on one stream; its marks may be of the device or of the host."""

    iteration: int
    stream: Stream
    name: str
    """Such as "L3 TRANS.1/2" or "L2 FEC m0"."""
    start: clock.Mark
    end: clock.Mark
    issued: clock.Mark | None = None
    """When the host issued it, if it started later."""
    num_bytes: int = 0
    """Sent by this rank."""


@dataclass(frozen=True)
class Record:
    """A span in a file; times are microseconds since the file's base, whole eighths of one."""

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
    """Spans whose marks the device may not have reached."""

    anchor: clock.Mark
    """A mark near the spans': the device tells the time between two as float32, which coarsens with the distance."""
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
        """The device has finished everything at this moment, so that it marks it without delay."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        moment = cls(time.time() - base, time.perf_counter(), clock.mark())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return moment

    def microseconds(self, mark: clock.Mark, anchor: clock.Mark) -> float:
        """From a file's base to a mark."""
        if isinstance(mark, float):
            seconds = self.wall + (mark - self.host)
        else:
            seconds = self.wall - clock.seconds(anchor, self.device) + clock.seconds(anchor, mark)
        return round(seconds * 1e6 * _TICKS) / _TICKS


class Timeline:
    """Keeps the spans of the latest iterations and writes them, all in one file, at every `flush`.

    Args:
        rank: of this process in the whole job.
        iterations: how many to keep.

    Raises:
        ValueError: the directory cannot be written to.
    """

    def __init__(self, directory: Path, rank: int, iterations: int = 10) -> None:
        self.path, self.rank, self.iterations = directory / f"rank{rank:05d}.json", rank, iterations
        self._base = time.time() // _ERA_SECONDS * _ERA_SECONDS
        self._attempts = Attempts(f"--balance-timeline {directory}")
        self._pending: dict[int, _Iteration] = {}
        self._finished: dict[int, list[Record]] = {}
        try:
            self._write()
        except OSError as error:
            raise ValueError(f"--balance-timeline {directory}: {error}; choose a writable directory") from error

    def add(self, span: Span) -> None:
        """Note a span, whose marks need not be reached yet."""
        if span.iteration not in self._pending:
            self._pending[span.iteration] = _Iteration(clock.mark())
            _keep_latest(self._pending, self.iterations)
        if span.iteration in self._pending:
            self._pending[span.iteration].spans.append(span)

    def flush(self, last: bool = False) -> None:
        """Wait for the device and write the latest iterations, if any were added; a file appears whole or not at all.

        What cannot be written may be the next time, if it still belongs to the latest iterations.

        The wall clock is read anew each time: over days, the device's and the hosts' clocks drift apart.
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
        start, end = now.microseconds(span.start, anchor), now.microseconds(span.end, anchor)
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
        write_whole(self.path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))


def _trace_events(rank: int, records: Iterable[Record]) -> list[dict[str, Any]]:
    """One rank's events: names of the process and its threads, then each thread's spans by ascending time."""
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
    """As few lists as it takes so that nothing overlaps within one; each ascends."""
    lanes: list[list[Record]] = []
    for record in sorted(records, key=lambda record: (record.start_us, record.end_us)):
        lane = next((lane for lane in lanes if lane[-1].end_us <= record.start_us), None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(record)
    return lanes


def load_timeline(path: Path) -> list[Record]:
    """The spans of a file, or of several merged into one, thread by thread.

    Raises:
        ValueError: it is not as `Timeline` writes it; names the path.
    """
    content = read_object(path, MAX_BYTES)
    events = content.get("traceEvents")
    try:
        if not isinstance(events, list):
            raise ValueError("no list of traceEvents")
        return [_read(event) for event in events if not isinstance(event, dict) or event.get("ph") == "X"]
    except ValueError as error:
        raise ValueError(f"{path}: is no timeline of --balance-timeline ({error})") from error


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
        raise ValueError(f"{shown(event)} among the traceEvents is no event with args")

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
