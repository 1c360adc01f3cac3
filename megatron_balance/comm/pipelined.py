"""Exchanges that use two communicators at the same time: Pipe-A2A (ScheMoE section 5) and SAA (Parm section III-D).

In the shapes, D counts the ranks of a group or the sources of rows, and W the hosts.
"""

import functools
import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import (
    MESSAGES_AT_ONCE,
    AllToAll,
    Exchange,
    NodeAllToAll,
    connect,
    exchange_of,
    exchange_on,
    first_blocks,
    post,
    wait_for,
)
from megatron_balance.comm.sharded import DirectAllToAll
from megatron_balance.device.side_stream import SideStream


class PipelinedAllToAll(NodeAllToAll):
    """Messages within and between nodes overlap: on two NCCL streams, or two gloo groups."""

    tag = 3

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor, room: int = 0) -> Exchange:
        rows, received = self._prepare(rows, splits_DD, room)
        rank = self.group.rank()
        first = self.nodes.node * self.nodes.node_size
        sends = rows.split(splits_DD[rank].tolist())
        receives = first_blocks(received, splits_DD[:, rank].tolist())
        near, far = peers_in_order(rank, self.group.size(), self.nodes.node_size)
        far_sends = {peer: sends[peer] for peer in far}
        far_receives = {peer: receives[peer] for peer in far}
        near_sends = {peer - first: sends[peer] for peer in near}
        near_receives = {peer - first: receives[peer] for peer in near}
        # Slow messages first, in the same order on every rank: NCCL's communicators may wait for each other
        works = post(self.group, far_receives, far_sends if rows.is_cuda else {}, self.tag)
        send = functools.partial(self._send_in_order, far_sends)
        sent = None if rows.is_cuda else self.side_stream.start(send)
        works += post(self.nodes.intra, near_receives, near_sends, self.tag)
        receives[rank].copy_(sends[rank])
        exchange = exchange_of(works, received, rows)
        if sent is None:
            return exchange

        def wait() -> torch.Tensor:
            sent.wait()
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
    """Return (peers on the rank's node, peers on other nodes), in the order in which the rank sends to them. Node n
    sends to node n + 1 first, then to n + 2, and so on. On each node, local rank l begins with local rank l. If nodes
    have equal sizes, each rank and each node's link sends one message and receives one in every step."""
    nodes = [range(num_ranks)[first : first + node_size] for first in range(0, num_ranks, node_size)]
    node, local = divmod(rank, node_size)
    near, *far = nodes[node:] + nodes[:node]
    rotated = [[ranks[(local + step) % len(ranks)] for step in range(len(ranks))] for ranks in (near, *far)]
    return rotated[0][1:], list(itertools.chain(*rotated[1:]))


class Simultaneous(DirectAllToAll):
    """Overlaps the all-to-all of results with their all-gather among the ranks with the same tokens (SAA, Parm III-D).
    The all-to-all has one phase per host, whose shards send their results. During the next phase, the sums over shards
    are sent to the other members. So `collect` returns the rows of all members, one member after another."""

    tag = 4

    def __init__(self, shards: int, members: dist.ProcessGroup, sources: Sequence[int]) -> None:
        """`members`: a separate group of the ranks with the same tokens; `sources`: their source numbers."""
        super().__init__(shards)
        self.members = members
        self.sources = tuple(sources)
        self.side_stream = SideStream("AlltoAll and AllGather")
        connect(members)

    def collect(self, all_to_all: AllToAll, rows: torch.Tensor, splits_DW: torch.Tensor) -> Exchange:
        rows = rows.detach().contiguous()
        gathered = rows.new_empty(int(splits_DW[[*self.sources]].sum()), *rows.shape[1:])
        run = functools.partial(self._run, all_to_all.group, rows, gathered, splits_DW)
        return exchange_on(self.side_stream, run, rows, gathered)

    def _run(
        self, group: dist.ProcessGroup, rows: torch.Tensor, gathered: torch.Tensor, splits_DW: torch.Tensor
    ) -> None:
        hosts = splits_DW.shape[1]
        parts = gathered.split(splits_DW[[*self.sources]].flatten().tolist())
        results = rows.split(splits_DW[:, group.rank() // self.shards].tolist())
        phases: deque[tuple[int, torch.Tensor, list[dist.Work]]] = deque()
        passing_on: list[dist.Work] = []
        for step in range(hosts + 1):
            if step < hosts:
                phases.append(self._phase(group, step, results, splits_DW))
            if step > 0:
                host, partial, works = phases.popleft()
                wait_for(works)
                passing_on += self._pass_on(step - 1, host, partial, parts)
        wait_for(passing_on)

    def _phase(
        self, group: dist.ProcessGroup, step: int, results: Sequence[torch.Tensor], splits_DW: torch.Tensor
    ) -> tuple[int, torch.Tensor, list[dist.Work]]:
        """Start sending to one host's sources, and receiving [shards, rows, ...] from another host's shards."""
        rank = group.rank()
        hosts = splits_DW.shape[1]
        target = (rank // self.shards - step) % hosts
        host = (rank // self.shards + step) % hosts
        partial = results[0].new_empty(self.shards, int(splits_DW[rank, host]), *results[0].shape[1:])
        receives = {host * self.shards + shard: partial[shard] for shard in range(self.shards)}
        sends = {peer: results[peer] for peer in range(target * self.shards, (target + 1) * self.shards)}
        if step == 0:
            receives.pop(rank).copy_(sends.pop(rank))
        return host, partial, post(group, receives, sends, self.tag)

    def _pass_on(self, step: int, host: int, partial: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[dist.Work]:
        """Start exchanging a phase's sums between members; each member has sums of a different host."""
        rank = self.members.rank()
        hosts = len(parts) // len(self.sources)
        sums = parts[rank * hosts + host]
        torch.sum(partial, 0, out=sums)
        others = [(rank + turn) % len(self.sources) for turn in range(1, len(self.sources))]
        receives = {peer: parts[peer * hosts + (self.sources[peer] // self.shards + step) % hosts] for peer in others}
        return post(self.members, receives, dict.fromkeys(others, sums), self.tag)
