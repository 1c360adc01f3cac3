"""observe/trace.py: the file has every added span, on its stream and at its time, and the picture shows it there."""

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import timeline_picture as draw
from megatron_balance.device import clock
from megatron_balance.observe import trace
from megatron_balance.observe.trace import STREAMS, Timeline, TraceEvent, TraceSpan, lanes_of
from timeline_picture import load_timeline

NOW = time.perf_counter()
times = st.floats(-5, 5) | st.integers(-20, 20).map(lambda step: step * 1.7e-5)
"""Seconds from `NOW`; times on a grid often end one span where another begins."""


@st.composite
def spans(draw: st.DrawFn) -> TraceSpan:
    start, end = sorted((draw(times), draw(times)))
    queued = draw(st.none() | st.floats(0, 1))
    num_bytes = draw(st.integers(0, 2**40))
    issued = None if queued is None else NOW + start - queued
    stream = draw(st.sampled_from(STREAMS))
    name = draw(st.text(max_size=20))
    return TraceSpan(draw(st.integers(0, 5)), stream, name, NOW + start, NOW + end, issued, num_bytes)


def written(directory: Path, *added: TraceSpan, rank: int = 3) -> Path:
    timeline = Timeline(directory, rank)
    for span in added:
        timeline.add(span)
    timeline.flush()
    return directory / f"rank{rank:05d}.json"


def events_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def in_nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    """Return start and length as Perfetto reads them: truncated, not rounded."""
    return int(event["ts"] * 1000), int(event["dur"] * 1000)


def span_at(iteration: int, start: float, seconds: float = 0.25, name: str = "L0 FEC m0", **others: Any) -> TraceSpan:
    return TraceSpan(iteration, others.pop("stream", "computation"), name, NOW + start, NOW + start + seconds, **others)


@settings(max_examples=50)
@given(st.lists(spans(), min_size=1, max_size=15))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, added: list[TraceSpan]) -> None:
    named = {f"{number} {span.name}": span for number, span in enumerate(added)}
    path = written(tmp_path_factory.mktemp("timeline"), *(replace(span, name=name) for name, span in named.items()))
    records = {record.name: record for record in load_timeline(path)}
    assert records.keys() == named.keys()
    # All times are relative to one moment, here a span's start
    base = records[min(records)].start_us - named[min(named)].start * 1e6
    for name, span in named.items():
        record = records[name]
        assert (record.rank, record.iteration, record.stream) == (3, span.iteration, span.stream)
        assert record.num_bytes == span.num_bytes
        expected = [None if mark is None else mark * 1e6 + base for mark in (span.start, span.end, span.issued)]
        assert [record.start_us, record.end_us, record.issued_us] == [
            time if time is None else pytest.approx(time, rel=0, abs=0.3) for time in expected
        ]


@settings(max_examples=50)
@given(st.lists(spans(), max_size=15))
def test_events_are_as_perfetto_wants_them(tmp_path_factory: pytest.TempPathFactory, added: list[TraceSpan]) -> None:
    path = written(tmp_path_factory.mktemp("timeline"), *added)
    events = events_of(path)
    assert {event["ph"] for event in events} <= {"M", "X"} and {event["pid"] for event in events} == {3}
    metadata = [event for event in events if event["ph"] == "M"]
    names = {event["tid"]: event["args"]["name"] for event in metadata if event["name"] == "thread_name"}
    threads: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault(event["tid"], []).append(event)
    assert names.keys() == threads.keys()
    for thread, own in threads.items():
        assert {event["cat"] for event in own} == {names[thread].split()[0]}
        nanoseconds = [in_nanoseconds(event) for event in own]
        assert all(start + length <= following for (start, length), (following, _) in pairwise(nanoseconds))
    (process,) = (event for event in metadata if event["name"] == "process_name")
    assert process["args"]["name"] == "rank 3"


def test_overlapping_spans_take_as_few_threads_as_possible() -> None:
    ends = {"a": (0, 4), "b": (1, 2), "c": (2, 5), "d": (4, 4), "e": (4, 6), "f": (5.5, 7)}
    records = [TraceEvent(0, 0, "communication", name, *ends[name], None, 0) for name in "fedcba"]
    assert [[record.name for record in lane] for lane in lanes_of(records)] == [["a", "d", "e"], ["b", "c", "f"]]


def test_what_an_event_says(tmp_path: Path) -> None:
    trans = span_at(7, 1.0, 0.5, "L3 TRANS.1/2", stream="communication", issued=NOW + 0.75, num_bytes=10**9)
    instant = span_at(7, 1.0, 0.0, "L3 AGG", stream="planning", num_bytes=8)
    events = {event["name"]: event for event in events_of(written(tmp_path, trans, instant, span_at(7, 1.0)))}
    event = events["L3 TRANS.1/2"]
    assert (event["cat"], event["dur"]) == ("communication", pytest.approx(5e5, abs=0.2))
    assert event["args"]["iteration"] == 7 and event["args"]["bytes"] == 10**9
    assert event["args"]["queued_us"] == event["ts"] - event["args"]["issued_us"] == pytest.approx(2.5e5, abs=0.2)
    assert event["args"]["GB/s"] == pytest.approx(2, rel=1e-5)
    assert events["L3 AGG"]["args"] == {"iteration": 7, "bytes": 8}
    assert events["L0 FEC m0"]["args"] == {"iteration": 7}


