"""Report about one MoE layer's finished iteration, for the log."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.bound import least_seconds
from megatron_balance.cost.calibration import Factors
from megatron_balance.cost.core import COMPUTED
from megatron_balance.cost.loads import condensed
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.device import clock
from megatron_balance.observe.balance import SPORADIC, LayerReport, evenness, spread
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import TransPlan

Interval = tuple[clock.Mark, clock.Mark]


@dataclass(frozen=True, eq=False, kw_only=True)
class FinishedIteration:
    """One layer's finished iteration on one rank. The device may not have reached its marks yet."""

    placements: Sequence[Placement]
    """The placement of all microbatches, or of each one."""
    planned_ratio: float | None
    """`LayerReport.ratio_planned`; None: there was no plan, or plans were for the exact loads."""
    limit: int | None
    """Most rows of a rank in a certified pass; None: passes need no certificate."""
    sending: Callable[[], tuple[float, float]]
    """Returns the predicted seconds of one Trans and one Agg of each placement, without overlap; not calibrated."""
    trans: Sequence[TransPlan]
    """Rounds of every Trans that was executed."""
    agg: Sequence[TransPlan]
    """The same for every Agg, which runs them in reverse."""
    rank_seconds: Callable[[], tuple[np.ndarray | float, np.ndarray | float]]
    """Returns [D] the seconds of each rank's part of all Trans, and of all Agg; not calibrated. 0: there were none."""
    loads: Sequence[np.ndarray]
    """[D, E] int32 of each microbatch."""
    spans: Sequence[tuple[str, Interval]]
    """Intervals in which the layer exchanged tokens (A2A), its experts computed (FEC, BEC), or TRANS or AGG ran."""
    waits: Sequence[tuple[str, Interval]]
    """Intervals in which computation waited for the layer's PLAN, TRANS or AGG."""
    plan_seconds: float
    prediction_error: float
    unreported: Mapping[str, float]
    """Sums of the `sporadic` values of preceding iterations without a report."""
    experts_moved: int = 0
    """Experts that changed their owner after the iteration."""
    transfer_bytes: float = 0.0
    """Bytes that the ranks of one replica sent to move those experts."""

    @property
    def counts_BDE(self) -> np.ndarray:
        """[B, D, E] load of each microbatch, in new memory."""
        return np.stack(self.loads, dtype=np.int64)

    def sporadic(self, cost: CostModel) -> dict[str, float]:
        """Return the sums of SPORADIC fields since the last report, and the number of these iterations."""
        values = {
            "iterations": 1,
            "hosts_added": sum(placement.added_hosts for placement in self.placements),
            "trans_bytes": sum(plan.experts_sent for plan in self.trans) * cost.param_bytes,
            "agg_bytes": sum(plan.experts_sent for plan in self.agg) * cost.grad_bytes,
            "experts_moved": self.experts_moved,
            "transfer_bytes": self.transfer_bytes,
            "plan_seconds": self.plan_seconds,
            "plan_wait_seconds": _seconds(self.waits, "PLAN"),
            "trans_wait_seconds": _seconds(self.waits, "TRANS"),
            "agg_wait_seconds": _seconds(self.waits, "AGG"),
        }
        return {name: self.unreported.get(name, 0.0) + value for name, value in values.items()}


