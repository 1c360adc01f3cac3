"""Reads a trace of torch.profiler (`export_chrome_trace`): where the host waits, and what the device does.

Pure functions on the trace's JSON; nothing here needs torch or a GPU. Times are microseconds. The events of interest:

    python_function, user_annotation, cpu_op    what the host does, nested within one thread
    cuda_runtime, cuda_driver                   calls of CUDA by the host; `correlation` connects them to their effect
    kernel, gpu_memcpy, gpu_memset              what the device does

Profilers differ: a missing field of an event counts as zero, and an unknown event is ignored.
"""

import re
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Any, NamedTuple

CALLS = {"cuda_runtime", "cuda_driver"}
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}

WAIT = re.compile(
    r"cuda(Event|Stream|Device|Thread)Synchronize|cu(Event|Stream|Ctx)Synchronize|"
    r"cudaMemcpy(2D|3D|(To|From)(Symbol|Array)|2D(To|From)Array)?|cuMemcpy(2D|3D)?(HtoD|DtoH|DtoD)?"
)
"""Calls during which the host waits. Reading a value (`aten::item`) is an asynchronous copy and one of these."""

LAUNCH = re.compile(r"(cuda|cu)Launch(Cooperative)?Kernel\w*")
GRAPH = re.compile(r"(cuda|cu)GraphLaunch")
ALLOCATION = re.compile(
    r"(cuda|cu)(Malloc|Free|HostAlloc|HostRegister|HostUnregister|Mem(Alloc|Free|Create|Map|Unmap))\w*"
)
"""Calls that may wait for the whole device; torch's allocators make none once they have seen all sizes."""

VERSION = re.compile(r"(_v\d+|_ptsz|_ptds)+$")
FRAME = re.compile(r"(?P<path>.*\.py)\(\d+\): (?P<name>.*)")

OURS = {"megatron_balance"}
PACKAGES = OURS | {"megatron"}
BACKWARD = "autograd::engine::evaluate_function"
TOP = 15
GAPS = 5


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


class Interval(NamedTuple):
    """A part of a thread's time."""

    thread: tuple[Any, Any]
    start: float
    end: float


