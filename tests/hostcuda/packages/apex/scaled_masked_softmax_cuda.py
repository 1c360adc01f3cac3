"""apex's softmax of scaled scores under a mask."""

import scaled_softmax_cuda
import torch
from scaled_softmax_cuda import backward

__all__ = ["backward", "forward", "get_batch_per_block"]


def forward(input: torch.Tensor, mask: torch.Tensor, scale_factor: float, /) -> torch.Tensor:
    """Return the softmax of `input` times `scale_factor` where `mask` [batch or 1, 1, queries, keys] is not set."""
    return scaled_softmax_cuda.forward(input, scale_factor, mask=mask.bool())


def get_batch_per_block(query_seq_len: int, key_seq_len: int, batches: int, attn_heads: int, /) -> int:
    """Return the rows that a thread block computes, which must divide the number of rows."""
    elements = 1 << (key_seq_len - 1).bit_length()
    return 128 // min(elements, 32) * (2 if elements <= 128 else 1)
