"""Reference of `placement/splits.py` and of `add_loads`, with numpy: tokens that hosts compute, and tokens that leave.

Every host has a quota, the number of an expert's tokens that it computes. A split makes quotas from the load. Sources
then send their tokens by locality: a rank's own tokens first, then those of its node, then the others.

Functions take whole numbers of tokens, which give whole numbers, or fractions. The first dimension of `_AD` arrays is
A experts, or A ways to place one expert; D counts ranks. Nodes are `node_size` consecutive ranks.
"""

from collections.abc import Callable

import numpy as np

from megatron_balance.placement.placement import Placement


def local_first(counts_AD: np.ndarray, shares_AD: np.ndarray, primary_A: np.ndarray) -> np.ndarray:
    """Pro-Prophet's rule: a host computes its own tokens; tokens of other ranks go to the primary host."""
    quotas_AD = np.where(shares_AD, counts_AD, 0)
    quotas_AD[np.arange(len(quotas_AD)), primary_A] += (counts_AD - quotas_AD).sum(1)
    return quotas_AD


def proportional(counts_AD: np.ndarray, shares_AD: np.ndarray, primary_A: np.ndarray) -> np.ndarray:
    """Give each host its share of the tokens; with vExperts, FlexMoE's rule (Algorithm 3, lines 2 and 3)."""
    if counts_AD.dtype.kind == "i":
        return largest_remainder(counts_AD.sum(1), shares_AD)
    return shares_AD * (counts_AD.sum(1) / shares_AD.sum(1))[:, None]


SPLITS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "local_first": local_first,
    "proportional": proportional,
}
"""Rules that make quotas [A, D] from tokens [A, D] of each source rank, shares [A, D] and primary hosts [A]."""


def largest_remainder(amount_A: np.ndarray, weight_AK: np.ndarray) -> np.ndarray:
    """Split each amount in proportion to its weights into whole numbers that sum to it: [A, K] int64.

    Each part is rounded up where the remainders are largest (first ones among equals) and down elsewhere. A weight of
    zero gets nothing. An amount is zero wherever all its weights are zero. Products of an amount and a weight are below
    2**63.
    """
    total_A1 = np.maximum(weight_AK.sum(1, keepdims=True), 1)
    product_AK = amount_A[:, None] * weight_AK
    part_AK = product_AK // total_A1
    order_AK = np.argsort(part_AK * total_A1 - product_AK, axis=1, kind="stable")
    missing_A1 = amount_A[:, None] - part_AK.sum(1, keepdims=True)
    one_more_AK = (np.arange(weight_AK.shape[1]) < missing_A1).astype(part_AK.dtype)
    np.put_along_axis(part_AK, order_AK, np.take_along_axis(part_AK, order_AK, 1) + one_more_AK, 1)
    return part_AK


def within_nodes(moved_2AD: np.ndarray, node_size: int) -> np.ndarray:
    """Return how many of the tokens in `moved_2AD` stay on the rank's node, [2, A, D].

    A node's tokens are shared among its ranks in proportion to what each rank sends or receives. Cumulative shares are
    rounded, and a rank gets the difference of two of them, so that the whole numbers sum to the node's tokens.

    Args:
        moved_2AD: tokens that each rank sends, and those that it receives.
    """
    ranks = moved_2AD.shape[-1]
    if node_size >= ranks:
        return moved_2AD
    node_D = np.arange(ranks) // node_size
    total_2AN = np.add.reduceat(moved_2AD, np.arange(0, ranks, node_size), axis=-1)
    part_AN = np.minimum(*total_2AN)
    if moved_2AD.dtype.kind == "f":
        share_2AN = np.divide(part_AN, total_2AN, out=np.zeros_like(total_2AN), where=part_AN > 0)
        return moved_2AD * share_2AN[..., node_D]
    total_2AD = np.maximum(total_2AN, 1)[..., node_D]
    part_AD = part_AN[..., node_D]
    before_2AN = total_2AN.cumsum(-1) - total_2AN
    until_2AD = moved_2AD.cumsum(-1) - before_2AN[..., node_D]
    return until_2AD * part_AD // total_2AD - (until_2AD - moved_2AD) * part_AD // total_2AD


def slow_traffic(split: str, counts_DE: np.ndarray, placement: Placement, node_size: int) -> np.ndarray:
    """Return [D, D] float64: `traffic_of` with fractions of tokens.

    Each source's tokens are shared among the hosts that receive from its node, or from other nodes.
    """
    counts_ED = counts_DE.T.astype(np.float64)
    quotas_ED = SPLITS[split](counts_ED, placement.tables.shares_ED, np.asarray(placement.primary))
    local_ED = np.minimum(counts_ED, quotas_ED)
    moved_2ED = np.stack([counts_ED, quotas_ED]) - local_ED
    near_2ED = within_nodes(moved_2ED, node_size)
    traffic_DD = np.diag(local_ED.sum(0))
    nodes = [
        range(placement.num_ranks)[first : first + node_size] for first in range(0, placement.num_ranks, node_size)
    ]
    for (out_ED, in_ED), groups in ((near_2ED, nodes), (moved_2ED - near_2ED, [range(placement.num_ranks)])):
        for ranks in groups:
            total_E1 = in_ED[:, ranks].sum(1, keepdims=True)
            part_ED = np.divide(in_ED[:, ranks], total_E1, out=np.zeros_like(in_ED[:, ranks]), where=total_E1 > 0)
            traffic_DD[np.ix_(ranks, ranks)] += out_ED[:, ranks].T @ part_ED
    return traffic_DD
