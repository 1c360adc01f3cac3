"""The program of a team: the computations, messages and waits in its pipeline stage's schedule (`timeline/`).

In shapes, B counts microbatches, C chunks of tokens and R the ranks of the team.
"""

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

import numpy as np

from megatron_balance.flow.chunks.order import ChunkTask, Order
from megatron_balance.profile.kernel_times import UNHINDERED, Beside
from megatron_balance.simulate.context import ContextExchange
from megatron_balance.simulate.engine import NOTHING, Command, Compute, Program, Receive, Send, Start, Wait, Work
from megatron_balance.timeline.actions import Action, Operation, Schedule, Step, block_name, chunk_start
from megatron_balance.timeline.lower import Pass

IDLE = "launches"
"""Label of the time for which a device waits for the host."""


class Direction(NamedTuple):
    """An MoE layer's forward or backward pass over one microbatch."""

    order: Order
    """Order of the chunks' tasks."""
    dispatch_C: Sequence[Work]
    """Each chunk's first exchange."""
    experts_CR: np.ndarray
    """[C, R] seconds of each chunk's experts."""
    combine_C: Sequence[Work]
    """Each chunk's second exchange."""
    coding: float = 0.0
    """Seconds to compress a chunk; decompression takes as long."""
    spread: Work = NOTHING
    """Collective of an expert's shards after a chunk's rows arrive."""
    collect: Work = NOTHING
    """Collective of an expert's shards before a chunk's results return."""
    first: Work = NOTHING
    """Gather before the first exchange."""
    last: Work = NOTHING
    """Gather after the last exchange."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerWork:
    """One MoE layer of a team in one iteration."""

    forward_B: Sequence[Direction]
    backward_B: Sequence[Direction]
    repeats: bool = False
    """Whether the backward pass repeats the forward pass (full recomputation)."""
    moves: Callable[[Action], Work] = lambda action: NOTHING
    """Returns the work of a Trans, an Agg or a part of one."""
    plan: Work = NOTHING
    """Time of the next plan, on the lane of the thread that makes it."""
    plan_each: Work = NOTHING
    """Time of the plan for a microbatch's load, for which all ranks wait."""
    planner: int = 0
    """Number of the rank that plans the layer."""
    transfer: Work = NOTHING
    """Transfer of experts to other owners after the optimizer's step, on all teams of the stage."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StageSchedule:
    """What all teams of a pipeline stage have in common."""

    number: int
    stages: int
    teams: int
    """Number of teams of the stage."""
    passes: Sequence[Pass]
    blocks: Sequence[Sequence[int]]
    """Numbers of each model chunk's MoE layers."""
    schedule: Schedule
    others: Mapping[int, tuple[float, float]]
    """Forward and backward seconds of the non-MoE part of each block, and of each chunk's start, by number."""
    shared: float = 0.0
    """Forward seconds of a layer's shared experts, which `others` leaves out."""
    context: Mapping[tuple[int, int], ContextExchange] = field(default_factory=dict)
    """Exchanges of context-parallel ranks, by block and pass (0 forward, 1 backward)."""
    context_teams: int = 1
    """Number of consecutive teams that share context-parallel groups."""
    launching: tuple[float, float] = (0.0, 0.0)
    """Host seconds to launch the kernels of a block's forward pass and of its backward pass."""
    beside: Beside = UNHINDERED
    """How much longer exchanges and computation of paired passes take beside each other."""
    message: float = 0.0
    """Seconds of a message to the next stage."""
    early: Mapping[int, Work] = field(default_factory=dict)
    """Reductions that overlap with the backward pass, by the block whose gradients they reduce."""
    reduce: Work = NOTHING
    """Reduction of gradients after the backward pass."""
    step: float = 0.0
    """Seconds of the optimizer's step."""
    gather: Work = NOTHING
    """All-gather of parameters after the step."""
    late: Mapping[int, Work] = field(default_factory=dict)
    """All-gathers of parameters that overlap with the forward pass, by the block that needs them. They belong
    to the previous iteration's step; those of this iteration take as long."""


