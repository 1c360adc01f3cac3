"""The dispatch plan of a layer: how many tokens each source sends to each physical expert.

A source is a rank that has tokens to send: one per host, or one per shard of a host. In shapes, D counts sources, W
hosts (ranks of an expert-parallel group).
"""

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch

from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS, HostRules, SplitName, sums_by_host, tokens_of


class Choices(NamedTuple):
    """Experts chosen by tokens: logical experts from the router, physical experts (P instead of E) from `reroute`."""

    probs_TE: torch.Tensor
    """Combine weights."""
    map_TE: torch.Tensor
    """bool: the chosen experts."""


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Distributes each source's tokens over the hosts of the experts that the tokens chose.

    The rules treat all sources of a host as one. The host's plan is then divided among its sources in order.
    """

    counts_DE: torch.Tensor
    """[D, E] int64 in host memory, the load matrix: tokens that source d routed to expert e. Sources are ordered by
    host; each host has the same number of sources."""
    placement: Placement
    """Hosts of every expert; the same on all ranks."""
    split: SplitName = "local_first"
    """How many tokens each host of an expert computes. `local_first` (Pro-Prophet, section IV-A): a host computes its
    own tokens; the primary host also computes the tokens of ranks that are not hosts. `proportional`: tokens are shared
    in proportion to the placement's quotas, or to vExperts (FlexMoE, Algorithm 3). See also `placement/splits.py`."""
    node_size: int | None = None
    """Number of consecutive hosts that share a node; None: all hosts share one."""
    limit: int | None = None
    """The `certified_rows`; None: every host allocates memory for exactly the rows that arrive."""

    def __post_init__(self) -> None:
        assert self.counts_DE.ndim == 2, self.counts_DE.shape
        sources, experts = self.counts_DE.shape
        assert experts == self.placement.num_experts and sources % self.placement.num_ranks == 0
        assert self.split in SPLITS

    @functools.cached_property
    def tokens_DP(self) -> torch.Tensor:
        """[D, P] int64 in host memory: rows that source d sends to physical expert p."""
        placement = self.placement
        if placement.tables.in_place:
            return self.counts_DE
        return torch.from_numpy(tokens_of(self.counts_DE.numpy(), placement, self.rules))

    @property
    def rules(self) -> HostRules:
        return HostRules.of(self.placement, self.split, self.node_size or self.placement.num_ranks)

    @property
    def splits_DW(self) -> torch.Tensor:
        """[D, W]: tokens that each source sends to each host."""
        return torch.from_numpy(sums_by_host(self.tokens_DP.numpy(), self.placement.num_ranks))

    @functools.cached_property
    def room(self) -> int:
        """Rows for which every host allocates memory: `limit` if this plan sends no host more; otherwise 0, which means
        exactly the rows that arrive."""
        if self.limit is None or self.splits_DW.sum(0).max() > self.limit:
            return 0
        return self.limit


def certified_rows(even_rows: int, excess: float) -> int:
    """Return the most rows of a host in a certified pass (`--balance-certify excess`), given the rows of each host
    under even routing if no token is dropped: (1 + excess) times as many, rounded up. `excess` counts as the decimal
    number that was written, because its nearest binary number may be larger."""
    return math.ceil((1 + Fraction(str(excess))) * even_rows)


def by_host(counts_DE: torch.Tensor, hosts: int) -> torch.Tensor:
    """Return [W, E]: the load matrix summed over each host's sources."""
    return counts_DE if len(counts_DE) == hosts else counts_DE.view(hosts, -1, counts_DE.shape[1]).sum(1)
