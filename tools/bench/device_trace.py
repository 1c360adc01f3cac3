"""Reads a trace of torch.profiler (`export_chrome_trace`): how often the host waits, and what the device does.

Pure functions on the trace's JSON; nothing here needs torch or a GPU. Times are microseconds. The events of interest:

    user_annotation, cpu_op      what the host does, nested within one thread
    cuda_runtime, cuda_driver    calls of CUDA by the host; `correlation` connects them to their effect
    kernel, gpu_memcpy, gpu_memset    what the device does
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

CALLS = {"cuda_runtime", "cuda_driver"}
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}

WAIT = re.compile(
    r"cuda(Event|Stream|Device|Thread)Synchronize|cu(Event|Stream|Ctx)Synchronize|"
    r"cudaMemcpy(2D|3D|(To|From)(Symbol|Array)|2D(To|From)Array)?|cuMemcpy(2D|3D)?(HtoD|DtoH|DtoD)?"
)
"""Calls during which the host waits. Reading a value (`aten::item`) is an asynchronous copy and one of these."""

LAUNCH = re.compile(r"(cuda|cu)Launch(Cooperative)?Kernel\w*")
VERSION = re.compile(r"(_v\d+|_ptsz|_ptds)+$")
BACKWARD = "autograd::engine::evaluate_function"
TOP = 15


class Event(NamedTuple):
    """Something that took time, on a thread of the host or on the device."""

    name: str
    category: str
    thread: tuple[Any, Any]
    """Process and thread; of the device, its number and that of the stream."""
    start: float
    end: float
    args: Mapping[str, Any]

    @property
    def us(self) -> float:
        """Microseconds from start to end."""
        return self.end - self.start


class Trace:
    """The events of a trace, in the order of their starts.

    Args:
        trace: the JSON that `export_chrome_trace` writes.
    """

    def __init__(self, trace: Mapping[str, Any]) -> None:
        events = [_event(raw) for raw in trace["traceEvents"] if raw.get("ph") == "X"]
        events.sort(key=lambda event: (event.start, -event.end))
        self.calls = [event for event in events if event.category in CALLS]
        self.device = [event for event in events if event.category in DEVICE]
        self.operators = [event for event in events if event.category == "cpu_op"]
        self._annotations = [event for event in events if event.category == "user_annotation"]

    def annotations(self, name: str, within: Event | None = None) -> list[Event]:
        """Return the ranges of `record_function(name)`, of any thread, that start within an event."""
        return [
            event
            for event in self._annotations
            if event.name == name and (within is None or within.start <= event.start < within.end)
        ]

    def calls_within(self, window: Event) -> list[Event]:
        """Return the calls of CUDA that start in a window of time, on any thread."""
        return [event for event in self.calls if window.start <= event.start < window.end]

    def caused_by(self, calls: Iterable[Event]) -> list[Event]:
        """Return what calls of CUDA made the device do, by the correlation of both."""
        numbers = {event.args.get("correlation") for event in calls} - {None}
        return [event for event in self.device if event.args.get("correlation") in numbers]

    def backward_of(self, forward: Sequence[Event], within: Event) -> list[Event]:
        """Return the backward functions of operators that ran within events of the forward pass, as autograd runs them.

        An operator and its backward function have the same sequence number, and only backward functions name the
        thread of the forward pass. The number of an operator without a backward function is that of the next one, so
        the last operator of a number counts.
        """
        inside = cover(forward)
        owned: dict[Any, bool] = {}
        backward: list[tuple[Any, Event]] = []
        for event in self.operators:
            number = event.args.get("Sequence number")
            if number is None or not within.start <= event.start < within.end:
                continue
            if event.name.startswith(BACKWARD):
                backward.append((number, event))
            elif not event.args.get("Fwd thread id"):
                owned[number] = inside(event)
        return [event for number, event in backward if owned.get(number)]


def summary(trace: Trace, window: Event, spans: Sequence[str]) -> dict[str, Any]:
    """Return what the host and the device do in a window of the host's time, and because of it.

    Args:
        spans: names of ranges of `record_function`, which get numbers of their own, with their backward passes.

    Returns:
        Counts, milliseconds (`..._ms`), and for each span the same of its part. The device's span is from the start
        of its first event to the end of its last one; it is busy if at least one of its streams is.
    """
    calls = trace.calls_within(window)
    device = trace.caused_by(calls)
    merged = union((event.start, event.end) for event in device)
    span = merged[-1][1] - merged[0][0] if merged else 0.0
    busy = sum(end - start for start, end in merged)
    result = {
        **_part(trace, calls, window.end - window.start),
        "device_span_ms": span / 1e3,
        "device_busy_ms": busy / 1e3,
        "device_idle_fraction": 1 - busy / span if span else None,
        "kernels_by_time": top_kernels(device),
        "spans": {},
    }
    for name in spans:
        forward = trace.annotations(name, window)
        for label, parts in ((name, forward), (f"{name}, backward", trace.backward_of(forward, window))):
            if parts:
                inside = cover(parts)
                us = sum(end - start for start, end in union((one.start, one.end) for one in parts))
                result["spans"][label] = _part(trace, [event for event in calls if inside(event)], us)
    return result


def _part(trace: Trace, calls: Sequence[Event], us: float) -> dict[str, Any]:
    kernels = [event for event in trace.caused_by(calls) if event.category == "kernel"]
    waits = _outermost(event for event in calls if WAIT.fullmatch(event.name))
    blocked = sum(end - start for start, end in union((event.start, event.end) for event in waits))
    return {
        "host_ms": us / 1e3,
        "host_busy_ms": (us - blocked) / 1e3,
        "waits": len(waits),
        "launches": len(_outermost(event for event in calls if LAUNCH.fullmatch(event.name))),
        "kernels": len(kernels),
        "kernel_ms": sum(event.us for event in kernels) / 1e3,
    }


def top_kernels(device: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the kernels that take most time, all calls of a kernel together: name, count and milliseconds."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for event in device:
        if event.category == "kernel":
            by_name[event.name].append(event.us)
    rows = [{"name": name, "count": len(times), "ms": sum(times) / 1e3} for name, times in by_name.items()]
    return sorted(rows, key=lambda row: -row["ms"])[:TOP]


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as disjoint ones, ascending."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def cover(events: Iterable[Event]) -> Callable[[Event], bool]:
    """Return a function that tells whether an event starts within one of these events, on the same thread."""
    by_thread: defaultdict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        by_thread[event.thread].append((event.start, event.end))
    merged = {thread: union(parts) for thread, parts in by_thread.items()}

    def inside(event: Event) -> bool:
        parts = merged.get(event.thread, [])
        index = bisect_right(parts, (event.start, float("inf"))) - 1
        return index >= 0 and event.start < parts[index][1]

    return inside


def _outermost(events: Iterable[Event]) -> list[Event]:
    """Return events, in order of start, without those within another one, as a driver's call in a runtime's."""
    kept: list[Event] = []
    until: dict[Any, float] = {}
    for event in events:
        if event.end > until.get(event.thread, float("-inf")):
            until[event.thread] = event.end
            kept.append(event)
    return kept


def _event(raw: Mapping[str, Any]) -> Event:
    category = raw.get("cat", "").lower()
    name = VERSION.sub("", raw["name"]) if category in CALLS else raw["name"]
    end = raw["ts"] + raw.get("dur", 0)
    return Event(name, category, (raw["pid"], raw["tid"]), raw["ts"], end, raw.get("args", {}))
