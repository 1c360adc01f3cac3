"""Seconds of the all-to-alls of `--moe-comm-alltoall`.

The messages of an all-to-all are matrices, one for each of its consecutive stages:

    default  all in one stage, as the backend sends them
    flat     within nodes, then between nodes      p2p, pipe  all in one stage
    2dh      within nodes, then between nodes      1dh        to the leaders, between leaders, from the leaders

A stage takes `Network.batch_seconds`. If an all-to-all was measured in an even exchange, its line takes precedence:
alpha is the latency, and the seconds of bytes are scaled so that an even exchange takes the measured time.

In the shapes, L counts the ranks of a node. Matrices [D, D] hold the bytes from rank i to rank j.
"""

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.core import Links
from megatron_balance.cost.network import Crossing, Network
from megatron_balance.profile.cluster_profile import ClusterProfile, Fit

DEFAULT = "default"
"""The all-to-all described by `profile.link("all_to_all")`."""


@dataclass(frozen=True)
class ExchangeModel:
    """Predicts the seconds of one all-to-all."""

    name: str
    network: Network
    line: Fit | None
    """Seconds of an even exchange, by bytes that a rank sends to others; None: not measured."""

    @classmethod
    def of(cls, profile: ClusterProfile, name: str = DEFAULT) -> "ExchangeModel":
        """Return the model of `name`; an unknown all-to-all is assumed to send all messages in one stage."""
        line = profile.link("all_to_all") if name == DEFAULT else profile.all_to_alls.get(name)
        return cls(name, Network.of(profile), line)

    def crossing(self, bytes_DD: np.ndarray) -> Crossing:
        """Return the bytes that ranks send and receive in the stages of one exchange."""
        return self.network.crossing(self._stages(bytes_DD))

    def _stages(self, bytes_DD: np.ndarray) -> np.ndarray:
        return np.stack(stages(self.name, bytes_DD, self.network.node_size))

    def seconds(self, bytes_DD: np.ndarray) -> float:
        """Return the seconds of one exchange; 0 if no bytes leave their rank."""
        stages_BDD = self._stages(bytes_DD)
        if not stages_BDD.any():
            return 0.0
        if self.line is None:
            return float(self.network.batch_seconds(stages_BDD).sum())
        return self.line.alpha + self.scale * float(self.network.byte_seconds(self.network.crossing(stages_BDD)).sum())

    def returning(self, bytes_DD: np.ndarray) -> float:
        """Return the seconds of the exchange that takes the results of these rows back."""
        return self.seconds(bytes_DD.T)

    def links(self, unit: float) -> Links:
        """Return the links for compiled loops, in seconds per unit of `unit` bytes in one exchange."""
        return self.network.links(unit * self.scale)

    @functools.cached_property
    def scale(self) -> float:
        """Ratio of measured to predicted seconds per byte; 1 if nothing was measured."""
        if self.line is None:
            return 1.0
        ranks = self.network.num_ranks
        carried = self.network.byte_seconds(self.crossing(np.ones((ranks, ranks)) / max(1, ranks - 1))).sum()
        return self.line.beta / float(carried) if carried else 1.0

    @functools.cached_property
    def latency(self) -> float:
        """Seconds of an exchange of empty messages among all ranks."""
        if self.line is not None:
            return self.line.alpha
        ones_BDD = self._stages(np.ones((self.network.num_ranks,) * 2))
        return float(self.network.latency(self.network.crossing((ones_BDD > 0) * 1.0)).sum())


def resized(profile: ClusterProfile, num_ranks: int, node_size: int) -> ClusterProfile:
    """Return the profile of the same links with other numbers of ranks; links determine the all-to-all's line."""
    if (num_ranks, node_size) == (profile.num_ranks, profile.node_size):
        return profile
    found = dataclasses.replace(profile, num_ranks=num_ranks, node_size=node_size, rates=(), all_to_alls={})
    network = Network.of(found)
    even_DD = np.ones((num_ranks, num_ranks)) / max(1, num_ranks - 1)
    alpha = float(network.latency(network.crossing((even_DD > 0) * 1.0)))
    line = Fit(alpha, float(network.byte_seconds(network.crossing(even_DD))), 0.0, 0.0)
    links = {**found.links, "all_to_all": {**found.links["all_to_all"], "ep": line}}
    return dataclasses.replace(found, links=links)


def stages(name: str, bytes_DD: np.ndarray, node_size: int) -> list[np.ndarray]:
    """Return the bytes that all-to-all `name` sends in each stage, as matrices [D, D] with zero diagonals."""
    ranks = np.arange(len(bytes_DD))
    node = ranks // node_size
    local = ranks % node_size
    firsts = ranks[::node_size]
    same_node = node[:, None] == node
    same_local = local[:, None] == local
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
