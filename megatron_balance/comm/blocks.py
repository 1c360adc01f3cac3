"""Reorders blocks of rows by one gather of rows.

A block is a run of consecutive rows that stay together, such as the rows of one source for one slot. The host knows all
sizes. One copy takes two numbers per block to the device, for all moves of a layer, and a kernel expands them to the
index of each row. Without Triton, the copy takes the indices. Nothing waits for the device.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron_balance.device.compiled import compiled
from megatron_balance.device.host_memory import staging, to_device
from megatron_balance.kernels import of_rows


class BlockMove(NamedTuple):
    """Blocks and their new order. In shapes, X counts blocks."""

    sizes_X: np.ndarray
    """int64: rows of each block, in the current order."""
    order_X: np.ndarray
    """Block at each place of the new order."""

    @classmethod
    def transposed(cls, sizes: np.ndarray, dimensions: Sequence[int]) -> "BlockMove":
        """Return the move that transposes the layout `sizes` of blocks to `sizes.transpose(dimensions)`."""
        order = np.arange(sizes.size).reshape(sizes.shape).transpose(dimensions)
        return cls(sizes.reshape(-1), order.reshape(-1))

    @property
    def back(self) -> "BlockMove":
        """The inverse move."""
        place_X = np.empty_like(self.order_X)
        place_X[self.order_X] = np.arange(len(place_X))
        return BlockMove(self.sizes_X[self.order_X], place_X)


@dataclass(frozen=True, eq=False)
class Gather:
    """Moves rows [R, ...] on one device; not differentiable."""

    index_R: torch.Tensor | None = None
    """int32, on the rows' device: the source row of each place. None: no row moves."""

    @functools.cached_property
    def back(self) -> "Gather":
        """The inverse gather."""
        if self.index_R is None:
            return self
        place_R = torch.empty_like(self.index_R)
        rows_R = torch.arange(len(place_R), dtype=place_R.dtype, device=place_R.device)
        return Gather(place_R.index_put_((self.index_R,), rows_R))

    def __call__(self, rows: torch.Tensor, room: int = 0) -> torch.Tensor:
        """Return the moved rows. If there are fewer than `room`, undefined rows follow them, `room` rows in all."""
        if self.index_R is None:
            missing = room - len(rows)
            return rows if missing <= 0 else torch.cat([rows, rows.new_empty((missing, *rows.shape[1:]))])
        if not room:
            return rows.index_select(0, self.index_R)
        moved = rows.new_empty((room, *rows.shape[1:]))
        torch.index_select(rows, 0, self.index_R, out=moved[: len(self.index_R)])
        return moved


STAYS = Gather()


def gathers(moves: Sequence[BlockMove], device: torch.device) -> list[Gather]:
    """Return the gathers that execute the moves on `device`."""
    by_block = of_rows(device) is not None
    places = sum(len(move.order_X) if by_block else int(move.sizes_X.sum()) for move in moves)
    room = np.empty((2 if by_block else 1, places), dtype=np.int32)
    used = 0
    total = 0
    lengths = list[int]()
    for move in moves:
        blocks, rows = write_blocks(*move, room, used, total)
        used += blocks
        total += rows
        lengths.append(rows)
    if not used:
        return [STAYS] * len(moves)
    room = torch.from_numpy(room[:, : used if by_block else total].copy())
    index_R = _indexed(to_device(room, device), total)
    return [Gather(part) if rows else STAYS for part, rows in zip(index_R.split(lengths), lengths, strict=True)]


def gather_room(blocks: int, most_rows: int, device: torch.device) -> torch.Tensor:
    """Return uninitialized int32 `staging` memory for `gather_of`: [2, blocks], or [1, most_rows] without Triton."""
    return staging((2, blocks) if of_rows(device) is not None else (1, most_rows), torch.int32, device)


def gather_of(room: torch.Tensor, rows: int, device: torch.device) -> Gather:
    """Return the gather of a filled `gather_room`. [2, X] has two numbers per block in the new order: the source minus
    the target index of its rows, and its end; blocks may be empty. [1, R] starts with the source row of each place."""
    return Gather(_indexed(room.to(device, non_blocking=True), rows))


def transposed(rows: torch.Tensor, sizes: torch.Tensor, dimensions: Sequence[int]) -> torch.Tensor:
    """Transpose blocks of rows from the layout `sizes`, int64 in host memory, to `sizes.permute(dimensions)`."""
    (gather,) = gathers([BlockMove.transposed(sizes.numpy(), dimensions)], rows.device)
    return gather(rows)


def _indexed(room: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [rows] int32: the source row of each place, given a `gather_room` on the device."""
    if len(room) == 1:
        return room[0, :rows]
    shift_X, end_X = room
    kernels = of_rows(room.device)
    assert kernels is not None, "a room has no blocks without kernels"
    return kernels.block_index(end_X, shift_X, rows)


@compiled("UniTuple(int64, 2)(int64[:], int64[:], int32[:, ::1], int64, int64)")
def write_blocks(sizes_X: np.ndarray, order_X: np.ndarray, room: np.ndarray, at: int, before: int) -> tuple[int, int]:
    """Append a move's non-empty blocks to a `gather_room` that holds `at` blocks of `before` rows. Return the numbers
    of written blocks and of rows; (0, 0) if no row moves."""
    start_X = np.empty_like(sizes_X)
    rows = 0
    for block in range(len(sizes_X)):
        start_X[block] = rows
        rows += sizes_X[block]
    end = before
    last = -1
    place = at
    stays = True
    for block in order_X:
        size = sizes_X[block]
        start = start_X[block]
        if size > 0:
            stays &= block > last
            if len(room) == 1:
                for row in range(size):
                    room[0, end + row] = start + row
            end += size
            if len(room) == 2:
                room[0, place] = start + size - end
                room[1, place] = end
            last = block
            place += 1
    return (0, 0) if stays else (place - at, rows)
