"""What a plan means for the rows of one rank, found in one loop, because a device waits for it.

It is the same as a plan's numbers, `sending` (flow/rows.py) and sums over slots find, for one chunk of rows that no
other rank has.
"""

from typing import NamedTuple

import numpy as np
import torch

from megatron_balance.comm.blocks import STAYS, Gather, gather_of, gather_room, write_blocks
from megatron_balance.device.compiled import compiled
from megatron_balance.flow.plan import DispatchPlan, room_of, send

_NO_ROOM = torch.empty((0, 0), dtype=torch.int32)


class Cut(NamedTuple):
    """How the rows of a rank are sent, and what it receives."""

    rows: int
    """Number of rows."""

    splits_DH: np.ndarray
    """Rows from each source to each host, int64; see `cut`."""

    received_DS: np.ndarray
    """Rows from each source for each slot of this host, int64."""

    there: Gather
    """Moves rows from the order by expert to the one in which they are sent."""


def cut(plan: DispatchPlan, rank: int, most_rows: int, device: torch.device, whole: bool = True) -> Cut:
    """Return how the rows of `rank` are sent, and what it receives; each host is one source.

    Args:
        most_rows: the rank has at most this many rows.
        device: where the rows are.
        whole: whether `splits_DH` is needed in full. Otherwise, it has the row and the column of `rank`, and -1
            elsewhere.
    """
    tables = plan.placement.tables
    counts_DE = plan.counts_DE.numpy()
    room = _NO_ROOM if tables.in_place else gather_room(len(tables.physical_N), most_rows, device)
    rows, stays, splits_DH, received_DS = _cut(
        counts_DE,
        *tables.hosting,
        *plan.rules,
        tables.physical_N,
        tables.slots_per_rank,
        tables.by_physical_N,
        rank,
        whole,
        room.numpy(),
    )
    return Cut(rows, splits_DH, received_DS, STAYS if stays else gather_of(room, rows, device))


def prepare_cuts() -> None:
    """Compile what `cut` needs, so that no forward pass takes seconds for it."""
    _cut.prepare()


@compiled(
    "Tuple((int64, boolean, int64[:, ::1], int64[:, ::1]))(int64[:, ::1], int64[::1], int64[::1], int64[::1], "
    "int64[::1], int64, boolean, int64[::1], int64, int64[::1], int64, boolean, int32[:, ::1])"
)
def _cut(
    counts_DE: np.ndarray,
    first_E: np.ndarray,
    host_N: np.ndarray,
    share_N: np.ndarray,
    primary_E: np.ndarray,
    node_size: int,
    local_first: bool,
    physical_N: np.ndarray,
    slots: int,
    by_physical_N: np.ndarray,
    own: int,
    whole: bool,
    room: np.ndarray,
) -> tuple[int, bool, np.ndarray, np.ndarray]:
    """Return the rows, whether each is in its place, and the arrays of a `Cut`; fill the room for `gather_of`.

    If there is no room, every row is in its place.
    """
    ranks, experts = counts_DE.shape
    group_D = np.arange(ranks) if whole else _groups(ranks, own, node_size)
    each_D = np.arange(ranks)
    sums_GE = counts_DE if whole else _added_up(counts_DE, group_D)
    room_G = room_of(first_E, len(sums_GE))
    room_D = room_of(first_E, ranks)
    received_DS = np.zeros((ranks, slots), np.int64)
    more_HD = np.zeros((ranks if whole else 0, ranks), np.int64)
    # The experts with one host, by host, and what this rank sends
    alone_N = np.full(len(physical_N), -1)
    sizes_N = np.empty_like(physical_N)
    for expert in range(experts):
        begin = first_E[expert]
        end = first_E[expert + 1]
        if end - begin == 1:
            alone_N[begin] = expert
            sizes_N[begin] = counts_DE[own, expert]
            if host_N[begin] == own:
                received_DS[:, physical_N[begin] % slots] = counts_DE[:, expert]
            continue
        sent_KG = send(
            expert, counts_DE, sums_GE, group_D, first_E, host_N, share_N, primary_E, node_size, local_first, room_G
        )
        sizes_N[begin:end] = sent_KG[:, group_D[own]]
        for n in range(begin, end):
            if whole:
                more_HD[host_N[n]] += sent_KG[n - begin]
            if host_N[n] == own:
                sent_KD = send(
                    *(expert, counts_DE, counts_DE, each_D, first_E, host_N, share_N, primary_E),
                    *(node_size, local_first, room_D),
                )
                received_DS[:, physical_N[n] % slots] = sent_KD[n - begin]
    if whole:
        splits_DH = _all_splits(counts_DE, alone_N, host_N, by_physical_N)
        splits_DH += more_HD.T
    else:
        splits_DH = _own_splits(own, host_N, sizes_N, received_DS)
    rows = splits_DH[own].sum()
    if len(room) == 0:
        return rows, True, splits_DH, received_DS
    blocks, _ = write_blocks(sizes_N, by_physical_N, room, 0, 0)
    if len(room) == 2:
        # The rest of the table has empty blocks
        room[0, blocks:] = 0
        room[1, blocks:] = rows
    return rows, blocks == 0, splits_DH, received_DS


