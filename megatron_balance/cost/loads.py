"""What a placement makes ranks compute, send and receive, summed over experts.

Loads are arrays [..., 5, B, D] of tokens: what each rank computes, sends and receives within its node, and sends to and
receives from other nodes, in each of B microbatches. The loads of a layer are the sum of those of its experts, so a
search updates them by what one expert adds.

In the shapes, A counts experts, or ways to place one expert.
"""

import numpy as np

from megatron_balance.cost.network import Crossing, Network
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS, shares, within_nodes

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
    counts_XD = counts_ABD.reshape(-1, ranks)
    repeated = (shares_AD, primary_A)
    if microbatches > 1:
        repeated = np.repeat(shares_AD, microbatches, axis=0), np.repeat(primary_A, microbatches)
    quotas_XD = SPLITS[split](counts_XD, *repeated)
    loads_FXD = np.empty((FEATURES, *quotas_XD.shape))
    loads_FXD[COMPUTED], near_2XD, far_2XD = quotas_XD, loads_FXD[1:3], loads_FXD[3:5]
    far_2XD[0], far_2XD[1] = counts_XD, quotas_XD
    far_2XD -= np.minimum(counts_XD, quotas_XD)
    near_2XD[:] = within_nodes(far_2XD, network.node_size)
    far_2XD -= near_2XD
    return loads_FXD.reshape(FEATURES, ways, microbatches, ranks).swapaxes(0, 1)


def owner_loads(network: Network, counts_EBD: np.ndarray, owner_E: np.ndarray) -> np.ndarray:
    """Return [5, B, D] float64: the loads of all experts if each is computed by its owner alone."""
    experts, microbatches, ranks = counts_EBD.shape
    every_E, out_BD = np.arange(experts), counts_EBD.sum(0)
    tokens_EB, local_EB = counts_EBD.sum(-1), counts_EBD[every_E, :, owner_E]
    near_EB, near_BD = tokens_EB, out_BD
    if len(network.first_N) > 1:
        # Only the owner's node has tokens that stay within a node
        node_E, size = network.node_D[owner_E], network.node_size
        near_EBL = _by_node(counts_EBD, size)[every_E, :, node_E]
        near_EB, near_NBL = near_EBL.sum(-1), np.zeros((len(network.first_N), microbatches, size))
        order_E = np.argsort(node_E, kind="stable")
        first = np.flatnonzero(np.diff(node_E[order_E], prepend=-1))
        near_NBL[node_E[order_E[first]]] = np.add.reduceat(near_EBL[order_E], first)
        near_BD = near_NBL.swapaxes(0, 1).reshape(microbatches, -1)[:, :ranks]
    amount_3BE = np.concatenate([tokens_EB, near_EB, local_EB], axis=1).T
    place_3BE = ranks * np.arange(len(amount_3BE))[:, None] + owner_E
    owned = np.bincount(place_3BE.ravel(), amount_3BE.ravel(), ranks * len(amount_3BE))
    computed_BD, near_in_BD, local_BD = owned.reshape(3, microbatches, ranks)
    return np.stack(
        [computed_BD, near_BD - local_BD, near_in_BD - local_BD, out_BD - near_BD, computed_BD - near_in_BD]
    )


def placement_loads(network: Network, split: str, counts_BDE: np.ndarray, placement: Placement) -> np.ndarray:
    """Return [5, B, D]: the loads of all experts of a placement."""
    counts_EBD = np.ascontiguousarray(counts_BDE.transpose(2, 0, 1), dtype=np.float64)
    pairs = zip(placement.hosts, placement.owners, strict=True)
    # Most experts are computed by their owners, whose sums are simpler
    is_shared_E = np.array([ranks != (owner,) for ranks, owner in pairs])
    owner_E = np.array(placement.owners, dtype=np.int64)
    loads_FBD = owner_loads(network, counts_EBD[~is_shared_E], owner_E[~is_shared_E])
    (expert_M,) = is_shared_E.nonzero()
    if not len(expert_M):
        return loads_FBD
    shares_MD, primary_M = shares(placement, expert_M.tolist()), np.array(placement.primary)[expert_M]
    return loads_FBD + expert_loads(network, split, counts_EBD[expert_M], shares_MD, primary_M).sum(0)


def _by_node(counts_EBD: np.ndarray, size: int) -> np.ndarray:
    """Return [E, B, N, L], with zeros for ranks that the last node lacks."""
    experts, microbatches, ranks = counts_EBD.shape
    if ranks % size:
        counts_EBD = np.pad(counts_EBD, ((0, 0), (0, 0), (0, -ranks % size)))
    return counts_EBD.reshape(experts, microbatches, -(-ranks // size), size)


def crossing_of(loads_XFBD: np.ndarray) -> Crossing:
    """Return the tokens that ranks exchange, [2, ..., B, D]."""
    first = loads_XFBD.ndim - 3
    loads_FXBD = loads_XFBD.transpose(first, *range(first), -2, -1)
    return Crossing(loads_FXBD[1:3], loads_FXBD[3:5])
