"""Weights in the 4-bit format MXFP4, as gpt-oss has them: 32 numbers of 4 bits each, with one common scale.

Source: OCP Microscaling Formats (MX) Specification 1.0: elements in E2M1, scales in E8M0.
"""

import torch

BLOCKS = "_blocks"
SCALES = "_scales"
"""Endings of the names of a tensor's 4-bit numbers, two in a byte, and of their scales."""

BLOCK = 32
"""Number of elements with a common scale."""

BIAS = 127
"""A scale of s means 2^(s - 127)."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the numbers 0 to 7; the numbers 8 to 15 are the same with a minus sign."""


def shape(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape [..., I, O] of the tensor with these shapes of blocks [..., O, I / 32, 16] and scales
    [..., O, I / 32]; None if they do not fit together."""
    if len(blocks) < 3 or blocks[-1] != BLOCK // 2 or blocks[:-1] != scales:
        return None
    *outer, rows, count = scales
    return (*outer, count * BLOCK, rows)


def decoded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers in bfloat16, which represents them exactly unless they leave its range: [..., I, O]. The first
    number of a byte is in its lower half."""
    numbers = torch.tensor([*MAGNITUDES, *(-one for one in MAGNITUDES)])
    found = torch.empty(*scales.shape[:-1], scales.shape[-1] * BLOCK, dtype=torch.bfloat16)
    # One expert at a time, because the intermediate tensors are much larger
    for target, own, exponents in zip(found, blocks, scales.int() - BIAS, strict=True):
        pairs = torch.stack((own & 15, own >> 4), dim=-1).flatten(-2)
        target.copy_(torch.ldexp(numbers[pairs.int()], exponents.unsqueeze(-1)).flatten(-2))
    return found.mT
