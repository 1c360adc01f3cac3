"""Policies that copy experts to all ranks: FasterMoE, and top2 and top3, Pro-Prophet's baselines (Section VI)."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from megatron_balance.cost.loads import by_microbatch
from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.interface import Policy, owners_host


def _shadows(counts: np.ndarray, current: Placement) -> Iterator[list[tuple[int, int]]]:
    """Yield the guests (expert, rank) that put the 1, 2, ... hottest experts on all ranks with a free slot."""
    tokens_E = by_microbatch(counts).sum((0, 1))
    free_D = np.full(current.num_ranks, current.guest_slots)
    additions: list[tuple[int, int]] = []
    for expert in np.argsort(-tokens_E, kind="stable")[: np.count_nonzero(tokens_E)].tolist():
        ranks = [rank for rank in free_D.nonzero()[0].tolist() if rank != current.owner(expert)]
        free_D[ranks] -= 1
        additions += [(expert, rank) for rank in ranks]
        yield [*additions]


class FasterMoE(Policy):
    """Copies the hottest experts to all ranks, one after the other, as long as the cost model predicts a gain."""

    name = "fastermoe"

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        best = owners_host(current)
        seconds = cost.layer_seconds(counts, best)
        for additions in _shadows(counts, current):
            candidate = owners_host(current, additions)
            shadowed = cost.layer_seconds(counts, candidate)
            if shadowed >= seconds:
                break
            best = candidate
            seconds = shadowed
        return best


class TopK(Policy):
    """Copies the k experts with the most tokens to every rank with a free guest slot, regardless of the cost."""

    k: int

    def check(self, owners: Placement) -> None:
        needed = min(self.k, owners.num_experts - owners.home_slots)
        if owners.guest_slots < needed:
            raise ValueError(
                f"--balance-guest-slots {owners.guest_slots}: --balance-policy {self.name} copies {self.k} experts to "
                f"every rank; give --balance-guest-slots {needed}"
            )

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        return owners_host(current, [[], *islice(_shadows(counts, current), self.k)][-1])


class Top2(TopK):
    """Copies the two experts with the most tokens to every rank with a free guest slot, regardless of the cost."""

    name = "top2"
    k = 2


class Top3(TopK):
    """Copies the three experts with the most tokens to every rank with a free guest slot, regardless of the cost."""

    name = "top3"
    k = 3
