"""The training loop: the order of events in an iteration, and when a run evaluates, saves and stops."""

import contextlib
import functools
import gc
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model

from megatron_balance.config.run_config import RunConfig, TrainConfig
from megatron_balance.cost.calibration import UNCALIBRATED
from megatron_balance.device import clock, host_memory
from megatron_balance.observe.profiler import record_function
from megatron_balance.training import optimizer_step
from megatron_balance.training.data import Batch
from megatron_balance.training.fault_search import LossReports
from megatron_balance.training.logging import RunLog, moe_layer_pattern
from megatron_balance.training.objective import Objective
from megatron_balance.training.progress import Queued, Reports, StepReport
from megatron_balance.training.run import Run


class Stopping:
    """Decides after every iteration whether the run continues; all ranks stop at the same iteration."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.start = time.monotonic()
        self.signalled = False
        self._states: torch.Tensor | None = None
        """[2] whether any rank was signalled, and whether any rank's time was up, after the previous iteration."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """With `--exit-signal-handler`, record `--exit-signal` instead of being killed by it."""
        if not self.config.exit_signal_handler:
            yield
            return
        previous = signal.signal(self.config.exit_signal, self._note)
        try:
            yield
        finally:
            signal.signal(self.config.exit_signal, previous)

    def _note(self, number: int, frame: object) -> None:
        self.signalled = True

    def reason(self, iteration: int) -> str | None:
        """Return the reason to stop after this iteration, or None; collective if a signal or a time limit is set.

        A signal or a time limit ends the run one iteration later, when the device has finished the collective.
        """
        config = self.config
        if config.exit_interval and iteration % config.exit_interval == 0:
            return f"--exit-interval {config.exit_interval}"
        limit = config.exit_duration_in_mins
        if not config.exit_signal_handler and limit is None:
            return None
        late = limit is not None and time.monotonic() - self.start > limit * 60
        before = self._states
        # Any rank's signal or clock decides for all ranks
        states = host_memory.to_current_device([self.signalled, late], torch.int32)
        dist.all_reduce(states, op=dist.ReduceOp.MAX)
        self._states = host_memory.to_host(states)
        signalled, late = (False, False) if before is None else before.tolist()
        if signalled:
            return f"{config.exit_signal.name} was received"
        return f"--exit-duration-in-mins {limit}" if late else None


def train(
    run: Run,
    log: RunLog,
    *,
    save: Callable[[bool], None] = lambda is_last: None,
    stopping: Stopping | None = None,
    after_step: Callable[[StepReport], None] = lambda report: None,
) -> None:
    """Train from `run.progress` until the end of the run, or until `stopping` returns a reason to stop.

    After every iteration, `save` gets whether it is the last one, and saves if a checkpoint is due; `after_step` gets a
    report that may lack numbers that the device has not finished.
    """
    settings = run.config.train
    progress = run.progress
    stopping = stopping or Stopping(settings)
    reports = Reports(run.balancer, len(moe_layer_pattern(run.config.transformer)))
    # Intervals at which the log line, TensorBoard or Weights & Biases show an iteration
    shown = (run.config.log.log_interval, run.config.log.record_interval)
    # Intervals at which all reports must be complete: the log line, checkpoints, evaluations
    waits = (run.config.log.log_interval, run.config.checkpoint.save_interval, settings.eval_interval)
    if progress.iteration >= run.length.iterations:
        log.message(f"nothing to train: the run is at iteration {progress.iteration} of {run.length.iterations}")
    while progress.iteration < run.length.iterations:
        queued = queue_step(run, read=_is_due(progress.iteration + 1, shown))
        last = progress.iteration == run.length.iterations
        complete = reports.add(queued)
        if last or _is_due(progress.iteration, waits):
            complete += reports.wait()
        for report in complete:
            log.step(report, progress)
        run.guard.review(queued.report, progress, log.message)
        after_step(queued.report)
        if run.data.valid and _is_due(progress.iteration, [settings.eval_interval]):
            log.evaluation("validation", progress, evaluate(run, run.data.valid))
            progress.consumed_valid_samples += settings.eval_iters * settings.global_batch_size
        reason = stopping.reason(progress.iteration)
        for report in reports.wait() if reason is not None else ():
            log.step(report, progress)
        run.position.enter("checkpoint")
        save(last or reason is not None)
        if reason is not None:
            log.message(f"exiting at iteration {progress.iteration} ({reason})")
            return
    if settings.eval_interval and run.data.test:
        log.evaluation("test", progress, evaluate(run, run.data.test))


