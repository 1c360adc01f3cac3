"""What a placement makes ranks compute, send and receive, summed over experts.

Loads are arrays [..., 5, B, D] of tokens: what each rank computes, sends and receives within its node, and sends to and
receives from other nodes, in each of B microbatches. The loads of a layer are the sum of those of its experts, so a
search updates them by what one expert adds.

In the shapes, A counts experts, or ways to place one expert.
"""

import numpy as np

from megatron_balance.cost.network import Crossing, Network
from megatron_balance.placement.splits import SPLITS, within_nodes

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
    """Return [5, B, D]: the loads of all experts if each is computed by its owner alone."""
    experts, _, ranks = counts_EBD.shape
    owned_ED = (owner_E[:, None] == np.arange(ranks)).astype(np.float64)
    local_EB = counts_EBD[np.arange(experts), :, owner_E]
    tokens_EB, out_BD = counts_EBD.sum(-1), counts_EBD.sum(0)
    near_EB, near_BD = tokens_EB, out_BD
    if len(network.first_N) > 1:
        near_EBD = counts_EBD * network.is_near_DD[owner_E][:, None]
        near_EB, near_BD = near_EBD.sum(-1), near_EBD.sum(0)
    computed_BD, near_in_BD, local_BD = (part_EB.T @ owned_ED for part_EB in (tokens_EB, near_EB, local_EB))
    return np.stack(
        [computed_BD, near_BD - local_BD, near_in_BD - local_BD, out_BD - near_BD, computed_BD - near_in_BD]
    )


def crossing_of(loads_XFBD: np.ndarray) -> Crossing:
    """Return the tokens that ranks exchange, [2, ..., B, D]."""
    first = loads_XFBD.ndim - 3
    loads_FXBD = loads_XFBD.transpose(first, *range(first), -2, -1)
    return Crossing(loads_FXBD[1:3], loads_FXBD[3:5])
