"""FlexMoE (Algorithms 1 and 2): Expand, Shrink and Migrate vExperts while the ranks' loads are uneven.

The shares in a Hosting are numbers of vExperts. M counts experts on the slowest rank, or guests that may move.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from megatron_balance.cost.core import CandidateCosts
from megatron_balance.cost.model import CostModel, balance_ratio, variance_ratio
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.planning.hosting import Hosting, LayerLoad, prepare
from megatron_balance.planning.leveling import fastest, level, leveled
from megatron_balance.planning.policies.interface import Policy, owners_host

TOLERANCE = 1e-9
"""Share of a layer's time below which differences are rounding."""

CANDIDATES = 8
"""Number of ranks that one Expand may target, the lightest first."""

GROUPS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of ranks to which an expert may expand in one step, the lightest first."""

EXAMINED = 4
"""Number of experts of the slowest rank that are examined in one step."""

EVENNESS = 0.01
"""Weight of the evenness of all ranks' times, which decides between candidates with nearly equal times."""

FEW_RANKS = 32
"""Maximum number of ranks for which there is time for full searches from two states."""

TARGETS = (1.02, 1.25, 1.6)
"""Target loads of the heaviest rank, over the mean, for many Expands at once."""

CHANGE = 0.02
"""Share of the layer's time by which many Expands at once must beat the placement in use."""

MOVES = 16
"""Number of moves that are timed as a Migrate with every partner; those that save most of Trans come first."""

METRICS: dict[str, Callable[[np.ndarray], float]] = {"max": balance_ratio, "variance": variance_ratio}
"""Balance ratios as functions of tokens [B, D] of each rank in each microbatch; 1 is even."""


