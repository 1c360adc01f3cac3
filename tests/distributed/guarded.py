"""Jobs with the hang guard watching their ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_balance.job.stall import Position
from tests.distributed.jobs import Job, Prepare

LIMIT = 120.0
"""Seconds within which every rank except a stopped one must exit."""

FLAGS = "--global-batch-size 24 --train-iters 100000 --log-interval 1 --distributed-timeout-minutes 10"

WORLD_SIZE = 3


def replace_forward(action: Callable[[], None], victims: tuple[int, ...], calls: int, rank: int) -> None:
    """Make the victims call `action` once, before the forward pass of microbatch number `calls`."""
    from megatron_balance.training import loop

    original = loop.forward_step
    count = 0

    def forward_step(*arguments):
        nonlocal count
        count += 1
        if count == calls and rank in victims:
            action()
        return original(*arguments)

    loop.forward_step = forward_step


@dataclass(frozen=True)
class Impatient:
    """Prepares a rank whose guard waits for some seconds only, once training is under way.

    Until then, the ranks of a busy machine may wait for each other for longer.
    """

    seconds: float
    mischief: Prepare | None = None
    calls: int = 14
    """Number of microbatches until then."""

    def __call__(self, rank: int) -> None:
        from megatron_balance.job.hang_guard import MAX_PERIOD, HangGuard

        guards: list[HangGuard] = []
        follow = HangGuard.follow

        def followed(guard: HangGuard, position: Position) -> None:
            guards.append(guard)
            follow(guard, position)

        def hurry() -> None:
            (guard,) = guards
            guard._limit = self.seconds
            guard._period = min(MAX_PERIOD, self.seconds / 10)

        HangGuard.follow = followed
        if self.mischief is not None:
            self.mischief(rank)
        replace_forward(hurry, (rank,), self.calls, rank)


def oversleep() -> None:
    time.sleep(3600)


def sleep_in_rank_1(rank: int) -> None:
    replace_forward(oversleep, (1,), 20, rank)


class Guarded(Job):
    """A job whose ranks are expected to end themselves."""

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
