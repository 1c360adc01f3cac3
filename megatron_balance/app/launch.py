"""From a command line to a finished run, on every rank."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

from megatron_balance.app import facts, preflight
from megatron_balance.app.dry_run import dry_run
from megatron_balance.app.watching import build_progress_log, watching
from megatron_balance.build.balancer import calibrated_job, patience
from megatron_balance.build.run import build_run
from megatron_balance.checkpoint.checkpoints import Checkpoints
from megatron_balance.checkpoint.save_directory import SaveDirectory
from megatron_balance.cli.arguments import Parsed, parse_args
from megatron_balance.config.run_config import RunConfig
from megatron_balance.device import quiet
from megatron_balance.device.machine import Machine
from megatron_balance.job import job, limits
from megatron_balance.job.collectives import Collectives
from megatron_balance.job.endings import Ending, guarded_exit, unbreakable_output
from megatron_balance.job.errors import CheckpointError, raise_everywhere
from megatron_balance.job.groups import Topology, expert_node_size
from megatron_balance.job.hang_guard import HangGuard
from megatron_balance.observe.calibration_log import CalibrationLog
from megatron_balance.observe.load_log import LoadLog
from megatron_balance.observe.routing import LoadRecorder, RoutingTrace
from megatron_balance.observe.trace import Timeline
from megatron_balance.planning.policy_process import PolicyProcess
from megatron_balance.training.data import batch_bytes
from megatron_balance.training.logging import RunLog
from megatron_balance.training.loop import Stopping, train
from megatron_balance.training.loss_guard import PoisonedRun
from megatron_balance.training.progress import StepReport
from megatron_balance.training.run import Run
from megatron_balance.training.tokenizer import build_tokenizer, vocabulary

PROGRAM = "pretrain_gpt_moe.py"


@unbreakable_output()
@guarded_exit(PROGRAM)
def pretrain(argv: list[str]) -> None:
    """Parse, check, join the job, build, train. A user's mistake ends every rank before anything is built."""
    with _leaving_together(ValueError):
        launch = job.Launch.from_environment()
        with job.declining_on_error(launch):
            asked = _asked(argv, launch)
        config = asked.config
        if config.launch.dry_run:
            return dry_run(config, asked.parsed.notices, asked.topology)
        if config.log.logging_level is not None:
            quiet.show_logs(config.log.logging_level)
        torch.use_deterministic_algorithms(config.transformer.deterministic_mode)
        store = _join(launch, asked)
    stopping = Stopping(config.train)
    timeout = config.launch.distributed_timeout_minutes * 60
    with (
        Collectives().recorded() as collectives,
        HangGuard(
            store,
            rank=launch.rank,
            world_size=launch.world_size,
            limit=timeout,
            store_rank=launch.store_rank,
            collectives=collectives,
        ) as guard,
    ):
        held = SaveDirectory(Path(config.checkpoint.save) if config.checkpoint.save else None, launch)
        with stopping.listening(), contextlib.closing(held):
            with _leaving_together(ValueError, CheckpointError), limits.explained():
                # Before the model is built, which takes minutes
                held.prepare()
                run, log, checkpoints = _prepare(asked, guard, held)
            resumed_at = run.progress.iteration
            recorder = LoadRecorder(run.model) if config.log.log_tokens_per_expert else None
            with (
                _leaving_together(CheckpointError, PoisonedRun),
                log,
                _recording(run) as record,
                watching(run) as watch,
            ):
                after_step = functools.partial(_each, (record, watch))
                save = None if checkpoints is None else checkpoints.after_step
                train(run, log, save=save, stopping=stopping, after_step=after_step)
                if recorder is not None and run.progress.iteration > resumed_at:
                    log.message(recorder.table(run.groups))
        _finish_together()
    dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A command line that passed this rank's checks, with what was built from it before the job started."""

    parsed: Parsed
    config: RunConfig
    """The parsed configuration, completed with the size of nodes."""

    topology: Topology
    tokenizer: MegatronTokenizerBase
    policy: PolicyProcess | None
    """A user's policy in its own process; None for a policy of this package."""


def _asked(argv: list[str], launch: job.Launch) -> _Asked:
    parsed = parse_args(argv, Machine.here(launch.world_size))
    config = parsed.config
    topology = job.node_topology(launch, config.comm.moe_comm_node_size)
    if config.balance.balance_policy != "none":
        expert_tensor_parallel = config.transformer.expert_tensor_parallel_size
        assert expert_tensor_parallel is not None
        expert_node_size(topology, config.transformer.expert_model_parallel_size, expert_tensor_parallel)
    # The policy's process imports and builds it while this rank does other work
    policy = _start_policy(config)
    tokenizer = build_tokenizer(config.tokenizer)
    notices = preflight.check(config, topology, launch.rank, vocabulary(tokenizer, config.tokenizer))
    parsed.notices.extend(notices)
    if policy is not None:
        policy.ready(patience(config.launch.distributed_timeout_minutes))
    config = config.replace(comm=dataclasses.replace(config.comm, moe_comm_node_size=topology.node_size))
    return _Asked(parsed=parsed, config=config, topology=topology, tokenizer=tokenizer, policy=policy)


