"""What a placement makes ranks compute, send and receive, summed over experts.

Loads are arrays [..., 5, B, D] of tokens: what each rank computes, sends and receives within its node, and sends to and
receives from other nodes, in each of B microbatches. The loads of a layer are the sum of those of its experts, so a
search updates them by what one expert adds.

In the shapes, A counts experts, or ways to place one expert.
"""

from typing import NamedTuple

import numpy as np

from megatron_balance.cost.loops import add_loads
from megatron_balance.cost.network import Crossing, Network
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import shares

COMPUTED, FEATURES = 0, 5

MOST_GROUPS = 8
"""Maximum number of load matrices of an iteration that plans are made for."""


def by_microbatch(counts: np.ndarray) -> np.ndarray:
    """Return [B, D, E] of a load matrix [D, E] or of one for each microbatch."""
    return counts[None] if counts.ndim == 2 else counts


def condensed(counts_BDE: np.ndarray, owner_E: np.ndarray, most: int = MOST_GROUPS) -> np.ndarray:
    """Return at most `most` load matrices that add up to those of all microbatches.

    Microbatches with the same busiest rank are added up, because for them the maximum of the sum is the sum of the
    maxima. If there are more busiest ranks, those with the least tokens above the mean are added up too.

    Args:
        owner_E: the rank that computes each expert.
    """
    microbatches, ranks, _ = counts_BDE.shape
    if microbatches == 1:
        return counts_BDE
    tokens_BD = counts_BDE.sum(1) @ (owner_E[:, None] == np.arange(ranks))
    busiest_B = tokens_BD.argmax(1)
    excess_D = np.bincount(busiest_B, weights=tokens_BD.max(1) - tokens_BD.mean(1), minlength=ranks)
    kept = set(np.argsort(-excess_D, kind="stable")[: most - 1].tolist())
    groups: dict[int, list[int]] = {}
    for microbatch, busiest in enumerate(busiest_B.tolist()):
        groups.setdefault(busiest if busiest in kept else -1, []).append(microbatch)
    return np.stack([counts_BDE[members].sum(0) for members in groups.values()])


def expert_loads(
    network: Network, split: str, counts_ABD: np.ndarray, shares_AD: np.ndarray, primary_A: np.ndarray
) -> np.ndarray:
    """Return [A, 5, B, D]: the loads of A experts, or of one expert placed in A ways.

    Args:
        split: a name in SPLITS.
        counts_ABD: tokens of each source rank, float64.
        shares_AD, primary_A: as `shares` of a placement, and its primary hosts.
    """
    ways, microbatches, ranks = counts_ABD.shape
    loads_AFBD = np.zeros((ways, FEATURES, microbatches, ranks))
    arrays = (np.ascontiguousarray(counts_ABD), np.ascontiguousarray(shares_AD, np.int64), np.array(primary_A))
    add_loads(loads_AFBD, *arrays, network.node_size, split == "local_first")
    return loads_AFBD


def owner_loads(network: Network, counts_EBD: np.ndarray, owner_E: np.ndarray) -> np.ndarray:
    """Return [5, B, D] float64: the loads of all experts if each is computed by its owner alone."""
    _, microbatches, ranks = counts_EBD.shape
    counts_EBD, loads_1FBD = np.ascontiguousarray(counts_EBD, np.float64), np.zeros((1, FEATURES, microbatches, ranks))
    alone_ED = (owner_E[:, None] == np.arange(ranks)).astype(np.int64)
    add_loads(loads_1FBD, counts_EBD, alone_ED, owner_E, network.node_size, False)
    return loads_1FBD[0]


def placement_loads(network: Network, split: str, counts_BDE: np.ndarray, placement: Placement) -> np.ndarray:
    """Return [5, B, D]: the loads of all experts of a placement."""
    counts_EBD = np.ascontiguousarray(counts_BDE.transpose(2, 0, 1), dtype=np.float64)
    loads_1FBD = np.zeros((1, FEATURES, *counts_BDE.shape[:2]))
    shares_ED, primary_E = shares(placement), np.array(placement.primary, dtype=np.int64)
    add_loads(loads_1FBD, counts_EBD, shares_ED, primary_E, network.node_size, split == "local_first")
    return loads_1FBD[0]


