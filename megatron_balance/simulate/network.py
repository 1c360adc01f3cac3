"""Demands of a team's messages on the cluster, consistent with the planners' cost model.

Each rank has a link within its node and a share of the node's adapters; each node has its adapters. Their seconds are
those of `cost/network.py`. A collective that runs alone takes as long as in the cost model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.cost.network import Crossing, Network
from megatron_balance.cost.sending import SendingModel
from megatron_balance.placement.trans_plan import TransPlan
from megatron_balance.profile.cluster_profile import Fit
from megatron_balance.simulate.engine import NOTHING, Work


@dataclass(frozen=True)
class Fabric:
    """Numbering of the resources of a job's ranks and nodes."""

    num_ranks: int
    node_size: int
    burst: float = 0.0
    """Bytes that a node's adapters pass at once after a pause, before their rate applies, as shaped networks do."""

    @property
    def num_resources(self) -> int:
        """Two links of each rank, and the adapters of each node."""
        return 2 * self.num_ranks + -(-self.num_ranks // self.node_size)

    def work(
        self, ranks_D: np.ndarray, near_D: np.ndarray, far_D: np.ndarray, node_N: np.ndarray, whole: float
    ) -> Work:
        """Return the work of a collective that takes `whole` seconds alone, given the seconds of links and adapters."""
        nodes_N = np.unique(ranks_D // self.node_size)
        resources = np.concatenate([ranks_D, self.num_ranks + ranks_D, 2 * self.num_ranks + nodes_N])
        seconds = np.concatenate([near_D, far_D, node_N])
        used = seconds > 0
        return Work(max(0.0, whole - float(seconds.max(initial=0.0))), resources[used], seconds[used])


@dataclass(frozen=True)
class TeamNetwork:
    """Links of one team's ranks. The shards of a host are consecutive ranks that send the same amounts."""

    fabric: Fabric
    ranks_D: np.ndarray
    """The team's ranks in the job, ascending."""
    network: Network
    """Links of all these ranks."""

    def exchange(self, model: ExchangeModel, bytes_HH: np.ndarray) -> Work:
        """Return the work of all-to-alls of these bytes, one per shard of the hosts; `model` describes one."""
        if not (bytes_HH.sum() - bytes_HH.trace()):
            return NOTHING
        crossing = model.crossing(bytes_HH).scaled(model.scale)
        return self._work(crossing, model.latency + float(model.network.byte_seconds(crossing).sum()))

    def gather(
        self, line: Fit, members: int, num_bytes: float, times: int = 1, share_D: np.ndarray | None = None
    ) -> Work:
        """Return the work of a `ring` for every `members` consecutive ranks, with the time that `line` predicts.

        `share_D`: fraction of `num_bytes` on each rank.
        """
        if members == 1 or not num_bytes:
            return NOTHING
        positions_D = np.arange(len(self.ranks_D))
        work = ring(self.fabric, self.network, self.ranks_D, positions_D // members, num_bytes, times)
        seconds = work.seconds * (line.beta * num_bytes / work.seconds.max())
        if share_D is not None:
            # Adapters stay as busy as if all rings had all bytes, because shards of an expert rarely use them
            own = work.resources < 2 * self.fabric.num_ranks
            seconds[own] *= share_D[np.searchsorted(self.ranks_D, work.resources[own] % self.fabric.num_ranks)]
        used = seconds > 0
        return Work(line.seconds(num_bytes) - float(seconds.max()), work.resources[used], seconds[used])

    def together(self, exchange: Work, gather: Work) -> Work:
        """Return the work of an exchange whose results are gathered while others arrive (SAA).

        Each level of links (within and between nodes) does its part of the two collectives in sequence; the levels work
        concurrently.
        """
        both = one_after_another([exchange, gather])
        near, far = self._levels(exchange)
        crosses = self._levels(gather)[1] > 0
        longest = max(near + (not crosses) * gather.alone, far + crosses * gather.alone)
        whole = exchange.alone + longest - max(near, far)
        return both._replace(latency=max(0.0, whole - float(both.seconds.max(initial=0.0))))

    def _levels(self, work: Work) -> tuple[float, float]:
        """Return the seconds of the busiest link within nodes, and of the busiest link between nodes."""
        near = work.resources < self.fabric.num_ranks
        return float(work.seconds[near].max(initial=0.0)), float(work.seconds[~near].max(initial=0.0))

    def sending(self, model: SendingModel, plan: TransPlan, *, backward: bool) -> Work:
        """Return the work of Trans with a plan, or of Agg (`backward`)."""
        if not len(plan):
            return NOTHING
        ends = (plan.target_M, plan.source_M) if backward else (plan.source_M, plan.target_M)
        bytes_HH = np.zeros((model.network.num_ranks,) * 2)
        np.add.at(bytes_HH, ends, (model.grad_bytes if backward else model.param_bytes) / plan.pieces_M)
        return self.moving(model.network, bytes_HH, float(model.progress(plan)[1 if backward else 0][-1]))

    def moving(self, network: Network, bytes_HH: np.ndarray, whole: float) -> Work:
        """Return the work of messages between hosts that take `whole` seconds alone."""
        work = self._work(network.crossing(bytes_HH), whole)
        # The messages' own lines may be faster than the network's lines
        most = float(work.seconds.max(initial=0.0))
        return work if most <= whole else work._replace(seconds=work.seconds * (whole / most))

    def _work(self, crossing: Crossing, whole: float) -> Work:
        """Return the work of stages whose bytes cross links in sequence; all shards of a host do the same."""
        shards = len(self.ranks_D) // crossing.near_2XD.shape[-1]
        crossing = Crossing(*(amounts_2XD.repeat(shards, -1) for amounts_2XD in crossing))
        near_D, far_D, node_N = (one.reshape(-1, one.shape[-1]).sum(0) for one in self.network.busy(crossing)[:3])
        if self.fabric.burst:
            longest = max(near_D.max(), far_D.max(), node_N.max())
            passed = self.fabric.burst * self.network.far.beta / self.network.adapters
            left_N = np.maximum(node_N - passed, 0.0) / np.where(node_N, node_N, 1.0)
            far_D = far_D * left_N[self.network.node_D]
            node_N = node_N * left_N
            whole -= longest - max(near_D.max(), far_D.max(), node_N.max())
        return self.fabric.work(self.ranks_D, near_D, far_D, node_N, whole)


def ring(
    fabric: Fabric, network: Network, ranks_D: np.ndarray, group_D: np.ndarray, num_bytes: float, times: int
) -> Work:
    """Return the work of rings in which all ranks of each group pass on a buffer of `num_bytes`, `times` times.

    An all-gather or a reduce-scatter is one such ring, an all-reduce two. A ring enters and leaves each node once,
    where its bytes are spread over the adapters of its ranks. Ranks are ascending, and all groups have the same size.
    """
    _, group_D = np.unique(group_D, return_inverse=True)
    size = len(group_D) // (int(group_D.max()) + 1)
    if size == 1 or not num_bytes:
        return NOTHING
    sent = times * num_bytes * (size - 1) / size
    nodes, node_D = np.unique(ranks_D // fabric.node_size, return_inverse=True)
    members_GN = np.zeros((int(group_D.max()) + 1, len(nodes)))
    np.add.at(members_GN, (group_D, node_D), 1)
    spans_G = (members_GN > 0).sum(1) > 1
    members_D = members_GN[group_D, node_D]
    spans_D = spans_G[group_D]
    near_D = np.where(members_D > 1, network.near.beta * sent, 0.0)
    far_D = np.where(spans_D, network.far.beta * sent / members_D, 0.0)
    node_N = ((members_GN > 0) & spans_G[:, None]).sum(0) * (network.far.beta * sent / network.adapters)
    steps = times * min(size - 1, 2 * np.log2(size))
    latency = float(steps) * (network.far if spans_G.any() else network.near).launch
    return fabric.work(ranks_D, near_D, far_D, node_N, latency + float(max(near_D.max(), far_D.max(), node_N.max())))


def at_once(works: Sequence[Work]) -> Work:
    """Return the work of the same collective of several teams at the same time."""
    both = one_after_another(works)
    whole = max(work.alone for work in works)
    return both._replace(latency=max(0.0, whole - float(both.seconds.max(initial=0.0))))


def one_after_another(works: Sequence[Work]) -> Work:
    """Return the work of collectives of the same ranks in sequence."""
    whole = sum(work.alone for work in works)
    used = [work for work in works if len(work.resources)]
    if not used:
        return NOTHING if not whole else Work(whole, NOTHING.resources, NOTHING.seconds)
    resources, place = np.unique(np.concatenate([work.resources for work in used]), return_inverse=True)
    seconds = np.bincount(place, np.concatenate([work.seconds for work in used]))
    return Work(max(0.0, whole - float(seconds.max())), resources, seconds)
