"""Exchanges with sharded experts: rows go to every shard of their expert, and sums over the shards return.

An expert may be split into shards, one for each rank of a host (expert tensor parallelism, ESP). A source is a rank
that has rows to send. Rank d of the group of all shards of all hosts is shard d % V of host d // V. Every Sharding
delivers the same rows in the same order, by source.

In the shapes, D counts the sources, W the hosts, and V the shards of a host.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import AllToAll, Exchange, post, wait_for
from megatron_balance.comm.blocks import transposed


class Sharding(ABC):
    """Interface of exchanges between sources of rows and shards of experts. Gradients use the same methods: `collect`
    is the transpose of `spread`."""

    collectives: tuple[str | None, str | None] = (None, None)
    """Collectives among a host's shards over all of its rows: after rows arrive, and before results return."""

    @abstractmethod
    def spread(self, all_to_all: AllToAll, rows: torch.Tensor, splits_DW: torch.Tensor, **room: int) -> Exchange:
        """Start sending this source's rows, ordered by host, to all shards of their hosts. `splits_DW`, int64 in host
        memory, has the number of rows from each source to each host. The exchange returns the rows received by this
        shard, ordered by source. For `room`, see `AllToAll.start`."""

    @abstractmethod
    def collect(self, all_to_all: AllToAll, rows: torch.Tensor, splits_DW: torch.Tensor) -> Exchange:
        """Start sending this shard's results, in the order in which their rows arrived. The exchange returns the sums
        over shards for this source's rows, in their original order."""

    def messages(self, amounts_DW: np.ndarray) -> list[np.ndarray]:
        """Return the amounts between ranks in each of `spread`'s simultaneous all-to-alls."""
        return [amounts_DW]


class Unsharded(Sharding):
    """Each host is one rank."""

    def spread(self, all_to_all: AllToAll, rows: torch.Tensor, splits_DW: torch.Tensor, **room: int) -> Exchange:
        return all_to_all.start(rows, splits_DW, **room)

    def collect(self, all_to_all: AllToAll, rows: torch.Tensor, splits_DW: torch.Tensor) -> Exchange:
        return all_to_all.start(rows, splits_DW.T)


class DirectAllToAll(Sharding):
    """One all-to-all among all shards of all hosts, with a copy of each row for each shard (Parm III-C: EP&ESP-A2A)."""

    def __init__(self, shards: int) -> None:
        self.shards = shards

    def spread(self, all_to_all: AllToAll, rows: torch.Tensor, splits_DW: torch.Tensor, **room: int) -> Exchange:
        sizes = splits_DW[all_to_all.group.rank()].tolist()
        copies = torch.cat([part for part in rows.split(sizes) for _ in range(self.shards)])
        return all_to_all.start(copies, splits_DW.repeat_interleave(self.shards, dim=1), **room)

    def collect(self, all_to_all: AllToAll, rows: torch.Tensor, splits_DW: torch.Tensor) -> Exchange:
        exchange = all_to_all.start(rows, splits_DW.repeat_interleave(self.shards, dim=1).T)
        sizes = splits_DW[all_to_all.group.rank()].tolist()
        return Exchange(lambda: sums_of_copies(exchange.wait(), sizes, self.shards))

    def messages(self, amounts_DW: np.ndarray) -> list[np.ndarray]:
        return [amounts_DW.repeat(self.shards, axis=1)]


class AllGather(Sharding):
    """All-to-all between hosts, all-gather among a host's shards; results return by reduce-scatter (megatron-core)."""

    # A reduce-scatter moves as many bytes as an all-gather
    collectives = ("all_gather", "all_gather")

    def __init__(self, shards: dist.ProcessGroup) -> None:
        """`shards` are the ranks of this rank's host."""
        self.shards = shards

    def spread(self, all_to_all: AllToAll, rows: torch.Tensor, splits_DW: torch.Tensor, **room: int) -> Exchange:
        own_WW, sizes_WV = self._splits(splits_DW, all_to_all.group.rank())
        exchange = all_to_all.start(rows, own_WW)

        def wait() -> torch.Tensor:
            gathered = all_gather_rows(self.shards, exchange.wait(), sizes_WV.sum(0).tolist())
            return transposed(gathered, sizes_WV.T, (1, 0))

        return Exchange(wait)

    def collect(self, all_to_all: AllToAll, rows: torch.Tensor, splits_DW: torch.Tensor) -> Exchange:
        own_WW, sizes_WV = self._splits(splits_DW, all_to_all.group.rank())
        parts = list(transposed(rows, sizes_WV, (1, 0)).split(sizes_WV.sum(0).tolist()))
        own = torch.empty_like(parts[self.shards.rank()])
        dist.reduce_scatter(own, parts, group=self.shards)
        return all_to_all.start(own, own_WW.T)

    def messages(self, amounts_DW: np.ndarray) -> list[np.ndarray]:
        by_shard_WVW = amounts_DW.reshape(-1, self.shards.size(), amounts_DW.shape[1])
        return [*by_shard_WVW.swapaxes(0, 1)]

    def _splits(self, splits_DW: torch.Tensor, host: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the splits among shards with this rank's number, and [W, V] the rows of each source for `host`."""
        splits_WVW = splits_DW.view(-1, self.shards.size(), splits_DW.shape[1])
        return splits_WVW[:, self.shards.rank()], splits_WVW[:, :, host]


class AllReduce(Unsharded):
    """The shards of a host have the same rows; they all-reduce their results, and each of them returns all results.
    This is DeepSpeed-MoE (Parm, section III-A). Here, a source is a whole host."""

    collectives = (None, "all_reduce")

    def __init__(self, shards: dist.ProcessGroup) -> None:
        """`shards` are the ranks of this rank's host."""
        self.shards = shards

    def collect(self, all_to_all: AllToAll, rows: torch.Tensor, splits_DW: torch.Tensor) -> Exchange:
        total = rows.clone()
        dist.all_reduce(total, group=self.shards)
        return super().collect(all_to_all, total, splits_DW)


def sums_of_copies(rows: torch.Tensor, sizes: Sequence[int], copies: int) -> torch.Tensor:
    """Sum the copies of each block of rows; the copies of a block are consecutive."""
    if copies == 1:
        return rows
    parts = rows.split([size for size in sizes for _ in range(copies)])
    return torch.cat([torch.stack(parts[first : first + copies]).sum(0) for first in range(0, len(parts), copies)])


@torch.no_grad()
def all_gather_rows(group: dist.ProcessGroup, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Gather every rank's rows, [sum of sizes, ...]; rank r has sizes[r] rows. gloo's all-gather needs equal sizes."""
    gathered = rows.new_empty(sum(sizes), *rows.shape[1:])
    parts = gathered.split(list(sizes))
    rank = group.rank()
    parts[rank].copy_(rows)
    others = [(rank + step) % len(sizes) for step in range(1, len(sizes))]
    wait_for(post(group, {peer: parts[peer] for peer in others}, dict.fromkeys(others, parts[rank])))
    return gathered
