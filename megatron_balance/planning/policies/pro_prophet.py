"""Pro-Prophet's planner (Algorithm 1): a greedy search for a communication-efficient placement."""

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.leveling import Moves
from megatron_balance.planning.policies.interface import Policy, owners_host
from megatron_balance.planning.searches import fastest, leveled
from megatron_balance.planning.selection import Selection, prepare

CONFIRMED = 6
"""Number of selections on few ranks that are timed with all messages."""

FINALISTS = 2
"""Number of plans on few ranks that are timed with all ways to send experts."""

UNSURE = 0.15
"""Share by which the search may underestimate the time of a selection."""

FEW_RANKS = 32
"""Number of ranks up to which there is time to look for guests from scratch, too."""


@dataclass(frozen=True)
class ProProphet(Policy):
    """Copies the heaviest experts of the heaviest ranks to the lightest ranks, or to those that hold their tokens.

    Algorithm 1, extended to ranks that own several experts and to nodes: take the heaviest rank, then its heaviest
    expert not yet examined, and give it the fewest guests (the paper's D - n) with which owner and guests have room for
    their shares. Searches differ in how even the loads become, and in where guests may be: anywhere, on each node, or
    on the owner's node. An alternative are the hottest experts on all ranks. The cost model times every step of every
    search. The fastest one is improved: more experts of the slowest ranks get guests, and some choices are repeated,
    given all others, each time with the guests with which owner and guests are fastest, Trans and Agg included. On few
    ranks, this also starts without guests. The most promising selections are timed with all messages, so that a plan is
    never slower than no guests at all. On many ranks this is left out where Trans and Agg could take DOUBT times as
    long as on the busiest rank.
    """

    name = "pro_prophet"
    split = "proportional"
    options = MappingProxyType({"alpha": "balance_alpha"})

    alpha: float = 0.5
    """Eq. 7: loads count as balanced once max(H) - min(H) < alpha * I / E."""

    min_gain: float = 0.001
    """Share of the layer's time that more guests must save, because the cost model omits part of their cost."""

    budget: int = 4
    """Number of experts that are examined to improve a selection, twice as many from scratch. Like `repeats`, it bounds
    planning time at any size."""

    repeats: int = 1
    """Number of choices that are repeated to improve a selection."""

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ValueError(f"--balance-alpha {self.alpha}: give at least 0")
        prepare()

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`."""
        alone = current if current.is_identity else owners_host(current)
        if not current.guest_slots or current.num_ranks == 1:
            return alone
        plain = Selection.plain(counts, current, cost)
        limit = plain.seconds
        if plain.is_balanced(self.alpha):
            return alone
        few = current.num_ranks <= FEW_RANKS
        found = fastest(plain, [*leveled(plain), _everywhere(plain)], self.min_gain, CONFIRMED if few else 1)
        for start in [*found[:1], plain] if few else found[:1]:
            budget = self.budget if start.chosen else 2 * self.budget
            better = start.extended(budget, self.min_gain, self.alpha).repeated(self.repeats, self.min_gain)
            if better.seconds < start.seconds * (1 - self.min_gain):
                found.append(better)
        found = sorted((selection for selection in found if selection.chosen), key=lambda each: each.seconds)
        # The search counts the busiest rank's messages, the cost model also those before and after them on their routes
        promising = min(limit, found[0].seconds * (1 + UNSURE)) if found else limit
        found = [selection for selection in found[: CONFIRMED if few else 1] if selection.seconds < promising]
        if not few and found and found[0].at_most < limit:
            return found[0].placement()
        if len(found) > 1:
            found = found[:FINALISTS]
        timed = [(limit, alone), *(selection.timed() for selection in found)]
        return min(timed, key=lambda pair: pair[0])[1]


def _everywhere(plain: Selection) -> Moves:
    """Return the moves that give the hottest experts guests on all ranks."""
    layer = plain.layer
    free_D = plain.free_D
    expert_M = np.argsort(-layer.tokens_E, kind="stable")[: int(free_D.max())]
    expert_M = expert_M[layer.tokens_E[expert_M] > 0]
    guests_MD = ~layer.owned_ED[expert_M]
    guests_MD &= guests_MD.cumsum(0) <= free_D
    kept_M = guests_MD.any(1)
    return Moves(expert_M[kept_M], layer.owner_E[expert_M[kept_M]], guests_MD[kept_M])
