"""Marks on this thread's CPU time outside of kernels: where the host waits, and where it launches a collective.

An observer of the device that takes part in no bookkeeping, so that little but the program itself is timed.
"""

from collections.abc import Callable
from typing import NamedTuple


class Reading(NamedTuple):
    """This thread's clock, at some moment."""

    ns: int
    """CPU time outside of kernels, collectives and reports, in nanoseconds."""
    queued: int
    """Kernels and collectives that the thread has queued."""

    def since(self, other: "Reading") -> "Reading":
        """Return what was added since an earlier reading."""
        return Reading(self.ns - other.ns, self.queued - other.queued)


class Mark(NamedTuple):
    """Something that the host did, and when."""

    what: str
    """"wait", or the name of a collective."""
    at: Reading
    bytes: int = 0


class HostClock:
    """Collects marks; everything else that the device reports is ignored."""

    on = False

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        # The device's library sets both
        self.outside: Callable[[], int] = lambda: 0
        self.queued: Callable[[], int] = lambda: 0

    def read(self) -> Reading:
        """Return the clock of the calling thread."""
        return Reading(self.outside(), self.queued())

    def synchronized(self, op: str, **_: object) -> None:
        """Note that the host waits."""
        self.marks.append(Mark("wait", self.read()))

    def launched(self, op: str, size: int) -> None:
        """Note that the host launches a collective."""
        self.marks.append(Mark(op.removeprefix("c10d::"), self.read(), size))

    def recorded(self, *_: object) -> None:
        """Ignore an event."""

    waited = kept = launched_batch = recorded
