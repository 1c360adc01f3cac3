"""The dispatch plan of a layer: how many tokens each source sends to each physical expert, decided before any moves.

A source is a rank that has tokens to send: one per host, or one per shard of a host. In shapes, D counts sources, H
hosts (the ranks of an expert-parallel group), M experts with several hosts; K is the largest number of hosts of one.
"""

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from megatron_balance.placement.placement import MOST_TOKENS, Placement
from megatron_balance.placement.splits import SPLITS, paired, sent
from megatron_balance.placement.tables import Tables

Split = Literal["local_first", "proportional"]


class Choices(NamedTuple):
    """The experts that tokens chose: logical ones from the router, physical ones (P in place of E) from `reroute`."""

    probs_TE: torch.Tensor
    """[T, E] combine weights."""

    map_TE: torch.Tensor
    """[T, E] bool: the chosen experts."""


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Tokens from every source to every physical expert, for one layer and one forward pass."""

    placement: Placement

    tokens_DP: torch.Tensor
    """[D, P] int64 in host memory: rows that source d sends to physical expert p."""

    @functools.cached_property
    def splits_DH(self) -> torch.Tensor:
        """[D, H]: tokens that each source (row) sends to each host (column)."""
        return self.tokens_DP.view(len(self.tokens_DP), self.placement.num_ranks, -1).sum(2)

    def received_DS(self, rank: int) -> torch.Tensor:
        """Return [D, S], the tokens that the host `rank` receives from each source for each of its slots."""
        slots = self.placement.slots_per_rank
        return self.tokens_DP[:, rank * slots : (rank + 1) * slots]

    def tokens_per_slot(self, rank: int) -> torch.Tensor:
        """Return [S], the tokens that each slot of `rank` computes."""
        return self.received_DS(rank).sum(0)


def make_dispatch_plan(
    counts_DE: torch.Tensor, placement: Placement, split: Split = "local_first", node_size: int | None = None
) -> DispatchPlan:
    """Share each source's tokens among the hosts of the experts that they chose.

    The rules below treat all sources on a host as one; the host's plan is then divided among them in their order.

    Args:
        counts_DE: [D, E] int64 in host memory, the load matrix: tokens that source d routed to expert e. The sources of
            host 0 come first, then those of host 1, and so on; each host has the same number of sources.
        placement: hosts of every expert; the same on all ranks, so that all ranks make the same plan.
        split: how many tokens each host of an expert computes. `local_first` (Pro-Prophet, section IV-A): its own, and
            the primary host also those of ranks that are not hosts. `proportional`: in proportion to the placement's
            quotas, or to vExperts (FlexMoE, Algorithm 3). Sources send by locality: see `placement/splits.py`.
        node_size: number of consecutive hosts that share a node; None: all.
    """
    assert counts_DE.ndim == 2 and counts_DE.shape[1] == placement.num_experts
    assert len(counts_DE) % placement.num_ranks == 0
    assert split in SPLITS, split
    if len(counts_DE) > placement.num_ranks:
        plan = make_dispatch_plan(by_host(counts_DE, placement.num_ranks), placement, split, node_size)
        return DispatchPlan(placement, _among_sources(plan, counts_DE))
    tables = placement.tables
    counts, tokens_DP = counts_DE.numpy(), np.zeros((placement.num_ranks, placement.num_physical), dtype=np.int64)
    # An expert with one host sends everything there; others are overwritten
    tokens_DP[:, tables.only_E] = counts
    if len(tables.shared_M):
        _share(counts[:, tables.shared_M].T, tables, split, node_size or placement.num_ranks, tokens_DP)
    return DispatchPlan(placement, torch.from_numpy(tokens_DP))


def _share(counts_MD: np.ndarray, tables: Tables, split: Split, node_size: int, tokens_DP: np.ndarray) -> None:
    """Overwrite the tokens of the experts with several hosts."""
    assert counts_MD.sum(1).max() <= MOST_TOKENS, "a product of two counts fits an int64"
    quotas_MD = SPLITS[split](counts_MD, tables.shares_MD, tables.primary_M)
    moved = sent(counts_MD, quotas_MD, node_size)
    ranks_MK, is_host_MK = tables.ranks_MK, tables.is_host_MK
    rows_M1, hosts_K = np.arange(len(ranks_MK))[:, None], np.arange(ranks_MK.shape[1])
    sent_DMK = paired(moved.near_out_AD, moved.near_in_AD[rows_M1, ranks_MK] * is_host_MK)
    if node_size < counts_MD.shape[1]:
        sent_DMK += paired(moved.far_out_AD, moved.far_in_AD[rows_M1, ranks_MK] * is_host_MK)
    sent_DMK[ranks_MK, rows_M1, hosts_K] += moved.local_AD[rows_M1, ranks_MK]
    tokens_DP[:, tables.shared_physical_N] = sent_DMK[:, is_host_MK]


def by_host(counts_DE: torch.Tensor, hosts: int) -> torch.Tensor:
    """Return [H, E], the load matrix with the sources of each host added up."""
    return counts_DE if len(counts_DE) == hosts else counts_DE.view(hosts, -1, counts_DE.shape[1]).sum(1)


def _among_sources(plan: DispatchPlan, counts_DE: torch.Tensor) -> torch.Tensor:
    """Divide the tokens that a plan lets each host send among the host's sources: [D, P].

    Order a host's tokens for an expert by source, and cut them at the plan's numbers: the first part goes to the first
    physical expert, and so on. A source sends to a physical expert the overlap of its own tokens with that part.
    """
    placement, hosts = plan.placement, plan.placement.num_ranks
    experts_P = torch.from_numpy(placement.tables.expert_P)
    used_P = experts_P >= 0
    same_PP = (experts_P[:, None] == experts_P) & used_P
    ends_HP = plan.tokens_DP @ same_PP.triu().to(torch.int64)
    own_HNP = counts_DE.view(hosts, -1, counts_DE.shape[1])[:, :, experts_P.clamp(min=0)] * used_P
    until_HNP = own_HNP.cumsum(1)
    first_HNP = torch.maximum((ends_HP - plan.tokens_DP).unsqueeze(1), until_HNP - own_HNP)
    last_HNP = torch.minimum(ends_HP.unsqueeze(1), until_HNP)
    return (last_HNP - first_HNP).clamp(min=0).flatten(0, 1)
