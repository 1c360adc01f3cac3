"""Decide from the reports of all ranks which rank holds up a job."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

MAX_NAMED = 4
"""Maximum number of ranks that a verdict names individually."""


@dataclass
class Position:
    """Where a rank's main thread is, with a counter of its progress. Only the main thread writes it."""

    iteration: int = 0
    phase: str = "start"
    steps: int = 0

    def enter(self, phase: str, iteration: int | None = None) -> None:
        """Note that the main thread begins `phase`; give `iteration` if it is new."""
        self.phase = phase
        self.iteration = self.iteration if iteration is None else iteration
        self.steps += 1

    def advance(self) -> None:
        """Note that a unit of work within the phase, such as a microbatch, is done."""
        self.steps += 1


STEPPING = ("forward-backward", "optimizer", "evaluation")
"""Phases with many steps. Other phases, such as the start or a checkpoint, may last arbitrarily long."""


class Heartbeat(NamedTuple):
    """Sign of life that a rank writes once a period: its Unix time, and its idle seconds in a phase with many steps."""

    iteration: int
    phase: str
    time: float
    idle: float = 0.0


Activity = Literal["waited", "busy", "failed", "interrupted"]
"""Whether a rank waited in a collective or for the device, ran other code, failed by itself, or was ended by a user."""


class Report(NamedTuple):
    """A rank's report about itself after an alarm.

    Attributes:
        place: name of the collective, the code or the exception.
        idle: seconds since the main thread's last progress.
        time: Unix time of the report in seconds.
    """

    iteration: int
    phase: str
    activity: Activity
    place: str
    idle: float
    time: float

    @property
    def is_failure(self) -> bool:
        """Whether the rank ended by itself."""
        return self.activity in ("failed", "interrupted")

    def __str__(self) -> str:
        return f"{_VERBS[self.activity]} {self.place}"


_VERBS: dict[Activity, str] = {
    "waited": "waited in",
    "busy": "was busy in",
    "failed": "failed with",
    "interrupted": "was interrupted (SIGINT) in",
}


def is_interruption(sentence: str) -> bool:
    """Return whether a verdict says that a user ended the job."""
    return _VERBS["interrupted"] in sentence


def verdict(reports: Sequence[Report | None], heartbeats: Sequence[Heartbeat | None], now: float, limit: float) -> str:
    """Name the ranks that hold up the job, in one sentence.

    The first of these groups that has members is named: ranks that failed or do not answer; ranks that were busy with
    something other than communication for more than half of `limit`; ranks that are an iteration behind.

    Args:
        reports: every rank's report; None if it gave none in time.
        heartbeats: every rank's last heartbeat; None if it never gave one.
        now: Unix time in seconds.
        limit: seconds after which a wait counts as a stall.
    """
    present = {rank: report for rank, report in enumerate(reports) if report is not None}
    failed = [rank for rank in present if present[rank].is_failure]
    first = min(failed, key=lambda rank: present[rank].time, default=None)
    named = [] if first is None else [f"rank {first} {present[first]} ({_position(present[first])})"]
    silent = [rank for rank, report in enumerate(reports) if report is None]
    named += [f"rank {rank} stalled or died: {_silence(heartbeats[rank], now)}" for rank in silent]
    if named:
        return _join(named)

    busy = [rank for rank, report in present.items() if report.activity == "busy" and report.idle > limit / 2]
    if busy:
        return _join(
            f"rank {rank} stalled: no progress for {present[rank].idle:.0f} s, not in a collective but in "
            f"{present[rank].place} ({_position(present[rank])})"
            for rank in busy
        )
    newest = max(report.iteration for report in present.values())
    behind = [rank for rank, report in present.items() if report.iteration < newest]
    if behind:
        return _join(
            f"rank {rank} stalled: it {present[rank]} ({_position(present[rank])}) while others are in "
            f"iteration {newest}"
            for rank in behind
        )
    return _join(f"rank {rank} {report} ({_position(report)})" for rank, report in present.items())


def _position(seen: Report | Heartbeat) -> str:
    return f"iteration {seen.iteration}, {seen.phase}"


def _silence(heartbeat: Heartbeat | None, now: float) -> str:
    if heartbeat is None:
        return "no sign of life since the start"
    return f"no sign of life for {max(0.0, now - heartbeat.time):.0f} s (last seen in {_position(heartbeat)})"


def _join(parts: Iterable[str]) -> str:
    named = list(parts)
    if len(named) > MAX_NAMED:
        named[MAX_NAMED:] = [f"and {len(named) - MAX_NAMED} more ranks"]
    return "; ".join(named)
