"""Chooses an all-to-all for each exchange by predicted time.

A member's messages are written down as matrices, one for each of its stages, which follow each other:

    flat   inside nodes, then between nodes        p2p, pipe  all at once
    2dh    align inside nodes, then across them    1dh        to the leaders, between leaders, from the leaders

Inside a stage both levels work at the same time. A level takes alpha * n + beta * b, where n counts the messages of its
busiest rank, b the bytes of its busiest rank or link, sent or received, and alpha and beta are the profile's
point-to-point lines. So `flat` and `pipe` are Eqs. 17 and 16 of ScheMoE, for splits of any shape.

Shape suffixes: D ranks of the group, N nodes, L ranks of a node, S stages. Matrices [D, D] hold bytes from rank i to
rank j.
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
    """Leaves each exchange to the member that is predicted to be the fastest; `pipe` wins ties.

    The prediction depends on the profile, the split matrix and the size of a row only, so all ranks choose alike.
    """

    def __init__(self, nodes: NodeGroups, profile: ClusterProfile, say: Callable[[str], None] | None = None) -> None:
        """`say` is called with a line when a member is chosen for the first time."""
        super().__init__(nodes)
        self.profile, self.say = profile, say
        default = default_all_to_all(nodes.ep)
        self.members: dict[str, AllToAll] = {
            "pipe": PipelinedAllToAll(nodes),
            "flat" if isinstance(default, FlatAllToAll) else "p2p": default,
        }
        if nodes.ep.size() % nodes.node_size == 0:
            self.members["2dh"] = TwoDimensionalAllToAll(nodes)
        self.members["1dh"] = OneDimensionalAllToAll(nodes)
        self._said: set[str] = set()

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor) -> Exchange:
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        bytes_DD = splits_DD.numpy() * row_bytes
        seconds = predict(self.members, bytes_DD, self.profile)
        chosen = min(seconds, key=seconds.__getitem__)
        if self.say is not None and chosen not in self._said:
            times = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in seconds.items())
            self.say(
                f"--moe-comm-alltoall auto: {chosen} for {bytes_DD.sum() / 1e6:.3g} MB in all (predicted: {times})"
            )
        self._said.add(chosen)
        return self.members[chosen].start(rows, splits_DD)


def exchange_seconds(all_to_all: AllToAll, bytes_DD: np.ndarray, profile: ClusterProfile) -> float:
    """Seconds of one exchange; of a class that is not known here, as if all its messages went at once."""
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
    """Seconds that each of the members takes for the exchange of bytes_DD, by the model above."""
    size = profile.node_size
    node = np.arange(len(bytes_DD)) // size
    same_node = node[:, None] == node
    sent = {name: stages(name, bytes_DD, size) for name in members}
    stages_SDD = np.stack([stage_DD for found in sent.values() for stage_DD in found])
    near_SDD, far_SDD = stages_SDD * same_node, stages_SDD * ~same_node
    near, far = profile.link("p2p", "intra"), profile.link("p2p", "inter")
    far_bytes_S = np.maximum(_busiest(far_SDD), node_share(profile) * _busiest(far_SDD, size))
    near_S = near.alpha * _busiest(near_SDD > 0) + near.beta * _busiest(near_SDD)
    far_S = far.alpha * _busiest(far_SDD > 0) + far.beta * far_bytes_S
    seconds = iter(np.maximum(near_S, far_S).tolist())
    return {name: sum(itertools.islice(seconds, len(found))) for name, found in sent.items()}


def stages(name: str, bytes_DD: np.ndarray, node_size: int) -> list[np.ndarray]:
    """What the member called `name` sends in each of its stages, as matrices like bytes_DD; diagonals do not travel."""
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
    """How much of its bytes a node's link to others carries one after the other: 1/L (a link per rank) to 1 (one link).

    From the profile's all-to-all among all ranks, of whose bytes a share f crosses nodes: what a byte takes there
    beyond its time inside nodes, over f times what a byte of one rank alone takes.
    """
    num_ranks, size = profile.num_ranks, profile.node_size
    crossing, beta = (num_ranks - size) / max(1, num_ranks - 1), profile.link("p2p", "inter").beta
    if not crossing * beta:
        return 1 / size
    together = profile.link("all_to_all").beta - (1 - crossing) * profile.link("p2p", "intra").beta
    return min(max(together / (crossing * beta), 1), size) / size


def _busiest(amounts_SDD: np.ndarray, size: int = 1) -> np.ndarray:
    """[S]: the largest sum that `size` ranks next to each other send or receive in each stage."""
    firsts = range(0, amounts_SDD.shape[1], size)
    received_S, sent_S = (np.add.reduceat(amounts_SDD.sum(axis), firsts, axis=1).max(1) for axis in (1, 2))
    return np.maximum(received_S, sent_S)
