"""The state of one MoE layer during an iteration, and its record of the finished iteration."""

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_balance.comm.ownership_transfer import Field
from megatron_balance.comm.trans_agg import Slots
from megatron_balance.cost.calibration import Factors
from megatron_balance.cost.core import COMPUTED
from megatron_balance.cost.loads import condensed
from megatron_balance.cost.model import Overlap, owners
from megatron_balance.cost.sending import Sending
from megatron_balance.device import clock
from megatron_balance.device.host_memory import Reading
from megatron_balance.messages import cleaned
from megatron_balance.observe.balance import SPORADIC, LayerReport, evenness, spread
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import TransPlan
from megatron_balance.planning.manager import Manager
from megatron_balance.planning.policies.interface import owners_host
from megatron_balance.timeline.actions import Action, Operation

logger = logging.getLogger(__name__)

MOST_KINDS = 10
"""Number of kinds of problems that are logged for each layer."""

MOST_CHARACTERS = 300
"""Length of a problem in the log."""

Interval = tuple[clock.Mark, clock.Mark]


@dataclass(eq=False)
class LayerState:
    """One MoE layer: its manager, its slots, and its part of the current iteration."""

    manager: Manager
    slots: Slots
    overlap: Overlap
    """Seconds of the non-MoE part before this layer, with which a part of its Trans and of its Agg overlaps."""
    fields: Callable[[], Sequence[Field]] = tuple
    """Returns the state that moves with an expert to a new owner."""

    fresh: bool = False
    """Whether the guest slots hold the current weights."""
    loads: list[np.ndarray] = field(default_factory=list)
    """[D, E] int32 of each of the first microbatches, in memory that is not pinned."""
    coming: list[Reading] = field(default_factory=list)
    """Loads [D, E] of the microbatches after them."""
    observed: bool = False
    """Whether the manager has received this iteration's load."""
    prediction_error: float = 0.0
    spans: list[tuple[Operation, Interval]] = field(default_factory=list)
    """Intervals in which the layer exchanged tokens, its experts computed, or its Trans or Agg ran."""
    waits: list[tuple[Operation, Interval]] = field(default_factory=list)
    """Intervals in which computation waited for the layer's Plan, Trans or Agg."""
    plan_seconds: float = 0.0
    last: "Iteration | None" = None
    """The finished iteration."""
    _unreported: dict[str, float] = field(default_factory=dict)
    """Sums of the SPORADIC fields of the iterations before `last` that have no report, and their number."""
    _reported: bool = False
    """Whether `last` has a report."""
    logged: set[str] = field(default_factory=set)
    """Kinds of the policy's problems that have been logged."""

    _initial: Placement = field(init=False)
    """Experts that only their first owners host: what reports compare with."""

    _transfers: tuple[Placement, TransPlan] | None = None
    """A placement and its messages, the same objects as long as the placement lasts."""

    _beside: tuple[Placement, tuple[int, int]] | None = None
    """A placement and its rounds that overlap with the non-MoE computation, from its plan."""

    _parts: tuple[TransPlan, dict[Operation, tuple[TransPlan, TransPlan]]] | None = None
    """Messages and their `_both_parts`, the same objects as long as the messages last."""

    _counts_BDE: np.ndarray | None = None
    """The result of `counts_BDE` for the loads that there were."""

    _sent: tuple[TransPlan, int, tuple[float, float]] | None = None
    """A plan, a rank and its `_sending`."""

    def __post_init__(self) -> None:
        self._initial = Placement.identity(self.placement.num_experts, self.placement.num_ranks)

    @property
    def placement(self) -> Placement:
        return self.manager.placement

    @property
    def owners_alone(self) -> Placement:
        """The placement for a pass that no schedule has: in an iteration, weights of guests may still be under way."""
        return owners_host(self.placement).trimmed

    @property
    def transfers(self) -> TransPlan:
        """The messages of Trans, and of Agg in reverse."""
        if self._transfers is None or self._transfers[0] is not self.placement:
            self._transfers = self.placement, self.manager.cost.trans_plan(self.placement)
        return self._transfers[1]

    def follow(self, sending: Sending, beside: tuple[int, int] | None) -> None:
        """Send the experts of the current placement, which is new, as the rank that planned it has decided.

        Args:
            beside: rounds of Trans and of Agg that overlap with the non-MoE computation, if that rank has counted them.
        """
        self.manager.cost.transport.follow(self.placement, sending)
        self._beside = (self.placement, beside) if beside else None
        self.fresh = False

    def keep_loads(self) -> None:
        """Copy the loads that have arrived, so that their memory on the device and their pinned memory become free."""
        while self.coming and self.coming[0].arrived():
            self.loads.append(self.coming.pop(0)().numpy().astype(np.int32))

    def counts_BDE(self) -> np.ndarray:
        """Return the load [B, D, E] of each microbatch so far; it must not be changed."""
        if self.coming:
            # They arrive in order
            self.coming[-1]()
            self.keep_loads()
        if self._counts_BDE is None or len(self._counts_BDE) != len(self.loads):
            self._counts_BDE = _stacked(self.loads)
        return self._counts_BDE

    def observe(self, counts_BDE: np.ndarray) -> None:
        """Report the loads [B, D, E] of the whole iteration to the manager."""
        error = self.manager.observe(counts_BDE)
        self.observed = True
        self.prediction_error = error if error is not None else 0.0

    def part(self, action: Action) -> TransPlan:
        """Return the rounds of a Trans, an Agg or a part of one; Agg runs rounds backward, the last ones first.

        Of two parts, one overlaps with the non-MoE computation and has the rounds that fit there, because that time is
        known before training. The other one overlaps with the experts and has the rest (Pro-Prophet section V-B).
        """
        if action.parts == 1:
            return self.transfers
        forward = action.operation is Operation.TRANS
        under_experts, under_others = self._both_parts[action.operation]
        # A forward pass computes the experts first, a backward pass last
        return under_experts if (action.part == 1) == forward else under_others

    @property
    def _both_parts(self) -> dict[Operation, tuple[TransPlan, TransPlan]]:
        """The rounds of Trans and of Agg that overlap with the experts, and those that fit the other computation."""
        if self._parts is None or self._parts[0] is not self.transfers:
            if self._beside is None or self._beside[0] is not self.placement:
                beside = self.manager.cost.transport.rounds_beside(self.transfers, self.overlap[:2])
            else:
                beside = self._beside[1]
            trans, agg = both_parts(self.transfers, beside)
            self._parts = self.transfers, {Operation.TRANS: trans, Operation.AGG: agg}
        return self._parts[1]

    def sent_bytes(self, action: Action, rank: int) -> int:
        """Return the bytes that a rank sends in a Trans, an Agg or a part of one."""
        plan = self.part(action)
        cost = self.manager.cost
        if action.operation is Operation.TRANS:
            sent_M = plan.source_M == rank
            size = cost.param_bytes
        else:
            sent_M = plan.target_M == rank
            size = cost.grad_bytes
        return round(float((size / plan.pieces_M[sent_M]).sum()))

    def close(self, placement: Placement, transfers: TransPlan) -> None:
        """Record the finished iteration, in which `placement` was in force and `transfers` were executed.

        The device has finished the one before, because the host has waited for this one's loads.
        """
        if self.last is None or self._reported:
            self._unreported = {}
        else:
            self._unreported = _added(self._unreported, self._sporadic(self.last))
        self._reported = False
        self.last = Iteration(
            placement=placement,
            transfers=transfers,
            loads=self.loads,
            spans=self.spans,
            waits=self.waits,
            plan_seconds=self.plan_seconds,
            prediction_error=self.prediction_error,
        )
        self.loads = []
        self._counts_BDE = None
        self.observed = False
        self.spans = []
        self.waits = []
        self.plan_seconds = 0.0

    def moved(self, experts: int, total_bytes: float) -> None:
        """Record a Transfer after the iteration: number of experts, and bytes that one replica's ranks sent."""
        assert self.last is not None
        self.last = replace(self.last, experts_moved=experts, transfer_bytes=total_bytes)

    def warn(self, number: int, problem: str) -> None:
        """Log a problem, once for each kind: a policy that fails is likely to fail in every iteration."""
        kind = problem.partition(":")[0]
        if kind not in self.logged and len(self.logged) < MOST_KINDS:
            self.logged.add(kind)
            problem = cleaned(problem, MOST_CHARACTERS)
            logger.warning("layer %d: %s; its last placement stays (not said again)", number, problem)

    def give_up(self, number: int, problem: str) -> None:
        """Log that planning has stopped for all layers."""
        message = "layer %d: %s; all placements stay, and the policy is not asked again in this run"
        logger.warning(message, number, cleaned(problem, MOST_CHARACTERS))

    def postpone_transfer(self, number: int, problem: str, log: bool) -> None:
        """Postpone the next Transfer after one that failed; log each failure, since the pauses grow."""
        pause = self.manager.postpone_transfer()
        if log:
            message = "layer %d: experts could not change owners: %s; its last placement stays, next attempt in %s"
            logger.warning(message, number, problem, "1 iteration" if pause == 1 else f"{pause} iterations")

    def explanation(self, number: int, before: Placement, expected_BDE: np.ndarray, microbatches: int) -> str:
        """Return the expected effect of the current placement, as a line for the log."""
        cost = self.manager.cost_of(microbatches)
        times = [cost.layer_time(expected_BDE, placement) for placement in (before, self.placement)]
        parts = zip(times[0]._fields, *times, strict=True)
        changes = ", ".join(f"{name} {old * 1e3:.3g} -> {new * 1e3:.3g}" for name, old, new in parts)
        totals = " -> ".join(f"{time.total * 1e3:.3g}" for time in times)
        return f"layer {number}: {totals} ms expected ({changes}): {self.placement}"

    def _sending(self, plan: TransPlan, rank: int) -> tuple[float, float]:
        """Return the uncalibrated seconds of a rank's parts of Trans and Agg."""
        if self._sent is None or self._sent[0] is not plan or self._sent[1] != rank:
            trans_D, agg_D = self.manager.cost.transport.rank_seconds(plan)
            self._sent = plan, rank, (float(trans_D[rank]), float(agg_D[rank]))
        return self._sent[2]

    def finished(self, rank: int, factors: Factors) -> Callable[[], LayerReport]:
        """Return a function that returns the report of the finished iteration, once the device has finished it.

        Args:
            rank: this rank in the expert-parallel group.
            factors: calibration of the predictions.
        """
        assert self.last is not None
        self._reported = True
        return functools.partial(self._report, self.last, self._unreported, rank, factors)

    def _sporadic(self, last: "Iteration") -> dict[str, float]:
        """Return the SPORADIC fields of an iteration, and 1 iteration."""
        cost = self.manager.cost
        waited = _totals(last.waits)
        return {
            "iterations": 1,
            "hosts_added": last.placement.added_hosts,
            "trans_bytes": last.transfers.experts_sent * cost.param_bytes,
            "agg_bytes": last.transfers.experts_sent * cost.grad_bytes,
            "experts_moved": last.experts_moved,
            "transfer_bytes": last.transfer_bytes,
            "plan_seconds": last.plan_seconds,
            "plan_wait_seconds": waited[Operation.PLAN],
            "trans_wait_seconds": waited[Operation.TRANS],
            "agg_wait_seconds": waited[Operation.AGG],
        }

    def _report(self, last: "Iteration", unreported: Mapping[str, float], rank: int, factors: Factors) -> LayerReport:
        sums = _added(unreported, self._sporadic(last))
        cost = self.manager.cost_of(len(last.loads), factors)
        all_BDE = last.counts_BDE
        counts_BDE = condensed(all_BDE, owners(self._initial))
        before_FBD, after_FBD = (cost.loads(counts_BDE, placement) for placement in (self._initial, last.placement))
        after_BD = after_FBD[COMPUTED]
        before, after, gain = evenness(before_FBD[COMPUTED], after_BD)
        least, most, deviation = spread(all_BDE.sum((0, 1)))
        # The plan has chosen these routes, without calibration
        sending = self.manager.cost.sending(last.placement)
        time = cost.time_of(*cost.work_of(after_FBD), factors.trans * sending.trans, factors.agg * sending.agg)
        worked = _totals(last.spans)
        waited = _totals(last.waits)
        computing = worked[Operation.FEC] + worked[Operation.BEC]
        exchanging = worked[Operation.A2A]
        own = float((after_BD[:, rank] / cost.rate_D[rank]).sum())
        predicted = cost.forward_seconds(own) + cost.backward_seconds(own)
        # The slowest rank of each microbatch does not wait in its exchanges; the others do
        waiting = time.forward + time.backward - predicted
        trans, agg = self._sending(last.transfers, rank)
        return LayerReport(
            ratio_before=before,
            ratio_after=after,
            rb=gain,
            expert_load_min=least,
            expert_load_max=most,
            expert_load_std=deviation,
            predicted_seconds=float(time.total),
            measured_seconds=exchanging + computing + waited[Operation.TRANS] + waited[Operation.AGG],
            predicted_exchange_seconds=float(time.all_to_all),
            measured_exchange_seconds=exchanging - waiting,
            predicted_experts_seconds=predicted,
            measured_experts_seconds=computing,
            predicted_trans_seconds=factors.trans * trans,
            measured_trans_seconds=worked[Operation.TRANS],
            predicted_agg_seconds=factors.agg * agg,
            measured_agg_seconds=worked[Operation.AGG],
            prediction_error=last.prediction_error,
            **{name: sums[name] / sums["iterations"] for name in SPORADIC},
        )