@dataclass(eq=False)
class TeamProgram:
    """The program of a team in an iteration."""

    stage: StageSchedule
    layers: Mapping[int, LayerWork]
    """By number of the MoE layer."""
    team: int
    """The team's position in its stage."""
    ranks: int
    """Number of the team's ranks."""

    def __post_init__(self) -> None:
        self.started: set[Action] = set()
        self.waited: set[Action] = set()
        self.asked: list[Action] = []
        """Plans that were requested and have not begun."""
        self.steps: dict[bool, deque[tuple[Action, list[Command]]]] = {True: deque(), False: deque()}
        """Computations of forward passes (True) and others, with the commands that begin their steps. The schedule may
        have forward and backward passes side by side, each in its own order."""
        for step in self.stage.schedule:
            self.steps[step.computation.is_forward].append((step.computation, [*self._begin(step)]))
        self.late = set(self.stage.late)
        """Blocks whose parameters are not gathered yet."""
        self.last_microbatch = max((one.microbatch for one in self.stage.passes), default=0)

    def commands(self) -> Program:
        """Yield the commands of the iteration."""
        stage = self.stage
        for block, work in stage.late.items():
            yield self._shared("late gather", block, work)
        passes = deque(stage.passes)
        while passes:
            one = passes.popleft()
            if one.paired:
                first, second = ([*self._with_messages(each)] for each in (one, passes.popleft()))
                yield from _side_by_side(first, second, stage.beside)
            else:
                yield from self._with_messages(one)
        yield from self._take(Operation.REDUCE)[1]
        yield from (Wait(("reduce", stage.number, block)) for block in stage.early)
        yield from self._collective("reduction", stage.reduce)
        yield from self._take(Operation.STEP)[1]
        yield self._compute("optimizer", stage.step)
        yield from self._collective("gather", stage.gather)
        for number, layer in self.layers.items():
            yield from self._collective(f"L{number} TRANSFER", layer.transfer)

    def _with_messages(self, one: Pass) -> Iterator[Command]:
        """Run a pass after its input arrives, and send its output."""
        stage = self.stage
        places = range(len(stage.blocks) * stage.stages)
        place = one.chunk * stage.stages + stage.number
        before, after = (place - 1, place + 1) if one.forward else (place + 1, place - 1)
        kind = "forward" if one.forward else "backward"
        if before in places:
            yield Receive(("message", self.team, before, place, one.microbatch))
        yield from self._pass(one)
        if after in places:
            yield Send(("message", self.team, place, after, one.microbatch), f"{kind} message", stage.message)

    def _collective(self, name: str, work: Work) -> Iterator[Command]:
        if work is not NOTHING:
            key = name, self.stage.number
            yield Start(key, name, work, "reduction", self.stage.teams)
            yield Wait(key)

    def _pass(self, one: Pass) -> Iterator[Command]:
        numbers = self.stage.blocks[one.chunk]
        start = chunk_start(one.chunk)
        if one.forward:
            yield from self._gathered(start)
        if not numbers:
            yield from self._computation("dense layers", start, one.forward, one.microbatch)
            if not one.forward:
                yield from self._reduced(start, one.microbatch)
            return
        if one.forward:
            yield from self._other(Operation.FNEC)
            for number in numbers:
                yield from self._gathered(number)
                yield from self._experts(self.layers[number].forward_B[one.microbatch], Operation.FEC, 1, one.paired)
                yield from self._other(Operation.FNEC)
            return
        yield from self._other(Operation.BNEC)
        for number in reversed(numbers):
            layer = self.layers[number]
            if layer.repeats:
                weights = Action(number, Operation.BTRANS, microbatch=one.microbatch)
                if weights in self.started:
                    yield Wait(self._key(weights))
                name = f"L{number} repeated m{one.microbatch}"
                labels = f"{name} experts", f"{name} dispatch", f"{name} combine"
                for commands in self._tasks(layer.forward_B[one.microbatch], *labels):
                    yield from commands
            yield from self._experts(layer.backward_B[one.microbatch], Operation.BEC, 3, one.paired)
            yield from self._other(Operation.BNEC)

    def _other(self, operation: Operation) -> Iterator[Command]:
        """Compute the non-MoE part of a block; reduce its gradients if they are complete."""
        computation, begin = self._take(operation)
        yield from begin
        forward = computation.is_forward
        yield from self._computation(computation.name, computation.block, forward, computation.microbatch)
        if not forward:
            yield from self._reduced(computation.block, computation.microbatch)

    def _computation(self, name: str, block: int, forward: bool, microbatch: int | None) -> Iterator[Command]:
        """Compute the non-MoE part of a block, with the exchanges of its attention."""
        stage = self.stage
        index = 0 if forward else 1
        seconds = stage.others[block][index]
        if exchange := stage.context.get((block, index)):
            group = self.team // stage.context_teams
            key = "context", stage.number, group, block, index, microbatch
            yield Start(key, f"{name} context", exchange.works_S[group], "context", stage.context_teams)
            yield self._compute(name, exchange.hiding)
            yield Wait(key)
            seconds -= exchange.hiding
        yield self._compute(name, seconds)

    def _reduced(self, block: int, microbatch: int | None) -> Iterator[Command]:
        if microbatch == self.last_microbatch and block in self.stage.early:
            yield self._shared("reduce", block, self.stage.early[block])

    def _gathered(self, block: int) -> Iterator[Command]:
        """Wait for the block's parameters before its first forward pass."""
        if block in self.late:
            self.late.remove(block)
            yield Wait(("late gather", self.stage.number, block))

    def _shared(self, name: str, block: int, work: Work) -> Command:
        label = f"{block_name(block)} {'reduction' if name == 'reduce' else 'gather'}"
        return Start((name, self.stage.number, block), label, work, "reduction", self.stage.teams)

    def _experts(self, direction: Direction, operation: Operation, part: int, paired: bool) -> Iterator[Command]:
        """Run an MoE layer's pass, and begin the steps of its exchanges and experts where the runtime does."""
        first, begin_first = self._take(Operation.A2A, part)
        experts, begin_experts = self._take(operation)
        second, begin_second = self._take(Operation.A2A, part + 1)
        yield from begin_first
        computing = [index for index, step in enumerate(direction.order) if step.task is ChunkTask.E]
        for index, commands in enumerate(self._tasks(direction, experts.name, first.name, second.name)):
            if index == computing[0]:
                yield from begin_experts
            yield from commands
            if index == computing[-1]:
                yield from begin_second
        if idle := self._unlaunched(direction, experts.block, experts.is_forward, paired):
            yield self._compute(IDLE, idle)

    def _unlaunched(self, direction: Direction, block: int, forward: bool, paired: bool) -> float:
        """Return the seconds for which the device waits until the host has launched a block's kernels.

        In a pair, the host also launches the other pass's kernels during an exchange.
        """
        stage = self.stage
        index = 0 if forward else 1
        busy = stage.others[block][index] + float(direction.experts_CR.mean(1).sum())
        busy += stage.shared if forward else 0.0
        if not paired:
            busy += sum(work.alone for work in (*direction.dispatch_C, *direction.combine_C))
        return max(0.0, stage.launching[index] - busy)

    def _tasks(self, direction: Direction, name: str, dispatch: str, combine: str) -> Iterator[list[Command]]:
        coding = [self._compute("codec", direction.coding)] if direction.coding else []
        first = self._gather(direction.first, dispatch, "first")
        last = self._gather(direction.last, combine, "last")
        for index, (task, chunk) in enumerate(direction.order):
            there, back = ((self.stage.number, self.team, label, chunk) for label in (dispatch, combine))
            if task is ChunkTask.C1:
                begin = [] if index else first
                yield [*begin, *coding, Start(there, dispatch, direction.dispatch_C[chunk])]
            elif task is ChunkTask.D1:
                yield [Wait(there), *coding, *self._gather(direction.spread, dispatch, chunk)]
            elif task is ChunkTask.E:
                yield [Compute(name, direction.experts_CR[chunk])]
            elif task is ChunkTask.C2:
                gather = self._gather(direction.collect, combine, chunk)
                yield [*gather, *coding, Start(back, combine, direction.combine_C[chunk])]
            else:
                end = last if index == len(direction.order) - 1 else []
                yield [Wait(back), *coding, *end]

    def _gather(self, work: Work, label: str, part: Hashable) -> list[Command]:
        if work is NOTHING:
            return []
        key = self.stage.number, self.team, label, part, "gathers"
        return [Start(key, f"{label} gathers", work, "gathers"), Wait(key)]

    def _begin(self, step: Step) -> Iterator[Command]:
        """Yield the commands just before a step's computation; called once a step, in the schedule's order."""
        yield from self._waits(step)
        self.asked += [action for action in step.planning if action.microbatch is None]
        exact = [action for action in step.planning if action.microbatch is not None]
        for action in exact:
            yield self._start(action, self.layers[action.block].plan_each, "plan of a microbatch")
        computation = step.computation
        if self.stage.shared and computation.operation is Operation.A2A and computation.part == 1:
            # The device computes shared experts while the host waits for the load and plans (`flow/layer.py`)
            yield self._compute(f"{block_name(computation.block)} FNEC shared", self.stage.shared)
        # The messages of this step depend on the plan
        yield from map(self._wait, exact)
        if not step.computation.is_forward or any(action in step.waits for action in self.asked):
            # Plans begin in a backward pass (`timeline/planner.py`)
            for action in self.asked:
                layer = self.layers[action.block]
                yield self._start(action, layer.plan, f"plan {layer.planner}")
            self.asked.clear()
        for action in step.communication:
            yield self._start(action, self.layers[action.block].moves(action), "moves")
        yield from self._waits(step)

    def _waits(self, step: Step) -> Iterator[Command]:
        """Wait for those actions that have started, once each."""
        for action in step.waits:
            if action in self.started - self.waited:
                yield self._wait(action)

    def _start(self, action: Action, work: Work, lane: str) -> Command:
        self.started.add(action)
        return Start(self._key(action), action.name, work, lane)

    def _wait(self, action: Action) -> Command:
        self.waited.add(action)
        return Wait(self._key(action))

    def _key(self, action: Action) -> Hashable:
        return self.stage.number, self.team, action

    def _take(self, operation: Operation, part: int | None = None) -> tuple[Action, list[Command]]:
        """Return the next computation of a forward or another pass, and the commands that begin its step."""
        found, begin = self.steps[Action(0, operation, part or 1, 4).is_forward].popleft()
        assert found.operation is operation and part in (None, found.part), f"{found} where {operation} is expected"
        return found, begin

    def _compute(self, label: str, seconds: float) -> Command:
        return Compute(label, np.full(self.ranks, seconds))


