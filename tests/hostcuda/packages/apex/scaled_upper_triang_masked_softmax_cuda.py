"""apex's softmax of scaled scores under a causal mask."""

import scaled_softmax_cuda
import torch
from scaled_softmax_cuda import backward

__all__ = ["backward", "forward"]


def forward(input: torch.Tensor, scale_factor: float, /) -> torch.Tensor:
    """Return the causal softmax of `input` [batch times heads, sequence, sequence] times `scale_factor`."""
    return scaled_softmax_cuda.forward(input, scale_factor, mask=torch.ones_like(input[0], dtype=torch.bool).triu(1))
