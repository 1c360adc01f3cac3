"""Detection of a NaN or an infinity in a loss or a gradient before the optimizer's step.

In a good iteration, the device reads every gradient bucket once, just before the bucket's reduction, and the ranks
all-reduce a single number. The host reads this number, with the others of the iteration, before it launches the step.
Only a bad iteration is searched for the source.
"""

import functools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from itertools import tee
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random

from megatron_balance.config.run_config import RunConfig
from megatron_balance.flow.routers import routers_of
from megatron_balance.training.data import Batch
from megatron_balance.training.fault_search import BucketSums, LossReports, explain
from megatron_balance.training.progress import Progress, StepReport

Repeat = Callable[[list[Iterator[Batch]]], LossReports]
"""Runs the iteration's forward pass again on the same microbatches; every rank calls it."""


class PoisonedRun(RuntimeError):
    """`--max-consecutive-bad-iterations` consecutive iterations had a NaN or infinite loss or gradient."""


class LossGuard:
    """Decides in every iteration whether the optimizer may step; if not, finds the source of the fault.

    It checks nothing with `--no-check-for-nan-in-loss-and-grad`. With fp16, it checks only losses, because the loss
    scaler relies on infinite gradients to find its scale.
    """

    def __init__(self, config: RunConfig, model: list[DistributedDataParallel], groups: ProcessGroupCollection) -> None:
        self.enabled = config.ddp.check_for_nan_in_grad
        self.limit = config.train.max_consecutive_bad_iterations
        self.spikes = SpikyLoss() if config.train.check_for_spiky_loss else None
        self._model = model
        self._groups = groups
        self._gradients_count = not config.transformer.fp16
        self._gradients: BucketSums = []
        # State at the start of the iteration, to be restored if there is no step
        self._biases: torch.Tensor | None = None
        self._random_states: tuple[Any, ...] = ()
        self._microbatches: list[Iterator[Batch]] = []
        self._routers = list(routers_of(model))
        if self.enabled:
            for chunk in model:
                for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                    # DDP calls this before a reduction; its own check raises, after waiting for the device
                    group.check_grads = functools.partial(self._note_gradients, group)

    def begin(self, data: list[Iterator[Batch]]) -> list[Iterator[Batch]]:
        """Begin an iteration; the caller takes its microbatches from the returned iterators."""
        biases = self._expert_biases()
        self._biases = torch.stack(biases) if biases else None
        if not self.enabled:
            return data
        self._gradients = []
        self._random_states = random._get_all_rng_states()
        # The second iterator of a pair keeps the microbatches that the first one returns
        pairs = [tee(source) for source in data]
        self._microbatches = [kept for _, kept in pairs]
        return [first for first, _ in pairs]

    def evidence(self, reports: LossReports) -> torch.Tensor:
        """Return [1] on the device: above 0 if any rank has a non-finite loss or gradient, so that no step is allowed.

        Every rank calls this after gradients are reduced, with its unreduced losses of each microbatch.
        """
        zero = torch.zeros(1, device=torch.cuda.current_device())
        if not self.enabled:
            return zero
        numbers = [zero, *(total.reshape(1) for _, total in self._gradients)]
        numbers += [value for report in reports for value in report.values()]
        bad = torch.isfinite(torch.cat(numbers)).all().logical_not().float().reshape(1)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bad

    def fault(self, reports: LossReports, repeat: Repeat) -> str:
        """Return the source of the fault for which there is evidence; every rank calls this and gets the same answer.

        Restores expert biases; the states of random number generators do not change.
        """
        self.restore_expert_biases()
        again = functools.partial(self._repeat, repeat)
        return explain(self._model, self._groups, reports=reports, gradients=self._gradients, repeat=again)

    def restore_expert_biases(self) -> None:
        """Reset expert biases to the start of the iteration, because it has no step."""
        if self._biases is not None:
            for bias, before in zip(self._expert_biases(), self._biases, strict=True):
                bias.copy_(before)

    def review(self, report: StepReport, progress: Progress, log: Callable[[str], None]) -> None:
        """Log a bad or spiky iteration; raise PoisonedRun on every rank if too many consecutive ones were bad."""
        if report.fault is not None:
            text = f"iteration {report.iteration} has a NaN or infinite loss or gradient; its step is skipped"
            text += f" ({progress.bad_in_a_row} in a row):\n{report.fault}"
            log(text)
            if progress.bad_in_a_row >= self.limit:
                raise PoisonedRun(f"--max-consecutive-bad-iterations {self.limit} is reached: {text}")
        elif self.spikes is not None and "lm loss" in report.losses:
            spike = self.spikes.describe(report.losses["lm loss"])
            if spike is not None:
                log(f"iteration {report.iteration}: spiky loss: {spike}")

    def _expert_biases(self) -> list[torch.Tensor]:
        """Return the biases of experts that an iteration changes; megatron-core 0.16 has no `qb_beta`."""
        found = (getattr(router, name, None) for name in ("expert_bias", "qb_beta") for router in self._routers)
        return [bias for bias in found if bias is not None]

    def _note_gradients(self, group: Any, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        """Replacement of DDP's `check_grads`: keep each bucket's sum, which is finite only if all elements are."""
        if self._gradients_count:
            self._gradients += [(bucket, bucket.grad_data.sum()) for bucket in group.buckets]
        if check_for_large:
            type(group).check_grads(group, check_for_nan_or_inf=False, check_for_large=True)

    @torch.no_grad()
    def _repeat(self, repeat: Repeat) -> LossReports:
        now = random._get_all_rng_states()
        random._set_all_rng_states(*self._random_states)
        try:
            return repeat(self._microbatches)
        finally:
            random._set_all_rng_states(*now)


class SpikyLoss:
    """Detector of a loss more than ten standard deviations above the mean of the last hundred losses.

    megatron-core's rule compares with the first hundred losses, and never fires once the loss has come down.
    """

    WINDOW = 100
    DEVIATIONS = 10.0
    SMALLEST_DEVIATION = 1e-3
    """Minimum standard deviation relative to the mean, for a loss that hardly changes."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.WINDOW)

    def describe(self, loss: float) -> str | None:
        """Add the run's next loss; describe it if it is spiky, once WINDOW finite losses are known."""
        if not math.isfinite(loss):
            return None
        spike = None
        if len(self._losses) == self.WINDOW:
            mean = statistics.fmean(self._losses)
            deviation = max(statistics.pstdev(self._losses, mean), self.SMALLEST_DEVIATION * abs(mean))
            if loss > mean + self.DEVIATIONS * deviation:
                spike = f"{loss:.6E}, after {mean:.6E} +- {deviation:.1E} in the {self.WINDOW} iterations before"
        self._losses.append(loss)
        return spike
