"""What a policy is, and what policies share.

Shape suffixes: D expert-parallel ranks, E logical experts.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from megatron_balance.placement.cost_model import CostModel
from megatron_balance.placement.placement import Placement


class Policy(Protocol):
    """Decides who hosts which experts. Every rank runs it on the same values and must get the same result.

    It may have an attribute `split`, how hosts share an expert's tokens where --balance-token-split is `policy`: a name
    in splits.SPLITS; `local_first` without it.
    """

    def plan(self, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """The next placement: the same owners and guest slots as `current`, other hosts.

        Pure and deterministic: ties go to the lower index. It never raises for a legal load.

        Args:
            counts_DE: [D, E] int64, the expected load matrix: tokens that source rank d routes to expert e.
            current: the placement in use.
            cost: seconds of the layer under a placement.
        """
        ...


def owners_host(current: Placement, additions: Iterable[tuple[int, int]] = ()) -> Placement:
    """The placement where every expert is hosted by its owner, its primary, and by the ranks added.

    Args:
        current: gives owners and guest slots; an expert that stays a guest keeps its slot.
        additions: (expert, rank) pairs, within the free guest slots of a placement without guests.
    """
    hosts = [[current.owner(expert)] for expert in range(current.num_experts)]
    primary = [ranks[0] for ranks in hosts]
    for expert, rank in additions:
        hosts[expert].append(rank)
    return current.rehost(hosts, primary)


def lend(current: Placement, hosts_E: np.ndarray) -> Placement:
    """The placement in which each expert has one host, which is its primary; guests stay in their slots."""
    hosts = hosts_E.tolist()
    return current.rehost([(rank,) for rank in hosts], hosts)


def everywhere(owner: int, free_D: np.ndarray) -> list[int]:
    """Ranks that an expert copied to all ranks goes to: all with a free guest slot, except its owner."""
    return [rank for rank, slots in enumerate(free_D.tolist()) if slots and rank != owner]


def hottest_first(counts_DE: np.ndarray) -> list[int]:
    """Experts by tokens, most first; those without tokens are left out."""
    tokens_E = counts_DE.sum(0)
    return [expert for expert in np.argsort(-tokens_E, kind="stable").tolist() if tokens_E[expert]]
