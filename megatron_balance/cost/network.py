"""Costs of messages on a cluster: ranks share nodes, and the ranks of a node share adapters.

The time of a batch of messages is the sum of a launch, a time per message of the busiest rank, and the time for the
busiest resource to carry its bytes:

    a rank's link into the fabric     bytes within the node, each way; see `core.take_turns`
    a rank's share of an adapter      bytes to and from other nodes, each way
    all adapters of a node            the same bytes of all ranks of the node, each way

In the shapes, `_XD` are amounts of each rank, with any leading dimensions X; `_XDD` are [source rank, target rank].
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.core import Links, carry
from megatron_balance.device.compiled import packed
from megatron_balance.profile.cluster_profile import ClusterProfile


class Level(NamedTuple):
    """One kind of link."""

    launch: float
    """Seconds of a batch, independent of its messages."""
    message: float
    """Seconds per message of the rank with the most messages."""
    beta: float
    """Seconds per byte that a rank sends while it receives as much."""
    one_way: float = 1.0
    """Fraction of `beta` per byte if the other direction is idle: 1 if directions are independent."""


class Crossing(NamedTuple):
    """Amounts (such as tokens, bytes or messages) that ranks send to and receive from other ranks."""

    near_2XD: np.ndarray
    """[2, ..., D]: sent to and received from the same node."""
    far_2XD: np.ndarray
    """[2, ..., D]: sent to and received from other nodes."""

    def scaled(self, factor: float) -> "Crossing":
        return Crossing(self.near_2XD * factor, self.far_2XD * factor)


@dataclass(frozen=True)
class Network:
    """Links and adapters of one expert-parallel group's ranks."""

    num_ranks: int
    node_size: int
    near: Level
    """Links within a node."""
    far: Level
    """Links between nodes, for a rank that uses its adapter alone."""
    adapters: float
    """Number of a node's ranks that can send to other nodes at full rate at the same time: 1 to node_size."""

    @classmethod
    def of(cls, profile: ClusterProfile) -> "Network":
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
        """Whether there are both pairs of ranks within nodes and pairs between nodes."""
        return 1 < self.node_size < self.num_ranks

    @cached_property
    def is_near_DD(self) -> np.ndarray:
        """[D, D] bool: whether two ranks share a node."""
        return self.node_D[:, None] == self.node_D

    def crossing(self, amounts_XDD: np.ndarray) -> Crossing:
        """Return the amounts that each rank sends and receives, without the diagonal, which stays on its rank."""
        diagonal_XD = amounts_XDD.diagonal(axis1=-2, axis2=-1)
        total_2XD = np.stack([amounts_XDD.sum(-1), amounts_XDD.sum(-2)]) - diagonal_XD
        if len(self.first_N) == 1:
            return Crossing(total_2XD, np.zeros_like(total_2XD))
        near_XDD = amounts_XDD * self.is_near_DD
        near_2XD = np.stack([near_XDD.sum(-1), near_XDD.sum(-2)]) - diagonal_XD
        return Crossing(near_2XD, total_2XD - near_2XD)

    def links(self, unit: float) -> Links:
        """Return the links for compiled loops, in seconds per unit of `unit` bytes."""
        return Links(
            node_size=self.node_size,
            near=self.near.beta * unit,
            far=self.far.beta * unit,
            near_one_way=self.near.one_way,
            far_one_way=self.far.one_way,
            adapters=float(self.adapters),
        )

    def busy(self, bytes_: Crossing) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the seconds that these bytes take on each rank's link and share of an adapter, [..., D] and [..., D],
        on each node's adapters, [..., N], and on the busiest resource, [...]. See `core.take_turns` for links."""
        amount_XFD = np.concatenate([bytes_.near_2XD, bytes_.far_2XD])
        shape = amount_XFD.shape[1:-1]
        amount_XFD = np.ascontiguousarray(np.moveaxis(amount_XFD, 0, -2), np.float64).reshape(-1, 4, self.num_ranks)
        near_XD, far_XD, node_XN, longest_X = carry(amount_XFD, self._links_1)
        near_XD, far_XD, node_XN = (seconds.reshape(*shape, -1) for seconds in (near_XD, far_XD, node_XN))
        return near_XD, far_XD, node_XN, longest_X.reshape(shape)

    @cached_property
    def _links_1(self) -> np.ndarray:
        return packed(self.links(1.0))

    def byte_seconds(self, bytes_: Crossing) -> np.ndarray:
        """Return [...]: seconds that the busiest resource takes to carry these bytes."""
        return self.busy(bytes_)[3]

    def latency(self, messages: Crossing) -> np.ndarray:
        """Return [...]: seconds of a batch of empty messages; 0 without messages."""
        near, far = (amounts_2XD.max((0, -1)) for amounts_2XD in messages)
        launch = np.maximum(self.near.launch * (near > 0), self.far.launch * (far > 0))
        return launch + self.near.message * near + self.far.message * far

    def batch_seconds(self, bytes_XDD: np.ndarray) -> np.ndarray:
        """Return [...]: seconds of batches with one message for each pair of ranks that has bytes."""
        return self.latency(self.crossing((bytes_XDD > 0) * 1.0)) + self.byte_seconds(self.crossing(bytes_XDD))


SAME = 0.1
"""Directions of a link count as independent if an idle direction saves at most this fraction, which may be noise."""


def _level(profile: ClusterProfile, kind: str) -> Level:
    launch = profile.messages[kind]
    both = profile.link("p2p", kind).beta
    one_way = profile.link("one_way", kind).beta
    share = min(max(one_way / both, 0.5), 1.0) if both else 1.0
    return Level(launch.alpha, launch.beta, both, share if share < 1 - SAME else 1.0)
