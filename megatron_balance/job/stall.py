"""Who holds up a job: what every rank knows of itself, and the decision that follows from all of it."""

import contextlib
import json
import linecache
import re
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import torch.distributed as dist

from megatron_balance.job import collectives
from megatron_balance.job.endings import raised_in
from megatron_balance.messages import cleaned

MAX_NAMED = 4
"""Ranks that a verdict names one by one."""

MAX_ERROR_CHARACTERS = 120
"""Of an exception's message; the traceback has it all."""

_COLLECTIVE_FILES = ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py")
_WRAPPERS = ("wrapper", "noted")
"""What torch, for its own log, and our recorder call a function around each collective."""

_WAITS = re.compile(r"wait\(")
_WAITS_FOR_DEVICE = re.compile(r"\.(item|tolist|cpu|synchronize)\(|_cuda_synchronize\(")
_ENGINE = re.compile(r"_execution_engine\.run_backward\(")
"""torch calls autograd's engine, and megatron-core does so in its schedules."""


@dataclass
class Position:
    """Where a rank's main thread is. The main thread writes it, at the price of an assignment; others only read."""

    iteration: int = 0
    phase: str = "start"
    steps: int = 0
    """Signs of progress so far; only whether it changes has a meaning."""

    def enter(self, phase: str, iteration: int | None = None) -> None:
        """The main thread begins `phase`, of `iteration` if that is new."""
        self.phase = phase
        self.iteration = self.iteration if iteration is None else iteration
        self.steps += 1

    def advance(self) -> None:
        """One more unit of work, such as a microbatch, within the phase."""
        self.steps += 1


STEPPING = ("forward-backward", "optimizer", "evaluation")
"""Phases with many steps; a start or a checkpoint may take as long as it takes."""


@dataclass(frozen=True)
class Heartbeat:
    """The sign of life that a rank leaves behind every period."""

    iteration: int
    phase: str
    time: float
    """Unix time in seconds."""

    idle: float = 0.0
    """Seconds without a step where there should be one."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> "Heartbeat":
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Report:
    """What a rank says of itself once any rank has raised the alarm."""

    iteration: int
    phase: str
    activity: Literal["waited", "busy", "failed", "interrupted"]
    """In a collective or for the device; in code of its own; ended by an exception of its own; ended by a user."""

    place: str
    """The collective, the code or the exception."""

    idle: float
    """Seconds since the main thread's last sign of progress."""

    time: float
    """Unix time of the report in seconds."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> "Report":
        return cls(**json.loads(text))

    @property
    def is_failure(self) -> bool:
        """Whether the rank ends by itself."""
        return self.activity in ("failed", "interrupted")

    def __str__(self) -> str:
        return f"{_VERBS[self.activity]} {self.place}"


_VERBS = {
    "waited": "waited in",
    "busy": "was busy in",
    "failed": "failed with",
    "interrupted": "was interrupted (SIGINT) in",
}


def is_interruption(said: str) -> bool:
    """Whether a verdict is that a user has ended the job."""
    return re.match(rf"rank \d+ {re.escape(_VERBS['interrupted'])} ", said) is not None


def verdict(reports: Sequence[Report | None], heartbeats: Sequence[Heartbeat | None], now: float, limit: float) -> str:
    """Name the ranks that hold up the job, in one sentence.

    In this order: a rank that failed by itself, and ranks that do not answer; ranks busy with something else than
    communication for more than half of `limit`; ranks behind the others' iteration.

    Args:
        reports: of every rank; None where it gave none although it had the time to.
        heartbeats: of every rank; None where it never gave one.
        now: Unix time, seconds.
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
    more = [f"and {len(named) - MAX_NAMED} more ranks"] if len(named) > MAX_NAMED else []
    return "; ".join(named[:MAX_NAMED] + more)