@dataclass(frozen=True)
class FlexMoE(Policy):
    """Changes the placement in use, one vExpert at a time, while the change shortens the layer.

    A vExpert is an even share of its expert's tokens. VExperts of one expert on one rank share a slot. At first, every
    expert has one vExpert, on its owner, and the rest are free. Expand takes a free vExpert of the target rank, or else
    one of the smallest expert there that has several. (In the paper, none is free, and each Expand comes with a
    Shrink.) A plan is greedy:

    0. Start from owners alone if they are faster than the placement in use, for example once loads are even.
    1. While the balance ratio is above the threshold, start from many Expands at once, if they are faster by CHANGE. A
       search that counts tokens makes the owners' loads even with them. On few ranks, also start from 0's state.
    2. While the balance ratio is above the threshold, Expand an expert of the slowest rank by Eq. 5, because no other
       expert can help; the expert with the most tokens per vExpert comes first. It expands to the lightest rank or
       ranks that make times most even, or the slowest rank gives it up to its other hosts (Shrink). No rank involved
       may become as slow as the slowest was; this rule gets past ranks that are equally slow. Keep the state with the
       shortest layer.
    3. Drop guests that no longer help, also below the threshold: without them, the layer is not slower and the sum over
       ranks is shorter. The paper keeps them, but here each guest costs a Trans and an Agg in every iteration.
    4. Migrate while Trans becomes cheaper and the layer not slower.

    Eq. 5 counts Trans and Agg as the rest of the cost model does, instead of Eq. 9: the part that computation hides is
    free (Pro-Prophet Eq. 8). A new guest receives the expert with the next Trans, so changes cost nothing else. By the
    cost model, a plan is never slower than the placement in use or owners alone. An expert may leave its owner until a
    Migrate brings it back.
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
    """None: one per slot. With fewer than the experts that a rank owns, no expert can expand."""
    budget: int = 20
    """Maximum number of steps 2, which bounds planning time at any size."""
    improvements: int = 4
    """Maximum number of repetitions of step 3, and of step 4."""
    patience: int = 6
    """Number of steps 2 that do not shorten the layer, before the search ends."""

    def __post_init__(self) -> None:
        if not self.threshold >= 1:
            raise ValueError(f"--balance-threshold {self.threshold}: give at least 1, which is perfect balance")
        if self.metric not in METRICS:
            raise ValueError(f"--balance-metric {self.metric}: choose from {', '.join(METRICS)}")
        if self.vexperts_per_rank is not None and self.vexperts_per_rank < 1:
            raise ValueError(f"--balance-vexperts-per-rank {self.vexperts_per_rank}: give at least 1")
        prepare()
        level.prepare()

    def check(self, owners: Placement) -> None:
        if self.vexperts_per_rank is not None and self.vexperts_per_rank <= owners.home_slots:
            raise ValueError(
                f"--balance-vexperts-per-rank {self.vexperts_per_rank}: give at least {owners.home_slots + 1}, more "
                f"than the {owners.home_slots} experts that a rank owns; or leave it out for one per slot"
            )

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        # Each quota becomes one vExpert
        start = current.rehost(current.hosts, current.primary) if current.quotas else current
        first, alone, last = self.search(counts, start, cost)
        planned = start.rehost(last.hosts())
        if planned == current and current.is_identity:
            return current
        # For the placement in use, only the work is timed
        least = alone.seconds
        if planned != current:
            least = min(least, first.seconds_with(0.0, 0.0))
        if current.num_ranks > FEW_RANKS and start is current and last.at_most < least:
            return planned
        # The search counts only the busiest rank's messages; the cost model counts whole routes
        candidates = [current] if current.is_identity else [owners_host(current), current]
        return min((*candidates, planned), key=lambda placement: cost.layer_seconds(counts, placement))

    def search(self, counts: np.ndarray, current: Placement, cost: CostModel) -> tuple[Hosting, Hosting, Hosting]:
        """Return the hostings of `current`, which has no quotas, of owners alone, and of the end of the search."""
        limit = current.slots_per_rank if self.vexperts_per_rank is None else self.vexperts_per_rank
        first = Hosting.of(LayerLoad(counts, current, cost))
        if current.is_identity and self._is_balanced(first):
            return first, first, first
        alone = _reshared(first, first.layer.owned_ED.astype(np.int64))
        home = alone if alone.seconds < first.seconds * (1 - TOLERANCE) else first
        starts = [(home, 1)]
        if (even := self._expanded(first, alone, home, limit)) is not None:
            starts = [(even, 2), *(starts if current.num_ranks <= FEW_RANKS else ())]
        ends = [self._improved(start, limit, part) for start, part in starts]
        last = min(ends, key=lambda end: end.seconds)
        # Several vExperts have no effect if only one rank computes an expert
        is_single_E = (last.shares_ED > 0).sum(1) == 1
        merged_ED = np.where(is_single_E[:, None], last.shares_ED.clip(0, 1), last.shares_ED)
        return first, alone, _reshared(last, merged_ED)

    def _improved(self, state: Hosting, limit: int, part: int) -> Hosting:
        """Return the state after steps 2 to 4; `part` as in `_balanced`."""
        state = self._balanced(state, limit, part)
        for improve in (_drop, _migrate):
            for _ in range(self.improvements):
                if not (changes := improve(state, limit)):
                    break
                state = _after(state, changes)
        return state

    def _is_balanced(self, state: Hosting) -> bool:
        return METRICS[self.metric](state.tokens_BD / state.layer.cost.rate_D) <= self.threshold

    def _expanded(self, first: Hosting, alone: Hosting, home: Hosting, limit: int) -> Hosting | None:
        """Return the state with many Expands from owners alone, if it beats `home`."""
        placement = first.layer.placement
        free = min(placement.guest_slots, limit - placement.home_slots)
        if free <= 0 or self._is_balanced(home):
            return None
        plain = Hosting.alone(first.layer)
        searches = leveled(plain, np.full(placement.num_ranks, free), TARGETS, even=True)
        for selected in fastest(plain, searches, TOLERANCE, 1):
            even = _reshared(first, selected.shares_ED)
            if even.seconds < home.seconds * (1 - CHANGE):
                return even
        return None

    def _balanced(self, state: Hosting, limit: int, part: int) -> Hosting:
        """Return the fastest state that Algorithm 1 passes through, with one in `part` of its steps."""
        patience = self.patience // part
        best = state
        waiting = patience
        for _ in range(self.budget // part):
            if self._is_balanced(state) or state.floor >= best.seconds or not waiting:
                break
            if not (changes := _relieve(state, limit)):
                break
            state = _after(state, changes)
            waiting = waiting - 1
            if state.seconds < best.seconds * (1 - TOLERANCE):
                best = state
                waiting = patience
        return best


Change = tuple[int, np.ndarray]
"""An expert, and [D] the vExperts that it gains on each rank; negative: loses."""


def _reshared(state: Hosting, shares_ED: np.ndarray) -> Hosting:
    (expert_A,) = (state.shares_ED != shares_ED).any(1).nonzero()
    return state.changed(expert_A, shares_ED[expert_A], state.primary_E[expert_A]) if len(expert_A) else state


def _after(state: Hosting, changes: Iterable[Change]) -> Hosting:
    shares_ED = state.shares_ED.copy()
    for expert, more_D in changes:
        shares_ED[expert] += more_D
    return _reshared(state, shares_ED)


def _under(state: Hosting, *changes: tuple[np.ndarray, np.ndarray]) -> CandidateCosts:
    """Return the costs of alternatives; `changes`: experts [A], -1 for none, and the vExperts that they gain [A, D]."""
    expert_KA = np.stack([expert_A for expert_A, _ in changes])
    more_KAD = np.stack([more_AD for _, more_AD in changes])
    return state.under(expert_KA, state.shares_ED[expert_KA] + more_KAD, state.primary_E[expert_KA])


def gaining(rank_A: np.ndarray, more: int | np.ndarray, num_ranks: int) -> np.ndarray:
    """Return [A, D]: `more` vExperts that each alternative gains on one rank; negative: loses."""
    more_AD = np.zeros((len(rank_A), num_ranks), dtype=np.int64)
    more_AD[np.arange(len(rank_A)), rank_A] = more
    return more_AD


def _relieve(state: Hosting, limit: int) -> Sequence[Change]:
    """Run Algorithm 2: Expand an expert of the slowest rank, with a Shrink if the target lacks a vExpert or a slot.
    Alternatively, Shrink the expert on the slowest rank if it has other vExperts."""
    place = state.slowest()
    ranks = len(state.sent_D)
    slowest = place[1]
    lightest_D = np.argsort(state.work_BD[place[0]], kind="stable")
    capacity_E = state.layer.tokens_E / state.shares_ED.sum(1)
    free_vexperts_D = limit - state.shares_ED.sum(0)
    (expert_M,) = (state.shares_ED[:, slowest] * capacity_E).nonzero()
    for expert in expert_M[np.argsort(-capacity_E[expert_M], kind="stable")][:EXAMINED].tolist():
        member_D = (state.shares_ED[expert] > 0) | state.layer.owned_ED[expert]
        no_slot_D = ~member_D & (state.free_slots_D <= 0)
        full_D = no_slot_D | (free_vexperts_D <= 0)
        more_AD = _expansions(state, expert, slowest, lightest_D[~full_D[lightest_D]])
        # After a Shrink, the other hosts compute more
        involved_AD = (more_AD != 0) | ((more_AD < 0).any(1, keepdims=True) & (state.shares_ED[expert] > 0))
        alternatives = _under(state, (np.full(len(more_AD), expert), more_AD))
        if (choice := _fastest(state, expert, place, alternatives, involved_AD)) is not None:
            return [(expert, more_AD[choice])]
        smallest_D, found_D = _smallest(state, capacity_E, expert, no_slot_D)
        rank_A = lightest_D[(full_D & found_D)[lightest_D]][:CANDIDATES]
        more_AD = gaining(rank_A, 1, ranks)
        changes = (np.full_like(rank_A, expert), more_AD), (smallest_D[rank_A], -more_AD)
        involved_AD = (state.shares_ED[expert] > 0) | (state.shares_ED[smallest_D[rank_A]] > 0) | (more_AD != 0)
        alternatives = _under(state, *changes)
        if (choice := _fastest(state, expert, place, alternatives, involved_AD)) is not None:
            return [(int(expert_A[choice]), more_AD[choice]) for expert_A, more_AD in changes]
    return []


def _expansions(state: Hosting, expert: int, slowest: int, rank_R: np.ndarray) -> np.ndarray:
    """Return [A, D]: vExperts that an expert may gain, on one or many of the ranks with room (the lightest first)."""
    ranks = len(state.sent_D)
    place_D = np.full(ranks, ranks)
    place_D[rank_R] = np.arange(len(rank_R))
    one_A = np.arange(min(CANDIDATES, len(rank_R)))
    many_A = np.array([count for count in sorted({*GROUPS, len(rank_R)}) if 1 < count <= len(rank_R)], dtype=np.int64)
    groups = [1 * (place_D == one_A[:, None]), 1 * (place_D < many_A[:, None])]
    if state.shares_ED[expert].sum() > 1:
        groups.append(gaining(np.array([slowest]), -1, ranks))
    return np.concatenate(groups)


def _smallest(
    state: Hosting, capacity_E: np.ndarray, expert: int, no_slot_D: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return [D] the other expert on each rank that can give up a vExpert, and [D] whether there is one. It is the one
    with the fewest tokens per vExpert. On a rank without a free slot, it must free one."""
    present_ED = (state.shares_ED > 0) & (state.shares_ED.sum(1) > 1)[:, None]
    present_ED[expert] = False
    present_ED &= ~no_slot_D | (state.guests_ED & (state.shares_ED == 1))
    return np.where(present_ED, capacity_E[:, None], np.inf).argmin(0), present_ED.any(0)


