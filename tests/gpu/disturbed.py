"""Runs whose streams are late, and runs with a mistake that such a run must show."""

import contextlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_balance.device import clock
from megatron_balance.device.side_stream import AsyncWork, SideStream
from megatron_balance.job.collectives import COLLECTIVES, MESSAGES
from megatron_balance.training import optimizer_step

CYCLES = 4_000_000
"""Longest sleep before a post, in cycles of the GPU: about 2 ms."""

LONG = 100_000_000
"""Sleep of a stream that another one should wait for: about 50 ms."""


def _sleep(cycles: int) -> None:
    if torch.cuda.is_available():
        torch.cuda._sleep(cycles)


@contextlib.contextmanager
def late_posts(seed: int) -> Iterator[None]:
    """Let the stream of one post in three sleep before it, by a random time that differs between ranks."""
    random = Random(1000 * seed + dist.get_rank())

    def late(method: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            if random.random() < 1 / 3:
                _sleep(random.randrange(CYCLES))
            return method(*args, **options)

        return call

    start = SideStream.start

    def start_late(side: SideStream, work: Callable[[], None], *args: Any, **options: Any) -> AsyncWork:
        return start(side, late(work), *args, **options)

    with contextlib.ExitStack() as stack:
        # Only what the class itself has: what getattr returns for others would not be put back
        for name in vars(dist.ProcessGroup).keys() & {*COLLECTIVES, *MESSAGES}:
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, late(getattr(dist.ProcessGroup, name))))
        stack.enter_context(mock.patch.object(SideStream, "start", start_late))
        yield


@contextlib.contextmanager
def late_step() -> Iterator[None]:
    """Let the optimizer's step begin late on the device, while the host goes on."""
    step = optimizer_step.step

    def late(*args: Any, **options: Any) -> Any:
        _sleep(LONG)
        return step(*args, **options)

    with mock.patch.object(optimizer_step, "step", late):
        yield


@contextlib.contextmanager
def nobody_waits_for_parameters() -> Iterator[None]:
    """A mistake: experts' weights are sent without waiting for the optimizer's step, which is late."""
    start = SideStream.start

    def hasty(side: SideStream, *args: Any, **options: Any) -> AsyncWork:
        if side._stream is None:
            return start(side, *args, **options)
        with mock.patch.object(torch.cuda.Stream, "wait_stream", lambda stream, other: None):
            return start(side, *args, **options)

    with late_step(), mock.patch.object(SideStream, "start", hasty):
        yield


@contextlib.contextmanager
def event_of_another_stream() -> Iterator[None]:
    """A mistake: the experts wait for an event of the current stream, not for their weights, which are late."""
    start = SideStream.start

    def wrong(side: SideStream, work: Callable[[], None], *args: Any, **options: Any) -> AsyncWork:
        def late() -> None:
            _sleep(LONG)
            work()

        started = start(side, late, *args, **options)
        if side._stream is None:
            return started
        kept.append(started)
        return AsyncWork(started.issued, lambda: (started.issued, clock.mark()))

    kept: list[AsyncWork] = []
    with mock.patch.object(SideStream, "start", wrong):
        yield


DISTURBANCES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "first": contextlib.nullcontext,
    "blocking": contextlib.nullcontext,
    "late": lambda: late_posts(0),
    "no wait": nobody_waits_for_parameters,
    "wrong event": event_of_another_stream,
}