def deciding_frame(frames: Mapping[int, FrameType], main: int) -> FrameType:
    """The innermost frame of the thread that does the main thread's work: of the main thread itself, or of autograd's.

    On CUDA a thread of autograd's runs the backward pass, with its hooks and the Functions that are written in Python,
    while the main thread waits in the engine for its end. It has frames only while it runs Python.

    Args:
        frames: the innermost frame of every thread, as `sys._current_frames()` returns them.
        main: the main thread's key in `frames`.
    """
    own = frames[main]
    if not _ENGINE.search(_source(own)):
        return own
    # Lanes, the guard itself and writers run Python too, but do not run the backward pass
    devices = [frame for frame in frames.values() if frame is not own and not _started_by_python(frame)]
    return next((frame for frame in devices if waits_in(frame) is not None), devices[0] if devices else own)


def stack_of(frame: FrameType | None) -> tuple:
    """All places of a stack, which stay equal while its thread stays where it is.

    Not the frames themselves: they would keep tensors alive.
    """
    places = []
    while frame is not None:
        places.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(places)


def _started_by_python(frame: FrameType) -> bool:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename == threading.__file__


def waits_in(frame: FrameType, line: int | None = None) -> str | None:
    """Which collective a thread with this innermost frame waits in, or where it waits for the device; None: neither.

    Waits happen below Python, so that the innermost Python frame shows them: it lies in torch.distributed, or its line
    waits for a handle or copies a tensor from the device.

    Args:
        line: the line in `frame`'s file; by default the one that runs now.
    """
    collective = _collective(frame, line)
    if collective is None and _WAITS_FOR_DEVICE.search(_source(frame, line)):
        return code_place(frame, line)
    return collective


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception tells of other ranks (a lost connection, a collective's timeout), not of this one."""
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error) or _raised_in_collective(error)


def error_place(error: BaseException) -> str:
    """The exception in one line, after the collective that it came out of."""
    frames = list(traceback.walk_tb(error.__traceback__))
    collective = _collective(*frames[-1]) if frames else None
    text = f"{type(error).__name__}: {error}".strip().partition("\n")[0].removesuffix(":")
    # gloo starts with a line of its own source
    text = cleaned(re.sub(r"\[\S+:\d+\] ", "", text), MAX_ERROR_CHARACTERS)
    if not isinstance(error, Exception):
        # Such as SystemExit, whose text tells nothing
        return f"{text} raised in {raised_in(error)}"
    return text if collective is None else f"{collective} ({text})"


def code_place(frame: FrameType, line: int | None = None, depth: int = 3) -> str:
    """The innermost functions of a stack: `read (data.py:31) < next (loader.py:7)`."""
    places = []
    current: FrameType | None = frame
    while current is not None and len(places) < depth:
        number = line if line is not None and current is frame else current.f_lineno
        places.append(f"{current.f_code.co_name} ({Path(current.f_code.co_filename).name}:{number})")
        current = current.f_back
    return " < ".join(places)


def _raised_in_collective(error: BaseException) -> bool:
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and _collective(*frames[-1]) is not None


def _collective(frame: FrameType, line: int | None) -> str | None:
    if not _in_torch_distributed(frame):
        return code_place(frame, line) if _WAITS.search(_source(frame, line)) else None
    names = []
    current: FrameType | None = frame
    while current is not None and (_in_torch_distributed(current) or current.f_code.co_filename == contextlib.__file__):
        names.append(current.f_code.co_name)
        current = current.f_back
    name = next((name for name in names if name not in _WRAPPERS), names[0])
    return name if current is None else f"{name} < {code_place(current, depth=1)}"


def _in_torch_distributed(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    # The recorder stands between torch.distributed and its backends
    within = path.name in _COLLECTIVE_FILES and path.parent.name == "distributed"
    return within or frame.f_code.co_filename == collectives.__file__


def _source(frame: FrameType, line: int | None = None) -> str:
    # A running frame may be between lines
    return linecache.getline(frame.f_code.co_filename, line or frame.f_lineno or 0)