def _fastest(
    state: Hosting, expert: int, slowest: tuple[int, int], alternatives: CandidateCosts, involved_AD: np.ndarray
) -> int | None:
    """Return the alternative with the least `involved_seconds`, if all ranks involved are faster than the slowest was.
    Ties go to the most even ranks. `slowest` is `Hosting.slowest()`."""
    microbatch, rank = slowest
    involved_AD = involved_AD.copy()
    involved_AD[:, rank] = True
    work_AD = alternatives.work_ABD[:, microbatch]
    fits_A = (work_AD * involved_AD).max(-1) < state.work_BD[slowest] * (1 - TOLERANCE)
    if not fits_A.any():
        return None
    total_A = state.involved_seconds(alternatives, expert, rank, involved_AD)
    even_A = np.sqrt((alternatives.work_ABD**2).mean((1, 2))) * EVENNESS
    return int(np.where(fits_A, total_A + even_A, np.inf).argmin())


def _drop(state: Hosting, limit: int) -> Sequence[Change]:
    """Shrink guests whose removal saves time: one of each expert, or only the best one if together they save none."""
    expert_A, rank_A = (state.guests_ED & (state.shares_ED < state.shares_ED.sum(1, keepdims=True))).nonzero()
    if not len(expert_A):
        return []
    less_AD = gaining(rank_A, -state.shares_ED[expert_A, rank_A], len(state.sent_D))
    found: dict[int, np.ndarray] = {}
    for row in _saving(state, _under(state, (expert_A, less_AD))):
        found.setdefault(int(expert_A[row]), less_AD[row])
    together = [*found.items()]
    if len(found) < 2 or _after(state, together).seconds <= state.seconds * (1 + TOLERANCE):
        return together
    return together[:1]


