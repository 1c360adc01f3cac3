"""The k hottest experts on all ranks: Pro-Prophet's comparison policies top2 and top3 (Section VI, Fig. 15)."""

from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.interface import Policy, everywhere, hottest_first, owners_host


@dataclass(frozen=True)
class TopK(Policy):
    """Copies the k experts with the most tokens to every rank with a free guest slot, regardless of the cost."""

    k: int

    def check(self, owners: Placement) -> None:
        """See `Policy.check`."""
        needed = min(self.k, owners.num_experts - owners.home_slots)
        if owners.guest_slots < needed:
            raise ValueError(
                f"--balance-guest-slots {owners.guest_slots}: --balance-policy {self.name} copies {self.k} experts to "
                f"every rank; give --balance-guest-slots {needed}"
            )

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`."""
        free_D = np.full(current.num_ranks, current.guest_slots)
        additions = []
        for expert in hottest_first(counts)[: self.k]:
            ranks = everywhere(current.owner(expert), free_D)
            free_D[ranks] -= 1
            additions += [(expert, rank) for rank in ranks]
        return owners_host(current, additions)


@dataclass(frozen=True)
class Top2(TopK):
    """Copies the two experts with the most tokens to every rank with a free guest slot, regardless of the cost."""

    name = "top2"

    k: int = 2


@dataclass(frozen=True)
class Top3(TopK):
    """Copies the three experts with the most tokens to every rank with a free guest slot, regardless of the cost."""

    name = "top3"

    k: int = 3
