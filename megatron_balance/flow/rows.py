"""A row for every expert that a token chose, and the sums of each token's rows.

The order of rows is found once, by expert, before the host knows how many there are for each expert. When it knows, the
rows of every expert are cut into blocks, one for each member, host and chunk, and the blocks move to where they are
sent from. Nothing here waits for the device.

Both directions and their gradients read by index: the gradient of copies is a sum, and that of a sum is copies. No two
threads add to the same memory, so that the same rows give the same bits in every run, on CUDA too. A sum adds a token's
rows in the order of their experts, whatever their hosts and chunks, in float32 or better, and is rounded once.

In shapes, M counts the members that send rows of the same tokens, and N the pairs of an expert and a host of it.
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


class _Rest(NamedTuple):
    """What copies of tokens do not need of a RowOrder."""

    place_R: torch.Tensor
    by_token_R: torch.Tensor
    first_T: torch.Tensor


class RowOrder:
    """The token of each row, and the rows of each token: all int32, on the routing's device.

    Only `token_R` is there at once, because rows leave as soon as they are copied; it may be int64, so that nothing is
    converted before. `complete` queues the rest.
    """

    def __init__(self, token_R: torch.Tensor, rest: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
        """`rest` returns the other three tensors."""
        self.token_R = token_R
        self._find: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = rest

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.token_R.shape[0]

    @property
    def place_R(self) -> torch.Tensor:
        """Where a row's weight is among all weights [T, E]."""
        return self._rest.place_R

    @property
    def by_token_R(self) -> torch.Tensor:
        """The rows of token 0, then those of token 1, and so on; the experts of each token's rows ascend."""
        return self._rest.by_token_R

    @property
    def first_T(self) -> torch.Tensor:
        """Index of each token's first row in `by_token_R`."""
        return self._rest.first_T

    @cached_property
    def _rest(self) -> _Rest:
        assert self._find is not None
        with torch.no_grad():
            rest = _Rest(*self._find())
        self._find = None
        return rest

    def complete(self) -> None:
        """Queue what is not there yet."""
        _ = self._rest

    def moved(self, there: Gather, back: Gather | None = None) -> "RowOrder":
        """Return the order after rows have moved `there`; `back`, if it is there already, undoes that."""
        if there.stays:
            return self

        def rest() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            place_R = (back or there.back).index_R
            return there(self.place_R), place_R.index_select(0, self.by_token_R), self.first_T

        return RowOrder(there(self.token_R), rest)


def row_order(routing_TE: torch.Tensor, rows: int) -> RowOrder:
    """Return the order of a routing [T, E] bool with `rows` true entries: by expert, then by token.

    With another number of entries, the order has no meaning; it is found as fast, and its values are valid indices.
    """
    kernels = of_rows(routing_TE.device)
    if kernels is not None:
        token_R, place_R, by_token_R, first_T = kernels.row_order(routing_TE, rows)
        return RowOrder(token_R, lambda: (place_R, by_token_R, first_T))
    found_R2 = routing_TE.T.nonzero_static(size=rows, fill_value=0)

    def rest() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # A radix sort of 32 bits has half the passes of a sort of 64
        expert_R, token_R = found_R2.to(torch.int32).unbind(1)
        tokens_R, by_token_R = token_R.sort(stable=True)
        tokens_T = torch.arange(len(routing_TE), dtype=torch.int32, device=routing_TE.device)
        first_T = torch.searchsorted(tokens_R, tokens_T, out_int32=True)
        return token_R * routing_TE.shape[1] + expert_R, by_token_R.to(torch.int32), first_T

    return RowOrder(found_R2.select(1, 1), rest)


def sending(placement: Placement, tokens_CMP: np.ndarray) -> BlockMove:
    """Return the move of rows from the order by expert to the one in which they are sent.

    Of an expert's tokens, the first go to the first member; of these, the first go to the host of lowest rank; and of
    these, the first go with the first chunk. Rows are sent by member, then by chunk, then by physical expert.

    Args:
        tokens_CMP: rows of each chunk that each member sends to each physical expert.
    """
    tables = placement.tables
    physical_N = tables.physical_N
    by_physical_N = tables.by_physical_N
    chunks, members, _ = tokens_CMP.shape
    sizes_MNC = tokens_CMP[:, :, physical_N].transpose(1, 2, 0)
    order_MCN = np.arange(members * len(physical_N) * chunks)
    if members == 1:
        order_MCN = order_MCN.reshape(sizes_MNC.shape)[:, by_physical_N].transpose(0, 2, 1)
        return BlockMove(sizes_MNC.reshape(-1), order_MCN.reshape(-1))
    # By expert, then by member
    pairs = np.argsort(np.tile(tables.expert_N, members), kind="stable")
    place_MN = np.empty_like(pairs)
    place_MN[pairs] = np.arange(len(pairs))
    place_MN = place_MN.reshape(members, -1)[:, by_physical_N]
    order_MCN = place_MN[:, None] * chunks + np.arange(chunks)[:, None]
    return BlockMove(sizes_MNC.reshape(-1, chunks)[pairs].reshape(-1), order_MCN.reshape(-1))


def gather_rows(tokens_TH: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Copy each row from its token: [T, H] -> [R, H]; also the gradient of `combine`."""
    kernels = of_rows(tokens_TH.device)
    if kernels is None:
        return tokens_TH.index_select(0, order.token_R)
    return kernels.gather_rows(tokens_TH, order.by_token_R, order.first_T, len(order))


def gather_weights(probs_TE: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Return the combine weight of each row: [T, E] -> [R]."""
    return probs_TE.reshape(-1).index_select(0, order.place_R)


def scatter_weights(weights_R: torch.Tensor, order: RowOrder, shape: Sequence[int]) -> torch.Tensor:
    """Return weights of rows in their places among all weights, of this shape, and zeros: [R] -> [T, E].

    This is the gradient of `gather_weights`. No two rows have the same place. Autograd cannot rely on that: it would
    sort the places and add.
    """
    weights_TE = weights_R.new_zeros(shape)
    weights_TE.view(-1).index_put_((order.place_R,), weights_R)
    return weights_TE


def combine(rows_RH: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Add up each token's rows: [R, H] -> [T, H], zero for a token without rows; also the gradient of `gather_rows`."""
    kernels = of_rows(rows_RH.device)
    if kernels is None:
        # Detached, so that torch keeps nothing for a backward pass
        return F.embedding_bag(order.by_token_R, rows_RH.detach(), order.first_T, mode="sum")
    return kernels.combine(rows_RH, order.by_token_R, order.first_T)
