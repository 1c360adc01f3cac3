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
    before: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    posted = set(messages)
    for ordered in events.values():
        by_thread: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for event in ordered:
            operation = (event.channel, event.number)
            earlier = by_thread[event.thread]
            if not event.is_wait:
                before[operation].update(earlier)
                if event.channel not in posted:
                    # Later operations follow this one, and through it all earlier ones
                    earlier[:] = [operation]
            elif event.channel in posted:
                earlier.append(operation)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        return error.args[1][1:]
    return []
