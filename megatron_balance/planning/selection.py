"""Experts with guests, and the choice of one more expert's guests, given all others.

A is the number of candidate guests of one expert.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.candidates import change, involve, try_
from megatron_balance.cost.core import COMPUTED, add_loads
from megatron_balance.cost.loads import owner_loads
from megatron_balance.cost.model import CostModel
from megatron_balance.device.compiled import compiled
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.hosting import Hosting, Layer
from megatron_balance.planning.leveling import level

NEARLY = 0.95
"""Share of the slowest rank's time above which a rank is nearly as slow."""

LOANS = 4
"""Number of ranks that may become the only guest of an expert, the lightest first."""

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of guests that are tried for an expert, besides all ranks that may help."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Selection(Hosting):
    """Experts that owners compute, and guests in addition, or one guest for all ranks that are not hosts."""

    current: Placement
    free_D: np.ndarray
    """Number of guests that each rank may still take."""
    chosen: tuple[int, ...] = ()
    """Experts with guests, in the order in which they were selected."""

    @classmethod
    def plain(
        cls, counts: np.ndarray, current: Placement, cost: CostModel, guest_slots: int | None = None
    ) -> "Selection":
        """Return the selection without any guests.

        Args:
            guest_slots: number of guests that a rank may have; None: one for each guest slot.
        """
        layer = Layer.of(counts, current, cost)
        num_ranks = current.num_ranks
        return cls(
            layer=layer,
            shares_ED=layer.owned_ED.astype(np.int64),
            primary_E=layer.owner_E,
            loads_FBD=owner_loads(cost.network, layer.counts_EBD, layer.owner_E),
            sent_D=np.zeros(num_ranks),
            extra_E=np.zeros(current.num_experts),
            current=current,
            free_D=np.full(num_ranks, current.guest_slots if guest_slots is None else guest_slots),
        )

    def with_guests(self, expert_A: np.ndarray, shares_AD: np.ndarray, primary_A: np.ndarray) -> "Selection":
        """Return the selection after more experts got guests; `shares_AD` has the owners, too."""
        free_D = self.free_D - ((shares_AD > 0) & ~self.layer.owned_ED[expert_A]).sum(0)
        return self.changed(expert_A, shares_AD, primary_A, free_D=free_D, chosen=(*self.chosen, *expert_A.tolist()))

    def without(self, expert: int) -> "Selection":
        """Return the selection in which only the owner computes an expert."""
        owner = self.layer.owner_E[[expert]]
        owned_1D = self.layer.owned_ED[[expert]]
        free_D = self.free_D + ((self.shares_ED[expert] > 0) & ~owned_1D[0])
        left = tuple(each for each in self.chosen if each != expert)
        return self.changed(np.array([expert]), owned_1D.astype(np.int64), owner, free_D=free_D, chosen=left)

    def placement(self) -> Placement:
        """Return the placement in which owners host, and the selected guests."""
        hosts: list[tuple[int, ...]] = [*zip(self.layer.owner_E.tolist(), strict=True)]
        row_M, rank_M = self.shares_ED[[*self.chosen]].nonzero()
        ranks = rank_M.tolist()
        stops = np.bincount(row_M, minlength=len(self.chosen)).cumsum().tolist()
        for expert, start, stop in zip(self.chosen, (0, *stops), stops, strict=False):
            hosts[expert] = (*ranks[start:stop],)
        return self.current.rehost(hosts, self.primary_E.tolist())

    def timed(self) -> tuple[float, Placement]:
        """Return the seconds with all messages of Trans and Agg, and the placement."""
        placement = self.placement()
        sending = self.layer.cost.sending(placement)
        return self._seconds(sending.trans, sending.agg), placement

    def is_balanced(self, alpha: float) -> bool:
        """Return whether Pro-Prophet's Eq. 7 holds in every microbatch; equal loads are always balanced."""
        spread_B = alpha * self.layer.tokens_B / len(self.layer.owner_E)
        computed_BD = self.tokens_BD / self.layer.cost.rate_D
        difference_B = computed_BD.max(-1) - computed_BD.min(-1)
        return bool(((difference_B < spread_B) | (difference_B == 0)).all())

    def extended(self, budget: int, min_gain: float, alpha: float) -> "Selection":
        """Select experts until the ranks are balanced, nothing helps or `budget` experts are examined.

        Without guests, ranks that are nearly as slow as the slowest have to be relieved together, so each of them adds
        to the budget. Return the fastest selection on the way.
        """
        state = best = self
        tokens_E = self.layer.tokens_E
        examined = {*self.chosen}
        if not self.chosen:
            budget += int((self.work_BD >= NEARLY * self.work_BD.max(-1, keepdims=True)).any(0).sum()) - 1
        while budget and not state.is_balanced(alpha) and state.floor < best.seconds * (1 - min_gain):
            place = state.slowest()
            home = state.current.home[place[1]]
            waiting = [expert for expert in sorted(home) if expert not in examined]
            if not waiting:
                break
            expert = max(waiting, key=tokens_E.__getitem__)
            budget = budget - 1
            examined.add(expert)
            if (better := state.relieved(expert, place)) is not None:
                state = better
                best = state if state.seconds < best.seconds * (1 - min_gain) else best
        return best

    def repeated(self, budget: int, min_gain: float) -> "Selection":
        """Choose the guests of some selected experts again, given all others, where that makes the layer faster."""
        best = self
        waiting = deque(self.chosen)
        for _ in range(min(budget, len(self.chosen))):
            expert = waiting.popleft()
            state = best.without(expert)
            place = state.slowest()[0], int(self.layer.owner_E[expert])
            state = state.relieved(expert, place) or state
            best = state if state.seconds < best.seconds * (1 - min_gain) else best
        return best

    def relieved(self, expert: int, place: tuple[int, int]) -> "Selection | None":
        """Return the selection with the guests that minimize the time of owner and guests; ties go to fewer guests.

        See `involved_seconds`.

        Args:
            expert: one that its owner alone computes.
            place: a microbatch, and the expert's owner.
        """
        shares_AD, primary_A = self._options(expert, place)
        ways = len(primary_A)
        if ways == 1:
            return None
        tried = self.tried(np.full((1, ways), expert), shares_AD[None], primary_A[None])
        best = int(self.involved_seconds(tried, expert, place[1], shares_AD > 0).argmin())
        if shares_AD[best].sum() == 1:
            return None
        return self.with_guests(np.array([expert]), shares_AD[[best]], primary_A[[best]])

    def _options(self, expert: int, place: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return [A, D] sets of hosts and [A] their primaries; the first one is the owner alone.

        Guests are the lightest ranks, anywhere or on the owner's node. Under `local_first` they are the ranks with most
        of the expert's tokens, or one guest is the primary, which computes the tokens of all ranks that are not hosts.
        """
        (microbatch, owner) = place
        cost = self.layer.cost
        work_BD = self.work_BD
        able_D = (self.free_D > 0) & (work_BD[microbatch] < work_BD[microbatch, owner])
        tokens_D = self.layer.counts_EBD[expert].sum(0)
        total_D = work_BD.sum(0)
        loans_D = order_D = np.argsort(total_D, kind="stable")
        local = cost.split == "local_first"
        if local:
            # A rank that would become as heavy as the owner cannot help
            computed_D = self.loads_FBD[COMPUTED].sum(0)
            able_D &= (tokens_D > 0) & (computed_D + tokens_D < computed_D[owner])
            order_D = loans_D[np.argsort(-tokens_D[loans_D], kind="stable")]
        node_size = cost.network.node_size if cost.network.has_both_levels else 0
        return _sets(able_D, order_D, loans_D, owner, node_size, LOANS if local else 0)


def prepare() -> None:
    """Compile what searches need, which would otherwise happen in the first plan."""
    for loop in (add_loads, change, try_, involve, level, _sets):
        loop.prepare()


@compiled("Tuple((int64[:,::1], int64[::1]))(boolean[::1], int64[::1], int64[::1], int64, int64, int64)")
def _sets(
    able_D: np.ndarray, order_D: np.ndarray, loans_D: np.ndarray, owner: int, node_size: int, loans: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return [A, D] sets of hosts, and [A] their primaries; the first one is the owner alone.

    Others have the owner and the first 1, 2, ... of the ranks that are able, anywhere or on the owner's node, or all of
    them. At last, one rank is the primary.

    Args:
        order_D, loans_D: ranks as guests, and as primaries.
        node_size: number of ranks of a node; 0 if guests are not to be on the owner's node.
        loans: maximum number of ranks that may become the primary.
    """
    most = 1 + 2 * (len(SIZES) + 1) + loans
    shares_AD = np.zeros((most, len(able_D)), np.int64)
    primary_A = np.full(most, owner)
    a = 1
    for near in range(1 + (node_size > 0)):
        able_R = np.empty(len(able_D), np.int64)
        found = 0
        for d in order_D:
            if able_D[d] and (not near or d // node_size == owner // node_size):
                able_R[found] = d
                found += 1
        for index in range(len(SIZES) + 1 if found else 0):
            count = SIZES[index] if index < len(SIZES) else found
            if index == len(SIZES) or count < found:
                for d in able_R[:count]:
                    shares_AD[a, d] = 1
                a += 1
    for d in loans_D:
        if able_D[d] and loans > 0:
            shares_AD[a, d], primary_A[a] = 1, d
            loans = loans - 1
            a = a + 1
    for row in range(a):
        shares_AD[row, owner] = 1
    return shares_AD[:a], primary_A[:a]
