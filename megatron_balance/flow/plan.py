"""The dispatch plan of a layer: how many tokens each source sends to each physical expert, decided before any moves.

A source is a rank that has tokens to send: one per host, or one per shard of a host. In shapes, D counts sources, H
hosts (the ranks of an expert-parallel group), M experts with several hosts; K is the largest number of hosts of one.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from megatron_balance.placement.placement import Placement

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


def make_dispatch_plan(counts_DE: torch.Tensor, placement: Placement, split: Split = "local_first") -> DispatchPlan:
    """Share each source's tokens among the hosts of the experts that they chose.

    The rules below treat all sources on a host as one; the host's plan is then divided among them in their order.

    Args:
        counts_DE: [D, E] int64 in host memory, the load matrix: tokens that source d routed to expert e. The sources of
            host 0 come first, then those of host 1, and so on; each host has the same number of sources.
        placement: hosts of every expert; the same on all ranks, so that all ranks make the same plan.
        split: `local_first` (Pro-Prophet, section IV-A): a rank that hosts an expert computes its own tokens for it,
            all other ranks send to the primary host. `proportional` (FlexMoE, Algorithm 3): every vExpert of an expert
            computes the same number of tokens, its rank's own tokens first.
    """
    assert counts_DE.ndim == 2 and counts_DE.shape[1] == placement.num_experts
    assert len(counts_DE) % placement.num_ranks == 0
    assert split in ("local_first", "proportional"), split
    if len(counts_DE) > placement.num_ranks:
        plan = make_dispatch_plan(by_host(counts_DE, placement.num_ranks), placement, split)
        return DispatchPlan(placement, _among_sources(plan, counts_DE))
    # One column per expert has no collision: a physical expert computes one logical expert
    target_DE = _nearest_host(placement)
    tokens_DP = counts_DE.new_zeros(placement.num_ranks, placement.num_physical).scatter_(1, target_DE, counts_DE)
    shared = [expert for expert, physicals in enumerate(placement.physicals) if len(physicals) > 1]
    if split == "proportional" and shared:
        _share_proportionally(counts_DE, placement, shared, tokens_DP)
    return DispatchPlan(placement, tokens_DP)


def by_host(counts_DE: torch.Tensor, hosts: int) -> torch.Tensor:
    """Return [H, E], the load matrix with the sources of each host added up."""
    return counts_DE.view(hosts, -1, counts_DE.shape[1]).sum(1)


def _among_sources(plan: DispatchPlan, counts_DE: torch.Tensor) -> torch.Tensor:
    """Divide the tokens that a plan lets each host send among the host's sources: [D, P].

    Order a host's tokens for an expert by source, and cut them at the plan's numbers: the first part goes to the first
    physical expert, and so on. A source sends to a physical expert the overlap of its own tokens with that part.
    """
    placement, hosts = plan.placement, plan.placement.num_ranks
    experts_P = torch.tensor(placement.expert_of_physical)
    used_P = experts_P >= 0
    same_PP = (experts_P[:, None] == experts_P) & used_P
    ends_HP = plan.tokens_DP @ same_PP.triu().to(torch.int64)
    own_HNP = counts_DE.view(hosts, -1, counts_DE.shape[1])[:, :, experts_P.clamp(min=0)] * used_P
    until_HNP = own_HNP.cumsum(1)
    first_HNP = torch.maximum((ends_HP - plan.tokens_DP).unsqueeze(1), until_HNP - own_HNP)
    last_HNP = torch.minimum(ends_HP.unsqueeze(1), until_HNP)
    return (last_HNP - first_HNP).clamp(min=0).flatten(0, 1)


def pad_rows(rows: Sequence[Sequence[int]], fill: int | None = None) -> torch.Tensor:
    """Return rows of uneven length as [rows, longest] int64, filled up with `fill` or with each row's last number."""
    width = max(len(row) for row in rows)
    return torch.tensor([(*row, *[row[-1] if fill is None else fill] * (width - len(row))) for row in rows])


def _nearest_host(placement: Placement) -> torch.Tensor:
    """Return [D, E], the physical expert to which each rank sends: its own if it hosts the expert, else the primary."""
    primary = [placement.physical(rank, expert) for expert, rank in enumerate(placement.primary)]
    target_DE = torch.tensor(primary).repeat(placement.num_ranks, 1)
    experts_P = torch.tensor(placement.expert_of_physical)
    hosting = (experts_P >= 0).nonzero().squeeze(1)
    target_DE[hosting // placement.slots_per_rank, experts_P[hosting]] = hosting
    return target_DE


def _share_proportionally(
    counts_DE: torch.Tensor, placement: Placement, shared: Sequence[int], tokens_DP: torch.Tensor
) -> None:
    """Overwrite the tokens of the `shared` experts (those with several hosts) by FlexMoE's Algorithm 3.

    Tokens are whole: capacities are rounded by largest remainder, and each source in turn splits the tokens that it
    cannot compute itself over the availability that earlier sources have left. Thus every host computes its capacity
    exactly; independent splits would round the same way on every source, towards the same host.
    """
    counts_DM = counts_DE[:, shared]
    assert int(counts_DM.sum(0).max()) < 2**31, "a product of two counts fits an int64"
    physicals_MK = pad_rows([placement.physicals[expert] for expert in shared])
    ranks_MK = physicals_MK // placement.slots_per_rank
    copies_MK = pad_rows([tuple(Counter(placement.hosts[expert]).values()) for expert in shared], fill=0)

    # Lines 2-3: a vExpert's capacity is an even share of its expert's tokens; a host's, the sum over its vExperts
    capacity_MK = largest_remainder(counts_DM.sum(0), copies_MK)
    # Lines 4-5: locality first
    local_MK = torch.minimum(capacity_MK, counts_DM.T.gather(1, ranks_MK))
    left_MD = counts_DM.T.scatter_add(1, ranks_MK, -local_MK)
    # Lines 6-9: the rest in proportion to the hosts' availability
    available_MK = capacity_MK - local_MK
    sent_DMK = counts_DM.new_zeros(placement.num_ranks, *available_MK.shape)
    for source, left_M in enumerate(left_MD.unbind(1)):
        sent_DMK[source] = largest_remainder(left_M, available_MK)
        available_MK = available_MK - sent_DMK[source]
    sent_DMK.scatter_add_(0, ranks_MK.unsqueeze(0), local_MK.unsqueeze(0))

    # Added, not assigned: rows end in copies of their last host, with no tokens
    index_D_MK = physicals_MK.view(1, -1).expand(placement.num_ranks, -1)
    tokens_DP.scatter_(1, index_D_MK, 0).scatter_add_(1, index_D_MK, sent_DMK.flatten(1))


def largest_remainder(amount_M: torch.Tensor, weight_MK: torch.Tensor) -> torch.Tensor:
    """Split each amount in proportion to its weights into whole numbers that sum to it: [M, K] int64.

    Each share is its quota, rounded up where the remainders are largest (first ones among equals) and down elsewhere. A
    weight of zero gets nothing. `amount_M` is zero wherever all weights are zero.
    """
    total_M1 = weight_MK.sum(1, keepdim=True).clamp(min=1)
    product_MK = amount_M.unsqueeze(1) * weight_MK
    share_MK = product_MK // total_M1
    order_MK = (product_MK - share_MK * total_M1).argsort(dim=1, descending=True, stable=True)
    missing_M1 = amount_M.unsqueeze(1) - share_MK.sum(1, keepdim=True)
    one_more_MK = torch.arange(weight_MK.shape[1]) < missing_M1
    return share_MK.scatter_add_(1, order_MK, one_more_MK.to(share_MK.dtype))
