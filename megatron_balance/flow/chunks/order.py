"""The order of a layer's work on tokens that travel in chunks (ScheMoE, section 4). Pure: seconds in, order out.

Each chunk passes through the seven tasks of one direction:

    C1 -> A1 -> D1 -> E -> C2 -> A2 -> D2        compress, dispatch, decompress, experts, compress, combine, decompress

A1 and A2 occupy the network, the others the device. Network and device each do one task at a time, and overlap. An
exchange starts as soon as its rows are compressed and earlier exchanges are over (Eq. 13 and 14). So the order of the
computing tasks determines everything:

    C1.0 C1.1 D1.0 E.0 C2.0 D1.1 E.1 C2.1 D2.0 D2.1

A backward pass takes the same seven tasks, with gradients, in its own order.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from megatron_balance.config.flags import named
from megatron_balance.planning.policies import registered


class ChunkTask(StrEnum):
    """The tasks of a chunk, in this order."""

    C1 = "C1"
    A1 = "A1"
    D1 = "D1"
    E = "E"
    C2 = "C2"
    A2 = "A2"
    D2 = "D2"


class ChunkTimes(NamedTuple):
    """Seconds of one chunk's tasks."""

    c1: float
    a1: float
    d1: float
    e: float
    c2: float
    a2: float
    d2: float


TaskTimes = tuple[ChunkTimes, ...]
"""Seconds per task of each chunk, for one direction."""


class ChunkStep(NamedTuple):
    """A computing task of one chunk."""

    task: ChunkTask
    chunk: int

    def __str__(self) -> str:
        return f"{self.task}.{self.chunk}"


Order = tuple[ChunkStep, ...]

Scheduler = Callable[[TaskTimes], Order]

COMPUTING = (ChunkTask.C1, ChunkTask.D1, ChunkTask.E, ChunkTask.C2, ChunkTask.D2)

SENDS = {ChunkTask.C1: ChunkTask.A1, ChunkTask.C2: ChunkTask.A2}
"""The exchange that starts after a task."""


def text(order: Order) -> str:
    """Return an order as text, for example `C1.0 D1.0 E.0 C2.0 D2.0`."""
    return " ".join(map(str, order))


def parse(line: str) -> Order:
    """Return the order of a text: the inverse of `text`.

    Raises:
        ValueError: a word is not a computing task of a chunk.
    """
    steps = []
    for word in line.split():
        task, _, chunk = word.partition(".")
        if task not in COMPUTING or not chunk.isdecimal():
            raise ValueError(f"order {line!r}: {word!r} should be like 'C1.0', one of {', '.join(COMPUTING)}")
        steps.append(ChunkStep(ChunkTask(task), int(chunk)))
    return tuple(steps)


def check(order: Sequence[ChunkStep], chunks: int) -> list[str]:
    """Return why an order of `chunks` chunks cannot be executed (Eq. 4 to 9); empty if it can."""
    done = [0] * chunks
    for step in order:
        if not 0 <= step.chunk < chunks:
            return [f"{step}: there are {chunks} chunks"]
        if done[step.chunk] == len(COMPUTING) or COMPUTING[done[step.chunk]] != step.task:
            return [f"{step}: its chunk has done {' '.join(COMPUTING[: done[step.chunk]]) or 'nothing'}"]
        done[step.chunk] += 1
    return [f"chunk {chunk} ends after {count} tasks" for chunk, count in enumerate(done) if count < len(COMPUTING)]


class ChunkSpan(NamedTuple):
    """Start and end of one task of a chunk, in seconds from the beginning."""

    task: ChunkTask
    chunk: int
    start: float
    end: float


def spans(order: Order, times: TaskTimes) -> Iterator[ChunkSpan]:
    """Yield when each task runs: computing tasks in their order, each exchange after the task that starts it."""
    computing = network = 0.0
    arrived = [0.0] * len(times)
    for task, chunk in order:
        start = max(computing, arrived[chunk])
        computing = start + _seconds(times[chunk], task)
        yield ChunkSpan(task, chunk, start, computing)
        if task in SENDS:
            start = max(computing, network)
            arrived[chunk] = network = start + _seconds(times[chunk], SENDS[task])
            yield ChunkSpan(SENDS[task], chunk, start, network)


def makespan(order: Order, times: TaskTimes) -> float:
    """Return the seconds until the last task ends: t_r of Eq. 11."""
    return max(span.end for span in spans(order, times))


