"""What a plan means for the rows of one rank, found in one loop, because a device waits for it.

It is the same as a plan's numbers, `sending` (flow/rows.py) and sums over slots find, for one chunk of rows that no
other rank has.
"""

from typing import NamedTuple

import numpy as np
import torch

from megatron_balance.comm.blocks import STAYS, Gather, gather_of, needs_ends
from megatron_balance.device.compiled import compiled
from megatron_balance.device.host_memory import staging
from megatron_balance.flow.plan import DispatchPlan, sent_to_hosts

_NO_TABLE = torch.empty((2, 0), dtype=torch.int32)


class Cut(NamedTuple):
    """How the rows of a rank are sent, and what it receives."""

    rows: int
    """Number of rows."""

    splits_DH: np.ndarray
    """Rows from each source to each host, int64."""

    received_DS: np.ndarray
    """Rows from each source for each slot of this host, int64."""

    there: Gather
    """Moves rows from the order by expert to the one in which they are sent."""


def cut(plan: DispatchPlan, rank: int, device: torch.device) -> Cut:
    """Return how the rows of `rank` are sent, and what it receives; each host is one source.

    Args:
        device: where the rows are.
    """
    tables = plan.placement.tables
    table_2N = _NO_TABLE if tables.in_place else staging((2, len(tables.physical_N)), torch.int32, device)
    rows, stays, splits_DH, received_DS = _cut(
        plan.counts_DE.numpy(),
        *tables.hosting,
        *plan.rules,
        tables.physical_N,
        tables.slots_per_rank,
        tables.by_physical_N,
        rank,
        table_2N.numpy(),
        needs_ends(device),
    )
    return Cut(rows, splits_DH, received_DS, STAYS if stays else gather_of(table_2N, rows, device))


def prepare_cuts() -> None:
    """Compile what `cut` needs, so that no forward pass takes seconds for it."""
    _cut.prepare()


@compiled(
    "Tuple((int64, boolean, int64[:, ::1], int64[:, ::1]))(int64[:, ::1], int64[::1], int64[::1], int64[::1], "
    "int64[::1], int64, boolean, int64[::1], int64, int64[::1], int64, int32[:, ::1], boolean)"
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
    table_2N: np.ndarray,
    ends: bool,
) -> tuple[int, bool, np.ndarray, np.ndarray]:
    """Return the numbers of a `Cut`, and whether every row is in its place; fill the table for `gather_of` with `ends`.

    If the table is empty, every row is in its place.
    """
    ranks, experts = counts_DE.shape
    sent_MD = sent_to_hosts(counts_DE, first_E, host_N, share_N, primary_E, node_size, local_first)
    splits_DH, received_DS = np.empty((ranks, ranks), np.int64), np.zeros((ranks, slots), np.int64)
    # The experts with one host, by host, and what this rank sends
    alone_N, sizes_N, m = np.full(len(physical_N), -1), np.empty_like(physical_N), 0
    for expert in range(experts):
        begin, end = first_E[expert], first_E[expert + 1]
        if end - begin == 1:
            alone_N[begin], sizes_N[begin] = expert, counts_DE[own, expert]
            continue
        for n in range(begin, end):
            sizes_N[n] = sent_MD[m, own]
            m += 1
    # Without a sign, so that no index is checked for one
    experts_W, first_H, wholes, host = np.empty(experts, np.uint64), np.empty(ranks + 1, np.uint64), 0, 0
    for n in by_physical_N:
        while host <= host_N[n]:
            first_H[host] = wholes
            host += 1
        if alone_N[n] >= 0:
            experts_W[wholes] = alone_N[n]
            wholes += 1
            if host - 1 == own:
                received_DS[:, physical_N[n] % slots] = counts_DE[:, alone_N[n]]
    first_H[host:] = wholes
    _add_up(counts_DE, experts_W[:wholes], first_H, splits_DH)
    m = 0
    for n in range(len(physical_N)):
        if alone_N[n] < 0:
            host = host_N[n]
            for rank in range(ranks):
                splits_DH[rank, host] += sent_MD[m, rank]
            if host == own:
                received_DS[:, physical_N[n] % slots] = sent_MD[m]
            m += 1
    stays = table_2N.shape[1] == 0 or _write_blocks(sizes_N, by_physical_N, table_2N, ends)
    return splits_DH[own].sum(), stays, splits_DH, received_DS


@compiled(None)
def _add_up(counts_DE: np.ndarray, experts_W: np.ndarray, first_H: np.ndarray, splits_DH: np.ndarray) -> None:
    """Set the rows from each source to each host: those for `experts_W[first_H[host] : first_H[host + 1]]`.

    They are differences of sums, because a loop over each host's few experts takes longer.
    """
    until_W = np.empty(len(experts_W) + 1, np.int64)
    for rank in range(len(splits_DH)):
        total, counts_E, splits_H = 0, counts_DE[rank], splits_DH[rank]
        for w, expert in enumerate(experts_W):
            until_W[w] = total
            total += counts_E[expert]
        until_W[len(experts_W)] = total
        for host in range(len(splits_H)):
            splits_H[host] = until_W[first_H[host + 1]] - until_W[first_H[host]]


@compiled(None)
def _write_blocks(sizes_N: np.ndarray, order_N: np.ndarray, table_2N: np.ndarray, ends: bool) -> bool:
    """Fill the table for `gather_of`; return whether every row is in its place."""
    start_N, at = np.empty_like(sizes_N), 0
    for n in range(len(sizes_N)):
        start_N[n] = at
        at += sizes_N[n]
    end, last, stays = 0, -1, True
    for place, n in enumerate(order_N):
        size = sizes_N[n]
        table_2N[0, place] = start_N[n] - end
        end += size
        table_2N[1, place] = end if ends else size
        if size > 0:
            stays &= n > last
            last = n
    return stays
