"""Divide a checkpoint's tensors into pieces, each of which corresponds to a few tensors of a Hugging Face model.

A torch_dist checkpoint has one tensor for all layers and all their experts. A Hugging Face model has one for each, and
splits some of them differently. A `Piece`, a matrix of one layer or expert, is small enough to be held in memory.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol

import torch

Size = tuple[int, ...]


class Join(NamedTuple):
    """How several source tensors are joined into one, and split again."""

    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    split: Callable[[torch.Tensor], list[torch.Tensor]]
    """The inverse of `join`."""


SAME = Join(lambda parts: parts[0], lambda whole: [whole])
"""A single tensor, unchanged."""

HALVES = Join(lambda parts: torch.cat(list(parts)), lambda whole: list(whole.chunk(2)))
"""Two tensors with equal numbers of rows: the gate and up projections of a gated unit."""


ROW = Join(lambda parts: parts[0].squeeze(0), lambda whole: [whole.unsqueeze(0)])
"""A single row, of a matrix in the source."""

TRANSPOSED = Join(lambda parts: parts[0].mT, lambda whole: [whole.mT])
"""A matrix for each expert, [E, I, O] in the source."""


def _in_halves(alternating: torch.Tensor) -> torch.Tensor:
    """Move the even rows of each expert [E, 2 I, ...] before the odd ones."""
    return alternating.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _alternating(halves: torch.Tensor) -> torch.Tensor:
    """Do the inverse of `_in_halves`."""
    return halves.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


ALTERNATING = Join(lambda parts: _in_halves(parts[0]), lambda whole: [_alternating(whole)])
"""One number of each gate, then of each up projection, [E, 2 I]; they alternate in the source."""

ALTERNATING_COLUMNS = Join(lambda parts: _in_halves(parts[0].mT), lambda whole: [_alternating(whole).mT])
"""A matrix of gate and up projections for each expert, [E, I, 2 O] in the source, where they alternate."""


@functools.cache
def query_key_value(heads: int, groups: int, channels: int) -> Join:
    """Return the join of queries, keys and values, interleaved by query group as megatron-core stores them. There are
    `heads` query heads, `groups` key heads and `groups` value heads, of `channels` channels each."""
    rows = [heads // groups * channels, channels, channels]

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(whole: torch.Tensor) -> list[torch.Tensor]:
        grouped = whole.reshape(groups, sum(rows), *whole.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split(rows, dim=1)]

    return Join(join, split)


@functools.cache
def rotary_pairs(heads: int, before: int, rotary: int) -> Join:
    """Return the join of one tensor that reorders rotary channels: they are pairs i and i + n/2 in the source.

    megatron-core pairs channels 2i and 2i + 1 of multi-latent attention. Scores do not depend on the order of the
    channels, because queries and keys have the same one.

    Args:
        heads: number of heads.
        before: rows of a head before its rotary channels.
        rotary: rotary channels of a head.
    """

    def interleaved(rows: torch.Tensor, parts: int) -> torch.Tensor:
        """Interleave this many equal parts of each head's rotary channels."""
        channels = torch.arange(rotary).reshape(parts, -1).t().flatten()
        order = torch.cat([torch.arange(before), before + channels])
        return rows.reshape(heads, -1, *rows.shape[1:])[:, order].reshape(rows.shape)

    return Join(lambda parts: interleaved(parts[0], 2), lambda whole: [interleaved(whole, rotary // 2)])


@functools.lru_cache(maxsize=1000)
def _sizes(join: Join, size: Size) -> list[Size]:
    """Return the sizes of the tensors that are joined into one of `size`."""
    return [tuple(part.shape) for part in join.split(torch.empty(size, device="meta"))]


@dataclass(frozen=True)
class Piece:
    """A part of one tensor of a checkpoint."""

    key: str
    """Name of the tensor."""
    shape: Size
    """Shape of the whole tensor."""
    at: Size
    """Position of the piece: one index for each leading axis (layers, experts)."""
    sources: tuple[str, ...]
    """Names of the corresponding tensors in the Hugging Face model."""
    _: KW_ONLY
    join: Join = SAME

    @property
    def size(self) -> Size:
        """Shape of the piece, without the axes of `at`."""
        return self.shape[len(self.at) :]

    @property
    def source_sizes(self) -> dict[str, Size]:
        """Shapes of the source tensors, by name."""
        return dict(zip(self.sources, _sizes(self.join, self.size), strict=True))


class PieceSource(Protocol):
    """A model or checkpoint from which pieces are made."""

    def dtype(self, piece: Piece) -> torch.dtype: ...

    def make(self, piece: Piece) -> torch.Tensor: ...
