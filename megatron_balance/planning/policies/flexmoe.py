"""FlexMoE (Algorithms 1 and 2): Expand, Shrink and Migrate vExperts while the ranks' loads are uneven.

A counts candidate modifications; M experts on the slowest rank, or guests that may move.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from megatron_balance.cost.model import CostModel, balance_ratio, variance_ratio
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.hosting import Tried
from megatron_balance.planning.policies.interface import Policy, owners_host
from megatron_balance.planning.searches import fastest, leveled
from megatron_balance.planning.selection import Selection, prepare
from megatron_balance.planning.vexperts import Expand, Migrate, Modification, Shrink, VExperts, gaining, modify

TOLERANCE = 1e-9
"""Share of a layer's time below which differences are rounding."""

CANDIDATES = 8
"""Number of ranks that one Expand may go to, the lightest first."""

GROUPS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of ranks that an expert may expand to in one step, the lightest first."""

EXAMINED = 4
"""Number of experts of the slowest rank that are examined in one step."""

EVENNESS = 0.01
"""Weight of the evenness of all ranks' times, which decides between candidates with nearly equal times."""

FEW_RANKS = 32
"""Number of ranks up to which there is time for full searches from two states."""

CHANGE = 0.02
"""Share of the layer's time by which expanding many experts at once must beat the placement in use."""

NEARLY = 0.95
"""Share of the slowest rank's time from which a rank counts as one of the slowest."""

MOVES = 16
"""Number of moves that are timed as a Migrate with every partner; those that save most of Trans first."""

METRICS: dict[str, Callable[[np.ndarray], float]] = {"max": balance_ratio, "variance": variance_ratio}
"""Balance ratios as functions of tokens [B, D] of each rank in each microbatch; 1 is even."""


