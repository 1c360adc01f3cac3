"""Times collectives and experts on this cluster, for measure.py.

A rank's number inside its expert-parallel group is called a member here.
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

Run = Callable[[], object]


class Passes(NamedTuple):
    """One rank's experts (or codec) on a given number of tokens, there and back, to be run any number of times."""

    forward: Run

    backward: Run
    """Of the forward before it."""


class Bench(Protocol):
    """What a profile is fitted to; the times are the same on every rank."""

    def communicate(self, collective: str, members: Members, sizes_bytes: Sequence[int]) -> list[float]:
        """Seconds of a collective among members, for each size in bytes as `ClusterProfile.links` counts them."""
        ...

    def compute(self, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds of the experts' forward, and of their backward, for each number of tokens on a rank."""
        ...

    def code(self, name: str, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds of a codec's compression, and of its decompression, for each number of rows."""
        ...


@dataclass(frozen=True)
class Stopwatch:
    """Times what all ranks of a group do together; all of them make the same calls."""

    group: dist.ProcessGroup

    device: torch.device

    repeats: int

    def medians(self, runs: Sequence[Run]) -> list[float]:
        """Each run's median over the repeats of the seconds that its slowest rank took; the same on every rank.

        The slowest rank, because the root of a broadcast leaves before the others have its data. All runs take turns,
        so that whatever else the machine does hits all of them.
        """
        for run in runs:
            run()
        seconds = torch.zeros(self.repeats, len(runs), dtype=torch.float64, device=self.device)
        for repeat in range(self.repeats):
            for index, run in enumerate(runs):
                self._meet()
                seconds[repeat, index] = self._seconds(run)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.group)
        return seconds.quantile(0.5, dim=0).tolist()

    def _meet(self) -> None:
        """Let all ranks start together. (`dist.barrier` warns of its choice of device.)"""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _seconds(self, run: Run) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        # The host's clock would stop when the work is queued
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        run()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1000


@dataclass(frozen=True)
class GroupBench:
    """The bench of a real expert-parallel group; all its ranks make the same calls."""

    stopwatch: Stopwatch
    """Of the expert-parallel group."""

    groups: Mapping[Members, dist.ProcessGroup]
    """The groups that this rank is a member of, `sub_groups`; it idles while others measure."""

    passes: Callable[[int], Passes]
    """The experts of this rank, given the number of tokens."""

    dtype: torch.dtype
    """What is sent and reduced."""

    codecs: Mapping[str, Callable[[int], Passes]] = field(default_factory=dict)
    """By name, compression and decompression of so many rows."""

    def communicate(self, collective: str, members: Members, sizes_bytes: Sequence[int]) -> list[float]:
        if members not in self.groups:
            return self.stopwatch.medians([_idle] * len(sizes_bytes))
        prepare, group, device = OPERATIONS[collective], self.groups[members], self.stopwatch.device
        counts = [-(-size // self.dtype.itemsize) for size in sizes_bytes]
        return self.stopwatch.medians([prepare(group, torch.zeros(n, dtype=self.dtype, device=device)) for n in counts])

    def compute(self, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        return self._there_and_back(self.passes, tokens)

    def code(self, name: str, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        return self._there_and_back(self.codecs[name], tokens)

    def _there_and_back(
        self, passes: Callable[[int], Passes], tokens: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        seconds = self.stopwatch.medians([run for count in tokens for run in passes(count)])
        return seconds[::2], seconds[1::2]


def _idle() -> None:
    """Let others measure."""


@contextlib.contextmanager
def sub_groups(
    ep_group: dist.ProcessGroup, job: dist.ProcessGroup, wanted: Iterable[Members]
) -> Iterator[dict[Members, dist.ProcessGroup]]:
    """`new_sub_groups` and the expert-parallel group itself; those that were created are destroyed at the end."""
    groups = new_sub_groups(ep_group, job, wanted)
    try:
        yield groups
    finally:
        for group in groups.values():
            if group is not ep_group:
                dist.destroy_process_group(group)


def _p2p(group: dist.ProcessGroup, buffer: torch.Tensor) -> Run:
    """Everyone sends to the next rank and receives from the one before: one message per link and direction."""
    received, rank, size = torch.empty_like(buffer), group.rank(), group.size()

    def run() -> None:
        send = dist.P2POp(dist.isend, buffer, group=group, group_peer=(rank + 1) % size)
        receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return run


def _all_to_all(group: dist.ProcessGroup, buffer: torch.Tensor) -> Run:
    """Everyone sends an equal part of its buffer to every other rank, as layers do it by default."""
    each = -(-len(buffer) // (group.size() - 1))
    splits_DD = each * (1 - torch.eye(group.size(), dtype=torch.int64))
    sent = buffer.new_zeros(each * (group.size() - 1))
    exchange = default_all_to_all(group)
    return lambda: exchange.start(sent, splits_DD).wait()


def _all_gather(group: dist.ProcessGroup, buffer: torch.Tensor) -> Run:
    """Everyone ends with a buffer that holds an equal part from every rank."""
    part = buffer.new_zeros(-(-len(buffer) // group.size()))
    gathered = part.new_empty(len(part) * group.size())
    return lambda: dist.all_gather_into_tensor(gathered, part, group=group)


OPERATIONS: dict[str, Callable[[dist.ProcessGroup, torch.Tensor], Run]] = {
    "p2p": _p2p,
    "all_to_all": _all_to_all,
    "broadcast": lambda group, buffer: lambda: dist.broadcast(buffer, group=group, group_src=0),
    "reduce": lambda group, buffer: lambda: dist.reduce(buffer, group=group, group_dst=0),
    "all_gather": _all_gather,
    "all_reduce": lambda group, buffer: lambda: dist.all_reduce(buffer, group=group),
}
"""A collective over a buffer of as many bytes as `ClusterProfile.links` counts, ready to run."""
