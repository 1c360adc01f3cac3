"""How the hosts of an expert share its tokens, as the cost model counts them: `flow/plan.py` deals out whole tokens.

Shape suffixes: D expert-parallel ranks, E logical experts, K experts or ways to place one; DD is [source rank,
computing rank].
"""

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_balance.placement.placement import Placement


def vexperts(placement: Placement) -> np.ndarray:
    """[E, D] int64: how often each rank is named among each expert's hosts; 0 where it computes none of its tokens."""
    ranks = np.fromiter(chain.from_iterable(placement.hosts), dtype=np.int64)
    experts = np.repeat(np.arange(placement.num_experts), [len(hosts) for hosts in placement.hosts])
    cells = placement.num_experts * placement.num_ranks
    return np.bincount(experts * placement.num_ranks + ranks, minlength=cells).reshape(-1, placement.num_ranks)


class Shares(NamedTuple):
    """How hosts share the tokens of K experts, or of one expert placed in K ways: a model's fractions of tokens."""

    local_AD: np.ndarray
    """[K, D] tokens that each rank computes of its own; it sends the others away."""

    share_AD: np.ndarray
    """[K, D] each rank's part of what all ranks send away; none of it comes from a rank that gets a part."""


def local_first(counts_AD: np.ndarray, vexperts_AD: np.ndarray, primary_A: np.ndarray) -> Shares:
    """Pro-Prophet's rule: a host computes its own tokens, everyone else's go to the primary host."""
    share_AD = np.zeros(counts_AD.shape)
    share_AD[np.arange(len(share_AD)), primary_A] = 1
    return Shares(np.where(vexperts_AD, counts_AD, 0), share_AD)


def proportional(counts_AD: np.ndarray, vexperts_AD: np.ndarray, primary_A: np.ndarray) -> Shares:
    """FlexMoE's rule, Algorithm 3: every vExpert of an expert computes as many of its tokens, local ones first.

    What a source has above its own capacity goes to the others in proportion to what they have left:
    `cap * n - min(cap * n, I)`.
    """
    capacity_AD = vexperts_AD * (counts_AD.sum(1) / vexperts_AD.sum(1))[:, None]
    local_AD = np.minimum(capacity_AD, counts_AD)
    left_AD = capacity_AD - local_AD
    left_A1 = left_AD.sum(1, keepdims=True)
    return Shares(local_AD, np.divide(left_AD, left_A1, out=np.zeros_like(left_AD), where=left_A1 > 0))


SPLITS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], Shares]] = {
    "local_first": local_first,
    "proportional": proportional,
}
"""Rules by which hosts share tokens: of [K, D] loads of experts, [K, D] vExperts and the [K] primary hosts."""


def traffic_of(split: str, counts_DE: np.ndarray, placement: Placement) -> np.ndarray:
    """[D, D] float64: tokens that each source rank has computed by each rank; what stays at home is on the diagonal."""
    # numpy multiplies integers without BLAS; float64 is exact for these
    counts_ED = counts_DE.T.astype(np.float64)
    local_ED, share_ED = SPLITS[split](counts_ED, vexperts(placement), np.asarray(placement.primary))
    traffic_DD = (counts_ED - local_ED).T @ share_ED
    diagonal = np.arange(placement.num_ranks)
    traffic_DD[diagonal, diagonal] += local_ED.sum(0)
    return traffic_DD
