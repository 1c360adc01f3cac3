"""Blocks of rows in another order: one gather of rows by index on a device, and pieces that are joined on a CPU.

A block is a run of consecutive rows that stay together, such as the rows of one source for one slot. The host knows all
sizes, so it decides where every block goes. A device gets two numbers per block, and all moves of one layer in one
copy; it then finds the row at each place by itself. Nothing waits for the device.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from megatron_balance.device.host_memory import to_device
from megatron_balance.kernels import of_rows


class Move(NamedTuple):
    """Blocks and their new order. In shapes, N counts blocks."""

    sizes_N: np.ndarray
    """Number of rows of each block, int64, in the present order."""

    order_N: np.ndarray
    """The block at each place of the new order."""

    @classmethod
    def transposed(cls, sizes: np.ndarray, dimensions: Sequence[int]) -> "Move":
        """Return the move of blocks from the layout of `sizes` to that of `sizes.transpose(dimensions)`."""
        order = np.arange(sizes.size).reshape(sizes.shape).transpose(dimensions)
        return cls(sizes.reshape(-1), order.reshape(-1))

    @property
    def back(self) -> "Move":
        """The move that undoes this one."""
        place_N = np.empty_like(self.order_N)
        place_N[self.order_N] = np.arange(len(place_N))
        return Move(self.sizes_N[self.order_N], place_N)


Table = tuple[np.ndarray, np.ndarray]
"""For each block in its new place, how many rows it comes from behind it, and where it ends there."""


class Gather:
    """Moves rows [R, ...] on one device; not differentiable."""

    def __init__(self, move: Move, table: Table | None, index_R: torch.Tensor | None = None) -> None:
        """
        Args:
            table: None: every row is in its place.
            index_R: [R] int32 on the rows' device: the row for each place; None: rows are in host memory.
        """
        self.move, self.table, self._index_R = move, table, index_R

    @property
    def stays(self) -> bool:
        """Whether every row is in its place."""
        return self.table is None

    @functools.cached_property
    def index_R(self) -> torch.Tensor:
        """[R] int32: the row for each place, if some row moves."""
        if self._index_R is not None:
            return self._index_R
        assert self.table is not None
        return next(_indices([self.table], torch.device("cpu")))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self.stays:
            return rows
        if self._index_R is not None:
            return rows.index_select(0, self._index_R)
        # A CPU copies whole blocks faster than rows
        parts = rows.split(self.move.sizes_N.tolist())
        return torch.cat([parts[block] for block in self.move.order_N.tolist()])


def gathers(moves: Sequence[Move], device: torch.device) -> list[Gather]:
    """Return what executes each move on `device`."""
    tables = [_table(move) for move in moves]
    if device.type == "cpu":
        return [Gather(move, table) for move, table in zip(moves, tables, strict=True)]
    indices = _indices([table for table in tables if table is not None], device)
    return [
        Gather(move, table, None if table is None else next(indices)) for move, table in zip(moves, tables, strict=True)
    ]


def transposed(rows: torch.Tensor, sizes: torch.Tensor, dimensions: Sequence[int]) -> torch.Tensor:
    """Reorder blocks of rows from the layout of `sizes` to that of `sizes.permute(dimensions)`.

    Args:
        rows: [sum of sizes, ...].
        sizes: number of rows of each block, int64 in host memory.
    """
    (gather,) = gathers([Move.transposed(sizes.numpy(), dimensions)], rows.device)
    return gather(rows)


def _table(move: Move) -> Table | None:
    """Return the table of a move, without empty blocks; None: every row is in its place."""
    sizes_N, order_N = move
    order_N = order_N[sizes_N[order_N] > 0]
    if len(order_N) < 2 or (order_N[1:] > order_N[:-1]).all():
        return None
    starts_N, moved_N = (sizes_N.cumsum() - sizes_N)[order_N], sizes_N[order_N]
    ends_N = moved_N.cumsum()
    return starts_N - (ends_N - moved_N), ends_N


def _indices(tables: Sequence[Table], device: torch.device) -> Iterator[torch.Tensor]:
    """Return the index of each move, int32."""
    if not tables:
        return iter(())
    lengths = [int(ends_N[-1]) for _, ends_N in tables]
    firsts = np.cumsum([0, *lengths])
    shifts = np.concatenate([shift_N - first for (shift_N, _), first in zip(tables, firsts, strict=False)])
    ends = np.concatenate([ends_N + first for (_, ends_N), first in zip(tables, firsts, strict=False)])
    ends_N, shift_N = to_device(torch.from_numpy(np.stack([ends, shifts]).astype(np.int32)), device).unbind()
    kernels = of_rows(device)
    indexed = block_index if kernels is None else kernels.block_index
    return iter(indexed(ends_N, shift_N, int(firsts[-1])).split(lengths))


def block_index(ends_N: torch.Tensor, shift_N: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [rows] int32: the number of each row plus the shift of its block.

    Args:
        ends_N: where each block ends, ascending; the last one at `rows`.
        shift_N: int32.
    """
    sizes_N = ends_N.diff(prepend=ends_N.new_zeros(1))
    shift_R = shift_N.repeat_interleave(sizes_N, output_size=rows)
    return shift_R + torch.arange(rows, dtype=torch.int32, device=ends_N.device)
