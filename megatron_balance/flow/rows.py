"""Rows of a layer, one for each pair of a token and a chosen expert, and sums of each token's rows.

The order by expert is found once, before the host knows the number of rows of each expert. The rows of each expert are
then cut into blocks, one for each member, host and chunk, and the blocks move into the order of sending.

Nothing here waits for the device. Results are deterministic to the bit: no two threads add to the same memory, and a
sum adds a token's rows in the order of their experts, in float32 or better, and is rounded once.

In shapes, D counts the members: sources that send rows of the same tokens. N counts pairs of an expert and one of its
hosts.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from megatron_balance.comm.blocks import BlockMove, Gather
from megatron_balance.kernels import of_rows
from megatron_balance.placement.placement import Placement


class RowPlaces(NamedTuple):
    """Parts of a RowOrder that copies of tokens do not need; all int32."""

    place_R: torch.Tensor
    """Index of each row's weight among the flattened weights [T, E]."""
    by_token_R: torch.Tensor
    """Rows sorted by token; the rows of a token are in the order of their experts."""
    first_T: torch.Tensor
    """Index of each token's first row in `by_token_R`."""


class RowOrder:
    """Maps rows to tokens and tokens to rows, on the routing's device."""

    def __init__(self, token_R: torch.Tensor, find: Callable[[], RowPlaces]):
        """`token_R` is int32 or int64. `find` computes the rest on demand, because rows can be sent before that."""
        self.token_R = token_R
        self._find: Callable[[], RowPlaces] | None = find

    def __len__(self) -> int:
        return self.token_R.shape[0]

    @cached_property
    def rest(self) -> RowPlaces:
        assert self._find is not None
        with torch.no_grad():
            rest = self._find()
        # Free the inputs of `find`
        self._find = None
        return rest

    def moved(self, move: Gather, back: Gather | None = None) -> "RowOrder":
        """Return the order of moved rows; `back` is the inverse of `move`, if computed already."""
        if move.index_R is None:
            return self

        def find() -> RowPlaces:
            place_R, by_token_R, first_T = self.rest
            moved_R = (back or move.back).index_R
            assert moved_R is not None, "the inverse of a move moves rows, too"
            return RowPlaces(move(place_R), moved_R.index_select(0, by_token_R), first_T)

        return RowOrder(move(self.token_R), find)


def row_order(routing_TE: torch.Tensor, rows: int) -> RowOrder:
    """Return the order of a routing [T, E] bool with `rows` true entries: by expert, then by token. With another number
    of true entries, the order has no meaning, but its values are valid indices; the cost is the same."""
    kernels = of_rows(routing_TE.device)
    if kernels is not None:
        token_R, *rest = kernels.row_order(routing_TE, rows)
        return RowOrder(token_R, lambda: RowPlaces(*rest))
    expert_and_token = routing_TE.T.nonzero_static(size=rows, fill_value=0)

    def find() -> RowPlaces:
        # Radix sort needs half as many passes for 32 bits as for 64
        expert_R, token_R = expert_and_token.to(torch.int32).unbind(1)
        tokens_R, by_token_R = token_R.sort(stable=True)
        tokens_T = torch.arange(len(routing_TE), dtype=torch.int32, device=routing_TE.device)
        first_T = torch.searchsorted(tokens_R, tokens_T, out_int32=True)
        return RowPlaces(token_R * routing_TE.shape[1] + expert_R, by_token_R.to(torch.int32), first_T)

    return RowOrder(expert_and_token.select(1, 1), find)


def sending(placement: Placement, tokens_CDP: np.ndarray) -> BlockMove:
    """Return the move of rows from the order by expert to the order of sending: by member, chunk and physical expert.
    An expert's tokens are divided in order among members, then among hosts by ascending rank, then among chunks.
    `tokens_CDP` has the rows of each chunk that each member sends to each physical expert."""
    tables = placement.tables
    physical_N = tables.physical_N
    by_physical_N = tables.by_physical_N
    chunks, members, _ = tokens_CDP.shape
    sizes_DNC = tokens_CDP[:, :, physical_N].transpose(1, 2, 0)
    if members == 1:
        order_DNC = np.arange(sizes_DNC.size).reshape(sizes_DNC.shape)
        return BlockMove(sizes_DNC.reshape(-1), order_DNC[:, by_physical_N].transpose(0, 2, 1).reshape(-1))
    # By expert, then by member
    pairs = np.argsort(np.tile(tables.expert_N, members), kind="stable")
    place_DN = np.empty_like(pairs)
    place_DN[pairs] = np.arange(len(pairs))
    place_DN = place_DN.reshape(members, -1)[:, by_physical_N]
    order_DCN = place_DN[:, None] * chunks + np.arange(chunks)[:, None]
    return BlockMove(sizes_DNC.reshape(-1, chunks)[pairs].reshape(-1), order_DCN.reshape(-1))


def gather_rows(tokens_TH: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Copy each row from its token: [T, H] -> [R, H]; also the gradient of `combine`."""
    kernels = of_rows(tokens_TH.device)
    if kernels is None:
        return tokens_TH.index_select(0, order.token_R)
    return kernels.gather_rows(tokens_TH, order.rest.by_token_R, order.rest.first_T, len(order))


def gather_weights(probs_TE: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Return the combine weight of each row: [T, E] -> [R]."""
    return probs_TE.reshape(-1).index_select(0, order.rest.place_R)


def scatter_weights(weights_R: torch.Tensor, order: RowOrder, shape: Sequence[int]) -> torch.Tensor:
    """Scatter weights of rows into a zero tensor of this shape: [R] -> [T, E]; the gradient of `gather_weights`.
    Autograd would sort the places and add, because it cannot know that they are distinct."""
    weights_TE = weights_R.new_zeros(shape)
    weights_TE.view(-1).index_put_((order.rest.place_R,), weights_R)
    return weights_TE


def combine(rows_RH: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Add up each token's rows: [R, H] -> [T, H], zero for a token without rows; also the gradient of `gather_rows`."""
    kernels = of_rows(rows_RH.device)
    if kernels is None:
        # Detached: torch need not save tensors for a backward pass
        return F.embedding_bag(order.rest.by_token_R, rows_RH.detach(), order.rest.first_T, mode="sum")
    return kernels.combine(rows_RH, order.rest.by_token_R, order.rest.first_T)
