"""Reports of iterations, completed without making the host wait for the device.

The host waits for the device once in each iteration, before the optimizer's step. So when an iteration has been queued,
the device has finished the one before:

| iteration queued | report of iteration j                                                                       |
|------------------|---------------------------------------------------------------------------------------------|
| j                | has what the host knew before the step                                                      |
| j + 1            | gets its time and the norm of parameters; with balance, adding up ranks' reports is queued  |
| j + 2            | gets its balance, which also calibrates the iterations that begin from now on               |

`wait` completes all reports at once.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from megatron_balance.device import clock
from megatron_balance.observe.balance import LayerReport, means, sum_over_ranks
from megatron_balance.timeline.runtime import Balancer
from megatron_balance.training.progress import StepReport


class Queued(NamedTuple):
    """An iteration that the device may not have finished."""

    report: StepReport
    start: clock.Mark
    end: clock.Mark
    balance: Callable[[], dict[int, LayerReport]] | None
    """Returns this rank's part of the report of its balance; None: there is no such report."""
    squared_params: torch.Tensor | None = None
    """Squared norms of the parts of the model, in host memory when the device has finished; None: not asked for."""


class Reports:
    """Completes reports in the order of their iterations; all ranks call every method at the same point."""

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
        """Read the times of the iteration that was added last, which the device has finished."""
        if self._queued is None:
            return
        (report, start, end, balance, squares) = self._queued
        self._queued = None
        table = None if balance is None else sum_over_ranks(balance(), self.num_layers)
        if squares is not None:
            report = replace(report, params_norm=math.sqrt(sum(squares.tolist())))
        self._timed = replace(report, seconds=clock.seconds(start, end)), table

    def _completed(self) -> list[StepReport]:
        """Return the report that has its time, if there is one; its sum over ranks has arrived."""
        if self._timed is None:
            return []
        (report, table) = self._timed
        self._timed = None
        if table is not None:
            assert self.balancer is not None
            report = replace(report, balance=means(table))
            self.balancer.calibrate(report.balance, report.calibration)
        return [report]