@dataclass(frozen=True)
class FlexMoE(Policy):
    """Changes the placement in use, one vExpert at a time, while the change shortens the layer.

    A vExpert is an even share of its expert's tokens; vExperts of one expert on one rank share a slot. At first every
    expert has one vExpert, on its owner, and the rest are free. Expand takes a free vExpert of the rank, or else one
    of the smallest expert there that has several (in the paper none is free, and each Expand comes with a Shrink). A
    plan is greedy:

    0. Start from owners alone if they are faster than the placement in use, for example once loads are even.
    1. While the balance ratio is above the threshold, start from many Expands at once, if they are faster by CHANGE:
       those with which a search in tokens makes the owners' loads even. On few ranks, also start from the state of 0.
    2. While the balance ratio is above the threshold, Expand an expert of the slowest rank by Eq. 5, because no other
       can help; the one with the most tokens per vExpert comes first. It goes to the rank, or to several of the
       lightest ranks at once, that make times most even, or the slowest rank gives it up to its other hosts (Shrink).
       No rank involved may become as slow as the slowest was; this rule gets past ranks that are equally slow. Keep the
       state with the shortest layer.
    3. Drop guests that no longer help, also below the threshold: without them the layer is not slower, and the sum over
       ranks is shorter. The paper keeps them; here each costs a Trans and an Agg in every iteration.
    4. Migrate while it makes Trans cheaper, and the layer not slower.

    Eq. 5 counts Trans and Agg as the rest of the cost model does, in place of Eq. 9: what computation hides is free
    (Pro-Prophet Eq. 8). A new guest receives the expert with the next Trans, so changes cost no more than that. By the
    cost model, the plan is never slower than the placement in use or owners alone; on many ranks, no messages are timed
    where Trans and Agg could take DOUBT times as long as on the busiest rank. An expert may leave its owner; it is lent
    until a Migrate brings it back.
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

    budget: int = 20
    """Maximum number of steps 2, which bounds planning time at any size."""

    improvements: int = 4
    """Maximum numbers of steps 3 and of steps 4."""

    patience: int = 6
    """Number of steps 2 that neither shorten the layer nor leave fewer ranks nearly as slow as the slowest, before the
    search ends."""

    def __post_init__(self) -> None:
        if not self.threshold >= 1:
            raise ValueError(f"--balance-threshold {self.threshold}: give at least 1, which is perfect balance")
        if self.metric not in METRICS:
            raise ValueError(f"--balance-metric {self.metric}: choose from {', '.join(METRICS)}")
        if self.vexperts_per_rank is not None and self.vexperts_per_rank < 1:
            raise ValueError(f"--balance-vexperts-per-rank {self.vexperts_per_rank}: give at least 1")
        prepare()

    def check(self, owners: Placement) -> None:
        """See `Policy.check`."""
        if self.vexperts_per_rank is not None and self.vexperts_per_rank <= owners.home_slots:
            raise ValueError(
                f"--balance-vexperts-per-rank {self.vexperts_per_rank}: give at least {owners.home_slots + 1}, more "
                f"than the {owners.home_slots} experts that a rank owns; or leave it out for one per slot"
            )

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`."""
        start = _even(current)
        modifications, first, owned, last = self._search(counts, start, cost)
        planned = modify(start, modifications)
        if planned == current and current.is_identity:
            return current
        # Of the placement in use, only the work is timed
        least = owned.seconds if planned == current else min(owned.seconds, first.at_least)
        if current.num_ranks > FEW_RANKS and start is current and last.at_most < least:
            return planned
        # The search counts the busiest rank's messages, the cost model also those before and after it on their routes
        candidates = [current] if current.is_identity else [owners_host(current), current]
        return min((*candidates, planned), key=lambda placement: cost.layer_seconds(counts, placement))

    def modifications(self, counts: np.ndarray, current: Placement, cost: CostModel) -> tuple[Modification, ...]:
        """Return the changes of the placement, which has no quotas, in order. Arguments as in `plan`."""
        return self._search(counts, current, cost)[0]

    def _search(
        self, counts: np.ndarray, current: Placement, cost: CostModel
    ) -> tuple[tuple[Modification, ...], VExperts, VExperts, VExperts]:
        """Return `modifications`, and the states at first, with owners alone, and at last."""
        limit = current.slots_per_rank if self.vexperts_per_rank is None else self.vexperts_per_rank
        first = VExperts.start(counts, current, cost, limit)
        if current.is_identity and self._is_balanced(first.tokens_BD, cost):
            return (), first, first, first
        done = _home(first)
        owned = home = first.after(done)
        if home.seconds >= first.seconds * (1 - TOLERANCE):
            home = first
            done = []
        starts = [(home, done, 1)]
        if (even := self._expanded(counts, current, first, home)) is not None:
            starts = [(*even, 2), *(starts if current.num_ranks <= FEW_RANKS else ())]
        ends = [self._improved(start, steps, part) for start, steps, part in starts]
        last, done = min(ends, key=lambda end: end[0].seconds)
        return (*done, *_merge(last)), first, owned, last

    def _improved(self, state: VExperts, done: list[Modification], part: int) -> tuple[VExperts, list[Modification]]:
        """Return the state after steps 2 to 4, and the modifications up to it; `part` as in `_balance`."""
        state, steps = self._balance(state, part)
        done = [*done, *steps]
        for improve in (_drop, _migrate):
            for _ in range(self.improvements):
                if not (step := improve(state)):
                    break
                state = state.after(step)
                done = [*done, *step]
        return state, done

    def _is_balanced(self, tokens_BD: np.ndarray, cost: CostModel) -> bool:
        return METRICS[self.metric](tokens_BD / cost.rate_D) <= self.threshold

    def _expanded(
        self, counts: np.ndarray, current: Placement, state: VExperts, home: VExperts
    ) -> tuple[VExperts, list[Modification]] | None:
        """Return the fastest state with many Expands from owners alone, if it beats `home`, and the steps up to it."""
        free = min(current.guest_slots, state.limit - current.home_slots)
        if free <= 0 or self._is_balanced(home.tokens_BD, state.layer.cost):
            return None
        plain = Selection.plain(counts, current, state.layer.cost, free)
        for selection in fastest(plain, leveled(plain, even=True), TOLERANCE, 1):
            chosen = [(expert, selection.guests_ED[expert].nonzero()[0].tolist()) for expert in selection.chosen]
            steps = [*_home(state), *(Expand(expert, rank) for expert, guests in chosen for rank in guests)]
            if (even := state.after(steps)).seconds < home.seconds * (1 - CHANGE):
                return even, steps
        return None

    def _balance(self, state: VExperts, part: int) -> tuple[VExperts, list[Modification]]:
        """Run Algorithm 1 with one in `part` steps: return the fastest state on the way, and the modifications."""
        patience = self.patience // part
        best = state
        done = []
        kept = 0
        waiting = patience
        slow = _slow(state, state)
        for _ in range(self.budget // part):
            balanced = self._is_balanced(state.tokens_BD, state.layer.cost) or state.floor >= best.seconds
            if balanced or not waiting or not (step := _relieve(state)):
                break
            state = state.after(step)
            done = [*done, *step]
            waiting = waiting - 1
            if state.seconds < best.seconds * (1 - TOLERANCE):
                best = state
                kept = len(done)
                waiting = patience
                slow = _slow(state, state)
            elif (left := _slow(state, best)) < slow:
                waiting = patience
                slow = left
        return best, done[:kept]


def _even(current: Placement) -> Placement:
    """Return the placement with one vExpert in place of each quota."""
    return current.rehost(current.hosts, current.primary) if current.quotas else current


def _slow(state: VExperts, before: VExperts) -> int:
    """Return the number of ranks, over all microbatches, that are nearly as slow as the slowest was."""
    return int((state.work_BD >= NEARLY * before.work_BD.max(-1, keepdims=True)).sum())


def _home(state: VExperts) -> list[Modification]:
    """Return the modifications that leave each expert one vExpert, on its owner."""
    shrinks = []
    migrates = []
    for expert in (state.shares_ED != state.layer.owned_ED).any(1).nonzero()[0].tolist():
        ranks = np.repeat(np.arange(state.shares_ED.shape[1]), state.shares_ED[expert]).tolist()
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
    place = state.slowest()
    ranks = len(state.sent_D)
    slowest = place[1]
    lightest_D = np.argsort(state.work_BD[place[0]], kind="stable")
    (expert_M,) = (state.shares_ED[:, slowest] * state.capacity_E).nonzero()
    for expert in expert_M[np.argsort(-state.capacity_E[expert_M], kind="stable")][:EXAMINED].tolist():
        no_slot_D = ~state.members_ED[expert] & (state.free_slots_D <= 0)
        full_D = no_slot_D | (state.free_vexperts_D <= 0)
        more_AD = _expansions(state, expert, slowest, lightest_D[~full_D[lightest_D]])
        # After a Shrink, the other hosts compute more
        involved_AD = (more_AD != 0) | ((more_AD < 0).any(1, keepdims=True) & (state.shares_ED[expert] > 0))
        tried = state.tried_with((np.full(len(more_AD), expert), more_AD))
        if (choice := _fastest(state, expert, place, tried, involved_AD)) is not None:
            return [
                (Expand if more > 0 else Shrink)(expert, rank)
                for rank, more in enumerate(more_AD[choice].tolist())
                if more
            ]
        smallest_D, found_D = _smallest(state, expert, no_slot_D)
        rank_A = lightest_D[(full_D & found_D)[lightest_D]][:CANDIDATES]
        more_AD = gaining(rank_A, 1, ranks)
        changes = (np.full_like(rank_A, expert), more_AD), (smallest_D[rank_A], -more_AD)
        involved_AD = np.any([state.computes_other(*change) for change in changes], axis=0)
        tried = state.tried_with(*changes)
        if (choice := _fastest(state, expert, place, tried, involved_AD)) is not None:
            rank = int(rank_A[choice])
            return [Shrink(int(smallest_D[rank]), rank), Expand(expert, rank)]
    return []


def _expansions(state: VExperts, expert: int, slowest: int, rank_R: np.ndarray) -> np.ndarray:
    """Return [A, D]: numbers of vExperts that an expert may gain, from none on the slowest rank to many ranks.

    Args:
        rank_R: ranks that have room, the lightest first.
    """
    network = state.layer.cost.network
    near_R = rank_R[network.node_D[rank_R] == network.node_D[state.layer.owner_E[expert]]]
    (one_AD, many_AD), (near_one_AD, near_many_AD) = (_groups(ranks, len(state.sent_D)) for ranks in (rank_R, near_R))
    groups = [one_AD, many_AD, near_many_AD, near_one_AD[: len(near_one_AD) if len(near_R) < len(rank_R) else 0]]
    if state.number_E[expert] > 1:
        groups.append(-1 * (np.arange(len(state.sent_D)) == slowest)[None])
    return np.concatenate(groups)


def _groups(rank_R: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return [A, D] int64: each of the first few ranks, and the first two or more of them."""
    place_D = np.full(num_ranks, num_ranks)
    many = sorted({*GROUPS, len(rank_R)})
    place_D[rank_R] = np.arange(len(rank_R))
    one_A1 = np.arange(min(CANDIDATES, len(rank_R)))[:, None]
    many_A1 = np.array([count for count in many if 1 < count <= len(rank_R)], dtype=np.int64)[:, None]
    return 1 * (place_D == one_A1), 1 * (place_D < many_A1)


def _smallest(state: VExperts, expert: int, no_slot_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [D] the other expert on each rank that can give up a vExpert, and [D] whether there is one.

    The expert has several vExperts and the fewest tokens per vExpert. On a rank without a free slot, it must free one.
    """
    present_ED = (state.shares_ED > 0) & (state.number_E > 1)[:, None]
    present_ED[expert] = False
    present_ED &= ~no_slot_D | (state.guests_ED & (state.shares_ED == 1))
    return np.where(present_ED, state.capacity_E[:, None], np.inf).argmin(0), present_ED.any(0)


def _fastest(
    state: VExperts, expert: int, slowest: tuple[int, int], tried: Tried, involved_AD: np.ndarray
) -> int | None:
    """Return the candidate with the shortest `involved_seconds`, all ranks involved being faster than the slowest was.

    Ties go to the most even ranks.

    Args:
        slowest: the microbatch and the rank with the most seconds above the mean.
    """
    (microbatch, rank), involved_AD = slowest, involved_AD.copy()
    involved_AD[:, rank] = True
    fits_A = (tried.work_ABD[:, microbatch] * involved_AD).max(-1) < state.work_BD[slowest] * (1 - TOLERANCE)
    if not fits_A.any():
        return None
    total_A = state.involved_seconds(tried, expert, rank, involved_AD)
    even_A = np.sqrt((tried.work_ABD**2).mean((1, 2))) * EVENNESS
    return int(np.where(fits_A, total_A + even_A, np.inf).argmin())


def _drop(state: VExperts) -> Sequence[Modification]:
    """Shrink guests whose removal saves time: one of each expert, or only the best one if all together save none."""
    expert_A, rank_A = (state.guests_ED & (state.shares_ED < state.number_E[:, None])).nonzero()
    if not len(expert_A):
        return []
    number_A = state.shares_ED[expert_A, rank_A]
    found: dict[int, list[Modification]] = {}
    for row in _saving(state, state.tried_with((expert_A, gaining(rank_A, -number_A, len(state.sent_D))))):
        expert = int(expert_A[row])
        found.setdefault(expert, [Shrink(expert, int(rank_A[row]))] * int(number_A[row]))
    together = [step for steps in found.values() for step in steps]
    if len(found) < 2 or state.after(together).seconds <= state.seconds * (1 + TOLERANCE):
        return together
    return next(iter(found.values()))


def _saving(state: VExperts, tried: Tried) -> list[int]:
    """Return the candidates that make the layer faster, or no slower with less work on all ranks; the fastest first."""
    now = state.seconds
    sending = state.sent_D.sum()
    seconds_A = tried.seconds_A
    less_A = tried.more_A < -TOLERANCE * sending
    saving_A = (seconds_A < now * (1 - TOLERANCE)) | (seconds_A <= now * (1 + TOLERANCE)) & less_A
    order_A = np.lexsort((tried.more_A, seconds_A))
    return order_A[saving_A[order_A]].tolist()


def _migrate(state: VExperts) -> Sequence[Modification]:
    """Move a guest's vExpert to another rank or node that has the expert, if that saves time."""
    expert_A, source_A, target_A, partner_A = _with_partners(state, *_moves(state))
    if not len(expert_A):
        return []
    ranks = len(state.sent_D)
    more_AD = gaining(target_A, 1, ranks) - gaining(source_A, 1, ranks)
    for row in _saving(state, state.tried_with((expert_A, more_AD), (partner_A, -more_AD)))[:1]:
        return [Migrate(*(int(part_A[row]) for part_A in (expert_A, source_A, target_A, partner_A)))]
    return []


def _moves(state: VExperts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return [A] experts, sources and targets of the moves that save most of Trans.

    With each move a rank gives up a guest, so that fewer ranks or fewer nodes have the expert.
    """
    network = state.layer.cost.network
    expert_M, source_M = (state.guests_ED & (state.shares_ED == 1)).nonzero()
    row_M = np.arange(len(expert_M))
    others_MD = state.members_ED[expert_M]
    others_MD[row_M, source_M] = False
    others_MN = np.add.reduceat(others_MD, network.first_N, axis=1, dtype=np.int64)
    node_left_M = others_MN[row_M, network.node_D[source_M]] == 0
    row_A, target_A = (others_MD | (node_left_M[:, None] & (others_MN[:, network.node_D] > 0))).nonzero()
    # Leaving a node saves a message between nodes; moving to a rank that has the expert saves a message
    saved_A = node_left_M[row_A] * (state.layer.cost.transport.far - 1) + others_MD[row_A, target_A]
    order_A = np.argsort(-saved_A, kind="stable")[:MOVES]
    return expert_M[row_A[order_A]], source_M[row_A[order_A]], target_A[order_A]


def _with_partners(
    state: VExperts, expert_M: np.ndarray, source_M: np.ndarray, target_M: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return [A] experts, sources, targets and partners: each move with every partner that leaves room for it.

    The partner EMPTY stands for a free vExpert.
    """
    kept_M = state.members_ED[expert_M, target_M] | (state.free_slots_D[target_M] > 0)
    there_EM = state.shares_ED[:, target_M]
    frees_EM = state.guests_ED[:, target_M] & (there_EM == 1)
    fits_ME = ((there_EM > 0) & (kept_M | frees_EM)).T
    fits_ME[np.arange(len(expert_M)), expert_M] = False
    free_M = kept_M & (state.free_vexperts_D[target_M] > 0)
    move_A, partner_A = np.column_stack([free_M, fits_ME]).nonzero()
    return expert_M[move_A], source_M[move_A], target_M[move_A], partner_A - 1


def _merge(state: VExperts) -> Sequence[Modification]:
    """Shrink experts that only one rank computes to one vExpert; more have no effect there."""
    alone_E = (state.shares_ED > 0).sum(1) == 1
    (expert_A,) = (alone_E & (state.number_E > 1)).nonzero()
    return [
        Shrink(expert, int(state.shares_ED[expert].argmax()))
        for expert in expert_A.tolist()
        for _ in range(int(state.number_E[expert]) - 1)
    ]
