"""Refuses schedules that would train on wrong weights, lose gradients or hang, before they run."""

from collections.abc import Iterator, Sequence

from megatron_balance.timeline.actions import Action, Operation, Schedule, grid


class InvalidSchedule(ValueError):
    """The message is the schedule's grid, with the wrong step marked."""


Problem = tuple[int, str]
"""A step, and what is wrong there."""


def validate(schedules: Sequence[Schedule]) -> None:
    """Check the schedules of an expert-parallel group's ranks.

    In each schedule, every action that is started is waited for once, later; weights arrive before their experts
    compute; gradients leave after the last backward pass and arrive before they are reduced; plans use the whole load.
    Across schedules, exchanges, Trans and Agg have one order on all ranks.

    Raises:
        InvalidSchedule: a schedule is wrong; the message names the first rank and step.
    """
    for rank, schedule in enumerate(schedules):
        problems = [*_waits(schedule), *_trans(schedule), *_agg(schedule), *_plan(schedule)]
        problems += _order(schedules[0], schedule)
        if problems:
            raise InvalidSchedule(f"schedule of rank {rank}:\n{grid(schedule, sorted(problems)[:1])}")


def _starts(schedule: Schedule) -> dict[Action, int]:
    return {action: number for number, step in enumerate(schedule) for action in step.planning + step.communication}


def _ends(schedule: Schedule) -> dict[Action, int]:
    """Return the step at which each action is waited for."""
    return {action: number for number, step in enumerate(schedule) for action in step.waits}


def _waits(schedule: Schedule) -> Iterator[Problem]:
    started: set[Action] = set()
    waited: set[Action] = set()
    for number, step in enumerate(schedule):
        for action in step.planning + step.communication:
            if action in started:
                yield number, f"{action} is started again"
            started.add(action)
        for action in step.waits:
            if action not in started:
                yield number, f"{action} is waited for before it is started"
            if action in waited:
                yield number, f"{action} is waited for again"
            waited.add(action)
    for action, number in _starts(schedule).items():
        if action not in waited:
            yield number, f"{action} is never waited for"


def _trans(schedule: Schedule) -> Iterator[Problem]:
    """Check that every layer's experts have their weights when they compute for the first time."""
    ends, seen = _ends(schedule), set()
    for number, step in enumerate(schedule):
        block, operation = step.computation.block, step.computation.operation
        if operation is not Operation.FEC or block in seen:
            continue
        seen.add(block)
        waited = [action for action, end in ends.items() if _is(action, block, Operation.TRANS) and end <= number]
        if not _complete(waited):
            yield number, f"L{block} computes before its TRANS has arrived"


def _agg(schedule: Schedule) -> Iterator[Problem]:
    """Check that every layer's gradients leave when they are complete, and arrive before they are reduced."""
    starts, ends = _starts(schedule), _ends(schedule)
    last = {step.computation: number for number, step in enumerate(schedule)}
    reduce = last[Action(0, Operation.REDUCE)]
    for block in sorted({action.block for action in last if action.operation is Operation.BEC}):
        complete = max(number for action, number in last.items() if _is(action, block, Operation.BEC))
        for action, number in starts.items():
            if _is(action, block, Operation.AGG) and number <= complete:
                yield number, f"{action} starts before its gradients are complete, at step {complete}"
        waited = [action for action, end in ends.items() if _is(action, block, Operation.AGG) and end <= reduce]
        if not _complete(waited):
            yield reduce, f"gradients of L{block} are reduced before its AGG has arrived"


def _plan(schedule: Schedule) -> Iterator[Problem]:
    """Check that plans for the next iteration use the load of this one, and plans for this one precede its TRANS."""
    starts, ends = _starts(schedule), _ends(schedule)
    for action, number in starts.items():
        if action.operation is not Operation.PLAN:
            continue
        routed = [
            index
            for index, step in enumerate(schedule)
            if _is(step.computation, action.block, Operation.A2A) and step.computation.part == 1
        ]
        if action.iteration and routed and number < routed[-1]:
            yield number, f"{action} starts before the load is known, at step {routed[-1]}"
        trans = [start for other, start in starts.items() if _is(other, action.block, Operation.TRANS)]
        if not action.iteration and ends.get(action, number) > min(trans, default=len(schedule)):
            yield min(trans), f"weights travel before {action} is made"


def _order(reference: Schedule, schedule: Schedule) -> Iterator[Problem]:
    """Check that all ranks exchange and transfer in one order."""
    both = [_collectives(one) for one in (reference, schedule)]
    for (_, expected), (number, found) in zip(*both, strict=False):
        if expected != found:
            yield number, f"rank 0 comes to {expected} first"
            return
    if len(both[0]) != len(both[1]):
        yield len(schedule) - 1, f"{len(both[1])} exchanges, Trans and Agg; rank 0 has {len(both[0])}"


def _collectives(schedule: Schedule) -> list[tuple[int, Action]]:
    return [
        (number, action)
        for number, step in enumerate(schedule)
        for action in (*step.communication, step.computation)
        if action in step.communication or action.operation is Operation.A2A
    ]


def _is(action: Action, block: int, operation: Operation) -> bool:
    return action.block == block and action.operation is operation


def _complete(parts: Sequence[Action]) -> bool:
    """Return whether these are all parts of one action."""
    return bool(parts) and sorted(part.part for part in parts) == list(range(1, parts[0].parts + 1))
