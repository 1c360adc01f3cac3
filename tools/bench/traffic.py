"""Who sends how much to whom in an all-to-all, and how fast links of given rates could at best do it.

Shape suffixes: D ranks (sources first, then destinations), N nodes; rank r lives on node r // (D / N).
"""

from dataclasses import dataclass

import numpy as np

PAYLOAD_SHARE = 0.9938
"""Of the bytes on a link, those that are not headers."""

BURST = 131072
"""Bytes that a link which was idle lets pass at once."""

SKEW = 1.0
"""Standard deviation of the logarithm of a destination's popularity."""

SPLITS = ("even", "skewed", "one-hot-node")


def split_rows(kind: str, num_ranks: int, node_size: int, rows_per_rank: int, seed: int = 0) -> np.ndarray:
    """[D, D] int64 rows from each source to each destination; each source sends `rows_per_rank`, its own included.

    even: the same to all. skewed: lognormal popularity of destinations, to which each source adds its own.
    one-hot-node: everything to node 0, evenly to its ranks.
    """
    generator = np.random.default_rng(seed)
    if kind == "even":
        weights_DD = np.ones((num_ranks, num_ranks))
    elif kind == "skewed":
        popularity_D = generator.lognormal(sigma=SKEW, size=num_ranks)
        weights_DD = popularity_D * generator.lognormal(sigma=SKEW / 2, size=(num_ranks, num_ranks))
    elif kind == "one-hot-node":
        weights_DD = np.tile(np.arange(num_ranks) < node_size, (num_ranks, 1)).astype(float)
    else:
        raise ValueError(f"--splits {kind}: choose one of {', '.join(SPLITS)}")
    shares_DD = weights_DD.cumsum(1) / weights_DD.sum(1, keepdims=True)
    return np.diff(np.rint(shares_DD * rows_per_rank).astype(np.int64), prepend=0)


@dataclass(frozen=True)
class Limit:
    """Seconds that the busiest links need for the bytes that have to cross them, all links working at once.

    Bytes count once, as a flat exchange sends them: what a hierarchical form relays inside a node is its own cost, and
    does not raise the limit that it is compared with.
    """

    inter: float
    """The busiest of the nodes' links, in either direction."""

    intra: float
    """The busiest node's bus; 0 if it is not limited."""

    @property
    def seconds(self) -> float:
        """No schedule is faster."""
        return max(self.inter, self.intra)

    @property
    def largest_speedup(self) -> float:
        """S_max of ScheMoE Eq. 18: intra-node then inter-node exchange, over both at once."""
        return (self.inter + self.intra) / self.seconds if self.seconds else 1.0


def limit(bytes_DD: np.ndarray, node_size: int, link_mbit: float, bus_mbit: float | None) -> Limit:
    """The limit of an exchange of `bytes_DD` [D, D] over links of `link_mbit` and node buses of `bus_mbit` Mbit/s."""
    num_nodes = len(bytes_DD) // node_size
    shape = (num_nodes, node_size, num_nodes, node_size)
    wire_DD = bytes_DD * (1 - np.eye(len(bytes_DD)))
    between_NN = wire_DD.reshape(shape).sum((1, 3))
    inside_N = between_NN.diagonal()
    up_N, down_N = between_NN.sum(1) - inside_N, between_NN.sum(0) - inside_N
    inter = _seconds(np.maximum(up_N, down_N).max(), link_mbit)
    return Limit(inter, 0.0 if bus_mbit is None else _seconds(inside_N.max(), bus_mbit))


def _seconds(payload_bytes: float, mbit: float) -> float:
    return float(max(0.0, payload_bytes / PAYLOAD_SHARE - BURST) * 8 / (mbit * 1e6))
