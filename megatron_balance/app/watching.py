"""What a run shows besides its log line: recordings, profiles, memory, and progress in `--save`."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_balance.build.balancer import calibrated_job
from megatron_balance.config.log_config import LogConfig
from megatron_balance.device import memory
from megatron_balance.job.errors import raise_everywhere
from megatron_balance.observe.calibration_log import CalibrationLog
from megatron_balance.observe.load_log import LoadLog
from megatron_balance.observe.optional import Attempts
from megatron_balance.observe.profiler import build_profiler
from megatron_balance.observe.progress_log import ProgressLog
from megatron_balance.observe.routing import RoutingTrace
from megatron_balance.observe.trace import Timeline
from megatron_balance.training.logging import RunLog
from megatron_balance.training.loop import manual_gc, manual_gc_after_step
from megatron_balance.training.progress import StepReport
from megatron_balance.training.run import Run


@contextlib.contextmanager
def watching(run: Run) -> Iterator[Callable[[StepReport], None]]:
    """Yield a function to call after every iteration, which records, profiles, reports memory and collects garbage."""
    config = run.config
    done = run.progress.iteration
    rank = dist.get_rank()
    recordings = _Recordings(run)
    error = None
    try:
        recordings.open()
    except ValueError as failure:
        error = failure
    raise_everywhere(error)
    profiler = build_profiler(config.profiling, config.log.tensorboard_dir, rank, done)
    history = _history(run) if config.profiling.record_memory_history else None

    def after_step(report: StepReport) -> None:
        recordings.after_step(report)
        if profiler is not None:
            profiler.after_step(report.iteration)
        if history is not None and report.iteration % config.log.log_interval == 0:
            history()
        if run.groups.dp.rank() == 0 and memory_is_due(report.iteration, done, config.log):
            line = memory.line(config.log.log_device_memory_used)
            print(f"[Rank {rank}] (after {report.iteration} iterations) {line}", flush=True)
        manual_gc_after_step(config.train, report.iteration)

    with contextlib.closing(recordings), manual_gc(config.train):
        try:
            yield after_step
        finally:
            if profiler is not None:
                profiler.close()


class _Recordings:
    """Writes what flags ask for: the experts of each token, loads and placements, calibration, a timeline."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.trace: RoutingTrace | None = None
        self.loads: LoadLog | None = None
        self.factors: CalibrationLog | None = None
        self.timeline: Timeline | None = None

    def open(self) -> None:
        """Open the files.

        Raises:
            ValueError: one of them cannot be written, or does not fit this run.
        """
        run = self.run
        rank = dist.get_rank()
        done = run.progress.iteration
        settings = run.config.balance
        trace_path = run.config.log.moe_routing_trace_path
        if trace_path is not None:
            path = Path(trace_path)
            self.trace = RoutingTrace(run.model, path, rank, lambda: run.progress.iteration, done)
        if settings.balance_log_dir is not None and run.groups.ep.rank() == 0:
            self.loads = LoadLog(Path(settings.balance_log_dir), rank, done + 1)
        if run.balancer is not None and run.balancer.record is not None:
            run.balancer.record.check_start(done + 1)
        elif settings.balance_calibrate == "on" and settings.balance_log_dir is not None and rank == 0:
            self.factors = CalibrationLog(Path(settings.balance_log_dir), calibrated_job(run.config), done + 1)
        if settings.balance_timeline is not None and run.balancer is not None:
            self.timeline = run.balancer.timeline = Timeline(Path(settings.balance_timeline), rank)

    def after_step(self, report: StepReport) -> None:
        """Record an iteration. A resumed run continues from a checkpoint: earlier records must be on disk by then."""
        run = self.run
        intervals = (run.config.log.log_interval, run.config.checkpoint.save_interval)
        if self.trace is not None:
            self.trace.flush()
        if self.loads is not None and run.balancer is not None and run.balancer.layers:
            self.loads.add(report.iteration, run.balancer.loads())
            if any(report.iteration % interval == 0 for interval in intervals if interval):
                self.loads.flush()
        if self.factors is not None:
            self.factors.add(report.iteration, report.calibration)
            self.factors.flush()
        if self.timeline is not None and report.iteration % run.config.log.log_interval == 0:
            self.timeline.flush()

    def close(self) -> None:
        """Write what is left."""
        for record in (self.trace, self.loads, self.factors, self.timeline):
            if record is not None:
                record.flush(last=True)


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
    return ProgressLog(
        Path(config.checkpoint.save),
        run.progress.consumed_samples,
        flops_per_sample=log.flops_per_sample,
        tokens_per_sample=config.model.seq_length,
        world_size=dist.get_world_size(),
    )
