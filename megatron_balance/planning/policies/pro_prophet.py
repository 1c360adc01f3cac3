"""Pro-Prophet's planner (Algorithm 1): a greedy search for a communication-efficient placement.

A is the number of candidate guests of one expert.
"""

import copy
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.loads import COMPUTED, by_microbatch, expert_loads, owner_loads
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.interface import Policy, hottest_first, owners_host

CONFIRMED = 3
"""Number of selections that the cost model times exactly."""

UNSURE = 0.15
"""Share by which the search may underestimate the time of a selection."""

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


@dataclass(frozen=True)
class ProProphet(Policy):
    """Copies the heaviest experts of the heaviest ranks to the ranks that hold most of their tokens.

    Algorithm 1, extended to ranks that own several experts and to nodes: take the heaviest rank, then its heaviest
    expert not yet examined, and give it the guests with which owner and guests are fastest, Trans and Agg included. The
    number of guests (the paper's D - n) is chosen for each expert, within the guest slots. Then some choices are
    repeated, given all others. All this happens twice: with guests anywhere, and on the owner's node only. Alternatives
    are the hottest experts on all ranks. The most promising selections are timed by the cost model, so that a plan is
    never slower than no guests at all.
    """

    name = "pro_prophet"
    split = "proportional"
    options = MappingProxyType({"alpha": "balance_alpha"})

    alpha: float = 0.5
    """Eq. 7: loads count as balanced once max(H) - min(H) < alpha * I / E."""

    min_gain: float = 0.001
    """Share of the layer's time that more guests must save, because the cost model omits part of their cost."""

    budget: int = 8
    """Number of experts examined in each search, which bounds planning time at any size."""

    repeats: int = 2
    """Number of choices repeated in each search."""

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ValueError(f"--balance-alpha {self.alpha}: give at least 0")

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`."""
        best = current if current.is_identity else owners_host(current)
        if not current.guest_slots or current.num_ranks == 1:
            return best
        plain = _Search(counts, current, cost, self.alpha)
        limit, searches = plain.seconds(), []
        if plain.is_balanced():
            return best
        for near in (False, True):
            search = plain.copy(near)
            search.select(self.budget, self.min_gain)
            searches.append(search.copy(near))
            if search.repeat(self.repeats, self.min_gain):
                searches.append(search)
            if not search.leaves_nodes:
                break
        everywhere = plain.copy(near=False)
        for expert in hottest_first(counts)[: current.guest_slots]:
            everywhere.spread(expert)
            searches.append(everywhere.copy(near=False))
        # The search counts the busiest rank's messages, the cost model also those before and after them on their routes
        timed = sorted((search.seconds(), index) for index, search in enumerate(searches))
        promising = min(limit, timed[0][0] * (1 + UNSURE))
        found: list[tuple[float, int, Placement]] = []
        for estimate, index in timed[:CONFIRMED]:
            if estimate < promising:
                planned = _placement(current, searches[index].chosen)
                sending = cost.sending(planned)
                work = cost.work_of(searches[index].loads_FBD)
                seconds = cost.time_of(*work, sending.trans, sending.agg).total
                found.append((float(seconds), index, planned))
        if not found:
            return best
        seconds, _, planned = min(found)
        # Chains are only one way to send experts
        return planned if seconds < limit or cost.layer_seconds(counts, planned) < limit else best


def _placement(current: Placement, chosen: Mapping[int, Chosen]) -> Placement:
    """Return the placement in which owners host, and the chosen experts' guests."""
    hosts = [[current.owner(expert)] for expert in range(current.num_experts)]
    primary = [ranks[0] for ranks in hosts]
    for expert, choice in chosen.items():
        hosts[expert] += choice.guests
        primary[expert] = choice.primary
    return current.rehost(hosts, primary)


class _Search:
    """Loads of the ranks under the guests selected so far."""

    def __init__(self, counts: np.ndarray, current: Placement, cost: CostModel, alpha: float) -> None:
        num_ranks = current.num_ranks
        self.cost, self.near = cost, False
        self.counts_EBD = np.ascontiguousarray(by_microbatch(counts).transpose(2, 0, 1), dtype=np.float64)
        self.owner_E, tokens_E = owners(current), self.counts_EBD.sum((1, 2))
        self.loads_FBD = owner_loads(cost.network, self.counts_EBD, self.owner_E)
        self.free_D = np.full(num_ranks, current.guest_slots)
        self.times_D = np.zeros(num_ranks)
        self.experts = np.lexsort((-tokens_E, self.owner_E)).reshape(num_ranks, -1).tolist()
        """Experts of each rank, heaviest first."""
        self.mean = float(tokens_E.sum() / cost.rate_D.sum())
        """Tokens per rank if all ranks computed equally long."""
        self.spread_B = alpha * self.counts_EBD.sum((0, 2)) / len(self.counts_EBD)
        self.chosen: dict[int, Chosen] = {}

    def copy(self, near: bool) -> "_Search":
        """Return the same loads for a search of its own.

        Args:
            near: whether guests are on their owner's node.
        """
        other = copy.copy(self)
        other.near, other.free_D, other.chosen = near, self.free_D.copy(), self.chosen.copy()
        return other

    def select(self, budget: int, min_gain: float) -> None:
        """Select experts until the ranks are balanced, nothing helps or `budget` experts are examined.

        Ranks that are nearly as slow as the slowest have to be relieved together, so each of them adds to the budget.
        The selection ends with the fastest one on the way.
        """
        best, kept, following = self.seconds(), 0, [0] * len(self.experts)
        seconds_BD = self.cost.rank_seconds(self.loads_FBD)
        budget += int((seconds_BD >= NEARLY * seconds_BD.max(-1, keepdims=True)).any(0).sum()) - 1
        while budget and not self.is_balanced() and self._floor() < best * (1 - min_gain):
            place = self._slowest()
            rank = place[1]
            if following[rank] == len(self.experts[rank]):
                break
            expert, budget = self.experts[rank][following[rank]], budget - 1
            following[rank] += 1
            choice = self._choose(expert, place)
            if choice is None:
                continue
            self._add(expert, choice)
            if (seconds := self.seconds()) < best * (1 - min_gain):
                best, kept = seconds, len(self.chosen)
        for expert in [*self.chosen][kept:]:
            self._remove(expert)

    def spread(self, expert: int) -> None:
        """Give an expert guests on all ranks with a free slot."""
        owner, ranks, cost = int(self.owner_E[expert]), np.arange(len(self.free_D)), self.cost
        guests_AD, owner_A = np.stack([ranks < 0, (self.free_D > 0) & (ranks != owner)]), np.array([owner, owner])
        counts_ABD = np.stack([self.counts_EBD[expert]] * 2)
        loads_AFBD = expert_loads(cost.network, cost.split, counts_ABD, guests_AD | (ranks == owner), owner_A)
        times_AD, extra_A = cost.transport.link_times(owner_A, guests_AD)
        change = loads_AFBD[1] - loads_AFBD[0], times_AD[1], float(extra_A[1])
        self._add(expert, Chosen(guests_AD[1].nonzero()[0].tolist(), owner, *change))

    def repeat(self, budget: int, min_gain: float) -> bool:
        """Choose the guests of some selected experts again, given all others, where that makes the layer faster.

        Returns:
            Whether a choice has changed.
        """
        start = self.seconds()
        best, waiting = start, deque(self.chosen)
        for _ in range(min(budget, len(self.chosen))):
            expert = waiting.popleft()
            before = self._remove(expert)
            place = self._slowest()[0], int(self.owner_E[expert])
            if (choice := self._choose(expert, place)) is not None:
                self._add(expert, choice)
            if (seconds := self.seconds()) < best * (1 - min_gain):
                best = seconds
                continue
            if choice is not None:
                self._remove(expert)
            self._add(expert, before)
        return best < start

    def seconds(self) -> float:
        """Return the seconds of the layer by Eq. 6 or 8, with Trans and Agg as on the busiest rank."""
        sent = self.cost.transport.seconds_of(self.times_D.max(), self._extra())
        return float(self.cost.time_of(*self.cost.work_of(self.loads_FBD), *sent).total)

    @property
    def leaves_nodes(self) -> bool:
        """Whether an expert has guests on other nodes than its owner's."""
        node_D = self.cost.network.node_D
        owner = self.owner_E.tolist()
        return any((node_D[choice.guests] != node_D[owner[expert]]).any() for expert, choice in self.chosen.items())

    def _floor(self) -> float:
        """Return a lower bound on the seconds with more guests: even loads, no exchange, the experts already sent."""
        sent = self.cost.transport.seconds_of(self.times_D.max(), self._extra())
        return float(self.cost.time_of(0.0, self.mean, *sent).total)

    def _extra(self) -> float:
        """Return the time on the other links of the longest chain."""
        return max((choice.extra for choice in self.chosen.values()), default=0.0)

    def is_balanced(self) -> bool:
        """Return whether Eq. 7 holds in every microbatch; equal loads are balanced even if alpha is 0."""
        computed_BD = self.loads_FBD[COMPUTED] / self.cost.rate_D
        difference_B = computed_BD.max(-1) - computed_BD.min(-1)
        return bool(((difference_B < self.spread_B) | (difference_B == 0)).all())

    def _slowest(self) -> tuple[int, int]:
        """Return the microbatch and the rank with the most seconds above the mean."""
        seconds_BD = self.cost.rank_seconds(self.loads_FBD)
        place = np.unravel_index((seconds_BD - seconds_BD.mean(-1, keepdims=True)).argmax(), seconds_BD.shape)
        return int(place[0]), int(place[1])

    def _add(self, expert: int, choice: Chosen) -> None:
        self.loads_FBD = self.loads_FBD + choice.loads_FBD
        self.times_D = self.times_D + choice.times_D
        self.free_D[choice.guests] -= 1
        self.chosen[expert] = choice

    def _remove(self, expert: int) -> Chosen:
        choice = self.chosen.pop(expert)
        self.loads_FBD, self.times_D = self.loads_FBD - choice.loads_FBD, self.times_D - choice.times_D
        self.free_D[choice.guests] += 1
        return choice

    def _choose(self, expert: int, place: tuple[int, int]) -> Chosen | None:
        """Return the guests that minimize the time of owner and guests; ties go to fewer guests.

        Other ranks are not counted: with several heavy ranks, relieving one alone would not change the maximum. Nor is
        what the owner's other experts take beyond the mean, because they are examined next.

        Args:
            place: a microbatch, and the expert's owner.
        """
        microbatch, owner = place
        cost, seconds_BD = self.cost, self.cost.rank_seconds(self.loads_FBD)
        able_D = (self.free_D > 0) & (seconds_BD[microbatch] < seconds_BD[microbatch, owner])
        if self.near:
            able_D &= cost.network.is_near_DD[owner]
        hosts_AD, primary_A = self._options(owner, expert, able_D, seconds_BD.sum(0))
        if len(hosts_AD) == 1:
            return None
        counts_ABD = np.broadcast_to(self.counts_EBD[expert], (len(hosts_AD), *self.counts_EBD.shape[1:]))
        loads_AFBD = expert_loads(cost.network, cost.split, counts_ABD, hosts_AD, primary_A)
        others_FBD, mean_B1 = self.loads_FBD - loads_AFBD[0], seconds_BD.mean(-1, keepdims=True)
        after_ABD = cost.rank_seconds(others_FBD + loads_AFBD)
        after_ABD[..., owner] -= np.maximum(cost.rank_seconds(others_FBD)[:, owner] - mean_B1[:, 0], 0.0)
        involved_AB = np.where(hosts_AD[:, None], after_ABD, mean_B1).max(-1)
        guests_AD = hosts_AD & (np.arange(len(able_D)) != owner)
        times_AD, extra_A = cost.transport.link_times(np.full(len(hosts_AD), owner), guests_AD)
        sent = cost.transport.seconds_of((self.times_D + times_AD).max(1), np.maximum(extra_A, self._extra()))
        best = int((involved_AB.sum(-1) + sum(cost.exposed(self.mean, *sent))).argmin())
        if not guests_AD[best].any():
            return None
        guests = guests_AD[best].nonzero()[0].tolist()
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
        if self.cost.network.has_both_levels and not self.near and near_D.any():
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
