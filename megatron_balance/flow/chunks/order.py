"""Chunks of a layer's tokens (ScheMoE, section 4): the order of the tasks on them, and how plans are split into chunks.

Each chunk passes through the seven tasks of one direction:

    C1 -> A1 -> D1 -> E -> C2 -> A2 -> D2        compress, dispatch, decompress, experts, compress, combine, decompress

A1 and A2 occupy the network, the other tasks the device. Network and device overlap, and each does one task at a time.
An exchange starts when its rows are compressed and earlier exchanges are complete (Eq. 13 and 14). So the order of the
computing tasks determines the whole schedule. A backward pass applies the same tasks to gradients, in its own order.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

from megatron_balance.config.flags import named
from megatron_balance.flow.plan import DispatchPlan
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
    """Return the inverse of `text`; ValueError if a word is not a computing task of a chunk."""
    steps = []
    for word in line.split():
        task, _, chunk = word.partition(".")
        if task not in COMPUTING or not chunk.isdecimal():
            raise ValueError(f"order {line!r}: {word!r} should be like 'C1.0', one of {', '.join(COMPUTING)}")
        steps.append(ChunkStep(ChunkTask(task), int(chunk)))
    return tuple(steps)


def check(order: Sequence[ChunkStep], chunks: int) -> list[str]:
    """Return the problems of an order of `chunks` chunks (Eq. 4 to 9); empty if it can be executed."""
    done = [0] * chunks
    for step in order:
        if not 0 <= step.chunk < chunks:
            return [f"{step}: there are {chunks} chunks"]
        if done[step.chunk] == len(COMPUTING) or COMPUTING[done[step.chunk]] != step.task:
            return [f"{step}: its chunk has done {' '.join(COMPUTING[: done[step.chunk]]) or 'nothing'}"]
        done[step.chunk] += 1
    return [f"chunk {chunk} ends after {count} tasks" for chunk, count in enumerate(done) if count < len(COMPUTING)]


def makespan(order: Order, times: TaskTimes) -> float:
    """Return the seconds until the last task ends (t_r of Eq. 11); exchanges run in the order of their tasks."""
    seconds = [dict(zip(ChunkTask, one, strict=True)) for one in times]
    computing = network = 0.0
    arrived = [0.0] * len(times)
    for task, chunk in order:
        computing = max(computing, arrived[chunk]) + seconds[chunk][task]
        if task in SENDS:
            arrived[chunk] = network = max(computing, network) + seconds[chunk][SENDS[task]]
    return computing


def sequential(times: TaskTimes) -> Order:
    """Return the order that finishes each chunk before the next one begins; nothing overlaps with exchanges."""
    return tuple(ChunkStep(task, chunk) for chunk in range(len(times)) for task in COMPUTING)


def interleaved(times: TaskTimes) -> Order:
    """Return FasterMoE's pipeline: chunk i + 1 is sent before chunk i is computed; chunk i - 1 returns after that."""
    chunks = len(times)
    steps = []
    for beat in range(chunks + 2):
        for tasks, chunk in ((COMPUTING[:1], beat), (COMPUTING[1:4], beat - 1), (COMPUTING[4:], beat - 2)):
            steps += [ChunkStep(task, chunk) for task in tasks if 0 <= chunk < chunks]
    return tuple(steps)


def theorem_1(times: TaskTimes) -> Order:
    """Return Eq. 12: all compressions; D1, E and C2 of each chunk in turn; all decompressions. No order is faster if
    all chunks are equal and, within a chunk, both exchanges, both compressions and both decompressions take equally
    long."""
    chunks = range(len(times))
    first = [ChunkStep(ChunkTask.C1, chunk) for chunk in chunks]
    middle = [ChunkStep(task, chunk) for chunk in chunks for task in COMPUTING[1:4]]
    return (*first, *middle, *(ChunkStep(ChunkTask.D2, chunk) for chunk in chunks))


ORDERS: dict[str, Scheduler] = {"sequential": sequential, "interleaved": interleaved, "optsche": theorem_1}


def find_order(name: str) -> Scheduler | None:
    """Return the scheduler in `ORDERS` or at `package.module:function`; None for the name of a policy that orders
    chunks itself; ValueError if there is no such name, module or function."""
    policies = {policy: None for policy, known in registered().items() if known.orders_chunks}
    found: Scheduler | None = named("--moe-comm-order", name, ORDERS | policies)
    if not callable(found) and name not in policies:
        raise ValueError(f"--moe-comm-order {name}: is not a function of task times")
    return found


Shares = tuple[tuple[tuple[float, ...], ...], ...]
"""[C, D, E]: the fraction of each source's tokens for each expert that a chunk carries."""


@dataclass(frozen=True)
class Chunking:
    """Split of a layer's tokens into chunks, and the order of the chunks' tasks in each direction. Each source splits
    its tokens for each physical expert into consecutive runs, one per chunk."""

    forward: Order
    backward: Order
    shares: Shares | None = None
    """None: chunks of equal size."""

    @functools.cached_property
    def chunks(self) -> int:
        return 1 + max(chunk for _, chunk in self.forward)

    def split(self, plan: DispatchPlan) -> torch.Tensor:
        """Return [C, D, P]: tokens of each chunk from each source to each physical expert; the sum is the plan."""
        if self.chunks == 1:
            return plan.tokens_DP.unsqueeze(0)
        return split_evenly(plan.tokens_DP, self.chunks) if self.shares is None else split_by(self.shares, plan)


_AT_ONCE = parse("C1.0 D1.0 E.0 C2.0 D2.0")

UNSPLIT = Chunking(_AT_ONCE, _AT_ONCE)
"""All tokens at once."""


def split_evenly(tokens_DP: torch.Tensor, chunks: int) -> torch.Tensor:
    """Split into [C, D, P]: for each source and physical expert, chunk sizes differ by at most one token. The indices
    of source and expert determine which chunks are larger."""
    sources, physicals = tokens_DP.shape
    numbers = functools.partial(torch.arange, device=tokens_DP.device)
    turn_DP = numbers(sources).unsqueeze(1) + numbers(physicals)
    ends = numbers(chunks + 1).view(-1, 1, 1)
    return ((tokens_DP * ends + turn_DP % chunks) // chunks).diff(dim=0)


def split_by(shares: Shares, plan: DispatchPlan) -> torch.Tensor:
    """Split into [C, D, P] by shares, with rounded cumulative sums; the last chunk gets all remaining tokens."""
    shares_CDE = torch.tensor(shares, dtype=torch.float64)
    experts_P = torch.from_numpy(plan.placement.tables.expert_P)
    ends_CDP = (shares_CDE[:, :, experts_P].cumsum(0) * plan.tokens_DP).round().to(torch.int64)
    ends_CDP = torch.minimum(ends_CDP, plan.tokens_DP)
    ends_CDP[-1] = plan.tokens_DP
    return ends_CDP.diff(dim=0, prepend=torch.zeros_like(ends_CDP[:1]))
