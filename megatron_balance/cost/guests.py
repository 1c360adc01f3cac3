"""What the guests of several plans for one layer change, under the split `proportional`.

K counts the guests of all plans, A the plans; other letters are those of `cost/loads.py`. Loops are compiled.
"""

from typing import NamedTuple

import numpy as np

from megatron_balance.cost.network import Network
from megatron_balance.device.compiled import compiled


class Lent(NamedTuple):
    """The guests of several plans for one layer, sorted by plan."""

    plans: int
    """Number of plans."""
    plan_K: np.ndarray
    expert_K: np.ndarray
    rank_K: np.ndarray
    """A rank that does not own the expert; each (plan, expert, rank) occurs once."""
    share_K: np.ndarray
    """Part of the expert's tokens that the guest takes over from the owner."""

    def in_order(self, network: Network, owner_E: np.ndarray) -> "Lent":
        """Return the same guests in the order in which they receive their experts, as in `find_links`."""
        place_K = (self.rank_K - owner_E[self.expert_K]) % network.node_size
        order_K = np.lexsort((place_K, network.node_D[self.rank_K], self.expert_K, self.plan_K))
        return Lent(self.plans, *(part_K[order_K] for part_K in self[1:]))


def guest_loads(
    network: Network, counts_EBD: np.ndarray, tokens_EB: np.ndarray, owner_E: np.ndarray, lent: Lent
) -> np.ndarray:
    """Return [A, 5, B, D]: what the guests of A plans add to `owner_loads`.

    It is the difference between `expert_loads` of their experts and `owner_loads`.

    Args:
        tokens_EB: sums of `counts_EBD`.
    """
    _, microbatches, ranks = counts_EBD.shape
    added_AFBD = np.zeros((lent.plans, 5, microbatches, ranks))
    counts_EBD, tokens_EB = (np.ascontiguousarray(array, np.float64) for array in (counts_EBD, tokens_EB))
    size = network.node_size if network.has_both_levels else 1
    near = len(network.first_N) == 1
    _add_guests(added_AFBD, counts_EBD, tokens_EB, owner_E, *lent.in_order(network, owner_E)[1:], size, near)
    return added_AFBD


