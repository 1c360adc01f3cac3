"""Rows to every shard of their expert, and the sum of what the shards make of them back.

Experts may be cut into shards, which are one rank each of a host (expert tensor parallelism, ESP). A source is a rank
that has rows of its own: rank s of the group of all shards of all hosts is shard s % N of host s // N. Every way
delivers the same rows in the same order, source after source; they differ in what travels where.

Shape suffixes: S sources, H hosts, N shards of a host.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

from megatron_balance.comm.alltoall import AllToAll, Exchange, post


class Sharding(ABC):
    """Between the sources of rows and the experts' shards; its transpose takes gradients the same way."""

    collectives: tuple[str | None, str | None] = (None, None)
    """What the shards of a host do with all of their rows when those have come, and before they go back."""

    @abstractmethod
    def spread(self, wire: AllToAll, rows: torch.Tensor, splits_SH: torch.Tensor) -> Exchange:
        """Start sending this source's rows, host after host, to all shards of their hosts.

        Args:
            splits_SH: [S, H] int64 on the host: rows from each source to each host.

        Returns:
            what arrives on this shard: the rows of source 0, then source 1, ...
        """

    @abstractmethod
    def collect(self, wire: AllToAll, rows: torch.Tensor, splits_SH: torch.Tensor) -> Exchange:
        """Start sending this shard's part of the results, in the order in which rows arrived.

        Returns:
            the sums over shards of this source's rows, where they had been.
        """

    def messages(self, amounts_SH: np.ndarray) -> list[np.ndarray]:
        """What `spread` sends of these amounts in each of the all-to-alls that go on at the same time: each [W, W]."""
        return [amounts_SH]


class Unsharded(Sharding):
    """Experts are whole: one rank per host."""

    def spread(self, wire: AllToAll, rows: torch.Tensor, splits_SH: torch.Tensor) -> Exchange:
        return wire.start(rows, splits_SH)

    def collect(self, wire: AllToAll, rows: torch.Tensor, splits_SH: torch.Tensor) -> Exchange:
        return wire.start(rows, splits_SH.T)


class DirectAllToAll(Sharding):
    """One all-to-all among all shards of all hosts, with a copy of a row for each shard (Parm III-C: EP&ESP-A2A)."""

    def __init__(self, shards: int) -> None:
        self.shards = shards

    def spread(self, wire: AllToAll, rows: torch.Tensor, splits_SH: torch.Tensor) -> Exchange:
        sizes = splits_SH[wire.group.rank()].tolist()
        dumped = torch.cat([part for part in rows.split(sizes) for _ in range(self.shards)])
        return wire.start(dumped, self._splits_SS(splits_SH))

    def collect(self, wire: AllToAll, rows: torch.Tensor, splits_SH: torch.Tensor) -> Exchange:
        exchange = wire.start(rows, self._splits_SS(splits_SH).T)
        sizes = splits_SH[wire.group.rank()].tolist()
        return Exchange(lambda: sums_of_copies(exchange.wait(), sizes, self.shards))

    def messages(self, amounts_SH: np.ndarray) -> list[np.ndarray]:
        return [amounts_SH.repeat(self.shards, axis=1)]

    def _splits_SS(self, splits_SH: torch.Tensor) -> torch.Tensor:
        return splits_SH.repeat_interleave(self.shards, dim=1)


