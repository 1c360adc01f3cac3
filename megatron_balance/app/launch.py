"""Runs a command line to the end of its training, on every rank."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_balance.app.dry_run import dry_run
from megatron_balance.app.preflight import Preflight, preflight
from megatron_balance.app.watching import build_progress_log, watching
from megatron_balance.build.run import build_run
from megatron_balance.checkpoint.checkpoints import Checkpoints
from megatron_balance.checkpoint.save_directory import SaveDirectory
from megatron_balance.device import quiet
from megatron_balance.job import clocks, job, limits
from megatron_balance.job.collectives import Collectives
from megatron_balance.job.endings import Ending, guarded_exit, unbreakable_output
from megatron_balance.job.errors import CheckpointError, everywhere
from megatron_balance.job.groups import gather
from megatron_balance.job.hang_guard import HangGuard
from megatron_balance.observe.routing import LoadRecorder
from megatron_balance.training.logging import RunLog
from megatron_balance.training.loop import Stopping, train
from megatron_balance.training.loss_guard import PoisonedRun
from megatron_balance.training.run import Run

PROGRAM = "pretrain_gpt_moe.py"


@contextlib.contextmanager
def _leaving_together(*errors: type[Exception]) -> Iterator[None]:
    """End the program with the bare message, without a traceback, for errors that every rank raises alike."""
    try:
        yield
    except errors as error:
        raise Ending(f"{PROGRAM}: error: {error}") from error


@unbreakable_output()
@guarded_exit(PROGRAM)
def pretrain(argv: list[str]) -> None:
    """Check, join the job, build, train. A user's mistake ends every rank before anything is built."""
    with _leaving_together(ValueError):
        ready = preflight(argv)
        if ready.config.launch.dry_run:
            return dry_run(ready.config, ready.notices, ready.topology)
        store = _join(ready)
    now, notice = clocks.compare(ready.launch.rank)
    if notice is not None:
        ready.notices.append(notice)
    with _guarded(ready, store, now) as (hangs, save_directory, stopping):
        run, log, checkpoints = _prepare(ready, hangs, save_directory)
        _train(run, log, checkpoints, stopping)
        _finish_together()
    dist.destroy_process_group()


def _join(ready: Preflight) -> dist.Store:
    config = ready.config
    if config.log.logging_level is not None:
        quiet.show_logs(config.log.logging_level)
    torch.use_deterministic_algorithms(config.transformer.deterministic_mode)
    settings = config.launch
    return job.start(ready.launch, settings.distributed_backend, settings.distributed_timeout_minutes, ready.facts)


@contextlib.contextmanager
def _guarded(
    ready: Preflight, store: dist.Store, now: Callable[[], float]
) -> Iterator[tuple[HangGuard, SaveDirectory, Stopping]]:
    """Report ranks that stall or fail, note requests to stop, and lock `--save` against other jobs."""
    launch = ready.launch
    save = ready.config.checkpoint.save
    stopping = Stopping(ready.config.train)
    with contextlib.ExitStack() as stack:
        hangs = HangGuard(
            store,
            rank=launch.rank,
            world_size=launch.world_size,
            limit=ready.config.launch.distributed_timeout_minutes * 60,
            store_rank=launch.store_rank,
            collectives=stack.enter_context(Collectives(now=now).recorded()),
            now=now,
        )
        stack.enter_context(hangs)
        save_directory = SaveDirectory(Path(save) if save else None, launch)
        stack.enter_context(contextlib.closing(save_directory))
        stack.enter_context(stopping.listening())
        yield hangs, save_directory, stopping


@_leaving_together(ValueError, CheckpointError)
@limits.explained()
def _prepare(ready: Preflight, hangs: HangGuard, save_directory: SaveDirectory) -> tuple[Run, RunLog, Checkpoints]:
    # Before the model is built, because building takes minutes
    save_directory.prepare()
    run = build_run(ready.config, tokenizer=ready.tokenizer, policy=ready.policy)
    hangs.follow(run.position)
    log = everywhere(lambda: RunLog(run.config, run.length.iterations, run.vocab_size))
    for notice in ready.notices:
        log.message(f"note: {notice}")
    if run.balancer is not None:
        megabytes = run.balancer.guest_bytes / 1e6
        log.message(f"guest slots: {megabytes:.1f} MB of weights and gradients on this rank")
    patience = ready.config.launch.patience
    checkpoints = Checkpoints(run, log, patience=patience, save_directory=save_directory)
    checkpoints.prepare()
    checkpoints.load()
    checkpoints.progress = build_progress_log(run, log)
    record = None if run.balancer is None else run.balancer.record
    if record is not None and record.last < run.length.iterations:
        flag = f"--balance-calibrate {record.path}"
        log.message(f"note: {flag}: ends with iteration {record.last}; later plans keep its last factors")
    return run, log, checkpoints


@_leaving_together(CheckpointError, PoisonedRun)
def _train(run: Run, log: RunLog, checkpoints: Checkpoints, stopping: Stopping) -> None:
    resumed_at = run.progress.iteration
    recorder = LoadRecorder(run.model) if run.config.log.log_tokens_per_expert else None
    with log, watching(run) as after_step:
        train(run, log, save=checkpoints.after_step, stopping=stopping, after_step=after_step)
        if recorder is not None and run.progress.iteration > resumed_at:
            log.message(recorder.table(run.groups))


def _finish_together() -> None:
    """Wait for all ranks: a rank that exits early would look dead. `dist.barrier` would print a warning."""
    gather(None)
