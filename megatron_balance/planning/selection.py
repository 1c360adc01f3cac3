"""Experts with guests, what they change, and the choice of one more expert's guests, given all others.

A is the number of candidate guests of one expert.
"""

import copy
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.loads import COMPUTED, by_microbatch, expert_loads, owner_loads
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import Placement

NEARLY = 0.95
"""Share of the slowest rank's time above which a rank is nearly as slow."""

LOANS = 4
"""Number of ranks that may become the only guest of an expert, the lightest first."""

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of guests that are tried for an expert, besides all ranks that may help."""


class Chosen(NamedTuple):
    """The guests of an expert, and what they change."""

    guests: list[int]
    primary: int
    """The host of the tokens of ranks that are not hosts: the owner, or the only guest."""
    loads_FBD: np.ndarray
    times_D: np.ndarray
    extra: float
    """As in `SendingModel.link_times`."""


class Selection:
    """Loads of the ranks under the guests selected so far; without any, owners compute all tokens."""

    def __init__(self, counts: np.ndarray, current: Placement, cost: CostModel, guest_slots: int | None = None) -> None:
        """
        Args:
            guest_slots: number of guests that a rank may have; None: one for each guest slot.
        """
        num_ranks = current.num_ranks
        self.current, self.cost = current, cost
        self.counts_EBD = np.ascontiguousarray(by_microbatch(counts).transpose(2, 0, 1), dtype=np.float64)
        self.owner_E, self.tokens_E = owners(current), self.counts_EBD.sum((1, 2))
        self.loads_FBD = owner_loads(cost.network, self.counts_EBD, self.owner_E)
        self.free_D = np.full(num_ranks, current.guest_slots if guest_slots is None else guest_slots)
        self.times_D = np.zeros(num_ranks)
        self.experts = np.lexsort((-self.tokens_E, self.owner_E)).reshape(num_ranks, -1).tolist()
        """Experts of each rank, heaviest first."""
        self.mean = float(self.tokens_E.sum() / cost.rate_D.sum())
        """Tokens per rank if all ranks computed equally long."""
        self.chosen: dict[int, Chosen] = {}
        self._seconds_BD: np.ndarray | None = None
        self._seconds: float | None = None

    def copy(self) -> "Selection":
        """Return the same selection, to be changed on its own."""
        other = copy.copy(self)
        other.free_D, other.chosen = self.free_D.copy(), self.chosen.copy()
        return other

    def with_all(self, choices: Iterable[tuple[int, Chosen]]) -> "Selection":
        """Return the selection after more choices, each with its expert."""
        other = self.copy()
        for expert, choice in choices:
            other.add(expert, choice)
        return other

    def add(self, expert: int, choice: Chosen) -> None:
        """Give an expert guests that has none."""
        self.loads_FBD, self.times_D = self.loads_FBD + choice.loads_FBD, self.times_D + choice.times_D
        self.free_D[choice.guests] -= 1
        self.chosen[expert] = choice
        self._seconds_BD = self._seconds = None

    def remove(self, expert: int) -> Chosen:
        """Take an expert's guests away, and return them."""
        choice = self.chosen.pop(expert)
        self.loads_FBD, self.times_D = self.loads_FBD - choice.loads_FBD, self.times_D - choice.times_D
        self.free_D[choice.guests] += 1
        self._seconds_BD = self._seconds = None
        return choice

    @property
    def seconds_BD(self) -> np.ndarray:
        """Seconds of each rank: see `CostModel.rank_seconds`."""
        if self._seconds_BD is None:
            self._seconds_BD = self.cost.rank_seconds(self.loads_FBD)
        return self._seconds_BD

    def seconds(self) -> float:
        """Return the seconds of the layer by Eq. 6 or 8, with Trans and Agg as on the busiest rank."""
        if self._seconds is None:
            sent = self.cost.transport.seconds_of(self.times_D.max(), self._extra())
            self._seconds = self._total(*sent)
        return self._seconds

    def seconds_along_chains(self) -> float:
        """Return the same, with all messages of Trans and Agg if every expert travels along a chain."""
        expert_M = np.repeat([*self.chosen], [len(choice.guests) for choice in self.chosen.values()])
        rank_M = np.array([rank for choice in self.chosen.values() for rank in choice.guests], dtype=np.int64)
        trans = agg = 0.0
        if len(rank_M):
            _, _, trans, agg = self.cost.transport.along_chains(self.owner_E[expert_M], expert_M, rank_M)
        return self._total(trans, agg)

    def _total(self, trans: float, agg: float) -> float:
        exchanging, computed = self.cost.work_of(self.loads_FBD)
        return float(self.cost.time_of(float(exchanging), float(computed), trans, agg).total)

    def placement(self) -> Placement:
        """Return the placement in which owners host, and the selected guests."""
        hosts = [[owner] for owner in self.owner_E.tolist()]
        primary = [ranks[0] for ranks in hosts]
        for expert, choice in self.chosen.items():
            hosts[expert] += choice.guests
            primary[expert] = choice.primary
        return self.current.rehost(hosts, primary)

    def is_balanced(self, alpha: float) -> bool:
        """Return whether Pro-Prophet's Eq. 7 holds in every microbatch; equal loads are always balanced."""
        spread_B = alpha * self.counts_EBD.sum((0, 2)) / len(self.counts_EBD)
        computed_BD = self.loads_FBD[COMPUTED] / self.cost.rate_D
        difference_B = computed_BD.max(-1) - computed_BD.min(-1)
        return bool(((difference_B < spread_B) | (difference_B == 0)).all())

    def select(self, budget: int, min_gain: float, alpha: float) -> None:
        """Select experts until the ranks are balanced, nothing helps or `budget` experts are examined.

        Without guests, ranks that are nearly as slow as the slowest have to be relieved together, so each of them adds
        to the budget. The selection ends with the fastest one on the way.
        """
        best, kept, seconds_BD = self.seconds(), len(self.chosen), self.seconds_BD
        waiting = [[expert for expert in reversed(row) if expert not in self.chosen] for row in self.experts]
        if not self.chosen:
            budget += int((seconds_BD >= NEARLY * seconds_BD.max(-1, keepdims=True)).any(0).sum()) - 1
        while budget and not self.is_balanced(alpha) and self._floor() < best * (1 - min_gain):
            place = self._slowest()
            if not waiting[place[1]]:
                break
            expert, budget = waiting[place[1]].pop(), budget - 1
            if (choice := self.choose(expert, place)) is None:
                continue
            self.add(expert, choice)
            if (seconds := self.seconds()) < best * (1 - min_gain):
                best, kept = seconds, len(self.chosen)
        for expert in [*self.chosen][kept:]:
            self.remove(expert)

    def repeat(self, budget: int, min_gain: float) -> None:
        """Choose the guests of some selected experts again, given all others, where that makes the layer faster."""
        best, waiting = self.seconds(), deque(self.chosen)
        for _ in range(min(budget, len(self.chosen))):
            expert = waiting.popleft()
            before = self.remove(expert)
            place = self._slowest()[0], int(self.owner_E[expert])
            if (choice := self.choose(expert, place)) is not None:
                self.add(expert, choice)
            if (seconds := self.seconds()) < best * (1 - min_gain):
                best = seconds
                continue
            if choice is not None:
                self.remove(expert)
            self.add(expert, before)

    def _floor(self) -> float:
        """Return a lower bound on the seconds with more guests: even loads, no exchange, the experts already sent."""
        sent = self.cost.transport.seconds_of(self.times_D.max(), self._extra())
        return float(self.cost.time_of(0.0, self.mean, *sent).total)

    def _extra(self) -> float:
        """Return the time on the other links of the longest chain."""
        return max((choice.extra for choice in self.chosen.values()), default=0.0)

    def _slowest(self) -> tuple[int, int]:
        """Return the microbatch and the rank with the most seconds above the mean."""
        over_BD = self.seconds_BD - self.seconds_BD.mean(-1, keepdims=True)
        microbatch, rank = divmod(int(over_BD.argmax()), over_BD.shape[-1])
        return microbatch, rank

    def choose(self, expert: int, place: tuple[int, int]) -> Chosen | None:
        """Return the guests that minimize the time of owner and guests; ties go to fewer guests.

        Other ranks are not counted: with several heavy ranks, relieving one alone would not change the maximum. Nor is
        what the owner's other experts take beyond the mean, because they are examined next.

        Args:
            place: a microbatch, and the expert's owner.
        """
        (microbatch, owner), cost, seconds_BD = place, self.cost, self.seconds_BD
        able_D = (self.free_D > 0) & (seconds_BD[microbatch] < seconds_BD[microbatch, owner])
        hosts_AD, primary_A = self._options(owner, expert, able_D, seconds_BD.sum(0))
        if len(hosts_AD) == 1:
            return None
        counts_ABD = np.broadcast_to(self.counts_EBD[expert], (len(hosts_AD), *self.counts_EBD.shape[1:]))
        loads_AFBD = expert_loads(cost.network, cost.split, counts_ABD, hosts_AD, primary_A)
        others_FBD, mean_B1 = self.loads_FBD - loads_AFBD[0], seconds_BD.mean(-1, keepdims=True)
        after_ABD = cost.rank_seconds(others_FBD + loads_AFBD)
        rest_B = cost.rank_seconds(others_FBD[..., owner, None], cost.rate_D[owner])[:, 0]
        after_ABD[..., owner] -= np.maximum(rest_B - mean_B1[:, 0], 0.0)
        involved_AB = np.where(hosts_AD[:, None], after_ABD, mean_B1).max(-1)
        guests_AD = hosts_AD.copy()
        guests_AD[:, owner] = False
        times_AD, extra_A = cost.transport.link_times(np.full(len(hosts_AD), owner), guests_AD)
        sent = cost.transport.seconds_of((self.times_D + times_AD).max(1), np.maximum(extra_A, self._extra()))
        best = int((involved_AB.sum(-1) + sum(cost.exposed(self.mean, *sent))).argmin())
        guests = guests_AD[best].nonzero()[0].tolist()
        if not guests:
            return None
        change = loads_AFBD[best] - loads_AFBD[0], times_AD[best], float(extra_A[best])
        return Chosen(guests, int(primary_A[best]), *change)

    def _options(
        self, owner: int, expert: int, able_D: np.ndarray, total_D: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return [A, D] sets of hosts and [A] their primaries; the first one is the owner alone.

        Guests are the lightest ranks, anywhere or on the owner's node. Under `local_first` they are the ranks with most
        of the expert's tokens, or one guest is the primary, which computes the tokens of all ranks that are not hosts.
        """
        tokens_D, local = self.counts_EBD[expert].sum(0), self.cost.split == "local_first"
        order_D = np.lexsort((total_D, -tokens_D if local else total_D, ~able_D))
        if local:
            # A rank that would become as heavy as the owner cannot help
            computed_D = self.loads_FBD[COMPUTED].sum(0)
            able_D = able_D & (tokens_D > 0) & (computed_D + tokens_D < computed_D[owner])
            order_D = order_D[np.argsort(~able_D[order_D], kind="stable")]
        sets = [_prefixes(order_D, able_D)]
        near_D = able_D & self.cost.network.is_near_DD[owner]
        if self.cost.network.has_both_levels and near_D.any():
            sets.append(_prefixes(order_D[np.argsort(~near_D[order_D], kind="stable")], near_D))
        loans = order_D[:0]
        if local:
            loans = np.argsort(np.where(able_D, total_D, np.inf), kind="stable")[: min(LOANS, int(able_D.sum()))]
            sets.append(loans[:, None] == np.arange(len(able_D)))
        hosts_AD = np.concatenate([np.zeros((1, len(able_D)), dtype=bool), *sets])
        hosts_AD[:, owner] = True
        return hosts_AD, np.append(np.full(len(hosts_AD) - len(loans), owner), loans)


def _prefixes(order_D: np.ndarray, able_D: np.ndarray) -> np.ndarray:
    """Return [A, D]: the first 1, 2, ... of the able ranks, which come first in an order, and all of them."""
    able = int(able_D.sum())
    place_D = np.empty(len(order_D), dtype=np.int64)
    place_D[order_D] = np.arange(len(order_D))
    counts_A = np.array([*(size for size in SIZES if size < able), able] if able else [], dtype=np.int64)
    return place_D < counts_A[:, None]
