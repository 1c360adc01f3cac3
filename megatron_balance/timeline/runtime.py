"""When the experts' weights and gradients move: one iteration of all MoE layers of this rank.

    begin_iteration -> each computation of the schedule: wait for what it needs, start what goes beside it
    -> aggregate -> gradients reduced -> finish_iteration -> the optimizer steps -> transfer_owners

The schedule (timeline/lower.py) decides and this executes. A placement lasts from the beginning of an iteration (or,
planned on the exact load, from a layer's first forward pass) to its end; recomputation finds it unchanged.
Shape suffixes: D expert-parallel ranks, E logical experts.
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
from megatron_balance.device import clock
from megatron_balance.device.side_stream import AsyncWork, SideStream
from megatron_balance.observe.balance import LayerReport
from megatron_balance.observe.trace import Span, Stream, Timeline
from megatron_balance.placement.manager import GIVEN_UP, INVALID
from megatron_balance.placement.ownership import moves
from megatron_balance.placement.placement import Placement
from megatron_balance.timeline.actions import Action, Operation, Schedule, Step
from megatron_balance.timeline.layer_state import LayerState
from megatron_balance.timeline.planner import Asked, Plan, Planner

EXPERTS = (Operation.A2A, Operation.FEC, Operation.BEC)
"""What an MoE layer computes itself."""


class Balancer:
    """Keeps the experts of this rank's MoE layers where their placements say, when its schedule says.

    All ranks of the expert-parallel group call every method in the same order.
    """

    def __init__(
        self,
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
    ) -> None:
        """
        Args:
            group: the expert-parallel group.
            transfer: over a group of the same ranks that nobody else uses.
            layers: by layer number, in the order of the model.
            schedule: of an iteration of so many microbatches.
            microbatches: number of microbatches of the present iteration.
            guest_bytes: memory of this rank's guest slots, weights and gradients, in all layers.
            ownership: what lets experts change their owners. Then all replicas of the expert-parallel group have one
                placement, planned for their mean load.
            explain: say what each plan is expected to change.
            shards: the groups like this one of all shards of these experts, which have one placement; None: this one.
            planner: what makes the plans; None: a thread that is waited for as long as it takes.
        """
        self.group, self.transfer, self.layers = group, transfer, dict(layers)
        self.schedule, self.microbatches, self.guest_bytes = schedule, microbatches, guest_bytes
        self.ownership, self.explain = ownership, explain
        self.deciders = (shards or group) if ownership is None else ownership.group
        """The ranks that have one placement."""
        self.timeline: Timeline | None = None
        """Keeps what happened when."""
        self.aggregated: Callable[[int], None] = lambda number: None
        """Called with a layer's number when its gradients are complete."""
        self._lane, self._planner = SideStream("Trans and Agg"), planner or Planner()
        self._iteration = 0
        self._steps: deque[Step] = deque()
        """Those of this iteration that are to come; none between iterations."""
        self._now: tuple[Action, clock.Mark] | None = None
        """The present computation, and when it began."""
        self._flights: dict[Action, AsyncWork | None] = {}
        self._plans: dict[Action, Asked | None] = {}
        self._new_owners: dict[int, Plan] = {}
        """Plans that wait for the optimizer, by layer number."""
        self._entered: Counter[Action] = Counter()
        self._to_repeat: Counter[Action] = Counter()

    def begin_iteration(self, number: int) -> None:
        """Enter the first computation of an iteration; what passed since the last one is forgotten."""
        schedule = self.schedule(self.microbatches())
        self._iteration, self._steps = number, deque(schedule)
        self._entered.clear()
        self._to_repeat.clear()
        self._now = None
        self._begin(schedule[0].computation)

    def enter(self, block: int, operation: Operation, part: int = 1, parts: int = 1) -> None:
        """Do what the schedule has before a computation, which is about to begin.

        Nothing outside of iterations, or where recomputation repeats a forward pass.
        """
        computation = self._next(Action(block, operation, part, parts))
        if computation is not None:
            self._begin(computation)

    def host(self, number: int, counts_DE: torch.Tensor, training: bool) -> Placement:
        """The placement of a layer for this forward pass; hosts have its weights before their experts compute.

        Args:
            counts_DE: [D, E] load of the pass, on the host.
        """
        state = self.layers[number]
        computation = self._next(Action(number, Operation.A2A, 1, 4)) if training else None
        if computation is not None:
            state.counts_DE = state.counts_DE + counts_DE.numpy()
            state.microbatches += 1
            self._begin(computation)
        elif not self._steps and not state.fresh:
            # An evaluation, or the search for a fault
            work = functools.partial(self.transfer.trans, state.transfers, state.placement, state.slots)
            self._lane.start(work, state.slots.ready).wait()
            state.fresh = True
        return state.placement.trimmed

    def aggregate(self) -> None:
        """All gradients of guests are with their owners: after the last backward pass and before any are reduced."""
        self._begin(Action(0, Operation.REDUCE))

    def finish_iteration(self) -> None:
        """Put the next placements in force and close the books of this iteration."""
        finished = {number: (state.placement, state.transfers.experts_sent) for number, state in self.layers.items()}
        self._begin(Action(0, Operation.STEP))
        assert not (self._steps or self._flights or self._plans), "a schedule is executed to its end"
        for number, state in self.layers.items():
            if not state.observed:
                self._observe(state)
            state.close(*finished[number])

    def transfer_owners(self) -> None:
        """Move experts whose next placement has them owned elsewhere, and put it in force: after an optimizer step.

        A Transfer that fails on one rank leaves all with the placement that they have, and the layer's plans change no
        owners for a while.
        """
        for number, plan in self._new_owners.items():
            state, placement = self.layers[number], plan.decision.placement
            assert self.ownership is not None and placement is not None
            start = clock.mark()
            changes = moves(state.placement, placement)
            moved = self.ownership.transfer(changes, state.fields)
            if isinstance(moved, str):
                state.postpone_transfer(number, moved, tell=self.deciders.rank() == 0)
                continue
            action = Action(number, Operation.TRANSFER)
            self._keep("communication", action, start, clock.mark(), issued=start, num_bytes=moved.sent_bytes)
            state.slots.own(placement.experts_of(self.group.rank()))
            self._adopt(number, state, plan)
            state.moved(len(changes), moved.total_bytes * self.group.size() / self.deciders.size())
            if self.deciders.rank() == 0:
                print(f"layer {number}: {plan.decision.settlement}", flush=True)
        self._new_owners.clear()

    def _next(self, place: Action) -> Action | None:
        """The computation with its microbatch, as long as the iteration lasts and unless it is a repetition."""
        if not self._steps or (place.is_forward and self._repeats(place)):
            return None
        microbatch, self._entered[place] = self._entered[place], self._entered[place] + 1
        return place._replace(microbatch=microbatch)

    def _repeats(self, place: Action) -> bool:
        """Whether this forward pass is a second one; where activations are recomputed, the first has no gradients."""
        if not torch.is_grad_enabled():
            self._to_repeat[place] += 1
            return False
        repeats = self._to_repeat[place] > 0
        self._to_repeat[place] -= repeats
        return repeats

    def _begin(self, computation: Action) -> None:
        if self._now is not None and self._now[0] == computation:
            return
        step, now = self._steps.popleft(), clock.mark()
        assert step.computation == computation, f"the model computes {computation} where its schedule has {step}"
        if self._now is not None:
            self._note(*self._now, now)
        started = step.planning + step.communication
        self._wait([action for action in step.waits if action not in started])
        for action in started:
            self._start(action)
        self._wait([action for action in step.waits if action in started])
        self._now = computation, clock.mark() if started or step.waits else now

    def _note(self, computation: Action, start: clock.Mark, end: clock.Mark) -> None:
        if computation.operation in EXPERTS:
            self.layers[computation.block].spans.append((start, end))
        self._keep("computation", computation, start, end)

    def _keep(self, stream: Stream, action: Action, start: clock.Mark, end: clock.Mark, **more: Any) -> None:
        if self.timeline is not None:
            self.timeline.add(Span(self._iteration, stream, action.name, start, end, **more))

    def _start(self, action: Action) -> None:
        state = self.layers[action.block]
        if action.operation is Operation.PLAN:
            self._plans[action] = self._start_plan(state, ahead=action.iteration)
            return
        plan = state.part(action)
        if action.operation is Operation.TRANS:
            # Without rounds too: `ready` may start a gather, and replicas that plan differently share its communicator
            work = functools.partial(self.transfer.trans, plan, state.placement, state.slots)
            self._flights[action] = self._lane.start(work, state.slots.ready)
        elif plan.rounds:
            work = functools.partial(self.transfer.agg, plan, state.placement, state.slots)
            self._flights[action] = self._lane.start(work)
        else:
            self._flights[action] = None

    def _start_plan(self, state: LayerState, ahead: int) -> Asked | None:
        """Let the policy plan for this iteration or the next one, if a plan is due."""
        manager, microbatches = state.manager, self.microbatches()
        if ahead:
            self._observe(state)
            expected_DE = manager.expected_DE
        else:
            expected_DE = np.asarray(state.counts_DE) * microbatches
        if not manager.is_due(ahead):
            return None
        assert expected_DE is not None
        manager.expected_DE = expected_DE
        return None if self._planner.given_up else self._planner.ask(manager.question(expected_DE, microbatches))

    def _observe(self, state: LayerState) -> None:
        """Tell the manager the iteration's load: where replicas have one placement, the mean of theirs."""
        counts_DE = np.asarray(state.counts_DE)
        if self.ownership is not None:
            total_DE = torch.from_numpy(counts_DE).to(torch.cuda.current_device(), copy=True)
            dist.all_reduce(total_DE, group=self.deciders)
            ranks = self.deciders.size()
            counts_DE = (total_DE.cpu().numpy() + ranks // 2) // ranks
        state.observe(counts_DE)

    def _wait(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if action.operation is not Operation.PLAN:
                self._wait_for_transfer(action)
        plans = [action for action in actions if action.operation is Operation.PLAN]
        if plans:
            self._conclude(plans)

    def _wait_for_transfer(self, action: Action) -> None:
        state, flight = self.layers[action.block], self._flights.pop(action)
        if flight is not None:
            start = clock.mark()
            began, ended = flight.wait()
            if state.part(action).rounds:
                self._waited(action, start)
                sent = state.sent_bytes(action, self.group.rank()) if self.timeline is not None else 0
                self._keep("communication", action, began, ended, issued=flight.issued, num_bytes=sent)
        if action.part < action.parts:
            return
        # Once gradients are together, the optimizer steps
        state.fresh = action.operation is Operation.TRANS
        if action.operation is Operation.AGG:
            self.aggregated(action.block)

    def _waited(self, action: Action, start: clock.Mark) -> None:
        end = clock.mark()
        self.layers[action.block].waits.append((action.operation, (start, end)))
        self._keep("waits", action, start, end)

    def _conclude(self, actions: Iterable[Action]) -> None:
        """Placements change where all ranks of the group want the same, however long one of them plans."""
        due = {action: asked for action in actions if (asked := self._plans.pop(action)) is not None}
        if not due:
            return
        plans: dict[int, Plan] = {}
        deadline = self._planner.deadline()
        for action, asked in due.items():
            start = clock.mark()
            plans[action.block] = plan = self._planner.result(asked, deadline)
            self._waited(action, start)
            self._keep("planning", action, plan.start, plan.end)
            self.layers[action.block].plan_seconds = plan.end - plan.start
        gathered = self._gathered([plan.decision.digest for plan in plans.values()])
        for (number, plan), ranks in zip(plans.items(), gathered, strict=True):
            state, placement = self.layers[number], plan.decision.placement
            if len(set(ranks)) == 1 and placement is not None:
                if placement.home == state.placement.home:
                    self._adopt(number, state, plan)
                else:
                    self._new_owners[number] = plan
            elif GIVEN_UP in ranks:
                self._give_up(number, plan, ranks.index(GIVEN_UP))
            elif INVALID not in ranks and self.deciders.rank() == 0:
                state.warn(number, "the policy plans differently on different ranks")
            elif INVALID in ranks and self.deciders.rank() == ranks.index(INVALID):
                state.warn(number, f"the policy {plan.decision.problem}")

    def _give_up(self, number: int, plan: Plan, rank: int) -> None:
        """A rank cannot ask its policy any more; from here on none does."""
        if self._planner.given_up:
            return
        self._planner.give_up()
        if self.deciders.rank() == rank:
            self.layers[number].give_up(number, f"--balance-policy {self._planner.name} {plan.decision.problem}")

    def _adopt(self, number: int, state: LayerState, plan: Plan) -> None:
        before = state.placement
        state.manager.adopt(plan.decision)
        if plan.transfers is None:
            return
        state.transfers, state.fresh = plan.transfers, False
        if self.explain and self.group.rank() == 0:
            print(state.explanation(number, before, plan.decision.expected_DE, self.microbatches()), flush=True)

    def _gathered(self, digests: Sequence[bytes]) -> list[list[bytes]]:
        """[layers][ranks]: the digests of all that have one placement."""
        own = torch.tensor([list(digest) for digest in digests], dtype=torch.uint8)
        own = own.to(torch.cuda.current_device())
        gathered = own.new_empty(self.deciders.size() * own.numel())
        dist.all_gather_into_tensor(gathered, own.view(-1), group=self.deciders)
        table = gathered.view(self.deciders.size(), *own.shape).transpose(0, 1).tolist()
        return [[bytes(digest) for digest in ranks] for ranks in table]

    def report(self) -> dict[int, LayerReport]:
        """The finished iteration, as this rank saw it; the device must have finished it."""
        return {number: state.report() for number, state in self.layers.items() if state.last is not None}

    def loads(self) -> dict[int, tuple[np.ndarray, Placement]]:
        """Load matrix [D, E] and placement of every layer in the finished iteration."""
        states = {number: state.last for number, state in self.layers.items()}
        return {number: (last.counts_DE, last.placement) for number, last in states.items() if last is not None}

    def state(self) -> dict[str, Any]:
        """Lists, numbers and strings for a checkpoint of this rank."""
        return {str(number): state.manager.state() for number, state in self.layers.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Continue with the placements and predictions that `state` described."""
        for number, state in self.layers.items():
            state.manager.restore(states[str(number)])
            state.slots.own(state.placement.experts_of(self.group.rank()))
            state.transfers, state.fresh = state.manager.cost.transfers(state.placement), False
