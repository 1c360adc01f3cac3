"""Compares the wall clocks of a job's machines, so that a single clock decides which rank failed first."""

import socket
import time
from collections.abc import Callable, Sequence

from megatron_balance.job.agreement import listed
from megatron_balance.job.groups import gather
from megatron_balance.messages import cleaned

APART_SECONDS = 1.0
"""Smallest difference that is reported: ranks read their clocks within a second of each other."""


def compare(rank: int) -> tuple[Callable[[], float], str | None]:
    """Return a function that returns the Unix time in seconds of rank 0's machine, from this machine's own clock, and a
    notice if clocks differ. Collective, of the whole job."""
    # Ranks leave a collective at nearly the same time
    gather(None)
    ahead, notice = difference(gather((cleaned(socket.gethostname(), 80), time.time())))
    return lambda: time.time() - ahead[rank], notice


def difference(read: Sequence[tuple[str, float]]) -> tuple[list[float], str | None]:
    """Return how far each rank's clock is ahead of the first one's, in seconds, and a notice if some are apart.

    Args:
        read: each rank's host and its Unix time in seconds, read at the same time.
    """
    _, first = read[0]
    ahead = [seconds - first if abs(seconds - first) > APART_SECONDS else 0.0 for _, seconds in read]
    apart = {host: f"{seconds:+.0f} s on {host}" for (host, _), seconds in zip(read, ahead, strict=True) if seconds}
    if not apart:
        return ahead, None
    problem = "logs and timelines of different machines cannot be compared"
    told = f"clocks differ from that of {read[0][0]}: {listed([*apart.values()])}; {problem}"
    return ahead, f"{told}; let NTP or chrony set the clocks"
