"""Exchange of tokens between the ranks of a group: the AllToAll interface, and the members that know no nodes.

Rows travel whole. All ranks know the split matrix: `splits_DD[i, j]` (int64 on the host, zeros included) is the number
of rows that rank i sends to rank j. Rows are sent and received in the order of the ranks. Every rank of the group
starts the same exchanges in the same order, whatever its part in them.

Shape suffixes: D ranks of the group.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_balance.job.groups import NodeGroups


@dataclass(frozen=True)
class Exchange:
    """A started exchange."""

    wait: Callable[[], torch.Tensor]
    """Returns the received rows [sum of the rank's column, ...]: from rank 0, then rank 1, ... On CUDA the current
    stream waits for them, not the host."""


class AllToAll(ABC):
    """Rows to every rank of `group`, rows from every rank of it (AbsAlltoAll, ScheMoE section 3.1)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @abstractmethod
    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor) -> Exchange:
        """Start sending `rows` [sum of the rank's row of splits_DD, ...] of any dtype and return at once.

        Several exchanges may be under way, and be waited for in any order. The rows must not change until then.
        """

    @property
    def reverse(self) -> "AllToAll":
        """What takes gradients back."""
        return self

    def _prepare(self, rows: torch.Tensor, splits_DD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows as they can be sent, and room for those that come."""
        received = int(splits_DD[:, self.group.rank()].sum())
        return rows.detach().contiguous(), rows.new_empty((received, *rows.shape[1:]))


class Alone(AllToAll):
    """For a group of one rank, which keeps what it has."""

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor) -> Exchange:
        return Exchange(lambda: rows)


class NodeAllToAll(AllToAll):
    """Treats ranks of the same node and those of others differently."""

    tag = 0
    """Marks messages on gloo, for those that share groups with others without keeping to one order of posting."""

    def __init__(self, nodes: NodeGroups) -> None:
        super().__init__(nodes.ep)
        self.nodes = nodes
        for group in (nodes.ep, nodes.intra, nodes.inter):
            connect(group)

    @functools.cached_property
    def thread(self) -> ThreadPoolExecutor:
        """Posts, on a CPU, what has to wait for earlier messages: one exchange after another, beside the computation.

        On CUDA the order of a stream does the same.
        """
        return ThreadPoolExecutor(1, thread_name_prefix=type(self).__name__)


class FlatAllToAll(AllToAll):
    """The backend's own `all_to_all_single`."""

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor) -> Exchange:
        rows, received = self._prepare(rows, splits_DD)
        rank = self.group.rank()
        splits = splits_DD[:, rank].tolist(), splits_DD[rank].tolist()
        work = dist.all_to_all_single(received, rows, *splits, group=self.group, async_op=True)
        assert work is not None
        return ending_with([work], received, rows)


class P2PAllToAll(AllToAll):
    """One message to every other rank, all posted at once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        connect(group)

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor) -> Exchange:
        rows, received = self._prepare(rows, splits_DD)
        rank = self.group.rank()
        splits = splits_DD[:, rank].tolist(), splits_DD[rank].tolist()
        return ending_with(post_rows(self.group, rank, received, rows, *splits), received, rows)


def default_all_to_all(group: dist.ProcessGroup) -> AllToAll:
    """What `--moe-comm-alltoall default` stands for; for a rank alone, nothing.

    NCCL's own exchange is a batch of messages already. gloo's posts its sends before its receives and so halves the
    bandwidth of each link; but messages from a GPU are beyond gloo.
    """
    if group.size() == 1:
        return Alone(group)
    on_cpu = dist.get_backend(group) == "gloo" and not torch.cuda.is_available()
    return P2PAllToAll(group) if on_cpu else FlatAllToAll(group)


def connect(group: dist.ProcessGroup | None) -> None:
    """Let all ranks set up an NCCL communicator together: the first batch of messages may not concern all of them."""
    if group is not None and dist.get_backend(group) == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


def post(
    group: dist.ProcessGroup | None,
    receives: Mapping[int, torch.Tensor],
    sends: Mapping[int, torch.Tensor],
    tag: int = 0,
) -> list[dist.Work]:
    """Start receiving from and sending to ranks of `group`, in the order given; what is empty does not travel.

    All receives come first: on gloo, a sender waits until the receiver says that it is ready, and saying so queues
    behind the bulk data that the receiver itself sends. NCCL takes all of them as one batch.
    """
    operations = [
        dist.P2POp(verb, tensor, group=group, tag=tag, group_peer=peer)
        for verb, tensors in ((dist.irecv, receives), (dist.isend, sends))
        for peer, tensor in tensors.items()
        if tensor.numel()
    ]
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
    """Start an exchange between all ranks of `group` by messages, and copy the rows that stay on this rank.

    Step k goes to rank + k and comes from rank - k, so that no two ranks send to the same one.

    Args:
        group: None: this rank alone.
        output_splits, input_splits: rows of `received` and of `rows` that belong to each rank of the group.
    """
    targets, sources = rows.split(list(input_splits)), received.split(list(output_splits))
    size = len(targets)
    receives = {peer: sources[peer] for peer in ((rank - step) % size for step in range(1, size))}
    sends = {peer: targets[peer] for peer in ((rank + step) % size for step in range(1, size))}
    works = post(group, receives, sends, tag)
    sources[rank].copy_(targets[rank])
    return works


def ending_with(works: list[dist.Work], received: torch.Tensor, sent: torch.Tensor) -> Exchange:
    """The exchange of `sent` for `received` that is over when `works` are."""

    def wait() -> torch.Tensor:
        # Each once: gloo would wait for a second message
        while works:
            works.pop().wait()
        in_use_here(received, sent)
        return received

    return Exchange(wait)


def in_use_here(*tensors: torch.Tensor) -> None:
    """Keep the memory of tensors for the current CUDA stream, which may not be the one that allocated them."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
