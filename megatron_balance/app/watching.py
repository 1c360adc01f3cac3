"""What a run shows besides its log line: profiles, memory, and progress in `--save`."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_balance.config.log_config import LogConfig
from megatron_balance.device import memory
from megatron_balance.observe.optional import Attempts
from megatron_balance.observe.profiler import build_profiler
from megatron_balance.observe.progress_log import ProgressLog
from megatron_balance.training.logging import RunLog
from megatron_balance.training.loop import manual_gc, manual_gc_after_step
from megatron_balance.training.progress import StepReport
from megatron_balance.training.run import Run


@contextlib.contextmanager
def watching(run: Run) -> Iterator[Callable[[StepReport], None]]:
    """Yield a function to call after every iteration, which profiles, reports memory and collects garbage."""
    config = run.config
    done = run.progress.iteration
    rank = dist.get_rank()
    profiler = build_profiler(config.profiling, config.log.tensorboard_dir, rank, done)
    history = _history(run) if config.profiling.record_memory_history else None

    def after_step(report: StepReport) -> None:
        if profiler is not None:
            profiler.after_step(report.iteration)
        if history is not None and report.iteration % config.log.log_interval == 0:
            history()
        if run.groups.dp.rank() == 0 and memory_is_due(report.iteration, done, config.log):
            line = memory.line(config.log.log_device_memory_used)
            print(f"[Rank {rank}] (after {report.iteration} iterations) {line}", flush=True)
        manual_gc_after_step(config.train, report.iteration)

    with manual_gc(config.train):
        try:
            yield after_step
        finally:
            if profiler is not None:
                profiler.close()


def memory_is_due(iteration: int, done: int, log: LogConfig) -> bool:
    """Return whether ranks report their memory: after the first iteration, at the next log line, and at intervals.

    The optimizer allocates its state in the first iteration that does not overflow.

    Args:
        done: number of iterations before this job.
    """
    first_line = ((done + 1) // log.log_interval + 1) * log.log_interval
    due = log.log_memory_interval is not None and iteration % log.log_memory_interval == 0
    return iteration in (done + 1, first_line) or due


def _history(run: Run) -> Callable[[], None]:
    """Start to record allocations; return a function that writes those of the last rank."""
    settings = run.config.profiling
    rank = dist.get_rank()
    path = Path(settings.memory_snapshot_path)
    memory.record_history(path.with_name(f"oom_rank-{rank}_{path.name}"))
    attempts = Attempts(f"--memory-snapshot-path {path}")

    def write() -> None:
        if rank == dist.get_world_size() - 1:
            attempts.run(lambda: memory.write_history(path))

    return write


def build_progress_log(run: Run, log: RunLog) -> ProgressLog | None:
    """Return the log of progress in `--save` and begin it, on the first rank; None elsewhere, and without the flag."""
    config = run.config
    if not config.log.log_progress or config.checkpoint.save is None or dist.get_rank() != 0:
        return None
    assert config.model.seq_length is not None
    progress = ProgressLog(
        Path(config.checkpoint.save),
        flops_per_sample=log.flops_per_sample,
        tokens_per_sample=config.model.seq_length,
        world_size=dist.get_world_size(),
    )
    progress.start(run.progress.consumed_samples)
    return progress
