"""apex's softmax of scaled scores under a mask."""

import torch
from scaled_softmax_cuda import check, gradient, rows_per_block, softmax

from tests.hostcuda.packages import kernels


def forward(input: torch.Tensor, mask: torch.Tensor, scale_factor: float, /) -> torch.Tensor:
    """Return the softmax of `input` times `scale_factor` where `mask` is not set, in half precision.

    Args:
        input: [batch, heads, queries, keys].
        mask: [batch or 1, 1, queries, keys].
    """
    check(input, 4)
    kernels.dense(mask=mask)
    batch, _, queries, keys = input.shape
    kernels.require(mask.dim() == 4 and mask.shape[0] in (1, batch), "mask is [batch or 1, 1, queries, keys]")
    kernels.require(mask.shape[1:] == (1, queries, keys), "mask is [batch or 1, 1, queries, keys]")
    kernels.require(mask.dtype in (torch.bool, torch.uint8), "mask has a byte for each element")
    kernels.require(queries % rows_per_block(keys) == 0, f"{queries} queries do not fill blocks")
    return softmax(input, scale_factor, mask.bool())


def backward(output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float, /) -> torch.Tensor:
    """Return the gradient of `forward`'s input."""
    check(output_grads, 4)
    check(softmax_results, 4)
    return gradient(output_grads, softmax_results, scale_factor)


def get_batch_per_block(query_seq_len: int, key_seq_len: int, batches: int, attn_heads: int, /) -> int:
    """Return the number that must divide the number of rows."""
    return rows_per_block(key_seq_len)
