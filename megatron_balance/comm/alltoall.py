"""Exchange of rows between the ranks of a group: the AllToAll interface, and the all-to-alls that ignore nodes.

All ranks know the split matrix: `splits_DD[i, j]` (int64 in host memory, may be zero) is the number of rows that rank i
sends to rank j. Rows are sent and received in the order of the ranks. Every rank starts the same exchanges in the same
order, even without rows.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_balance.device.side_stream import SideStream
from megatron_balance.job.collectives import ALL_TO_ALL
from megatron_balance.job.groups import NodeGroups

MESSAGES_AT_ONCE = 3
"""Maximum messages that a rank sends at the same time on gloo, to other nodes or for Trans and Agg. More messages would
share links at random and leave some idle at the end."""


@dataclass(frozen=True)
class Exchange:
    """An exchange in progress."""

    wait: Callable[[], torch.Tensor]
    """Returns the received rows [sum of the rank's column, ...] by source. On CUDA, the current stream waits, not the
    host."""


class AllToAll(ABC):
    """Interface of all-to-all exchanges of rows within `group` (AbsAlltoAll, ScheMoE section 3.1)."""

    reads_all_splits = True
    """False: `start` reads only this rank's row and column of the split matrix."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @abstractmethod
    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor, room: int = 0) -> Exchange:
        """Start sending `rows` [sum of the rank's row of splits_DD, ...] of any dtype and return immediately. Several
        exchanges may be in progress, and may be waited for in any order. `rows` must not change until then.

        If `room` exceeds the number of received rows, the exchange may return this many rows; those after the received
        ones are undefined. Callers omit a `room` of 0, so that a class may lack this argument."""

    @property
    def reverse(self) -> "AllToAll":
        """The all-to-all for gradients, in the opposite direction."""
        return self

    def _prepare(self, rows: torch.Tensor, splits_DD: torch.Tensor, room: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows, detached and contiguous, and a buffer that begins with the received rows."""
        received = int(splits_DD[:, self.group.rank()].sum())
        return rows.detach().contiguous(), rows.new_empty((max(received, room), *rows.shape[1:]))


class SingleRankAllToAll(AllToAll):
    """The all-to-all of a single rank: it keeps its rows."""

    reads_all_splits = False

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor, room: int = 0) -> Exchange:
        return Exchange(lambda: rows)


class NodeAllToAll(AllToAll):
    """Base class of all-to-alls that distinguish messages within nodes and between nodes."""

    tag = 0
    """Tag of messages on gloo; classes that share groups need different tags."""

    def __init__(self, nodes: NodeGroups) -> None:
        super().__init__(nodes.ep)
        self.nodes = nodes
        for group in (nodes.ep, nodes.intra, nodes.inter):
            connect(group)

    @functools.cached_property
    def side_stream(self) -> SideStream:
        """Posts messages that depend on earlier messages, during computation; one exchange at a time."""
        return SideStream(type(self).__name__)


class FlatAllToAll(AllToAll):
    """The backend's own `all_to_all_single`."""

    reads_all_splits = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.options = dist.AllToAllOptions()
        self.options.asyncOp = True

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor, room: int = 0) -> Exchange:
        # The device waits for the host here: numpy slices faster than torch, and the group's method skips checks
        rank = self.group.rank()
        splits = splits_DD.numpy()
        rows = rows.detach().contiguous()
        output_splits = splits[:, rank].tolist()
        input_splits = splits[rank].tolist()
        count = sum(output_splits)
        received = rows.new_empty((max(count, room), *rows.shape[1:]))
        work = getattr(self.group, ALL_TO_ALL)(received[:count], rows, output_splits, input_splits, self.options)
        return exchange_of([work], received, rows)


