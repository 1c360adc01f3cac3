"""Output of a run besides its log line: recordings, profiles, memory, and progress in `--save`."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_balance.build.balancer import calibrated_job
from megatron_balance.config.training_config import LogConfig
from megatron_balance.device import memory
from megatron_balance.job.errors import CheckpointError, everywhere
from megatron_balance.observe.calibration_log import CalibrationLog
from megatron_balance.observe.load_log import LoadLog
from megatron_balance.observe.optional import Attempts
from megatron_balance.observe.profiler import build_profiler
from megatron_balance.observe.progress_log import ProgressLog
from megatron_balance.observe.routing import RoutingTrace
from megatron_balance.observe.trace import Timeline
from megatron_balance.training.logging import RunLog
from megatron_balance.training.progress import StepReport
from megatron_balance.training.run import Run


@contextlib.contextmanager
def watching(run: Run) -> Iterator[Callable[[StepReport], None]]:
    """Yield a function to call after every iteration. It records, profiles, reports memory and collects garbage."""
    config = run.config
    done = run.progress.iteration
    rank = dist.get_rank()
    with contextlib.ExitStack() as closing:
        records = everywhere(lambda: list(_open_records(run, closing)), CheckpointError)
        profiler = build_profiler(config.profiling, config.log.tensorboard_dir, rank, done)
        if profiler is not None:
            closing.callback(profiler.close)
        history = _history(run) if config.profiling.record_memory_history else None

        def after_step(report: StepReport) -> None:
            for record in records:
                record(report)
            if profiler is not None:
                profiler.after_step(report.iteration)
            if history is not None and report.iteration % config.log.log_interval == 0:
                history()
            if run.groups.dp.rank() == 0 and memory_is_due(report.iteration, done, config.log):
                line = memory.line(config.log.log_device_memory_used)
                print(f"[Rank {rank}] (after {report.iteration} iterations) {line}\n", end="", flush=True)
            interval = config.train.manual_gc_interval
            if config.train.manual_gc and interval and report.iteration % interval == 0:
                gc.collect()

        if config.train.manual_gc:
            # If each rank collected garbage by its own counters, the others would wait for it in the next collective
            gc.disable()
            closing.callback(gc.enable)
            gc.collect()
        yield after_step


def _open_records(run: Run, closing: contextlib.ExitStack) -> Iterator[Callable[[StepReport], None]]:
    """Open the records that flags request, and yield functions to call after every iteration; ValueError if it fails.

    A resumed run continues from a checkpoint, so earlier records must be on disk by then.
    """
    config = run.config
    rank = dist.get_rank()
    done = run.progress.iteration
    balancer = run.balancer
    log_directory = config.balance.balance_log_dir
    if config.log.moe_routing_trace_path is not None:
        path = Path(config.log.moe_routing_trace_path)
        trace = RoutingTrace(
            run.model,
            path,
            rank,
            run.part,
            step=lambda: run.progress.iteration,
            consumed=lambda: run.progress.consumed_samples,
            first_step=done,
        )
        closing.callback(trace.flush, last=True)
        yield lambda report: trace.flush()
    if log_directory is not None and run.groups.ep.rank() == 0:
        loads = LoadLog(Path(log_directory), rank, done + 1)
        closing.callback(loads.flush, last=True)
        intervals = [one for one in (config.log.log_interval, config.checkpoint.save_interval) if one]

        def add_loads(report: StepReport) -> None:
            if balancer is not None and balancer.layers:
                loads.add(report.iteration, balancer.loads())
                if any(report.iteration % interval == 0 for interval in intervals):
                    loads.flush()

        yield add_loads
    if run.recorded is not None:
        # A checkpoint may continue from before the recorded iterations
        run.recorded.check_iterations(done, run.length.iterations)
    if balancer is not None and balancer.record is not None:
        balancer.record.check_start(done + 1)
    elif config.balance.balance_calibrate == "on" and log_directory is not None and rank == 0:
        factors = CalibrationLog(Path(log_directory), calibrated_job(config), done + 1)
        closing.callback(factors.flush, last=True)

        def add_factors(report: StepReport) -> None:
            factors.add(report.iteration, report.calibration)
            factors.flush()

        yield add_factors
    if config.balance.balance_timeline is not None and balancer is not None:
        timeline = balancer.timeline = Timeline(Path(config.balance.balance_timeline), rank)
        closing.callback(timeline.flush, last=True)
        yield lambda report: timeline.flush() if report.iteration % config.log.log_interval == 0 else None


def memory_is_due(iteration: int, done: int, log: LogConfig) -> bool:
    """Return whether memory is due: in the first iteration (`done` + 1), at the next log line, and at intervals."""
    first_line = ((done + 1) // log.log_interval + 1) * log.log_interval
    due = log.log_memory_interval is not None and iteration % log.log_memory_interval == 0
    return iteration in (done + 1, first_line) or due


def _history(run: Run) -> Callable[[], None]:
    """Start to record allocations; return a function that writes the last rank's record."""
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
    """Begin the log of progress in `--save` on the first rank; None on other ranks and without the flag."""
    config = run.config
    if not config.log.log_progress or config.checkpoint.save is None or dist.get_rank() != 0:
        return None
    return ProgressLog(
        Path(config.checkpoint.save),
        run.progress.consumed_samples,
        flops_per_sample=log.flops_per_sample,
        tokens_per_sample=config.model.seq_length,
        world_size=dist.get_world_size(),
    )
