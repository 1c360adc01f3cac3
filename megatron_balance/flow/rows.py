"""A row for every expert that a token chose, and the sums of each token's rows.

The order of rows is found once, by expert, before the host knows how many there are for each expert. When it knows, the
rows of every expert are cut into blocks, one for each member, host and chunk, and the blocks move to where they are
sent from. Nothing here waits for the device.

Both directions and their gradients read by index. No two threads add to the same memory, so that the same rows give the
same bits in every run, on CUDA too. A sum adds a token's rows in the order of their experts, whatever their hosts and
chunks, in float32 or better, and is rounded once.

In shapes, M counts the members that send rows of the same tokens, and N the pairs of an expert and a host of it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megatron_balance.comm.blocks import Gather, Move
from megatron_balance.kernels import of_rows
from megatron_balance.placement.placement import Placement


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The token of each row, and the rows of each token: all int32, on the routing's device."""

    token_R: torch.Tensor
    place_R: torch.Tensor
    """Where a row's weight is among all weights [T, E]."""
    by_token_R: torch.Tensor
    """The rows of token 0, then those of token 1, and so on; the experts of each token's rows ascend."""
    first_T: torch.Tensor
    """Index of each token's first row in `by_token_R`."""

    def moved(self, there: Gather, back: Gather) -> "RowOrder":
        """Return the order after rows have moved `there`; `back` undoes that."""
        if back.stays:
            return self
        by_token_R = back.index_R.index_select(0, self.by_token_R)
        return RowOrder(there(self.token_R), there(self.place_R), by_token_R, self.first_T)


@torch.no_grad()
def row_order(routing_TE: torch.Tensor, rows: int) -> RowOrder:
    """Return the order of a routing [T, E] bool with `rows` true entries: by expert, then by token.

    With another number of entries, the order has no meaning; it is found as fast, and its values are valid indices.
    """
    kernels = of_rows(routing_TE.device)
    if kernels is not None:
        return RowOrder(*kernels.row_order(routing_TE, rows))
    expert_R, token_R = routing_TE.T.nonzero_static(size=rows, fill_value=0).to(torch.int32).unbind(1)
    # A radix sort of 32 bits has half the passes of a sort of 64
    tokens_R, by_token_R = token_R.sort(stable=True)
    tokens_T = torch.arange(len(routing_TE), dtype=torch.int32, device=routing_TE.device)
    first_T = torch.searchsorted(tokens_R, tokens_T, out_int32=True)
    return RowOrder(token_R, token_R * routing_TE.shape[1] + expert_R, by_token_R.to(torch.int32), first_T)


def sending(placement: Placement, tokens_CMP: np.ndarray) -> Move:
    """Return the move of rows from the order by expert to the one in which they are sent.

    Of an expert's tokens, the first go to the first member; of these, the first go to the host of lowest rank; and of
    these, the first go with the first chunk. Rows are sent by member, then by chunk, then by physical expert.

    Args:
        tokens_CMP: rows of each chunk that each member sends to each physical expert.
    """
    tables = placement.tables
    physical_N, by_physical_N = tables.physical_N, tables.by_physical_N
    chunks, members, _ = tokens_CMP.shape
    sizes_MNC = tokens_CMP[:, :, physical_N].transpose(1, 2, 0)
    order_MCN = np.arange(members * len(physical_N) * chunks)
    if members == 1:
        order_MCN = order_MCN.reshape(sizes_MNC.shape)[:, by_physical_N].transpose(0, 2, 1)
        return Move(sizes_MNC.reshape(-1), order_MCN.reshape(-1))
    # By expert, then by member
    pairs = np.argsort(np.tile(tables.expert_N, members), kind="stable")
    place_MN = np.empty_like(pairs)
    place_MN[pairs] = np.arange(len(pairs))
    place_MN = place_MN.reshape(members, -1)[:, by_physical_N]
    order_MCN = place_MN[:, None] * chunks + np.arange(chunks)[:, None]
    return Move(sizes_MNC.reshape(-1, chunks)[pairs].reshape(-1), order_MCN.reshape(-1))


def gather_rows(tokens_TH: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Copy each row from its token: [T, H] -> [R, H]; differentiable."""
    return _Copies.apply(tokens_TH, order)


def gather_weights(probs_TE: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Return the combine weight of each row: [T, E] -> [R]; differentiable."""
    return _Weights.apply(probs_TE, order)


def combine(rows_RH: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Add up each token's rows, the transpose of `gather_rows`: [R, H] -> [T, H]; zero for a token without rows."""
    return _Sums.apply(rows_RH, order)


def _copies(tokens_TH: torch.Tensor, order: RowOrder) -> torch.Tensor:
    kernels = of_rows(tokens_TH.device)
    if kernels is None:
        return tokens_TH.index_select(0, order.token_R)
    return kernels.gather_rows(tokens_TH, order.by_token_R, order.first_T)


def _sums(rows_RH: torch.Tensor, order: RowOrder) -> torch.Tensor:
    kernels = of_rows(rows_RH.device)
    if kernels is None:
        # Detached, so that torch keeps nothing for a backward pass
        return F.embedding_bag(order.by_token_R, rows_RH.detach(), order.first_T, mode="sum")
    return kernels.combine(rows_RH, order.by_token_R, order.first_T)


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_TH: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.order = order
        return _copies(tokens_TH, order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient_RH,) = gradients
        return combine(gradient_RH, ctx.order), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.order = order
        return _sums(rows_RH, order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient_TH,) = gradients
        return gather_rows(gradient_TH, ctx.order), None


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs_TE: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.order, ctx.shape = order, probs_TE.shape
        return probs_TE.reshape(-1).index_select(0, order.place_R)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient_R,) = gradients
        # No two rows have the same place. Autograd cannot rely on that: it would sort the places and add
        gradient_TE = gradient_R.new_zeros(ctx.shape)
        gradient_TE.view(-1).index_put_((ctx.order.place_R,), gradient_R)
        return gradient_TE, None
