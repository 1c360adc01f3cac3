"""How the hosts of an expert share its tokens, and which tokens leave their rank and their node for it.

Every host has a quota, the number of an expert's tokens that it computes. A split makes quotas from the load. Sources
then send their tokens by locality: a rank's own tokens first, then those of its node, then the others.

Functions take whole numbers of tokens, which give whole numbers, or fractions. The first dimension of `_AD` arrays is
A experts, or A ways to place one expert; D counts ranks. Nodes are `node_size` consecutive ranks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megatron_balance.placement.placement import Placement
from megatron_balance.placement.tables import shares_of


def shares(placement: Placement, experts: Sequence[int] | None = None) -> np.ndarray:
    """Return [E, D] int64: how the ranks share an expert's tokens; 0 where the rank is not a host.

    They are the placement's quotas, and 1 for each vExpert of experts without quotas.

    Args:
        experts: the rows to return; None: all.
    """
    if experts is None:
        return placement.tables.shares_ED.copy()
    hosts = placement.hosts
    quotas = placement.quotas
    return shares_of([hosts[e] for e in experts], [quotas[e] for e in experts if quotas], placement.num_ranks)


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


class Sent(NamedTuple):
    """What ranks send and receive so that every host computes its quota, all [A, D].

    A rank sends tokens or receives them, not both.
    """

    local_AD: np.ndarray
    """Tokens that stay on their rank."""
    near_out_AD: np.ndarray
    near_in_AD: np.ndarray
    """Tokens that are sent to, and received from, ranks of the same node."""
    far_out_AD: np.ndarray
    far_in_AD: np.ndarray
    """Tokens that are sent to, and received from, other nodes."""


def sent(counts_AD: np.ndarray, quotas_AD: np.ndarray, node_size: int) -> Sent:
    """Return what ranks send and receive by locality; ranks of a node have equal parts of what leaves it.

    Args:
        counts_AD: tokens of each source rank.
        quotas_AD: tokens that each rank computes, equally many for an expert.
    """
    local_AD = np.minimum(counts_AD, quotas_AD)
    moved_2AD = np.stack([counts_AD, quotas_AD]) - local_AD
    near_2AD = within_nodes(moved_2AD, node_size)
    return Sent(local_AD, *near_2AD, *(moved_2AD - near_2AD))


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


def traffic_of(split: str, counts_DE: np.ndarray, placement: Placement, node_size: int) -> np.ndarray:
    """Return [D, D] float64: tokens from each source rank that each rank computes, local tokens on the diagonal.

    Each source's tokens are shared among the hosts that receive from its node, or from other nodes.
    """
    # numpy multiplies integers without BLAS; float64 is exact for these
    counts_ED = counts_DE.T.astype(np.float64)
    quotas_ED = SPLITS[split](counts_ED, shares(placement), np.asarray(placement.primary))
    moved = sent(counts_ED, quotas_ED, node_size)
    node_D = np.arange(placement.num_ranks) // node_size
    is_near_DD = node_D[:, None] == node_D
    first_N = np.arange(0, placement.num_ranks, node_size)
    near_ED = np.add.reduceat(moved.near_in_AD, first_N, axis=1)[:, node_D]
    traffic_DD = _over(moved.near_out_AD, near_ED).T @ moved.near_in_AD * is_near_DD
    traffic_DD += _over(moved.far_out_AD, moved.far_in_AD.sum(1, keepdims=True)).T @ moved.far_in_AD
    diagonal = np.arange(placement.num_ranks)
    traffic_DD[diagonal, diagonal] += moved.local_AD.sum(0)
    return traffic_DD


def _over(amount_AD: np.ndarray, total_AD: np.ndarray) -> np.ndarray:
    """Return the fractions of totals; 0 where there is nothing."""
    return np.divide(amount_AD, total_AD, out=np.zeros_like(amount_AD), where=total_AD > 0)