class AllGather(Sharding):
    """All-to-all between hosts, then all-gather among a host's shards; back by reduce-scatter (megatron-core's way)."""

    # A reduce-scatter moves what an all-gather does
    collectives = ("all_gather", "all_gather")

    def __init__(self, shards: dist.ProcessGroup) -> None:
        """`shards`: those of this rank's host."""
        self.shards = shards

    def spread(self, wire: AllToAll, rows: torch.Tensor, splits_SH: torch.Tensor) -> Exchange:
        splits_HNH, host, shard = self._by_shard(splits_SH), wire.group.rank(), self.shards.rank()
        exchange = wire.start(rows, splits_HNH[:, shard])
        sizes_HN = splits_HNH[:, :, host]

        def wait() -> torch.Tensor:
            gathered = all_gather_rows(self.shards, exchange.wait(), sizes_HN.sum(0).tolist())
            return transposed(gathered, sizes_HN.T, (1, 0))

        return Exchange(wait)

    def collect(self, wire: AllToAll, rows: torch.Tensor, splits_SH: torch.Tensor) -> Exchange:
        splits_HNH, host, shard = self._by_shard(splits_SH), wire.group.rank(), self.shards.rank()
        sizes_HN = splits_HNH[:, :, host]
        parts = list(transposed(rows, sizes_HN, (1, 0)).split(sizes_HN.sum(0).tolist()))
        own = torch.empty_like(parts[shard])
        dist.reduce_scatter(own, parts, group=self.shards)
        return wire.start(own, splits_HNH[:, shard].T)

    def messages(self, amounts_SH: np.ndarray) -> list[np.ndarray]:
        by_shard_HNH = amounts_SH.reshape(-1, self.shards.size(), amounts_SH.shape[1])
        return [*by_shard_HNH.swapaxes(0, 1)]

    def _by_shard(self, splits_SH: torch.Tensor) -> torch.Tensor:
        """[H, N, H]."""
        return splits_SH.view(-1, self.shards.size(), splits_SH.shape[1])


class AllReduce(Sharding):
    """All shards of a host have the same rows; their results are all-reduced, and each host's go back N times.

    What DeepSpeed-MoE does (Parm, section III-A). A source is a whole host here.
    """

    collectives = (None, "all_reduce")

    def __init__(self, shards: dist.ProcessGroup) -> None:
        """`shards`: those of this rank's host."""
        self.shards = shards

    def spread(self, wire: AllToAll, rows: torch.Tensor, splits_SH: torch.Tensor) -> Exchange:
        return wire.start(rows, splits_SH)

    def collect(self, wire: AllToAll, rows: torch.Tensor, splits_SH: torch.Tensor) -> Exchange:
        total = rows.clone()
        dist.all_reduce(total, group=self.shards)
        return wire.start(total, splits_SH.T)


def sums_of_copies(rows: torch.Tensor, sizes: Sequence[int], copies: int) -> torch.Tensor:
    """Blocks that lie there `copies` times, each copy after the other -> [sum of sizes, ...], their sums.

    Args:
        sizes: rows of each block.
    """
    if copies == 1:
        return rows
    parts = rows.split([size for size in sizes for _ in range(copies)])
    return torch.cat([torch.stack(parts[first : first + copies]).sum(0) for first in range(0, len(parts), copies)])


@torch.no_grad()
def all_gather_rows(group: dist.ProcessGroup, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Every rank's rows [sum of sizes, ...], `sizes` says how many of each; gloo's own all-gather wants equal sizes."""
    gathered = rows.new_empty(sum(sizes), *rows.shape[1:])
    parts, rank = gathered.split(list(sizes)), group.rank()
    parts[rank].copy_(rows)
    others = [(rank + step) % len(sizes) for step in range(1, len(sizes))]
    works = post(group, {peer: parts[peer] for peer in others}, dict.fromkeys(others, parts[rank]))
    for work in works:
        work.wait()
    return gathered


def transposed(rows: torch.Tensor, sizes: torch.Tensor, dimensions: Sequence[int], fused: bool = False) -> torch.Tensor:
    """Rows in blocks that are laid out as `sizes` -> laid out as `sizes.permute(dimensions)`.

    Args:
        rows: [sum of sizes, ...]; with `fused`, [sum of sizes, hidden].
        sizes: int64 in host memory.
        fused: let one kernel of Transformer Engine move all blocks; needs CUDA.
    """
    order = torch.arange(sizes.numel()).view(sizes.shape).permute(*dimensions).reshape(-1)
    if bool((order.diff() > 0).all()):
        return rows
    sizes = sizes.reshape(-1)
    if fused:
        # The kernel reads both on the device. From pageable memory a copy is staged at once: the host does not wait
        sizes, order = torch.stack([sizes, order]).to(rows.device, non_blocking=True)
    return sort_chunks_by_idxs(rows, sizes, order, fused=fused)[0]
