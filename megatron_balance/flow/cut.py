"""What a plan means for the rows of one rank, found in one loop, because a device waits for it.

It is the same as `sending` (flow/rows.py) and sums over slots find, for one chunk of rows that no other rank has.
"""

from typing import NamedTuple

import numpy as np
import torch

from megatron_balance.comm.blocks import STAYS, Gather, gather_of
from megatron_balance.device.compiled import compiled
from megatron_balance.placement.placement import Placement


class Cut(NamedTuple):
    """How the rows of a rank are sent."""

    rows: int
    """Number of rows."""

    splits_DH: np.ndarray
    """Rows from each source to each host, int64."""

    there: Gather
    """Moves rows from the order by expert to the one in which they are sent."""


def cut(placement: Placement, tokens_DP: torch.Tensor, source: int, device: torch.device) -> Cut:
    """Return how the rows of `source` are sent.

    Args:
        tokens_DP: a plan's, int64 in host memory: rows from each source to each physical expert.
        device: where the rows are.
    """
    tables = placement.tables
    splits_DH = np.empty((len(tokens_DP), placement.num_ranks), np.int64)
    table = np.empty(0 if tables.in_place else 3 * len(tables.physical_N), np.int32)
    rows, used = _cut(tokens_DP.numpy(), source, tables.physical_N, tables.by_physical_N, splits_DH, table)
    there = gather_of(torch.from_numpy(table[: 3 * used].reshape(3, used)), rows, device) if used else STAYS
    return Cut(rows, splits_DH, there)


def prepare_cuts() -> None:
    """Compile what `cut` needs, so that no forward pass takes seconds for it."""
    _cut.prepare()


@compiled("UniTuple(int64, 2)(int64[:, ::1], int64, int64[::1], int64[::1], int64[:, ::1], int32[::1])")
def _cut(
    tokens_DP: np.ndarray,
    source: int,
    physical_N: np.ndarray,
    by_physical_N: np.ndarray,
    splits_DH: np.ndarray,
    table: np.ndarray,
) -> tuple[int, int]:
    """Fill `splits_DH`, and the beginning of `table` with what `blocks.indexed` takes, one row after another.

    Returns:
        the number of rows of `source`, and the length of a row of the table; 0 if every row is in its place.
    """
    sources, hosts = splits_DH.shape
    slots = tokens_DP.shape[1] // hosts
    for row in range(sources):
        for host in range(hosts):
            number = 0
            for slot in range(slots):
                number += tokens_DP[row, host * slots + slot]
            splits_DH[row, host] = number
    rows, used = splits_DH[source].sum(), 0
    if not len(table):
        return rows, 0
    start_N, at = np.empty_like(physical_N), 0
    for n in range(len(physical_N)):
        size, start_N[n] = tokens_DP[source, physical_N[n]], at
        at += size
        used += size > 0
    end, last, place, stays = 0, -1, 0, True
    for n in by_physical_N:
        size = tokens_DP[source, physical_N[n]]
        if size > 0:
            stays &= n > last
            table[used + place] = start_N[n] - end
            table[2 * used + place] = size
            end += size
            table[place] = end
            last = n
            place += 1
    return rows, 0 if stays else used
