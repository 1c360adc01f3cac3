"""State of one MoE layer during an iteration, and the rounds of its placement's Trans and Agg."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from megatron_balance.comm.ownership_transfer import Field
from megatron_balance.comm.trans_agg import Slots
from megatron_balance.cost.calibration import Factors
from megatron_balance.cost.model import CostModel, Overlap
from megatron_balance.cost.sending import Sending, SendingModel
from megatron_balance.device.host_memory import Reading
from megatron_balance.observe.balance import LayerReport
from megatron_balance.observe.layer_report import FinishedIteration, Interval, layer_report
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import TransPlan
from megatron_balance.planning.manager import Manager
from megatron_balance.planning.within import PlanPass
from megatron_balance.timeline.actions import Action, Operation


def rounds_of(action: Action, plan: TransPlan, beside: tuple[int, int]) -> TransPlan:
    """Return the rounds of a Trans, an Agg or a part of one. Agg runs rounds backward, the last round first. Of two
    parts, one overlaps with the non-MoE computation, the other with the experts (Pro-Prophet V-B). The non-MoE part has
    as many rounds as fit, which is known before training: `beside` of Trans and of Agg."""
    if action.parts == 1:
        return plan
    is_trans = action.operation is Operation.TRANS
    under_experts, under_others = plan.split(len(plan) - beside[0 if is_trans else 1])
    # Experts come first in a forward pass and last in a backward pass
    return under_experts if (action.part == 1) == is_trans else under_others


def sent_bytes(operation: Operation, rounds: TransPlan, cost: CostModel, rank: int) -> int:
    """Return the bytes that a rank sends in these rounds of Trans or Agg."""
    is_agg = operation is Operation.AGG
    sent_M = (rounds.target_M if is_agg else rounds.source_M) == rank
    size = cost.grad_bytes if is_agg else cost.param_bytes
    return round(float((size / rounds.pieces_M[sent_M]).sum()))


@dataclass(frozen=True, eq=False)
class PlacementRounds:
    """Rounds of a placement's Trans and Agg, cached as long as the placement lasts."""

    placement: Placement
    transport: SendingModel
    others: tuple[float, float]
    """Forward and backward seconds of the non-MoE computation that overlaps with a part of Trans and of Agg."""
    counted: tuple[int, int] | None = None
    """Rounds of Trans and of Agg that fit the non-MoE computation, if counted by the planning rank."""
    own: TransPlan | None = None
    """The rounds of a pass with its own guests; None: those that `transport` chooses."""

    @cached_property
    def plan(self) -> TransPlan:
        """All rounds of Trans; Agg runs them in reverse."""
        return self.transport.plan(self.placement) if self.own is None else self.own

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of Trans and of Agg without overlap; not calibrated."""
        if self.own is None:
            return self.transport.best(self.placement)[2:]
        trans_D, agg_D = self.rank_seconds
        return float(trans_D.max()), float(agg_D.max())

    @cached_property
    def _parts(self) -> dict[tuple[Operation, int], TransPlan]:
        beside = self.counted or self.transport.rounds_beside(self.plan, self.others)
        actions = [Action(0, operation, part, 2) for operation in (Operation.TRANS, Operation.AGG) for part in (1, 2)]
        return {(action.operation, action.part): rounds_of(action, self.plan, beside) for action in actions}

    @cached_property
    def rank_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """[D] seconds until each rank completes its part of Trans, and of Agg; not calibrated."""
        return self.transport.rank_seconds(self.plan)

    def of(self, action: Action) -> TransPlan:
        """Return the rounds of a Trans, an Agg or a part of one; see `rounds_of`."""
        return self.plan if action.parts == 1 else self._parts[action.operation, action.part]


@dataclass(eq=False)
class LayerState:
    """Manager and slots of one MoE layer, and its state in the current iteration."""

    manager: Manager
    slots: Slots
    overlap: Overlap
    """Seconds of the non-MoE part before this layer, which hides a part of its Trans and Agg."""
    fields: Callable[[], Sequence[Field]] = tuple
    """Returns the state that moves with an expert to a new owner."""
    within: PlanPass | None = None
    """Plans for the exact load of each microbatch; None: there are no such plans."""
    limit: int | None = None
    """Most rows of a rank in a certified pass; None: passes need no certificate."""
    split: str | None = None
    """How hosts share tokens in each microbatch; None: as the manager's cost model assumes."""

    fresh: bool = False
    """Whether the guest slots hold the current weights of `placement`."""
    passes: list[PlacementRounds] = field(default_factory=list)
    """Placements of this iteration's microbatches, if each one has its own."""
    executed: list[tuple[Operation, PlacementRounds]] = field(default_factory=list)
    """Every Trans and Agg of this iteration that sent something."""
    loads: list[np.ndarray] = field(default_factory=list)
    """Loads [D, E] int32 of the first microbatches, in memory that is not pinned."""
    coming: list[Reading] = field(default_factory=list)
    """Loads [D, E] of the later microbatches, which may still be in flight."""
    observed: bool = False
    """Whether the manager has received this iteration's load."""
    prediction_error: float = 0.0
    spans: list[tuple[str, Interval]] = field(default_factory=list)
    waits: list[tuple[str, Interval]] = field(default_factory=list)
    plan_seconds: float = 0.0
    last: FinishedIteration | None = None
    reported: bool = False
    """Whether `last` has been reported."""
    _rounds: PlacementRounds | None = None
    _counts_BDE: np.ndarray | None = None
    """Cached result of `counts_BDE`."""

    @cached_property
    def initial(self) -> Placement:
        """Placement before any balancing, with which reports compare."""
        return Placement.identity(self.placement.num_experts, self.placement.num_ranks)

    @property
    def placement(self) -> Placement:
        return self.manager.placement

    @property
    def rounds(self) -> PlacementRounds:
        if self._rounds is None or self._rounds.placement is not self.placement:
            self._rounds = PlacementRounds(self.placement, self.manager.cost.transport, self.overlap[:2])
        return self._rounds

    def rounds_in(self, microbatch: int | None) -> PlacementRounds:
        """Return the rounds of a microbatch's placement; None: of the iteration's placement."""
        return self.rounds if microbatch is None else self.passes[microbatch]

    def plan_pass(self, counts_DE: np.ndarray) -> tuple[PlacementRounds, str | None]:
        """Return the rounds of a new plan for the load [D, E] of one pass, and the policy's problem. If there is one,
        only owners compute."""
        assert self.within is not None
        placement, plan, problem = self.within(counts_DE, self.placement)
        return PlacementRounds(placement, self.manager.cost.transport, self.overlap[:2], own=plan), problem

    def follow(self, sending: Sending, beside: tuple[int, int] | None) -> None:
        """Send the experts of the current placement, which is new, as the rank that planned it has decided."""
        transport = self.manager.cost.transport
        transport.follow(self.placement, sending)
        self._rounds = PlacementRounds(self.placement, transport, self.overlap[:2], beside)
        self.fresh = False

    def keep_loads(self) -> None:
        """Copy the loads that have arrived, to free their device memory and pinned memory."""
        while self.coming and self.coming[0].arrived():
            self.loads.append(self.coming.pop(0)().numpy().astype(np.int32))

    def counts_BDE(self) -> np.ndarray:
        """Return the loads [B, D, E] of the microbatches so far; the array must not be changed."""
        if self.coming:
            self.coming[-1]()
            self.keep_loads()
        if self._counts_BDE is None or len(self._counts_BDE) != len(self.loads):
            self._counts_BDE = np.stack(self.loads, dtype=np.int64)
        return self._counts_BDE

    def observe(self, counts_BDE: np.ndarray) -> None:
        """Pass the iteration's loads [B, D, E] to the manager."""
        self.prediction_error = self.manager.observe(counts_BDE) or 0.0
        self.observed = True

    def close(self, used: PlacementRounds, planned_ratio: float | None) -> None:
        """Record the finished iteration. `used`: the placement of all microbatches, unless each had its own;
        `planned_ratio`: its `Manager.planned_ratio`. The device has finished the previous iteration, because the host
        has waited for this iteration's loads."""
        executed = self.executed
        unreported = {} if self.last is None or self.reported else self.last.sporadic(self.manager.cost)
        self.last = FinishedIteration(
            placements=[one.placement for one in self.passes or [used]],
            sending=partial(_sending, [*self.passes, used]),
            trans=[one.plan for operation, one in executed if operation is not Operation.AGG],
            agg=[one.plan for operation, one in executed if operation is Operation.AGG],
            rank_seconds=partial(_rank_seconds, executed),
            planned_ratio=None if self.passes else planned_ratio,
            limit=self.limit,
            loads=self.loads,
            spans=self.spans,
            waits=self.waits,
            plan_seconds=self.plan_seconds,
            prediction_error=self.prediction_error,
            unreported=unreported,
        )
        self.reported = False
        self.passes = []
        self.executed = []
        self.loads = []
        self._counts_BDE = None
        self.observed = False
        self.spans = []
        self.waits = []
        self.plan_seconds = 0.0

    def finished(self, rank: int, factors: Factors) -> Callable[[], LayerReport]:
        """Return a function that makes the report; call it when the device has finished the iteration."""
        assert self.last is not None
        self.reported = True
        cost = self.manager.cost
        calibrated = self.manager.cost_of(len(self.last.loads), factors)
        if self.split not in (None, calibrated.split):
            calibrated = replace(calibrated, split=self.split)
        return partial(layer_report, self.last, cost, calibrated, self.initial, rank=rank, factors=factors)


def _sending(used: Sequence[PlacementRounds]) -> tuple[float, float]:
    """Return the seconds of Trans and of Agg of some placements."""
    trans, agg = zip(*(one.seconds for one in used), strict=True)
    return sum(trans), sum(agg)


def _rank_seconds(
    executed: Sequence[tuple[Operation, PlacementRounds]],
) -> tuple[np.ndarray | float, np.ndarray | float]:
    """Return [D] the seconds of each rank's part of every Trans, and of every Agg; not calibrated."""
    trans = sum(one.rank_seconds[0] for operation, one in executed if operation is not Operation.AGG)
    agg = sum(one.rank_seconds[1] for operation, one in executed if operation is Operation.AGG)
    return trans, agg
