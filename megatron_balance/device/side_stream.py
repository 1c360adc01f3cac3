"""Work that overlaps with the computation, in the order in which it was started."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from megatron_balance.device import clock

Task = tuple[Callable[[], None], Future]
"""Work, and the future of the marks of its start and end."""


@dataclass(eq=False)
class AsyncWork:
    """Work that was started on a side stream."""

    issued: clock.Mark
    wait: Callable[[], tuple[clock.Mark, clock.Mark]]
    """Waits until the work is done (on CUDA the current stream waits, not the host); returns its start and end."""


class SideStream:
    """A CUDA stream or, where there is no CUDA, a thread.

    Its thread is a daemon: a process that fails need not wait for messages that never come. The thread ends with the
    side stream.
    """

    def __init__(self, name: str) -> None:
        # On the current stream, NCCL's kernels would wait for the computation that was queued before them
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        if self._stream is None:
            threading.Thread(target=_serve, args=(self._tasks,), name=name, daemon=True).start()
            weakref.finalize(self, self._tasks.put, None)

    def start(self, work: Callable[[], None], prepare: Callable[[], None] = lambda: None) -> AsyncWork:
        """Start `work` after everything that this thread has computed or queued; return at once.

        Args:
            prepare: called before `work`, on the calling thread.
        """
        issued = clock.mark()
        if self._stream is None:
            prepare()
            future: Future = Future()
            self._tasks.put((work, future))
            return AsyncWork(issued, future.result)
        # The current stream computed the data that `work` sends, and read the data that it overwrites
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            prepare()
            start = clock.mark()
            work()
            end = clock.mark()

        def wait() -> tuple[clock.Mark, clock.Mark]:
            assert isinstance(end, torch.cuda.Event)
            # Computation continues with the data that has arrived; the host runs ahead
            torch.cuda.current_stream().wait_event(end)
            return start, end

        return AsyncWork(issued, wait)


def _serve(tasks: "queue.SimpleQueue[Task | None]") -> None:
    """Do one task after another until None comes."""
    while (task := tasks.get()) is not None:
        work, future = task
        start = clock.mark()
        try:
            work()
        except BaseException as error:  # raised where the work is waited for
            future.set_exception(error)
        else:
            future.set_result((start, clock.mark()))
        # The objects that the work refers to would otherwise live until the next task
        del task, work, future
