"""What holds for every schedule, so that no iteration trains on wrong weights, loses gradients or hangs."""

import math
from collections import defaultdict
from collections.abc import Iterator

from megatron_balance.timeline.actions import Action, Operation, Schedule, grid, places

Problem = tuple[int, str]
"""A step, and what is wrong there."""


def validate(schedule: Schedule) -> None:
    """Check the schedule of a rank.

    Every action that is started is waited for once, later; weights arrive before their experts compute; gradients leave
    after the last backward pass and arrive before they are reduced; plans use the whole load.
    """
    problems = sorted(_problems(schedule))
    assert not problems, (problems[0], grid(schedule))


def validate_ring(schedule: Schedule, ring: int, apart: bool = False) -> None:
    """Check a schedule in which each microbatch has its own Plan, Trans and Agg, by playing it.

    Experts compute with the weights of their own pass, which have arrived. BEC or the exchange after it writes
    gradients to a buffer without gradients. They leave it after that, and are home before they are reduced and before
    the buffer is written again. A Trans starts and ends in forward passes, the other messages in backward passes, so
    that they follow the work of these passes on a device. `apart`: forward passes have buffers of their own.
    """
    problems = list(_ring_problems(schedule, ring, apart))
    assert not problems, (problems[0], grid(schedule))


def _ring_problems(schedule: Schedule, ring: int, apart: bool) -> Iterator[Problem]:
    layers = sorted({step.computation.block for step in schedule if step.computation.operation is Operation.FEC})
    buffer_of = {layer: position % ring for position, layer in enumerate(layers)}
    started: set[Action] = set()
    ended: set[Action] = set()
    weights: dict[tuple[int, bool], Action] = {}
    """By buffer, and whether only forward passes use it: the latest Trans that was started."""
    gradients: dict[int, tuple[int, int | None, bool]] = {}
    """By buffer: the pass whose gradients it has, and whether they are complete."""
    for number, (computation, communication, planning, waits) in enumerate(schedule):
        block, operation, part, _, microbatch, _ = computation
        new = (*planning, *communication)
        for action in (*communication, *waits):
            if computation.is_forward != (action.operation in (Operation.PLAN, Operation.TRANS)):
                yield number, f"{action} in a pass of the other direction"
        for action in (*(one for one in waits if one not in new), *new, *(one for one in waits if one in new)):
            if action in new and action not in started:
                started.add(action)
                if action.operation in (Operation.TRANS, Operation.BTRANS):
                    weights[buffer_of[action.block], apart and action.operation is Operation.TRANS] = action
                    if Action(action.block, Operation.PLAN, microbatch=action.microbatch) not in started:
                        yield number, f"{action} starts before its plan"
                complete = action.block, action.microbatch, True
                if action.operation is Operation.AGG and gradients.get(buffer_of[action.block]) != complete:
                    yield number, f"{action} starts before its gradients are complete"
                continue
            if action not in started:
                yield number, f"{action} is waited for before it is started"
            if action in ended:
                yield number, f"{action} is waited for again"
            ended.add(action)
            if action.operation is Operation.AGG:
                gradients.pop(buffer_of[action.block], None)
        if operation in (Operation.FEC, Operation.BEC):
            holds = weights.get((buffer_of[block], apart and operation is Operation.FEC))
            if holds is None or (holds.block, holds.microbatch) != (block, microbatch) or holds not in ended:
                yield number, f"{computation} finds the weights of {holds}"
        if operation is Operation.BEC:
            if buffer_of[block] in gradients:
                yield number, f"{computation} finds the gradients of {gradients[buffer_of[block]]}"
            gradients[buffer_of[block]] = block, microbatch, False
        if (operation, part) == (Operation.A2A, 4):
            gradients[buffer_of[block]] = block, microbatch, True
        if operation is Operation.REDUCE and gradients:
            yield number, f"gradients of {gradients} are missing"
    if started != ended:
        yield len(schedule), f"{started - ended} are never waited for"
    aggs = {(one.block, one.microbatch) for one in started if one.operation is Operation.AGG}
    computed = {step.computation[::4] for step in schedule if step.computation.operation is Operation.BEC}
    if aggs != {(block, microbatch) for block, microbatch in computed}:
        yield len(schedule), f"gradients of {computed - aggs} never leave"


def _problems(schedule: Schedule) -> Iterator[Problem]:
    # The step at which each action starts, and the step that waits for it
    starts: dict[Action, int] = {}
    ends: dict[Action, int] = {}
    for number, (_, communication, planning, waits) in enumerate(schedule):
        for action in communication + planning:
            if action in starts:
                yield number, f"{action} is started again"
            starts[action] = number
        for action in waits:
            if action not in starts:
                yield number, f"{action} is waited for before it is started"
            if action in ends:
                yield number, f"{action} is waited for again"
            ends[action] = number
    actions: defaultdict[tuple[int, Operation], list[Action]] = defaultdict(list)
    for action, number in starts.items():
        actions[action.block, action.operation].append(action)
        if action not in ends:
            yield number, f"{action} is never waited for"

    def arrive(block: int, operation: Operation, step: int) -> bool:
        """Return whether all parts of an action have been waited for at a step."""
        parts = [action for action in actions[block, operation] if ends.get(action, math.inf) <= step]
        return bool(parts) and sorted(action.part for action in parts) == [*range(1, parts[0].parts + 1)]

    first, last = places(schedule)
    reduce = last[0, Operation.REDUCE, 1]
    for (block, operation, _), number in first.items():
        if operation is Operation.FEC and not arrive(block, Operation.TRANS, number):
            yield number, f"L{block} computes before its TRANS has arrived"
    for (block, operation, _), complete in last.items():
        if operation is Operation.BEC:
            for action in actions[block, Operation.AGG]:
                if starts[action] <= complete:
                    yield starts[action], f"{action} starts before its gradients are complete, at step {complete}"
            if not arrive(block, Operation.AGG, reduce):
                yield reduce, f"gradients of L{block} are reduced before its AGG has arrived"
    for action, number in starts.items():
        if action.operation is Operation.PLAN:
            routed = last.get((action.block, Operation.A2A, 1), number)
            if action.iteration and number < routed:
                yield number, f"{action} starts before the load is known, at step {routed}"
            trans = min((starts[other] for other in actions[action.block, Operation.TRANS]), default=math.inf)
            if not action.iteration and ends.get(action, number) > trans:
                yield int(trans), f"weights travel before {action} is made"
