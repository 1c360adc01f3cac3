"""Divide a checkpoint's tensors into pieces, each of which corresponds to a few tensors of a Hugging Face model.

A torch_dist checkpoint has one tensor for all layers and all their experts. A Hugging Face model has one for each, and
splits some of them differently. A `Piece`, a matrix of one layer or expert, is small enough to be held in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch

Size = tuple[int, ...]


class Join(ABC):
    """How several source tensors are joined into one, and split again."""

    @abstractmethod
    def sizes(self, size: Size) -> list[Size]:
        """Return the sizes of the tensors that are joined into one of `size`."""

    @abstractmethod
    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the source tensors."""

    @abstractmethod
    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Split a joined tensor: the inverse of `join`."""


class Same(Join):
    """A single tensor, unchanged."""

    def sizes(self, size: Size) -> list[Size]:
        return [size]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        return part

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole]


class Rows(Join):
    """Tensors with equal numbers of rows, concatenated: the gate and up projections of a gated unit."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def sizes(self, size: Size) -> list[Size]:
        return [(size[0] // self.parts, *size[1:])] * self.parts

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.chunk(self.parts))


class QueryKeyValue(Join):
    """Rows of queries, keys and values, interleaved by query group as megatron-core stores them."""

    def __init__(self, heads: int, groups: int, channels: int) -> None:
        """
        Args:
            heads: number of query heads.
            groups: number of key heads and of value heads.
            channels: channels of a head.
        """
        self.heads = heads
        self.groups = groups
        self.channels = channels

    def sizes(self, size: Size) -> list[Size]:
        return [(heads * self.channels, *size[1:]) for heads in (self.heads, self.groups, self.groups)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        grouped = [part.reshape(self.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        queries = self.heads // self.groups * self.channels
        grouped = whole.reshape(self.groups, queries + 2 * self.channels, *whole.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split([queries, self.channels, self.channels], dim=1)]


class RotaryPairs(Join):
    """One tensor with rotary channels i and i + n/2 of a head as a pair; megatron-core pairs channels 2i and 2i + 1.

    This applies to multi-latent attention only. Scores do not depend on the order of the channels, because queries and
    keys have the same one.
    """

    def __init__(self, heads: int, before: int, rotary: int) -> None:
        """
        Args:
            heads: number of heads.
            before: rows of a head before its rotary channels.
            rotary: rotary channels of a head.
        """
        self.heads = heads
        self.before = before
        self.rotary = rotary

    def sizes(self, size: Size) -> list[Size]:
        return [size]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        return self._reordered(part, 2)

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [self._reordered(whole, self.rotary // 2)]

    def _reordered(self, rows: torch.Tensor, parts: int) -> torch.Tensor:
        """Interleave this many equal parts of each head's rotary channels."""
        channels = torch.arange(self.rotary).reshape(parts, -1).t().flatten()
        order = torch.cat([torch.arange(self.before), self.before + channels])
        return rows.reshape(self.heads, -1, *rows.shape[1:])[:, order].reshape(rows.shape)


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
    join: Join = field(default_factory=Same)

    @property
    def size(self) -> Size:
        """Shape of the piece, without the axes of `at`."""
        return self.shape[len(self.at) :]

    @property
    def source_sizes(self) -> dict[str, Size]:
        """Shapes of the source tensors, by name."""
        return dict(zip(self.sources, self.join.sizes(self.size), strict=True))
