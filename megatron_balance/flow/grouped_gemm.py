"""One matrix product for the rows of all slots."""

import torch
import torch.nn.functional as F

GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16)
GROUPED_MM_ALIGNMENT = 16
"""`grouped_mm` requires strides that are multiples of this number of bytes."""


def grouped_linear(rows_RI: torch.Tensor, weight_SOI: torch.Tensor, tokens_per_slot: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each slot s by weight_SOI[s].T: [R, I] x [S, O, I] -> [R, O].

    `tokens_per_slot` [S] int64 on the host gives the number of consecutive rows of each slot; zero is allowed.
    Float64 and widths that `torch.nn.functional.grouped_mm` refuses take one matrix product per slot.
    """
    if _grouped_mm_accepts(weight_SOI):
        offsets = tokens_per_slot.cumsum(0).to(device=rows_RI.device, dtype=torch.int32, non_blocking=True)
        output = F.grouped_mm(rows_RI.contiguous(), weight_SOI.transpose(-1, -2), offs=offsets)
        if output.requires_grad:
            # Its backward refuses the expanded gradient that a plain sum() sends
            output.register_hook(torch.Tensor.contiguous)
        return output
    chunks = rows_RI.split(tokens_per_slot.tolist())
    return torch.cat([F.linear(chunk, weight) for chunk, weight in zip(chunks, weight_SOI.unbind(), strict=True)])


def _grouped_mm_accepts(weight_SOI: torch.Tensor) -> bool:
    widths = weight_SOI.shape[1:]
    aligned = all(width * weight_SOI.element_size() % GROUPED_MM_ALIGNMENT == 0 for width in widths)
    return weight_SOI.dtype in GROUPED_MM_DTYPES and aligned
