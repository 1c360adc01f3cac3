"""Traffic of an all-to-all, and the minimum time for it on links with given rates.

In the shapes, D counts ranks (sources, then destinations) and N nodes; rank r is on node r // (D / N).
"""

from typing import NamedTuple

import numpy as np

PAYLOAD_SHARE = 0.9938
"""Fraction of the bytes on a link that are not headers."""

BURST = 131072
"""Number of bytes that pass an idle link without delay."""

SKEW = 1.0
"""Standard deviation of the logarithm of a destination's popularity."""

SPLITS = ("even", "skewed", "one-hot-node")


def split_rows(kind: str, num_ranks: int, node_size: int, rows_per_rank: int, seed: int = 0) -> np.ndarray:
    """Return the rows from each source to each destination, [D, D] int64; each source sends `rows_per_rank` in total.

    even: the same number to all. skewed: lognormal popularity of destinations, times a factor of each source.
    one-hot-node: all rows to node 0, evenly to its ranks.
    """
    generator = np.random.default_rng(seed)
    if kind == "even":
        weights_DD = np.ones((num_ranks, num_ranks))
    elif kind == "skewed":
        popularity_D = generator.lognormal(sigma=SKEW, size=num_ranks)
        weights_DD = popularity_D * generator.lognormal(sigma=SKEW / 2, size=(num_ranks, num_ranks))
    else:
        weights_DD = np.tile(np.arange(num_ranks) < node_size, (num_ranks, 1)).astype(float)
    shares_DD = weights_DD.cumsum(1) / weights_DD.sum(1, keepdims=True)
    return np.diff(np.rint(shares_DD * rows_per_rank).astype(np.int64), prepend=0)


class Limit(NamedTuple):
    """Seconds that the busiest links need for their bytes if all links work at the same time.

    Bytes count once, as sent by a flat exchange: the bytes that a hierarchical one relays within a node do not raise
    the limit.
    """

    inter: float
    """The busiest of the nodes' links, in either direction."""
    intra: float
    """The busiest node's bus; 0 if it is not limited."""

    @property
    def seconds(self) -> float:
        """Minimum seconds of any schedule."""
        return max(self.inter, self.intra)

    @property
    def largest_speedup(self) -> float:
        """S_max of ScheMoE Eq. 18: intra-node and inter-node exchange in sequence, over both at the same time."""
        return (self.inter + self.intra) / self.seconds if self.seconds else 1.0


def limit(bytes_DD: np.ndarray, node_size: int, link_mbit: float, bus_mbit: float | None) -> Limit:
    """Return the limit of an exchange of `bytes_DD` over links of `link_mbit` and node buses of `bus_mbit` Mbit/s."""
    num_nodes = len(bytes_DD) // node_size
    shape = (num_nodes, node_size, num_nodes, node_size)
    wire_DD = bytes_DD * (1 - np.eye(len(bytes_DD)))
    between_NN = wire_DD.reshape(shape).sum((1, 3))
    inside_N = between_NN.diagonal()
    up_N = between_NN.sum(1) - inside_N
    down_N = between_NN.sum(0) - inside_N
    inter = _seconds(np.maximum(up_N, down_N).max(), link_mbit)
    return Limit(inter, 0.0 if bus_mbit is None else _seconds(inside_N.max(), bus_mbit))


def _seconds(payload_bytes: float, mbit: float) -> float:
    return float(max(0.0, payload_bytes / PAYLOAD_SHARE - BURST) * 8 / (mbit * 1e6))