def _saving(state: Hosting, alternatives: CandidateCosts) -> list[int]:
    """Return the alternatives that make the layer faster, or no slower with less work on all ranks; fastest first."""
    now = state.seconds
    seconds_A = state.layer.seconds(alternatives)
    less_A = alternatives.more_A < -TOLERANCE * state.sent_D.sum()
    saving_A = (seconds_A < now * (1 - TOLERANCE)) | (seconds_A <= now * (1 + TOLERANCE)) & less_A
    order_A = np.lexsort((alternatives.more_A, seconds_A))
    return order_A[saving_A[order_A]].tolist()


def _migrate(state: Hosting, limit: int) -> Sequence[Change]:
    """Migrate a guest's vExpert to another rank or node that has the expert, possibly in exchange for a partner's."""
    expert_A, source_A, target_A, partner_A = _with_partners(state, limit, *_migrations(state))
    if not len(expert_A):
        return []
    ranks = len(state.sent_D)
    more_AD = gaining(target_A, 1, ranks) - gaining(source_A, 1, ranks)
    for row in _saving(state, _under(state, (expert_A, more_AD), (partner_A, -more_AD)))[:1]:
        partner = [] if partner_A[row] == EMPTY else [(int(partner_A[row]), -more_AD[row])]
        return [(int(expert_A[row]), more_AD[row]), *partner]
    return []


def _migrations(state: Hosting) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return [A] experts, sources and targets of the moves after which the fewest ranks and nodes have an expert."""
    network = state.layer.cost.network
    expert_M, source_M = (state.guests_ED & (state.shares_ED == 1)).nonzero()
    row_M = np.arange(len(expert_M))
    others_MD = (state.shares_ED[expert_M] > 0) | state.layer.owned_ED[expert_M]
    others_MD[row_M, source_M] = False
    others_MN = np.add.reduceat(others_MD, network.first_N, axis=1, dtype=np.int64)
    node_left_M = others_MN[row_M, network.node_D[source_M]] == 0
    row_A, target_A = (others_MD | (node_left_M[:, None] & (others_MN[:, network.node_D] > 0))).nonzero()
    # Leaving a node saves a message between nodes; moving to a rank that has the expert saves a message
    saved_A = node_left_M[row_A] * (state.layer.cost.transport.far - 1) + others_MD[row_A, target_A]
    order_A = np.argsort(-saved_A, kind="stable")[:MOVES]
    return expert_M[row_A[order_A]], source_M[row_A[order_A]], target_A[order_A]


def _with_partners(
    state: Hosting, limit: int, expert_M: np.ndarray, source_M: np.ndarray, target_M: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return [A] experts, sources, targets and partners (EMPTY: a free vExpert) that leave room for each move."""
    shares_EM = state.shares_ED[:, target_M]
    member_M = (shares_EM[expert_M, np.arange(len(expert_M))] > 0) | state.layer.owned_ED[expert_M, target_M]
    kept_M = member_M | (state.free_slots_D[target_M] > 0)
    frees_EM = state.guests_ED[:, target_M] & (shares_EM == 1)
    fits_ME = ((shares_EM > 0) & (kept_M | frees_EM)).T
    fits_ME[np.arange(len(expert_M)), expert_M] = False
    free_M = kept_M & (state.shares_ED.sum(0)[target_M] < limit)
    move_A, partner_A = np.column_stack([free_M, fits_ME]).nonzero()
    return expert_M[move_A], source_M[move_A], target_M[move_A], partner_A - 1