def _is_due(iteration: int, intervals: Iterable[int | None]) -> bool:
    return any(iteration % interval == 0 for interval in intervals if interval)


def train_step(run: Run) -> StepReport:
    """Run one iteration, wait until the device has finished it, and return its complete report."""
    reports = Reports(run.balancer, len(moe_layer_pattern(run.config.transformer)))
    reports.add(queue_step(run))
    return reports.wait()[0]


def queue_step(run: Run, read: bool = True) -> Queued:
    """Run one iteration; `read`: whether the numbers that take time, such as balance, will be read."""
    # Phase 1: begin the iteration
    progress = run.progress
    start = clock.mark()
    run.position.enter("forward-backward", progress.iteration + 1)
    run.batches.update(progress.consumed_samples, consistency_check=True)
    batch_size = run.batches.get_current_running_global_batch_size()
    microbatches = run.batches.get()
    for chunk in run.model:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    if run.balancer is not None:
        run.balancer.begin_iteration(progress.iteration + 1)
    data = run.objective.begin(run.guard.begin(run.data.train), microbatches)

    # Phase 2: compute gradients
    losses = _forward_backward(run, data, microbatches, forward_only=False)

    # Phase 3: wait for the device, only once per iteration unless there is a fault to search for
    run.position.enter("optimizer")
    known = _known(run, losses, read)
    repeat = functools.partial(_forward_backward, run, microbatches=microbatches, forward_only=True)
    fault = run.guard.fault(losses, repeat) if known.bad else None

    # Phase 4: change the weights
    stepped = False
    grad_norm = None
    num_zeros = None
    with record_function("optimizer"), _timed(run.config, "optimizer"):
        if fault is None:
            stepped, grad_norm, num_zeros = optimizer_step.step(run.optimizer, known.squared_norms, known.zeros)
    log_norm = read and run.config.log.log_params_norm
    squares = host_memory.to_host(optimizer_step.squared_parameter_norms(run.optimizer)) if log_norm else None
    if run.balancer is not None:
        run.balancer.transfer_owners()
    if stepped:
        run.scheduler.step(increment=batch_size)
    else:
        run.guard.restore_expert_biases()

    # Phase 5: count and report
    nan = any(math.isnan(value) for value in known.losses.values())
    progress.advance(batch_size, skipped=not stepped, bad=fault is not None, nan=nan)
    scaled = optimizer_step.scales_losses(run.optimizer)
    report = StepReport(
        iteration=progress.iteration,
        losses=known.losses,
        grad_norm=None if grad_norm is None else float(grad_norm),
        learning_rate=get_canonical_lr_for_logging(run.optimizer.param_groups),
        loss_scale=float(run.optimizer.get_loss_scale()) if scaled else 1.0,
        global_batch_size=batch_size,
        consumed_samples=progress.consumed_samples,
        skipped=not stepped,
        calibration=UNCALIBRATED if run.balancer is None else run.balancer.factors,
        fault=fault,
        num_zeros=num_zeros,
        layer_losses=known.layer_losses,
    )
    with_balance = read or run.config.balance.balance_calibrate == "on"
    balance = run.balancer.finished() if run.balancer is not None and with_balance else None
    return Queued(report, start, clock.mark(), balance, squares)


class Known(NamedTuple):
    """Numbers that the host reads before the optimizer's step; no step is allowed if `bad`."""

    bad: bool
    losses: dict[str, float]
    squared_norms: list[float]
    zeros: list[float] | None
    layer_losses: dict[str, list[float]]


