"""Output of a run: Megatron's log line, TensorBoard and evaluation results."""

import datetime
import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.config.run_config import RunConfig
from megatron_balance.observe.balance import calibration_field, log_fields, tensorboard_scalars
from megatron_balance.profile.flops import attended_width, attention_weights
from megatron_balance.training.progress import Progress, StepReport

if TYPE_CHECKING:
    from megatron_balance.observe.scalars import Scalars


class RunLog:
    """Log of a run, printed and recorded in TensorBoard on the last rank, which has the last pipeline stage's loss.

    Raises:
        ValueError: TensorBoard's directory cannot be written to; raised on the last rank.
    """

    def __init__(self, config: RunConfig, iterations: int, vocab_size: int) -> None:
        self.config = config
        self.iterations = iterations
        self.flops_per_sample = flops_per_sample(config, vocab_size)
        self.prints = dist.get_rank() == dist.get_world_size() - 1
        self.writer = _tensorboard(config) if self.prints else None
        self._since_line: list[StepReport] = []

    def message(self, text: str) -> None:
        """Print a message on the last rank."""
        if self.prints:
            print(text, flush=True)

    def step(self, report: StepReport, progress: Progress) -> None:
        """Record an iteration, and print the log line every `--log-interval` iterations."""
        self._since_line.append(report)
        if self.writer is not None and report.iteration % self.config.log.tensorboard_log_interval == 0:
            self._record(report, self.writer)
        if report.iteration % self.config.log.log_interval == 0:
            self.message(self._line(progress))
            self._since_line = []

    def evaluation(self, name: str, progress: Progress, losses: dict[str, float]) -> None:
        """Print and record the result of a validation or test."""
        parts = "".join(
            f" {key} value: {value:.6E} | {key} PPL: {math.exp(min(20, value)):.6E} |" for key, value in losses.items()
        )
        self.message(f" {name} loss at iteration {progress.iteration} |{parts}")
        if self.writer is not None:
            for key, value in losses.items():
                self.writer.add_scalar(f"{key} {name}", value, progress.iteration)
                if self.config.log.log_validation_ppl_to_tensorboard:
                    self.writer.add_scalar(f"{key} {name} ppl", math.exp(min(20, value)), progress.iteration)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def _line(self, progress: Progress) -> str:
        """Format Megatron's log line; scrapers parse its fields."""
        reports, last = self._since_line, self._since_line[-1]
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
        line += f" number of skipped iterations: {progress.skipped_iterations:3d} |"
        line += f" number of nan iterations: {progress.nan_iterations:3d} |"
        progress.skipped_iterations = progress.nan_iterations = 0
        if last.balance:
            reported = [report for report in reports if report.balance]
            starts = [reports[0].iteration - 1, *(report.iteration for report in reported)]
            lengths = [end - start for start, end in pairwise(starts)]
            line += log_fields([report.balance for report in reported], lengths) + calibration_field(last.calibration)
        return line

    def _record(self, report: StepReport, writer: "Scalars") -> None:
        scalars = {
            **report.losses,
            "batch-size": report.global_batch_size,
            "iteration-time": report.seconds,
            "throughput": self._throughput(report, report.seconds),
        }
        if report.learning_rate is not None:
            scalars["learning-rate"] = report.learning_rate
        if report.grad_norm is not None:
            scalars["grad-norm"] = report.grad_norm
        if self.config.log.log_loss_scale_to_tensorboard:
            scalars["loss-scale"] = report.loss_scale
        if self.config.log.log_world_size_to_tensorboard:
            scalars["world-size"] = dist.get_world_size()
        if report.balance:
            scalars |= tensorboard_scalars(report.balance, report.calibration)
        for name, value in scalars.items():
            writer.add_scalar(name, value, report.iteration)

    def _throughput(self, report: StepReport, seconds: float) -> float:
        """Return the model's TFLOP/s per device."""
        return self.flops_per_sample * report.global_batch_size / seconds / dist.get_world_size() / 1e12


def _tensorboard(config: RunConfig) -> "Scalars | None":
    directory = config.log.tensorboard_dir
    if directory is None:
        return None
    from megatron_balance.observe.scalars import Scalars

    return Scalars(Path(directory), config.log.tensorboard_queue_size)


def flops_per_sample(config: RunConfig, vocab_size: int) -> float:
    """Return the floating-point operations of one sample, forward and backward, without recomputation.

    A multiplication by a weight costs 2 operations forward and 4 backward. Attention scores count in full despite the
    causal mask, as is usual in reported throughputs.
    """
    transformer, sequence = config.transformer, config.model.seq_length
    hidden = transformer.hidden_size
    projections = 3 if transformer.gated_linear_unit else 2
    attention = attention_weights(transformer) + sequence * attended_width(transformer)
    pattern, predictions = moe_layer_pattern(transformer), transformer.mtp_num_layers or 0
    layers, moe_layers = len(pattern), sum(pattern)
    assert transformer.ffn_hidden_size is not None
    dense = projections * hidden * transformer.ffn_hidden_size
    sparse = 0
    if moe_layers:
        assert transformer.moe_ffn_hidden_size is not None and transformer.num_moe_experts is not None
        inner = transformer.moe_router_topk * transformer.moe_ffn_hidden_size
        sparse = projections * hidden * (inner + (transformer.moe_shared_expert_intermediate_size or 0))
        sparse += hidden * transformer.num_moe_experts
    weights = layers * attention + (layers - moe_layers) * dense + moe_layers * sparse
    # Each prediction projects a token's state and the next token's embedding to one state, and has the head's logits
    weights += predictions * 2 * hidden**2 + (1 + predictions) * hidden * vocab_size
    return 6.0 * sequence * weights


def moe_layer_pattern(config: TransformerConfig) -> list[int]:
    """Return 1 for every MoE layer and 0 for every dense layer.

    Layers for multi-token prediction follow the decoder's, and are like the last of these.
    """
    if config.num_moe_experts is None:
        decoder = [0] * config.num_layers
    elif isinstance(config.moe_layer_freq, int):
        decoder = [int(layer % config.moe_layer_freq == 0) for layer in range(config.num_layers)]
    else:
        decoder = list(config.moe_layer_freq)
    return decoder + decoder[-1:] * (config.mtp_num_layers or 0)


def peak_memory_bytes() -> int:
    """Return the peak device memory of this rank, or, on a CPU, the peak resident size of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
