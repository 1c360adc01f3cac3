"""Selections that greedy searches find on their way to even loads.

M counts the moves of all searches, in order; K different experts among them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.loads import COMPUTED, expert_loads
from megatron_balance.planning.leveling import ALL_NODES, ANYWHERE, NEAR, Move, Ranks, level
from megatron_balance.planning.selection import Chosen, Selection

BUSIEST = (1.02, 1.25, 1.6)
"""Loads of the heaviest rank over the mean that searches aim at."""


def leveled(plain: Selection, *, even: bool = False) -> Iterator[list[Move]]:
    """Yield the moves of searches that aim at more or less even loads, with guests on one node or on several.

    Args:
        plain: a selection without guests.
        even: whether hosts share tokens evenly under any split.
    """
    cost, network, num_ranks = plain.cost, plain.cost.network, len(plain.free_D)
    nodes = [range(first, min(first + network.node_size, num_ranks)) for first in network.first_N.tolist()]
    ranks = Ranks(cost.rate_D.tolist(), plain.free_D.tolist(), nodes, network.node_D.tolist())
    for counts_ED in _totals(plain):
        tokens_E = counts_ED.sum(1)
        loads_D = np.bincount(plain.owner_E, tokens_E, minlength=num_ranks)
        heaviest, loads, sizes = float((loads_D / cost.rate_D).max()), loads_D.tolist(), tokens_E.tolist()
        experts = [sorted((sizes[expert], expert) for expert in row) for row in plain.experts]
        tokens = counts_ED.tolist() if cost.split == "local_first" and not even else ()
        for reach in (ANYWHERE, ALL_NODES, NEAR) if network.has_both_levels else (ANYWHERE,):
            for busiest in (share * plain.mean for share in BUSIEST):
                if busiest < heaviest:
                    yield level(ranks, experts, loads, busiest, reach=reach, tokens=tokens)


def _totals(plain: Selection) -> Iterator[np.ndarray]:
    """Yield loads [E, D] that stand for all microbatches: their sum, and each owner's heaviest one, as large as all."""
    yield plain.counts_EBD.sum(1)
    if plain.counts_EBD.shape[1] > 1:
        tokens_B = plain.counts_EBD.sum((0, 2))
        scale_B = tokens_B.sum() / np.maximum(tokens_B, 1)
        heaviest_D = (plain.loads_FBD[COMPUTED] * scale_B[:, None]).argmax(0)
        heaviest_E = heaviest_D[plain.owner_E]
        yield plain.counts_EBD[np.arange(len(heaviest_E)), heaviest_E] * scale_B[heaviest_E][:, None]


def fastest(plain: Selection, searches: Iterable[Sequence[Move]], min_gain: float, number: int) -> list[Selection]:
    """Return the fastest selections on the way of different searches, the fastest first.

    Args:
        plain: a selection without guests.
        min_gain: share of the seconds that further moves must save.
        number: maximum number of selections.
    """
    searches = [search for search in searches if search]
    if not searches:
        return []
    changes = _changes(plain, [move for search in searches for move in search])
    loads_MFBD, times_MD, extra_M = (np.empty_like(part) for part in changes[1:])
    stops = np.cumsum([len(search) for search in searches]).tolist()
    parts = [slice(stop - len(search), stop) for search, stop in zip(searches, stops, strict=True)]
    for part in parts:
        changes.loads_MFBD[part].cumsum(0, out=loads_MFBD[part])
        changes.times_MD[part].cumsum(0, out=times_MD[part])
        np.maximum.accumulate(changes.extra_M[part], out=extra_M[part])
    cost = plain.cost
    sent = cost.transport.seconds_of(times_MD.max(1), extra_M)
    seconds_M = cost.time_of(*cost.work_of(loads_MFBD + plain.loads_FBD), *sent).total
    found: dict[float, range] = {}
    for part in parts:
        own_M = seconds_M[part]
        kept = int((own_M <= own_M.min() * (1 + min_gain)).argmax())
        found.setdefault(float(own_M[kept]), range(part.start, part.start + kept + 1))
    return [plain.with_all(map(changes.choice, found[seconds])) for seconds in sorted(found)[:number]]


class _Changes(NamedTuple):
    """What each move changes, as in `Chosen`."""

    moves: Sequence[Move]
    loads_MFBD: np.ndarray
    times_MD: np.ndarray
    extra_M: np.ndarray

    def choice(self, row: int) -> tuple[int, Chosen]:
        """Return the expert and the guests of a move."""
        expert, guests, primary = self.moves[row]
        return expert, Chosen(guests, primary, self.loads_MFBD[row], self.times_MD[row], float(self.extra_M[row]))


def _changes(plain: Selection, moves: Sequence[Move]) -> _Changes:
    cost, ranks = plain.cost, len(plain.free_D)
    expert_M, primary_M = np.array([(move.expert, move.primary) for move in moves]).T
    owner_M, guests_MD = plain.owner_E[expert_M], np.zeros((len(moves), ranks), dtype=bool)
    rows = np.repeat(np.arange(len(moves)), [len(move.guests) for move in moves])
    guests_MD[rows, [rank for move in moves for rank in move.guests]] = True
    owned_MD, counts_MBD = owner_M[:, None] == np.arange(ranks), plain.counts_EBD[expert_M]
    loads_MFBD = expert_loads(cost.network, cost.split, counts_MBD, guests_MD | owned_MD, primary_M)
    _, row_K, kind_M = np.unique(expert_M, return_index=True, return_inverse=True)
    before_KFBD = expert_loads(cost.network, cost.split, counts_MBD[row_K], owned_MD[row_K], owner_M[row_K])
    return _Changes(moves, loads_MFBD - before_KFBD[kind_M], *cost.transport.link_times(owner_M, guests_MD))
