"""Jobs with the hang guard watching their ranks.

The guard's limit is long until a rank hangs, because a slow machine starts slowly.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.distributed.jobs import Job, Prepare

SHORT = 6.0
"""The guard's limit in seconds, once a rank hangs."""

PATIENCE = 600.0

LIMIT = 180.0
"""Seconds within which every rank except a stopped one must exit, even on a busy machine."""

FLAGS = "--global-batch-size 24 --train-iters 100000 --log-interval 1 --distributed-timeout-minutes 10"

WORLD_SIZE = 3

HANGS: list[Path] = []
"""In a rank: the file that exists from the moment on when a rank hangs."""


def set_limit(limit: Callable[[], float]) -> None:
    """Let this rank's guard ask `limit` for its limit in seconds."""
    from megatron_balance.job.hang_guard import HangGuard

    HangGuard._limit = property(lambda guard: limit(), lambda guard, given: None)  # pyright: ignore


@dataclass(frozen=True)
class Watched:
    """Prepares a rank: its guard's limit is short once `hangs` exists, and it waits for the reports of all ranks that
    can give one."""

    hangs: Path
    mischief: Prepare | None = None
    reporting: int | None = WORLD_SIZE
    """Number of ranks that can report after an alarm; None if the rank that holds the store is silent."""

    def __call__(self, rank: int) -> None:
        from megatron_balance.job import hang_guard

        HANGS.append(self.hangs)
        set_limit(lambda: SHORT if self.hangs.exists() else PATIENCE)
        reporting, count_up_to = self.reporting, hang_guard.HangGuard._count_up_to
        if reporting is not None:
            hang_guard.REPORT_SECONDS = hang_guard.FAREWELL_SECONDS = 60.0
            hang_guard.BACKSTOP_SECONDS = 300

            def count_up_to_those(guard: hang_guard.HangGuard, key: str, target: int, seconds: float) -> int:
                return count_up_to(guard, key, min(target, reporting), seconds)

            hang_guard.HangGuard._count_up_to = count_up_to_those
        if self.mischief is not None:
            self.mischief(rank)


def replace_forward(action: Callable[[], None], victims: tuple[int, ...], calls: int, rank: int) -> None:
    """Make the victims call `action` once, before the forward pass of microbatch number `calls`."""
    from megatron_balance.training import loop

    original, count = loop.forward_step, 0

    def forward_step(*arguments):
        nonlocal count
        count += 1
        if count == calls and rank in victims:
            action()
        return original(*arguments)

    loop.forward_step = forward_step


def oversleep() -> None:
    HANGS[0].touch()
    time.sleep(3600)


def sleep_in_rank_1(rank: int) -> None:
    replace_forward(oversleep, (1,), 20, rank)


class Guarded(Job):
    """A job whose ranks are expected to end themselves."""

    def __init__(
        self,
        world_size: int,
        flags: str,
        directory: Path,
        mischief: Prepare | None = None,
        start: Callable[[BaseProcess], None] = BaseProcess.start,
        reporting: int | None = WORLD_SIZE,
    ) -> None:
        self.hangs = directory / "hangs"
        super().__init__(world_size, flags, directory, Watched(self.hangs, mischief, reporting), start)

    def join(self, ranks: list[int], seconds: float) -> list[int | None]:
        """Wait at most `seconds` for `ranks`, and return their exit codes (None: still running)."""
        start = time.monotonic()
        for rank in ranks:
            self.ranks[rank].join(max(0.0, start + seconds - time.monotonic()))
        print(f"exits after {time.monotonic() - start:.1f} s")
        return [self.ranks[rank].exitcode for rank in ranks]

    def verdict(self, rank: int) -> str:
        """Return the last line of a rank's output, which follows all its stacks."""
        stacks, _, line = self.output(rank).strip().rpartition("\n")
        assert "Traceback" in stacks or ("Current thread" in stacks and "Thread 0x" in stacks)
        print(line)
        return line
