"""Choice of an all-to-all for each exchange by predicted time.

The messages of an all-to-all are described by matrices, one for each of its consecutive stages:

    flat   within nodes, then between nodes        p2p, pipe  all in one stage
    2dh    within nodes, then between nodes        1dh        to the leaders, between leaders, from the leaders

In each stage, both levels (within nodes and between nodes) work at the same time. A level takes alpha * n + beta * b
seconds, where n is the number of messages of its busiest rank, b the bytes of its busiest rank or link, sent or
received, and alpha and beta are the profile's point-to-point line. `flat` and `pipe` are therefore Eqs. 17 and 16 of
ScheMoE, for any split matrix.

In the shapes, L counts the ranks of a node, and B the stages of all members together. Matrices [D, D] hold the bytes
from rank i to rank j.
"""

import itertools
import math
from collections.abc import Callable, Iterable

import numpy as np
import torch

from megatron_balance.comm.alltoall import AllToAll, Exchange, FlatAllToAll, NodeAllToAll, default_all_to_all
from megatron_balance.comm.hierarchical import OneDimensionalAllToAll, TwoDimensionalAllToAll
from megatron_balance.comm.pipelined import PipelinedAllToAll
from megatron_balance.job.groups import NodeGroups
from megatron_balance.profile.cluster_profile import ClusterProfile


class AutoAllToAll(NodeAllToAll):
    """Delegates each exchange to the all-to-all with the shortest predicted time; `pipe` wins ties.

    The prediction depends only on the profile, the split matrix and the size of a row, so all ranks choose alike.
    """

    def __init__(self, nodes: NodeGroups, profile: ClusterProfile, log: Callable[[str], None] | None = None) -> None:
        """`log` is called with a line when a member is chosen for the first time."""
        super().__init__(nodes)
        self.profile, self.log = profile, log
        default = default_all_to_all(nodes.ep)
        self.members: dict[str, AllToAll] = {
            "pipe": PipelinedAllToAll(nodes),
            "flat" if isinstance(default, FlatAllToAll) else "p2p": default,
        }
        if nodes.ep.size() % nodes.node_size == 0:
            self.members["2dh"] = TwoDimensionalAllToAll(nodes)
        self.members["1dh"] = OneDimensionalAllToAll(nodes)
        self._logged: set[str] = set()

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor) -> Exchange:
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        bytes_DD = splits_DD.numpy() * row_bytes
        seconds = predict(self.members, bytes_DD, self.profile)
        chosen = min(seconds, key=seconds.__getitem__)
        if self.log is not None and chosen not in self._logged:
            times = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in seconds.items())
            self.log(
                f"--moe-comm-alltoall auto: {chosen} for {bytes_DD.sum() / 1e6:.3g} MB in all (predicted: {times})"
            )
        self._logged.add(chosen)
        return self.members[chosen].start(rows, splits_DD)


def exchange_seconds(all_to_all: AllToAll, bytes_DD: np.ndarray, profile: ClusterProfile) -> float:
    """Return the seconds of one exchange; an unknown class is assumed to send all its messages in one stage."""
    if all_to_all.group.size() == 1:
        return 0.0
    if isinstance(all_to_all, AutoAllToAll):
        return min(predict(all_to_all.members, bytes_DD, profile).values())
    name = next((name for kind, name in _NAMES.items() if isinstance(all_to_all, kind)), "p2p")
    return predict([name], bytes_DD, profile)[name]


_NAMES: dict[type[AllToAll], str] = {
    FlatAllToAll: "flat",
    PipelinedAllToAll: "pipe",
    TwoDimensionalAllToAll: "2dh",
    OneDimensionalAllToAll: "1dh",
}


def predict(members: Iterable[str], bytes_DD: np.ndarray, profile: ClusterProfile) -> dict[str, float]:
    """Return the seconds that each member takes to exchange bytes_DD, by the model above."""
    size = profile.node_size
    node = np.arange(len(bytes_DD)) // size
    same_node = node[:, None] == node
    sent = {name: stages(name, bytes_DD, size) for name in members}
    stages_BDD = np.stack([stage_DD for found in sent.values() for stage_DD in found])
    near_BDD, far_BDD = stages_BDD * same_node, stages_BDD * ~same_node
    near, far = profile.link("p2p", "intra"), profile.link("p2p", "inter")
    far_bytes_B = np.maximum(_busiest(far_BDD), node_share(profile) * _busiest(far_BDD, size))
    near_B = near.alpha * _busiest(near_BDD > 0) + near.beta * _busiest(near_BDD)
    far_B = far.alpha * _busiest(far_BDD > 0) + far.beta * far_bytes_B
    seconds = iter(np.maximum(near_B, far_B).tolist())
    return {name: sum(itertools.islice(seconds, len(found))) for name, found in sent.items()}


def stages(name: str, bytes_DD: np.ndarray, node_size: int) -> list[np.ndarray]:
    """Return the bytes that the member `name` sends in each of its stages, as matrices [D, D] with zero diagonals."""
    ranks = np.arange(len(bytes_DD))
    node, local, firsts = ranks // node_size, ranks % node_size, ranks[::node_size]
    same_node, same_local = node[:, None] == node, local[:, None] == local
    if name == "flat":
        found = [bytes_DD * same_node, bytes_DD * ~same_node]
    elif name == "2dh":
        by_local_DL = bytes_DD.reshape(len(ranks), -1, node_size).sum(1)
        from_node_ND = bytes_DD.reshape(-1, node_size, len(ranks)).sum(1)
        found = [by_local_DL[:, local] * same_node, from_node_ND[node] * same_local]
    elif name == "1dh":
        leader = local == 0
        from_node_ND = np.add.reduceat(bytes_DD, firsts, axis=0)
        between_NN = np.add.reduceat(from_node_ND, firsts, axis=1)
        found = [
            bytes_DD.sum(1)[:, None] * (same_node & leader),
            between_NN[np.ix_(node, node)] * (leader[:, None] & leader),
            bytes_DD.sum(0) * (same_node & leader[:, None]),
        ]
    else:
        found = [bytes_DD]
    return [np.where(ranks[:, None] == ranks, 0, stage_DD) for stage_DD in found]


def node_share(profile: ClusterProfile) -> float:
    """Return the fraction of a node's bytes that share a link to other nodes: 1/L (a link per rank) to 1 (one link).

    It follows from the profile's all-to-all among all ranks, where a fraction f of the bytes crosses nodes: the seconds
    per byte beyond those within nodes, divided by f times the seconds per byte of a single rank.
    """
    num_ranks, size = profile.num_ranks, profile.node_size
    crossing, beta = (num_ranks - size) / max(1, num_ranks - 1), profile.link("p2p", "inter").beta
    if not crossing * beta:
        return 1 / size
    together = profile.link("all_to_all").beta - (1 - crossing) * profile.link("p2p", "intra").beta
    return min(max(together / (crossing * beta), 1), size) / size


def _busiest(amounts_BDD: np.ndarray, size: int = 1) -> np.ndarray:
    """Return the largest sum that `size` consecutive ranks send or receive in each stage, [B]."""
    firsts = range(0, amounts_BDD.shape[1], size)
    received_B, sent_B = (np.add.reduceat(amounts_BDD.sum(axis), firsts, axis=1).max(1) for axis in (1, 2))
    return np.maximum(received_B, sent_B)
