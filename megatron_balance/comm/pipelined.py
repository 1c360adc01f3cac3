"""Pipe-A2A: messages inside nodes beside those between nodes, on two communicators (ScheMoE section 5)."""

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import Exchange, NodeAllToAll, ending_with, post

MESSAGES_AT_ONCE = 3
"""That a rank sends to other nodes on gloo: one is on the link, the next is there when the link is free, and the third
when the receiver of one of them is busy.

All at once would share the links by chance, and some would have nothing to carry while others carry the last messages.
"""


class PipelinedAllToAll(NodeAllToAll):
    """Both levels carry messages at the same time: on CUDA in two NCCL streams, on gloo over two sets of sockets."""

    tag = 3

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor) -> Exchange:
        rows, received = self._prepare(rows, splits_DD)
        rank, first = self.group.rank(), self.nodes.node * self.nodes.node_size
        sends, receives = rows.split(splits_DD[rank].tolist()), received.split(splits_DD[:, rank].tolist())
        near, far = peers_in_order(rank, self.group.size(), self.nodes.node_size)
        far_sends, far_receives = {peer: sends[peer] for peer in far}, {peer: receives[peer] for peer in far}
        near_sends, near_receives = ({peer - first: some[peer] for peer in near} for some in (sends, receives))
        # What takes longest goes first; on every rank alike, because NCCL's communicators may wait for each other
        works = post(self.group, far_receives, far_sends if rows.is_cuda else {}, self.tag)
        sent = None if rows.is_cuda else self.thread.submit(self._send_in_order, far_sends)
        works += post(self.nodes.intra, near_receives, near_sends, self.tag)
        receives[rank].copy_(sends[rank])
        exchange = ending_with(works, received, rows)

        def wait() -> torch.Tensor:
            if sent is not None:
                sent.result()
            return exchange.wait()

        return Exchange(wait)

    def _send_in_order(self, sends: Mapping[int, torch.Tensor]) -> None:
        under_way: deque[dist.Work] = deque()
        for peer, rows in sends.items():
            under_way.extend(post(self.group, {}, {peer: rows}, self.tag))
            if len(under_way) == MESSAGES_AT_ONCE:
                under_way.popleft().wait()
        for work in under_way:
            work.wait()


def peers_in_order(rank: int, num_ranks: int, node_size: int) -> tuple[list[int], list[int]]:
    """(peers on the rank's node, peers on other nodes), in the order in which it sends to them.

    Node n turns to node n + 1 first, then n + 2, ...; on each, rank l of the node starts with rank l there. In every
    step each rank sends one message and receives one, and so does each node's link (nodes of equal size).
    """
    nodes = [range(num_ranks)[first : first + node_size] for first in range(0, num_ranks, node_size)]
    node, local = divmod(rank, node_size)
    near, *far = nodes[node:] + nodes[:node]
    return _rotated(near, local)[1:], [peer for ranks in far for peer in _rotated(ranks, local)]


def _rotated(ranks: range, start: int) -> list[int]:
    return [ranks[(start + step) % len(ranks)] for step in range(len(ranks))]
