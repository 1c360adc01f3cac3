"""Seconds of an exchange that sends a token once to each node and rank: by the flex dispatcher (DeepEP, HybridEP), or
by `--moe-comm-alltoall dedup`.

A token first goes to the rank with the sender's local rank on each node of its experts. That rank sends it on, within
the node, to each rank with some of its experts. Results return the same way. An all-to-all sends a row for each expert.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy  # imports its parts at their first use

from megatron_balance.cost.core import Links
from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.cost.network import Crossing, Network
from megatron_balance.profile.cluster_profile import LEVELS, ClusterProfile, Fit


class Routing(NamedTuple):
    """How many experts tokens choose, and from what."""

    experts: int
    topk: int
    """Number of experts of a token."""
    groups: int = 1
    """Number of groups of consecutive experts."""
    chosen: int = 1
    """Number of groups that a token's experts are in at most."""

    def distinct(self, parts: int) -> float:
        """Return the expected number of parts with some of a token's experts, if all experts are equally likely.

        Parts are equally many consecutive experts: those of a node, or of a rank.
        """
        size = self.experts / parts
        of_group = self.experts // self.groups
        in_part = max(1, round(self.groups / parts))
        missed = 0.0
        for chosen in range(min(in_part, self.chosen) + 1):
            likely = float(scipy.stats.hypergeom.pmf(chosen, self.groups, in_part, self.chosen))
            candidates = round(chosen * min(size, of_group))
            others = self.chosen * of_group - candidates
            if others >= self.topk:
                missed += likely * math.comb(others, self.topk) / math.comb(self.chosen * of_group, self.topk)
        return parts * (1.0 - missed)

    def copies(self, parts: int) -> float:
        """Return the copies of tokens that parts receive for each row, if all experts are equally likely."""
        return self.distinct(parts) / self.topk

    def draws(self, parts: int) -> float:
        """Return the number of independent choices of a part that reach as many parts as a token's experts."""
        reached = self.distinct(parts) / parts
        return math.log(max(1.0 - reached, 1e-9)) / math.log(1.0 - 1.0 / parts) if parts > 1 else 1.0


@dataclass(frozen=True)
class FlexModel(ExchangeModel):
    """Predicts the seconds of one exchange by the flex dispatcher or by dedup."""

    routing: Routing
    near: Fit
    """One exchange, by the bytes that a rank sends within its node."""
    far: Fit
    """The same between nodes."""
    shards: int = 1
    """Consecutive ranks that each get every row of an expert."""

    @classmethod
    def of(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, profile: ClusterProfile, routing: Routing, name: str = "flex", shards: int = 1
    ) -> "FlexModel":
        """Return the model of `flex` or `dedup` for the rates in a profile."""
        lines = profile.flex if name == "flex" else None
        near, far = (profile.link("p2p", level) if lines is None else lines[level] for level in LEVELS)
        return cls(name, Network.of(profile), None, routing, near, far, shards)

    @property
    def _nodes(self) -> int:
        return len(self.network.first_N)

    @functools.cached_property
    def _slower(self) -> tuple[float, float]:
        """Seconds of a byte within nodes and between nodes, over those of the network's links."""
        network = self.network
        pairs = ((self.near.beta, network.near.beta), (self.far.beta, network.far.beta))
        near, far = (mine / links if links else 1.0 for mine, links in pairs)
        return near, far

    @functools.cached_property
    def latency(self) -> float:
        if self._nodes == 1:
            return self.near.alpha
        # The flex dispatcher's kernels forward each piece of a message as soon as it arrives
        return max(self.near.alpha, self.far.alpha) if self.name == "flex" else self.near.alpha + self.far.alpha

    def seconds(self, bytes_DD: np.ndarray) -> float:
        if not (bytes_DD.sum() - bytes_DD.trace()):
            return 0.0
        return self.latency + float(self.network.byte_seconds(self.crossing(bytes_DD)).sum())

    def returning(self, bytes_DD: np.ndarray) -> float:
        # The same copies take the same links in the opposite direction
        return self.seconds(bytes_DD)

    def links(self, unit: float) -> Links:
        """Return links that carry the copies of tokens in an exchange of rows to equally likely experts."""
        near, far = self._slower
        size = self.network.node_size
        return self.network.links(unit)._replace(
            near_copies=near * self.routing.copies(self.network.num_ranks),
            far_copies=far * self.routing.copies(self._nodes),
            relayed=(size - 1) / size if self._nodes > 1 else 0.0,
        )

    def crossing(self, bytes_DD: np.ndarray) -> Crossing:
        """Return the bytes of copies that ranks send and receive, [2, 1, D] each, scaled to the network's rates.

        They follow from the rows between each two ranks: a token reaches a part with probability 1 - (1 - s)^k if a
        fraction s of its source's rows do, and `Routing.draws` is k.

        Args:
            bytes_DD: bytes of rows, to each shard, including those that stay on their rank.
        """
        network = self.network
        ranks = network.num_ranks
        row_D = bytes_DD.sum(1)
        token_D1 = (row_D / (self.routing.topk * self.shards))[:, None]
        share_DD = self.shards * bytes_DD / np.where(row_D, row_D, 1.0)[:, None]
        share_DN = np.add.reduceat(share_DD, network.first_N, axis=1) / self.shards
        copy_DD = token_D1 * (1.0 - (1.0 - share_DD).clip(0.0) ** self.routing.draws(ranks // self.shards))
        near_DD = copy_DD * network.is_near_DD
        far_DD = np.zeros_like(copy_DD)
        if self._nodes > 1:
            copy_DN = token_D1 * (1.0 - (1.0 - share_DN).clip(0.0) ** self.routing.draws(self._nodes))
            local_D = np.arange(ranks) % network.node_size
            for node, first in enumerate(network.first_N.tolist()):
                ranks_of = np.arange(first, min(first + network.node_size, ranks))
                away = np.flatnonzero(network.node_D != node)
                # A last node may have fewer ranks
                entry = first + local_D[away] % len(ranks_of)
                far_DD[away, entry] += copy_DN[away, node]
                np.add.at(near_DD, (entry[:, None], ranks_of), copy_DD[np.ix_(away, ranks_of)])
        near, far = self._slower
        near_2D = network.crossing(near_DD).near_2XD
        return Crossing(near * near_2D[:, None], far * network.crossing(far_DD).far_2XD[:, None])
