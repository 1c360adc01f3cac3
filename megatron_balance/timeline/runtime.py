"""When the experts' weights and gradients move.

An expert's weights move at two moments of an iteration, its gradients at one:

    Trans      weights from the owner to the guests, before the layer's experts compute for the first time
    Agg        gradients from the guests to the owner, after the layer's last backward pass and before any reduction
    Transfer   weights and optimizer state to a new owner, after the optimizer's step

The placements determine which experts move; Plan decides each next one from observed load. The schedule determines when
Plan, Trans and Agg start and where they are waited for (timeline/lower.py): blocking, where their result is needed;
blockwise, overlapped with the computation of the neighboring block. The Balancer executes the schedule:

    begin_iteration     take the schedule for this number of microbatches
    enter, host         before each computation: wait for what it needs, start what overlaps with it
    aggregate           complete every Agg; gradients are reduced next
    finish_iteration    complete every Plan and put the next placements in force; the optimizer steps next
    transfer_owners     Transfer

A placement is in force from the beginning of an iteration to its end, or, if it is planned on the exact load, from the
layer's first forward pass on. Recomputation finds it unchanged.
"""

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.comm.ownership_transfer import OwnershipTransfer
from megatron_balance.comm.trans_agg import ExpertTransfer
from megatron_balance.cost.calibration import UNCALIBRATED, Calibration, Factors
from megatron_balance.device import clock
from megatron_balance.device.host_memory import Reading
from megatron_balance.device.side_stream import AsyncWork, SideStream
from megatron_balance.observe.balance import LayerReport, component_seconds
from megatron_balance.observe.calibration_log import Record
from megatron_balance.observe.profiling import record_function
from megatron_balance.observe.trace import Span, Stream, Timeline
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.transfers import TransferPlan
from megatron_balance.planning.ownership import owner_changes
from megatron_balance.timeline.actions import EXPERTS, Action, Operation, Schedule, Step
from megatron_balance.timeline.agreement import Compared, Outcome, Shared
from megatron_balance.timeline.layer_state import LayerState
from megatron_balance.timeline.planner import Asked, Plan, Planner