def _seconds(times: ChunkTimes, task: ChunkTask) -> float:
    return times[_INDEX[task]]


_INDEX = {task: index for index, task in enumerate(ChunkTask)}


def sequential(times: TaskTimes) -> Order:
    """Return the order of one chunk after the other, in which nothing overlaps with exchanges."""
    return tuple(ChunkStep(task, chunk) for chunk in range(len(times)) for task in COMPUTING)


def interleaved(times: TaskTimes) -> Order:
    """Return FasterMoE's pipeline: a chunk computes after the next chunk has left and before the last one returns."""
    chunks = len(times)
    steps = []
    for beat in range(chunks + 2):
        for tasks, chunk in ((COMPUTING[:1], beat), (COMPUTING[1:4], beat - 1), (COMPUTING[4:], beat - 2)):
            steps += [ChunkStep(task, chunk) for task in tasks if 0 <= chunk < chunks]
    return tuple(steps)


def theorem_1(times: TaskTimes) -> Order:
    """Return Eq. 12: all compressions, each chunk's computation as one, all decompressions."""
    chunks = range(len(times))
    first = [ChunkStep(ChunkTask.C1, chunk) for chunk in chunks]
    middle = [ChunkStep(task, chunk) for chunk in chunks for task in COMPUTING[1:4]]
    return (*first, *middle, *(ChunkStep(ChunkTask.D2, chunk) for chunk in chunks))


def optsche(times: TaskTimes) -> Order:
    """Return Eq. 12 where Theorem 1 holds; elsewhere the order that `search` finds, if its gain is worthwhile."""
    order = theorem_1(times)
    if theorem_holds(times):
        return order
    found = search(times)
    return found if makespan(found, times) < makespan(order, times) * (1 - WORTHWHILE) else order


WORTHWHILE = 1e-3
"""Smallest gain, as a share of the time, for which `optsche` takes an order that is harder to read."""


def theorem_holds(times: TaskTimes) -> bool:
    """Return whether chunks are equal and paired tasks take equally long; the proof needs both."""
    first = times[0]
    twice = ((first.c1, first.c2), (first.a1, first.a2), (first.d1, first.d2))
    return all(one == first for one in times) and all(one == other for one, other in twice)


ROUNDING = 1e-12
"""Relative rounding error of sums of seconds."""

EXACT_CHUNKS = 3
"""Largest number of chunks for which `search` considers every order; more chunks pass each stage in turn."""

WIDTHS = ((8, 32), (math.inf, 4))
"""(largest number of chunks, number of beginnings that `search` keeps for each set of finished tasks). With 16 chunks,
the search takes seconds at most."""


class _Beginning(NamedTuple):
    """The first steps of an order, and when device, network and chunks are free after them."""

    computing: float
    network: float
    arrived: tuple[float, ...]
    """When each chunk can continue."""
    last: ChunkStep | None
    before: "_Beginning | None"

    def steps(self) -> Order:
        found = []
        one = self
        while one.before is not None and one.last is not None:
            found.append(one.last)
            one = one.before
        return tuple(reversed(found))


@functools.lru_cache(maxsize=256)
def search(times: TaskTimes) -> Order:
    """Return the order of least makespan, by dynamic programming over the tasks that each chunk has done.

    Beginnings that have done the same tasks differ in when device, network and chunks are free again. A beginning is
    dropped if another one is no later in every respect, or if it cannot beat a known order. So the result is the
    optimum up to `EXACT_CHUNKS`, and for equal chunks, while `WIDTHS` suffice.
    """
    chunks = range(len(times))
    ordered = len(times) > EXACT_CHUNKS
    best: Order = min((theorem_1(times), interleaved(times)), key=lambda order: makespan(order, times))
    limit = makespan(best, times)
    if limit <= _least(times) * (1 + ROUNDING):
        return best
    width = next(width for most, width in WIDTHS if len(times) <= most)
    left = [_remaining(one) for one in times]
    level = {(0,) * len(times): [_Beginning(0.0, 0.0, (0.0,) * len(times), None, None)]}
    for _ in range(len(times) * len(COMPUTING)):
        following: dict[tuple[int, ...], list[tuple[float, _Beginning]]] = {}
        for done, beginnings in level.items():
            for chunk in chunks:
                if done[chunk] == len(COMPUTING) or (ordered and chunk and done[chunk - 1] <= done[chunk]):
                    continue
                after = (*done[:chunk], done[chunk] + 1, *done[chunk + 1 :])
                rest = [left[one][count] for one, count in enumerate(after)]
                for beginning in beginnings:
                    grown = _grown(beginning, ChunkStep(COMPUTING[done[chunk]], chunk), times[chunk])
                    bound = _bound(grown, rest)
                    if bound < limit:
                        following.setdefault(after, []).append((bound, grown))
        level = {done: _undominated(candidates, width) for done, candidates in following.items()}
    for beginnings in level.values():
        for beginning in beginnings:
            if beginning.computing < limit:
                best = beginning.steps()
                limit = beginning.computing
    return best


