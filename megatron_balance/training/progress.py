"""Progress of a run, and reports about its iterations, which are completed without extra waits for the device.

The host waits for the device once per iteration, before the optimizer's step. So once an iteration has been queued, the
device has finished the previous one:

| iteration queued | report of iteration j                                                                      |
|------------------|--------------------------------------------------------------------------------------------|
| j                | has the numbers that the host knew before the step                                         |
| j + 1            | gets its time and the norm of parameters; the sum of the ranks' balance reports is queued  |
| j + 2            | gets its balance, which also calibrates all iterations that begin from now on              |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from megatron_balance.cost.calibration import UNCALIBRATED, Factors
from megatron_balance.device import clock
from megatron_balance.observe.balance import LayerReport, means, sum_over_ranks
from megatron_balance.timeline.runtime import Balancer


@dataclass(kw_only=True)
class Progress:
    """Counters of a run, which checkpoints save."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    bad_in_a_row: int = 0

    def advance(self, samples: int, *, skipped: bool, bad: bool, nan: bool) -> None:
        """Count an iteration: whether its step was `skipped`, whether a value was `bad`, and a loss `nan`."""
        self.iteration += 1
        self.consumed_samples += samples
        self.skipped_iterations += skipped
        self.nan_iterations += bad or nan
        self.bad_in_a_row = self.bad_in_a_row + 1 if bad else 0


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Report about one iteration; equal on every rank, except that only the last stage has `losses`."""

    iteration: int
    losses: dict[str, float]
    """`lm loss` per token, and the auxiliary losses averaged over MoE layers."""
    grad_norm: float | None
    learning_rate: float | None
    """None on a rank without parameters."""
    loss_scale: float
    global_batch_size: int
    consumed_samples: int
    """Samples that the run has consumed after this iteration."""
    skipped: bool
    """Whether the optimizer did not step (fp16 overflow, or a fault)."""
    num_zeros: float | None = None
    """Number of zeros in the gradients; None without `--log-num-zeros-in-grad`."""
    params_norm: float | None = None
    """Norm of all parameters after the step; None until the device has finished it, or without `--log-params-norm`."""
    layer_losses: dict[str, list[float]] = field(default_factory=dict)
    """Auxiliary losses of every layer of the model, by name; empty without `--moe-per-layer-logging`."""
    seconds: float = math.nan
    """Time of the iteration on the device; NaN until the device has finished it."""
    balance: dict[int, LayerReport] = field(default_factory=dict)
    """Report of each layer, by layer number; empty until the device has finished, without a policy, and if unused."""
    calibration: Factors = UNCALIBRATED
    """Factors in the predictions of `balance`."""
    fault: str | None = None
    """Source of a NaN or infinite loss or gradient; None if there was none."""


class Queued(NamedTuple):
    """An iteration that the device may not have finished."""

    report: StepReport
    start: clock.Mark
    end: clock.Mark
    balance: Callable[[], dict[int, LayerReport]] | None
    """Returns this rank's part of the balance report; None: there is no such report."""
    squared_params: torch.Tensor | None
    """Squared norms of the model's parts, in host memory once the device has finished; None: not requested."""


class Reports:
    """Completes reports in the order of iterations; all ranks call every method at the same point."""

    def __init__(self, balancer: Balancer | None, num_layers: int) -> None:
        self.balancer = balancer
        self.num_layers = num_layers
        self._queued: Queued | None = None
        self._timed: tuple[StepReport, torch.Tensor | None] | None = None

    def add(self, iteration: Queued) -> list[StepReport]:
        """Add an iteration that has just been queued; return the reports that are complete."""
        complete = self._completed()
        self._time()
        self._queued = iteration
        return complete

    def wait(self) -> list[StepReport]:
        """Wait for the device and return all reports that `add` has not returned."""
        torch.cuda.synchronize()
        complete = self._completed()
        self._time()
        if self._timed is not None and self._timed[1] is not None:
            torch.cuda.synchronize()
        return complete + self._completed()

    def _time(self) -> None:
        """Read the times of the iteration added last, which the device has finished."""
        if self._queued is None:
            return
        report, start, end, balance, squares = self._queued
        self._queued = None
        table = None if balance is None else sum_over_ranks(balance(), self.num_layers)
        if squares is not None:
            report = replace(report, params_norm=math.sqrt(sum(squares.tolist())))
        self._timed = replace(report, seconds=clock.seconds(start, end)), table

    def _completed(self) -> list[StepReport]:
        """Return the report that has its time, if any; its sum over ranks has arrived."""
        if self._timed is None:
            return []
        report, table = self._timed
        self._timed = None
        if table is not None:
            assert self.balancer is not None
            report = replace(report, balance=means(table))
            self.balancer.calibrate(report.balance, report.calibration)
        return [report]
