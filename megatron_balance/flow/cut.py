"""One rank's part of a dispatch plan, computed in one compiled loop, because a device waits for it.

The result equals `DispatchPlan.tokens_DP`, `sending` (flow/rows.py) and sums over slots, for one chunk of rows that no
other rank shares. In shapes, D counts sources, W hosts, N pairs of an expert and one of its hosts, and G groups of
consecutive ranks.
"""

from typing import NamedTuple

import numpy as np
import torch

from megatron_balance.comm.blocks import STAYS, Gather, gather_of, gather_room, write_blocks
from megatron_balance.device.compiled import compiled
from megatron_balance.flow.plan import DispatchPlan
from megatron_balance.placement.splits import HostRules, room_of, send

_NO_ROOM = torch.empty((0, 0), dtype=torch.int32)


class RankCut(NamedTuple):
    """Rows that a rank sends, how they are reordered for that, and rows that it receives."""

    rows: int
    """Number of rows."""

    splits: list[torch.Tensor]
    """[C] int64 matrices [D, W] in host memory: rows of each chunk from each source to each host; see `cut`."""
    received_CDS: np.ndarray
    """int64: rows of each chunk from each source for each slot of this host."""
    move: Gather
    """Moves rows from the order by expert to the order of sending."""
    back: Gather | None = None
    """Inverse of `move`; None: computed on demand."""
    weights_to_hosts: Gather = STAYS
    """Reorders the weights of the rows that this rank sends: by chunk, host, slot -> by host, chunk, slot."""
    weights_to_chunks: Gather = STAYS
    """Inverse of `weights_to_hosts`."""
    sizes_CD: torch.Tensor | None = None
    """int64 in host memory: rows of each chunk that each member sends; None: no other rank shares the rows."""


def cut(plan: DispatchPlan, rank: int, most_rows: int, device: torch.device, whole: bool = True) -> RankCut:
    """Return the `RankCut` of `rank`, with one source per host, for rows on `device`, `most_rows` at most. If not
    `whole`, the split matrix has only the row and the column of `rank`, and -1 elsewhere."""
    tables = plan.placement.tables
    room = _NO_ROOM if tables.in_place else gather_room(len(tables.physical_N), most_rows, device)
    rows, stays, splits_DW, received_DS = cut_loop(
        plan.counts_DE.numpy(),
        plan.rules,
        tables.physical_N,
        plan.placement.slots_per_rank,
        tables.by_physical_N,
        rank,
        whole,
        room.numpy(),
    )
    move = STAYS if stays else gather_of(room, rows, device)
    return RankCut(rows, [torch.from_numpy(splits_DW)], received_DS[None], move)


@compiled(
    "Tuple((int64, boolean, int64[:, ::1], int64[:, ::1]))(int64[:, ::1], HostRules, int64[::1], int64, int64[::1], "
    "int64, boolean, int32[:, ::1])",
    HostRules,
)
def cut_loop(
    counts_DE: np.ndarray,
    rules: HostRules,
    physical_N: np.ndarray,
    slots: int,
    by_physical_N: np.ndarray,
    own: int,
    whole: bool,
    room: np.ndarray,
) -> tuple[int, bool, np.ndarray, np.ndarray]:
    """Return the number of rows, whether no row moves, and the arrays of a `RankCut`; fill `room` for `gather_of`."""
    first_E = rules.first_E
    host_N = rules.host_N
    ranks, experts = counts_DE.shape
    each_D = np.arange(ranks)
    group_D = each_D if whole else _groups(ranks, own, rules.node_size)
    sums_GE = counts_DE if whole else _added_up(counts_DE, group_D)
    room_G = room_of(first_E, len(sums_GE))
    room_D = room_of(first_E, ranks)
    received_DS = np.zeros((ranks, slots), np.int64)
    splits_WD = np.zeros((ranks, ranks), np.int64)
    # Rows that this rank sends for each expert and host
    sizes_N = np.empty_like(physical_N)
    for expert in range(experts):
        begin = first_E[expert]
        end = first_E[expert + 1]
        if end - begin == 1:
            sizes_N[begin] = counts_DE[own, expert]
            if whole:
                splits_WD[host_N[begin]] += counts_DE[:, expert]
            if host_N[begin] == own:
                received_DS[:, physical_N[begin] % slots] = counts_DE[:, expert]
            continue
        sent_KG = send(expert, counts_DE, sums_GE, group_D, rules, room_G)
        sizes_N[begin:end] = sent_KG[:, group_D[own]]
        for n in range(begin, end):
            if whole:
                splits_WD[host_N[n]] += sent_KG[n - begin]
            if host_N[n] == own:
                sent_KD = send(expert, counts_DE, counts_DE, each_D, rules, room_D)
                received_DS[:, physical_N[n] % slots] = sent_KD[n - begin]
    splits_DW = splits_WD.T.copy()
    if not whole:
        splits_DW[:] = -1
        splits_DW[own] = 0
        for n in range(len(host_N)):
            splits_DW[own, host_N[n]] += sizes_N[n]
        for rank in range(ranks):
            splits_DW[rank, own] = received_DS[rank].sum()
    rows = splits_DW[own].sum()
    if len(room) == 0:
        return rows, True, splits_DW, received_DS
    blocks, _ = write_blocks(sizes_N, by_physical_N, room, 0, 0)
    if len(room) == 2:
        # Pad the table with empty blocks
        room[0, blocks:] = 0
        room[1, blocks:] = rows
    return rows, blocks == 0, splits_DW, received_DS


@compiled(None)
def _groups(ranks: int, own: int, node_size: int) -> np.ndarray:
    """Return [D] each rank's group: its node, but `own` is alone in a group and splits its node."""
    group_D = np.zeros(ranks, np.int64)
    group = 0
    for rank in range(1, ranks):
        group += rank % node_size == 0 or rank == own or rank == own + 1
        group_D[rank] = group
    return group_D


@compiled(None)
def _added_up(counts_DE: np.ndarray, group_D: np.ndarray) -> np.ndarray:
    ranks, experts = counts_DE.shape
    sums_GE = np.zeros((group_D[-1] + 1, experts), np.int64)
    for rank in range(ranks):
        sums_E = sums_GE[group_D[rank]]
        counts_E = counts_DE[rank]
        for expert in range(experts):
            sums_E[expert] += counts_E[expert]
    return sums_GE
