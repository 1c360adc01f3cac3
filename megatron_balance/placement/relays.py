"""Routes in few batches: guests share the work of sending, so that no owner sends an expert more than once.

A *hop* is a message of one part of an expert. In stage 0 the owner sends; in later stages guests pass on
what they have:

    direct      the owner sends the whole expert to every guest
    exchanged   the owner sends a different part to every guest; guests exchange their parts
    by node     the same, but a part enters each node once: at a guest that sends it on within its node

So `direct` takes one batch of messages, `exchanged` two and `by node` three, whatever the number of guests. Sent in
several pieces, one piece overlaps with the next stage of the piece before it.
"""

from typing import NamedTuple

import numpy as np

from megatron_balance.placement.placement import Placement
from megatron_balance.placement.transfers import TransferPlan

ROUTES = ("direct", "exchanged", "by node")


class Hops(NamedTuple):
    """Messages of whole experts; each array has one number per message."""

    stage_M: np.ndarray
    expert_M: np.ndarray
    source_M: np.ndarray
    target_M: np.ndarray
    part_M: np.ndarray
    """Index of the part of the expert."""
    parts_M: np.ndarray
    """Number of parts of the expert."""


def hops(placement: Placement, node_size: int, route: str) -> Hops:
    """Return the hops of all guests along a route of ROUTES, ordered by stage and expert."""
    (owner_M, expert_M, rank_M) = placement.tables.guests_3M
    nodes = -(-placement.num_ranks // node_size)
    away_M = (rank_M // node_size - owner_M // node_size) % nodes
    # As in `find_links`: the parts of different owners then enter a node at different ranks
    order_M = np.lexsort(((rank_M - owner_M) % node_size, away_M, expert_M))
    rank_M, expert_M, owner_M, away_M = (column[order_M] for column in (rank_M, expert_M, owner_M, away_M))
    if route == "direct":
        nothing_M = np.zeros_like(rank_M)
        return Hops(nothing_M, expert_M, owner_M, rank_M, nothing_M, nothing_M + 1)
    number_M, first_M = _groups(expert_M)
    index_M = np.arange(len(rank_M))
    part_M = index_M - first_M
    # Pairs: the guest that has a part, and each other guest of its expert
    has_P = np.repeat(index_M, number_M)
    gets_P = first_M[has_P] + np.arange(len(has_P)) - np.repeat(number_M.cumsum() - number_M, number_M)
    has_P, gets_P = has_P[has_P != gets_P], gets_P[has_P != gets_P]
    source_P = has_P
    if route == "by node":
        size_M, start_M = _groups(expert_M * nodes + away_M)
        entry_P = start_M[gets_P] + (has_P - start_M[has_P]) % size_M[gets_P]
        source_P = np.where((away_M[has_P] == away_M[gets_P]) | (entry_P == gets_P), has_P, entry_P)
    later = Hops(
        1 + (source_P != has_P),
        expert_M[has_P],
        rank_M[source_P],
        rank_M[gets_P],
        part_M[has_P],
        number_M[has_P],
    )
    found = Hops(np.zeros_like(rank_M), expert_M, owner_M, rank_M, part_M, number_M)
    joined = [np.concatenate(columns) for columns in zip(found, later, strict=True)]
    order = np.lexsort((joined[1], joined[0]))
    return Hops(*(column[order] for column in joined))


def _groups(key_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [M] the size and the first index of the group of equal, consecutive keys that each place belongs to."""
    is_first_M = np.append(True, key_M[1:] != key_M[:-1])
    first_G = is_first_M.nonzero()[0]
    group_M = is_first_M.cumsum() - 1
    return np.diff(np.append(first_G, len(key_M)))[group_M], first_G[group_M]


def plan_hops(found: Hops, chunks: int) -> TransferPlan:
    """Return the plan that sends every part in `chunks` pieces; each piece passes a stage in every round."""
    piece_C1 = np.arange(chunks)[:, None]
    fields = (found.expert_M, found.source_M, found.target_M, piece_C1 * found.parts_M + found.part_M)
    columns = [
        np.broadcast_to(field, (chunks, len(found.part_M))).ravel() for field in (*fields, found.parts_M * chunks)
    ]
    round_N = (found.stage_M + piece_C1).ravel()
    order_N = np.lexsort((*columns[3::-1], round_N))
    return TransferPlan(np.stack(columns)[:, order_N], np.bincount(round_N).cumsum())
