"""Pro-Prophet's planner (Algorithm 1): a greedy search for a communication-efficient placement.

A is the number of candidate guests of one expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.loads import COMPUTED, by_microbatch, expert_loads
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.transfers import route_of
from megatron_balance.planning.policies.interface import Policy, owners_host

CONFIRMED = 20
"""Number of guests, over all placements that are timed exactly; the most promising placements come first."""

LOANS = 4
"""Number of ranks that may become the only guest of an expert, the lightest first."""

SIZES = (1, 2, 4, 8, 16, 32)
"""Numbers of guests that are tried for an expert, besides all ranks that may help."""


class Chosen(NamedTuple):
    """An expert and its guests."""

    expert: int
    guests: list[int]
    primary: int
    """The host of the tokens of ranks that are not hosts: the owner, or the only guest."""


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
    split = "proportional"
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

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`."""
        start = _Start(counts, current, cost)
        limit, left, found = start.seconds, self.budget, []
        for everywhere in range(current.guest_slots + 1 if current.guest_slots else 0):
            # The first search starts from owners alone and may examine the most experts
            search = _Search(start, cost, everywhere)
            found += search.run(self.alpha, limit, left // 2, self.min_gain)
            left -= search.looked
        best = current if current.is_identity else owners_host(current)
        confirmed = 0
        for estimate, chosen in sorted(found, key=itemgetter(0)):
            if estimate >= limit or confirmed >= CONFIRMED:
                break
            planned = _placement(current, chosen)
            best, limit = min((best, limit), (planned, cost.layer_seconds(counts, planned)), key=itemgetter(1))
            confirmed += planned.added_hosts
        return best


def _placement(current: Placement, chosen: Sequence[Chosen]) -> Placement:
    """Return the placement in which owners host, and the chosen experts' guests."""
    hosts = [[current.owner(expert)] for expert in range(current.num_experts)]
    primary = [ranks[0] for ranks in hosts]
    for expert, guests, first in chosen:
        hosts[expert] += guests
        primary[expert] = first
    return current.rehost(hosts, primary)


class _Start:
    """Loads of the ranks while every expert is computed by its owner."""

    def __init__(self, counts: np.ndarray, current: Placement, cost: CostModel) -> None:
        num_ranks = current.num_ranks
        self.counts_EBD = np.ascontiguousarray(by_microbatch(counts).transpose(2, 0, 1), dtype=np.float64)
        owner_E, tokens_E = owners(current), self.counts_EBD.sum((1, 2))
        hosts_ED = owner_E[:, None] == np.arange(num_ranks)
        self.loads_FBD = expert_loads(cost.network, cost.split, self.counts_EBD, hosts_ED, owner_E).sum(0)
        self.seconds = float(cost.time_of(*cost.work_of(self.loads_FBD), 0.0, 0.0).total)
        self.free_D = np.full(num_ranks, current.guest_slots)
        heaviest_first = np.lexsort((-tokens_E, owner_E)).reshape(num_ranks, -1)
        self.experts = heaviest_first.tolist()
        """Experts of each rank, heaviest first."""
        self.owners = owner_E.tolist()
        self.hottest = [expert for expert in np.argsort(-tokens_E, kind="stable").tolist() if tokens_E[expert]]


class _Search:
    """One run of Algorithm 1: loads under the experts selected so far, updated with each selection."""

    def __init__(self, start: _Start, cost: CostModel, everywhere: int) -> None:
        self.start, self.cost, self.counts_EBD = start, cost, start.counts_EBD
        self.loads_FBD, self.free_D = start.loads_FBD.copy(), start.free_D.copy()
        self.next = [0] * len(start.experts)
        """Position of each rank's heaviest expert not yet examined."""
        self.everywhere = start.hottest[:everywhere]
        """Experts that are copied to all ranks first; the search skips them afterwards."""
        self.hottest = iter(self.everywhere)
        self.mean_B = (self.loads_FBD[COMPUTED] / cost.rate_D).mean(-1)
        self.out_D = np.zeros(len(self.free_D))
        """Time in which each rank sends its own experts once, in experts within a node."""
        self.chains = cost.transport.loads()
        """Loads of chains; the cost model finds better routes where many ranks receive small experts."""
        self.sent = 0.0, 0.0
        """Seconds of Trans and Agg."""
        self.selected: list[Chosen] = []
        self.looked = 0

    def run(self, alpha: float, limit: float, budget: int, min_gain: float) -> list[tuple[float, list[Chosen]]]:
        """Select experts until the ranks are balanced, nothing helps or `budget` experts are examined.

        Returns:
            Seconds and selection of the fastest prefix; empty if none takes less than `limit` seconds.
        """
        best, kept = limit, 0
        spread_B = alpha * self.counts_EBD.sum((0, 2)) / len(self.counts_EBD)
        while not self._is_balanced(spread_B) and self._floor() < best and self._add_guests(budget):
            seconds = float(self.cost.time_of(*self.cost.work_of(self.loads_FBD), *self.sent).total)
            if seconds < best * (1 - min_gain):
                best, kept = seconds, len(self.selected)
        return [(best, self.selected[:kept])] if kept else []

    def _floor(self) -> float:
        """Return a lower bound on the seconds with more guests: even loads, no exchange, the experts already sent."""
        return float(self.cost.time_of(0.0, self.mean_B.sum(), *self.sent).total)

    def _is_balanced(self, spread_B: np.ndarray) -> bool:
        """Return whether Eq. 7 holds in every microbatch; equal loads are balanced even if alpha is 0."""
        computed_BD = self.loads_FBD[COMPUTED] / self.cost.rate_D
        difference_B = computed_BD.max(-1) - computed_BD.min(-1)
        return bool(((difference_B < spread_B) | (difference_B == 0)).all())

    def _add_guests(self, budget: int) -> bool:
        """Select the next expert and its guests; return False if no expert of the heaviest rank helps."""
        for expert in self.hottest:
            owner, wanted_D = self.start.owners[expert], (self.free_D > 0) & self.counts_EBD[expert].any(0)
            wanted_D[owner] = False
            if wanted_D.any():
                self._apply(Chosen(expert, wanted_D.nonzero()[0].tolist(), owner))
                return True
        seconds_BD = self.cost.rank_seconds(self.loads_FBD)
        over_BD = seconds_BD - seconds_BD.mean(-1, keepdims=True)
        microbatch, heaviest = (int(index) for index in np.unravel_index(over_BD.argmax(), over_BD.shape))
        while self.next[heaviest] < len(self.start.experts[heaviest]) and self.looked < budget:
            expert = self.start.experts[heaviest][self.next[heaviest]]
            self.next[heaviest] += 1
            if expert in self.everywhere:
                continue
            self.looked += 1
            chosen = self._choose(heaviest, expert, microbatch, seconds_BD)
            if chosen is not None:
                self._apply(chosen)
                return True
        return False

    def _choose(self, owner: int, expert: int, microbatch: int, seconds_BD: np.ndarray) -> Chosen | None:
        """Return the guests that minimize the time of owner and guests; ties go to fewer guests.

        Other ranks are not counted: with several heavy ranks, relieving one alone would not change the maximum.
        """
        able_D = (self.free_D > 0) & (seconds_BD[microbatch] < seconds_BD[microbatch, owner])
        hosts_AD, primary_A = self._options(owner, expert, able_D, seconds_BD.sum(0))
        if len(hosts_AD) == 1:
            return None
        loads_AFBD = self._loads(expert, hosts_AD, primary_A)
        after_ABD = self.cost.rank_seconds(self.loads_FBD + loads_AFBD - loads_AFBD[0])
        involved_AB = np.where(hosts_AD[:, None], after_ABD, seconds_BD.mean(-1, keepdims=True)).max(-1)
        number_A = hosts_AD.sum(1) - 1.0
        trans_A, agg_A = self._seconds_to(owner, hosts_AD, number_A)
        exposed = self.cost.exposed(
            self.mean_B.sum(), np.maximum(self.sent[0], trans_A), np.maximum(self.sent[1], agg_A)
        )
        total_A = involved_AB.sum(-1) + exposed[0] + exposed[1]
        best = int(total_A.argmin())
        if not number_A[best]:
            return None
        guests = [rank for rank in hosts_AD[best].nonzero()[0].tolist() if rank != owner]
        return Chosen(expert, guests, int(primary_A[best]))

    def _options(
        self, owner: int, expert: int, able_D: np.ndarray, total_D: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return [A, D] sets of hosts and [A] their primaries; the first one is the owner alone.

        Guests are the ranks with most of the expert's tokens or the lightest ones, anywhere or on the owner's node.
        Under `local_first`, a guest may also be the primary, which computes the tokens of all ranks that are not hosts.
        """
        (rank_R,), tokens_D, node_D = able_D.nonzero(), self.counts_EBD[expert].sum(0), self.cost.network.node_D
        lightest_R = rank_R[np.argsort(total_D[rank_R], kind="stable")]
        wanted_R = lightest_R[np.argsort(-tokens_D[lightest_R], kind="stable")]
        local = self.cost.split == "local_first"
        orders = [wanted_R[tokens_D[wanted_R] > 0]] if local else [wanted_R, lightest_R]
        if 1 < self.cost.network.node_size < len(self.free_D):
            orders += [order_R[node_D[order_R] == node_D[owner]] for order_R in orders]
        sets = [order_R[:count] for order_R in orders for count in (*SIZES, len(order_R)) if 0 < count <= len(order_R)]
        loans = lightest_R[:LOANS] if local else lightest_R[:0]
        hosts_AD = np.zeros((1 + len(sets) + len(loans), len(self.free_D)), dtype=bool)
        hosts_AD[:, owner] = True
        for row_D, guests in zip(hosts_AD[1:], (*sets, *loans), strict=True):
            row_D[guests] = True
        return hosts_AD, np.append(np.full(1 + len(sets), owner), loans)

    def _loads(self, expert: int, hosts_AD: np.ndarray, primary_A: np.ndarray) -> np.ndarray:
        """Return [A, 5, B, D]: an expert's loads for sets of hosts."""
        counts_ABD = np.broadcast_to(self.counts_EBD[expert], (len(hosts_AD), *self.counts_EBD.shape[1:]))
        return expert_loads(self.cost.network, self.cost.split, counts_ABD, hosts_AD, primary_A)

    def _seconds_to(self, owner: int, hosts_AD: np.ndarray, number_A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return [A] seconds of Trans and Agg to the guests of the owner's next expert, without others' chains."""
        transport, is_near_D = self.cost.transport, self.cost.network.is_near_DD[owner]
        is_far_A = (hosts_AD & ~is_near_D).any(1)
        hops_A = np.maximum(number_A - 1, 0) + (transport.far - 1) * is_far_A
        busy_A = self.out_D[owner] + np.where(is_far_A, transport.far, 1.0)
        chunks_A = transport.best_chunks(busy_A, hops_A)
        time_A = np.where(number_A > 0, busy_A * chunks_A + hops_A, 0.0)
        return transport.trans_seconds(time_A, chunks_A), transport.agg_seconds(time_A, chunks_A)

    def _apply(self, chosen: Chosen) -> None:
        """Select an expert's guests, and add its messages to the loads of links."""
        owner, ranks = self.start.owners[chosen.expert], np.arange(len(self.free_D))
        hosts_AD = np.stack([ranks == owner, (ranks == owner) | np.isin(ranks, chosen.guests)])
        loads_AFBD = self._loads(chosen.expert, hosts_AD, np.array([owner, chosen.primary]))
        self.loads_FBD = self.loads_FBD + loads_AFBD[1] - loads_AFBD[0]
        self.free_D[chosen.guests] -= 1
        network, transport = self.cost.network, self.cost.transport
        chain = route_of(
            owner, chosen.guests, num_ranks=len(self.free_D), node_size=network.node_size, fanout=1, far=transport.far
        )
        self.chains.add(chain)
        self.out_D[owner] += chain[0].time
        self.sent = transport.fewest_seconds(self.chains)[1:]
        self.selected.append(chosen)
