"""Permutations of tokens for a mixture of experts.

Sums over a token's copies are in single precision and in the order of experts. Rows that a kernel does not write hold
NaN; with real kernels they hold uninitialized memory.
"""

from typing import Any

import torch

from tests.hostcuda.packages import kernels

from .constants import TE_DType

NEEDS_CUDA = "TransformerEngine needs CUDA."


def _rows(routing_map: torch.Tensor) -> torch.Tensor:
    """Return the row of each token's copy for each expert, or -1, with the column count of the real map."""
    tokens, experts = routing_map.shape
    taken = routing_map.bool()
    order = taken.t().reshape(-1).cumsum(0).view(experts, tokens).t() - 1
    rows = torch.where(taken, order, -1).to(torch.int32)
    return torch.cat([rows, rows.new_full((tokens, experts + 1), -1)], 1)


def _spread(
    tokens: torch.Tensor, row_id_map: torch.Tensor, rows: int, probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return each token in all its rows, and the probabilities in the same order, [rows]."""
    experts = (row_id_map.shape[1] - 1) // 2
    found = tokens.new_full((rows + 1, tokens.shape[1]), torch.nan)
    order = None if probs is None else probs.new_full((rows + 1,), torch.nan)
    for expert, column in enumerate(row_id_map[:, :experts].unbind(1)):
        targets = torch.where(column < 0, rows, column).long()
        found.index_copy_(0, targets, tokens)
        if order is not None:
            order.index_copy_(0, targets, probs[:, expert].contiguous())
    return found[:rows], None if order is None else order[:rows]


def _gather(rows: torch.Tensor, row_id_map: torch.Tensor, merging_probs: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of each token's rows, weighted with its probabilities."""
    experts = (row_id_map.shape[1] - 1) // 2
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    total = torch.zeros(len(row_id_map), rows.shape[1], dtype=torch.float32, device=rows.device)
    for expert, column in enumerate(row_id_map[:, :experts].unbind(1)):
        copies = padded[torch.where(column < 0, len(rows), column).long()].float()
        total += copies if merging_probs is None else copies * merging_probs[:, expert, None].float()
    return total.to(rows.dtype)


def _sorted_rows(sizes: torch.Tensor, order: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the target of each row when chunks of `sizes` are arranged in `order`."""
    ends = sizes.cumsum(0)
    sorted_sizes = sizes[order]
    starts = torch.empty_like(sizes).index_copy_(0, order, sorted_sizes.cumsum(0) - sorted_sizes)
    numbers = torch.arange(rows, device=sizes.device)
    chunks = torch.searchsorted(ends, numbers, right=True)
    return starts[chunks] + numbers - (ends - sizes)[chunks]


class _Permute(torch.autograd.Function):
    """Tokens sorted by expert."""

    @staticmethod
    def forward(
        ctx: Any, inp: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if not inp.numel():
            ctx.probs = probs
            return inp, torch.tensor([], device=inp.device), torch.tensor([], device=inp.device)
        assert inp.is_cuda and routing_map.is_cuda, NEEDS_CUDA
        assert probs is None or probs.is_cuda, NEEDS_CUDA
        assert inp.size(0) == routing_map.size(0), "Permute not possible"
        assert num_out_tokens is not None, "num_out_tokens must be provided to the fused permute function."
        kernels.require(inp.dtype in TE_DType and inp.stride(-1) == 1, "rows of a type that kernels know")
        kernels.require(num_out_tokens >= 0, "num_out_tokens is the number of rows")
        row_id_map = _rows(routing_map)
        output, permuted_probs = _spread(inp, row_id_map, num_out_tokens, probs)
        ctx.save_for_backward(row_id_map)
        ctx.probs_shape = None if probs is None else probs.shape
        ctx.mark_non_differentiable(row_id_map)
        return output, row_id_map, permuted_probs

    @staticmethod
    def backward(ctx: Any, permuted_act_grad: torch.Tensor, _: Any, permuted_probs_grad: torch.Tensor | None) -> tuple:
        if not permuted_act_grad.numel():
            return permuted_act_grad, None, None, ctx.probs
        assert permuted_act_grad.is_cuda, NEEDS_CUDA
        (row_id_map,) = ctx.saved_tensors
        probs_grad = None
        if ctx.probs_shape is not None and ctx.needs_input_grad[3]:
            experts = ctx.probs_shape[1]
            padded = torch.cat([permuted_probs_grad, permuted_probs_grad.new_zeros(1)])
            rows = row_id_map[:, :experts]
            probs_grad = padded[torch.where(rows < 0, len(permuted_probs_grad), rows).long()]
        return _gather(permuted_act_grad, row_id_map, None), None, None, probs_grad


class _Unpermute(torch.autograd.Function):
    """Sums of each token's rows."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        row_id_map: torch.Tensor,
        merging_probs: torch.Tensor | None,
        restore_shape: torch.Size | None,
    ) -> torch.Tensor:
        if not inp.numel():
            ctx.merging_probs = merging_probs
            return inp
        assert inp.is_cuda and row_id_map.is_cuda, NEEDS_CUDA
        assert merging_probs is None or merging_probs.is_cuda, NEEDS_CUDA
        kernels.require(inp.dtype in TE_DType and inp.stride(-1) == 1, "rows of a type that kernels know")
        kernels.require(restore_shape is not None and restore_shape[0] == len(row_id_map), "a row of the map a token")
        ctx.save_for_backward(inp, row_id_map, merging_probs)
        return _gather(inp, row_id_map, merging_probs)

    @staticmethod
    def backward(ctx: Any, unpermuted_act_grad: torch.Tensor) -> tuple:
        if not unpermuted_act_grad.numel():
            return unpermuted_act_grad, None, ctx.merging_probs, None
        assert unpermuted_act_grad.is_cuda, NEEDS_CUDA
        inp, row_id_map, merging_probs = ctx.saved_tensors
        grad, weights = _spread(unpermuted_act_grad, row_id_map, len(inp), merging_probs)
        if weights is None:
            return grad, None, None, None
        products = (inp.float() * grad.float()).sum(1)
        experts = merging_probs.shape[1]
        rows = row_id_map[:, :experts]
        padded = torch.cat([products, products.new_zeros(1)])
        probs_grad = padded[torch.where(rows < 0, len(inp), rows).long()].to(merging_probs.dtype)
        return (grad * weights[:, None]).to(inp.dtype), None, probs_grad, None


class _SortChunks(torch.autograd.Function):
    """Chunks of rows in another order."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        split_sizes: torch.Tensor,
        sorted_idxs: torch.Tensor,
        probs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not inp.numel():
            return inp, probs
        assert inp.is_cuda and split_sizes.is_cuda and sorted_idxs.is_cuda, NEEDS_CUDA
        assert probs is None or probs.is_cuda, NEEDS_CUDA
        assert split_sizes.size(0) == sorted_idxs.size(0)
        kernels.require(inp.dim() == 2 and inp.dtype in TE_DType and inp.stride(-1) == 1, "rows of a known type")
        targets = _sorted_rows(split_sizes.long(), sorted_idxs.long(), len(inp))
        ctx.save_for_backward(targets)
        output = torch.empty_like(inp).index_copy_(0, targets, inp)
        return output, None if probs is None else torch.empty_like(probs).index_copy_(0, targets, probs)

    @staticmethod
    def backward(ctx: Any, permuted_act_grad: torch.Tensor, permuted_probs_grad: torch.Tensor | None) -> tuple:
        if not permuted_act_grad.numel():
            return permuted_act_grad, None, None, permuted_probs_grad
        assert permuted_act_grad.is_cuda, NEEDS_CUDA
        (targets,) = ctx.saved_tensors
        probs_grad = permuted_probs_grad[targets] if ctx.needs_input_grad[3] else None
        return permuted_act_grad[targets], None, None, probs_grad


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens sorted by expert, [num_out_tokens, hidden], and the map for `moe_unpermute`.

    Args:
        inp: [tokens, hidden].
        routing_map: [tokens, experts], true where a token goes.
    """
    if map_type != "mask":
        raise NotImplementedError(f"moe_permute with map_type {map_type}")
    output, row_id_map, _ = _Permute.apply(inp, routing_map, num_out_tokens, None)
    return output, row_id_map


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do as `moe_permute`, and also return `probs`, [tokens, experts], in the rows' order, [num_out_tokens]."""
    output, row_id_map, permuted_probs = _Permute.apply(inp, routing_map, num_out_tokens, probs)
    return output, permuted_probs, row_id_map


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of each token's rows, weighted with `merging_probs` [tokens, experts], or an empty `inp` as is."""
    if map_type != "mask" or probs is not None:
        raise NotImplementedError(f"moe_unpermute with map_type {map_type} or probs")
    return _Unpermute.apply(inp, row_id_map, merging_probs, restore_shape)


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """Return chunks of `split_sizes` rows in the order of `sorted_index`."""
    return _SortChunks.apply(inp, split_sizes, sorted_index, None)[0]


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `moe_sort_chunks_by_index`, and sort a probability of each row, too."""
    return _SortChunks.apply(inp, split_sizes, sorted_index, probs)