def _known(run: Run, reports: LossReports, read: bool) -> Known:
    """Compute on the device all numbers that the host needs before the step, and read them together."""
    bad = run.guard.evidence(reports)
    count = read and run.config.optimizer.log_num_zeros_in_grad
    norms, zeros = optimizer_step.statistics(run.optimizer, count)
    losses = _mean_losses(reports, run.groups)
    layers = moe_layer_pattern(run.config.transformer)
    auxiliary, by_layer = run.objective.mean_router_losses(layers, run.batches.get())
    losses |= auxiliary
    by_layer = by_layer if read and run.config.transformer.moe_per_layer_logging else {}
    tensors = [bad, *norms, *zeros, *losses.values(), *by_layer.values()]
    numbers = iter(torch.cat([tensor.reshape(-1).float() for tensor in tensors]).tolist())
    return Known(
        bad=next(numbers) > 0,
        squared_norms=list(islice(numbers, len(norms))),
        zeros=list(islice(numbers, len(zeros))) if count else None,
        losses={name: next(numbers) for name in losses},
        layer_losses={name: list(islice(numbers, len(values))) for name, values in by_layer.items()},
    )


@torch.no_grad()
def evaluate(run: Run, data: list[Iterator[Batch]]) -> dict[str, float]:
    """Return the mean losses over `--eval-iters` global batches; empty except on the last pipeline stage."""
    run.position.enter("evaluation")
    for chunk in run.model:
        chunk.eval()
    microbatches = run.config.train.global_batch_size // (run.config.train.micro_batch_size * run.groups.dp.size())
    timers = run.config.transformer.timers
    run.config.transformer.timers = None
    collects = run.config.train.manual_gc and run.config.train.manual_gc_eval
    if collects:
        gc.collect()
    reports = _forward_backward(run, data, microbatches * run.config.train.eval_iters, forward_only=True)
    if collects:
        gc.collect(generation=0)
    run.config.transformer.timers = timers
    for chunk in run.model:
        chunk.train()
    return {name: value.item() for name, value in _mean_losses(reports, run.groups).items()}


@contextlib.contextmanager
def _timed(config: RunConfig, name: str) -> Iterator[None]:
    """Time an operation that runs once per iteration, if `--timing-log-level` is at least 1."""
    timers: Any = config.transformer.timers
    if timers is not None:
        timers(name, log_level=1).start(barrier=config.transformer.barrier_with_L1_time)
    yield
    if timers is not None:
        timers(name).stop()


def _forward_backward(run: Run, data: list[Iterator[Batch]], microbatches: int, forward_only: bool) -> LossReports:
    """Run all microbatches and return their losses on this rank; empty except on the last pipeline stage."""
    config = run.config.transformer
    interleaved = config.virtual_pipeline_model_parallel_size is not None

    def counted_forward_step(data: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        run.position.advance()
        return forward_step(data, model, run.objective, config.timers, run.config.data.documents_apart)

    with contextlib.nullcontext() if run.pairs is None else run.pairs.in_schedules():
        return get_forward_backward_func(run.groups.pp.size(), config.virtual_pipeline_model_parallel_size)(
            forward_step_func=counted_forward_step,
            data_iterator=data if interleaved else data[0],
            model=[*run.model] if interleaved else run.model[0],
            num_microbatches=microbatches,
            seq_length=run.config.model.seq_length,
            micro_batch_size=run.config.train.micro_batch_size,
            forward_only=forward_only,
        )


def forward_step(
    data: Iterator[Batch],
    model: torch.nn.Module,
    objective: Objective,
    timers: Callable | None = None,
    documents_apart: bool = False,
) -> tuple[torch.Tensor, Callable]:
    """Run one microbatch through one model chunk; return the output and its loss function."""
    first = get_attr_wrapped_model(model, "pre_process")
    last = get_attr_wrapped_model(model, "post_process")
    if timers is not None:
        timers("batch-generator", log_level=2).start()
    batch = next(data) if first or last or documents_apart else {}
    if timers is not None:
        timers("batch-generator").stop()
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        # Our attention takes the documents in place of a mask
        batch.get("documents"),
        labels=batch.get("labels"),
        # Only multi-token prediction reads the mask here
        loss_mask=batch.get("loss_mask"),
    )
    return output, functools.partial(objective.loss, model, batch)


def _mean_losses(reports: LossReports, groups: ProcessGroupCollection) -> dict[str, torch.Tensor]:
    """Return the per-token means over the microbatches and data-parallel ranks of the last pipeline stage."""
    if not is_pp_last_stage(groups.pp) or not reports:
        return {}
    means = {}
    for name in reports[0]:
        total = torch.stack([report[name] for report in reports]).sum(0)
        dist.all_reduce(total, group=groups.dp_cp)
        means[name] = total[0] / total[1]
    return means
