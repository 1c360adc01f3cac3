"""Output of a run: Megatron's log line, TensorBoard, Weights & Biases and evaluation results."""

import dataclasses
import datetime
import math
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.config.run_config import RunConfig
from megatron_balance.device import memory
from megatron_balance.observe.balance import calibration_field, log_fields, tensorboard_scalars
from megatron_balance.profile.flops import attended_width, attention_weights, mlp_flops
from megatron_balance.training.progress import Progress, StepReport

TIMERS = {
    1: (
        *("forward-backward", "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "all-grads-sync"),
        *("params-all-gather", "optimizer-copy-to-main-grad", "optimizer-unscale-and-check-inf"),
        *("optimizer-clip-main-grad", "optimizer-count-zeros", "optimizer-inner-step"),
        *("optimizer-copy-main-to-model-params", "optimizer"),
    ),
    2: (
        *("batch-generator", "forward-compute", "backward-compute"),
        *("forward-recv", "forward-send", "backward-recv", "backward-send", "forward-send-forward-recv"),
        *("forward-send-backward-recv", "backward-send-forward-recv", "backward-send-backward-recv"),
        "forward-backward-send-forward-backward-recv",
    ),
}
"""Timers of megatron-core and of the loop, by the level of `--timing-log-level` that enables them."""


class Writer(Protocol):
    """Records numbers by Megatron's tags: `observe.scalars.Scalars` or `observe.wandb_run.WandbRun`."""

    def add_scalars(self, values: Mapping[str, float], iteration: int, samples: int | None = None) -> None: ...

    def close(self, failed: bool = False) -> None: ...


class RunLog:
    """Log of a run, printed and recorded on the last rank, which has the losses of the last pipeline stage.

    The end of the `with` block closes the writers. ValueError on the last rank: a writer cannot be started.
    """

    def __init__(self, config: RunConfig, iterations: int, vocab_size: int) -> None:
        self.config = config
        self.iterations = iterations
        self.flops_per_sample = flops_per_sample(config, vocab_size)
        self.prints = dist.get_rank() == dist.get_world_size() - 1
        self.writers = _writers(config) if self.prints else []
        self._since_line: list[StepReport] = []

    def message(self, text: str) -> None:
        """Print a message on the last rank."""
        if self.prints:
            # In one write, because lines of other ranks go to the same output
            print(f"{text}\n", end="", flush=True)

    def step(self, report: StepReport, progress: Progress) -> None:
        """Record an iteration, and print the log line every `--log-interval` iterations."""
        self._since_line.append(report)
        if self.writers and report.iteration % self.config.log.tensorboard_log_interval == 0:
            self._record(self._scalars(report), report.iteration, report.consumed_samples)
            self._record(self._costs(report), report.iteration)
        if report.iteration % self.config.log.log_interval == 0:
            self.message(self._line(progress))
            self._since_line = []
            if self.config.transformer.timers is not None:
                self._times(self.config.transformer.timers, report.iteration)

    def evaluation(self, name: str, progress: Progress, losses: dict[str, float]) -> None:
        """Print and record the result of a validation or test."""
        perplexities = {key: math.exp(min(20, value)) for key, value in losses.items()}
        parts = [f" {key} value: {value:.6E} | {key} PPL: {perplexities[key]:.6E} |" for key, value in losses.items()]
        self.message(f" {name} loss at iteration {progress.iteration} |{''.join(parts)}")
        scalars = {f"{key} {name}": value for key, value in losses.items()}
        if self.config.log.log_validation_ppl_to_tensorboard:
            scalars |= {f"{key} {name} ppl": value for key, value in perplexities.items()}
        self._record(scalars, progress.iteration, progress.consumed_samples)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for writer in self.writers:
            writer.close(failed=kind is not None)

    def _record(self, scalars: Mapping[str, float], iteration: int, samples: int | None = None) -> None:
        for writer in self.writers:
            writer.add_scalars(scalars, iteration, samples)

    def _times(self, timers: Any, iteration: int) -> None:
        interval = self.config.log.log_interval
        names = [name for level in range(1, self.config.log.timing_log_level + 1) for name in TIMERS[level]]
        if self.config.log.log_timers_to_tensorboard:
            times = timers._get_global_min_max_time(names, reset=False, barrier=False, normalizer=interval)
            self._record({f"{name}-time": longest for name, (_, longest) in times.items()}, iteration)
        text = timers.get_all_timers_string(names, normalizer=interval)
        if text is not None:
            self.message(text)

    def _line(self, progress: Progress) -> str:
        """Format Megatron's log line; scrapers parse its fields."""
        reports = self._since_line
        last = reports[-1]
        seconds = sum(report.seconds for report in reports) / len(reports)
        line = f" [{datetime.datetime.now():%Y-%m-%d %H:%M:%S.%f}]"
        line += f" iteration {last.iteration:8d}/{self.iterations:8d} |"
        line += f" consumed samples: {progress.consumed_samples:12d} |"
        line += f" elapsed time per iteration (ms): {seconds * 1000:.1f} |"
        if self.config.log.log_throughput:
            line += f" throughput per GPU (TFLOP/s/GPU): {self._throughput(last, seconds):.1f} |"
        line += f" learning rate: {last.learning_rate:.6E} |"
        line += f" global batch size: {last.global_batch_size:5d} |"
        for name in last.losses:
            values = [report.losses[name] for report in reports if not report.skipped]
            line += f" {name}: {sum(values) / max(1, len(values)):.6E} |"
        line += f" loss scale: {last.loss_scale:.1f} |"
        if last.grad_norm is not None:
            line += f" grad norm: {last.grad_norm:.3f} |"
        if last.num_zeros is not None:
            line += f" num zeros: {last.num_zeros} |"
        if last.params_norm is not None:
            line += f" params norm: {last.params_norm:.3f} |"
        line += f" number of skipped iterations: {progress.skipped_iterations:3d} |"
        line += f" number of nan iterations: {progress.nan_iterations:3d} |"
        progress.skipped_iterations = progress.nan_iterations = 0
        if last.balance:
            reported = [report for report in reports if report.balance]
            starts = [reports[0].iteration - 1, *(report.iteration for report in reported)]
            lengths = [end - start for start, end in pairwise(starts)]
            line += log_fields([report.balance for report in reported], lengths) + calibration_field(last.calibration)
        return line

    def _scalars(self, report: StepReport) -> dict[str, float]:
        """Return an iteration's scalars that Megatron-LM also records by samples, by its tags."""
        scalars = {
            **report.losses,
            "batch-size": report.global_batch_size,
            "learning-rate": report.learning_rate,
            "grad-norm": report.grad_norm,
            "loss-scale": report.loss_scale if self.config.log.log_loss_scale_to_tensorboard else None,
            "world-size": dist.get_world_size() if self.config.log.log_world_size_to_tensorboard else None,
            "num-zeros": report.num_zeros,
            "params-norm": report.params_norm,
        }
        return {tag: value for tag, value in scalars.items() if value is not None}

    def _costs(self, report: StepReport) -> dict[str, float]:
        """Return an iteration's other scalars; in `moe/{name}_layer_{i}`, layers count from 0."""
        scalars = {"iteration-time": report.seconds, "throughput": self._throughput(report, report.seconds)}
        if self.config.log.log_memory_to_tensorboard:
            scalars |= memory.scalars()
        for name, losses in report.layer_losses.items():
            scalars |= {f"moe/{name}_layer_{layer}": loss for layer, loss in enumerate(losses)}
        if report.balance:
            scalars |= tensorboard_scalars(report.balance, report.calibration)
        return scalars

    def _throughput(self, report: StepReport, seconds: float) -> float:
        return self.flops_per_sample * report.global_batch_size / seconds / dist.get_world_size() / 1e12


def _writers(config: RunConfig) -> list[Writer]:
    """Return the writers that flags request. Their packages are optional or slow to import."""
    log = config.log
    writers: list[Writer] = []
    if log.tensorboard_dir is not None:
        from megatron_balance.observe.scalars import Scalars

        writers.append(Scalars(Path(log.tensorboard_dir), log.tensorboard_queue_size))
    if log.wandb_project is not None:
        from megatron_balance.observe.wandb_run import WandbRun

        # Megatron-LM also records which job of a chain this is
        job = {"world_size": dist.get_world_size(), "slurm_job_name": os.environ.get("SLURM_JOB_NAME", "N/A")}
        writers.append(
            WandbRun(
                log.wandb_project,
                name=log.wandb_exp_name,
                entity=log.wandb_entity,
                directory=Path(log.wandb_save_dir or f"{config.checkpoint.save}/wandb"),
                settings=_plain_settings(config) | job,
            )
        )
    return writers


def _plain_settings(config: RunConfig) -> dict[str, Any]:
    """Return all settings that are numbers, texts, switches or lists, by field name."""
    plain = str | int | float | list | tuple | None
    parts = [getattr(config, part.name) for part in dataclasses.fields(config)]
    settings = [(field.name, getattr(part, field.name)) for part in parts for field in dataclasses.fields(part)]
    return {name: value for name, value in settings if isinstance(value, plain)}


def flops_per_sample(config: RunConfig, vocab_size: int) -> float:
    """Return the floating-point operations of one sample, forward and backward, without recomputation.

    A multiplication by a weight costs 2 operations forward and 4 backward. Attention scores count in full despite the
    causal mask, as is usual in reported throughputs.
    """
    transformer = config.transformer
    sequence = config.model.seq_length
    hidden = transformer.hidden_size
    pattern = moe_layer_pattern(transformer)
    moe_layers = sum(pattern)
    predictions = transformer.mtp_num_layers or 0
    assert transformer.ffn_hidden_size is not None
    attention = attention_weights(transformer) + sequence * attended_width(transformer)
    # Forward, a weight costs 2 operations
    dense = mlp_flops(transformer, transformer.ffn_hidden_size) / 2
    sparse = 0.0
    if moe_layers:
        assert transformer.moe_ffn_hidden_size is not None and transformer.num_moe_experts is not None
        inner = transformer.moe_router_topk * transformer.moe_ffn_hidden_size
        inner += transformer.moe_shared_expert_intermediate_size or 0
        sparse = mlp_flops(transformer, inner) / 2 + hidden * transformer.num_moe_experts
    weights = len(pattern) * attention + (len(pattern) - moe_layers) * dense + moe_layers * sparse
    # Each prediction projects a token's state and the next token's embedding to one state, and has its own logits
    weights += predictions * 2 * hidden**2 + (1 + predictions) * hidden * vocab_size
    return 6.0 * sequence * weights


def moe_layer_pattern(config: TransformerConfig) -> list[int]:
    """Return 1 for every MoE layer and 0 for every dense layer; layers for multi-token prediction come last."""
    if config.num_moe_experts is None:
        decoder = [0] * config.num_layers
    elif isinstance(config.moe_layer_freq, int):
        decoder = [int(layer % config.moe_layer_freq == 0) for layer in range(config.num_layers)]
    else:
        decoder = list(config.moe_layer_freq)
    return decoder + decoder[-1:] * (config.mtp_num_layers or 0)
