"""Decide from the reports of all ranks which rank holds up a job."""

from collections.abc import Sequence
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

    def __str__(self) -> str:
        return f"iteration {self.iteration}, {self.phase}"

    def advance(self) -> None:
        """Note that a unit of work within the phase, such as a microbatch, is done."""
        self.steps += 1


STEPPING = ("forward-backward", "optimizer", "evaluation")
"""Phases with many steps. Other phases, such as the start or a checkpoint, may last arbitrarily long."""

Heartbeat = tuple[Position, float]
"""Sign of life that a rank writes once a period: its position and its Unix time."""

Activity = Literal["waited in", "was busy in", "failed with", "was interrupted (SIGINT) in"]
"""Whether a rank waited in a collective or for the device, ran other code, failed by itself, or was ended by a user."""


class Report(NamedTuple):
    """A rank's report about itself after an alarm.

    Attributes:
        place: name of the collective, the code or the exception.
        idle: seconds since the main thread's last progress.
        time: Unix time of the report in seconds.
    """

    position: Position
    activity: Activity
    place: str
    idle: float
    time: float

    @property
    def is_failure(self) -> bool:
        """Whether the rank ended by itself."""
        return self.activity in ("failed with", "was interrupted (SIGINT) in")

    def __str__(self) -> str:
        return f"{self.activity} {self.place} ({self.position})"


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
    failed = sorted((report.time, rank) for rank, report in present.items() if report.is_failure)
    named = [f"rank {rank} {present[rank]}" for _, rank in failed[:1]]
    for rank, report in enumerate(reports):
        if report is None:
            named.append(f"rank {rank} stalled or died: no sign of life {_since(heartbeats[rank], now)}")
    if not named:
        named = [
            f"rank {rank} stalled: no progress for {report.idle:.0f} s, not in a collective but in {report.place} "
            f"({report.position})"
            for rank, report in present.items()
            if report.activity == "was busy in" and report.idle > limit / 2
        ]
    if not named:
        newest = max(report.position.iteration for report in present.values())
        named = [
            f"rank {rank} stalled: it {report} while others are in iteration {newest}"
            for rank, report in present.items()
            if report.position.iteration < newest
        ]
    if not named:
        named = [f"rank {rank} {report}" for rank, report in present.items()]
    if len(named) > MAX_NAMED:
        named[MAX_NAMED:] = [f"and {len(named) - MAX_NAMED} more ranks"]
    return "; ".join(named)


def _since(heartbeat: Heartbeat | None, now: float) -> str:
    if heartbeat is None:
        return "since the start"
    position, time = heartbeat
    return f"for {max(0.0, now - time):.0f} s (last seen in {position})"
