"""Tell from a thread's stack, or an exception's traceback, whether a rank waits in a collective."""

import contextlib
import itertools
import linecache
import re
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from megatron_balance.job import collectives
from megatron_balance.job.endings import raised_in
from megatron_balance.messages import cleaned

MAX_ERROR_CHARACTERS = 120
"""Maximum number of characters of an exception's message in a verdict; the traceback has the full text."""

_COLLECTIVE_FILES = ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py")
# Functions that torch's logger and our recorder wrap around each collective
_WRAPPERS = ("wrapper", "noted")
_WAITS = re.compile(r"wait\(")
_WAITS_FOR_DEVICE = re.compile(r"\.(item|tolist|cpu|synchronize)\(|_cuda_synchronize\(")
# Call of autograd's engine, by torch or by megatron-core's schedules
_ENGINE = re.compile(r"_execution_engine\.run_backward\(")


def deciding_frame(frames: Mapping[int, FrameType], main: int) -> FrameType:
    """Return the innermost frame of the thread that does the main thread's work: itself, or an autograd thread.

    On CUDA, an autograd thread runs the backward pass with its hooks and Python Functions, while the main thread waits
    in the engine. The autograd thread has frames only while it runs Python.
    """
    own = frames[main]
    if not _ENGINE.search(_source(own)):
        return own
    # Threads of side streams, the hang guard and writers also run Python, but not the backward pass
    devices = [frame for frame in frames.values() if frame is not own and not _started_by_python(frame)]
    return next((frame for frame in devices if waits_in(frame) is not None), devices[0] if devices else own)


def stack_of(frame: FrameType) -> tuple:
    """Return the code positions of a stack, which stay equal while the thread does not move."""
    # The frames themselves would keep tensors alive
    return tuple((one.f_code, one.f_lasti) for one, _ in traceback.walk_stack(frame))


def _started_by_python(frame: FrameType) -> bool:
    outermost, _ = [*traceback.walk_stack(frame)][-1]
    return outermost.f_code.co_filename == threading.__file__


def waits_in(frame: FrameType) -> str | None:
    """Name the collective or wait for the device that a thread with this innermost frame is in; None if there is none.

    Waits happen below Python, so the innermost Python frame shows them: it is in torch.distributed, or its current line
    waits for a handle or copies a tensor from the device.
    """
    collective = _collective(frame, None)
    if collective is None and _WAITS_FOR_DEVICE.search(_source(frame)):
        return code_place(frame)
    return collective


def is_communication_error(error: BaseException) -> bool:
    """Return whether other ranks caused an exception: a lost connection or a collective's timeout."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or "gloo" in str(error) or _raising_collective(error) is not None
    )


def error_place(error: BaseException) -> str:
    """Return an exception in one line, with the collective that raised it."""
    collective = _raising_collective(error)
    text = f"{type(error).__name__}: {error}".strip().partition("\n")[0].removesuffix(":")
    # gloo's messages start with a position in its source
    text = cleaned(re.sub(r"\[\S+:\d+\] ", "", text), MAX_ERROR_CHARACTERS)
    if not isinstance(error, Exception):
        # For example SystemExit, whose text is not informative
        return f"{text} raised in {raised_in(error)}"
    return text if collective is None else f"{collective} ({text})"


def code_place(frame: FrameType, line: int | None = None, depth: int = 3) -> str:
    """Return the innermost functions of a stack: `read (data.py:31) < next (loader.py:7)`."""
    places = []
    for current, running in itertools.islice(traceback.walk_stack(frame), depth):
        number = line if line is not None and current is frame else running
        places.append(f"{current.f_code.co_name} ({Path(current.f_code.co_filename).name}:{number})")
    return " < ".join(places)


def _raising_collective(error: BaseException) -> str | None:
    frames = list(traceback.walk_tb(error.__traceback__))
    return _collective(*frames[-1]) if frames else None


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
    # The recorder's functions run between torch.distributed and its backends
    within = path.name in _COLLECTIVE_FILES and path.parent.name == "distributed"
    return within or frame.f_code.co_filename == collectives.__file__


def _source(frame: FrameType, line: int | None = None) -> str:
    # A running frame may be between two lines and have no line number
    return linecache.getline(frame.f_code.co_filename, line or frame.f_lineno or 0)
