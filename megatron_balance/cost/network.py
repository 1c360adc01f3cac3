"""What messages cost on a cluster whose ranks share nodes, and nodes share adapters.

The ranks of a node exchange messages over its fabric. Messages to other nodes use the node's adapters instead, which
its ranks share. A batch of messages takes a launch, a little for each message of its busiest rank, and the time in
which its busiest resource carries its bytes:

    a rank's link into the fabric     bytes within the node, each way; see `sharing` where ranks take turns
    a rank's share of an adapter      bytes to and from other nodes, each way
    all adapters of a node            the same bytes of all ranks of the node, each way

In the shapes, `_XD` are amounts of each rank, with any leading dimensions X; `_XDD` are [source rank, target rank].
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_balance.profile.cluster_profile import ClusterProfile


class Level(NamedTuple):
    """One kind of link."""

    launch: float
    """Seconds of a batch, independent of its messages."""

    message: float
    """Seconds for each message of the rank that sends or receives the most."""

    beta: float
    """Seconds per byte that a rank sends, while it receives as much."""

    one_way: float = 1.0
    """Share of `beta` that a byte takes while none travels in the other direction: 1 if both directions are
    independent, 1/2 if they take turns."""

    def busiest(self, sent: np.ndarray, received: np.ndarray) -> np.ndarray:
        """Return the amounts that take as long, each sent while as much is received."""
        most = np.maximum(sent, received)
        if self.one_way == 1:
            return most
        return self.one_way * most + (1 - self.one_way) * np.minimum(sent, received)


class Crossing(NamedTuple):
    """Amounts that ranks send to and receive from other ranks, such as tokens, bytes or messages."""

    near_2XD: np.ndarray
    """[2, ..., D] sent to and received from ranks of the same node."""

    far_2XD: np.ndarray
    """[2, ..., D] sent to and received from other nodes."""

    def scaled(self, factor: float) -> "Crossing":
        """Return the amounts in another unit, such as bytes for tokens."""
        return Crossing(self.near_2XD * factor, self.far_2XD * factor)


@dataclass(frozen=True)
class Network:
    """The links and adapters of the ranks of one expert-parallel group."""

    num_ranks: int
    node_size: int
    near: Level
    """Links within a node."""
    far: Level
    """Links between nodes, for a rank that shares its adapter with no other rank of the group."""
    adapters: float
    """Number of ranks of a node that can send to other nodes at their full rate at the same time; 1 to node_size."""

    @classmethod
    def of(cls, profile: ClusterProfile) -> "Network":
        """Return the network that a profile describes."""
        levels = [_level(profile, kind) for kind in ("intra", "inter")]
        size = profile.node_size
        shared = profile.link("p2p", "ep").beta
        adapters = size * levels[1].beta / shared if shared and profile.num_ranks > size else size
        return cls(profile.num_ranks, size, *levels, adapters=min(max(adapters, 1.0), size))

    @cached_property
    def node_D(self) -> np.ndarray:
        """[D] the node of each rank."""
        return np.arange(self.num_ranks) // self.node_size

    @cached_property
    def first_N(self) -> np.ndarray:
        """[N] the first rank of each node."""
        return np.arange(0, self.num_ranks, self.node_size)

    @property
    def has_both_levels(self) -> bool:
        """Whether some ranks share a node, and some do not."""
        return 1 < self.node_size < self.num_ranks

    @cached_property
    def is_near_DD(self) -> np.ndarray:
        """[D, D] bool: whether two ranks share a node."""
        return self.node_D[:, None] == self.node_D

    def crossing(self, amounts_XDD: np.ndarray) -> Crossing:
        """Return what each rank sends and receives; amounts on the diagonal stay on their rank."""
        diagonal_XD = amounts_XDD.diagonal(axis1=-2, axis2=-1)
        total_2XD = np.stack([amounts_XDD.sum(-1), amounts_XDD.sum(-2)]) - diagonal_XD
        if len(self.first_N) == 1:
            return Crossing(total_2XD, np.zeros_like(total_2XD))
        near_XDD = amounts_XDD * self.is_near_DD
        near_2XD = np.stack([near_XDD.sum(-1), near_XDD.sum(-2)]) - diagonal_XD
        return Crossing(near_2XD, total_2XD - near_2XD)

    def near_seconds(self, bytes_: Crossing) -> np.ndarray:
        """Return [..., D] the seconds after which the fabric of each rank's node has carried the rank's bytes."""
        return self.sharing(self.near.beta * self.near.busiest(*bytes_.near_2XD))

    def sharing(self, work_XD: np.ndarray) -> np.ndarray:
        """Return [X, D] when each rank has done its work, with the ranks of its node in a fabric that they may share.

        Where the directions of a link take turns, so do the ranks of a node, because they share what limits them, such
        as memory. All get the same rate, which grows when others are done, up to 1 / `one_way` of that in a full node.

        Args:
            work_XD: the seconds of each rank if all ranks of a full node have as much.
        """
        if self.near.one_way == 1:
            return work_XD
        size = self.node_size
        nodes = len(self.first_N)
        work_XNS = np.zeros((*work_XD.shape[:-1], nodes * size))
        work_XNS[..., : self.num_ranks] = work_XD
        work_XNS = work_XNS.reshape(*work_XD.shape[:-1], nodes, size)
        order_XNS = work_XNS.argsort(-1)
        steps_XNS = np.diff(np.take_along_axis(work_XNS, order_XNS, -1), prepend=0.0)
        at_work_S = np.arange(size, 0, -1) / size
        done_XNS = np.empty_like(work_XNS)
        ends_XNS = (steps_XNS * np.maximum(at_work_S, self.near.one_way)).cumsum(-1)
        np.put_along_axis(done_XNS, order_XNS, ends_XNS, -1)
        return done_XNS.reshape(*work_XD.shape[:-1], -1)[..., : self.num_ranks]

    def byte_seconds(self, bytes_: Crossing) -> np.ndarray:
        """Return [...] the seconds in which the busiest resource carries these bytes."""
        seconds = self.near_seconds(bytes_).max(-1)
        if len(self.first_N) == 1:
            return seconds
        far = self.far.busiest(*bytes_.far_2XD).max(-1)
        # Adapters that are not shared are no busier than the busiest rank
        if self.adapters < self.node_size:
            node_2XN = np.add.reduceat(bytes_.far_2XD, self.first_N, axis=-1)
            far = np.maximum(far, self.far.busiest(*node_2XN / self.adapters).max(-1))
        return np.maximum(seconds, self.far.beta * far)

    def latency(self, messages: Crossing) -> np.ndarray:
        """Return [...] the seconds of a batch of empty messages; 0 without messages."""
        near, far = (amounts_2XD.max((0, -1)) for amounts_2XD in messages)
        launch = np.maximum(self.near.launch * (near > 0), self.far.launch * (far > 0))
        return launch + self.near.message * near + self.far.message * far

    def batch_seconds(self, bytes_XDD: np.ndarray) -> np.ndarray:
        """Return [...] the seconds of batches of one message for each pair of ranks with bytes."""
        return self.latency(self.crossing((bytes_XDD > 0) * 1.0)) + self.byte_seconds(self.crossing(bytes_XDD))


SAME = 0.1
"""Directions of a link are independent if a byte takes this much less in one of them at most: it may be noise."""


def _level(profile: ClusterProfile, kind: str) -> Level:
    launch = profile.messages[kind]
    both = profile.link("p2p", kind).beta
    one_way = profile.link("one_way", kind).beta
    share = min(max(one_way / both, 0.5), 1.0) if both else 1.0
    return Level(launch.alpha, launch.beta, both, share if share < 1 - SAME else 1.0)
