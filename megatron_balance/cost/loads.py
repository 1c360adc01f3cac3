"""Tokens that ranks compute, send and receive under a placement, summed over experts.

See `cost/core.py` for loads [5, B, D].
"""

import numpy as np

from megatron_balance.cost.core import FEATURES, add_loads, add_owners
from megatron_balance.cost.network import Network
from megatron_balance.placement.placement import Placement

MOST_GROUPS = 8
"""Maximum number of an iteration's load matrices for planning."""


def by_microbatch(counts: np.ndarray) -> np.ndarray:
    """Return [B, D, E], given one load matrix [D, E] or one per microbatch."""
    return counts[None] if counts.ndim == 2 else counts


def condensed(counts_BDE: np.ndarray, owner_E: np.ndarray, most: int = MOST_GROUPS) -> np.ndarray:
    """Return at most `most` load matrices with the sum of all microbatches' matrices, given the rank that owns each
    expert. Microbatches with the same busiest rank are added up: the maximum of their sum equals the sum of their
    maxima. If there are too many busiest ranks, microbatches of those with the fewest tokens above the mean are added
    up too."""
    microbatches, ranks, _ = counts_BDE.shape
    if microbatches == 1:
        return counts_BDE
    tokens_BD = np.stack([np.bincount(owner_E, tokens_E, ranks) for tokens_E in counts_BDE.sum(1)])
    busiest_B = tokens_BD.argmax(1)
    excess_D = np.bincount(busiest_B, weights=tokens_BD.max(1) - tokens_BD.mean(1), minlength=ranks)
    kept = set(np.argsort(-excess_D, kind="stable")[: most - 1].tolist())
    groups: dict[int, list[int]] = {}
    for microbatch, busiest in enumerate(busiest_B.tolist()):
        groups.setdefault(busiest if busiest in kept else -1, []).append(microbatch)
    # Avoids temporary matrices, whose memory would be newly allocated in every iteration
    found_BDE = np.zeros_like(counts_BDE, shape=(len(groups), *counts_BDE.shape[1:]))
    for found_DE, members in zip(found_BDE, groups.values(), strict=True):
        for microbatch in members:
            found_DE += counts_BDE[microbatch]
    return found_BDE


def owner_loads(network: Network, counts_EBD: np.ndarray, owner_E: np.ndarray) -> np.ndarray:
    """Return [5, B, D] float64: the loads of all experts if owners alone compute them."""
    loads_FBD = np.zeros((FEATURES, *counts_EBD.shape[1:]))
    counts_EBD = np.ascontiguousarray(counts_EBD, np.float64)
    add_owners(loads_FBD, counts_EBD, counts_EBD.sum(-1), owner_E, network.node_size)
    return loads_FBD


def placement_loads(network: Network, split: str, counts_BDE: np.ndarray, placement: Placement) -> np.ndarray:
    """Return [5, B, D]: the loads of all experts of a placement."""
    tables = placement.tables
    return loads_of(network, split, counts_BDE.transpose(2, 0, 1), tables.shares_ED, tables.hosting.primary_E)


def loads_of(
    network: Network, split: str, counts_EBD: np.ndarray, shares_ED: np.ndarray, primary_E: np.ndarray
) -> np.ndarray:
    """Return [5, B, D]: the loads of all experts, given `Tables.shares_ED` and primary hosts."""
    loads_FBD = np.zeros((FEATURES, *counts_EBD.shape[1:]))
    counts_EBD = np.ascontiguousarray(counts_EBD, np.float64)
    add_loads(loads_FBD, counts_EBD, shares_ED, primary_E, network.node_size, split == "local_first")
    return loads_FBD
