"""What a placement makes ranks compute, send and receive, summed over experts.

Loads are arrays [..., 5, B, D] of tokens: what each rank computes, sends and receives within its node, and sends to and
receives from other nodes, in each of B microbatches. The loads of a layer are the sum of those of its experts, so a
search updates them by what one expert adds.

In the shapes, A counts experts, or ways to place one expert.
"""

import numpy as np

from megatron_balance.cost.network import Crossing, Network
from megatron_balance.placement.splits import SPLITS

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
    network: Network, split: str, counts_ABD: np.ndarray, vexperts_AD: np.ndarray, primary_A: np.ndarray
) -> np.ndarray:
    """Return [A, 5, B, D]: the loads of A experts, or of one expert placed in A ways.

    Args:
        split: a name in SPLITS.
        counts_ABD: tokens of each source rank.
        vexperts_AD, primary_A: as `vexperts` of a placement, and its primary hosts.
    """
    ways, microbatches, ranks = counts_ABD.shape
    counts_XD = counts_ABD.reshape(-1, ranks)
    repeated = (vexperts_AD, primary_A)
    if microbatches > 1:
        repeated = np.repeat(vexperts_AD, microbatches, axis=0), np.repeat(primary_A, microbatches)
    local_XD, share_XD = SPLITS[split](counts_XD, *repeated)
    away_XD = counts_XD - local_XD
    away_X1 = away_XD.sum(-1, keepdims=True)
    loads_FXD = np.zeros((FEATURES, *counts_XD.shape))
    loads_FXD[COMPUTED] = local_XD + share_XD * away_X1
    if len(network.first_N) == 1:
        # Ranks with a share send none of their own tokens away
        loads_FXD[1], loads_FXD[2] = away_XD, share_XD * away_X1
    else:
        near_XD, share_near_XD = (_node_sums(network, part_XD) for part_XD in (away_XD, share_XD))
        loads_FXD[1], loads_FXD[2] = away_XD * share_near_XD, share_XD * near_XD
        loads_FXD[3], loads_FXD[4] = away_XD - loads_FXD[1], share_XD * away_X1 - loads_FXD[2]
    return loads_FXD.reshape(FEATURES, ways, microbatches, ranks).swapaxes(0, 1)


def owner_loads(network: Network, counts_EBD: np.ndarray, owner_E: np.ndarray) -> np.ndarray:
    """Return [5, B, D]: the loads of all experts if each is computed by its owner alone."""
    ranks = network.num_ranks
    traffic_BDD = counts_EBD.transpose(1, 2, 0) @ (owner_E[:, None] == np.arange(ranks))
    crossing = network.crossing(traffic_BDD)
    return np.stack([traffic_BDD.sum(-2), *crossing.near_2XD, *crossing.far_2XD])


def _node_sums(network: Network, amounts_XD: np.ndarray) -> np.ndarray:
    """Return [X, D]: the sum over the ranks of each rank's node."""
    return np.add.reduceat(amounts_XD, network.first_N, axis=-1)[:, network.node_D]


def crossing_of(loads_XFBD: np.ndarray) -> Crossing:
    """Return the tokens that ranks exchange, [2, ..., B, D]."""
    near, far = loads_XFBD[..., 1:3, :, :], loads_XFBD[..., 3:5, :, :]
    return Crossing(np.moveaxis(near, -3, 0), np.moveaxis(far, -3, 0))