def layer_report(
    last: FinishedIteration, plain: CostModel, calibrated: CostModel, initial: Placement, *, rank: int, factors: Factors
) -> LayerReport:
    """Return the report of an iteration that the device has finished, compared with the `initial` placement.

    Args:
        plain: the cost model without calibration, which chose the routes of Trans.
        calibrated: the cost model with `factors`, for the iteration's number of microbatches.
        rank: this rank in the expert-parallel group.
    """
    sums = last.sporadic(plain)
    all_BDE = last.counts_BDE
    counts_BDE = condensed(all_BDE, owners(initial)) if len(last.placements) == 1 else all_BDE
    before_FBD = calibrated.loads(counts_BDE, initial)
    after_FBD = _loads(calibrated, counts_BDE, last.placements)
    after_BD = after_FBD[COMPUTED]
    before, after, gain = evenness(before_FBD[COMPUTED], after_BD)
    least, most, deviation = spread(all_BDE.sum((0, 1)))
    trans, agg = last.sending()
    time = calibrated.time_of(*calibrated.work_of(after_FBD), factors.trans * trans, factors.agg * agg)
    computing = _seconds(last.spans, "FEC", "BEC")
    exchanging = _seconds(last.spans, "A2A")
    own = float((after_BD[:, rank] / calibrated.rate_D[rank]).sum())
    predicted = calibrated.forward_seconds(own) + calibrated.backward_seconds(own)
    # In each microbatch's exchanges, every rank but the slowest waits
    waiting = time.forward + time.backward - predicted
    trans_D, agg_D = (np.broadcast_to(seconds, len(calibrated.rate_D)) for seconds in last.rank_seconds())
    return LayerReport(
        ratio_before=before,
        ratio_after=after,
        ratio_planned=after if last.planned_ratio is None else last.planned_ratio,
        rb=gain,
        certified=math.nan if last.limit is None else _certified(calibrated, last, last.limit),
        expert_load_min=least,
        expert_load_max=most,
        expert_load_std=deviation,
        predicted_seconds=float(time.total),
        measured_seconds=exchanging + computing + _seconds(last.waits, "TRANS") + _seconds(last.waits, "AGG"),
        predicted_exchange_seconds=float(time.all_to_all),
        measured_exchange_seconds=exchanging - waiting,
        predicted_experts_seconds=predicted,
        measured_experts_seconds=computing,
        predicted_trans_seconds=factors.trans * float(trans_D[rank]),
        measured_trans_seconds=_seconds(last.spans, "TRANS"),
        predicted_agg_seconds=factors.agg * float(agg_D[rank]),
        measured_agg_seconds=_seconds(last.spans, "AGG"),
        prediction_error=last.prediction_error,
        **{name: sums[name] / sums["iterations"] for name in SPORADIC},
    )


def _loads(cost: CostModel, counts_BDE: np.ndarray, placements: Sequence[Placement]) -> np.ndarray:
    """Return the loads [5, B, D] of `CostModel.loads` under one placement, or one for each microbatch."""
    if len(placements) == 1:
        return cost.loads(counts_BDE, placements[0])
    return np.concatenate([cost.loads(*one) for one in zip(counts_BDE, placements, strict=True)], axis=1)


def _certified(cost: CostModel, last: FinishedIteration, limit: int) -> float:
    """Return the fraction of passes in which no rank computes more than `limit` rows; loads are not exact enough."""
    passes = zip(last.loads, last.placements, strict=True)
    return statistics.fmean(cost.traffic(*one).sum(1).max() <= limit for one in passes)


def explanation(number: int, cost: CostModel, expected_BDE: np.ndarray, before: Placement, after: Placement) -> str:
    """Return a line for the log about the expected effect of a layer's new placement."""
    times = [cost.layer_time(expected_BDE, placement) for placement in (before, after)]
    parts = zip(times[0]._fields, *times, strict=True)
    changes = ", ".join(f"{name} {old * 1e3:.3g} -> {new * 1e3:.3g}" for name, old, new in parts)
    totals = " -> ".join(f"{time.total * 1e3:.3g}" for time in times)
    least = least_seconds(expected_BDE, after, cost)
    gap = f"at most {1 - least / times[1].total:.1%} above any placement's" if times[1].total else "no tokens"
    return f"layer {number}: {totals} ms expected, {gap} ({changes}): {after}"


def _seconds(spans: Sequence[tuple[str, Interval]], *operations: str) -> float:
    """Return the total seconds of some operations; the device must have reached the marks."""
    return sum((clock.seconds(*interval) for operation, interval in spans if operation in operations), 0.0)
