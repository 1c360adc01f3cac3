"""What messages of a team need of the cluster, in the terms of the planners' cost model.

Each rank has a link into its node's fabric and a share of the node's adapters, and each node has its adapters. Their
seconds are those of `cost/network.py`. A collective takes as long alone as the cost model says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.exchange import ExchangeModel, stages
from megatron_balance.cost.network import Crossing, Network
from megatron_balance.cost.sending import SendingModel
from megatron_balance.placement.transfers import TransferPlan
from megatron_balance.simulate.engine import NOTHING, Work


@dataclass(frozen=True)
class Fabric:
    """Numbers of the resources of a job's ranks and nodes."""

    num_ranks: int
    node_size: int

    @property
    def num_resources(self) -> int:
        """Two links of each rank, and the adapters of each node."""
        return 2 * self.num_ranks + -(-self.num_ranks // self.node_size)

    def name(self, resource: int) -> str:
        """Return a resource's name, for people."""
        if resource < self.num_ranks:
            return f"rank {resource}'s link within its node"
        if resource < 2 * self.num_ranks:
            return f"rank {resource - self.num_ranks}'s link to other nodes"
        return f"adapters of node {resource - 2 * self.num_ranks}"

    def work(
        self, ranks_D: np.ndarray, near_D: np.ndarray, far_D: np.ndarray, node_N: np.ndarray, whole: float
    ) -> Work:
        """Return the work of a collective.

        Args:
            ranks_D: its ranks, ascending.
            near_D, far_D: seconds of their links.
            node_N: seconds of all adapters of each of their nodes, ascending.
            whole: seconds that it takes alone, at least those of its busiest resource.
        """
        nodes_N = np.unique(ranks_D // self.node_size)
        resources = np.concatenate([ranks_D, self.num_ranks + ranks_D, 2 * self.num_ranks + nodes_N])
        seconds = np.concatenate([near_D, far_D, node_N])
        used = seconds > 0
        return Work(max(0.0, whole - float(seconds.max(initial=0.0))), resources[used], seconds[used])


@dataclass(frozen=True)
class TeamNetwork:
    """The links of one team's ranks."""

    fabric: Fabric
    ranks_D: np.ndarray
    """The team's ranks in the job, ascending."""
    network: Network

    def exchange(self, model: ExchangeModel, bytes_DD: np.ndarray, coding: float = 0.0) -> Work:
        """Return the work of an all-to-all of these bytes, which takes `coding` seconds more."""
        if not (bytes_DD.sum() - bytes_DD.trace()):
            return NOTHING
        stages_BDD = np.stack(stages(model.name, bytes_DD, self.network.node_size))
        crossing = self.network.crossing(stages_BDD).scaled(model.scale)
        whole = model.latency + float(self.network.byte_seconds(crossing).sum()) + coding
        return self._work(crossing, whole)

    def sending(self, model: SendingModel, plan: TransferPlan, *, backward: bool) -> Work:
        """Return the work of Trans with a plan, or of Agg (`backward`)."""
        if not plan.rounds:
            return NOTHING
        messages = np.array([message for messages in plan.rounds for message in messages])
        _, source_M, target_M, _, chunks_M = messages.T
        ends = (target_M, source_M) if backward else (source_M, target_M)
        bytes_DD = np.zeros((len(self.ranks_D),) * 2)
        np.add.at(bytes_DD, ends, (model.grad_bytes if backward else model.param_bytes) / chunks_M)
        whole = float(model.progress(plan)[1 if backward else 0][-1])
        work = self._work(self.network.crossing(bytes_DD), whole)
        # The lines of Trans and Agg may be faster than those of other messages
        most = float(work.seconds.max(initial=0.0))
        return work if most <= whole else work._replace(seconds=work.seconds * (whole / most))

    def _work(self, crossing: Crossing, whole: float) -> Work:
        """Return the work of stages whose bytes cross links one after another."""
        network = self.network
        near_D = network.near.beta * network.near.busiest(*crossing.near_2XD)
        far_D = network.far.beta * network.far.busiest(*crossing.far_2XD)
        node_2XN = np.add.reduceat(crossing.far_2XD, network.first_N, axis=-1)
        node_N = network.far.beta / network.adapters * network.far.busiest(*node_2XN)
        near_D, far_D, node_N = (one.reshape(-1, one.shape[-1]).sum(0) for one in (near_D, far_D, node_N))
        return self.fabric.work(self.ranks_D, near_D, far_D, node_N, whole)


def ring(
    fabric: Fabric, network: Network, ranks_D: np.ndarray, group_D: np.ndarray, num_bytes: float, times: int
) -> Work:
    """Return the work of rings in which all ranks of each group pass on `num_bytes`, `times` times.

    An all-gather and a reduce-scatter are one such ring, an all-reduce two. A ring enters and leaves each node once;
    there, its bytes are spread over the adapters of its ranks.

    Args:
        ranks_D: the ranks of all groups, ascending.
        group_D: the group of each rank; groups have one size.
        num_bytes: bytes of a whole buffer.
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
    members_D, spans_D = members_GN[group_D, node_D], spans_G[group_D]
    near_D = np.where(members_D > 1, network.near.beta * sent, 0.0)
    far_D = np.where(spans_D, network.far.beta * sent / members_D, 0.0)
    node_N = ((members_GN > 0) & spans_G[:, None]).sum(0) * (network.far.beta * sent / network.adapters)
    steps = times * min(size - 1, 2 * np.log2(size))
    latency = float(steps) * (network.far if spans_G.any() else network.near).launch
    return fabric.work(ranks_D, near_D, far_D, node_N, latency + float(max(near_D.max(), far_D.max(), node_N.max())))


def one_after_another(works: Sequence[Work]) -> Work:
    """Return the work of collectives of the same ranks, one after another."""
    whole, used = sum(work.alone for work in works), [work for work in works if len(work.resources)]
    if not used:
        return NOTHING if not whole else Work(whole, NOTHING.resources, NOTHING.seconds)
    resources, place = np.unique(np.concatenate([work.resources for work in used]), return_inverse=True)
    seconds = np.bincount(place, np.concatenate([work.seconds for work in used]))
    return Work(max(0.0, whole - float(seconds.max())), resources, seconds)
