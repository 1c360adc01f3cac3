"""Marks on this thread's CPU time outside of kernels: where the host waits, and where it launches a collective.

An observer of the device that takes part in no bookkeeping, so that little but the program itself is timed.
"""

from collections.abc import Callable
from typing import NamedTuple


class Mark(NamedTuple):
    """Something that the host did, and this thread's CPU time outside of kernels then, in nanoseconds."""

    what: str
    """"wait", or the name of a collective."""
    ns: int
    bytes: int = 0


class HostClock:
    """Collects marks; everything else that the device reports is ignored."""

    on = False

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.outside: Callable[[], int] = lambda: 0
        """Returns this thread's CPU time outside of kernels, collectives and reports."""

    def synchronized(self, op: str, **_: object) -> None:
        """Note that the host waits."""
        self.marks.append(Mark("wait", self.outside()))

    def launched(self, op: str, size: int) -> None:
        """Note that the host launches a collective."""
        self.marks.append(Mark(op.removeprefix("c10d::"), self.outside(), size))

    def recorded(self, *_: object) -> None:
        """Ignore an event."""

    waited = kept = launched_batch = recorded
