"""A checkpoint's tensors in pieces, each of which a few tensors of a Hugging Face model are.

A torch_dist checkpoint holds a tensor for all layers, and for all of their experts; a Hugging Face model has one for
each, and cuts some of them otherwise. A `Piece` is small enough to be held in memory: a matrix of one layer, or of one
expert.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Size = tuple[int, ...]


class Join(ABC):
    """How tensors of the source become one, and back."""

    @abstractmethod
    def sizes(self, size: Size) -> list[Size]:
        """Of the tensors that become one of `size`."""

    @abstractmethod
    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor: ...

    @abstractmethod
    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `join`."""


class Same(Join):
    """One tensor."""

    def sizes(self, size: Size) -> list[Size]:
        return [size]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        return part

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole]


class Rows(Join):
    """Equal numbers of rows of each, one after the other: the gate of a gated unit, and what it lets through."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def sizes(self, size: Size) -> list[Size]:
        return [(size[0] // self.parts, *size[1:])] * self.parts

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.chunk(self.parts))


class QueryKeyValue(Join):
    """Rows of the queries, keys and values of attention -> megatron-core's: those of each group of queries together."""

    def __init__(self, heads: int, groups: int, channels: int) -> None:
        """
        Args:
            heads: of queries.
            groups: heads of keys, and of values.
            channels: of a head.
        """
        self.heads, self.groups, self.channels = heads, groups, channels

    def sizes(self, size: Size) -> list[Size]:
        return [(heads * self.channels, *size[1:]) for heads in (self.heads, self.groups, self.groups)]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        grouped = [part.reshape(self.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        queries = self.heads // self.groups * self.channels
        grouped = whole.reshape(self.groups, queries + 2 * self.channels, *whole.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split([queries, self.channels, self.channels], dim=1)]


@dataclass(frozen=True)
class Piece:
    """A part of one tensor of a checkpoint."""

    key: str
    """Of that tensor."""
    shape: Size
    """Of that whole tensor."""
    at: Size
    """Where in it: one index for each of its leading axes, layers and experts."""
    sources: tuple[str, ...]
    """The tensors that it is, by their names in the Hugging Face model."""
    join: Join = field(default_factory=Same)

    @property
    def size(self) -> Size:
        """Without the axes of `at`."""
        return self.shape[len(self.at) :]

    @property
    def source_sizes(self) -> dict[str, Size]:
        return dict(zip(self.sources, self.join.sizes(self.size), strict=True))
