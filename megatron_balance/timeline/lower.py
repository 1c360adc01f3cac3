"""From the order in which a pipeline stage computes to the schedule of an iteration, one pass per concern.

    one_forward_one_backward -> compute_order -> with_plan -> with_trans -> with_agg

Every pass takes a schedule and returns one with more actions in the same steps. `blockwise` is Pro-Prophet's Algorithm
2; `blocking` starts every action where its result is needed and waits for it there.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Literal, NamedTuple

from megatron_balance.timeline.actions import Action, Operation, Places, Schedule, Step, chunk_start, places
from megatron_balance.timeline.validate import validate

Overlapping = Literal["none", "blockwise"]

REDUCE = (0, Operation.REDUCE, 1)
"""A key of Places."""


class Pass(NamedTuple):
    """One microbatch through one model chunk."""

    chunk: int
    microbatch: int
    forward: bool


def one_forward_one_backward(table: Sequence[tuple[int, int]], chunks: int, ahead: int) -> list[Pass]:
    """Return `ahead` forward passes, then one forward and one backward pass in turn: 1F1B.

    With `ahead` 0, on a single stage, each microbatch goes forward and backward before the next one.

    Args:
        table: (chunk, microbatch) of the forward passes; backward passes have the same order, with chunks reversed.
        chunks: model chunks of the stage.
        ahead: forward passes before the first backward pass; all of them if there are fewer.
    """
    ahead = min(ahead, len(table))
    forward = [Pass(chunk, microbatch, True) for chunk, microbatch in table]
    backward = [Pass(chunks - 1 - chunk, microbatch, False) for chunk, microbatch in table]
    pairs = zip(forward[ahead:], backward, strict=False)
    return [*forward[:ahead], *(one for pair in pairs for one in pair), *backward[len(table) - ahead :]]


def compute_order(passes: Iterable[Pass], blocks: Sequence[Sequence[int]]) -> Schedule:
    """Return what a stage computes, without planning and communication.

    A forward pass that recomputation repeats is part of the backward computation that needs it.

    Args:
        blocks: numbers of the MoE layers in each of the stage's model chunks, ascending.
    """
    computations = {
        (chunk, forward): _computations(chunk_start(chunk), numbers, forward)
        for chunk, numbers in enumerate(blocks)
        for forward in (True, False)
    }
    rows = (
        (*computation, microbatch, 0)
        for chunk, microbatch, forward in passes
        for computation in computations[chunk, forward]
    )
    # A schedule may have 100,000 steps, and a named tuple's own constructor takes longer than all the rest
    order = [*map(partial(tuple.__new__, Action), rows), Action(0, Operation.REDUCE), Action(0, Operation.STEP)]
    return tuple(map(partial(tuple.__new__, Step), zip(order, repeat(()), repeat(()), repeat(()), strict=False)))


Computation = tuple[int, Operation, int, int]
"""The first fields of an Action."""


def _computations(start: int, numbers: Sequence[int], forward: bool) -> list[Computation]:
    """Return what a pass of one microbatch through a chunk with these MoE layers computes.

    Args:
        start: number of the chunk's part before the first of them.
    """
    if not numbers:
        return []
    others = Operation.FNEC if forward else Operation.BNEC
    alone = [(number, others, 1, 1) for number in (start, *numbers)]
    if forward:
        layers = [_layer(number, Operation.FEC, 1) for number in numbers]
    else:
        alone = alone[::-1]
        layers = [_layer(number, Operation.BEC, 3) for number in reversed(numbers)]
    pairs = zip(layers, alone[1:], strict=True)
    return [alone[0], *(one for layer, after in pairs for one in (*layer, after))]


def _layer(number: int, experts: Operation, exchange: int) -> list[Computation]:
    return [
        (number, Operation.A2A, exchange, 4),
        (number, experts, 1, 1),
        (number, Operation.A2A, exchange + 1, 4),
    ]


def lower(
    passes: Iterable[Pass],
    blocks: Sequence[Sequence[int]],
    overlap: Overlapping,
    *,
    exact: bool = False,
    late: bool = False,
    reduce_early: bool = False,
) -> Schedule:
    """Return the whole schedule, validated.

    Args:
        passes, blocks: see `compute_order`.
        exact: whether plans are for the current iteration, on the load of its first microbatch.
        late: whether the forward pass does not wait for its load, so that plans for the next iteration do not either.
        reduce_early: whether the reduction of some experts' gradients overlaps with the backward pass of others. Each
            Agg is then waited for when the next one starts, instead of at the end.
    """
    schedule = compute_order(passes, blocks)
    layers = sorted(number for chunk in blocks for number in chunk)
    # The passes add no steps, so that one search for the places of computations serves all
    first, last = places(schedule)
    if overlap == "blockwise":
        assert not exact, "weights can only travel ahead if the placement is known ahead"
        schedule = plan_ahead(schedule, layers, last, late)
        schedule = trans_blockwise(schedule, layers, first)
        schedule = agg_blockwise(schedule, layers, last, reduce_early)
    else:
        schedule = plan_blocking(schedule, layers, first, exact)
        schedule = trans_blocking(schedule, layers, first)
        schedule = agg_blocking(schedule, layers, last)
    validate([schedule])
    return schedule


def plan_blocking(schedule: Schedule, layers: Iterable[int], first: Places, exact: bool) -> Schedule:
    """Plan between iterations or, if `exact`, on the load just routed, before its tokens are sent."""
    steps = list(schedule)
    for number in layers:
        where = first[number, Operation.A2A, 1] if exact else len(steps) - 1
        plan = Action(number, Operation.PLAN, iteration=0 if exact else 1)
        _start_and_wait(steps, where, planning=(plan,))
    return tuple(steps)


def plan_ahead(schedule: Schedule, layers: Iterable[int], last: Places, late: bool) -> Schedule:
    """Start PLAN(i, j+1) at the last microbatch's FEC(i, j), and wait for it after REDUCE.

    The load is known before A2A(i, j), where Algorithm 2 starts it. But the host launches that exchange then, and a
    device must not wait for the observation of loads; it exchanges rows while the host is at FEC. The policy is asked
    there, and answers from the next backward computation on.

    If the load is `late`, start it at the backward pass of A2A(i, j), whose forward pass is then done, or nearly so.
    """
    steps = list(schedule)
    for number in layers:
        plan = Action(number, Operation.PLAN, iteration=1)
        where = last[number, Operation.A2A, 3] if late else last[number, Operation.FEC, 1]
        _start(steps, where, planning=(plan,))
        _wait(steps, len(steps) - 1, (plan,))
    return tuple(steps)


def trans_blocking(schedule: Schedule, layers: Iterable[int], first: Places) -> Schedule:
    """Run TRANS(i) right before the first FEC(i)."""
    steps = list(schedule)
    for number in layers:
        trans = Action(number, Operation.TRANS)
        _start_and_wait(steps, first[number, Operation.FEC, 1], communication=(trans,))
    return tuple(steps)


def trans_blockwise(schedule: Schedule, layers: Iterable[int], first: Places) -> Schedule:
    """Overlap the two parts of TRANS(i+1) with FEC(i) and FNEC(i); wait for them before the first FEC(i+1).

    Block i is the block that computes just before block i+1 does for the first time. Before the first block there is
    only FNEC, with which its whole TRANS overlaps.
    """
    steps = list(schedule)
    for number in sorted(layers, key=lambda number: first[number, Operation.A2A, 1]):
        before = range(first[number, Operation.A2A, 1] - 1, -1, -1)
        hiding = [_nearest(steps, before, operation) for operation in (Operation.FEC, Operation.FNEC)]
        parts = _parts(number, Operation.TRANS, steps, hiding)
        _wait(steps, first[number, Operation.FEC, 1], parts)
    return tuple(steps)


def agg_blocking(schedule: Schedule, layers: Iterable[int], last: Places) -> Schedule:
    """Run AGG(i) after the backward pass."""
    steps = list(schedule)
    for number in layers:
        _start_and_wait(steps, last[REDUCE], communication=(Action(number, Operation.AGG),))
    return tuple(steps)


def agg_blockwise(schedule: Schedule, layers: Iterable[int], last: Places, reduce_early: bool) -> Schedule:
    """Overlap the two parts of AGG(i+1) with BNEC(i) and BEC(i), after the last microbatch's BEC(i+1).

    Block i is the block that computes next. After the first block only BNEC is left.
    """
    steps = list(schedule)
    last_parts = ()
    for number in sorted(layers, key=lambda number: last[number, Operation.BEC, 1]):
        after = range(last[number, Operation.BEC, 1] + 1, len(steps))
        hiding = [_nearest(steps, after, operation) for operation in (Operation.BNEC, Operation.BEC)]
        if reduce_early and last_parts:
            assert hiding[0] is not None
            _wait(steps, hiding[0], last_parts)
        last_parts = _parts(number, Operation.AGG, steps, hiding)
        if not reduce_early:
            _wait(steps, last[REDUCE], last_parts)
    if reduce_early:
        _wait(steps, last[REDUCE], last_parts)
    return tuple(steps)


def wait_at_once(schedule: Schedule) -> Schedule:
    """Wait for every action where it starts, so that nothing overlaps; the baseline of tests and benchmarks."""
    return tuple(step._replace(waits=(*step.planning, *step.communication)) for step in schedule)


def _parts(block: int, operation: Operation, steps: list[Step], hiding: list[int | None]) -> tuple[Action, ...]:
    """Start one part of a block's operation at each of the steps `hiding` that exist, and overlap it with them."""
    found = sorted(number for number in hiding if number is not None)
    parts = tuple(Action(block, operation, part + 1, len(found)) for part in range(len(found)))
    for number, part in zip(found, parts, strict=True):
        _start(steps, number, communication=(part,))
    return parts


def _nearest(steps: Sequence[Step], numbers: Iterable[int], operation: Operation) -> int | None:
    return next((number for number in numbers if steps[number].computation.operation is operation), None)


def _start(
    steps: list[Step], number: int, communication: tuple[Action, ...] = (), planning: tuple[Action, ...] = ()
) -> None:
    step = steps[number]
    steps[number] = step._replace(communication=step.communication + communication, planning=step.planning + planning)


def _wait(steps: list[Step], number: int, actions: tuple[Action, ...]) -> None:
    steps[number] = steps[number]._replace(waits=steps[number].waits + actions)


def _start_and_wait(
    steps: list[Step], number: int, communication: tuple[Action, ...] = (), planning: tuple[Action, ...] = ()
) -> None:
    _start(steps, number, communication, planning)
    _wait(steps, number, planning + communication)
