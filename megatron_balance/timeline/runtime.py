"""Moves the experts' weights and gradients according to a schedule.

A placement determines which experts move; Plan decides each layer's next placement from observed load. The schedule
(timeline/lower.py) determines when Plan, Trans and Agg start, and which computations wait for them. The Balancer
executes the schedule:

    begin_iteration     take the schedule for this number of microbatches
    enter, host         before each computation: wait for the actions it needs, start actions that overlap with it
    aggregate           complete every Agg, before gradients are reduced
    finish_iteration    complete every Plan and put the next placements in force, before the optimizer's step
    transfer_owners     Transfer

A placement is in force for a whole iteration or, if it is planned on the exact load, for one microbatch. Recomputation
finds the placement unchanged.
"""

import functools
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.comm.ownership_transfer import ExpertMover
from megatron_balance.comm.trans_agg import TransAgg, WeightSlots
from megatron_balance.cost.calibration import UNCALIBRATED, Calibration, Factors
from megatron_balance.device import clock
from megatron_balance.device.host_memory import Reading
from megatron_balance.device.side_stream import AsyncWork, SideStream
from megatron_balance.messages import cleaned
from megatron_balance.observe.balance import LayerReport, component_seconds
from megatron_balance.observe.calibration_log import CalibrationRecord
from megatron_balance.observe.layer_report import explanation
from megatron_balance.observe.profiler import record_function
from megatron_balance.observe.trace import Stream, Timeline, TraceSpan
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import TransPlan
from megatron_balance.planning.ownership import owner_changes
from megatron_balance.planning.policies.interface import owners_host
from megatron_balance.timeline.actions import EXPERTS, Action, Operation, Schedule, Step
from megatron_balance.timeline.agreement import Compared, Outcome, Shared
from megatron_balance.timeline.guest_ring import GuestRing
from megatron_balance.timeline.layer_state import LayerState, PlacementRounds, sent_bytes
from megatron_balance.timeline.planner import Asked, Plan, Planner

logger = logging.getLogger(__name__)

MOST_KINDS = 10
"""Maximum number of different policy problems that are logged for each layer."""

MOST_CHARACTERS = 300
"""Maximum length of a logged problem."""


