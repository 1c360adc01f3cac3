"""One copy of a row per node: exchanges between nodes in which a token's row travels once to each node that needs it.

A *copy* is a token's row on its way to one node. It enters the node at one rank, its entry: the rank with the source's
local rank, if nodes have equal sizes. `spread` and `collect` are the two directions; each is the transpose of the
other, so they also carry each other's gradients:

    spread     source -> entry of each node -> ranks of the node with some of the token's experts
    collect    ranks of the node -> entry, which adds up a copy's rows -> source, which adds up a token's copies

The messages of both have one order on all ranks. In step s, node n exchanges copies with the nodes n + s and n - s,
while the rows of other steps travel within nodes. DeepEP and HybridEP send as many rows between nodes.

In the shapes, W counts the ranks of the group, N nodes, Y the ranks of this rank's node, and U copies.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import (
    MESSAGES_AT_ONCE,
    Exchange,
    NodeAllToAll,
    exchange_on,
    post,
    post_rows,
    wait_for,
)
from megatron_balance.comm.pipelined import PipelinedAllToAll
from megatron_balance.job.groups import NodeGroups

Relay = Callable[[int, torch.Tensor], torch.Tensor]
"""(step, rows) -> rows: what an entry does between the two levels of one step."""


class CopyCounts(NamedTuple):
    """Sizes of one exchange, which all ranks know: int64."""

    to_node_WN: np.ndarray
    """Tokens of each rank with some experts on each node."""
    to_rank_WW: np.ndarray
    """Tokens of each rank with some experts on each rank."""


def entering(sources: range, node: range) -> list[range]:
    """Return for each rank of `node` the ranks of another node, `sources`, whose copies enter at it. They are
    consecutive, and ascend with the rank. Nodes of equal size match rank by rank."""
    ends = [sources.start - (-len(sources) * place // len(node)) for place in range(len(node) + 1)]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


class NodeSteps:
    """Sizes of one rank's messages in each step of one exchange; step 0 stays within the node."""

    def __init__(self, counts: CopyCounts, rank: int, node_size: int) -> None:
        ranks = len(counts.to_rank_WW)
        self.counts = counts
        self.rank = rank
        self.nodes = [range(ranks)[first : first + node_size] for first in range(0, ranks, node_size)]
        self.node = rank // node_size
        self.here = self.nodes[self.node]
        self.first_W = np.concatenate([[0], counts.to_rank_WW[:, rank].cumsum()])
        """[W + 1]: index of the first received row of each source."""

    @property
    def copies_by_node(self) -> list[int]:
        """[N]: copies that this rank sends to each node."""
        return self.counts.to_node_WN[self.rank].tolist()

    def target(self, step: int) -> int:
        """Return the node that gets this rank's copies."""
        return (self.node + step) % len(self.nodes)

    def entry(self, step: int) -> int:
        """Return the rank where this rank's copies enter their target."""
        target = self.nodes[self.target(step)]
        return target.start + (self.rank - self.here.start) * len(target) // len(self.here)

    def sources(self, step: int) -> list[range]:
        """Return for each rank of this node the sources whose copies enter at it."""
        return entering(self.nodes[(self.node - step) % len(self.nodes)], self.here)

    def own_sources(self, step: int) -> range:
        """Return the sources whose copies enter at this rank."""
        return self.sources(step)[self.rank - self.here.start]

    def copies(self, step: int) -> list[int]:
        """Return the copies that enter at this rank, by source."""
        return self.counts.to_node_WN[self.own_sources(step), self.node].tolist()

    def to_ranks(self, step: int) -> list[int]:
        """[Y]: rows that this rank sends on to each rank of its node."""
        return self.counts.to_rank_WW[np.ix_(self.own_sources(step), self.here)].sum(0).tolist()

    def from_ranks(self, step: int) -> list[int]:
        """[Y]: rows that each rank of the node sends on to this rank."""
        return [int(self.counts.to_rank_WW[sources, self.rank].sum()) for sources in self.sources(step)]

    def place(self, step: int) -> slice:
        """Return the place of the step's rows among all rows that this rank receives, which are ordered by source."""
        sources = self.nodes[(self.node - step) % len(self.nodes)]
        return slice(self.first_W[sources.start], self.first_W[sources.stop])


