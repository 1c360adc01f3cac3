"""Pro-Prophet's planner (Algorithm 1): a greedy search for a communication-efficient placement."""

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.hosting import Hosting, LayerLoad, prepare
from megatron_balance.planning.leveling import Copies, fastest, level, leveled
from megatron_balance.planning.policies.interface import Policy, owners_host

TARGETS = (1.01, 1.05, 1.12, 1.2, 1.35, 1.6, 2.0, 3.0)
"""Target loads of the heaviest rank, over the mean."""

RELIEVED = 0.9
"""Target load of the heaviest rank, over its load before, in a search that relieves it only a little."""

FINALISTS = 2
"""Number of plans for few ranks that are timed with all messages."""

FEW_RANKS = 32
"""Maximum number of ranks for which there is time to time all messages."""


@dataclass(frozen=True)
class ProProphet(Policy):
    """Copies the heaviest experts of the heaviest ranks to the lightest ranks, or to those that hold their tokens.

    Algorithm 1, extended to ranks that own several experts and to nodes: take the heaviest rank, then its heaviest
    expert not yet examined, and give it guests. The paper's n, the number of ranks without a copy, is a constant. Here,
    searches aim at different loads, and give an expert the fewest guests that suffice. They also differ in the ranks
    allowed for guests: all, on each node, or on the owner's node. Another candidate is the hottest experts on all
    ranks. The cost model times every step of every search. The fastest plans are timed with all messages, so that no
    plan is slower than no guests.
    """

    name = "pro_prophet"
    split = "proportional"
    options = MappingProxyType({"alpha": "balance_alpha"})

    alpha: float = 0.5
    """Eq. 7: loads count as balanced once max(H) - min(H) < alpha * I / E."""
    min_gain: float = 0.001
    """Share of the layer's time that more guests must save, because the cost model omits part of their cost."""

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ValueError(f"--balance-alpha {self.alpha}: give at least 0")
        prepare()
        level.prepare()

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        alone = current if current.is_identity else owners_host(current)
        if not current.guest_slots or current.num_ranks == 1:
            return alone
        plain = Hosting.alone(LayerLoad(counts, current, cost))
        if self._is_balanced(plain):
            return alone
        heaviest = float((plain.tokens_BD.sum(0) / cost.rate_D).max()) / plain.layer.mean
        searches = [*leveled(plain, plain.free_slots_D, (*TARGETS, RELIEVED * heaviest)), _everywhere(plain)]
        found = fastest(plain, searches, self.min_gain, FINALISTS)
        if current.num_ranks > FEW_RANKS:
            found = found[:1]
            if found and found[0].at_most < plain.seconds:
                return _placement(found[0])
        # The search counts only the busiest rank's messages; the cost model counts whole routes
        return min([alone, *map(_placement, found)], key=lambda placement: cost.layer_seconds(counts, placement))

    def _is_balanced(self, plain: Hosting) -> bool:
        """Return whether Eq. 7 holds in every microbatch; equal loads are always balanced."""
        layer = plain.layer
        spread_B = self.alpha * layer.counts_EBD.sum((0, 2)) / len(layer.owner_E)
        computed_BD = plain.tokens_BD / layer.cost.rate_D
        difference_B = computed_BD.max(-1) - computed_BD.min(-1)
        return bool(((difference_B < spread_B) | (difference_B == 0)).all())


def _placement(hosting: Hosting) -> Placement:
    return hosting.layer.placement.rehost(hosting.hosts(), hosting.primary_E.tolist())


def _everywhere(plain: Hosting) -> Copies:
    layer = plain.layer
    free_D = plain.free_slots_D
    expert_M = np.argsort(-layer.tokens_E, kind="stable")[: int(free_D.max())]
    expert_M = expert_M[layer.tokens_E[expert_M] > 0]
    guests_MD = ~layer.owned_ED[expert_M]
    guests_MD &= guests_MD.cumsum(0) <= free_D
    kept_M = guests_MD.any(1)
    return Copies(expert_M[kept_M], layer.owner_E[expert_M[kept_M]], guests_MD[kept_M])
