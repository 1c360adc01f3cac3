"""How the hosts of an expert share its tokens, in the cost model's fractions; `flow/plan.py` assigns whole tokens.

The first dimension of `_AD` arrays is A experts, or A ways to place one expert; `_DD` is [source rank, computing rank].
"""

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_balance.placement.placement import Placement


def vexperts(placement: Placement) -> np.ndarray:
    """Return [E, D] int64: the number of vExperts that each expert has on each rank; 0 where the rank is not a host."""
    ranks = np.fromiter(chain.from_iterable(placement.hosts), dtype=np.int64)
    experts = np.repeat(np.arange(placement.num_experts), [len(hosts) for hosts in placement.hosts])
    cells = placement.num_experts * placement.num_ranks
    return np.bincount(experts * placement.num_ranks + ranks, minlength=cells).reshape(-1, placement.num_ranks)


class Shares(NamedTuple):
    """How hosts share the tokens of A experts, or of one expert placed in A ways; tokens may be fractions."""

    local_AD: np.ndarray
    """[A, D] number of its own tokens that each rank computes; it sends the rest away."""

    share_AD: np.ndarray
    """[A, D] each rank's fraction of all tokens that are sent away. Ranks with a fraction above 0 send none away."""


def local_first(counts_AD: np.ndarray, vexperts_AD: np.ndarray, primary_A: np.ndarray) -> Shares:
    """Pro-Prophet's rule: a host computes its own tokens; tokens of other ranks go to the primary host."""
    share_AD = np.zeros(counts_AD.shape)
    share_AD[np.arange(len(share_AD)), primary_A] = 1
    return Shares(np.where(vexperts_AD, counts_AD, 0), share_AD)


def proportional(counts_AD: np.ndarray, vexperts_AD: np.ndarray, primary_A: np.ndarray) -> Shares:
    """FlexMoE's rule, Algorithm 3: all vExperts of an expert compute equally many of its tokens, local tokens first.

    Tokens above a source's own capacity go to the other hosts in proportion to their remaining capacity,
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
"""Rules by which hosts share tokens, as functions of [A, D] tokens, [A, D] vExperts and [A] primary hosts."""


def traffic_of(split: str, counts_DE: np.ndarray, placement: Placement) -> np.ndarray:
    """Return [D, D] float64: tokens from each source rank that each rank computes, local tokens on the diagonal."""
    # numpy multiplies integers without BLAS; float64 is exact for these
    counts_ED = counts_DE.T.astype(np.float64)
    local_ED, share_ED = SPLITS[split](counts_ED, vexperts(placement), np.asarray(placement.primary))
    traffic_DD = (counts_ED - local_ED).T @ share_ED
    diagonal = np.arange(placement.num_ranks)
    traffic_DD[diagonal, diagonal] += local_ED.sum(0)
    return traffic_DD
