"""An optional file that cannot be written causes one warning; training continues, and writing resumes later."""

import contextlib
import json
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_balance.files.writing import whole_file
from megatron_balance.observe import optional
from megatron_balance.observe.load_log import LoadLog, read_loads
from megatron_balance.observe.optional import AppendedFile, Attempts
from megatron_balance.observe.routing import RoutingTrace
from megatron_balance.observe.scalars import Scalars
from megatron_balance.observe.trace import Timeline, TraceSpan
from megatron_balance.placement.placement import Placement
from megatron_balance.workloads.forced_routing import BatchPart
from timeline_picture import load_timeline

ROOM = 2048
"""Maximum size of a file on the full disk, in bytes."""


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Limit files to ROOM bytes: the system writes the part that fits and refuses the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "RETRY_SECONDS", 0.0)


class LoadLogs:
    flag = "--balance-log-dir"

    def __init__(self, directory: Path) -> None:
        self.log = LoadLog(directory, 0)
        self.directory = directory
        self.generator = np.random.default_rng(0)

    def step(self, iteration: int) -> None:
        counts_DE = self.generator.integers(0, 2**40, (4, 64))
        self.log.add(iteration, {1: (counts_DE, Placement.identity(64, 4))})
        self.log.flush(last=iteration == LAST)

    def iterations(self) -> list[int]:
        return read_loads(self.directory)[0].iterations.tolist()


class Timelines:
    flag = "--balance-timeline"

    def __init__(self, directory: Path) -> None:
        self.timeline = Timeline(directory, 0)

    def step(self, iteration: int) -> None:
        for number in range(100):
            self.timeline.add(TraceSpan(iteration, "computation", f"span {number}", float(number), number + 0.5))
        self.timeline.flush(last=iteration == LAST)

    def iterations(self) -> list[int]:
        return sorted({record.iteration for record in load_timeline(self.timeline.path)})


ALONE = BatchPart(seq_length=100, data_rank=0, data_ranks=1)


class Traces:
    flag = "--moe-routing-trace-path"

    def __init__(self, directory: Path) -> None:
        self.now = 0
        self.path = directory / "router_trace_rank0.jsonl"
        self.trace = RoutingTrace([], directory, 0, ALONE, step=lambda: self.now)

    def step(self, iteration: int) -> None:
        choices = torch.arange(200).view(100, 2)
        self.trace._calls.append((torch.tensor(True), {"step": iteration, "top_indices": choices}))
        self.trace.flush(last=iteration == LAST)

    def iterations(self) -> list[int]:
        return [json.loads(line)["step"] for line in self.path.read_text().splitlines()]


class Events:
    flag = "--tensorboard-dir"

    def __init__(self, directory: Path) -> None:
        self.scalars = Scalars(directory, queue_size=50)
        self.directory = directory

    def step(self, iteration: int) -> None:
        for number in range(50):
            self.scalars.add_scalar(f"a number {number}", iteration, iteration)
        if iteration == LAST:
            self.scalars.close()

    def iterations(self) -> list[int]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.directory)).Reload()
        found = {name: [event.step for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
        assert len(found) == 50 and all(steps == found["a number 0"] for steps in found.values())
        return found["a number 0"]


LAST = 6
KINDS = [LoadLogs, Timelines, Traces, Events]
Kind = Callable[[Path], LoadLogs | Timelines | Traces | Events]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_costs_a_warning(kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = kind(tmp_path)
    writer.step(1)
    before = sorted(tmp_path.iterdir())
    with full_disk():
        for iteration in (2, 3, 4):
            writer.step(iteration)
            # There is no incomplete file, under this or any other name
            assert sorted(tmp_path.iterdir()) == before
            assert writer.iterations() == [1]
    for iteration in (5, LAST):
        writer.step(iteration)
    assert writer.iterations() == [1, 2, 3, 4, 5, 6], "what was kept is written"
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith(f"{writer.flag} {tmp_path}: ") and first.endswith(
        "; training continues, and writing will be retried"
    )
    assert "File too large" in first
    assert second == f"{writer.flag} {tmp_path}: writing works again"


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_is_removed_is_made_again(kind: Kind, tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    writer = kind(directory)
    writer.step(1)
    shutil.rmtree(tmp_path / "a")
    for iteration in (2, LAST):
        writer.step(iteration)
    assert set(writer.iterations()) >= {2, LAST}


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_start_it_is_a_users_mistake(kind: type[LoadLogs], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"^{kind.flag} {tmp_path}/file: .*; choose a writable directory"):
        kind(tmp_path / "file")


def test_attempts_are_rare_while_they_fail_and_the_last_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(optional, "RETRY_SECONDS", 30.0)
    monkeypatch.setattr(optional.time, "monotonic", lambda: now[0])
    attempts = Attempts("--flag value")
    made = []

    def fail() -> None:
        made.append(now[0])
        raise OSError("no")

    for now[0] in range(100):
        assert not attempts.run(fail)
    assert made == [0, 30, 60, 90]
    assert not attempts.run(fail, last=True) and made[-1] == 99
    assert attempts.run(lambda: None, last=True) and not attempts.failing


def test_memory_is_bounded_while_writing_fails(monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setattr(optional, "MOST_BYTES", 1000)
    file = AppendedFile(tmp_path / "file", "--flag value")
    with monkeypatch.context() as patched:
        patched.setattr(file, "write", lambda: (_ for _ in ()).throw(OSError("no")))
        for number in range(100):
            file.add(b"%099d\n" % number)
            file.flush()
        assert len(file) == 10
    file.flush()
    assert [int(line) for line in file.path.read_text().splitlines()] == list(range(90, 100))
    assert caplog.records[-1].getMessage() == "--flag value: writing works again"


def test_the_load_log_keeps_the_latest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("megatron_balance.observe.load_log.MOST_BYTES", 5 * 4 * 64 * 8)
    writer = LoadLogs(tmp_path)
    with full_disk():
        for iteration in range(10, 30):
            writer.step(iteration)
    writer.step(30)
    assert writer.iterations() == [25, 26, 27, 28, 29, 30]


def test_a_whole_file_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    for text in ("one", "two"):
        with whole_file(path) as unfinished:
            unfinished.write_text(text)
        assert path.read_text() == text and list(path.parent.iterdir()) == [path]


def test_half_a_record_is_cut_off(tmp_path: Path) -> None:
    """A killed process may have left it; new records are appended to the complete ones."""
    file = AppendedFile(tmp_path / "file", "--flag value")
    file.add(b"one\n")
    file.flush()
    with file.path.open("ab") as other:
        other.write(b"ha")
    file.add(b"two\n")
    file.flush()
    assert file.path.read_text() == "one\ntwo\n"
