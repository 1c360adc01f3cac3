"""Times operations that all ranks of a group run together.

A member is a rank's number inside its expert-parallel group.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import AllToAll
from megatron_balance.job.groups import NodeGroups, new_node_groups
from megatron_balance.measure.operations import (
    OPERATIONS,
    BothPasses,
    Call,
    Load,
    even_exchange,
    idle,
    messages,
    transfer,
)
from megatron_balance.profile.cluster_profile import ROUNDS

Members = tuple[int, ...]
"""A subset of an expert-parallel group, as ascending ranks within the group."""

SMALL_BYTES = 256
"""Bytes of a message whose latency is measured."""

EVICTING_BYTES = 8 * 2**20
"""More bytes than a core's own caches hold."""


def middle(seconds: np.ndarray) -> np.ndarray:
    """Return the interquartile mean over the first axis; at least the minimum and maximum are left out.

    Threads that wait for each other wake up at once or some milliseconds later. A median jumps between such modes.
    """
    left_out = max(len(seconds) // 4, int(len(seconds) > 2))
    return np.sort(seconds, axis=0)[left_out : len(seconds) - left_out].mean(0)


QUEUING_CYCLES = 8_000_000
"""About 4 ms on a device, during which the host queues a call."""


@dataclass(frozen=True)
class Stopwatch:
    """Times operations that all ranks of a group run together; all ranks make the same calls."""

    group: dist.ProcessGroup
    device: torch.device
    repeats: int
    """Number of times that a call is timed."""

    def typical(self, calls: Sequence[Call], together: int = 1) -> list[float]:
        """Return each call's seconds on its slowest rank, the `middle` of its repeats; equal on every rank.

        The calls take turns, so that other load on the machine affects all of them. Their order is random in each
        repeat, because a call after a long one takes longer. Runs of `together` consecutive calls keep their order.
        """
        seconds = self._repeat(calls, together)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.group)
        return middle(seconds.cpu().numpy()).tolist()

    def typical_by_rank(self, calls: Sequence[Call], together: int = 1) -> np.ndarray:
        """Return the `middle` seconds of each call on each rank, [calls, ranks]; equal on every rank."""
        own = torch.from_numpy(middle(self._repeat(calls, together).cpu().numpy())).to(self.device)
        found = own.new_empty(self.group.size() * len(calls))
        dist.all_gather_into_tensor(found, own, group=self.group)
        return found.view(-1, len(calls)).T.cpu().numpy()

    def _repeat(self, calls: Sequence[Call], together: int) -> torch.Tensor:
        for call in calls:
            call()
        seconds = np.zeros((self.repeats, len(calls)))
        for repeat in range(self.repeats):
            firsts = together * np.random.default_rng(repeat).permutation(len(calls) // together)
            for index in (firsts[:, None] + np.arange(together)).ravel().tolist():
                self._meet()
                seconds[repeat, index] = self._seconds(calls[index])
        return torch.from_numpy(seconds).to(self.device)

    @functools.cached_property
    def _other_memory(self) -> torch.Tensor:
        """Memory that a CPU writes between two calls, as other work does, so that caches lack the calls' data."""
        return torch.zeros(EVICTING_BYTES if self.device.type == "cpu" else 0, dtype=torch.uint8, device=self.device)

    def _meet(self) -> None:
        """Align the start of all ranks. `dist.barrier` would print a warning."""
        self._other_memory.add_(1)
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _seconds(self, call: Call) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        # The host's clock would stop when the work is queued, not when it is done. The device begins after the host has
        # queued everything, because the host is mostly ahead in training, too
        torch.cuda._sleep(QUEUING_CYCLES)
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1000


@dataclass(frozen=True, kw_only=True)
class GroupBench:
    """Times the operations of an expert-parallel group; all its ranks make the same calls and get the same times."""

    stopwatch: Stopwatch
    """The stopwatch of the expert-parallel group."""
    groups: Mapping[Members, dist.ProcessGroup]
    """Groups that this rank is in; it idles while other groups measure."""
    passes: Callable[[int], BothPasses]
    """Returns the passes of this rank's experts over a number of tokens."""
    dtype: torch.dtype
    """Data type of the messages."""
    node_size: int
    """Number of members on one node."""
    shares: Sequence[float] = (1.0,)
    """Each tensor's share of an expert's weights; each tensor is sent in its own message."""
    all_to_alls: Mapping[str, AllToAll] = field(default_factory=dict)
    """All-to-alls of the whole group, by name."""
    codecs: Mapping[str, Callable[[int], BothPasses]] = field(default_factory=dict)
    """Codec's name -> function that returns the compression and decompression of a number of rows."""

    def seconds(self, operation: str, members: Members, amounts: Sequence[int] | Sequence[Load]) -> list[float]:
        """Return the seconds of an operation among `members` for each amount.

        Args:
            operation: a collective or one of `all_to_alls`, with bytes as in `ClusterProfile.links`; `trans` or `agg`,
                with loads; `messages`, with numbers of small messages that each member sends and receives in a batch.
        """
        calls: list[Call] = [idle] * len(amounts)
        if members in self.groups:
            calls = [self._call(operation, members, amount) for amount in amounts]
        return self.stopwatch.typical(calls)

    def _call(self, operation: str, members: Members, amount: Any) -> Call:
        group = self.groups[members]
        size = group.size()
        # All members send to other nodes, if there are any
        step = self.node_size if size == self.stopwatch.group.size() > self.node_size else 1
        if operation in ROUNDS:
            return transfer(operation, group, step, amount, self._slots(operation, amount))
        if operation == "messages":
            return messages(group, self._buffer(SMALL_BYTES), [1 + index % (size - 1) for index in range(amount)])
        if operation in self.all_to_alls:
            return even_exchange(self.all_to_alls[operation], self._buffer(amount))
        return OPERATIONS[operation](group, self._buffer(amount), step)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(-(-num_bytes // self.dtype.itemsize), dtype=self.dtype, device=self.stopwatch.device)

    def _slots(self, operation: str, load: Load) -> list[list[torch.Tensor]]:
        dtype = torch.float32 if operation == "agg" else self.dtype
        lengths = [max(1, round(share * load.num_bytes / dtype.itemsize)) for share in self.shares]
        new = {"dtype": dtype, "device": self.stopwatch.device}
        return [[torch.zeros(length, **new) for length in lengths] for _ in range(2 * load.experts)]

    def compute(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of the experts' forward pass and backward pass, [numbers of tokens, ranks] each."""
        seconds = self.stopwatch.typical_by_rank([call for count in tokens for call in self.passes(count)], 2)
        return seconds[::2], seconds[1::2]

    def code(self, name: str, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return the seconds of a codec's compression and decompression for each number of rows."""
        seconds = self.stopwatch.typical([call for count in tokens for call in self.codecs[name](count)], 2)
        return seconds[::2], seconds[1::2]


@contextlib.contextmanager
def node_groups(ep_group: dist.ProcessGroup, node_size: int) -> Iterator[NodeGroups]:
    """Yield `new_node_groups`, and destroy the new groups at the end."""
    nodes = new_node_groups(ep_group, node_size)
    try:
        yield nodes
    finally:
        for group in (nodes.intra, nodes.inter):
            if group is not None and group is not ep_group:
                dist.destroy_process_group(group)
