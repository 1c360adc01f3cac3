"""Profilers of some iterations (`--profile`): PyTorch's, or one that runs the process, such as nsys.

`record_function` marks spans of host work for profilers.
"""

import contextlib
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler as autograd_profiler
from torch.profiler import profile, schedule, tensorboard_trace_handler

from megatron_balance.config.training_config import ProfilingConfig
from megatron_balance.observe.optional import Attempts

_NO_SPAN = contextlib.nullcontext()


def record_function(name: str) -> contextlib.AbstractContextManager:
    """Return `torch.profiler.record_function(name)` if a profiler is running, and otherwise an empty span.

    torch's own span takes the host 10 to 20 us even without a profiler, and a layer has 18 spans.
    """
    return torch.profiler.record_function(name) if autograd_profiler._is_profiler_enabled else _NO_SPAN


class TorchProfiler:
    """Writes a trace to `directory`, from iteration `profile_step_start` until before `profile_step_end`.

    `done` is the number of finished iterations.
    """

    def __init__(self, config: ProfilingConfig, directory: Path, rank: int, done: int) -> None:
        self._last = config.profile_step_end - 1
        self._directory = directory
        self._attempts = Attempts(f"--use-pytorch-profiler: --tensorboard-dir {directory}")
        self._handler = tensorboard_trace_handler(str(directory), worker_name=f"rank{rank}")
        # As in Megatron-LM, step 0 precedes the first iteration: the trace shows iteration N as ProfilerStep#N
        before = max(0, config.profile_step_start - done)
        warmup = min(1, before)
        active = config.profile_step_end - done - before
        self._profile: profile | None = profile(
            schedule=schedule(wait=before - warmup, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            with_stack=True,
            # Backward passes, Trans and Agg may have threads of their own
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profile.start()
        self._profile.step()

    def after_step(self, iteration: int) -> None:
        """End an iteration and begin the next one; after the last one, write the trace."""
        if self._profile is not None:
            self._profile.step()
            if iteration >= self._last:
                self.close()

    def close(self) -> None:
        """Stop, and write the trace unless it has been written."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, finished: profile) -> None:
        def write() -> None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._handler(finished)

        self._attempts.run(write, last=True)


class CudaProfiler:
    """Starts CUDA's profiler after iteration `profile_step_start` and stops it after `profile_step_end`."""

    def __init__(self, config: ProfilingConfig, done: int) -> None:
        self._config = config
        self._open = contextlib.ExitStack()
        self.after_step(done)

    def after_step(self, iteration: int) -> None:
        """Start or stop if the iteration is one of the two."""
        if iteration == self._config.profile_step_start:
            torch.cuda.profiler.start()
            self._open.callback(torch.cuda.profiler.stop)
            self._open.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))
        elif iteration == self._config.profile_step_end:
            self.close()

    def close(self) -> None:
        """Stop unless stopped already."""
        self._open.close()


def build_profiler(
    config: ProfilingConfig, directory: str | None, rank: int, done: int
) -> TorchProfiler | CudaProfiler | None:
    """Start and return this rank's profiler; None if the rank is not profiled or its profile is over.

    `directory` is for traces of PyTorch's profiler; `done` is the number of finished iterations.
    """
    if not config.profile or rank not in config.profile_ranks or done >= config.profile_step_end:
        return None
    if not config.use_pytorch_profiler:
        return CudaProfiler(config, done)
    assert directory is not None
    return TorchProfiler(config, Path(directory), rank, done)