class DedupAllToAll(NodeAllToAll):
    """Sends the rows of `spread` and `collect` once to each node; all other rows like `pipe`."""

    tag = 5

    def __init__(self, nodes: NodeGroups) -> None:
        super().__init__(nodes)
        self.direct = PipelinedAllToAll(nodes)

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor, room: int = 0) -> Exchange:
        return self.direct.start(rows, splits_DD, room)

    def steps(self, counts: CopyCounts) -> NodeSteps:
        """Return the steps of an exchange."""
        return NodeSteps(counts, self.group.rank(), self.nodes.node_size)

    def spread(self, copies: torch.Tensor, steps: NodeSteps, relay: Relay) -> Exchange:
        """Start sending copies [U, ...], ordered by node, then by token.

        Args:
            relay: called once per step, on another thread or CUDA stream. It gets the copies that enter at this rank,
                by source, and returns a row for each rank that needs a copy, by rank, then in the order of the copies.
        Returns:
            The exchange of the rows that this rank receives, one per token, by source.
        """
        copies = copies.detach().contiguous()
        received = copies.new_empty((int(steps.first_W[-1]), *copies.shape[1:]))
        run = functools.partial(self._spread, copies, received, steps, relay)
        return exchange_on(self.side_stream, run, copies, received)

    def collect(self, rows: torch.Tensor, steps: NodeSteps, relay: Relay) -> Exchange:
        """Start the reverse of `spread`: send `rows`, one per token that this rank received, by source.

        Args:
            relay: gets the rows that `spread`'s relay returned in this step, and returns one row for each copy.
        Returns:
            The exchange of this rank's copies [U, ...].
        """
        rows = rows.detach().contiguous()
        received = rows.new_empty((sum(steps.copies_by_node), *rows.shape[1:]))
        run = functools.partial(self._collect, rows, received, steps, relay)
        return exchange_on(self.side_stream, run, rows, received)

    def _spread(self, copies: torch.Tensor, received: torch.Tensor, steps: NodeSteps, relay: Relay) -> None:
        leaving = copies.split(steps.copies_by_node)
        entered = [leaving[steps.node]]
        receives = [{}]
        sends = [{}]
        for step in range(1, len(steps.nodes)):
            sizes = steps.copies(step)
            entered.append(copies.new_empty((sum(sizes), *copies.shape[1:])))
            receives.append(dict(zip(steps.own_sources(step), entered[step].split(sizes), strict=True)))
            sends.append({steps.entry(step): leaving[steps.target(step)]})
        far = _FarMessages(self.group, receives, sends, self.tag)
        post_near = functools.partial(post_rows, self.nodes.intra, self.nodes.local, tag=self.tag)
        near = []
        relayed = []
        for step in range(len(steps.nodes)):
            far.post_until(step + MESSAGES_AT_ONCE)
            far.wait(step)
            relayed.append(relay(step, entered[step]))
            near += post_near(received[steps.place(step)], relayed[step], steps.from_ranks(step), steps.to_ranks(step))
        wait_for(near)

    def _collect(self, rows: torch.Tensor, received: torch.Tensor, steps: NodeSteps, relay: Relay) -> None:
        arriving = received.split(steps.copies_by_node)
        # Rows of the own node last: the others travel farther
        order = [*range(1, len(steps.nodes)), 0]
        post_near = functools.partial(post_rows, self.nodes.intra, self.nodes.local, tag=self.tag)
        gathered = {}
        near = {}
        for step in order:
            sizes = steps.to_ranks(step)
            gathered[step] = rows.new_empty((sum(sizes), *rows.shape[1:]))
            near[step] = post_near(gathered[step], rows[steps.place(step)], sizes, steps.from_ranks(step))
        receives = [{}] + [{steps.entry(step): arriving[steps.target(step)]} for step in order[:-1]]
        sends: list[dict[int, torch.Tensor]] = [{} for _ in order]
        far = _FarMessages(self.group, receives, sends, self.tag)
        for step in order:
            wait_for(near[step])
            sums = relay(step, gathered.pop(step))
            if step == 0:
                arriving[steps.node].copy_(sums)
                continue
            sends[step].update(zip(steps.own_sources(step), sums.split(steps.copies(step)), strict=True))
            far.post_until(step + 1)
            far.wait(step - MESSAGES_AT_ONCE)
        for step in order:
            far.wait(step)


class _FarMessages:
    """Messages between nodes, by step. gloo gets all receives at once, because a sender waits for them; NCCL gets the
    messages of each step together, in one order on all ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        receives: Sequence[dict[int, torch.Tensor]],
        sends: Sequence[dict[int, torch.Tensor]],
        tag: int,
    ) -> None:
        """A step's sends may be added until the step is posted."""
        self.group = group
        self.receives = receives
        self.sends = sends
        self.tag = tag
        self.at_once = dist.get_backend(group) == "nccl"
        self.works = [[] if self.at_once else post(group, from_peer, {}, tag) for from_peer in receives]
        self.posted = 0

    def post_until(self, end: int) -> None:
        """Post the messages of all steps before `end` that have not been posted."""
        for step in range(self.posted, min(end, len(self.sends))):
            receives = self.receives[step] if self.at_once else {}
            self.works[step] += post(self.group, receives, self.sends[step], self.tag)
        self.posted = max(self.posted, min(end, len(self.sends)))

    def wait(self, step: int) -> None:
        """Wait for the messages of a step; below 0, for nothing."""
        if step >= 0:
            wait_for(self.works[step])
