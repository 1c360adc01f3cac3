"""Pro-Prophet's planner (Algorithm 1): a greedy search for a communication-efficient placement.

M counts the moves of all searches, in order; K different experts among them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.loads import COMPUTED, expert_loads
from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.leveling import ALL_NODES, ANYWHERE, NEAR, Move, Ranks, level
from megatron_balance.planning.policies.interface import Policy, everywhere, hottest_first, owners_host
from megatron_balance.planning.selection import Chosen, Selection

BUSIEST = (1.02, 1.25, 1.6)
"""Loads of the heaviest rank over the mean that searches aim at."""

CONFIRMED = 3
"""Number of selections that the cost model times exactly."""

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
    never slower than no guests at all.
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

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`."""
        alone = current if current.is_identity else owners_host(current)
        if not current.guest_slots or current.num_ranks == 1:
            return alone
        plain = Selection(counts, current, cost)
        limit = plain.seconds()
        if plain.is_balanced(self.alpha):
            return alone
        found = _fastest(plain, [*_leveled(plain), _everywhere(plain)], self.min_gain)
        scratch = [plain] if current.num_ranks <= FEW_RANKS else []
        for start in [*found[:1], *scratch]:
            better = start.copy()
            better.select(self.budget if start.chosen else 2 * self.budget, self.min_gain, self.alpha)
            better.repeat(self.repeats, self.min_gain)
            if better.seconds() < start.seconds() * (1 - self.min_gain):
                found.append(better)
        found = sorted((selection for selection in found if selection.chosen), key=Selection.seconds)[:CONFIRMED]
        # The search counts the busiest rank's messages, the cost model also those before and after them on their routes
        promising = min(limit, found[0].seconds() * (1 + UNSURE)) if found else limit
        timed = [
            (selection.seconds_along_chains(), index)
            for index, selection in enumerate(found)
            if selection.seconds() < promising
        ]
        if not timed:
            return alone
        seconds, index = min(timed)
        planned = found[index].placement()
        # Chains are only one way to send experts
        return planned if seconds < limit or cost.layer_seconds(counts, planned) < limit else alone


def _leveled(plain: Selection) -> Iterator[list[Move]]:
    """Yield the moves of searches that aim at more or less even loads, with guests on one node or on several."""
    cost, network, num_ranks = plain.cost, plain.cost.network, len(plain.free_D)
    nodes = [range(first, min(first + network.node_size, num_ranks)) for first in network.first_N.tolist()]
    ranks = Ranks(cost.rate_D.tolist(), plain.free_D.tolist(), nodes, network.node_D.tolist())
    for counts_ED in _totals(plain):
        tokens_E = counts_ED.sum(1)
        loads_D = np.bincount(plain.owner_E, tokens_E, minlength=num_ranks)
        heaviest, loads, sizes = float((loads_D / cost.rate_D).max()), loads_D.tolist(), tokens_E.tolist()
        experts = [sorted((sizes[expert], expert) for expert in row) for row in plain.experts]
        tokens = counts_ED.tolist() if cost.split == "local_first" else ()
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


def _everywhere(plain: Selection) -> list[Move]:
    """Return the moves that give the hottest experts guests on all ranks."""
    free_D, moves, owner = plain.free_D.copy(), list[Move](), plain.owner_E.tolist()
    for expert in hottest_first(plain.counts_EBD.transpose(1, 2, 0))[: int(free_D.max())]:
        if guests := everywhere(owner[expert], free_D):
            free_D[guests] -= 1
            moves.append(Move(expert, guests, owner[expert]))
    return moves


def _fastest(plain: Selection, searches: Sequence[Sequence[Move]], min_gain: float) -> list[Selection]:
    """Return the fastest selections on the way of different searches, the fastest first.

    A search goes on only while that saves `min_gain` of the seconds.
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
    # With many ranks, there is time for one
    number = CONFIRMED if len(plain.free_D) <= FEW_RANKS else 1
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