def _by_node(counts_EBD: np.ndarray, size: int) -> np.ndarray:
    """Return [E, B, N, L], with zeros for ranks that the last node lacks."""
    experts, microbatches, ranks = counts_EBD.shape
    if ranks % size:
        counts_EBD = np.pad(counts_EBD, ((0, 0), (0, 0), (0, -ranks % size)))
    return counts_EBD.reshape(experts, microbatches, -(-ranks // size), size)


class Lent(NamedTuple):
    """The guests of several plans for one layer, K in all plans together, sorted by plan."""

    plans: int
    """Number of plans."""
    plan_K: np.ndarray
    expert_K: np.ndarray
    rank_K: np.ndarray
    """A rank that does not own the expert; each (plan, expert, rank) occurs once."""
    share_K: np.ndarray
    """Part of the expert's tokens that the guest takes over from the owner."""


def guest_loads(
    network: Network, counts_EBD: np.ndarray, tokens_EB: np.ndarray, owner_E: np.ndarray, lent: Lent
) -> np.ndarray:
    """Return [A, 5, B, D]: what the guests of A plans add to `owner_loads`.

    It is the difference between `expert_loads` of their experts, with the split `proportional`, and `owner_loads`. An
    expert's tokens change their ways only on nodes that host it: cells X of a plan, a node and an expert, with L ranks
    each.

    Args:
        tokens_EB: sums of `counts_EBD`.
    """
    experts, microbatches, ranks = counts_EBD.shape
    size = network.node_size if network.has_both_levels else 1
    counts_EBNL = _by_node(counts_EBD, size)
    nodes = counts_EBNL.shape[2]
    key_K = lent.plan_K * experts + lent.expert_K
    key_M = np.unique(key_K)
    left_M = 1 - np.bincount(key_K, lent.share_K, lent.plans * experts)[key_M]
    # Hosts: owners, then guests
    plan_H, expert_H = np.divmod(np.append(key_M, key_K), experts)
    owners = len(key_M)
    rank_H = np.append(owner_E[expert_H[:owners]], lent.rank_K)
    cell_X, of_H = np.unique((plan_H * nodes + rank_H // size) * experts + expert_H, return_inverse=True)
    node_X, expert_X = np.divmod(cell_X, experts)
    counts_XBL = counts_EBNL[expert_X, :, node_X % nodes]
    tokens_HB = tokens_EB[expert_H]
    # Without guests, and with them
    quotas_2XBL = np.zeros((2, *counts_XBL.shape))
    quotas_2XBL[0, of_H[:owners], :, rank_H[:owners] % size] = tokens_HB[:owners]
    quotas_2XBL[1, of_H, :, rank_H % size] = np.append(left_M, lent.share_K)[:, None] * tokens_HB
    loads_F2XBL = _crossing(network, counts_XBL, quotas_2XBL)
    added_FXBL = loads_F2XBL[:, 1] - loads_F2XBL[:, 0]
    # Cells ascend by plan and node
    first_X = np.flatnonzero(np.append(True, node_X[1:] != node_X[:-1]))
    added_YFBL = np.zeros((lent.plans * nodes, FEATURES, microbatches, size))
    added_YFBL[node_X[first_X]] = np.add.reduceat(added_FXBL, first_X, axis=1).swapaxes(0, 1)
    added_AFBNL = np.moveaxis(added_YFBL.reshape(lent.plans, nodes, FEATURES, microbatches, size), 1, 3)
    return added_AFBNL.reshape(lent.plans, FEATURES, microbatches, -1)[..., :ranks]


def _crossing(network: Network, counts_XL: np.ndarray, quotas_XL: np.ndarray) -> np.ndarray:
    """Return [5, X, L]: the loads of the ranks of a node; other nodes have what these tokens lack."""
    local_XL = np.minimum(counts_XL, quotas_XL)
    out_XL, in_XL = counts_XL - local_XL, quotas_XL - local_XL
    if len(network.first_N) == 1:
        none_XL = np.zeros_like(out_XL)
        return np.stack([quotas_XL, out_XL, in_XL, none_XL, none_XL])
    out_X1, in_X1 = out_XL.sum(-1, keepdims=True), in_XL.sum(-1, keepdims=True)
    near_X1 = np.minimum(out_X1, in_X1)
    near_out_XL, near_in_XL = (
        part_XL * np.divide(near_X1, total_X1, out=np.zeros_like(near_X1), where=near_X1 > 0)
        for part_XL, total_X1 in ((out_XL, out_X1), (in_XL, in_X1))
    )
    return np.stack([quotas_XL, near_out_XL, near_in_XL, out_XL - near_out_XL, in_XL - near_in_XL])


def guest_times(network: Network, far: float, lent: Lent, owner_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [A] the arguments of `seconds_of` for A plans, from `link_times` of all their experts.

    They are the time of the busiest rank or adapter, and the longest time that a piece spends on other links.
    """
    num_ranks, size, nodes = network.num_ranks, network.node_size, len(network.first_N)
    place_K = (lent.rank_K - owner_E[lent.expert_K]) % size
    order_K = np.lexsort((place_K, network.node_D[lent.rank_K], lent.expert_K, lent.plan_K))
    plan_K, expert_K, rank_K = (part_K[order_K] for part_K in lent[1:4])
    node_K, chain_K = network.node_D[rank_K], plan_K * len(owner_E) + expert_K
    is_far_K = node_K != network.node_D[owner_E[expert_K]]
    begins_K = np.append(True, chain_K[1:] != chain_K[:-1])
    enters_K = is_far_K & (begins_K | np.append(True, node_K[1:] != node_K[:-1]))
    time_K, first_C = np.where(enters_K, far, 1.0), np.flatnonzero(begins_K)
    extra_C = np.add.reduceat(time_K, first_C) - np.maximum.reduceat(time_K, first_C)
    sends_C = np.where(np.logical_and.reduceat(is_far_K, first_C), far, 1.0)
    ends = np.append(plan_K * num_ranks + rank_K, plan_K[first_C] * num_ranks + owner_E[expert_K[first_C]])
    times = np.bincount(ends, np.append(time_K, sends_C), lent.plans * num_ranks)
    busy_A, extra_A = times.reshape(lent.plans, -1).max(1), np.zeros(lent.plans)
    np.maximum.at(extra_A, plan_K[first_C], extra_C)
    if network.adapters < size:
        entered_AN = np.bincount(plan_K * nodes + node_K, enters_K, lent.plans * nodes).reshape(lent.plans, -1)
        busy_A = np.maximum(busy_A, far * entered_AN.max(1) / network.adapters)
    return busy_A, extra_A


def crossing_of(loads_XFBD: np.ndarray) -> Crossing:
    """Return the tokens that ranks exchange, [2, ..., B, D]."""
    first = loads_XFBD.ndim - 3
    loads_FXBD = loads_XFBD.transpose(first, *range(first), -2, -1)
    return Crossing(loads_FXBD[1:3], loads_FXBD[3:5])
