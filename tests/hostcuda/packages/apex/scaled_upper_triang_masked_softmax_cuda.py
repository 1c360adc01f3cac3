"""apex's softmax of scaled scores under a causal mask."""

import torch
from scaled_softmax_cuda import check, gradient, rows_per_block, softmax

from tests.hostcuda.packages import kernels


def forward(input: torch.Tensor, scale_factor: float, /) -> torch.Tensor:
    """Return the causal softmax of `input` times `scale_factor`, in half precision.

    Args:
        input: [batch times heads, sequence, sequence].
    """
    check(input, 3)
    heads, queries, keys = input.shape
    kernels.require(queries == keys, "as many queries as keys")
    kernels.require(heads % rows_per_block(keys) == 0, f"{heads} heads do not fill blocks")
    return softmax(input, scale_factor, torch.ones_like(input[0], dtype=torch.bool).triu(1))


def backward(output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float, /) -> torch.Tensor:
    """Return the gradient of `forward`'s input."""
    check(output_grads, 3)
    check(softmax_results, 3)
    kernels.require(output_grads.shape[1] == output_grads.shape[2], "as many queries as keys")
    return gradient(output_grads, softmax_results, scale_factor)