@compiled(None)
def _groups(ranks: int, own: int, node_size: int) -> np.ndarray:
    """Return [D] the group of each rank: the nodes; on this rank's node, it and those before and after it."""
    group_D = np.zeros(ranks, np.int64)
    group = 0
    for rank in range(1, ranks):
        group += rank % node_size == 0 or rank == own or rank == own + 1
        group_D[rank] = group
    return group_D


@compiled(None)
def _added_up(counts_DE: np.ndarray, group_D: np.ndarray) -> np.ndarray:
    """Return [G, E], the load matrix with the ranks of each group added up."""
    ranks, experts = counts_DE.shape
    sums_GE = np.zeros((group_D[-1] + 1, experts), np.int64)
    for rank in range(ranks):
        sums_E = sums_GE[group_D[rank]]
        counts_E = counts_DE[rank]
        for expert in range(experts):
            sums_E[expert] += counts_E[expert]
    return sums_GE


@compiled(None)
def _own_splits(own: int, host_N: np.ndarray, sizes_N: np.ndarray, received_DS: np.ndarray) -> np.ndarray:
    """Return [D, H], the tokens that this rank sends and receives, and -1 elsewhere."""
    ranks = len(received_DS)
    splits_DH = np.full((ranks, ranks), -1)
    splits_DH[own] = 0
    for n in range(len(host_N)):
        splits_DH[own, host_N[n]] += sizes_N[n]
    for rank in range(ranks):
        splits_DH[rank, own] = received_DS[rank].sum()
    return splits_DH


@compiled(None)
def _all_splits(
    counts_DE: np.ndarray, alone_N: np.ndarray, host_N: np.ndarray, by_physical_N: np.ndarray
) -> np.ndarray:
    """Return [D, H], the tokens from each source to each host for experts with one host.

    Args:
        alone_N: the expert, if it has no other host; -1 otherwise.
    """
    ranks, experts = counts_DE.shape
    splits_DH = np.empty((ranks, ranks), np.int64)
    # Without a sign, so that no index is checked for one
    experts_W = np.empty(experts, np.uint64)
    first_H = np.empty(ranks + 1, np.uint64)
    wholes = 0
    host = 0
    for n in by_physical_N:
        while host <= host_N[n]:
            first_H[host] = wholes
            host += 1
        if alone_N[n] >= 0:
            experts_W[wholes] = alone_N[n]
            wholes += 1
    first_H[host:] = wholes
    _add_up(counts_DE, experts_W[:wholes], first_H, splits_DH)
    return splits_DH


@compiled(None)
def _add_up(counts_DE: np.ndarray, experts_W: np.ndarray, first_H: np.ndarray, splits_DH: np.ndarray) -> None:
    """Set the rows from each source to each host: those for `experts_W[first_H[host] : first_H[host + 1]]`.

    They are differences of sums, because a loop over each host's few experts takes longer.
    """
    until_W = np.empty(len(experts_W) + 1, np.int64)
    for rank in range(len(splits_DH)):
        total = 0
        counts_E = counts_DE[rank]
        splits_H = splits_DH[rank]
        for w, expert in enumerate(experts_W):
            until_W[w] = total
            total += counts_E[expert]
        until_W[len(experts_W)] = total
        for host in range(len(splits_H)):
            splits_H[host] = until_W[first_H[host + 1]] - until_W[first_H[host]]
