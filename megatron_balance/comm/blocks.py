"""Reorders blocks of rows: by one gather of rows on a device, by concatenation of blocks on a CPU.

A block is a run of consecutive rows that stay together, such as the rows of one source for one slot. The host knows all
sizes. One copy takes two numbers per block to the device, for all moves of a layer, and a kernel expands them to the
index of each row. Without Triton, the copy takes the indices. Nothing waits for the device.
"""

import functools
from collections.abc import Sequence
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


class Gather:
    """Moves rows [R, ...] on one device; not differentiable."""

    def __init__(self, index_R: torch.Tensor | None = None, move: BlockMove | None = None) -> None:
        """`move`: blocks, on a CPU. `index_R`: each place's source row, int32 on the rows' device. None: no row
        moves."""
        self._index_R = index_R
        self._move = move

    @property
    def stays(self) -> bool:
        """Whether no row moves."""
        return self._index_R is None and self._move is None

    @property
    def index_R(self) -> torch.Tensor:
        """[R] int32: the source row of each place; must not be read if no row moves."""
        if self._index_R is None:
            assert self._move is not None, "no row moves"
            (self._index_R,) = _indices([self._move], torch.device("cpu"))
        assert self._index_R is not None
        return self._index_R

    @functools.cached_property
    def back(self) -> "Gather":
        """The inverse gather."""
        if self._move is not None:
            return Gather(move=self._move.back)
        if self.stays:
            return self
        place_R = torch.empty_like(self.index_R)
        rows_R = torch.arange(len(place_R), dtype=place_R.dtype, device=place_R.device)
        return Gather(place_R.index_put_((self.index_R,), rows_R))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._move is not None:
            parts = rows.split(self._move.sizes_X.tolist())
            return torch.cat([parts[block] for block in self._move.order_X.tolist()])
        return rows if self._index_R is None else rows.index_select(0, self._index_R)


STAYS = Gather()


def gathers(moves: Sequence[BlockMove], device: torch.device) -> list[Gather]:
    """Return the gathers that execute the moves on `device`."""
    if device.type == "cpu":
        return [STAYS if _stays(*move) else Gather(move=move) for move in moves]
    return [STAYS if index_R is None else Gather(index_R) for index_R in _indices(moves, device)]


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


def _stays(sizes_X: np.ndarray, order_X: np.ndarray) -> bool:
    order_X = order_X[sizes_X[order_X] > 0]
    return bool((order_X[1:] > order_X[:-1]).all())


def _indices(moves: Sequence[BlockMove], device: torch.device) -> list[torch.Tensor | None]:
    """Return the int32 index of each move; None if no row moves."""
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
        return [None] * len(moves)
    room = torch.from_numpy(room[:, : used if by_block else total].copy())
    index_R = _indexed(to_device(room, device), total)
    if len(moves) == 1:
        return [index_R]
    return [part if rows else None for part, rows in zip(index_R.split(lengths), lengths, strict=True)]


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
