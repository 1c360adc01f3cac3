"""Exchange of tokens between the ranks of a group: the AllToAll interface and its flat implementation.

Rows travel whole: `input_splits[r]` rows of the input go to rank r, `output_splits[r]` rows come from it, in the order
of the ranks. Splits are per-rank lists of ints and may hold zeros; every rank of the group has to take part.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Exchange:
    """A started exchange; `wait()` returns the received rows."""

    _output: torch.Tensor
    _wait: Callable[[], Any]

    def wait(self) -> torch.Tensor:
        """[sum(output_splits), ...]: rows from rank 0, then rank 1, ..."""
        self._wait()
        return self._output


class AllToAll(ABC):
    """Rows to every rank of `group`, rows from every rank of it (AbsAlltoAll, ScheMoE section 3.1)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @abstractmethod
    def start(self, rows: torch.Tensor, output_splits: list[int], input_splits: list[int]) -> Exchange:
        """Start sending `rows` [sum(input_splits), ...] of any dtype and return at once."""

    def __call__(self, rows: torch.Tensor, output_splits: list[int], input_splits: list[int]) -> torch.Tensor:
        """The exchange as a differentiable function: the gradient takes the reverse way."""
        if self.group.size() == 1:
            return rows
        return _Differentiable.apply(rows, self, output_splits, input_splits)


class FlatAllToAll(AllToAll):
    """The backend's own `all_to_all_single`."""

    def start(self, rows: torch.Tensor, output_splits: list[int], input_splits: list[int]) -> Exchange:
        rows = rows.contiguous()
        received = rows.new_empty((sum(output_splits), *rows.shape[1:]))
        work = dist.all_to_all_single(received, rows, output_splits, input_splits, group=self.group, async_op=True)
        assert work is not None
        return Exchange(received, work.wait)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, all_to_all: AllToAll, output_splits: list[int], input_splits: list[int]
    ) -> torch.Tensor:
        ctx.reverse = (all_to_all, input_splits, output_splits)
        return all_to_all.start(rows, output_splits, input_splits).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        all_to_all, output_splits, input_splits = ctx.reverse
        return all_to_all.start(gradient, output_splits, input_splits).wait(), None, None, None
