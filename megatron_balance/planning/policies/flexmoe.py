"""FlexMoE (Algorithms 1 and 2): Expand, Shrink and Migrate vExperts while the ranks' loads are uneven.

A is the number of candidate modifications; M that of experts on the slowest rank, or of guests that may move.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from megatron_balance.cost.model import CostModel, balance_ratio, owners
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.planning.policies.interface import Policy
from megatron_balance.planning.vexperts import Expand, Layer, Migrate, Modification, Shrink, VExperts, modify

TOLERANCE = 1e-9
"""Share of a layer's time below which differences are rounding."""

CANDIDATES = 16
"""Number of ranks that an Expand may go to, the lightest first."""

MOVES = 16
"""Number of moves that are timed as a Migrate with every partner; those that save most synchronization first."""

TRIED = 4
"""Number of Migrates whose adjustments are counted; those that save the ranks most time first."""


def variance_ratio(tokens_D: np.ndarray) -> float:
    """Return FlexMoE's other metric (Section 5.3), on the scale of Eq. 6: 1 plus the variance over the squared mean."""
    mean = float(np.mean(tokens_D))
    return 1.0 + float(np.var(tokens_D)) / mean**2 if mean else 1.0


METRICS: dict[str, Callable[[np.ndarray], float]] = {"max": balance_ratio, "variance": variance_ratio}
"""Balance ratios as functions of tokens per rank; 1 is even."""


