"""Profilers of some iterations (`--profile`): PyTorch's, or the one that the process runs under, such as nsys.

`record_function` marks spans of host work for them.
"""

import contextlib
import functools
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerAction, profile, tensorboard_trace_handler

from megatron_balance.config.training_config import ProfilingConfig
from megatron_balance.observe.optional import Attempts

_NO_SPAN = contextlib.nullcontext()


def record_function(name: str) -> contextlib.AbstractContextManager:
    """Return a span of this name, as `torch.profiler.record_function`; an empty one unless a profiler is running.

    torch's own span takes the host 10 to 20 us even if nothing records it, and a layer has 18 of them.
    """
    return torch.profiler.record_function(name) if autograd_profiler._is_profiler_enabled else _NO_SPAN


class Profiler(Protocol):
    """A profiler of a run; Megatron-LM's profilers begin and end with the same iterations."""

    def after_step(self, iteration: int) -> None:
        """End an iteration, and begin the next one."""
        ...

    def close(self) -> None:
        """End profiling if it is under way."""
        ...


def build_profiler(config: ProfilingConfig, directory: str | None, rank: int, done: int) -> Profiler | None:
    """Start and return the profiler of this rank; None if the rank is not profiled.

    Args:
        directory: for traces of PyTorch's profiler.
        done: number of finished iterations.
    """
    if not config.profile or rank not in config.profile_ranks:
        return None
    if not config.use_pytorch_profiler:
        return CudaProfiler(config, done)
    assert directory is not None
    return TorchProfiler(config, Path(directory), rank, done)


class TorchProfiler:
    """Writes a trace of the iterations from `profile_step_start` until before `profile_step_end`."""

    def __init__(self, config: ProfilingConfig, directory: Path, rank: int, done: int) -> None:
        self._directory = directory
        self._attempts = Attempts(f"--use-pytorch-profiler: --tensorboard-dir {directory}")
        self._handler = tensorboard_trace_handler(str(directory), worker_name=f"rank{rank}")
        self._profile: profile | None = profile(
            schedule=functools.partial(action, config.profile_step_start, config.profile_step_end, done),
            on_trace_ready=self._write,
            record_shapes=True,
            with_stack=True,
        )
        self._profile.start()
        # As in Megatron-LM, step 0 is before the first iteration: the trace shows iteration N as ProfilerStep#N
        self._profile.step()
        self._last = config.profile_step_end - 1

    def after_step(self, iteration: int) -> None:
        """End an iteration, and begin the next one; write the trace after the last one."""
        if self._profile is not None:
            self._profile.step()
            if iteration >= self._last:
                self.close()

    def close(self) -> None:
        """Stop, and write the trace if it has not been written."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, finished: profile) -> None:
        def write() -> None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._handler(finished)

        self._attempts.run(write, last=True)


def action(start: int, end: int, first: int, step: int) -> ProfilerAction:
    """Return the action of PyTorch's profiler in a step of a run; see `torch.profiler.schedule`.

    Args:
        start: first iteration to record.
        end: first iteration not to record.
        first: iteration of step 0.
    """
    iteration = first + step
    if iteration == end - 1 >= start:
        return ProfilerAction.RECORD_AND_SAVE
    if start <= iteration < end:
        return ProfilerAction.RECORD
    return ProfilerAction.WARMUP if iteration == start - 1 else ProfilerAction.NONE


class CudaProfiler:
    """Starts CUDA's profiler after iteration `profile_step_start` and stops it after `profile_step_end`."""

    def __init__(self, config: ProfilingConfig, done: int) -> None:
        self._config = config
        self._cuda: Any = torch.cuda.cudart()
        self._open = contextlib.ExitStack()
        self._started = False
        self.after_step(done)

    def after_step(self, iteration: int) -> None:
        """Start or stop, if it is time to."""
        if iteration == self._config.profile_step_start:
            torch.cuda.check_error(self._cuda.cudaProfilerStart())
            self._open.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))
            self._started = True
        elif iteration == self._config.profile_step_end:
            self.close()

    def close(self) -> None:
        """Stop, unless it has stopped already."""
        if self._started:
            torch.cuda.check_error(self._cuda.cudaProfilerStop())
            self._open.close()
            self._started = False
