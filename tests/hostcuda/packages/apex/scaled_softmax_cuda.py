"""apex's softmax of scaled scores."""

import torch

from tests.hostcuda.packages import kernels

LONGEST = 16384
MASKED = -10000.0


def forward(input: torch.Tensor, scale_factor: float, /) -> torch.Tensor:
    """Return the softmax of `input` times `scale_factor`, in half precision.

    Args:
        input: [batch, heads, queries, keys].
    """
    check(input, 4)
    return softmax(input, scale_factor, None)


def backward(output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float, /) -> torch.Tensor:
    """Return the gradient of `forward`'s input."""
    check(output_grads, 4)
    check(softmax_results, 4)
    return gradient(output_grads, softmax_results, scale_factor)


def check(scores: torch.Tensor, dimensions: int) -> None:
    """Refuse scores that none of the kernels accepts."""
    kernels.dense(scores=scores)
    kernels.require(scores.dim() == dimensions, f"expected {dimensions}D tensor")
    kernels.require(scores.dtype in kernels.HALVES, "Only fp16 and bf16 are supported")
    kernels.require(scores.shape[-1] <= LONGEST, f"more than {LONGEST} keys")
    kernels.require(dimensions == 3 or scores.shape[-2] > 1, "a single query")


def rows_per_block(keys: int) -> int:
    """Return the rows of `keys` keys that a thread block computes; the number of rows must be a multiple of it."""
    elements = 1 << (keys - 1).bit_length() if keys > 1 else 1
    return 128 // min(elements, 32) * (2 if elements <= 128 else 1)


def softmax(scores: torch.Tensor, scale_factor: float, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax, computed in single precision and rounded; fully masked rows are zero."""
    scaled = scores.float() * float(scale_factor)
    if mask is None:
        return scaled.softmax(-1).to(scores.dtype)
    found = scaled.masked_fill(mask, MASKED).softmax(-1).masked_fill(mask.all(-1, keepdim=True), 0.0)
    return found.to(scores.dtype)


def gradient(output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """Return the gradient of the scores."""
    output = output_grads.float()
    found = softmax_results.float()
    scaled = torch._softmax_backward_data(output, found, -1, torch.float32) * float(scale_factor)
    return scaled.to(output_grads.dtype)