@dataclass(frozen=True)
class FlexMoE(Policy):
    """Changes the placement in use, one vExpert at a time, while the change shortens the layer.

    A vExpert is an even share of its expert's tokens; vExperts of one expert on one rank share a slot. At first every
    expert has one vExpert, on its owner, and the rest are free. Expand takes a free vExpert of the rank, or else one
    of the smallest expert there that has several (in the paper none is free, and each Expand comes with a Shrink). A
    plan is greedy:

    0. Start from owners alone if they are faster by Eq. 5 than the placement in use, for example once loads are even.
    1. While the balance ratio is above the threshold, Expand an expert of the slowest rank by Eq. 5, because no other
       can help; the one with the most tokens per vExpert comes first. It goes to the rank that makes times most even,
       or the slowest rank gives it up to its other hosts (Shrink). No rank involved may become as slow as the slowest
       was; this rule gets past ranks that are equally slow. Keep the state with the least Eq. 5 plus adjustments.
    2. Drop guests that no longer help, also below the threshold: without them Eq. 5 is not longer, and the sum over
       ranks is shorter. The paper keeps them; here each costs a Trans and an Agg in every iteration.
    3. Migrate while it makes synchronization (Eq. 9) cheaper, and Eq. 5 plus adjustments not longer.

    So Eq. 5 plus adjustments never exceeds Eq. 5 without the plan, nor that of owners alone. An expert may leave its
    owner; it is lent until a Migrate brings it back.
    """

    name = "flexmoe"
    split = "proportional"
    options = MappingProxyType(
        {
            "threshold": "balance_threshold",
            "metric": "balance_metric",
            "vexperts_per_rank": "balance_vexperts_per_rank",
        }
    )

    threshold: float = 1.1
    """Balance ratio above which the policy acts."""

    metric: str = "max"
    """A name in METRICS."""

    vexperts_per_rank: int | None = None
    """None: one per slot. A number below the experts that a rank owns leaves none to Expand with."""

    budget: int = 128
    """Number of steps of each of the three kinds, which bounds planning time at any size."""

    def __post_init__(self) -> None:
        if not self.threshold >= 1:
            raise ValueError(f"--balance-threshold {self.threshold}: give at least 1, which is perfect balance")
        if self.metric not in METRICS:
            raise ValueError(f"--balance-metric {self.metric}: choose from {', '.join(METRICS)}")
        if self.vexperts_per_rank is not None and self.vexperts_per_rank < 1:
            raise ValueError(f"--balance-vexperts-per-rank {self.vexperts_per_rank}: give at least 1")

    def check(self, owners: Placement) -> None:
        """See `Policy.check`."""
        if self.vexperts_per_rank is not None and self.vexperts_per_rank <= owners.home_slots:
            raise ValueError(
                f"--balance-vexperts-per-rank {self.vexperts_per_rank}: give at least {owners.home_slots + 1}, more "
                f"than the {owners.home_slots} experts that a rank owns; or leave it out for one per slot"
            )

    def plan(self, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`."""
        return modify(current, self.modifications(counts_DE, current, cost))

    def modifications(self, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> tuple[Modification, ...]:
        """Return the changes of the placement, in order. Arguments as in `plan`."""
        limit = current.slots_per_rank if self.vexperts_per_rank is None else self.vexperts_per_rank
        tokens_D = np.bincount(owners(current), weights=counts_DE.sum(0), minlength=current.num_ranks)
        if current.is_identity and METRICS[self.metric](tokens_D) <= self.threshold:
            return ()
        state = VExperts.of(Layer.of(counts_DE, current, cost, limit), current)
        done = _home(state)
        if (home := state.after(done)).seconds >= state.seconds * (1 - TOLERANCE):
            home, done = state, []
        state, balanced = self._balance(home)
        done += balanced
        for improve in (_drop, _migrate):
            for _ in range(self.budget):
                if not (step := improve(state)):
                    break
                state, done = state.after(step), [*done, *step]
        return (*done, *_merge(state))

    def _balance(self, state: VExperts) -> tuple[VExperts, list[Modification]]:
        """Run Algorithm 1: return the fastest state on the way to even loads, and the modifications up to it."""
        best, done, kept = state, [], 0
        for _ in range(self.budget):
            if METRICS[self.metric](state.tokens_D) <= self.threshold or not (step := _relieve(state)):
                break
            state, done = state.after(step), [*done, *step]
            if state.seconds < best.seconds * (1 - TOLERANCE):
                best, kept = state, len(done)
        return best, done[:kept]


def _home(state: VExperts) -> list[Modification]:
    """Return the modifications that leave each expert one vExpert, on its owner."""
    shrinks, migrates = [], []
    for expert in (state.vexperts_ED != state.layer.owned_ED).any(1).nonzero()[0].tolist():
        ranks = np.repeat(np.arange(state.vexperts_ED.shape[1]), state.vexperts_ED[expert]).tolist()
        owner = int(state.layer.owner_E[expert])
        left = owner if owner in ranks else ranks[0]
        ranks.remove(left)
        shrinks += [Shrink(expert, rank) for rank in ranks]
        migrates += [Migrate(expert, left, owner)] if left != owner else []
    # Shrinks first: they free slots for the vExperts that return
    return shrinks + migrates


def _relieve(state: VExperts) -> Sequence[Modification]:
    """Run Algorithm 2: Expand an expert of the slowest rank, with a Shrink if the target lacks a vExpert or a slot.

    The alternative is to Shrink the expert on the slowest rank, if it has other vExperts.
    """
    slowest, lightest_D = int(state.seconds_D.argmax()), np.argsort(state.seconds_D, kind="stable")
    (expert_M,) = (state.vexperts_ED[:, slowest] * state.capacity_E).nonzero()
    for expert in expert_M[np.argsort(-state.capacity_E[expert_M], kind="stable")].tolist():
        no_slot_D = ~state.members_ED[expert] & (state.free_slots_D <= 0)
        full_D = no_slot_D | (state.free_vexperts_D <= 0)
        rank_A = lightest_D[~full_D[lightest_D]][:CANDIDATES]
        more_A = np.ones_like(rank_A)
        if state.number_E[expert] > 1:
            rank_A, more_A = np.append(rank_A, slowest), np.append(more_A, -1)
        change_AD = state.changes(np.full_like(rank_A, expert), (rank_A, more_A))
        if (choice := _most_even(state, slowest, change_AD)) is not None:
            return [(Expand if more_A[choice] > 0 else Shrink)(expert, int(rank_A[choice]))]
        smallest_D, found_D = _smallest(state, expert, no_slot_D)
        rank_A = lightest_D[(full_D & found_D)[lightest_D]][:CANDIDATES]
        change_AD = state.changes(np.full_like(rank_A, expert), (rank_A, 1))
        change_AD += state.changes(smallest_D[rank_A], (rank_A, -1))
        if (choice := _most_even(state, slowest, change_AD)) is not None:
            rank = int(rank_A[choice])
            return [Shrink(int(smallest_D[rank]), rank), Expand(expert, rank)]
    return []


def _smallest(state: VExperts, expert: int, no_slot_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [D] the other expert on each rank that can give up a vExpert, and [D] whether there is one.

    The expert has several vExperts and the fewest tokens per vExpert. On a rank without a free slot, it must free one.
    """
    present_ED = (state.vexperts_ED > 0) & (state.number_E > 1)[:, None]
    present_ED[expert] = False
    present_ED &= ~no_slot_D | (state.guests_ED & (state.vexperts_ED == 1))
    return np.where(present_ED, state.capacity_E[:, None], np.inf).argmin(0), present_ED.any(0)


def _most_even(state: VExperts, slowest: int, change_AD: np.ndarray) -> int | None:
    """Return the candidate with the most even times among those that leave all ranks involved faster than the slowest.

    Evenness is a small sum of squares, which also favors a small total.
    """
    seconds_AD = state.seconds_D + change_AD
    involved_AD = change_AD != 0
    involved_AD[:, slowest] = True
    fits_A = (seconds_AD * involved_AD).max(1) < state.seconds_D[slowest] * (1 - TOLERANCE)
    if not fits_A.any():
        return None
    return int(np.where(fits_A, (seconds_AD**2).sum(1), np.inf).argmin())


def _drop(state: VExperts) -> Sequence[Modification]:
    """Shrink the guest whose removal saves the most time summed over ranks, if Eq. 5 does not grow."""
    expert_A, rank_A = (state.guests_ED & (state.vexperts_ED < state.number_E[:, None])).nonzero()
    number_A = state.vexperts_ED[expert_A, rank_A]
    for row in _saving(state, state.changes(expert_A, (rank_A, -number_A))):
        return [Shrink(int(expert_A[row]), int(rank_A[row]))] * int(number_A[row])
    return []


def _saving(state: VExperts, change_AD: np.ndarray) -> list[int]:
    """Return the candidates that lower the sum of the ranks' times without raising Eq. 5, the lowest sum first."""
    slowest, total_A = state.seconds_D.max(), change_AD.sum(1)
    saving_A = ((state.seconds_D + change_AD).max(1) <= slowest * (1 + TOLERANCE)) & (total_A < -TOLERANCE * slowest)
    return [row for row in np.argsort(total_A, kind="stable").tolist() if saving_A[row]]


def _migrate(state: VExperts) -> Sequence[Modification]:
    """Move a guest's vExpert to another rank or node that has the expert, if that saves time."""
    expert_A, source_A, target_A, partner_A = _with_partners(state, *_moves(state))
    change_AD = state.changes(expert_A, (source_A, -1), (target_A, 1))
    back_AD = state.changes(partner_A, (target_A, -1), (source_A, 1))
    change_AD += np.where(partner_A[:, None] == EMPTY, 0.0, back_AD)
    for row in _saving(state, change_AD)[:TRIED]:
        step = [Migrate(*(int(part_A[row]) for part_A in (expert_A, source_A, target_A, partner_A)))]
        if state.after(step).seconds <= state.seconds * (1 + TOLERANCE):
            return step
    return []


def _moves(state: VExperts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return [A] experts, sources and targets of the moves that save most synchronization (Eq. 9).

    With each move a rank gives up a guest, so that fewer ranks or fewer nodes have the expert.
    """
    cost, num_ranks = state.layer.cost, state.vexperts_ED.shape[1]
    first_N, node_D = np.arange(0, num_ranks, cost.profile.node_size), np.arange(num_ranks) // cost.profile.node_size
    expert_M, source_M = (state.guests_ED & (state.vexperts_ED == 1)).nonzero()
    row_M, others_MD = np.arange(len(expert_M)), state.members_ED[expert_M]
    others_MD[row_M, source_M] = False
    others_MN = np.add.reduceat(others_MD, first_N, axis=1, dtype=np.int64)
    node_left_M = others_MN[row_M, node_D[source_M]] == 0
    row_A, target_A = (others_MD | (node_left_M[:, None] & (others_MN[:, node_D] > 0))).nonzero()
    if not len(row_A):
        return row_A, row_A, row_A
    ranks_M, nodes_M = others_MD.sum(1), (others_MN > 0).sum(1)
    ranks_A, nodes_A = ranks_M[row_A] + ~others_MD[row_A, target_A], nodes_M[row_A]
    now_M = (ranks_M + 1) * cost.synchronization_seconds(ranks_M + 1, nodes_M + node_left_M)
    saved_A = now_M[row_A] - ranks_A * cost.synchronization_seconds(ranks_A, nodes_A)
    order_A = np.argsort(-saved_A, kind="stable")[:MOVES]
    return expert_M[row_A[order_A]], source_M[row_A[order_A]], target_A[order_A]


def _with_partners(
    state: VExperts, expert_M: np.ndarray, source_M: np.ndarray, target_M: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return [A] experts, sources, targets and partners: each move with every partner that leaves room for it.

    The partner EMPTY stands for a free vExpert.
    """
    kept_M = state.members_ED[expert_M, target_M] | (state.free_slots_D[target_M] > 0)
    there_EM = state.vexperts_ED[:, target_M]
    frees_EM = state.guests_ED[:, target_M] & (there_EM == 1)
    fits_ME = ((there_EM > 0) & (kept_M | frees_EM)).T
    fits_ME[np.arange(len(expert_M)), expert_M] = False
    free_M = kept_M & (state.free_vexperts_D[target_M] > 0)
    move_A, partner_A = np.column_stack([free_M, fits_ME]).nonzero()
    return expert_M[move_A], source_M[move_A], target_M[move_A], partner_A - 1


def _merge(state: VExperts) -> Sequence[Modification]:
    """Shrink experts that only one rank computes to one vExpert; more have no effect there."""
    alone_E = (state.vexperts_ED > 0).sum(1) == 1
    (expert_A,) = (alone_E & (state.number_E > 1)).nonzero()
    return [
        Shrink(expert, int(state.vexperts_ED[expert].argmax()))
        for expert in expert_A.tolist()
        for _ in range(int(state.number_E[expert]) - 1)
    ]
