"""Makes the schedule of an iteration from the order of a pipeline stage's computations.

`compute_order` makes a schedule of computations alone. Plan, Trans and Agg are then added to its steps: blockwise, by
Pro-Prophet's Algorithm 2, or blocking, where each action starts when its result is needed. With the exact load, each
microbatch has its own Plan, Trans and Agg.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

from megatron_balance.timeline.actions import Action, Operation, Places, Schedule, Step, chunk_start, places

Overlapping = Literal["none", "blockwise"]

BACKWARD = {Operation.FNEC: Operation.BNEC, Operation.FEC: Operation.BEC}


class Pass(NamedTuple):
    """Forward or backward pass of one microbatch through one model chunk."""

    chunk: int
    microbatch: int
    forward: bool
    paired: bool = False
    """Whether the pass takes turns with another one: a forward pass with the backward pass that follows it."""


def one_forward_one_backward(
    table: Sequence[tuple[int, int]], chunks: int, ahead: int, paired: bool = False
) -> list[Pass]:
    """Return the order 1F1B: up to `ahead` forward passes, then a forward and a backward pass in turn. `table` has
    (chunk, microbatch) of the forward passes; backward passes have the same order, with chunks reversed.

    If the passes of each turn are `paired`, there is one more forward pass before, so that they are independent.
    """
    ahead = min(ahead + paired, len(table))
    forward = [Pass(chunk, microbatch, True) for chunk, microbatch in table]
    backward = [Pass(chunks - 1 - chunk, microbatch, False) for chunk, microbatch in table]
    pairs = zip(forward[ahead:], backward, strict=False)
    turns = [one._replace(paired=paired) for pair in pairs for one in pair]
    return [*forward[:ahead], *turns, *backward[len(table) - ahead :]]


def compute_order(passes: Iterable[Pass], blocks: Sequence[Sequence[int]], on_device: bool = False) -> Schedule:
    """Return a stage's computations, given the ascending numbers of the MoE layers in each of its model chunks. The
    forward pass that recomputation repeats is part of the backward computation that needs it. `on_device`: where paired
    passes give way to each other, see `_segments`."""
    forward = [_forward(chunk_start(chunk), layers) for chunk, layers in enumerate(blocks)]
    backward = [[_backward(computation) for computation in reversed(chunk)] for chunk in forward]
    order: list[Action] = []
    beside: list[Action] = []
    """Computations of the latest paired forward pass. They are merged with those of the backward pass that follows."""
    for chunk, microbatch, is_forward, paired in passes:
        computations = (forward if is_forward else backward)[chunk]
        own = [computation._replace(microbatch=microbatch) for computation in computations]
        if paired and is_forward:
            beside = own
        else:
            order += _in_turn(_segments(beside, on_device), _segments(own, on_device)) if paired else own
    return tuple(map(Step, (*order, Action(0, Operation.REDUCE), Action(0, Operation.STEP))))


def _in_turn(forward: Sequence[Sequence[Action]], backward: Sequence[Sequence[Action]]) -> list[Action]:
    turns = zip_longest(forward, backward, fillvalue=())
    return [computation for pair in turns for segment in pair for computation in segment]


def _segments(computations: Sequence[Action], on_device: bool) -> list[list[Action]]:
    """Divide a pass where it gives way to another one: when its exchanges have started. On a device, the host waits for
    no exchange but for loads; a forward pass then gives way before its dispatch and after it."""
    segments: list[list[Action]] = [[]]
    for computation in computations:
        is_exchange = computation.operation is Operation.A2A
        if on_device and is_exchange and computation.part == 1:
            segments.append([])
        segments[-1].append(computation)
        if is_exchange and not (on_device and computation.part == 2):
            segments.append([])
    return segments


def _forward(start: int, layers: Sequence[int]) -> list[Action]:
    """Return the forward computations of a chunk with these MoE layers; `start` is the part before the first one."""
    order = [Action(start, Operation.FNEC)] if layers else []
    for number in layers:
        order.append(Action(number, Operation.A2A, 1, 4))
        order.append(Action(number, Operation.FEC))
        order.append(Action(number, Operation.A2A, 2, 4))
        order.append(Action(number, Operation.FNEC))
    return order


def _backward(one: Action) -> Action:
    operation = BACKWARD.get(one.operation, one.operation)
    return one._replace(operation=operation, part=one.parts + 1 - one.part)


def lower(
    passes: Iterable[Pass],
    blocks: Sequence[Sequence[int]],
    overlap: Overlapping,
    *,
    ring: int = 0,
    apart: bool = False,
    ahead: bool = True,
    late: bool = False,
    reduce_early: bool = False,
    on_device: bool = False,
) -> Schedule:
    """Return the whole schedule.

    Args:
        passes, blocks, on_device: see `compute_order`.
        ring: number of guest buffers if there are plans for the exact load of each microbatch (`each_microbatch`); 0:
            there are none.
        apart: whether forward passes have guest buffers of their own, as paired passes need.
        ahead: whether there are plans for the next iteration.
        late: whether the forward pass does not wait for its load; then planning the next iteration must not wait for it
            either.
        reduce_early: whether the reduction of experts' gradients overlaps with the backward pass. The schedule then
            waits for each Agg when the next one starts, instead of at the end.
    """
    schedule = compute_order(passes, blocks, on_device)
    layers = sorted(number for chunk in blocks for number in chunk)
    first, last = places(schedule)
    added: list[Placed] = []
    if ahead and overlap == "blockwise":
        added += plan_ahead(schedule, layers, last, late)
        added += trans_blockwise(schedule, layers, first)
        added += agg_blockwise(schedule, layers, last, reduce_early)
    elif ahead:
        added += blocking(schedule, layers, first)
    if ring:
        each = each_microbatch(schedule, layers, ring, overlap, reduce_early, apart)
        # Guests of the iteration pass on their weights to guests of a microbatch, and these pass on their gradients
        aggs = [one for one in added if one.action.operation is Operation.AGG]
        added = [*(one for one in added if one not in aggs), *each, *aggs]
    return _with(schedule, added)


class Placed(NamedTuple):
    """An action, the step that starts it, and the step that waits for it."""

    action: Action
    start: int
    wait: int


def _with(schedule: Schedule, added: Iterable[Placed]) -> Schedule:
    steps = list(schedule)
    for action, start, wait in added:
        step = steps[start]
        if action.operation is Operation.PLAN:
            steps[start] = step._replace(planning=(*step.planning, action))
        else:
            steps[start] = step._replace(communication=(*step.communication, action))
        steps[wait] = steps[wait]._replace(waits=(*steps[wait].waits, action))
    return tuple(steps)


def blocking(schedule: Schedule, layers: Iterable[int], first: Places) -> Iterator[Placed]:
    """Run TRANS(i) right before the first FEC(i), AGG(i) after the backward pass, and PLAN(i) between iterations."""
    for number in layers:
        plan = len(schedule) - 1
        trans = first[number, Operation.FEC, 1]
        agg = len(schedule) - 2
        yield Placed(Action(number, Operation.PLAN, iteration=1), plan, plan)
        yield Placed(Action(number, Operation.TRANS), trans, trans)
        yield Placed(Action(number, Operation.AGG), agg, agg)


def plan_ahead(schedule: Schedule, layers: Iterable[int], last: Places, late: bool) -> Iterator[Placed]:
    """Start PLAN(i, j+1) before the iteration's last FEC(i, j), and wait for it before STEP.

    Algorithm 2 starts PLAN before A2A(i, j), when the load is known. But the host launches A2A(i, j) then, and the
    device must not wait while the host observes loads. At FEC, the device is exchanging rows. PLAN observes the loads
    and queues a question; the planner's thread answers it from the next backward computation on.

    If the load is `late`, PLAN starts before the last exchange of the gradients of combine, A2A.3(i, j): by then, the
    forward pass that yields the load is complete, or nearly so.
    """
    for number in layers:
        start = last[number, Operation.A2A, 3] if late else last[number, Operation.FEC, 1]
        yield Placed(Action(number, Operation.PLAN, iteration=1), start, len(schedule) - 1)


def trans_blockwise(schedule: Schedule, layers: Iterable[int], first: Places) -> Iterator[Placed]:
    """Overlap the two parts of TRANS(i+1) with FEC(i) and FNEC(i); wait for them before the first FEC(i+1). Block i
    computes just before block i+1 computes for the first time. Before the first block there is only FNEC, which
    overlaps with the whole TRANS."""
    for number in sorted(layers, key=lambda number: first[number, Operation.A2A, 1]):
        before = range(first[number, Operation.A2A, 1] - 1, -1, -1)
        starts = _nearest(schedule, before, (Operation.FEC, Operation.FNEC))
        yield from _parts(number, Operation.TRANS, starts, first[number, Operation.FEC, 1])


def agg_blockwise(schedule: Schedule, layers: Iterable[int], last: Places, reduce_early: bool) -> Iterator[Placed]:
    """Overlap the two parts of AGG(i+1) with BNEC(i) and BEC(i), after the last microbatch's BEC(i+1). Block i computes
    next after block i+1. After the first block, only BNEC is left."""
    starts_of = {}
    for number in sorted(layers, key=lambda number: last[number, Operation.BEC, 1]):
        after = range(last[number, Operation.BEC, 1] + 1, len(schedule))
        starts_of[number] = _nearest(schedule, after, (Operation.BNEC, Operation.BEC))
    # At REDUCE, or where the next Agg starts
    waits = [len(schedule) - 2] * len(starts_of)
    if reduce_early:
        waits[:-1] = [starts[0] for starts in starts_of.values()][1:]
    for (number, starts), wait in zip(starts_of.items(), waits, strict=True):
        yield from _parts(number, Operation.AGG, starts, wait)


def each_microbatch(
    schedule: Schedule, layers: Sequence[int], ring: int, overlap: Overlapping, reduce_early: bool, apart: bool
) -> Iterator[Placed]:
    """Plan each microbatch m of block i when its load is known, and send weights and gradients for this microbatch.

    The blocks of a stage share `ring` buffers of guest slots: the n-th block, counted from 0, has buffer n % ring. If
    these are `apart`, forward passes have as many others. Each action starts and ends in passes of one direction, so
    that a device orders it after the work of these passes alone.

        PLAN(i, m)    before A2A(i, m), which needs it
        TRANS(i, m)   starts with the dispatch A2A(i, m) and ends before FEC(i, m)
        BTRANS(i, m)  starts with BNEC(i, m) and ends before BEC(i, m); left out if the buffer still has the weights
        AGG(i, m)     starts with the BNEC after BEC(i, m) and ends before the next BEC that writes to the buffer

    Without overlap, TRANS, BTRANS and AGG run where these spans end.
    """
    buffer_of = {layer: position % ring for position, layer in enumerate(layers)}
    # BTRANS before AGG: the next computation waits for it
    spans = [*_weights(schedule, buffer_of, apart), *_gradients(schedule, buffer_of, reduce_early)]
    yield from spans if overlap == "blockwise" else (one._replace(start=one.wait) for one in spans)


def _weights(schedule: Schedule, buffer_of: Mapping[int, int], apart: bool) -> Iterator[Placed]:
    """Return every PLAN, TRANS and BTRANS of `each_microbatch`."""
    at = {step.computation: number for number, step in enumerate(schedule)}
    latest: dict[tuple[int, bool], tuple[int, int | None]] = {}
    """By buffer, and whether only forward passes use it: the block and the microbatch whose weights it has."""
    for number, step in enumerate(schedule):
        block, operation, part, _, microbatch, _ = step.computation
        buffer = buffer_of.get(block, 0), apart and operation is Operation.FEC
        if (operation, part) == (Operation.A2A, 1):
            yield Placed(Action(block, Operation.PLAN, microbatch=microbatch), number, number)
            experts = at[Action(block, Operation.FEC, microbatch=microbatch)]
            yield Placed(Action(block, Operation.TRANS, microbatch=microbatch), number, experts)
        elif operation is Operation.BEC and latest.get(buffer) != (block, microbatch):
            beside = at[Action(block, Operation.BNEC, microbatch=microbatch)]
            yield Placed(Action(block, Operation.BTRANS, microbatch=microbatch), beside, number)
        if operation in (Operation.FEC, Operation.BEC):
            latest[buffer] = block, microbatch


def _gradients(schedule: Schedule, buffer_of: Mapping[int, int], reduce_early: bool) -> Iterator[Placed]:
    """Return every AGG of `each_microbatch`. If `reduce_early`, those of the last microbatch end where the next one
    starts, at the latest."""
    last = max(step.computation.microbatch or 0 for step in schedule)
    leaving: dict[int, Placed] = {}
    """By buffer: the Agg of the gradients in it."""
    reduce = len(schedule) - 2
    for number, step in enumerate(schedule):
        block, operation, part, _, microbatch, _ = step.computation
        if operation is Operation.BEC and buffer_of[block] in leaving:
            yield leaving.pop(buffer_of[block])._replace(wait=number)
        if (operation, part) == (Operation.A2A, 4):
            # This exchange may hide the computation of weight gradients, so they are complete after it
            after = number + 1
            while schedule[after].computation.is_forward:
                after += 1
            if reduce_early:
                for buffer in [buffer for buffer, one in leaving.items() if one.action.microbatch == last]:
                    yield leaving.pop(buffer)._replace(wait=after)
            leaving[buffer_of[block]] = Placed(Action(block, Operation.AGG, microbatch=microbatch), after, reduce)
    yield from leaving.values()


def _parts(block: int, operation: Operation, starts: Sequence[int], wait: int) -> Iterator[Placed]:
    for part, start in enumerate(starts, 1):
        yield Placed(Action(block, operation, part, len(starts)), start, wait)


def _nearest(schedule: Schedule, numbers: Iterable[int], operations: Sequence[Operation]) -> list[int]:
    """Return the first of the steps `numbers` with each operation, ascending."""
    found: dict[Operation, int] = {}
    for number in numbers:
        operation = schedule[number].computation.operation
        if operation in operations:
            found.setdefault(operation, number)
        if len(found) == len(operations):
            break
    return sorted(found.values())