class Trace:
    """The events of a trace by category, in the order of their starts."""

    def __init__(self, trace: Mapping[str, Any]) -> None:
        """
        Args:
            trace: the JSON that `export_chrome_trace` writes.
        """
        self.by_category: defaultdict[str, list[Event]] = defaultdict(list)
        for event in filter(None, map(_event, trace.get("traceEvents") or [])):
            self.by_category[event.category].append(event)
        for events in self.by_category.values():
            events.sort(key=lambda event: (event.start, -event.end))
        self.calls = sorted(self._of(CALLS), key=lambda event: event.start)
        self.device = sorted(self._of(DEVICE), key=lambda event: event.start)

    def _of(self, categories: Iterable[str]) -> Iterator[Event]:
        for category in categories:
            yield from self.by_category[category]

    def annotations(self, name: str, within: Interval | None = None) -> list[Event]:
        """Return the ranges of `record_function(name)`, of any thread, that start in an interval."""
        found = [event for event in self.by_category["user_annotation"] if event.name == name]
        return [event for event in found if within is None or within.start <= event.start < within.end]

    def calls_within(self, window: Interval) -> list[Event]:
        """Return the calls of CUDA that start in a window of time, on any thread."""
        return [event for event in self.calls if window.start <= event.start < window.end]

    def caused_by(self, calls: Iterable[Event]) -> list[Event]:
        """Return what calls of CUDA made the device do, by the correlation of both."""
        numbers = {event.args.get("correlation") for event in calls} - {None}
        return [event for event in self.device if event.args.get("correlation") in numbers]

    def backward_of(self, forward: Sequence[Interval], within: Interval) -> list[Interval]:
        """Return where autograd runs the backward functions of operators that ran in intervals of the forward pass.

        An operator and its backward function have the same sequence number, and only backward functions name the
        thread of the forward pass. The number of an operator without a backward function is that of the next one, so
        the last operator of a number counts.
        """
        inside = cover(forward)
        owned: dict[Any, bool] = {}
        backward: list[tuple[Any, Event]] = []
        for event in self.by_category["cpu_op"]:
            number = event.args.get("Sequence number")
            if number is None or not within.start <= event.start < within.end:
                continue
            if event.name.startswith(BACKWARD):
                backward.append((number, event))
            elif not event.args.get("Fwd thread id"):
                owned[number] = inside(event)
        return [Interval(event.thread, event.start, event.end) for number, event in backward if owned.get(number)]

    def enclosing(self, events: Sequence[Event], category: str) -> list[list[Event]]:
        """Return for each event the events of a category in which it starts, on its thread, outermost first."""
        queries: defaultdict[Any, list[int]] = defaultdict(list)
        for index in sorted(range(len(events)), key=lambda index: events[index].start):
            queries[events[index].thread].append(index)
        others: defaultdict[Any, list[Event]] = defaultdict(list)
        for other in self.by_category[category]:
            others[other.thread].append(other)
        found: list[list[Event]] = [[] for _ in events]
        for thread, indices in queries.items():
            begun: list[Event] = []
            coming = iter(others[thread])
            following = next(coming, None)
            for index in indices:
                event = events[index]
                while following is not None and following.start <= event.start:
                    while begun and begun[-1].end <= following.start:
                        begun.pop()
                    begun.append(following)
                    following = next(coming, None)
                found[index] = [one for one in begun if event.start < one.end]
        return found

    def places(self, events: Sequence[Event]) -> list[str]:
        """Return the function that each event is in: `moe_utils.permute < loop.forward_step`.

        The first is the innermost function of megatron-core or ours, the second the innermost one of ours. In a trace
        without stacks, and in autograd's thread, they are the innermost and the outermost operator of torch.
        """
        functions = self.enclosing(events, "python_function")
        operators = self.enclosing(events, "cpu_op")
        return [_place(*around) for around in zip(functions, operators, strict=True)]

    def files(self, events: Sequence[Event]) -> list[str]:
        """Return the file of ours whose function each event is in, without `.py`; "?" if there is none."""
        return [
            _innermost(functions, OURS).partition(".")[0] or "?"
            for functions in self.enclosing(events, "python_function")
        ]


def waits(trace: Trace, window: Interval) -> list[Event]:
    """Return the calls in a window of time in which the host waits for the device; none within another one."""
    return _outermost(event for event in trace.calls_within(window) if WAIT.fullmatch(event.name))


def wait_places(trace: Trace, window: Interval) -> Counter[str]:
    """Count the waits of a window by call and function, e.g. `cudaEventSynchronize: host_memory.wait`."""
    events = waits(trace, window)
    return Counter(f"{event.name}: {place}" for event, place in zip(events, trace.places(events), strict=True))


def by_file(trace: Trace, window: Interval) -> dict[str, dict[str, float]]:
    """Return launches, kernels, their milliseconds, and bytes between host and device by file of ours.

    The files are those of the tables in tests/golden/work, whose "kernels" are operators of torch.
    """
    calls = trace.calls_within(window)
    files = dict(zip(map(id, calls), trace.files(calls), strict=True))
    caller = {call.args.get("correlation"): files[id(call)] for call in calls}
    table: defaultdict[str, dict[str, float]] = defaultdict(
        lambda: {"launches": 0, "kernels": 0, "kernel_ms": 0.0, "host_bytes": 0}
    )
    for call in _outermost(call for call in calls if LAUNCH.fullmatch(call.name)):
        table[files[id(call)]]["launches"] += 1
    for event in trace.caused_by(calls):
        row = table[caller[event.args.get("correlation")]]
        if event.category == "kernel":
            row["kernels"] += 1
            row["kernel_ms"] += event.us / 1e3
        elif _kind(event) in ("HtoD", "DtoH"):
            row["host_bytes"] += _number(event.args.get("bytes"))
    return dict(sorted(table.items()))


