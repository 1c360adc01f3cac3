"""Selections that greedy searches find on their way to even loads."""

from collections.abc import Iterable, Iterator

import numpy as np

from megatron_balance.cost.core import COMPUTED
from megatron_balance.planning.leveling import ALL_NODES, ANYWHERE, NEAR, Moves, level
from megatron_balance.planning.selection import Selection

BUSIEST = (1.02, 1.25, 1.6)
"""Loads of the heaviest rank over the mean that searches aim at."""


def leveled(plain: Selection, *, even: bool = False) -> Iterator[Moves]:
    """Yield the moves of searches that aim at more or less even loads, with guests on one node or on several.

    Args:
        plain: a selection without guests.
        even: whether hosts share tokens evenly under any split.
    """
    cost = plain.layer.cost
    current = plain.current
    local = cost.split == "local_first" and not even
    home_DH = np.array(current.home)
    node_size = cost.network.node_size
    rate_D = cost.prices[1]
    for counts_ED in _totals(plain):
        tokens_E = counts_ED.sum(1)
        loads_D = tokens_E[home_DH].sum(1)
        heaviest = float((loads_D / cost.rate_D).max())
        experts_DH = np.take_along_axis(np.sort(home_DH), np.argsort(tokens_E[np.sort(home_DH)], kind="stable"), 1)
        for reach in (ANYWHERE, ALL_NODES, NEAR) if cost.network.has_both_levels else (ANYWHERE,):
            for busiest in (share * plain.layer.mean for share in BUSIEST):
                if busiest < heaviest:
                    limits = busiest, reach, counts_ED if local else counts_ED[:0]
                    yield Moves(*level(rate_D, plain.free_D, node_size, experts_DH, tokens_E, loads_D, *limits))


def _totals(plain: Selection) -> Iterator[np.ndarray]:
    """Yield loads [E, D] that stand for all microbatches: their sum, and each owner's heaviest one, as large as all."""
    counts_EBD = plain.layer.counts_EBD
    owner_E = plain.layer.owner_E
    yield counts_EBD.sum(1)
    if counts_EBD.shape[1] > 1:
        tokens_B = counts_EBD.sum((0, 2))
        scale_B = tokens_B.sum() / np.maximum(tokens_B, 1)
        heaviest_D = (plain.loads_FBD[COMPUTED] * scale_B[:, None]).argmax(0)
        heaviest_E = heaviest_D[owner_E]
        yield counts_EBD[np.arange(len(heaviest_E)), heaviest_E] * scale_B[heaviest_E][:, None]


def fastest(plain: Selection, searches: Iterable[Moves], min_gain: float, number: int) -> list[Selection]:
    """Return the fastest selections on the way of different searches, the fastest first.

    Args:
        plain: a selection without guests.
        min_gain: share of the seconds that further moves must save.
        number: maximum number of selections.
    """
    searches = [search for search in searches if len(search.expert_M)]
    if not searches:
        return []
    expert_A, primary_A, guests_AD = (np.concatenate(parts) for parts in zip(*searches, strict=True))
    shares_AD = (guests_AD | plain.layer.owned_ED[expert_A]).astype(np.int64)
    stops = np.cumsum([len(search.expert_M) for search in searches])
    begins_A = np.zeros(len(expert_A), dtype=bool)
    begins_A[[0, *stops[:-1]]] = True
    seconds_A = plain.tried(expert_A[None], shares_AD[None], primary_A[None], begins_A).seconds_A
    found: dict[float, slice] = {}
    for first, stop in zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True):
        own_A = seconds_A[first:stop]
        kept = int((own_A <= own_A.min() * (1 + min_gain)).argmax())
        found.setdefault(float(own_A[kept]), slice(first, first + kept + 1))
    best = (found[seconds] for seconds in sorted(found)[:number])
    return [plain.with_guests(expert_A[part], shares_AD[part], primary_A[part]) for part in best]