def guest_times(network: Network, far: float, lent: Lent, owner_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [A] the arguments of `seconds_of` for A plans, from `link_times` of all their experts.

    They are the time of the busiest rank or adapter, and the longest time that a piece spends on other links.
    """
    guests = lent.in_order(network, owner_E)[1:4]
    shared = float(network.adapters if network.adapters < network.node_size else 0)
    return _time_guests(lent.plans, *guests, owner_E, network.num_ranks, network.node_size, float(far), shared)


@compiled("void(float64[:,:], float64[::1], float64[::1], float64, int64, int64, int64, boolean)")
def _add_node(
    added_FD: np.ndarray,
    counts_D: np.ndarray,
    share_D: np.ndarray,
    tokens: float,
    owner: int,
    first: int,
    after: int,
    near: bool,
) -> None:
    """Add what the hosts of an expert change on the ranks of one node; arguments as in `_add_guests`."""
    # What leaves ranks and arrives there, without guests and with them
    sums = np.zeros((2, 2))
    for rank in range(first, after):
        for way in range(2):
            quota = share_D[rank] * tokens if way else (tokens if rank == owner else 0.0)
            kept = min(counts_D[rank], quota)
            sums[way, 0] += counts_D[rank] - kept
            sums[way, 1] += quota - kept
    stays = np.zeros((2, 2))
    for way in range(2):
        for end in range(2):
            least = min(sums[way, 0], sums[way, 1])
            stays[way, end] = 1.0 if near else (least / sums[way, end] if least > 0 else 0.0)
    for rank in range(first, after):
        alone = tokens if rank == owner else 0.0
        shared = share_D[rank] * tokens
        added_FD[0, rank] += shared - alone
        for end in range(2):
            before = (alone if end else counts_D[rank]) - min(counts_D[rank], alone)
            moved = (shared if end else counts_D[rank]) - min(counts_D[rank], shared)
            near_before = before * stays[0, end]
            near_moved = moved * stays[1, end]
            added_FD[1 + end, rank] += near_moved - near_before
            added_FD[3 + end, rank] += (moved - near_moved) - (before - near_before)


@compiled(
    "void(float64[:,:,:,::1], float64[:,:,::1], float64[:,::1], int64[::1], int64[::1], int64[::1], int64[::1], "
    "float64[::1], int64, boolean)"
)
def _add_guests(
    added_AFBD: np.ndarray,
    counts_EBD: np.ndarray,
    tokens_EB: np.ndarray,
    owner_E: np.ndarray,
    plan_K: np.ndarray,
    expert_K: np.ndarray,
    rank_K: np.ndarray,
    share_K: np.ndarray,
    size: int,
    near: bool,
) -> None:
    """Add `guest_loads` of guests in order, node by node, because tokens change their ways on nodes of hosts only.

    Args:
        size: number of ranks of a node, or 1 if there is one kind of links.
        near: whether all ranks are on one node.
    """
    ranks = added_AFBD.shape[3]
    first = 0
    share_D = np.zeros(added_AFBD.shape[3])
    while first < len(plan_K):
        plan = plan_K[first]
        expert = expert_K[first]
        owner = owner_E[expert_K[first]]
        after = first
        left = 0.0
        while after < len(plan_K) and plan_K[after] == plan and expert_K[after] == expert:
            share_D[rank_K[after]] = share_K[after]
            left += share_K[after]
            after += 1
        share_D[owner] = 1 - left
        # The owner's node, then those of guests
        done = -1
        for index in range(first - 1, after):
            node = (owner if index < first else rank_K[index]) // size
            if node != done and (index < first or node != owner // size):
                begin = node * size
                end = min(node * size + size, ranks)
                done = node
                for b in range(counts_EBD.shape[1]):
                    counts_D = counts_EBD[expert, b]
                    added_FD = added_AFBD[plan, :, b]
                    _add_node(added_FD, counts_D, share_D, tokens_EB[expert, b], owner, begin, end, near)
        share_D[owner] = 0.0
        for index in range(first, after):
            share_D[rank_K[index]] = 0.0
        first = after


@compiled(
    "UniTuple(float64[::1], 2)(int64, int64[::1], int64[::1], int64[::1], int64[::1], int64, int64, float64, float64)"
)
def _time_guests(
    plans: int,
    plan_K: np.ndarray,
    expert_K: np.ndarray,
    rank_K: np.ndarray,
    owner_E: np.ndarray,
    ranks: int,
    node_size: int,
    far: float,
    adapters: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return `guest_times` of guests in order; `adapters` is 0 if ranks do not share any."""
    busy_A = np.zeros(plans)
    extra_A = np.zeros(plans)
    times_AD = np.zeros((plans, ranks))
    entered_AN = np.zeros((plans, (ranks - 1) // node_size + 1))
    first = 0
    while first < len(plan_K):
        plan = plan_K[first]
        owner = owner_E[expert_K[first]]
        total = 0.0
        longest = 0.0
        sends = far
        after = first
        while after < len(plan_K) and plan_K[after] == plan and expert_K[after] == expert_K[first]:
            rank = rank_K[after]
            time = 1.0
            node = rank_K[after] // node_size
            if node == owner // node_size:
                sends = 1.0
            elif after == first or rank_K[after - 1] // node_size != node:
                time = far
                entered_AN[plan, node] += 1
            times_AD[plan, rank] += time
            total = total + time
            longest = max(longest, time)
            after = after + 1
        times_AD[plan, owner] += sends
        extra_A[plan] = max(extra_A[plan], total - longest)
        first = after
    for plan in range(plans):
        for rank in range(ranks):
            busy_A[plan] = max(busy_A[plan], times_AD[plan, rank])
            if adapters:
                busy_A[plan] = max(busy_A[plan], far * entered_AN[plan, rank // node_size] / adapters)
    return busy_A, extra_A


LOOPS = (_add_guests, _time_guests)
"""What to prepare before plans are timed."""