class P2PAllToAll(AllToAll):
    """One message to every other rank, all posted at once."""

    reads_all_splits = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        connect(group)

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor, room: int = 0) -> Exchange:
        rows, received = self._prepare(rows, splits_DD, room)
        rank = self.group.rank()
        works = post_rows(self.group, rank, received, rows, splits_DD[:, rank].tolist(), splits_DD[rank].tolist())
        return exchange_of(works, received, rows)


def default_all_to_all(group: dist.ProcessGroup) -> AllToAll:
    """Return the all-to-all of `--moe-comm-alltoall default`. gloo's own all-to-all posts its sends before its
    receives, which halves the bandwidth of each link. However, gloo cannot send messages from a GPU."""
    if group.size() == 1:
        return SingleRankAllToAll(group)
    on_cpu = dist.get_backend(group) == "gloo" and not torch.cuda.is_available()
    return P2PAllToAll(group) if on_cpu else FlatAllToAll(group)


def connect(group: dist.ProcessGroup | None) -> None:
    """Set up an NCCL communicator on all ranks, because the first batch of messages may not involve all of them."""
    if group is not None and dist.get_backend(group) == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


def post(
    group: dist.ProcessGroup | None,
    receives: Mapping[int, torch.Tensor],
    sends: Mapping[int, torch.Tensor],
    tag: int = 0,
) -> list[dist.Work]:
    """Start receiving from and sending to ranks of `group`; empty tensors are skipped. Receives are posted first: on
    gloo, a sender waits for the receiver's ready notification, which queues behind the receiver's own bulk data."""
    operations = [
        dist.P2POp(verb, tensor, group=group, tag=tag, group_peer=peer)
        for verb, tensors in ((dist.irecv, receives), (dist.isend, sends))
        for peer, tensor in tensors.items()
        if tensor.numel()
    ]
    return post_operations(operations)


def post_operations(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Start the operations as one batch; there may be none."""
    return dist.batch_isend_irecv(operations) if operations else []


def post_rows(
    group: dist.ProcessGroup | None,
    rank: int,
    received: torch.Tensor,
    rows: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    tag: int = 0,
) -> list[dist.Work]:
    """Post a message for each other rank of `group` (None: this rank alone), and copy the rows that stay on this rank.
    `received` may have more rows; messages fill the first ones. In step k, a rank sends to rank + k and receives from
    rank - k, so no two ranks send to the same rank."""
    targets = rows.split(list(input_splits))
    sources = first_blocks(received, output_splits)
    size = len(targets)
    receives = {peer: sources[peer] for peer in ((rank - step) % size for step in range(1, size))}
    sends = {peer: targets[peer] for peer in ((rank + step) % size for step in range(1, size))}
    works = post(group, receives, sends, tag)
    sources[rank].copy_(targets[rank])
    return works


def first_blocks(rows: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return consecutive blocks of rows, from the first row on; there may be more rows."""
    return rows[: sum(sizes)].split(list(sizes))


def exchange_of(works: list[dist.Work], received: torch.Tensor, sent: torch.Tensor) -> Exchange:
    """Return the exchange that sends `sent`, fills `received` and completes with `works`."""

    def wait() -> torch.Tensor:
        wait_for(works)
        keep_until_read(received, sent)
        return received

    return Exchange(wait)


def exchange_on(stream: SideStream, run: Callable[[], None], sent: torch.Tensor, received: torch.Tensor) -> Exchange:
    """Return the exchange that `run` performs on a side stream: it sends `sent` and fills `received`."""

    def send() -> None:
        keep_until_read(sent, received)
        run()

    work = stream.start(send)

    def wait() -> torch.Tensor:
        work.wait()
        keep_until_read(received)
        return received

    return Exchange(wait)


def wait_for(works: list[dist.Work]) -> None:
    """Wait for messages and empty the list: on gloo, a second wait for a message would wait for another one."""
    while works:
        works.pop().wait()


def keep_until_read(*tensors: torch.Tensor) -> None:
    """Keep the memory of tensors until the current CUDA stream has used them, even if allocated on another stream."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