@dataclass(eq=False, kw_only=True)
class Balancer:
    """Executes the schedule that moves experts of this rank's MoE layers according to their placements. All ranks of
    the expert-parallel group call every method in the same order."""

    group: dist.ProcessGroup
    """The expert-parallel group."""
    trans_agg: TransAgg
    """Executes Trans and Agg, over a separate group of the same ranks."""
    layers: Mapping[int, LayerState]
    """By layer number, in the order of the model."""
    schedule: Callable[[int], Schedule]
    """Number of microbatches -> the schedule of an iteration."""
    microbatches: Callable[[], int]
    """Returns the number of microbatches of the current iteration."""
    guest_bytes: int
    """Bytes of this rank's guest slots, weights and gradients, in all layers."""
    ring: GuestRing | None = None
    """The guest slots that layers share if each microbatch has its own placement; None: it has not."""
    ahead: bool = True
    """Whether there are plans for the next iteration."""
    mover: ExpertMover | None = None
    """Executes Transfer; data-parallel replicas then share a placement, by their mean load. None: owners stay."""
    explain: bool = False
    """Print the expected effect of each plan."""
    shards: dist.ProcessGroup | None = None
    """Ranks of all shards of these experts, which share one placement; None: `group`."""
    planner: Planner = field(default_factory=Planner)
    shares: bool = False
    """Whether ranks with the same placement split the layers among themselves and exchange plans."""
    calibrates: bool = False
    """Whether plans are made with calibrated cost models."""
    record: CalibrationRecord | None = None
    """Factors to calibrate with; None: the factors that this run measures."""

    calibration: Calibration = field(default_factory=Calibration, init=False)
    """Factors measured in the finished iterations."""
    factors: Factors = field(default=UNCALIBRATED, init=False)
    """The factors of the iteration in progress."""
    timeline: Timeline | None = field(default=None, init=False)
    """Records spans of computation, communication, planning and waits."""
    aside: bool = field(default=False, init=False)
    """Whether the current forward pass has no backward pass, and so is in no schedule."""

    def __post_init__(self) -> None:
        self.aggregated: Callable[[int], None] = lambda number: None
        """Called with a layer's number when its gradients are complete."""
        self.deciders = (self.shards or self.group) if self.mover is None else self.mover.group
        """Ranks that share one placement."""
        self.agreement = Shared(self.deciders, self.layers) if self.shares else Compared(self.deciders)
        self._side_stream = SideStream("Trans and Agg")
        self._iteration = 0
        self._steps = deque[Step]()
        """Remaining steps of this iteration's schedule; empty between iterations."""
        self._now: tuple[Action, clock.Mark] | None = None
        """Current computation, and its start."""
        self._started: dict[Action, tuple[TransPlan, AsyncWork | None]] = {}
        """Pending Trans and Agg; no work where there is nothing to send."""
        self._plans: dict[Action, Asked | None] = {}
        """Pending plans; None where no plan is due."""
        self._new_owners: dict[int, Plan] = {}
        """Plans to adopt after the optimizer's step, by layer number."""
        self._entered = Counter[Action]()
        """Number of microbatches that have begun each computation."""
        self._to_repeat = Counter[Action]()
        """Number of forward passes without gradients that recomputation has yet to repeat."""
        self._logged: defaultdict[int, set[str]] = defaultdict(set)
        """Logged kinds of policy problems, by layer number."""

    def begin_iteration(self, number: int) -> None:
        """Begin the first computation of an iteration, after resetting the state of the last one."""
        schedule = self.schedule(self.microbatches())
        self._iteration = number
        self._steps = deque(schedule)
        self._now = None
        self._entered.clear()
        self._to_repeat.clear()
        self.factors = self.calibration.factors if self.record is None else self.record.at(number)
        if self.calibrates:
            for state in self.layers.values():
                state.manager.factors = self.factors
        self._begin(schedule[0].computation)

    def enter(self, block: int, operation: Operation, part: int = 1, parts: int = 1) -> None:
        """Execute the schedule's step before a computation, unless it is a repetition or in no schedule."""
        computation = self._in_schedule(Action(block, operation, part, parts))
        if computation is not None:
            self._begin(computation)
        if operation is Operation.FEC and self.ring is not None:
            repeats = computation is None and bool(self._steps) and not self.aside
            self.layers[block].slots.repeats = repeats
            if repeats:
                self._hold(block, self._returning(block))

    def host(self, number: int, load: Reading, training: bool) -> Placement:
        """Return the placement of a layer for a forward pass with this load [D, E]. Every host has received an expert's
        weights before it computes. The load is not waited for before it is needed."""
        state = self.layers[number]
        if self.aside and self._steps:
            # Guests' weights may be in flight during an iteration
            return owners_host(state.placement).trimmed
        computation = self._in_schedule(Action(number, Operation.A2A, 1, 4)) if training else None
        if computation is not None:
            state.coming.append(load)
            self._begin(computation)
        if self.ahead and not self._steps and not state.fresh:
            # Evaluation, or a search for faults
            self._bring(state, state.rounds)
            state.fresh = True
        if self.ring is None:
            return state.placement.trimmed
        if computation is not None:
            return state.passes[-1].placement.trimmed
        if self._steps:
            return state.passes[self._returning(number)].placement.trimmed
        rounds, _ = state.plan_pass(_numbers(load))
        self._bring(state, rounds)
        return rounds.placement.trimmed

    def aggregate(self) -> None:
        """Complete every Agg; called after the last backward pass and before gradients are reduced."""
        self._begin(Action(0, Operation.REDUCE))

    def finish_iteration(self) -> None:
        """Put the next placements in force and record the finished iteration."""
        executed = {number: (state.rounds, state.manager.planned_ratio) for number, state in self.layers.items()}
        self._begin(Action(0, Operation.STEP))
        assert not (self._steps or self._started or self._plans), "a schedule is executed to its end"
        for number, state in self.layers.items():
            if not state.observed and self.ahead:
                self._observe(state)
            state.close(*executed[number])

    def transfer_owners(self) -> None:
        """After the optimizer's step, transfer experts to the owners in new placements, and put these in force."""
        for number, plan in self._new_owners.items():
            state = self.layers[number]
            placement = plan.decision.placement
            assert self.mover is not None and placement is not None and state.last is not None
            start = clock.mark()
            changes = owner_changes(state.placement.home, placement.home)
            with record_function("Transfer"):
                moved = self.mover.transfer(changes, state.fields())
            action = Action(number, Operation.TRANSFER)
            self._record("communication", action, start, clock.mark(), issued=start, num_bytes=moved.sent_bytes)
            state.slots.own(placement.experts_of(self.group.rank()))
            self._adopt(number, state, plan)
            sent = moved.total_bytes * self.group.size() / self.deciders.size()
            state.last = replace(state.last, experts_moved=len(changes), transfer_bytes=sent)
            if self.deciders.rank() == 0:
                print(f"layer {number}: {plan.decision.settlement}", flush=True)
        self._new_owners.clear()

    def _in_schedule(self, place: Action) -> Action | None:
        """Return the computation with its microbatch; None if it is a repetition or in no schedule."""
        if not self._steps or self.aside or (place.is_forward and self._repeats(place)):
            return None
        self._entered[place] += 1
        return place._replace(microbatch=self._entered[place] - 1)

    def _repeats(self, place: Action) -> bool:
        """Return whether this repeats a forward pass without gradients."""
        if not torch.is_grad_enabled():
            self._to_repeat[place] += 1
            return False
        if repeats := self._to_repeat.get(place, 0):
            self._to_repeat[place] = repeats - 1
        return repeats > 0

    def _returning(self, block: int) -> int:
        """Return the microbatch whose backward pass repeats a forward computation of a block."""
        return self._entered[Action(block, Operation.BEC)]

    def _begin(self, computation: Action) -> None:
        """Execute the step before a computation: wait for actions, start new ones, wait for some of the new ones."""
        if self._now is not None and self._now[0] == computation:
            return
        step = self._steps.popleft()
        now = clock.mark()
        assert step.computation == computation, f"the model computes {computation} where its schedule has {step}"
        if self._now is not None:
            ended, start = self._now
            if ended.operation in EXPERTS:
                self.layers[ended.block].spans.append((ended.operation, (start, now)))
            self._record("computation", ended, start, now)
        started = step.planning + step.communication
        if step.waits:
            now = self._wait([action for action in step.waits if action not in started], now)
        for action in started:
            self._start(action)
        if not computation.is_forward:
            self.planner.begin()
        if computation.operation is Operation.BEC:
            self.layers[computation.block].keep_loads()
        if started:
            now = self._wait([action for action in step.waits if action in started], clock.mark())
        if self.ring is not None and computation.operation is Operation.BEC:
            assert computation.microbatch is not None
            self._hold(computation.block, computation.microbatch)
        self._now = computation, now

    def _start(self, action: Action) -> None:
        state = self.layers[action.block]
        if action.operation is Operation.PLAN:
            if action.microbatch is None:
                self._plans[action] = self._start_plan(action.block)
            else:
                self._plan_pass(action)
            return
        whole = state.rounds_in(action.microbatch)
        rounds = whole.of(action)
        if action.operation is Operation.AGG:
            work = self._start_agg(state, whole, rounds)
        else:
            slots = state.slots if action.operation is Operation.BTRANS else state.forward_slots
            work = self._start_trans(state, whole, rounds, slots)
        self._started[action] = rounds, work

    def _start_trans(
        self, state: LayerState, whole: PlacementRounds, rounds: TransPlan, slots: WeightSlots
    ) -> AsyncWork | None:
        if self.ring is not None and whole is not state.rounds and not self.ring.take(slots, whole):
            return None
        # Start even an empty Trans: `ready` may start a gather that replicas with other plans take part in
        with record_function("Trans"):
            work = functools.partial(self.trans_agg.trans, rounds, whole.placement, slots)
            return self._side_stream.start(work, slots.ready)

    def _bring(self, state: LayerState, whole: PlacementRounds) -> None:
        """Fill a layer's guest slots for a forward pass outside of a schedule."""
        work = self._start_trans(state, whole, whole.plan, state.forward_slots)
        if work is not None:
            work.wait()

    def _start_agg(self, state: LayerState, whole: PlacementRounds, rounds: TransPlan) -> AsyncWork | None:
        if not len(rounds):
            return None
        with record_function("Agg"):
            return self._side_stream.start(functools.partial(self.trans_agg.agg, rounds, whole.placement, state.slots))

    def _hold(self, number: int, microbatch: int) -> None:
        """Wait until the guest slots have the weights of a pass whose backward pass has begun. A Trans that no schedule
        contains may be necessary if recomputation repeats several layers at a time."""
        assert self.ring is not None
        state = self.layers[number]
        action = Action(number, Operation.BTRANS, microbatch=microbatch)
        if action in self._started:
            self._wait_for_trans_or_agg(action, clock.mark())
        if not self.ring.has(state.slots, state.passes[microbatch]):
            self._start(action)
            self._wait_for_trans_or_agg(action, clock.mark())

    def _plan_pass(self, action: Action) -> None:
        """Plan a microbatch whose load is known. All ranks of the group make the same plan."""
        state = self.layers[action.block]
        load = _numbers(state.coming[-1])
        start = clock.mark()
        began = time.perf_counter()
        with record_function("Plan"):
            rounds, problem = state.plan_pass(load)
        ended = time.perf_counter()
        state.passes.append(rounds)
        state.plan_seconds += ended - began
        if problem is not None and self.group.rank() == 0:
            self._log_once(action.block, problem)
        self._record_wait(action, start, clock.mark())
        self._record("planning", action, began, ended)

    def _start_plan(self, number: int) -> Asked | None:
        """If a plan for the next iteration is due, ask the policy for it."""
        state = self.layers[number]
        manager = state.manager
        with record_function("Plan"):
            self._observe(state)
            if self.planner.given_up or not manager.is_due():
                return None
            assert manager.expected_BDE is not None
            question = manager.question(manager.expected_BDE, self.microbatches())
            return self.planner.ask(question) if self.agreement.plans(number) else Asked(question, None)

    def _observe(self, state: LayerState) -> None:
        """Pass the iteration's loads to the manager: the mean over replicas that share the placement."""
        counts_BDE = state.counts_BDE()
        if self.mover is not None:
            total_BDE = torch.from_numpy(counts_BDE).to(torch.cuda.current_device(), copy=True)
            dist.all_reduce(total_BDE, group=self.deciders)
            ranks = self.deciders.size()
            counts_BDE = (total_BDE.cpu().numpy() + ranks // 2) // ranks
        state.observe(counts_BDE)

    def _wait(self, actions: Iterable[Action], start: clock.Mark) -> clock.Mark:
        """Wait for actions from `start` on; return the mark of the end, because each new mark costs host time."""
        plans = []
        for action in actions:
            if action in self._started:
                start = self._wait_for_trans_or_agg(action, start)
            elif action in self._plans:
                plans.append(action)
        if plans:
            with record_function("Plan"):
                start = self._wait_for_plans(plans, start)
        return start

    def _wait_for_trans_or_agg(self, action: Action, start: clock.Mark) -> clock.Mark:
        state = self.layers[action.block]
        rounds, work = self._started.pop(action)
        kind = Operation.AGG if action.operation is Operation.AGG else Operation.TRANS
        end = start
        if work is not None:
            began, ended = work.wait()
            end = clock.mark()
            if len(rounds):
                self._record_wait(action, start, end)
                state.spans.append((kind, (began, ended)))
                if self.timeline is not None:
                    sent = sent_bytes(action.operation, rounds, state.manager.cost, self.group.rank())
                    self._record("communication", action, began, ended, issued=work.issued, num_bytes=sent)
        if action.part == action.parts:
            # After an Agg, the optimizer's step will make the guests' weights stale
            state.fresh = kind is Operation.TRANS
            whole = state.rounds_in(action.microbatch)
            if len(whole.plan) and (work is not None or kind is Operation.AGG):
                state.executed.append((kind, whole))
            if kind is Operation.AGG and action.microbatch == (None if self.ahead else self.microbatches() - 1):
                self.aggregated(action.block)
        return end

    def _wait_for_plans(self, actions: Iterable[Action], start: clock.Mark) -> clock.Mark:
        """Wait for plans with one deadline for all, and adopt the plans on which all deciding ranks agree."""
        due = {action: asked for action in actions if (asked := self._plans.pop(action)) is not None}
        if not due:
            return start
        plans = {}
        deadline = self.planner.deadline()
        for action, asked in due.items():
            if asked.plan is not None:
                plan = self.planner.result(asked, deadline)
                plans[action.block] = plan
                end = clock.mark()
                self._record_wait(action, start, end)
                self._record("planning", action, plan.start, plan.end)
                start = end
        outcomes = self.agreement.reach(plans, {action.block: asked.question for action, asked in due.items()})
        end = clock.mark()
        self._record_wait(next(iter(due)), start, end)
        for number, outcome in outcomes.items():
            self._conclude(number, self.layers[number], outcome)
        return end

    def _conclude(self, number: int, state: LayerState, outcome: Outcome) -> None:
        """Adopt an agreed plan, or keep it for after the optimizer's step; otherwise log why the placement stays."""
        plan = outcome.plan
        placement = plan.decision.placement
        state.plan_seconds = plan.end - plan.start
        if outcome.agreed and placement is not None:
            if placement.home == state.placement.home:
                self._adopt(number, state, plan)
            else:
                self._new_owners[number] = plan
        elif outcome.final and not self.planner.given_up:
            self.planner.give_up()
            if outcome.problem is not None:
                problem = cleaned(f"--balance-policy {self.planner.name} {outcome.problem}", MOST_CHARACTERS)
                message = "layer %d: %s; all placements stay, and the policy is not asked again in this run"
                logger.warning(message, number, problem)
        elif not outcome.final and outcome.problem is not None:
            self._log_once(number, outcome.problem)

    def _log_once(self, number: int, problem: str) -> None:
        """Log a policy problem, once for each kind: a policy that fails is likely to fail every time."""
        kind = problem.partition(":")[0]
        logged = self._logged[number]
        if kind not in logged and len(logged) < MOST_KINDS:
            logged.add(kind)
            problem = cleaned(f"the policy {problem}", MOST_CHARACTERS)
            logger.warning("layer %d: %s; its last placement stays (not said again)", number, problem)

    def _adopt(self, number: int, state: LayerState, plan: Plan) -> None:
        before = state.placement
        state.manager.adopt(plan.decision)
        if plan.sending is None:
            return
        state.follow(plan.sending, plan.beside)
        self.planner.prepare(state.placement, state.manager.cost.transport)
        if self.explain and self.group.rank() == 0:
            cost = state.manager.cost_of(self.microbatches())
            print(explanation(number, cost, plan.decision.expected_BDE, before, state.placement), flush=True)

    def _record_wait(self, action: Action, start: clock.Mark, end: clock.Mark) -> None:
        kind = Operation.TRANS if action.operation is Operation.BTRANS else action.operation
        self.layers[action.block].waits.append((kind, (start, end)))
        self._record("waits", action, start, end)

    def _record(self, stream: Stream, action: Action, start: clock.Mark, end: clock.Mark, **more: Any) -> None:
        if self.timeline is not None:
            self.timeline.add(TraceSpan(self._iteration, stream, action.name, start, end, **more))

    def finished(self) -> Callable[[], dict[int, LayerReport]]:
        """Return a function that makes this rank's reports; call it when the device has finished the iteration."""
        rank = self.group.rank()
        factors = self.factors
        reports = {n: state.finished(rank, factors) for n, state in self.layers.items() if state.last is not None}
        return lambda: {number: report() for number, report in reports.items()}

    def report(self) -> dict[int, LayerReport]:
        """Return this rank's reports; the device must have finished the iteration."""
        return self.finished()()

    def calibrate(self, reports: Mapping[int, LayerReport], used: Factors) -> None:
        """Calibrate by all layers' reports of an iteration with the factors `used`; all ranks pass equal reports."""
        self.calibration = self.calibration.observe(*component_seconds(reports), used)

    def loads(self) -> dict[int, tuple[np.ndarray, Placement]]:
        """Return the load matrix [D, E] and the latest placement of each layer in the finished iteration."""
        ended = {number: state.last for number, state in self.layers.items() if state.last is not None}
        return {number: (last.counts_BDE.sum(0), last.placements[-1]) for number, last in ended.items()}

    def state(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint: lists, numbers and strings."""
        layers = {str(number): state.manager.state() for number, state in self.layers.items()}
        return {"layers": layers, "calibration": self.calibration.to_plain()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore placements, predictions and calibration from a `state`."""
        self.calibration = Calibration.from_plain(states["calibration"])
        for number, state in self.layers.items():
            state.manager.restore(states["layers"][str(number)])
            state.slots.own(state.placement.experts_of(self.group.rank()))
            state.fresh = False


def _numbers(load: Reading) -> np.ndarray:
    """Wait for a load matrix [D, E]."""
    return load().numpy().astype(np.int64)
