"""Times collectives and experts on this cluster, for measure.py.

Here, a member is a rank's number inside its expert-parallel group.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import AllToAll, default_all_to_all
from megatron_balance.job.groups import Members, NodeGroups, new_node_groups, new_sub_groups
from megatron_balance.measure.rounds import Load, agg_call, trans_call

Call = Callable[[], object]
"""An operation to time; it can be called any number of times."""


class Passes(NamedTuple):
    """The forward and backward pass of one rank's experts, or both directions of a codec, on a number of tokens."""

    forward: Call

    backward: Call
    """The backward pass of the latest forward pass."""


class Bench(Protocol):
    """Source of the times that a profile is fitted to, which are the same on every rank."""

    @property
    def all_to_alls(self) -> Iterable[str]:
        """Names of the all-to-alls besides the default one."""
        ...

    @property
    def codecs(self) -> Iterable[str]:
        """Names of the codecs."""
        ...

    def communicate(self, collective: str, members: Members, sizes_bytes: Sequence[int]) -> list[float]:
        """Return the seconds of a collective among `members` for each size, in bytes as in `ClusterProfile.links`."""
        ...

    @property
    def tensors(self) -> int:
        """Number of tensors of an expert."""
        ...

    def transfer(self, kind: str, members: Members, loads: Sequence[Load]) -> list[float]:
        """Return the seconds of `trans` or `agg` among `members` for each load."""
        ...

    def send(self, members: Members, counts: Sequence[int]) -> list[float]:
        """Return the seconds of a batch in which each of `members` sends and receives each number of small messages."""
        ...

    def exchange(self, name: str, sizes_bytes: Sequence[int]) -> list[float]:
        """Return the seconds of the all-to-all `name`, like those of `all_to_all` among all members."""
        ...

    def compute(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of the experts' forward pass and backward pass, [numbers of tokens, ranks] each."""
        ...

    def code(self, name: str, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return the seconds of a codec's compression and decompression for each number of rows."""
        ...


EVICTING_BYTES = 8 * 2**20
"""More than a core's own caches. Four ranks together have as much as the cache that a processor's cores often share."""


def middle(seconds: np.ndarray) -> np.ndarray:
    """Return the interquartile mean over the first axis: without the least and the most quarter, or one of each.

    Threads that wait for each other wake up at once or some milliseconds later. Between such modes a median jumps.
    """
    left_out = max(len(seconds) // 4, int(len(seconds) > 2))
    return np.sort(seconds, axis=0)[left_out : len(seconds) - left_out].mean(0)


QUEUING_CYCLES = 8_000_000
"""About 4 ms of a device, in which the host queues a call."""

MOST_REPEATS = 200
"""Maximum number of times that a short call is timed, unless every call is timed more often."""


@dataclass(frozen=True)
class Stopwatch:
    """Times operations that all ranks of a group run together; all of them make the same calls."""

    group: dist.ProcessGroup

    device: torch.device

    repeats: int
    """Minimum number of times that a call is timed."""

    patience: float = 0.0
    """Seconds for which a shorter call is timed, because threads that wait for each other wake up sooner or later: the
    shorter a call, the more its seconds vary."""

    def typical(self, calls: Sequence[Call], together: int = 1) -> list[float]:
        """Return each call's seconds on its slowest rank, the `middle` of its repeats; the same on every rank.

        The slowest rank counts because a rank may return before the others have its data. The calls take turns, so
        that other load on the machine affects all of them. Their order differs from repeat to repeat, because a call
        that follows a long one takes longer.

        Args:
            together: number of consecutive calls that keep their order.
        """
        found = self._repeat(calls, together)
        seconds = torch.cat(found)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.group)
        return [float(middle(part)) for part in np.split(seconds.cpu().numpy(), np.cumsum([*map(len, found)])[:-1])]

    def typical_by_rank(self, calls: Sequence[Call], together: int = 1) -> np.ndarray:
        """Return the `middle` seconds of each call on each rank, [calls, ranks]; the same on every rank."""
        own = [float(middle(seconds.cpu().numpy())) for seconds in self._repeat(calls, together)]
        own = torch.tensor(own, dtype=torch.float64, device=self.device)
        found = own.new_empty(self.group.size() * len(calls))
        dist.all_gather_into_tensor(found, own, group=self.group)
        return found.view(-1, len(calls)).T.cpu().numpy()

    def _repeat(self, calls: Sequence[Call], together: int) -> list[torch.Tensor]:
        """Return, for each call, this rank's seconds of all its repeats, float64."""
        for call in calls:
            call()
        numbers = self._numbers(calls, together)
        most = max(numbers, default=0)
        found = [[] for _ in calls]
        for repeat in range(most):
            # The repeats of each call are spread over all of them
            (turns,) = ((repeat + 1) * numbers // most > repeat * numbers // most).nonzero()
            firsts = (together * np.random.default_rng(repeat).permutation(turns)).tolist()
            for index in (first + offset for first in firsts for offset in range(together)):
                found[index].append(self._timed(calls[index]))
        return [torch.tensor(seconds, dtype=torch.float64, device=self.device) for seconds in found]

    def _numbers(self, calls: Sequence[Call], together: int) -> np.ndarray:
        """Return how often to time each run of consecutive calls, `together` each; the same on every rank."""
        if not self.patience:
            return np.full(len(calls) // together, self.repeats)
        seconds = torch.tensor([self._timed(call) for call in calls], dtype=torch.float64, device=self.device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.group)
        lengths = seconds.view(-1, together).sum(1).cpu().numpy()
        return np.ceil(self.patience / lengths).clip(self.repeats, MOST_REPEATS).astype(int)

    def _timed(self, call: Call) -> float:
        """Return this rank's seconds of a call that all ranks begin together."""
        self._meet()
        return self._seconds(call)

    @functools.cached_property
    def _other_memory(self) -> torch.Tensor:
        """What a processor reads and writes between two calls, so that its caches do not have the next one's data.

        In a run, other work does that. A device's caches are small compared with messages.
        """
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
        # The host's clock would stop when the work is queued, not when it is done. The device begins when the host has
        # queued everything: in training, too, the host is ahead most of the time
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
    """The bench of a real expert-parallel group; all its ranks make the same calls."""

    stopwatch: Stopwatch
    """The stopwatch of the expert-parallel group."""

    groups: Mapping[Members, dist.ProcessGroup]
    """The `sub_groups` that this rank is a member of; it idles while other groups measure."""

    passes: Callable[[int], Passes]
    """Returns the passes of this rank's experts over a number of tokens."""

    dtype: torch.dtype
    """Data type of the messages."""

    node_size: int
    """Number of members on one node."""

    shares: Sequence[float] = (1.0,)
    """Share of each tensor in the weights of an expert; each is sent in a message of its own."""

    all_to_alls: Mapping[str, AllToAll] = field(default_factory=dict)
    """All-to-alls of the whole group, by name."""

    codecs: Mapping[str, Callable[[int], Passes]] = field(default_factory=dict)
    """By the codec's name, a function that returns compression and decompression of a number of rows."""

    @property
    def tensors(self) -> int:
        return len(self.shares)

    def communicate(self, collective: str, members: Members, sizes_bytes: Sequence[int]) -> list[float]:
        if members not in self.groups:
            return self.stopwatch.typical([_idle] * len(sizes_bytes))
        group = self.groups[members]
        step = self._step(members)
        prepare = OPERATIONS[collective]
        return self.stopwatch.typical([prepare(group, self._buffer(size), step) for size in sizes_bytes])

    def transfer(self, kind: str, members: Members, loads: Sequence[Load]) -> list[float]:
        if members not in self.groups:
            return self.stopwatch.typical([_idle] * len(loads))
        prepare = TRANSFERS[kind]
        dtype = torch.float32 if kind == "agg" else self.dtype
        place = self.groups[members], self._step(members)
        return self.stopwatch.typical([prepare(*place, load, self._slots(load, dtype)) for load in loads])

    def send(self, members: Members, counts: Sequence[int]) -> list[float]:
        if members not in self.groups:
            return self.stopwatch.typical([_idle] * len(counts))
        group = self.groups[members]
        buffer = self._buffer(SMALL_BYTES)
        return self.stopwatch.typical([_messages(group, buffer, count) for count in counts])

    def exchange(self, name: str, sizes_bytes: Sequence[int]) -> list[float]:
        exchange = self.all_to_alls[name]
        return self.stopwatch.typical([_even_exchange(exchange, self._buffer(size)) for size in sizes_bytes])

    def compute(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        seconds = self.stopwatch.typical_by_rank([call for count in tokens for call in self.passes(count)], 2)
        return seconds[::2], seconds[1::2]

    def code(self, name: str, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        seconds = self.stopwatch.typical([call for count in tokens for call in self.codecs[name](count)], 2)
        return seconds[::2], seconds[1::2]

    def _step(self, members: Members) -> int:
        """Return the distance to the member that a member sends to: all send to other nodes, if there are any."""
        size = self.stopwatch.group.size()
        return self.node_size if len(members) == size > self.node_size else 1

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(-(-num_bytes // self.dtype.itemsize), dtype=self.dtype, device=self.stopwatch.device)

    def _slots(self, load: Load, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Return the tensors of a load's experts and of as many guests."""
        lengths = [max(1, round(share * load.num_bytes / dtype.itemsize)) for share in self.shares]
        new = {"dtype": dtype, "device": self.stopwatch.device}
        return [[torch.zeros(length, **new) for length in lengths] for _ in range(2 * load.experts)]


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


@contextlib.contextmanager
def node_groups(ep_group: dist.ProcessGroup, job: dist.ProcessGroup, node_size: int) -> Iterator[NodeGroups]:
    """Yield `new_node_groups`, and destroy the new groups at the end."""
    nodes = new_node_groups(ep_group, job, node_size)
    try:
        yield nodes
    finally:
        for group in (nodes.intra, nodes.inter):
            if group not in (None, ep_group):
                dist.destroy_process_group(group)


SMALL_BYTES = 256
"""Bytes of a message whose latency is measured."""


def _p2p(group: dist.ProcessGroup, buffer: torch.Tensor, step: int) -> Call:
    """Return a call in which each rank sends to the rank `step` after it and receives from the one `step` before it."""
    received = torch.empty_like(buffer)
    rank = group.rank()
    size = group.size()

    def run() -> None:
        send = dist.P2POp(dist.isend, buffer, group=group, group_peer=(rank + step) % size)
        receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - step) % size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return run


def _one_way(group: dist.ProcessGroup, buffer: torch.Tensor, step: int) -> Call:
    """Return a call in which ranks of every other run of `step` ranks send to the rank `step` after them."""
    received = torch.empty_like(buffer)
    rank = group.rank()
    size = group.size()
    sends = rank // step % 2 == 0

    def run() -> None:
        peer = rank + step if sends else rank - step
        if peer < size:
            operation = dist.P2POp(
                dist.isend if sends else dist.irecv, buffer if sends else received, group=group, group_peer=peer
            )
            for work in dist.batch_isend_irecv([operation]):
                work.wait()

    return run


def _messages(group: dist.ProcessGroup, buffer: torch.Tensor, count: int) -> Call:
    """Return a call in which each rank sends its buffer `count` times, to the other ranks in turn."""
    received = [torch.empty_like(buffer) for _ in range(count)]
    rank = group.rank()
    size = group.size()
    steps = [1 + index % (size - 1) for index in range(count)]

    def run() -> None:
        receives = [
            dist.P2POp(dist.irecv, room, group=group, group_peer=(rank - step) % size, tag=tag)
            for tag, (room, step) in enumerate(zip(received, steps, strict=True))
        ]
        sends = [
            dist.P2POp(dist.isend, buffer, group=group, group_peer=(rank + step) % size, tag=tag)
            for tag, step in enumerate(steps)
        ]
        for work in dist.batch_isend_irecv([*receives, *sends]):
            work.wait()

    return run


def _even_exchange(exchange: AllToAll, buffer: torch.Tensor) -> Call:
    """Return a call in which each rank sends equal parts of its buffer to the others, and keeps another such part."""
    size = exchange.group.size()
    each = -(-len(buffer) // (size - 1))
    splits_DD = torch.full((size, size), each)
    sent = buffer.new_zeros(each * size)
    return lambda: exchange.start(sent, splits_DD).wait()


def _all_gather(group: dist.ProcessGroup, buffer: torch.Tensor, _: int) -> Call:
    """Return a call after which each rank has a buffer with an equal part from every rank."""
    part = buffer.new_zeros(-(-len(buffer) // group.size()))
    gathered = part.new_empty(len(part) * group.size())
    return lambda: dist.all_gather_into_tensor(gathered, part, group=group)


OPERATIONS: dict[str, Callable[[dist.ProcessGroup, torch.Tensor, int], Call]] = {
    "p2p": _p2p,
    "one_way": _one_way,
    "all_to_all": lambda group, buffer, _: _even_exchange(default_all_to_all(group), buffer),
    "all_gather": _all_gather,
    "all_reduce": lambda group, buffer, _: lambda: dist.all_reduce(buffer, group=group),
}
"""Collectives by name, as functions of a group, a buffer and a step between ranks that return a call; the buffer has
the bytes that `ClusterProfile.links` counts."""

TRANSFERS: dict[str, Callable[[dist.ProcessGroup, int, Load, Sequence[Sequence[torch.Tensor]]], Call]] = {
    "trans": trans_call,
    "agg": agg_call,
}
"""Trans and Agg, as functions of a group, a step between ranks, a load and its tensors."""
