"""FasterMoE's dynamic shadowing, Pro-Prophet's baseline (its Section VI)."""

from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.interface import Policy, everywhere, hottest_first, owners_host


@dataclass(frozen=True)
class FasterMoE(Policy):
    """Copies the hottest experts to all ranks, one after the other, as long as the cost model predicts a gain."""

    name = "fastermoe"

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`. A rank without a free guest slot gets no copy."""
        best = owners_host(current)
        seconds = cost.layer_seconds(counts, best)
        free_D = np.full(current.num_ranks, current.guest_slots)
        additions: list[tuple[int, int]] = []
        for expert in hottest_first(counts):
            ranks = everywhere(current.owner(expert), free_D)
            if not ranks:
                break
            free_D[ranks] -= 1
            additions += [(expert, rank) for rank in ranks]
            candidate = owners_host(current, additions)
            shadowed = cost.layer_seconds(counts, candidate)
            if shadowed >= seconds:
                break
            best = candidate
            seconds = shadowed
        return best
