"""Work that overlaps with computation; executed in the order in which it was started."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from megatron_balance.device import clock

Task = tuple[Callable[[], Any], Future]
"""Work and the future of its result."""


class DaemonThread:
    """A thread that executes tasks in order, and ends with this object. It is a daemon, so a task that never returns
    does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._tasks,), name=name, daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def submit(self, work: Callable[[], Any], future: Future | None = None) -> Future:
        """Queue `work`; return the future of its result, `future` if given."""
        future = future or Future()
        self._tasks.put((work, future))
        return future


def _serve(tasks: "queue.SimpleQueue[Task | None]") -> None:
    while (task := tasks.get()) is not None:
        work, future = task
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the result is waited for
            future.set_exception(error)
        # Free the work's objects before waiting for the next task
        del task, work, future


@dataclass(eq=False)
class AsyncWork:
    """Work that was started on a side stream."""

    issued: clock.Mark
    wait: Callable[[], tuple[clock.Mark, clock.Mark]]
    """Waits until the work is done (on CUDA the current stream waits, not the host); returns its start and end."""


class SideStream:
    """A CUDA stream or, without CUDA, a thread. A failing process does not wait for the thread's missing messages."""

    def __init__(self, name: str) -> None:
        # On the current stream, NCCL's kernels would wait for computation queued before them
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._thread = DaemonThread(name) if self._stream is None else None

    def start(self, work: Callable[[], None], prepare: Callable[[], None] = lambda: None) -> AsyncWork:
        """Start `work` after all that this thread has computed or queued; `prepare` precedes it on this thread."""
        issued = clock.mark()
        if self._stream is None:
            assert self._thread is not None
            prepare()
            return AsyncWork(issued, self._thread.submit(lambda: _timed(work)).result)
        # The current stream wrote the data that `work` sends, and read the data that `work` overwrites
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            prepare()
            start, end = _timed(work)

        def wait() -> tuple[clock.Mark, clock.Mark]:
            assert isinstance(end, torch.cuda.Event)
            # Later computation waits for the data; the host runs ahead
            torch.cuda.current_stream().wait_event(end)
            return start, end

        return AsyncWork(issued, wait)


def _timed(work: Callable[[], None]) -> tuple[clock.Mark, clock.Mark]:
    start = clock.mark()
    work()
    return start, clock.mark()
