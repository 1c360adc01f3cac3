"""What a layer sends where, decided before anything moves.

Shape suffixes: D expert-parallel ranks, E logical experts, P physical experts (rank, slot), S slots per rank.
"""

from dataclasses import dataclass

import torch

from megatron_balance.placement.placement import Placement


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Tokens from every source rank to every physical expert, for one layer and one forward pass."""

    placement: Placement

    tokens_DP: torch.Tensor
    """[D, P] int64 on the host: copies of tokens that source rank d sends to physical expert p."""

    def input_splits(self, rank: int) -> list[int]:
        """[D]: tokens that `rank` sends to each rank."""
        return self.tokens_DP[rank].view(self.placement.num_ranks, -1).sum(1).tolist()

    def output_splits(self, rank: int) -> list[int]:
        """[D]: tokens that `rank` receives from each rank."""
        return self.received_DS(rank).sum(1).tolist()

    def received_DS(self, rank: int) -> torch.Tensor:
        """[D, S]: tokens that `rank` receives from each source for each of its slots."""
        slots = self.placement.slots_per_rank
        return self.tokens_DP[:, rank * slots : (rank + 1) * slots]

    def tokens_per_slot(self, rank: int) -> torch.Tensor:
        """[S]: tokens that each slot of `rank` computes."""
        return self.received_DS(rank).sum(0)


def make_plan(counts_DE: torch.Tensor, placement: Placement) -> DispatchPlan:
    """Share each source rank's tokens among the hosts of the experts that they chose.

    Args:
        counts_DE: [D, E] int64 on the host, the load matrix: tokens that source rank d routed to expert e.
        placement: hosts of every expert; the same on all ranks, so that all ranks make the same plan.
    """
    assert placement.is_identity, "only the owner hosts an expert"
    assert counts_DE.shape == (placement.num_ranks, placement.num_experts)
    return DispatchPlan(placement, counts_DE)
