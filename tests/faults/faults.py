"""The faults that may happen to a rank, and their moments."""

import contextlib
import ctypes
import functools
import importlib
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_balance.app import facts
from megatron_balance.job import agreement
from megatron_balance.job.hang_guard import HangGuard
from megatron_balance.timeline.planner import Planner
from tests.distributed.runs import BASE
from tests.faults.cells import Cell, End

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

DAY = 86_400
LARGE = "something large"
"""Name of the file that fills a disk."""

MOMENTS = {
    "parsing": "megatron_balance.app.launch:parse_args",
    "joining": "megatron_balance.job.job:start",
    "building": "megatron_balance.app.launch:build_run",
    "measuring": "megatron_balance.measure.stopwatch:Stopwatch._seconds",
    "loading": "megatron_balance.checkpoint.checkpoints:Checkpoints.load",
    "forward": "megatron_balance.training.loop:forward_step",
    "optimizer": "megatron_balance.timeline.runtime:Balancer.finish_iteration",
    "Trans": "megatron_balance.comm.trans_agg:TransAgg.trans",
    "Agg": "megatron_balance.comm.trans_agg:TransAgg.agg",
    "Transfer": "megatron_balance.comm.ownership_transfer:ExpertMover._exchange",
    "logging": "megatron_balance.training.logging:RunLog.step",
    "evaluation": "megatron_balance.training.loop:evaluate",
    "saving": "megatron_balance.checkpoint.checkpoints:Checkpoints._start",
    "writing": "megatron_balance.checkpoint.writer:_write",
    "committing": "megatron_balance.checkpoint.directory:CheckpointDirectory.commit",
    "the end": "megatron_balance.app.launch:_finish_together",
}
"""Moment -> the function at whose call the fault happens, as module:name."""


@dataclass(frozen=True)
class Inject:
    """Prepares the ranks of a job: one of them, or every one, has the cell's fault at its moment."""

    cell: Cell
    disk: Path
    """A separate file system that the job writes to."""

    noted: Path
    """Directory with a file per rank: when the fault happened, in seconds of the monotonic clock."""

    temporary: Path
    """Directory for the ranks' temporary files."""

    def __call__(self, rank: int) -> None:
        tempfile.tempdir = os.environ["TMPDIR"] = str(self.temporary)
        # No rank waits for long once the fault has happened; until then, it may start slowly
        HangGuard._limit = property(  # pyright: ignore
            lambda guard: 12.0 if any(self.noted.iterdir()) else 600.0, lambda guard, given: None
        )
        if self.cell.end is not End.REFUSED:
            agreement.DECLINE_SECONDS = 10.0
            agreement.FAREWELL_SECONDS = 3.0
        if self.cell.rank not in (None, rank):
            return
        module, _, path = MOMENTS[self.cell.moment].partition(":")
        holder: object = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            holder = getattr(holder, part)
        original = getattr(holder, name)
        calls = 0

        @functools.wraps(original)
        def disturbed(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == self.cell.call:
                if self.cell.delay:
                    threading.Timer(self.cell.delay, self._happen, (rank, args)).start()
                else:
                    self._happen(rank, args)
            return original(*args, **kwargs)

        setattr(holder, name, disturbed)

    def _happen(self, rank: int, args: tuple) -> None:
        (self.noted / str(rank)).write_text(str(time.monotonic()))
        fault = self.cell.fault
        if fault.startswith("has --"):
            args[0].extend(shlex.split(fault.removeprefix("has ")))
        else:
            FAULTS[fault](self)


def _signal(number: signal.Signals) -> Callable[[Inject], None]:
    def happen(inject: Inject) -> None:
        os.kill(os.getpid(), number)
        time.sleep(1)

    return happen


def _raise(error: BaseException) -> Callable[[Inject], None]:
    def happen(inject: Inject) -> None:
        raise error

    return happen


def _loop(inject: Inject) -> None:
    while True:
        pass


def _crash(inject: Inject) -> None:
    ctypes.string_at(0)


def _shift_clock(seconds: float) -> Callable[[Inject], None]:
    def happen(inject: Inject) -> None:
        now = time.time
        now_ns = time.time_ns
        time.time = lambda: now() + seconds
        time.time_ns = lambda: now_ns() + int(seconds * 1e9)

    return happen


def _expect_plans_soon(inject: Inject) -> None:
    deadline = Planner.deadline

    def soon(planner: Planner) -> float:
        planner.patience = 6.0
        return deadline(planner)

    Planner.deadline = soon


def _fill(inject: Inject) -> None:
    with contextlib.suppress(OSError), (inject.disk / LARGE).open("wb", buffering=0) as file:
        while True:
            file.write(b"\1" * 4096)


def _remount(inject: Inject) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(inject.disk)], check=True)


def repair(fault: str, disk: Path) -> None:
    """Make a disk usable again."""
    if fault == "finds its disk read-only":
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    (disk / LARGE).unlink(missing_ok=True)


def _no_descriptors(inject: Inject) -> None:
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))


def _few_descriptors(inject: Inject) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))


def _other_content(ending: str) -> Callable[[Inject], None]:
    """Make the rank see different content in one file, as if its node had another copy."""

    def happen(inject: Inject) -> None:
        content_digest = facts.content_digest
        facts.content_digest = lambda path: "other" if str(path).endswith(ending) else content_digest(path)

    return happen


def _lose_directory(inject: Inject) -> None:
    shutil.rmtree(inject.disk / "save")


def _meet_another_run(inject: Inject) -> None:
    """Start another run that saves to the same directory, without a launcher, as a child of the rank."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    command = [sys.executable, "pretrain_gpt_moe.py", *BASE.split(), "--save", inject.disk / "save"]
    other = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(f"another run ended with status {other.returncode}: {other.stderr}", flush=True)


FAULTS: dict[str, Callable[[Inject], None]] = {
    "is killed": _signal(signal.SIGKILL),
    "is terminated": _signal(signal.SIGTERM),
    "is interrupted": _signal(signal.SIGINT),
    "stops": _signal(signal.SIGSTOP),
    "crashes": _crash,
    "loops": _loop,
    "raises": _raise(RuntimeError("a fault")),
    "runs out of memory": _raise(MemoryError()),
    "leaves with status 0": lambda inject: sys.exit(0),
    "leaves at once with status 0": lambda inject: os._exit(0),
    "finds its clock a day ahead": _shift_clock(DAY),
    "finds its clock a day back": _shift_clock(-DAY),
    "finds its disk full": _fill,
    "finds its disk read-only": _remount,
    "has no file descriptors left": _no_descriptors,
    "has another policy": lambda inject: None,
    "has a policy that does not answer": _expect_plans_soon,
    "runs another program": _other_content("flow/layer.py"),
    "reads another profile": _other_content("slow_messages.json"),
    "may open 40 files": _few_descriptors,
    "loses its directory": _lose_directory,
    "meets another run": _meet_another_run,
}
"""Faults by name; in addition, `has --FLAG VALUE` adds a flag on that rank alone, at parsing."""