def both_parts(
    plan: TransPlan, beside: tuple[int, int]
) -> tuple[tuple[TransPlan, TransPlan], tuple[TransPlan, TransPlan]]:
    """Return the rounds of Trans, and those of Agg, that overlap with the experts, and those that fit the other part.

    Args:
        beside: number of rounds of Trans and of Agg that fit the non-MoE computation.
    """
    trans, agg = (plan.split(len(plan) - rounds) for rounds in beside)
    return trans, agg


def _stacked(loads: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack(loads, dtype=np.int64)


def _totals(spans: Sequence[tuple[Operation, Interval]]) -> Mapping[Operation, float]:
    """Return the seconds of each operation; 0 for one without spans."""
    totals: defaultdict[Operation, float] = defaultdict(float)
    for operation, span in spans:
        totals[operation] += clock.seconds(*span)
    return totals


def _added(sums: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    return {name: sums.get(name, 0.0) + value for name, value in values.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class Iteration:
    """One layer's finished iteration."""

    placement: Placement
    transfers: TransPlan
    """The messages of Trans, and of Agg in reverse."""
    loads: Sequence[np.ndarray]
    """[D, E] int32 of each microbatch."""
    spans: list[tuple[Operation, Interval]]
    waits: list[tuple[Operation, Interval]]
    plan_seconds: float
    prediction_error: float
    experts_moved: int = 0
    transfer_bytes: float = 0.0

    @property
    def counts_BDE(self) -> np.ndarray:
        """[B, D, E] load of each microbatch, in new memory."""
        return _stacked(self.loads)
