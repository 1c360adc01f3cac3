"""The training loop, which runs megatron-core's schedules, optimizer and scheduler in each iteration."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, track_moe_metrics
from megatron.core.utils import get_attr_wrapped_model

from megatron_balance.cost.calibration import UNCALIBRATED
from megatron_balance.observe.balance import LayerReport, mean_over_ranks
from megatron_balance.observe.profiling import record_function
from megatron_balance.training.data import Batch
from megatron_balance.training.fault_search import LossReports
from megatron_balance.training.logging import RunLog
from megatron_balance.training.progress import StepReport
from megatron_balance.training.run import Run
from megatron_balance.training.stopping import Stopping


class Saver(Protocol):
    """The interface of checkpoints that the loop uses."""

    def after_step(self, last: bool) -> None:
        """Save if a checkpoint is due; every rank calls this after each iteration.

        Args:
            last: whether this is the last iteration.
        """
        ...


def train(
    run: Run,
    log: RunLog,
    *,
    checkpoints: Saver | None = None,
    stopping: Stopping | None = None,
    after_step: Callable[[StepReport], None] | None = None,
) -> None:
    """Train until the end of the run, or until `stopping` returns a reason to stop; in both cases, save.

    Args:
        run: may be resumed; training continues after its `progress`.
        after_step: called after every iteration.
    """
    settings, progress = run.config.train, run.progress
    stopping = stopping or Stopping(settings)
    if progress.iteration >= run.length.iterations:
        log.message(f"nothing to train: the run is at iteration {progress.iteration} of {run.length.iterations}")
    while progress.iteration < run.length.iterations:
        report = train_step(run)
        log.step(report, progress)
        run.guard.review(report, progress, log.message)
        if after_step is not None:
            after_step(report)
        if settings.eval_interval and progress.iteration % settings.eval_interval == 0 and run.data.valid:
            log.evaluation("validation", progress, evaluate(run, run.data.valid))
            progress.consumed_valid_samples += settings.eval_iters * settings.global_batch_size
        reason = stopping.reason(progress.iteration)
        if checkpoints is not None:
            run.position.enter("checkpoint")
            checkpoints.after_step(last=reason is not None or progress.iteration == run.length.iterations)
        if reason is not None:
            log.message(f"exiting at iteration {progress.iteration} ({reason})")
            return
    if settings.eval_interval and run.data.test:
        log.evaluation("test", progress, evaluate(run, run.data.test))


def train_step(run: Run) -> StepReport:
    """Run one iteration: forward and backward of every microbatch, gradient reduction, one optimizer step."""
    start = time.perf_counter()
    progress = run.progress
    run.position.enter("forward-backward", progress.iteration + 1)
    run.batches.update(progress.consumed_samples, consistency_check=True)
    batch_size = run.batches.get_current_running_global_batch_size()
    for chunk in run.model:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    if run.balancer is not None:
        run.balancer.begin_iteration(progress.iteration + 1)

    repeat = functools.partial(_forward_backward, run, microbatches=run.batches.get(), forward_only=True)
    reports = _forward_backward(run, run.guard.begin(run.data.train), run.batches.get(), forward_only=False)
    fault = run.guard.fault(reports, repeat)
    run.position.enter("optimizer")
    with record_function("optimizer"):
        # megatron-core's abstract `step` has no return type
        stepped, grad_norm, _ = (False, None, None) if fault else run.optimizer.step()  # pyright: ignore[reportGeneralTypeIssues]
    if run.balancer is not None:
        run.balancer.transfer_owners()
    if stepped:
        run.scheduler.step(increment=batch_size)

    progress.iteration += 1
    progress.consumed_samples += batch_size
    progress.skipped_iterations += not stepped
    losses = _mean_losses(reports, run.groups) | _auxiliary_losses(run)
    progress.nan_iterations += fault is not None or any(value != value for value in losses.values())
    progress.bad_in_a_row = progress.bad_in_a_row + 1 if fault else 0
    torch.cuda.synchronize()
    balance = _balance_reports(run)
    return StepReport(
        iteration=progress.iteration,
        losses=losses,
        grad_norm=None if grad_norm is None else float(grad_norm),
        learning_rate=get_canonical_lr_for_logging(run.optimizer.param_groups),
        loss_scale=float(run.optimizer.get_loss_scale()),
        global_batch_size=batch_size,
        skipped=not stepped,
        seconds=time.perf_counter() - start,
        balance=balance,
        calibration=UNCALIBRATED if run.balancer is None else run.balancer.factors,
        fault=fault,
    )


@torch.no_grad()
def evaluate(run: Run, data: list[Iterator[Batch]]) -> dict[str, float]:
    """Return the mean losses over `--eval-iters` global batches; empty except on the last pipeline stage."""
    run.position.enter("evaluation")
    for chunk in run.model:
        chunk.eval()
    microbatches = run.config.train.global_batch_size // (run.config.train.micro_batch_size * run.groups.dp.size())
    reports = _forward_backward(run, data, microbatches * run.config.train.eval_iters, forward_only=True)
    for chunk in run.model:
        chunk.train()
    clear_aux_losses_tracker()
    return _mean_losses(reports, run.groups)


def _forward_backward(run: Run, data: list[Iterator[Batch]], microbatches: int, forward_only: bool) -> LossReports:
    """Run all microbatches and return this rank's losses of each; empty except on the last pipeline stage."""
    config, stages = run.config.transformer, run.groups.pp.size()
    chunks: list[torch.nn.Module] = [*run.model]
    single = len(chunks) == 1

    def counted_forward_step(data: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        run.position.advance()
        return forward_step(data, model)

    return get_forward_backward_func(stages, config.virtual_pipeline_model_parallel_size)(
        forward_step_func=counted_forward_step,
        data_iterator=data[0] if single else data,
        model=chunks[0] if single else chunks,
        num_microbatches=microbatches,
        seq_length=run.config.model.seq_length,
        micro_batch_size=run.config.train.micro_batch_size,
        forward_only=forward_only,
    )


def forward_step(data: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """Run one microbatch through one model chunk; return the output and its loss function."""
    first, last = get_attr_wrapped_model(model, "pre_process"), get_attr_wrapped_model(model, "post_process")
    batch = next(data) if first or last else {}
    output = model(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"))
    return output, functools.partial(token_loss, batch.get("loss_mask"))


def token_loss(
    loss_mask: torch.Tensor | None, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of a microbatch, its number of tokens, and both of them for the log.

    Args:
        loss_mask: [b, s], 1 for tokens that count.
        losses: [b, s], cross entropy of every token.
    """
    assert loss_mask is not None, "only the last pipeline stage computes losses"
    mask = loss_mask.reshape(-1).float()
    loss = (losses.reshape(-1).float() * mask).sum()
    tokens = mask.sum()
    # The schedule divides `loss` in place, so the log needs a copy
    return loss, tokens.int(), {"lm loss": torch.stack([loss.detach(), tokens]).clone()}


def _mean_losses(reports: LossReports, groups: ProcessGroupCollection) -> dict[str, float]:
    """Return the per-token means over the microbatches and data-parallel ranks of the last pipeline stage."""
    if not is_pp_last_stage(groups.pp) or not reports:
        return {}
    means = {}
    for name in reports[0]:
        total = torch.stack([report[name] for report in reports]).sum(0)
        dist.all_reduce(total, group=groups.dp_cp)
        means[name] = (total[0] / total[1]).item()
    return means


def _balance_reports(run: Run) -> dict[int, LayerReport]:
    if run.balancer is None:
        return {}
    reports = mean_over_ranks(run.balancer.report(), run.config.transformer.num_layers)
    run.balancer.calibrate(reports)
    return reports


def _auxiliary_losses(run: Run) -> dict[str, float]:
    """Return megatron-core's auxiliary losses, averaged over the MoE layers, and clear its tracker."""
    config = run.config.transformer
    if config.num_moe_experts is None:
        return {}
    totals: dict[str, torch.Tensor] = {}
    track_moe_metrics(
        loss_scale=1 / run.batches.get(),
        iteration=run.progress.iteration,
        total_loss_dict=totals,
        # All pipeline stages must reduce the same names, even a stage without an MoE layer
        force_initialize=True,
        track_names=_auxiliary_loss_names(config.moe_router_load_balancing_type, config.moe_z_loss_coeff),
        num_layers=config.num_layers,
        moe_layer_freq=config.moe_layer_freq,
        pg_collection=run.groups,
    )
    return {name: value.item() for name, value in totals.items()}


def _auxiliary_loss_names(balancing: str | list[str], z_loss: float | None) -> list[str]:
    logged = {
        "aux_loss": "load_balancing_loss",
        "seq_aux_loss": "seq_load_balancing_loss",
        "global_aux_loss": "global_load_balancing_loss",
    }
    kinds = [balancing] if isinstance(balancing, str) else balancing
    return [logged[kind] for kind in kinds if kind in logged] + (["z_loss"] if z_loss is not None else [])
