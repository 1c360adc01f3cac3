"""S1, S2 and S3, the strategies that DEMI is compared with (its Section V-A): one host per expert, no schedule.

They migrate regardless of the migration's time. The paper's workers accept any number of experts; here, a rank accepts
one per guest slot. G counts the guest slots of all ranks, and A the experts of one rank.
"""

import numpy as np
import scipy  # imports its parts at their first use, so that a process which does not use them starts sooner

from megatron_balance.cost.loads import by_microbatch
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.interface import Policy, one_host_each

EXACT = 256
"""Maximum number of (expert, rank) pairs for which S3 is solved exactly."""

NODES = 500
"""Maximum number of nodes of the exact search for S3; unlike a time limit, it is reproducible."""


class DemiS1(Policy):
    """Minimizes the number of tokens sent: each expert goes to the rank with most of its tokens.

    If guest slots are scarce, as many tokens as possible stay local."""

    name = "demi_s1"

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        owner_E = owners(current)
        return one_host_each(current, assign(_saved_tokens(counts, owner_E), owner_E, current.guest_slots))


class DemiS2(Policy):
    """Minimizes the bytes of tokens sent and of migrating experts."""

    name = "demi_s2"

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        owner_E = owners(current)
        saved_ED = _saved_tokens(counts, owner_E) * cost.token_bytes - cost.param_bytes
        return one_host_each(current, assign(saved_ED, owner_E, current.guest_slots))


class DemiS3(Policy):
    """Minimizes the bytes of tokens sent, plus those of migrating experts and of the most loaded rank's tokens.

    A mixed-integer program is exact for up to EXACT pairs. Beyond, starting with S2's placement, one expert at a time
    leaves the most loaded rank while the sum falls.
    """

    name = "demi_s3"

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        owner_E = owners(current)
        load_E = by_microbatch(counts).sum((0, 1)) * float(cost.token_bytes)
        saved_ED = _saved_tokens(counts, owner_E) * cost.token_bytes - cost.param_bytes
        saved_ED[np.arange(len(owner_E)), owner_E] = 0.0
        search = _least_traffic_and_load if saved_ED.size <= EXACT else _unload
        hosts_E = search(saved_ED, load_E, owner_E, current.guest_slots)
        return one_host_each(current, hosts_E)


def assign(saved_ED: np.ndarray, owner_E: np.ndarray, guest_slots: int) -> np.ndarray:
    """Return [E]: the hosts with the largest total saving, by solving the assignment of experts to guest slots.
    `saved_ED` is each expert's saving on each rank relative to its owner."""
    num_experts, num_ranks = saved_ED.shape
    rank_G = np.repeat(np.arange(num_ranks), guest_slots)
    gain_EG = np.where(rank_G == owner_E[:, None], 0.0, saved_ED[:, rank_G]).clip(0.0)
    # Extra columns: every expert may stay on its owner
    experts, columns = scipy.optimize.linear_sum_assignment(
        np.hstack([gain_EG, np.zeros((num_experts, num_experts))]), maximize=True
    )
    hosts_E = owner_E.copy()
    moves = columns < len(rank_G)
    moves[moves] = gain_EG[experts[moves], columns[moves]] > 0
    hosts_E[experts[moves]] = rank_G[columns[moves]]
    return hosts_E


def _saved_tokens(counts: np.ndarray, owner_E: np.ndarray) -> np.ndarray:
    """Return [E, D] float64: the reduction in tokens sent if a rank computes an expert instead of its owner."""
    counts_DE = by_microbatch(counts).sum(0)
    return (counts_DE - counts_DE[owner_E, np.arange(len(owner_E))]).T.astype(np.float64)


def _least_traffic_and_load(
    saved_ED: np.ndarray, load_E: np.ndarray, owner_E: np.ndarray, guest_slots: int
) -> np.ndarray:
    num_experts, num_ranks = saved_ED.shape
    scale = max(float(load_E.max()), float(np.abs(saved_ED).max())) or 1.0
    foreign_ED = owner_E[:, None] != np.arange(num_ranks)
    of_rank = np.tile(np.eye(num_ranks), num_experts)
    matrix = np.vstack(
        [
            np.repeat(np.eye(num_experts), num_ranks, axis=1),
            of_rank * foreign_ED.ravel(),
            of_rank * np.repeat(load_E / scale, num_ranks),
        ]
    )
    largest = np.repeat([0.0, -1.0], [num_experts + num_ranks, num_ranks])
    most = np.concatenate([np.ones(num_experts), np.full(num_ranks, float(guest_slots)), np.zeros(num_ranks)])
    least = np.concatenate([np.ones(num_experts), np.full(2 * num_ranks, -np.inf)])
    pairs = saved_ED.size
    answer = scipy.optimize.milp(
        np.append(-saved_ED.ravel() / scale, 1.0),
        integrality=np.append(np.ones(pairs), 0.0),
        constraints=(np.column_stack([matrix, largest]), least, most),
        options={"node_limit": NODES},
    )
    if answer.x is None:
        return _unload(saved_ED, load_E, owner_E, guest_slots)
    return answer.x[:pairs].reshape(num_experts, num_ranks).argmax(1)


def _unload(saved_ED: np.ndarray, load_E: np.ndarray, owner_E: np.ndarray, guest_slots: int) -> np.ndarray:
    """Return [E]: S2's hosts after moves off the most loaded rank, each the one that lowers S3's sum most."""
    hosts_E = assign(saved_ED, owner_E, guest_slots)
    num_ranks = saved_ED.shape[1]
    ranks = np.arange(num_ranks)
    while True:
        load_D = np.bincount(hosts_E, weights=load_E, minlength=num_ranks)
        free_D = np.bincount(hosts_E[hosts_E != owner_E], minlength=num_ranks) < guest_slots
        heaviest = int(load_D.argmax())
        experts_A = (hosts_E == heaviest).nonzero()[0]
        if not len(experts_A):
            return hosts_E
        moved_AD = load_D + load_E[experts_A, None]
        left = (load_D[heaviest] - load_E[experts_A])[:, None]
        others_D = np.array([np.delete(load_D, [heaviest, rank]).max(initial=0.0) for rank in ranks])
        largest_AD = np.maximum(np.maximum(moved_AD, left), others_D)
        change_AD = largest_AD - load_D[heaviest] - saved_ED[experts_A] + saved_ED[experts_A, heaviest, None]
        allowed_AD = (free_D | (ranks == owner_E[experts_A, None])) & (ranks != heaviest)
        change_AD = np.where(allowed_AD, change_AD, np.inf)
        expert, rank = np.unravel_index(change_AD.argmin(), change_AD.shape)
        # A change within the rounding of sums of bytes is no gain
        if not change_AD[expert, rank] < -1e-9 * load_D[heaviest]:
            return hosts_E
        hosts_E[experts_A[expert]] = rank