class Balancer:
    """Keeps the experts of this rank's MoE layers where their placements put them, at the moments of its schedule.

    All ranks of the expert-parallel group call every method in the same order.
    """

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        transfer: ExpertTransfer,
        layers: Mapping[int, LayerState],
        schedule: Callable[[int], Schedule],
        microbatches: Callable[[], int],
        guest_bytes: int,
        ownership: OwnershipTransfer | None = None,
        explain: bool = False,
        shards: dist.ProcessGroup | None = None,
        planner: Planner | None = None,
        shares: bool = False,
        calibrates: bool = False,
        record: Record | None = None,
    ) -> None:
        """
        Args:
            group: the expert-parallel group.
            transfer: executes Trans and Agg, over a separate group of the same ranks.
            layers: by layer number, in the order of the model.
            schedule: number of microbatches -> the schedule of an iteration.
            microbatches: returns the number of microbatches of the current iteration.
            guest_bytes: memory of this rank's guest slots, weights and gradients, in all layers.
            ownership: executes Transfer; replicas then have one placement, for their mean load. None: owners stay.
            explain: print the expected effect of each plan.
            shards: the ranks of all shards of these experts, which have one placement; None: `group`.
            planner: makes the plans; None: a thread without a time limit.
            shares: whether ranks that have one placement plan for each other.
            calibrates: whether plans are made with calibrated cost models.
            record: the factors to calibrate with; None: those that this run measures.
        """
        self.group, self.transfer, self.layers = group, transfer, dict(layers)
        self.schedule = schedule
        self.microbatches = microbatches
        self.guest_bytes = guest_bytes
        self.ownership = ownership
        self.explain = explain
        self.deciders = (shards or group) if ownership is None else ownership.group
        """The ranks that have one placement."""
        self.agreement = Shared(self.deciders, self.layers) if shares else Compared(self.deciders)
        self.calibrates = calibrates
        self.record = record
        self.calibration, self.factors = Calibration(), UNCALIBRATED
        """What the finished iterations measured, and the factors of the iteration in progress."""
        self.timeline: Timeline | None = None
        """Records spans of computation, communication, planning and waits."""
        self.aside = False
        """Whether the forward pass in progress has no backward pass, so that no schedule contains it."""
        self.aggregated: Callable[[int], None] = lambda number: None
        """Called with a layer's number when its gradients are complete."""
        self._side_stream, self._planner = SideStream("Trans and Agg"), planner or Planner()
        self._iteration, self._steps = 0, deque[Step]()
        """The rest of this iteration's schedule; empty between iterations."""
        self._now: tuple[Action, clock.Mark] | None = None
        """The current computation, and when it began."""
        self._started: dict[Action, AsyncWork | None] = {}
        """Trans and Agg that have started and are not waited for yet; None where there is nothing to send."""
        self._plans: dict[Action, Asked | None] = {}
        """Plans that have started and are not waited for yet; None where no plan is due."""
        self._new_owners: dict[int, Plan] = {}
        """Plans that wait for the optimizer's step, by layer number."""
        self._entered, self._to_repeat = Counter[Action](), Counter[Action]()

    def begin_iteration(self, number: int) -> None:
        """Begin the first computation of an iteration; forget everything since the last one."""
        schedule = self.schedule(self.microbatches())
        self._iteration, self._steps, self._now = number, deque(schedule), None
        self._entered.clear()
        self._to_repeat.clear()
        self.factors = self.calibration.factors if self.record is None else self.record.at(number)
        if self.calibrates:
            for state in self.layers.values():
                state.manager.factors = self.factors
        self._begin(schedule[0].computation)

    def enter(self, block: int, operation: Operation, part: int = 1, parts: int = 1) -> None:
        """Execute the schedule's step before a computation, unless no schedule has it, or it is a repetition."""
        computation = self._in_schedule(Action(block, operation, part, parts))
        if computation is not None:
            self._begin(computation)

    def host(self, number: int, load: Reading, training: bool) -> Placement:
        """Return the placement of a layer for a forward pass with this load [D, E].

        Its hosts have the weights when experts compute. Nothing waits for the load before it is needed.
        """
        state = self.layers[number]
        if self.aside and self._steps:
            return state.owners_alone
        computation = self._in_schedule(Action(number, Operation.A2A, 1, 4)) if training else None
        if computation is not None:
            state.coming.append(load)
            self._begin(computation)
        elif not self._steps and not state.fresh:
            # An evaluation, or the search for a fault
            self._start_trans(state, state.transfers).wait()
            state.fresh = True
        return state.placement.trimmed

    def aggregate(self) -> None:
        """Complete every Agg: called after the last backward pass and before any gradients are reduced."""
        self._begin(Action(0, Operation.REDUCE))

    def finish_iteration(self) -> None:
        """Put the next placements in force and record what happened in this iteration."""
        finished = {number: (state.placement, state.transfers) for number, state in self.layers.items()}
        self._begin(Action(0, Operation.STEP))
        assert not (self._steps or self._started or self._plans), "a schedule is executed to its end"
        for number, state in self.layers.items():
            if not state.observed:
                self._observe(state)
            state.close(*finished[number])

    def transfer_owners(self) -> None:
        """Transfer experts to their owners in the next placement, after the optimizer's step, and put it in force.

        If a Transfer fails on one rank, all ranks keep their placement, and the layer's plans change no owners for some
        iterations.
        """
        for number, plan in self._new_owners.items():
            state = self.layers[number]
            placement = plan.decision.placement
            assert self.ownership is not None and placement is not None
            start = clock.mark()
            changes = owner_changes(state.placement.home, placement.home)
            with record_function("Transfer"):
                moved = self.ownership.transfer(changes, state.fields)
            if isinstance(moved, str):
                state.postpone_transfer(number, moved, log=self.deciders.rank() == 0)
                continue
            action = Action(number, Operation.TRANSFER)
            self._record("communication", action, start, clock.mark(), issued=start, num_bytes=moved.sent_bytes)
            state.slots.own(placement.experts_of(self.group.rank()))
            self._adopt(number, state, plan)
            state.moved(len(changes), moved.total_bytes * self.group.size() / self.deciders.size())
            if self.deciders.rank() == 0:
                print(f"layer {number}: {plan.decision.settlement}", flush=True)
        self._new_owners.clear()

    def _in_schedule(self, place: Action) -> Action | None:
        """Return the computation with its microbatch; None if no schedule has it, or if it is a repetition."""
        if not self._steps or self.aside or (place.is_forward and self._repeats(place)):
            return None
        self._entered[place] = 1 + (microbatch := self._entered.get(place, 0))
        return Action(place.block, place.operation, place.part, place.parts, microbatch)

    def _repeats(self, place: Action) -> bool:
        """Return whether recomputation repeats a forward pass here; the first one had no gradients."""
        if not torch.is_grad_enabled():
            self._to_repeat[place] += 1
            return False
        if repeats := self._to_repeat.get(place, 0):
            self._to_repeat[place] = repeats - 1
        return repeats > 0

    def _begin(self, computation: Action) -> None:
        """Execute the step before a computation: wait for earlier actions, start new ones, wait for some of these."""
        if self._now is not None and self._now[0] == computation:
            return
        step = self._steps.popleft()
        now = clock.mark()
        assert step.computation == computation, f"the model computes {computation} where its schedule has {step}"
        if self._now is not None:
            self._record_computation(*self._now, now)
        started = step.planning + step.communication
        if step.waits:
            now = self._wait([action for action in step.waits if action not in started], now)
        for action in started:
            self._start(action)
        if not computation.is_forward:
            self._planner.begin()
        if computation.operation is Operation.BEC:
            self.layers[computation.block].keep_loads()
        if started:
            now = self._wait([action for action in step.waits if action in started], clock.mark())
        self._now = computation, now

    def _start(self, action: Action) -> None:
        state = self.layers[action.block]
        if action.operation is Operation.PLAN:
            self._plans[action] = self._start_plan(action.block, ahead=action.iteration)
        elif action.operation is Operation.TRANS:
            self._started[action] = self._start_trans(state, state.part(action))
        else:
            self._started[action] = self._start_agg(state, state.part(action))

    def _start_trans(self, state: LayerState, plan: TransferPlan) -> AsyncWork:
        # Even without rounds: `ready` may start a gather, and replicas that plan differently share its communicator
        with record_function("Trans"):
            work = functools.partial(self.transfer.trans, plan, state.placement, state.slots)
            return self._side_stream.start(work, state.slots.ready)

    def _start_agg(self, state: LayerState, plan: TransferPlan) -> AsyncWork | None:
        if not len(plan):
            return None
        with record_function("Agg"):
            return self._side_stream.start(functools.partial(self.transfer.agg, plan, state.placement, state.slots))

    def _start_plan(self, number: int, ahead: int) -> Asked | None:
        """Ask the policy for a plan for this iteration or the next one, if a plan is due."""
        state = self.layers[number]
        manager = state.manager
        microbatches = self.microbatches()
        with record_function("Plan"):
            if ahead:
                self._observe(state)
                expected_BDE = manager.expected_BDE
            else:
                expected_BDE = state.counts_BDE() * microbatches
            if not manager.is_due(ahead):
                return None
            assert expected_BDE is not None
            manager.expected_BDE = expected_BDE
            if self._planner.given_up:
                return None
            question = manager.question(expected_BDE, microbatches)
            return self._planner.ask(question) if self.agreement.plans(number) else Asked(question, None)

    def _observe(self, state: LayerState) -> None:
        """Report the iteration's loads to the manager: the mean over replicas that have one placement."""
        counts_BDE = state.counts_BDE()
        if self.ownership is not None:
            total_BDE = torch.from_numpy(counts_BDE).to(torch.cuda.current_device(), copy=True)
            dist.all_reduce(total_BDE, group=self.deciders)
            ranks = self.deciders.size()
            counts_BDE = (total_BDE.cpu().numpy() + ranks // 2) // ranks
        state.observe(counts_BDE)

    def _wait(self, actions: Sequence[Action], start: clock.Mark) -> clock.Mark:
        """Wait from `start` on; return the mark of the end, because each mark costs the host time."""
        for action in actions:
            if action.operation is not Operation.PLAN:
                start = self._wait_for_transfer(action, start)
        if plans := [action for action in actions if action.operation is Operation.PLAN]:
            with record_function("Plan"):
                start = self._wait_for_plans(plans, start)
        return start

    def _wait_for_transfer(self, action: Action, start: clock.Mark) -> clock.Mark:
        """Wait for a Trans or an Agg, or for a part of one, from `start` on; return the mark of the end."""
        state = self.layers[action.block]
        work = self._started.pop(action)
        end = start
        if work is not None:
            began, ended = work.wait()
            end = clock.mark()
            if len(state.part(action)):
                self._record_wait(action, start, end)
                state.spans.append((action.operation, (began, ended)))
                sent = state.sent_bytes(action, self.group.rank()) if self.timeline is not None else 0
                self._record("communication", action, began, ended, issued=work.issued, num_bytes=sent)
        if action.part == action.parts:
            # The optimizer steps after every Agg, and makes the guests' weights stale
            state.fresh = action.operation is Operation.TRANS
            if action.operation is Operation.AGG:
                self.aggregated(action.block)
        return end

    def _wait_for_plans(self, actions: Iterable[Action], start: clock.Mark) -> clock.Mark:
        """Wait for plans, and adopt those on which all deciding ranks agree, even if one of them plans for long."""
        due = {action: asked for action in actions if (asked := self._plans.pop(action)) is not None}
        if not due:
            return start
        plans = {}
        deadline = self._planner.deadline()
        for action, asked in due.items():
            if asked.plan is not None:
                plans[action.block] = plan = self._planner.result(asked, deadline)
                start, before = clock.mark(), start
                self._record_wait(action, before, start)
                self._record("planning", action, plan.start, plan.end)
        outcomes = self.agreement.reach(plans, {action.block: asked.question for action, asked in due.items()})
        self._record_wait(next(iter(due)), start, end := clock.mark())
        for number, outcome in outcomes.items():
            self._conclude(number, self.layers[number], outcome)
        return end

    def _conclude(self, number: int, state: LayerState, outcome: Outcome) -> None:
        plan = outcome.plan
        placement = outcome.plan.decision.placement
        state.plan_seconds = plan.end - plan.start
        if outcome.agreed and placement is not None:
            if placement.home == state.placement.home:
                self._adopt(number, state, plan)
            else:
                self._new_owners[number] = plan
        elif outcome.final and not self._planner.given_up:
            self._planner.give_up()
            if outcome.problem is not None:
                state.give_up(number, f"--balance-policy {self._planner.name} {outcome.problem}")
        elif not outcome.final and outcome.problem is not None:
            state.warn(number, f"the policy {outcome.problem}")

    def _adopt(self, number: int, state: LayerState, plan: Plan) -> None:
        """Put a plan's placement in force."""
        before = state.placement
        state.manager.adopt(plan.decision)
        if plan.sending is None:
            return
        state.follow(plan.sending, plan.beside)
        self._planner.prepare(state.placement, state.manager.cost.transport)
        if self.explain and self.group.rank() == 0:
            print(state.explanation(number, before, plan.decision.expected_BDE, self.microbatches()), flush=True)

    def _record_computation(self, computation: Action, start: clock.Mark, end: clock.Mark) -> None:
        if computation.operation in EXPERTS:
            self.layers[computation.block].spans.append((computation.operation, (start, end)))
        self._record("computation", computation, start, end)

    def _record_wait(self, action: Action, start: clock.Mark, end: clock.Mark) -> None:
        self.layers[action.block].waits.append((action.operation, (start, end)))
        self._record("waits", action, start, end)

    def _record(self, stream: Stream, action: Action, start: clock.Mark, end: clock.Mark, **more: Any) -> None:
        if self.timeline is not None:
            self.timeline.add(Span(self._iteration, stream, action.name, start, end, **more))

    def finished(self) -> Callable[[], dict[int, LayerReport]]:
        """Return a function that returns the finished iteration as this rank saw it, by layer.

        It must be called when the device has finished the iteration, maybe during the next one.
        """
        rank = self.group.rank()
        factors = self.factors
        reports = {n: state.finished(rank, factors) for n, state in self.layers.items() if state.last is not None}
        return lambda: {number: report() for number, report in reports.items()}

    def report(self) -> dict[int, LayerReport]:
        """Return the result of `finished`; the device must have finished the iteration."""
        return self.finished()()

    def calibrate(self, reports: Mapping[int, LayerReport], used: Factors) -> None:
        """Calibrate later iterations by one with factors `used`; all ranks give the same reports, of all layers."""
        self.calibration = self.calibration.observe(*component_seconds(reports), used)

    def loads(self) -> dict[int, tuple[np.ndarray, Placement]]:
        """Return the load matrix [D, E] and the placement of every layer in the finished iteration."""
        ended = {number: state.last for number, state in self.layers.items() if state.last is not None}
        return {number: (last.counts_BDE.sum(0), last.placement) for number, last in ended.items()}

    def state(self) -> dict[str, Any]:
        """Return lists, numbers and strings for a checkpoint of this rank."""
        layers = {str(number): state.manager.state() for number, state in self.layers.items()}
        return {"layers": layers, "calibration": self.calibration.to_plain()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Continue with the placements, predictions and calibration of a `state`."""
        self.calibration = Calibration.from_plain(states["calibration"])
        for number, state in self.layers.items():
            state.manager.restore(states["layers"][str(number)])
            state.slots.own(state.placement.experts_of(self.group.rank()))
            state.fresh = False