def _start_policy(config: RunConfig) -> PolicyProcess | None:
    """Start and return the policy's process if it needs one; a dry run starts one later for each stage."""
    name = config.balance.balance_policy
    return PolicyProcess(name, {}) if ":" in name and not config.launch.dry_run else None


def _join(launch: job.Launch, asked: _Asked) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
    """Check that the machine has the resources that the job needs and that all ranks agree, and join the job."""
    config = asked.config
    assert config.train.micro_batch_size is not None and config.model.seq_length is not None
    microbatch = batch_bytes(config.train.micro_batch_size, config.model.seq_length)
    with job.declining_on_error(launch):
        limits.shared_memory(config.data.num_workers, microbatch, launch.local_world_size)
    gather = functools.partial(facts.gather, asked.parsed, asked.topology)
    return job.start(launch, config.launch.distributed_backend, config.launch.distributed_timeout_minutes, gather)


def _prepare(asked: _Asked, guard: HangGuard, held: SaveDirectory) -> tuple[Run, RunLog, Checkpoints]:
    run = build_run(asked.config, tokenizer=asked.tokenizer, policy=asked.policy)
    guard.follow(run.position)
    log = _run_log(run)
    for notice in asked.parsed.notices:
        log.message(f"note: {notice}")
    if run.balancer is not None:
        megabytes = run.balancer.guest_bytes / 1e6
        log.message(f"guest slots: {megabytes:.1f} MB of weights and gradients on this rank")
    minutes = asked.config.launch.distributed_timeout_minutes
    checkpoints = Checkpoints(run, log, patience=patience(minutes), save_directory=held)
    checkpoints.prepare()
    checkpoints.load()
    checkpoints.progress = build_progress_log(run, log)
    record = None if run.balancer is None else run.balancer.record
    if record is not None and record.last < run.length.iterations:
        flag = f"--balance-calibrate {record.path}"
        log.message(f"note: {flag}: ends with iteration {record.last}; later plans keep its last factors")
    return run, log, checkpoints


def _run_log(run: Run) -> RunLog:
    """Return the log of a run; if any rank cannot write its log, all ranks raise."""
    log = None
    error = None
    try:
        log = RunLog(run.config, run.length.iterations, run.vocab_size)
    except ValueError as failure:
        error = failure
    raise_everywhere(error)
    assert log is not None
    return log


@contextlib.contextmanager
def _recording(run: Run) -> Iterator[Callable[[StepReport], None]]:
    """Yield a function to call after every iteration, which writes the recordings that flags ask for."""
    rank = dist.get_rank()
    done = run.progress.iteration
    trace_path = run.config.log.moe_routing_trace_path
    balance = run.config.balance
    intervals = (run.config.log.log_interval, run.config.checkpoint.save_interval)
    trace = None
    loads = None
    factors = None
    timeline = None
    error = None
    try:
        if trace_path is not None:
            trace = RoutingTrace(run.model, Path(trace_path), rank, lambda: run.progress.iteration, first_step=done)
        if balance.balance_log_dir is not None and run.groups.ep.rank() == 0:
            loads = LoadLog(Path(balance.balance_log_dir), rank, done + 1)
        if run.balancer is not None and run.balancer.record is not None:
            run.balancer.record.check_start(done + 1)
        elif balance.balance_calibrate == "on" and balance.balance_log_dir is not None and rank == 0:
            factors = CalibrationLog(Path(balance.balance_log_dir), calibrated_job(run.config), done + 1)
        if balance.balance_timeline is not None and run.balancer is not None:
            timeline = run.balancer.timeline = Timeline(Path(balance.balance_timeline), rank)
    except ValueError as failure:
        error = failure
    raise_everywhere(error)

    def after_step(report: StepReport) -> None:
        if trace is not None:
            trace.flush()
        if loads is not None and run.balancer is not None and run.balancer.layers:
            loads.add(report.iteration, run.balancer.loads())
            # A resumed run continues from a checkpoint: earlier loads must be on disk by then
            if any(report.iteration % interval == 0 for interval in intervals if interval):
                loads.flush()
        if factors is not None:
            factors.add(report.iteration, report.calibration)
            # As the loads, it must be on disk when a checkpoint is
            factors.flush()
        if timeline is not None and report.iteration % run.config.log.log_interval == 0:
            timeline.flush()

    try:
        yield after_step
    finally:
        for record in (trace, loads, factors, timeline):
            if record is not None:
                record.flush(last=True)


def _each(functions: Iterable[Callable[[StepReport], None]], report: StepReport) -> None:
    for function in functions:
        function(report)


@contextlib.contextmanager
def _leaving_together(*errors: type[Exception]) -> Iterator[None]:
    """End the program with the message alone for errors that every rank raises alike, without a traceback."""
    try:
        yield
    except errors as error:
        raise Ending(f"{PROGRAM}: error: {error}") from error


def _finish_together() -> None:
    """Wait for all ranks: a rank that exits early would look dead. `dist.barrier` would print a warning."""
    finished = torch.zeros(1, device=torch.cuda.current_device())
    dist.all_reduce(finished)
    finished.item()
