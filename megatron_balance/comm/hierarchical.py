"""Hierarchical all-to-alls: fewer, larger messages between nodes.

In the shapes, N counts nodes and Y the ranks of a node.
"""

import functools
from abc import abstractmethod
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import Exchange, NodeAllToAll, exchange_on, post_rows, wait_for
from megatron_balance.comm.blocks import transposed
from megatron_balance.job.groups import NodeGroups

Posted = list[dist.Work]
"""Messages of a stage in progress."""


class StagedAllToAll(NodeAllToAll):
    """Base class of exchanges in stages; a rank begins a stage when it has finished the previous one."""

    @abstractmethod
    def _stages(self, rows: torch.Tensor, received: torch.Tensor, splits_DD: torch.Tensor) -> Iterator[Posted]:
        """Post each stage, yield its messages, and continue when they are complete; the last stage fills the first rows
        of `received`."""

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor, room: int = 0) -> Exchange:
        rows, received = self._prepare(rows, splits_DD, room)
        stages = self._stages(rows, received, splits_DD)
        # A stage waits for the previous stage, but the computation must not
        return exchange_on(self.side_stream, functools.partial(_finish, stages), rows, received)


class OneDimensionalAllToAll(StagedAllToAll):
    """All rows pass through the first rank of each node, its leader (1DH-A2A of HetuMoE; ScheMoE section 2)."""

    tag = 1

    def _stages(self, rows: torch.Tensor, received: torch.Tensor, splits_DD: torch.Tensor) -> Iterator[Posted]:
        size = self.nodes.node_size
        local = self.nodes.local
        here = slice(self.nodes.node * size, (self.nodes.node + 1) * size)
        sent_YN = torch.stack([block.sum(1) for block in splits_DD[here].split(size, dim=1)], dim=1)
        received_DY = splits_DD[:, here]
        leads = local == 0
        nothing = [0] * len(sent_YN)

        # Step 1: to the leader
        gathered = rows.new_empty((int(sent_YN.sum()) if leads else 0, *rows.shape[1:]))
        from_ranks = sent_YN.sum(1).tolist() if leads else nothing
        to_leader = [len(rows), *nothing[1:]]
        yield post_rows(self.nodes.intra, local, gathered, rows, from_ranks, to_leader, self.tag)

        # Step 2: between leaders, one message for each pair of nodes
        crossed = rows.new_empty((int(received_DY.sum()) if leads else 0, *rows.shape[1:]))
        if leads:
            packed = transposed(gathered, sent_YN, (1, 0))
            from_nodes = [int(block.sum()) for block in received_DY.split(size)]
            to_nodes = sent_YN.sum(0).tolist()
            yield post_rows(self.nodes.inter, self.nodes.node, crossed, packed, from_nodes, to_nodes, self.tag)
            crossed = transposed(crossed, received_DY, (1, 0))

        # Step 3: from the leader
        received_Y = received_DY.sum(0).tolist()
        from_leader = [received_Y[local], *nothing[1:]]
        to_ranks = received_Y if leads else nothing
        yield post_rows(self.nodes.intra, local, received, crossed, from_leader, to_ranks, self.tag)


class TwoDimensionalAllToAll(StagedAllToAll):
    """Ranks collect rows within their node, then exchange them with their counterparts on other nodes.

    This is the 2DH-A2A of Tutel and DeepSpeed. It raises ValueError if the last node is smaller, because some ranks
    then lack a counterpart.
    """

    tag = 2

    def __init__(self, nodes: NodeGroups) -> None:
        size = nodes.node_size
        ranks = nodes.ep.size()
        if ranks % size:
            raise ValueError(
                f"--moe-comm-node-size {size}: --moe-comm-alltoall 2dh needs nodes of equal size, but {ranks} "
                f"expert-parallel ranks leave {ranks % size} for the last; choose a divisor of {ranks}, or "
                "--moe-comm-alltoall pipe"
            )
        super().__init__(nodes)

    def _stages(self, rows: torch.Tensor, received: torch.Tensor, splits_DD: torch.Tensor) -> Iterator[Posted]:
        size = self.nodes.node_size
        node = self.nodes.node
        local = self.nodes.local
        splits_NYNY = splits_DD.reshape(-1, size, len(splits_DD) // size, size)
        sent_NY = splits_NYNY[node, local]
        aligned_YN = splits_NYNY[node, :, :, local]
        received_NY = splits_NYNY[:, :, node, local]

        # Step 1: within the node, to the rank with the destination's local rank
        aligned = rows.new_empty((int(aligned_YN.sum()), *rows.shape[1:]))
        packed = transposed(rows, sent_NY, (1, 0))
        splits = aligned_YN.sum(1).tolist(), sent_NY.sum(0).tolist()
        yield post_rows(self.nodes.intra, local, aligned, packed, *splits, self.tag)

        # Step 2: between nodes, to the destination
        packed = transposed(aligned, aligned_YN, (1, 0))
        splits = received_NY.sum(1).tolist(), aligned_YN.sum(0).tolist()
        yield post_rows(self.nodes.inter, node, received, packed, *splits, self.tag)


def _finish(stages: Iterator[Posted]) -> None:
    for posted in stages:
        wait_for(posted)