def _side_by_side(first: list[Command], second: list[Command], beside: Beside) -> Iterator[Command]:
    """Yield the commands of two passes that compute by turns: each while an exchange of the other is in progress.

    Both take longer meanwhile. The host launches kernels during the time that is added to computation. A pass also
    gives way before it waits for what the other one starts.
    """
    left = deque(first), deque(second)
    starts = [{one.key for one in commands if isinstance(one, Start)} for commands in left]
    added = [0.0, 0.0]
    turn = 0
    while left[0] or left[1]:
        commands = left[turn]
        other = 1 - turn
        while commands:
            command = commands.popleft()
            if isinstance(command, Start):
                starts[turn].discard(command.key)
            if isinstance(command, Wait) and command.key in starts[other]:
                commands.appendleft(command)
                break
            if isinstance(command, Compute) and command.label == IDLE:
                command = command._replace(seconds_R=np.maximum(command.seconds_R - added[turn], 0.0))
                added[turn] = 0.0
            if not _is_exchange(command):
                yield command
                continue
            longer, slower = beside.added(command.work.alone, _until_exchange(left[other]))
            yield command._replace(work=_longer(command.work, longer)) if longer else command
            if slower:
                added[other] += slower
                ranks = next(len(one.seconds_R) for one in left[other] if isinstance(one, Compute))
                yield Compute("slower layers", np.full(ranks, slower))
            break
        turn = other


def _is_exchange(command: Command) -> TypeGuard[Start]:
    return isinstance(command, Start) and command.lane == "exchange"


def _until_exchange(commands: Iterable[Command]) -> float:
    """Return the mean rank's seconds of computation before the next exchange."""
    before = itertools.takewhile(lambda one: not _is_exchange(one), commands)
    return sum(float(one.seconds_R.mean()) for one in before if isinstance(one, Compute) and one.label != IDLE)


def _longer(work: Work, seconds: float) -> Work:
    """Return a work that takes so much longer, with all of its resources busy for longer."""
    times = 1 + seconds / work.alone
    return work._replace(latency=times * work.latency, seconds=times * work.seconds)
