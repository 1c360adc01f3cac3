"""Two passes that take turns on the host: one runs while the other has nothing to do but wait."""

import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from megatron_balance.device.side_stream import DaemonThread

Direction = Literal["forward", "backward"]

One = TypeVar("One")
Other = TypeVar("Other")

OTHER: dict[Direction, Direction] = {"forward": "backward", "backward": "forward"}


class Abandoned(Exception):
    """Ends a pass because the other one failed."""


class Turns:
    """Lets a forward pass and a backward pass of different microbatches take turns.

    Exactly one of them runs at any time, until it gives way. Passes give way at fixed points of their programs, so
    ranks that run the same two passes start their collectives in the same order. The forward pass runs in the calling
    thread, which has the state of a training loop: autocasting, profilers, signals. The backward pass needs none of it;
    it runs in a thread of its own, or in autograd's threads, so a pass is recognized by whose turn it is.
    """

    def __init__(self) -> None:
        self._thread = DaemonThread("backward passes")
        self._changed = threading.Condition()
        self._turn: Direction | None = None
        """The pass that runs; None: no pass runs beside another."""
        self._failed: BaseException | None = None

    def together(self, forward: Callable[[], One], backward: Callable[[], Other]) -> tuple[One, Other]:
        """Run both passes, the forward pass first; return their results. An error of either pass ends both."""
        self._failed = None
        self._turn = "forward"
        running = self._thread.submit(lambda: self._take_turns("backward", backward))
        try:
            output = self._take_turns("forward", forward)
        except Exception:
            # The backward pass ends where it gave way
            running.exception()
            assert self._failed is not None
            raise self._failed from None
        return output, running.result()

    def give_way(self, direction: Direction) -> None:
        """Let the other pass run until it gives way or ends. Nothing happens without another pass, nor if this is not
        a pass in this direction: a forward pass that recomputes is part of a backward pass, whose partner would
        otherwise be done too early."""
        if self._turn != direction:
            return
        with self._changed:
            self._turn = OTHER[direction]
            self._changed.notify_all()
        self._await(direction)

    def _take_turns(self, direction: Direction, work: Callable[[], Any]) -> Any:
        try:
            self._await(direction)
            return work()
        except BaseException as error:
            if self._failed is None:
                self._failed = error
            raise
        finally:
            with self._changed:
                # The other pass continues alone
                self._turn = None
                self._changed.notify_all()

    def _await(self, direction: Direction) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn in (direction, None))
        if self._failed is not None:
            raise Abandoned from self._failed
