"""Times collectives and experts on this cluster, for measure.py.

A rank's number inside its expert-parallel group is called a member here; `Members` are some of them, ascending.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

Members = tuple[int, ...]
Run = Callable[[], object]


class Passes(NamedTuple):
    """One rank's experts on a given number of tokens, to be run any number of times."""

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


@dataclass(frozen=True)
class GroupBench:
    """The bench of a real expert-parallel group; all its ranks make the same calls."""

    ep_group: dist.ProcessGroup

    groups: Mapping[Members, dist.ProcessGroup]
    """The groups that this rank is a member of, `sub_groups`; it idles while others measure."""

    passes: Callable[[int], Passes]
    """The experts of this rank, given the number of tokens."""

    device: torch.device

    dtype: torch.dtype
    """What is sent and reduced."""

    repeats: int

    def communicate(self, collective: str, members: Members, sizes_bytes: Sequence[int]) -> list[float]:
        if members not in self.groups:
            return self.medians([_idle] * len(sizes_bytes))
        prepare, group = OPERATIONS[collective], self.groups[members]
        counts = [-(-size // self.dtype.itemsize) for size in sizes_bytes]
        return self.medians([prepare(group, torch.zeros(n, dtype=self.dtype, device=self.device)) for n in counts])

    def compute(self, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        seconds = self.medians([run for count in tokens for run in self.passes(count)])
        return seconds[::2], seconds[1::2]

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
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.ep_group)
        return seconds.quantile(0.5, dim=0).tolist()

    def _meet(self) -> None:
        """Let all ranks start together. (`dist.barrier` warns of its choice of device.)"""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.ep_group)
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


def _idle() -> None:
    """Let others measure."""


@contextlib.contextmanager
def sub_groups(
    ep_group: dist.ProcessGroup, job: dist.ProcessGroup, wanted: Iterable[Members]
) -> Iterator[dict[Members, dist.ProcessGroup]]:
    """The groups of `wanted` members that this rank belongs to, itself the expert-parallel group; destroyed at the end.

    Every rank of the job has to call it with the same `wanted`: `new_group` asks all of them to create all groups in
    one order, those of other expert-parallel groups too. Its `use_local_synchronization` would ask members only, but it
    names a group by the number of groups that a rank is in, which pipeline stages do not agree about.

    Args:
        job: the default process group.
    """
    every: list[list[int]] = [[]] * job.size()
    dist.all_gather_object(every, dist.get_process_group_ranks(ep_group), group=job)
    everyone = tuple(range(ep_group.size()))
    shapes = sorted(set(wanted) - {everyone})
    created = {}
    for ranks in sorted(set(map(tuple, every))):
        for members in shapes:
            chosen = [ranks[member] for member in members]
            group = dist.new_group(chosen)
            if job.rank() in chosen:
                created[members] = group
    try:
        yield {everyone: ep_group, **created}
    finally:
        for group in created.values():
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
    """Everyone sends an equal part of its buffer to every other rank."""
    each = -(-len(buffer) // (group.size() - 1))
    splits = [0 if rank == group.rank() else each for rank in range(group.size())]
    sent = buffer.new_zeros(sum(splits))
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent, splits, splits, group=group)


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
