"""The order in which threads issue operations: a recorder that keeps it, and a search for orders that may deadlock."""

import contextlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_balance.job.collectives import Collectives


class Event(NamedTuple):
    """An operation that a rank's thread issued on a channel, or its wait for such an operation."""

    thread: str
    channel: str
    number: int
    is_wait: bool = False


class OrderedCollectives(Collectives):
    """A recorder that keeps all operations, the waits for them, and the order between channels."""

    def __init__(self) -> None:
        super().__init__(kept=None)
        self.events: list[Event] = []
        self._works: weakref.WeakKeyDictionary[dist.Work, tuple[str, int]] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def recorded(self) -> Iterator["OrderedCollectives"]:
        wait = dist.Work.wait

        def noted(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            result = wait(work, *args, **kwargs)
            if work in self._works:
                self.events.append(Event(threading.current_thread().name, *self._works[work], is_wait=True))
            return result

        original = vars(dist.Work)["wait"]
        dist.Work.wait = noted
        try:
            with super().recorded():
                yield self
        finally:
            dist.Work.wait = original

    def on_start(self, key: str, number: int, work: Any) -> None:
        self.events.append(Event(threading.current_thread().name, key, number))
        if isinstance(work, dist.Work):
            self._works[work] = (key, number)


def find_cycle(events: Mapping[int, Sequence[Event]], messages: Iterable[str] = ()) -> list[tuple[str, int]]:
    """Find a cycle of operations: each is issued before the next on some rank, and the last before the first.

    A thread issues collectives one after the other. NCCL requires all ranks to issue the collectives of different
    communicators in the same order, because the device may run only one at a time. Messages are posted ahead: an
    operation counts as issued after a message only once its thread has waited for the message.

    Args:
        events: events by rank, in order.
        messages: channels of messages between two ranks.

    Returns:
        The operations (channel, number) along the cycle; empty if there is none.
    """
    before: dict[Any, set[Any]] = defaultdict(set)
    posted = set(messages)
    for ordered in events.values():
        # Thread -> what comes before its next operation, and after all that its earlier ones wait for
        latest: dict[str, Any] = {}
        for event in ordered:
            operation = (event.channel, event.number)
            known = {latest[event.thread]} if event.thread in latest else set()
            if not event.is_wait:
                before[operation] |= known
                if event.channel not in posted:
                    latest[event.thread] = operation
            elif event.channel in posted:
                # A node of its own, so that later operations need not follow each message that was waited for
                waited = object()
                before[waited] = known | {operation}
                latest[event.thread] = waited
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        return [node for node in error.args[1][1:] if isinstance(node, tuple)]
    return []
