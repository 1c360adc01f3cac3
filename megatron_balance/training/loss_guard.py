"""No poisoned step: a NaN or an infinity in a loss or a gradient is found before the optimizer sees it.

A good iteration pays for one read of every gradient bucket, on the device and just before the bucket is reduced, and
for one all-reduce and one host read of a single number. Only a bad iteration is searched for its source.
"""

import functools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

from megatron_balance.config.run_config import RunConfig
from megatron_balance.training.data import Batch
from megatron_balance.training.fault_search import BucketSums, LossReports, explain
from megatron_balance.training.progress import Progress, StepReport

Repeat = Callable[[list[Iterator[Batch]]], LossReports]
"""Runs the iteration's forward pass again on the same microbatches; every rank calls it."""


class PoisonedRun(RuntimeError):
    """`--max-consecutive-bad-iterations` iterations in a row had a NaN or infinite loss or gradient."""


class Remembered:
    """An iterator that keeps what it gave, so that it can be given again."""

    def __init__(self, source: Iterator[Batch]) -> None:
        self.source = source
        self.given: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.given.append(next(self.source))
        return self.given[-1]


@dataclass(frozen=True)
class _Start:
    """What an iteration began with and a bad one goes back to."""

    data: list[Remembered]
    random_states: tuple[Any, ...]
    expert_biases: torch.Tensor | None


class LossGuard:
    """Decides for every iteration whether the optimizer may step, and names the source if it may not.

    Checks nothing with `--no-check-for-nan-in-loss-and-grad`. With fp16 only losses count, because infinite gradients
    are how the loss scaler learns its scale.
    """

    def __init__(self, config: RunConfig, model: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
        self.enabled = config.ddp.check_for_nan_in_grad
        self.limit = config.train.max_consecutive_bad_iterations
        self.spikes = SpikyLoss() if config.train.check_for_spiky_loss else None
        self._model, self._groups = model, groups
        self._gradients_count = not config.transformer.fp16
        self._gradients: BucketSums = []
        self._start = _Start([], (), None)
        modules = (module for chunk in model for module in unwrap_model(chunk).modules())
        self._biased = [module for module in modules if isinstance(module, TopKRouter) and module.enable_expert_bias]
        if self.enabled:
            for chunk in model:
                for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                    # DDP calls it before it reduces; its own waits for the device at every bucket, and ends the run
                    group.check_grads = functools.partial(self._note_gradients, group)

    def begin(self, data: list[Iterator[Batch]]) -> list[Iterator[Batch]]:
        """Begin an iteration; take its microbatches from the returned iterators."""
        if not self.enabled:
            return data
        self._gradients = []
        self._start = _Start(
            data=[Remembered(source) for source in data],
            random_states=random._get_all_rng_states(),
            expert_biases=torch.stack([router.expert_bias for router in self._biased]) if self._biased else None,
        )
        return list(self._start.data)

    def fault(self, reports: LossReports, repeat: Repeat) -> str | None:
        """What is wrong with the iteration's losses or gradients, and where it came from; None: the optimizer may step.

        Every rank calls it once gradients are reduced, and gets the same answer. After a fault the routers' expert
        biases are what they were before the iteration, and random number generators go on as if nothing had been
        repeated.

        Args:
            reports: this rank's loss of each microbatch, before any reduction; empty off the last pipeline stage.
            repeat: the forward pass again, without gradients; communicates like the first one.
        """
        if not self.enabled or not self._is_bad(reports):
            return None
        for index, router in enumerate(self._biased):
            router.expert_bias.copy_(self._start.expert_biases[index])
        again = functools.partial(self._repeat, repeat)
        return explain(self._model, self._groups, reports, self._gradients, again)

    def review(self, report: StepReport, progress: Progress, say: Callable[[str], None]) -> None:
        """Tell the user of a bad or spiky iteration.

        Raises:
            PoisonedRun: on every rank, with the source, when too many bad iterations came in a row.
        """
        if report.fault is not None:
            text = f"iteration {report.iteration} has a NaN or infinite loss or gradient; its step is left out"
            text += f" ({progress.bad_in_a_row} in a row):\n{report.fault}"
            say(text)
            if progress.bad_in_a_row >= self.limit:
                raise PoisonedRun(f"--max-consecutive-bad-iterations {self.limit} is reached: {text}")
        elif self.spikes is not None and "lm loss" in report.losses:
            spike = self.spikes.describe(report.losses["lm loss"])
            if spike is not None:
                say(f"iteration {report.iteration}: spiky loss: {spike}")

    def _note_gradients(self, group: Any, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        """DDP's `check_grads`: remember each bucket's sum, which a NaN or an infinity turns into one."""
        if self._gradients_count:
            self._gradients += [(bucket, bucket.grad_data.sum()) for bucket in group.buckets]
        if check_for_large:
            type(group).check_grads(group, check_for_nan_or_inf=False, check_for_large=True)

    def _is_bad(self, reports: LossReports) -> bool:
        """Whether any rank has a non-finite loss or gradient."""
        numbers = [torch.zeros(1, device=torch.cuda.current_device())]
        numbers += [total.reshape(1) for _, total in self._gradients]
        numbers += [value for report in reports for value in report.values()]
        bad = torch.isfinite(torch.cat(numbers)).all().logical_not().int()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        # The host has to know before it launches the optimizer
        return bool(bad.item())

    @torch.no_grad()
    def _repeat(self, repeat: Repeat) -> LossReports:
        now = random._get_all_rng_states()
        random._set_all_rng_states(*self._start.random_states)
        try:
            return repeat([iter(data.given) for data in self._start.data])
        finally:
            random._set_all_rng_states(*now)


class SpikyLoss:
    """Notices a loss far above those of the iterations before.

    Far is ten standard deviations above the mean of the last hundred losses. megatron-core's rule, ten times the
    largest of the first hundred, never fires once a cross entropy has come down from its start.
    """

    WINDOW = 100
    DEVIATIONS = 10.0
    SMALLEST_DEVIATION = 1e-3
    """Relative to the mean: a loss that does not change at all has no deviation to measure with."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=self.WINDOW)

    def describe(self, loss: float) -> str | None:
        """What is spiky about `loss`, the run's next; None until WINDOW finite losses are known."""
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
