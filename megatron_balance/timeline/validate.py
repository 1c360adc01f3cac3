"""Refuses schedules that would train on wrong weights, lose gradients or hang, before they run."""

from collections.abc import Iterator, Sequence

from megatron_balance.timeline.actions import Action, Operation, Places, Schedule, Step, grid, places


class InvalidSchedule(ValueError):
    """The message is the schedule's grid, with the wrong step marked."""


Problem = tuple[int, str]
"""A step, and what is wrong there."""

Numbers = dict[Action, int]
"""The step at which each action starts, or is waited for."""


def validate(schedules: Sequence[Schedule]) -> None:
    """Check the schedules of an expert-parallel group's ranks.

    In each schedule, every action that is started is waited for once, later; weights arrive before their experts
    compute; gradients leave after the last backward pass and arrive before they are reduced; plans use the whole load.
    Across schedules, exchanges, Trans and Agg have one order on all ranks.

    Raises:
        InvalidSchedule: a schedule is wrong; the message names the first rank and step.
    """
    for rank, schedule in enumerate(schedules):
        problems = [*_problems(schedule), *_order(schedules[0], schedule)]
        if problems:
            raise InvalidSchedule(f"schedule of rank {rank}:\n{grid(schedule, sorted(problems)[:1])}")


def _problems(schedule: Schedule) -> Iterator[Problem]:
    # Few steps of a long schedule start an action or wait for one
    acting = [(number, step) for number, step in enumerate(schedule) if step[1] or step[2] or step[3]]
    starts = {action: number for number, step in acting for action in step.planning + step.communication}
    ends = {action: number for number, step in acting for action in step.waits}
    first, last = places(schedule)
    yield from _waits(acting, starts)
    yield from _trans(ends, first)
    yield from _agg(starts, ends, last)
    yield from _plan(starts, ends, last)


def _waits(acting: Sequence[tuple[int, Step]], starts: Numbers) -> Iterator[Problem]:
    started: set[Action] = set()
    waited: set[Action] = set()
    for number, step in acting:
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
    for action, number in starts.items():
        if action not in waited:
            yield number, f"{action} is never waited for"


def _trans(ends: Numbers, first: Places) -> Iterator[Problem]:
    """Check that every layer's experts have their weights when they compute for the first time."""
    for (block, operation, _), number in first.items():
        if operation is not Operation.FEC:
            continue
        waited = [action for action, end in ends.items() if _is(action, block, Operation.TRANS) and end <= number]
        if not _complete(waited):
            yield number, f"L{block} computes before its TRANS has arrived"


def _agg(starts: Numbers, ends: Numbers, last: Places) -> Iterator[Problem]:
    """Check that every layer's gradients leave when they are complete, and arrive before they are reduced."""
    reduce = last[0, Operation.REDUCE, 1]
    for (block, operation, _), complete in sorted(last.items()):
        if operation is not Operation.BEC:
            continue
        for action, number in starts.items():
            if _is(action, block, Operation.AGG) and number <= complete:
                yield number, f"{action} starts before its gradients are complete, at step {complete}"
        waited = [action for action, end in ends.items() if _is(action, block, Operation.AGG) and end <= reduce]
        if not _complete(waited):
            yield reduce, f"gradients of L{block} are reduced before its AGG has arrived"


def _plan(starts: Numbers, ends: Numbers, last: Places) -> Iterator[Problem]:
    """Check that plans for the next iteration use the load of this one, and plans for this one precede its TRANS."""
    for action, number in starts.items():
        if action.operation is not Operation.PLAN:
            continue
        routed = last.get((action.block, Operation.A2A, 1), number)
        if action.iteration and number < routed:
            yield number, f"{action} starts before the load is known, at step {routed}"
        trans = [start for other, start in starts.items() if _is(other, action.block, Operation.TRANS)]
        if not action.iteration and trans and ends.get(action, number) > min(trans):
            yield min(trans), f"weights travel before {action} is made"


def _order(reference: Schedule, schedule: Schedule) -> Iterator[Problem]:
    """Check that all ranks exchange and transfer in one order."""
    if schedule is reference:
        return
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