def _least(times: TaskTimes) -> float:
    """Return a lower bound of the makespan: the device computes all tasks, and the network sends all rows.

    The device also waits for the first chunk to arrive, with at most all C1 to overlap, and for the last one to return,
    with at most all D2. The network waits for a C1, and a D2 waits for the network.
    """
    first = sum(one.c1 for one in times)
    last = sum(one.d2 for one in times)
    waits = max(0.0, min(one.c1 + one.a1 for one in times) - first)
    waits += max(0.0, min(one.a2 + one.d2 for one in times) - last)
    device = sum(one.c1 + one.d1 + one.e + one.c2 + one.d2 for one in times) + waits
    network = min(one.c1 for one in times) + sum(one.a1 + one.a2 for one in times) + min(one.d2 for one in times)
    return max(device, network)


class _Rest(NamedTuple):
    """Seconds of a chunk's remaining tasks."""

    computing: float
    network: float
    chain: float
    """Seconds until the chunk ends if it runs alone."""


def _remaining(times: ChunkTimes) -> list[_Rest]:
    """Return the rest after each number of computing tasks."""
    rests = []
    for done in range(len(COMPUTING) + 1):
        computing = sum(_seconds(times, task) for task in COMPUTING[done:])
        network = sum(_seconds(times, SENDS[task]) for task in COMPUTING[done:] if task in SENDS)
        rests.append(_Rest(computing, network, computing + network))
    return rests


def _grown(beginning: _Beginning, step: ChunkStep, times: ChunkTimes) -> _Beginning:
    """Return the beginning with one more step."""
    computing = beginning.computing
    network = beginning.network
    arrived = beginning.arrived
    chunk = step.chunk
    computing = max(computing, arrived[chunk]) + _seconds(times, step.task)
    free = computing
    if step.task in SENDS:
        network = max(network, computing) + _seconds(times, SENDS[step.task])
        free = network
    # A time before the device is free makes no difference: the next task waits for the device
    arrived = tuple(max(one, computing) for one in (*arrived[:chunk], free, *arrived[chunk + 1 :]))
    return _Beginning(computing, max(network, computing), arrived, step, beginning)


def _bound(beginning: _Beginning, rest: Sequence[_Rest]) -> float:
    """Return a lower bound of the makespan of all orders with this beginning."""
    network = sum(one.network for one in rest)
    return max(
        beginning.computing + sum(one.computing for one in rest),
        beginning.network + network if network else 0.0,
        *(arrived + one.chain for arrived, one in zip(beginning.arrived, rest, strict=True)),
    )


def _undominated(candidates: list[tuple[float, _Beginning]], width: int) -> list[_Beginning]:
    kept: list[_Beginning] = []
    for _, one in sorted(candidates, key=lambda pair: (pair[0], pair[1].computing, pair[1].network)):
        if len(kept) == width:
            break
        if not any(_no_later(other, one) for other in kept):
            kept.append(one)
    return kept


def _no_later(one: _Beginning, other: _Beginning) -> bool:
    return (
        one.computing <= other.computing
        and one.network <= other.network
        and all(mine <= theirs for mine, theirs in zip(one.arrived, other.arrived, strict=True))
    )


ORDERS: dict[str, Scheduler] = {"sequential": sequential, "interleaved": interleaved, "optsche": optsche}


def find_order(name: str) -> Scheduler | None:
    """Return a scheduler by its name in `ORDERS` or by `package.module:function`; None for a policy that orders chunks.

    Raises:
        ValueError: there is no such name, module or function.
    """
    policies = {policy: None for policy, known in registered().items() if known.orders_chunks}
    found: Scheduler | None = named("--moe-comm-order", name, ORDERS | policies)
    if not callable(found) and name not in policies:
        raise ValueError(f"--moe-comm-order {name}: is not a function of task times")
    return found
