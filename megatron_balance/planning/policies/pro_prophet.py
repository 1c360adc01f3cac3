"""Pro-Prophet's planner (Algorithm 1): a greedy search for a communication-efficient placement.

A is the number of candidate guests of one expert.
"""

import math
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.transfers import LinkLoads, route_of
from megatron_balance.planning.policies.interface import Policy, hottest_first, owners_host

CONFIRMED = 20
"""Number of guests, over all placements that are timed exactly; the most promising placements come first."""

Guests = list[tuple[int, list[int]]]
"""(expert, guest ranks) pairs in the order of selection."""


@dataclass(frozen=True)
class ProProphet(Policy):
    """Copies the heaviest experts of the heaviest ranks to the ranks that hold most of their tokens.

    Algorithm 1, extended to ranks that own several experts: take the heaviest rank, then its heaviest expert not yet
    selected. The number of guests (the paper's D - n) is chosen for each expert, within the guest slots and within a
    bound on the experts that cross one link. That bound replaces the paper's n. The search runs with several bounds,
    and also starting from the hottest experts on all ranks; the fastest placement that it passes, by the cost model, is
    the plan. So a plan is never slower, by the cost model, than no guests at all.
    """

    name = "pro_prophet"
    options = MappingProxyType({"alpha": "balance_alpha"})

    alpha: float = 0.5
    """Eq. 7: loads count as balanced once max(H) - min(H) < alpha * I / E."""

    min_gain: float = 0.001
    """Share of the layer's time that more guests must save, because the cost model omits part of their cost."""

    budget: int = 16
    """Number of experts examined in all searches together, which bounds planning time at any size."""

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ValueError(f"--balance-alpha {self.alpha}: give at least 0")

    def plan(self, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`."""
        start = _Start(counts_DE, current)
        spread = self.alpha * counts_DE.sum() / current.num_experts
        limit, left, found = _Search(start, cost).seconds(), self.budget, []
        runs = _runs(current, cost.links)
        for index, (everywhere, bound) in enumerate(runs):
            # The first search has no bound and may examine the most experts
            share = left // 2 if index == 0 and len(runs) > 1 else left // (len(runs) - index)
            search = _Search(start, cost, bound, everywhere)
            found += search.run(spread, limit, share, self.min_gain)
            left -= search.looked
        best = current if current.is_identity else owners_host(current)
        confirmed = 0
        for estimate, guests in sorted(found, key=itemgetter(0)):
            if estimate >= limit or confirmed >= CONFIRMED:
                break
            # The search counts tokens by Pro-Prophet's rule, regardless of the split
            planned = owners_host(current, [(expert, rank) for expert, ranks in guests for rank in ranks])
            best, limit = min((best, limit), (planned, cost.layer_seconds(counts_DE, planned)), key=itemgetter(1))
            confirmed += planned.added_hosts
        return best


def _runs(current: Placement, links: str) -> list[tuple[int, float]]:
    """Return the searches to run: (number of hottest experts copied everywhere first, bound on experts per link)."""
    num_ranks, slots = current.num_ranks, current.guest_slots
    if not slots:
        return []
    bounds: list[float] = [math.inf]
    if links == "relay":
        # No rank receives more
        bounds += range(1, slots + 1)
    elif links == "direct":
        # Every number for few ranks, powers of two for many
        bounds += range(1, num_ranks) if num_ranks <= 8 else [2**power for power in range((num_ranks - 1).bit_length())]
    return [(0, bound) for bound in bounds] + [(hottest, math.inf) for hottest in range(1, slots + 1)]


class _Start:
    """Loads of the ranks while every expert is computed by its owner."""

    def __init__(self, counts_DE: np.ndarray, current: Placement) -> None:
        num_ranks = current.num_ranks
        self.counts_ED = np.ascontiguousarray(counts_DE.T, dtype=np.float64)
        owner_E, tokens_E = owners(current), counts_DE.sum(0)
        own_D = np.bincount(owner_E, weights=self.counts_ED[np.arange(len(owner_E)), owner_E], minlength=num_ranks)
        self.computed_D = np.bincount(owner_E, weights=tokens_E, minlength=num_ranks)
        self.received_D = self.computed_D - own_D
        self.sent_D = counts_DE.sum(1) - own_D
        self.free_D = np.full(num_ranks, current.guest_slots)
        heaviest_first = np.lexsort((-tokens_E, owner_E)).reshape(num_ranks, -1)
        self.experts = heaviest_first.tolist()
        """Experts of each rank, heaviest first."""
        self.owners = owner_E.tolist()
        self.hottest = hottest_first(counts_DE)


class _Search:
    """One run of Algorithm 1: loads under the experts selected so far, updated with each selection."""

    def __init__(self, start: _Start, cost: CostModel, bound: float = math.inf, everywhere: int = 0) -> None:
        self.cost, self.bound, self.counts_ED = cost, bound, start.counts_ED
        self.computed_D, self.received_D = start.computed_D.copy(), start.received_D.copy()
        self.sent_D, self.free_D = start.sent_D.copy(), start.free_D.copy()
        self.experts, self.owners = start.experts, start.owners
        self.next = [0] * len(start.experts)
        """Position of each rank's heaviest expert not yet examined."""
        self.everywhere = start.hottest[:everywhere]
        """Experts that are copied to all ranks first; the search skips them afterwards."""
        self.hottest = iter(self.everywhere)
        self.mean = float(self.computed_D.mean())
        num_ranks = len(self.computed_D)
        self.in_D, self.out_D = np.zeros(num_ranks), np.zeros(num_ranks)
        """Experts that each rank receives and sends."""
        self.chains = LinkLoads(num_ranks)
        """Loads of chains; the cost model finds better routes where many ranks receive small experts."""
        self.sent = 0.0, 0.0
        """Seconds of Trans and Agg."""
        self.selected: Guests = []
        self.looked = 0

    def run(self, spread: float, limit: float, budget: int, min_gain: float) -> list[tuple[float, Guests]]:
        """Select experts until the ranks are balanced, nothing helps or `budget` experts are examined.

        Returns:
            Seconds and guests of the fastest prefix; empty if none takes less than `limit` seconds.
        """
        best, kept = limit, 0
        while not self._is_balanced(spread) and self._floor() < best and self._add_guests(budget):
            seconds = self.seconds()
            if seconds < best * (1 - min_gain):
                best, kept = seconds, len(self.selected)
        return [(best, self.selected[:kept])] if kept else []

    def _floor(self) -> float:
        """Return a lower bound on the seconds with more guests: even loads, no exchange, the experts already sent."""
        return float(self.cost.time_of(0.0, self.mean, *self.sent).total)

    def seconds(self) -> float:
        """Return the seconds of Eq. 6 or 8 for the current loads."""
        exchanged = max(self.received_D.max(), self.sent_D.max())
        return float(self.cost.time_of(exchanged, self.computed_D.max(), *self.sent).total)

    def _is_balanced(self, spread: float) -> bool:
        """Return whether Eq. 7 holds; equal loads are balanced even if alpha is 0."""
        difference = float(self.computed_D.max() - self.computed_D.min())
        return difference < spread or difference == 0

    def _add_guests(self, budget: int) -> bool:
        """Select the next expert and its guests; return False if no expert of the heaviest rank helps."""
        for expert in self.hottest:
            owner, wanted_D = self.owners[expert], (self.free_D > 0) & (self.counts_ED[expert] > 0)
            wanted_D[owner] = False
            if wanted_D.any():
                self._apply(owner, expert, wanted_D.nonzero()[0])
                return True
        heaviest = int(self.computed_D.argmax())
        while self.next[heaviest] < len(self.experts[heaviest]) and self.looked < budget:
            expert = self.experts[heaviest][self.next[heaviest]]
            self.next[heaviest] += 1
            if expert in self.everywhere:
                continue
            self.looked += 1
            guests = self._choose_guests(heaviest, expert)
            if len(guests):
                self._apply(heaviest, expert, guests)
                return True
        return False

    def _choose_guests(self, owner: int, expert: int) -> np.ndarray:
        """Return the guests that minimize the time of owner and guests: the ranks with most of the expert's tokens.

        Ties go to fewer guests. Other ranks are not counted: with several heavy ranks, relieving one alone would not
        change the maximum.
        """
        counts_D, computed_D = self.counts_ED[expert], self.computed_D
        heaviest = computed_D[owner]
        loads_D = computed_D + counts_D
        # A rank that would become as heavy as the owner cannot help
        (candidates_A,) = ((self.free_D > 0) & (counts_D > 0) & (loads_D < heaviest)).nonzero()
        order_A = candidates_A[self._preference(counts_D[candidates_A], loads_D[candidates_A])]
        if self.bound < math.inf:
            order_A = self._within_bound(owner, order_A)
        if not len(order_A):
            return order_A
        left_A = -counts_D[order_A].cumsum()
        computed_A = np.maximum(heaviest + left_A, np.maximum.accumulate(loads_D[order_A]))
        exchanged_A = np.maximum(self.received_D[owner] + left_A, self.sent_D.max())
        trans_A, agg_A = map(np.maximum, self.sent, self._seconds_to(owner, len(order_A)))
        seconds_A = self.cost.time_of(exchanged_A, np.maximum(computed_A, self.mean), trans_A, agg_A).total
        return order_A[: int(seconds_A.argmin()) + 1]

    def _preference(self, counts_A: np.ndarray, loads_A: np.ndarray) -> np.ndarray:
        """Return the order of candidates: most tokens of the expert, then the lightest, then the lowest index."""
        return np.lexsort((loads_A, -counts_A))

    def _within_bound(self, owner: int, order_A: np.ndarray) -> np.ndarray:
        """Return the guests with which no link carries more experts than the bound."""
        left = self.bound - self.out_D[owner]
        order_A = order_A[self.in_D[order_A] < self.bound]
        if self.cost.links == "relay":
            return order_A[self.out_D[order_A] < self.bound] if left > 0 else order_A[:0]
        return order_A[: max(0, int(left))]

    def _seconds_to(self, owner: int, candidates: int) -> tuple[np.ndarray, np.ndarray]:
        """Return [A] seconds of Trans and Agg with 1 .. A guests of the owner's next expert, without others' chains."""
        guests_A = 1.0 + np.arange(candidates)
        if self.cost.links == "average":
            return self._seconds((self.in_D.sum() + guests_A) / len(self.in_D), 1)
        if self.cost.links == "direct":
            return self._seconds(self.out_D[owner] + guests_A, 1)
        experts = self.out_D[owner] + 1
        chunks_A = self.cost.best_chunks(experts, guests_A - 1)
        return self._seconds(np.maximum(experts * chunks_A, chunks_A + guests_A - 1), chunks_A)

    def _seconds(self, rounds: Any, chunks: Any) -> tuple[Any, Any]:
        return self.cost.trans_seconds(rounds, chunks), self.cost.agg_seconds(rounds, chunks)

    def _apply(self, owner: int, expert: int, guests: np.ndarray) -> None:
        """Move guests' own tokens of an expert from its owner to them."""
        moved = self.counts_ED[expert, guests]
        total = moved.sum()
        self.computed_D[owner] -= total
        self.received_D[owner] -= total
        self.computed_D[guests] += moved
        self.sent_D[guests] -= moved
        self.free_D[guests] -= 1
        self._send(owner, guests)
        self.selected.append((expert, guests.tolist()))

    def _send(self, owner: int, guests: np.ndarray) -> None:
        """Add an expert's transfers to its guests to the link loads."""
        self.in_D[guests] += 1
        if self.cost.links == "relay":
            chain = route_of(
                owner, guests.tolist(), num_ranks=len(self.in_D), node_size=self.cost.profile.node_size, fanout=1
            )
            self.chains.add(chain)
            self.out_D[[link.source for link in chain]] += 1
            chunks, rounds = self.cost.pieces(self.chains)
            self.sent = self._seconds(rounds, chunks)
            return
        self.out_D[owner] += len(guests)
        average = self.cost.links == "average"
        messages = self.in_D.sum() / len(self.in_D) if average else max(self.in_D.max(), self.out_D.max())
        self.sent = self._seconds(float(messages), 1)
