"""End the whole job when one rank stalls or dies; every other rank names that rank.

Each rank runs two threads, so that no blocked call delays the exit after a stall:

- The watchdog inspects the main thread, or the autograd thread that works for it. It raises the alarm when that thread
  has waited for longer than the limit, or has completed no step for IDLE_LIMITS limits.
- The reporter writes a heartbeat to the job's key-value store once a period, and looks for an alarm. After an alarm,
  every rank writes a report. The rank that raised the alarm first draws the verdict, and all ranks print it.

If the store is lost together with the rank that holds it, the watchdog ends this rank without the reporter. Silence
alone raises no alarm: a rank may hold the interpreter's lock for minutes, for example while it indexes a dataset.
"""

import contextlib
import dataclasses
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_balance.job import collective_order, limits
from megatron_balance.job.collectives import Collectives
from megatron_balance.job.endings import INTERRUPTED, Ending, raised_in
from megatron_balance.job.stacks import (
    code_place,
    deciding_frame,
    error_place,
    is_communication_error,
    stack_of,
    waits_in,
)
from megatron_balance.job.stall import STEPPING, Activity, Position, Report, verdict

MAX_PERIOD = 0.5
"""Seconds between two heartbeats; a tenth of the limit if that is shorter."""

REPORT_SECONDS = 3.5
"""Time for the reports after an alarm: several periods, even on machines with more ranks than cores."""

PRINTING_SECONDS = 1.0
"""Time for all ranks to print before the first rank exits and the launcher ends the others."""

EXIT_SECONDS = 9
"""Time between an alarm and a rank's exit if a thread blocks."""

IDLE_LIMITS = 10
"""Time without a step, in limits, after which a rank that computes counts as stalled. No microbatch takes that long."""

EXIT_STATUS = 1