def summary(trace: Trace, window: Interval, spans: Sequence[str]) -> dict[str, Any]:
    """Return what the host and the device do in a window of the host's time, and because of it.

    Args:
        spans: names of ranges of `record_function`, which get numbers of their own, with their backward passes.

    Returns:
        Counts, milliseconds (`..._ms`), bytes, and for each span the same of its part. The device's span is from the
        start of its first event to the end of its last one; it is busy if at least one of its streams is.
    """
    calls = trace.calls_within(window)
    device = trace.caused_by(calls)
    waiting = waits(trace, window)
    blocked = sum(end - start for start, end in union((event.start, event.end) for event in waiting))
    result = {
        "host_ms": (window.end - window.start) / 1e3,
        "host_waiting_ms": blocked / 1e3,
        "host_busy_ms": (window.end - window.start - blocked) / 1e3,
        "waits": len(waiting),
        "waits_by_call": dict(Counter(event.name for event in waiting)),
        "allocations": len(_outermost(event for event in calls if ALLOCATION.fullmatch(event.name))),
        "launches": len(_outermost(event for event in calls if LAUNCH.fullmatch(event.name))),
        "graph_launches": len(_outermost(event for event in calls if GRAPH.fullmatch(event.name))),
        "calls": dict(Counter(event.name for event in calls).most_common()),
        "operators": sum(window.start <= event.start < window.end for event in trace.by_category["cpu_op"]),
        **device_work(device),
        "kernels_by_time": top_kernels(device),
        "spans": {},
    }
    for name in spans:
        forward = [Interval(one.thread, one.start, one.end) for one in trace.annotations(name, window)]
        for label, parts in ((name, forward), (f"{name}, backward", trace.backward_of(forward, window))):
            if parts:
                result["spans"][label] = _part(trace, calls, parts)
    return result


def _part(trace: Trace, calls: Sequence[Event], intervals: Sequence[Interval]) -> dict[str, Any]:
    inside = cover(intervals)
    own = [event for event in calls if inside(event)]
    kernels = [event for event in trace.caused_by(own) if event.category == "kernel"]
    waiting = _outermost(event for event in own if WAIT.fullmatch(event.name))
    whole = sum(end - start for start, end in union((one.start, one.end) for one in intervals))
    return {
        "host_ms": whole / 1e3,
        "host_busy_ms": (whole - sum(event.us for event in waiting)) / 1e3,
        "waits": len(waiting),
        "launches": len(_outermost(event for event in own if LAUNCH.fullmatch(event.name))),
        "kernels": len(kernels),
        "kernel_ms": sum(event.us for event in kernels) / 1e3,
    }


def device_work(device: Sequence[Event]) -> dict[str, Any]:
    """Return the number and time of kernels, the number, bytes and time of copies, idle time, and the longest gaps."""
    kernels = [event for event in device if event.category == "kernel"]
    copies: dict[str, dict[str, float]] = {}
    for event in device:
        if event.category != "kernel":
            one = copies.setdefault(_kind(event), {"count": 0, "bytes": 0, "ms": 0.0})
            one["count"] += 1
            one["bytes"] += _number(event.args.get("bytes"))
            one["ms"] += event.us / 1e3
    merged = union((event.start, event.end) for event in device)
    span = merged[-1][1] - merged[0][0] if merged else 0.0
    busy = sum(end - start for start, end in merged)
    return {
        "kernels": len(kernels),
        "kernel_ms": sum(event.us for event in kernels) / 1e3,
        "copies": copies,
        "streams": len({event.thread for event in device}),
        "device_span_ms": span / 1e3,
        "device_busy_ms": busy / 1e3,
        "device_idle_fraction": 1 - busy / span if span else None,
        "gaps": _gaps(device, merged),
    }


