"""A row for every expert that a token chose, and the sums of each token's rows.

Both directions and their gradients read by index. No two threads add to the same memory, so that the same rows give the
same bits in every run, on CUDA too. A sum adds rows in their order, in float32 or better, and is rounded once. The host
knows the number of rows; nothing here waits for the device.

In shapes, P counts the columns of the routing: physical experts, for each member and chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import permute, unpermute


class Rows(NamedTuple):
    """Rows grouped by column; the rows of a column are in the order of their tokens."""

    rows_RH: torch.Tensor
    probs_R: torch.Tensor
    """Combine weight of each row."""

    combine: Callable[[torch.Tensor], torch.Tensor]
    """[R, H] -> [T, H]: the sum of each token's rows; zero for a token without rows."""


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The token of each row, and the rows of each token: all int64, on the routing's device."""

    token_R: torch.Tensor
    column_R: torch.Tensor
    by_token_R: torch.Tensor
    """The rows of token 0, then those of token 1, and so on; the rows of each token ascend."""

    first_T: torch.Tensor
    """Index of each token's first row in `by_token_R`."""

    @classmethod
    @torch.no_grad()
    def of(cls, routing_TP: torch.Tensor, rows: int) -> "RowOrder":
        """Return the order of a routing [T, P] bool with `rows` true entries."""
        column_R, token_R = routing_TP.T.nonzero_static(size=rows).unbind(1)
        # A radix sort of 32 bits has half the passes of a sort of 64
        tokens_R, by_token_R = token_R.to(torch.int32).sort(stable=True)
        tokens_T = torch.arange(len(routing_TP), dtype=torch.int32, device=routing_TP.device)
        return cls(token_R, column_R, by_token_R, torch.searchsorted(tokens_R, tokens_T))


def rows_of(tokens_TH: torch.Tensor, probs_TP: torch.Tensor, routing_TP: torch.Tensor, rows: int) -> Rows:
    """Return the rows of a routing [T, P] bool with `rows` true entries; differentiable."""
    order = RowOrder.of(routing_TP, rows)
    probs_R = _Weights.apply(probs_TP, order)
    return Rows(gather_rows(tokens_TH, order), probs_R, lambda rows_RH: combine(rows_RH, order))


def fused_rows_of(tokens_TH: torch.Tensor, probs_TP: torch.Tensor, routing_TP: torch.Tensor, rows: int) -> Rows:
    """Do the same as `rows_of` with Transformer Engine's kernels, which add a token's rows in another order."""
    # megatron-core 0.19 also returns padding
    rows_RH, probs_R, order, *_ = permute(tokens_TH, routing_TP, probs=probs_TP, num_out_tokens=rows, fused=True)
    assert probs_R is not None
    shape = tokens_TH.shape
    return Rows(rows_RH, probs_R, lambda rows_RH: unpermute(rows_RH, order, restore_shape=shape, fused=True))


def gather_rows(tokens_TH: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Copy each row from its token: [T, H] -> [R, H]."""
    return _Copies.apply(tokens_TH, order)


def combine(rows_RH: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Add up each token's rows, the transpose of `gather_rows`: [R, H] -> [T, H]."""
    return _Sums.apply(rows_RH, order)


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_TH: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.order = order
        return tokens_TH.index_select(0, order.token_R)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient_RH,) = gradients
        return combine(gradient_RH, ctx.order), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.order = order
        # Detached, so that torch keeps nothing for a backward pass
        return F.embedding_bag(order.by_token_R, rows_RH.detach(), order.first_T, mode="sum")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient_TH,) = gradients
        return gather_rows(gradient_TH, ctx.order), None


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs_TP: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.order, ctx.shape = order, probs_TP.shape
        return probs_TP[order.token_R, order.column_R]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient_R,) = gradients
        # No two rows have the same place. Autograd cannot rely on that: it would sort the places and add
        gradient_TP = gradient_R.new_zeros(ctx.shape)
        return gradient_TP.index_put_((ctx.order.token_R, ctx.order.column_R), gradient_R), None