class HangGuard:
    """Guards the `with` block: an exception in it, another rank's end or a stall ends this process with EXIT_STATUS.

    Exceptions do not leave the block, because the cleanup after it would shut down a backend whose peers are gone.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        limit: float,
        store_rank: int | None,
        collectives: Collectives,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Prepare the guard; it starts with the `with` block.

        Args:
            store: the job's key-value store; the guard opens its own connection.
            limit: seconds that a rank may wait in one place before the job counts as stalled.
            store_rank: the rank whose process holds the store; None if the launcher holds it.
            collectives: the recorder of this rank's operations.
            now: returns the Unix time in seconds, by a clock that all ranks share.
        """
        self._store = dist.PrefixStore("hang_guard", store.clone())  # pyright: ignore[reportAttributeAccessIssue]
        self._rank = rank
        self._world_size = world_size
        self._limit = limit
        self._store_rank = store_rank
        self._collectives = collectives
        self._now = now
        self._period = min(MAX_PERIOD, limit / 10)
        self._position = Position()
        # Times of the main thread's last step and of the store's last answer
        self._progress = self._answered = time.monotonic()
        self._idle = 0.0
        self._first_iteration = 0
        self._failure: BaseException | None = None
        self._report: Report | None = None
        self._ended = False
        self._wake = threading.Event()
        self._concluded = threading.Event()
        self._printing = threading.Lock()
        self._printed = False
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._watchdog, self._reporter)]
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def follow(self, position: Position) -> None:
        """Read this rank's progress from `position`."""
        self._position = position

    def __enter__(self) -> "HangGuard":
        # NCCL's watchdog may abort the process; its stacks are then at least printed
        faulthandler.enable()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._end()
        elif isinstance(error, Ending):
            self._leave(error)
        else:
            self._fail(error)

    def _end(self) -> None:
        self._ended = True
        self._wake.set()
        for thread in self._threads:
            thread.join(MAX_PERIOD)

    def _leave(self, error: Ending) -> NoReturn:
        """End the process for a reason that is the same on every rank. Only rank 0 prints it."""
        self._end()
        _print(f"{error.code}\n" if self._rank == 0 else "")
        os._exit(EXIT_STATUS)

    def _fail(self, error: BaseException) -> NoReturn:
        # A second Ctrl-C must not cut the verdict short
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._failure = error
        with self._printing:
            # After the verdict, an exception only shows that another rank has exited
            if not self._printed and not isinstance(error, limits.OutOfResources | KeyboardInterrupt):
                traceback.print_exception(error)
        self._wake.set()
        # The threads end the process during this sleep
        time.sleep(EXIT_SECONDS)
        self._exit()

    def _exit(self) -> NoReturn:
        os._exit(INTERRUPTED if isinstance(self._failure, KeyboardInterrupt) else EXIT_STATUS)

    # Watchdog

    def _watchdog(self) -> None:
        last = None
        since = before = time.monotonic()
        while not self._wake.wait(self._period):
            now = time.monotonic()
            steps = self._position.steps
            # The next layer's wait has the same stack, but the number of operations differs
            here = steps, self._collectives.entered, stack_of(_frame())
            stepped = last is None or steps != last[0]
            self._count_idle(stepped, now - before)
            before = now
            if stepped:
                self._progress = now
            if here != last:
                last = here
                since = now
            waits = now - since > self._limit and self._activity()[0] == "waited in"
            if waits or self._idle > IDLE_LIMITS * self._limit:
                self._wake.set()
        if self._ended:
            return
        faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)
        if time.monotonic() - self._answered < REPORT_SECONDS:
            self._concluded.wait(REPORT_SECONDS + 3 * PRINTING_SECONDS)
        self._print_verdict(self._store_verdict())
        self._exit()

    def _count_idle(self, stepped: bool, seconds: float) -> None:
        """Add to this rank's idle time. The first iteration does not count, because it compiles kernels.

        `seconds` is the time since the last call. It is capped, because it includes suspensions of the job.
        """
        position = self._position
        within = position.phase in STEPPING
        if within and not self._first_iteration:
            self._first_iteration = position.iteration
        if stepped or not within:
            self._idle = 0.0
        elif position.iteration > self._first_iteration:
            self._idle += min(seconds, self._limit / 2)

    def _store_verdict(self) -> str:
        silence = f"does not answer for {time.monotonic() - self._answered:.0f} s"
        if self._store_rank is None:
            return f"the launcher's key-value store {silence}"
        return f"rank {self._store_rank} stalled or died: the key-value store, which it holds, {silence}"

    def _print_verdict(self, sentence: str) -> None:
        """Print the verdict, once. Print all stacks before it, unless they would not show the cause."""
        with self._printing:
            if self._printed:
                return
            self._printed = True
            report = self._report or self._own_report()
            explained = any(reason in sentence for reason in ("interrupted (SIGINT)", limits.OutOfResources.__name__))
            if not report.is_failure and not explained:
                faulthandler.dump_traceback(all_threads=True)
            _print(f"{sentence}; this rank ({self._rank}) {report}; exiting\n")

    def _own_report(self) -> Report:
        idle = time.monotonic() - self._progress
        return Report(dataclasses.replace(self._position), *self._activity(), idle, self._now())

    def _activity(self) -> tuple[Activity, str]:
        if isinstance(self._failure, KeyboardInterrupt):
            return "was interrupted (SIGINT) in", raised_in(self._failure)
        if self._failure is not None:
            caused_elsewhere = is_communication_error(self._failure)
            return "waited in" if caused_elsewhere else "failed with", error_place(self._failure)
        frame = _frame()
        place = waits_in(frame)
        if place is not None:
            return "waited in", place
        # A full launch queue, or an implicit copy to the host, may block the thread in any operation
        return "waited in" if self._device_is_busy() else "was busy in", code_place(frame)

    def _device_is_busy(self) -> bool:
        """Return whether the default stream still has work after a period."""
        if self._device is None:
            return False
        stream = torch.cuda.default_stream(self._device)
        empty = threading.Event()

        def wait() -> None:
            # An error counts as busy: the main thread has not seen it yet
            with contextlib.suppress(RuntimeError):
                stream.synchronize()
                empty.set()

        # Any CUDA call may block while the device hangs, and a query in this thread would hold the interpreter's lock
        threading.Thread(target=wait, daemon=True).start()
        return not empty.wait(self._period)

    # Reporter

    def _reporter(self) -> None:
        while not self._wake.wait(self._period):
            try:
                self._write("heartbeat", (self._position, self._now()))
                alarm = self._store.check(["alarm"])
            except RuntimeError:
                # At a normal end, the store may disappear before this rank leaves the guarded block
                alarm = time.monotonic() - self._answered > REPORT_SECONDS
            else:
                self._answered = time.monotonic()
            if alarm:
                self._wake.set()
        if self._ended:
            return
        # If the store is lost, the watchdog prints the verdict
        with contextlib.suppress(RuntimeError):
            self._conclude()
        self._concluded.set()

    def _conclude(self) -> None:
        """Write the report; draw the verdict or wait for it; print it, and give all ranks time to print it."""
        self._report = self._own_report()
        self._write("report", self._report)
        self._write("collectives", self._collectives.record())
        self._store.add("reported", 1)
        if self._store.add("alarm", 1) == 1:
            self._wait_until(lambda: self._store.add("reported", 0) >= self._world_size, REPORT_SECONDS)
            self._store.set("verdict", self._draw_verdict())
        else:
            self._wait_until(lambda: self._store.check(["verdict"]), REPORT_SECONDS + PRINTING_SECONDS)
        self._answered = time.monotonic()
        decided = self._store.check(["verdict"])
        self._print_verdict(self._store.get("verdict").decode() if decided else self._draw_verdict())
        # Other ranks may not have read the verdict, and the launcher ends them when the first rank exits
        time.sleep(2 * PRINTING_SECONDS if self._rank == self._store_rank else PRINTING_SECONDS)

    def _draw_verdict(self) -> str:
        reports = self._read_all("report")
        sentence = verdict(reports, self._read_all("heartbeat"), self._now(), self._limit)
        if any(report is not None and report.is_failure for report in reports):
            # The other ranks only wait for the failed one
            return sentence
        entered = enumerate(self._read_all("collectives"))
        difference = collective_order.report({rank: record for rank, record in entered if record is not None})
        return sentence if difference is None else f"{sentence}; {difference}"

    def _write(self, kind: str, value: Any) -> None:
        content = zlib.compress(pickle.dumps(value))
        self._store.set(f"{kind}/{self._rank}", content)  # pyright: ignore[reportArgumentType]

    def _read_all(self, kind: str) -> list[Any]:
        """Return every rank's value of this kind; None for a rank that has not written one."""
        keys = [f"{kind}/{rank}" for rank in range(self._world_size)]
        written = [self._store.get(key) if self._store.check([key]) else None for key in keys]
        return [None if content is None else pickle.loads(zlib.decompress(content)) for content in written]

    def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.1)


def _print(text: str) -> None:
    sys.stderr.write(text)
    sys.stdout.flush()
    sys.stderr.flush()


def _frame() -> FrameType:
    main = threading.main_thread().ident
    assert main is not None
    return deciding_frame(sys._current_frames(), main)