def top_kernels(device: Iterable[Event], number: int = TOP) -> list[dict[str, Any]]:
    """Return the kernels that take most time, all calls of a kernel together: name, count and milliseconds."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for event in device:
        if event.category == "kernel":
            by_name[event.name].append(event.us)
    order = sorted(by_name, key=lambda name: -sum(by_name[name]))
    return [{"name": name, "count": len(by_name[name]), "ms": sum(by_name[name]) / 1e3} for name in order[:number]]


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals as disjoint ones, ascending."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def middle(summaries: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """Return the summary whose value of `key` is the median (the lower one of an even number)."""
    wanted = statistics.median_low([one[key] for one in summaries])
    return next(one for one in summaries if one[key] == wanted)


def cover(intervals: Iterable[Interval]) -> Callable[[Event], bool]:
    """Return a function that tells whether an event starts in one of the intervals of its thread."""
    by_thread: defaultdict[Any, list[tuple[float, float]]] = defaultdict(list)
    for thread, start, end in intervals:
        by_thread[thread].append((start, end))
    merged = {thread: union(parts) for thread, parts in by_thread.items()}

    def inside(event: Event) -> bool:
        parts = merged.get(event.thread, [])
        index = bisect_right(parts, (event.start, float("inf"))) - 1
        return index >= 0 and event.start < parts[index][1]

    return inside


def _gaps(device: Sequence[Event], merged: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """Return the longest times in which the device had nothing to do, with what it did before and after."""
    ends = {event.end: event.name for event in device}
    starts = {event.start: event.name for event in reversed(device)}
    gaps = [
        {"us": after[0] - before[1], "after": ends[before[1]], "before": starts[after[0]]}
        for before, after in pairwise(merged)
    ]
    return sorted(gaps, key=lambda gap: -gap["us"])[:GAPS]


def _outermost(events: Iterable[Event]) -> list[Event]:
    """Return events without those that run within another one on the same thread, as a driver's call in a runtime's."""
    kept: list[Event] = []
    until: dict[Any, float] = {}
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        if event.end <= until.get(event.thread, float("-inf")):
            continue
        until[event.thread] = event.end
        kept.append(event)
    return kept


def _event(raw: Any) -> Event | None:
    if not isinstance(raw, Mapping) or raw.get("ph") != "X":
        return None
    start = _number(raw.get("ts"))
    args = raw.get("args")
    category = str(raw.get("cat", "")).lower()
    name = str(raw.get("name", ""))
    return Event(
        name=VERSION.sub("", name) if category in CALLS else name,
        category=category,
        thread=(raw.get("pid"), raw.get("tid")),
        start=start,
        end=start + _number(raw.get("dur")),
        args=args if isinstance(args, Mapping) else {},
    )


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0


def _place(functions: Sequence[Event], operators: Sequence[Event]) -> str:
    """Return what `places` does, of an event within these."""
    found = filter(None, (_innermost(functions, PACKAGES), _innermost(functions, OURS)))
    names = [one.name for one in operators]
    return " < ".join(dict.fromkeys(found)) or " < ".join(dict.fromkeys([*names[-1:], *names[:1]])) or "elsewhere"


def _innermost(functions: Sequence[Event], packages: set[str]) -> str:
    """Return `module.function` of the last function whose file is in a folder of one of these names; or nothing."""
    for event in reversed(functions):
        found = FRAME.fullmatch(event.name)
        path = PurePath(found["path"]) if found else PurePath()
        if found and packages & set(path.parts[:-1]):
            return f"{path.stem}.{found['name']}"
    return ""


def _kind(event: Event) -> str:
    """Return HtoD, DtoH, DtoD or the like, or memset."""
    if event.category == "gpu_memset":
        return "memset"
    found = re.match(r"Memcpy (\w+)", event.name)
    return found[1] if found else event.name
