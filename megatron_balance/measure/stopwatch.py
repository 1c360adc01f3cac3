"""Times collectives and experts on this cluster, for measure.py.

Here, a member is a rank's number inside its expert-parallel group.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import default_all_to_all
from megatron_balance.job.groups import Members, new_sub_groups

Call = Callable[[], object]
"""An operation to time; it can be called any number of times."""


class Passes(NamedTuple):
    """The forward and backward pass of one rank's experts, or both directions of a codec, on a number of tokens."""

    forward: Call

    backward: Call
    """The backward pass of the latest forward pass."""


class Bench(Protocol):
    """Source of the times that a profile is fitted to, which are the same on every rank."""

    def communicate(self, collective: str, members: Members, sizes_bytes: Sequence[int]) -> list[float]:
        """Return the seconds of a collective among `members` for each size, in bytes as in `ClusterProfile.links`."""
        ...

    def compute(self, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return the seconds of the experts' forward pass and backward pass for each number of tokens on a rank."""
        ...

    def code(self, name: str, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return the seconds of a codec's compression and decompression for each number of rows."""
        ...


@dataclass(frozen=True)
class Stopwatch:
    """Times operations that all ranks of a group run together; all of them make the same calls."""

    group: dist.ProcessGroup

    device: torch.device

    repeats: int

    def medians(self, calls: Sequence[Call]) -> list[float]:
        """Return each call's seconds on its slowest rank, as the median over the repeats; the same on every rank.

        The slowest rank counts because the root of a broadcast returns before the others have its data. The calls take
        turns, so that other load on the machine affects all of them.
        """
        for call in calls:
            call()
        seconds = torch.zeros(self.repeats, len(calls), dtype=torch.float64, device=self.device)
        for repeat in range(self.repeats):
            for index, call in enumerate(calls):
                self._meet()
                seconds[repeat, index] = self._seconds(call)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.group)
        return seconds.quantile(0.5, dim=0).tolist()

    def _meet(self) -> None:
        """Align the start of all ranks. `dist.barrier` would print a warning."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _seconds(self, call: Call) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        # The host's clock would stop when the work is queued, not when it is done
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1000


@dataclass(frozen=True, kw_only=True)
class GroupBench:
    """The bench of a real expert-parallel group; all its ranks make the same calls."""

    stopwatch: Stopwatch
    """The stopwatch of the expert-parallel group."""

    groups: Mapping[Members, dist.ProcessGroup]
    """The `sub_groups` that this rank is a member of; it idles while other groups measure."""

    passes: Callable[[int], Passes]
    """Returns the passes of this rank's experts over a number of tokens."""

    dtype: torch.dtype
    """Data type of the messages."""

    codecs: Mapping[str, Callable[[int], Passes]] = field(default_factory=dict)
    """By the codec's name, a function that returns compression and decompression of a number of rows."""

    def communicate(self, collective: str, members: Members, sizes_bytes: Sequence[int]) -> list[float]:
        if members not in self.groups:
            return self.stopwatch.medians([_idle] * len(sizes_bytes))
        prepare, group, device = OPERATIONS[collective], self.groups[members], self.stopwatch.device
        counts = [-(-size // self.dtype.itemsize) for size in sizes_bytes]
        return self.stopwatch.medians([prepare(group, torch.zeros(n, dtype=self.dtype, device=device)) for n in counts])

    def compute(self, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        return self._both_directions(self.passes, tokens)

    def code(self, name: str, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        return self._both_directions(self.codecs[name], tokens)

    def _both_directions(
        self, passes: Callable[[int], Passes], tokens: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        seconds = self.stopwatch.medians([call for count in tokens for call in passes(count)])
        return seconds[::2], seconds[1::2]


def _idle() -> None:
    """Do nothing while other groups measure."""


@contextlib.contextmanager
def sub_groups(
    ep_group: dist.ProcessGroup, job: dist.ProcessGroup, wanted: Iterable[Members]
) -> Iterator[dict[Members, dist.ProcessGroup]]:
    """Yield `new_sub_groups` and the expert-parallel group itself, and destroy the new groups at the end."""
    groups = new_sub_groups(ep_group, job, wanted)
    try:
        yield groups
    finally:
        for group in groups.values():
            if group is not ep_group:
                dist.destroy_process_group(group)


def _p2p(group: dist.ProcessGroup, buffer: torch.Tensor) -> Call:
    """Return a call in which each rank sends to the next one and receives from the previous one."""
    received, rank, size = torch.empty_like(buffer), group.rank(), group.size()

    def run() -> None:
        send = dist.P2POp(dist.isend, buffer, group=group, group_peer=(rank + 1) % size)
        receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return run


def _all_to_all(group: dist.ProcessGroup, buffer: torch.Tensor) -> Call:
    """Return a call in which each rank sends equal parts of its buffer to the others, by the default all-to-all."""
    each = -(-len(buffer) // (group.size() - 1))
    splits_DD = each * (1 - torch.eye(group.size(), dtype=torch.int64))
    sent = buffer.new_zeros(each * (group.size() - 1))
    exchange = default_all_to_all(group)
    return lambda: exchange.start(sent, splits_DD).wait()


def _all_gather(group: dist.ProcessGroup, buffer: torch.Tensor) -> Call:
    """Return a call after which each rank has a buffer with an equal part from every rank."""
    part = buffer.new_zeros(-(-len(buffer) // group.size()))
    gathered = part.new_empty(len(part) * group.size())
    return lambda: dist.all_gather_into_tensor(gathered, part, group=group)


OPERATIONS: dict[str, Callable[[dist.ProcessGroup, torch.Tensor], Call]] = {
    "p2p": _p2p,
    "all_to_all": _all_to_all,
    "broadcast": lambda group, buffer: lambda: dist.broadcast(buffer, group=group, group_src=0),
    "reduce": lambda group, buffer: lambda: dist.reduce(buffer, group=group, group_dst=0),
    "all_gather": _all_gather,
    "all_reduce": lambda group, buffer: lambda: dist.all_reduce(buffer, group=group),
}
"""Collectives by name, as functions of a group and a buffer that return a call; the buffer has the bytes that
`ClusterProfile.links` counts."""
