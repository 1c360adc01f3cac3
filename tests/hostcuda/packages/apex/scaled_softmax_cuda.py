"""apex's softmax of scaled scores."""

import torch

from tests.hostcuda.packages import kernels

MASKED = -10000.0


def forward(input: torch.Tensor, scale_factor: float, /, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the softmax of `input` times `scale_factor`, computed in single precision and rounded; fully masked rows
    are zero.

    Args:
        input: [batch, heads, queries, keys] or [batch times heads, queries, keys], in half precision.
        mask: true where a key is hidden.
    """
    kernels.dense(scores=input, mask=mask)
    kernels.require(input.dtype in kernels.HALVES, "Only fp16 and bf16 are supported")
    scaled = input.float() * float(scale_factor)
    if mask is None:
        return scaled.softmax(-1).to(input.dtype)
    found = scaled.masked_fill(mask, MASKED).softmax(-1).masked_fill(mask.all(-1, keepdim=True), 0.0)
    return found.to(input.dtype)


def backward(output_grads: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float, /) -> torch.Tensor:
    """Return the gradient of `forward`'s input."""
    kernels.dense(output_grads=output_grads, softmax_results=softmax_results)
    output = output_grads.float()
    scaled = torch._softmax_backward_data(output, softmax_results.float(), -1, torch.float32) * float(scale_factor)
    return scaled.to(output_grads.dtype)