def test_times_are_wall_clock_times(tmp_path: Path) -> None:
    before = time.time()
    start = time.perf_counter()
    path = written(tmp_path, TraceSpan(0, "computation", "L0 FEC", start, time.perf_counter()))
    (record,) = load_timeline(path)
    base = json.loads(path.read_text(encoding="utf-8"))["baseTimeNanoseconds"] / 1e9
    # Another clock would be decades off; this process may have waited for the processor
    assert base + record.start_us / 1e6 == pytest.approx(before, abs=60)


def test_ranks_lie_on_one_axis_whenever_they_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [NOW]
    clocks = SimpleNamespace(time=lambda: 1.7e9 + now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(trace, "time", clocks)
    timelines = [Timeline(tmp_path, rank) for rank in range(2)]
    for timeline in timelines:
        timeline.add(span_at(0, timeline.rank * 0.5))
        timeline.flush()
        now[0] += 0.1
    first, second = (load_timeline(timeline.path)[0].start_us for timeline in timelines)
    assert second - first == pytest.approx(5e5, abs=2)
    merged = {"traceEvents": [event for timeline in timelines for event in events_of(timeline.path)]}
    (tmp_path / "merged.json").write_text(json.dumps(merged), encoding="utf-8")
    assert [record.rank for record in load_timeline(tmp_path / "merged.json")] == [0, 1]


class FakeEvent:
    """A device's mark; only its distance from another mark is known, with CUDA's precision."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


def fake_seconds(start: FakeEvent, end: FakeEvent) -> float:
    return float(np.float32((end.seconds - start.seconds) * 1000)) / 1000


def test_days_of_device_time_do_not_blur(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offset = 1e6
    monkeypatch.setattr(clock, "mark", lambda: FakeEvent(time.perf_counter() + offset))
    monkeypatch.setattr(clock, "seconds", fake_seconds)
    timeline = Timeline(tmp_path, 0)
    # A week later, with long iterations: a float32 of milliseconds would be off by tens of microseconds
    offset += 7 * 24 * 3600.0
    for iteration in range(2):
        start = time.perf_counter() + offset - 500
        marks = [FakeEvent(start + 1e-5 * step) for step in range(50)]
        # The iteration is near its anchor, and far from the flush
        with monkeypatch.context() as near:
            near.setattr(clock, "mark", lambda start=start: FakeEvent(start))
            for begin, end in pairwise(marks):
                timeline.add(TraceSpan(iteration, "computation", "L0 FEC", begin, end))  # pyright: ignore[reportArgumentType]
    timeline.add(TraceSpan(1, "planning", "PLAN", time.perf_counter() - 500, time.perf_counter()))
    timeline.flush()
    records = load_timeline(timeline.path)
    computed = [record for record in records if record.iteration == 1 and record.stream == "computation"]
    assert len(computed) == 49
    assert all(record.end_us - record.start_us == pytest.approx(10, abs=0.3) for record in computed)
    # Host and device agree
    (plan,) = (record for record in records if record.stream == "planning")
    assert plan.start_us == pytest.approx(computed[0].start_us, abs=1e6)


@settings(max_examples=50)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40))
def test_growth_is_bounded(tmp_path_factory: pytest.TempPathFactory, keep: int, steps: list[tuple[int, bool]]) -> None:
    timeline = Timeline(tmp_path_factory.mktemp("timeline"), 0, iterations=keep)
    for iteration, flush in steps:
        timeline.add(span_at(iteration, 0.0))
        assert len(timeline._pending) <= keep
        if flush:
            timeline.flush()
            assert len(timeline._finished) <= keep and not timeline._pending
    timeline.flush()
    latest = sorted({iteration for iteration, _ in steps})[-keep:]
    assert {record.iteration for record in load_timeline(timeline.path)} == set(latest)


EVENT = {"ph": "X", "pid": 0, "tid": 1, "cat": "waits", "name": "L0", "ts": 1, "dur": 1, "args": {"iteration": 0}}
STRANGE = {
    "no JSON": ("{", "is not JSON"),
    "no events": ("{}", "is not a timeline .*KeyError: 'traceEvents'"),
    "another's event": (json.dumps({"traceEvents": [EVENT | {"cat": "kernel"}]}), "no stream is called kernel"),
    "no number": (json.dumps({"traceEvents": [EVENT | {"ts": None}]}), "TypeError"),
}


@pytest.mark.parametrize(("text", "said"), STRANGE.values(), ids=STRANGE)
def test_files_that_are_no_timelines(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rank00000.json"
    with pytest.raises(ValueError, match=f"{path}: cannot be read"):
        load_timeline(path)
    path.write_text(json.dumps({"traceEvents": [EVENT]}), encoding="utf-8")
    assert load_timeline(path) == [TraceEvent(0, 0, "waits", "L0", 1.0, 2.0, None, 0)]
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"{path}: .*{said}"):
        load_timeline(path)


@pytest.mark.gpu
def test_spans_of_a_device(tmp_path: Path) -> None:
    start = clock.mark()
    host = time.perf_counter()
    torch.cuda._sleep(10**7)
    middle = clock.mark()
    torch.cuda._sleep(10**7)
    timeline = Timeline(tmp_path, 0)
    end = clock.mark()
    timeline.add(TraceSpan(0, "computation", "first", start, middle, issued=host))
    timeline.add(TraceSpan(0, "computation", "second", middle, end))
    timeline.flush()
    first, second = load_timeline(timeline.path)
    assert (first.name, second.name) == ("first", "second")
    assert first.end_us == second.start_us
    assert first.end_us - first.start_us == pytest.approx(clock.seconds(start, middle) * 1e6, abs=2)
    assert first.issued_us == pytest.approx(first.start_us, abs=1e4)


def made_up() -> list[TraceEvent]:
    """Return 100 ms of two ranks: forward and backward pass, transfer during an all-to-all, wait of rank 1 alone."""
    return [
        TraceEvent(0, 4, "computation", "L0 FEC m0", 0, 50_000, None, 0),
        TraceEvent(0, 4, "computation", "L0 BEC m0", 50_000, 100_000, None, 0),
        TraceEvent(0, 4, "communication", "L1 TRANS.1/2", 20_000, 60_000, None, 8),
        TraceEvent(0, 4, "communication", "L0 A2A m0", 40_000, 80_000, None, 8),
        TraceEvent(1, 4, "computation", "optimizer", 0, 20_000, None, 0),
        TraceEvent(1, 4, "waits", "L0 A2A m0", 20_000, 100_000, None, 0),
        TraceEvent(0, 5, "computation", "L0 FEC m0", 100_000, 900_000, None, 0),
    ]


def test_the_picture_shows_what_was_where() -> None:
    (axes,) = draw.picture(made_up(), 4).axes
    names = {color: name for name, color in draw.COLORS.items()}
    place_of = dict(zip([label.get_text() for label in axes.get_yticklabels()], axes.get_yticks(), strict=True))
    assert list(place_of) == [f"rank {rank}, {stream}" for rank in range(2) for stream in STREAMS[:3]]
    boxes = set()
    for patch in axes.collections:
        extent = patch.get_paths()[0].get_extents()
        name = names[matplotlib.colors.to_hex(patch.get_facecolor()[0])]
        boxes.add((float(extent.y0 + extent.y1) / 2, name, round(extent.x0), round(extent.x1)))
    first, second = place_of["rank 0, communication"], place_of["rank 0, communication"] + 1
    assert boxes == {
        (place_of["rank 0, computation"], "FEC", 0, 50),
        (place_of["rank 0, computation"], "BEC", 50, 100),
        (first, "TRANS", 20, 60),
        (second, "A2A", 40, 80),
        (place_of["rank 1, computation"], "other", 0, 20),
        (place_of["rank 1, waits"], "wait", 20, 100),
    }


def test_labels_lose_words_and_never_overflow() -> None:
    texts = [draw._fitting("L3 TRANS.1/2 m0", share) for share in (0.0, 0.02, 0.08, 0.2)]
    assert texts == ["", "L3", "L3 TRANS.1/2", "L3 TRANS.1/2 m0"]


def test_the_tool(tmp_path: Path) -> None:
    files = [str(written(tmp_path, span_at(4, 0.0), rank=rank)) for rank in range(2)]
    output = tmp_path / "picture.png"
    draw.main([*files, "--iteration", "4", "--output", str(output)])
    with Image.open(output) as image:
        assert image.width == 100 * draw.WIDTH
    with pytest.raises(SystemExit, match=r"--iteration 5: is not in the files; choose one of 4"):
        draw.main([*files, "--iteration", "5", "--output", str(output)])
    with pytest.raises(SystemExit, match=r"--output .*none/picture.png: No such file"):
        draw.main([*files, "--iteration", "4", "--output", str(tmp_path / "none" / "picture.png")])


def test_every_operation_has_its_color() -> None:
    names = [name for name in draw.COLORS if name not in ("wait", "other")]
    for name in names:
        for text in (f"L3 {name}.1/2", f"{name}", f"j+1:L3 {name} m0"):
            assert draw.operation(TraceEvent(0, 0, "communication", text, 0, 1, None, 0)) == name
