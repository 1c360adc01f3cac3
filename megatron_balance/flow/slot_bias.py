"""The bias of each slot's expert, added to the rows of that slot."""

from collections.abc import Sequence
from typing import Any

import torch


def add_slot_bias(
    rows_RO: torch.Tensor, bias_SO: torch.Tensor, sizes: Sequence[int], scale_R: torch.Tensor | None = None
) -> torch.Tensor:
    """Add each slot's bias to its rows in place, times `scale_R` [R] if given; `sizes` has the rows of each slot."""
    return _AddSlotBias.apply(rows_RO, bias_SO, sizes, scale_R)


class _AddSlotBias(torch.autograd.Function):
    """Slot by slot: a gathered bias per row would be as large as the rows, and its gradient a scatter."""

    @staticmethod
    def forward(
        ctx: Any, rows_RO: torch.Tensor, bias_SO: torch.Tensor, sizes: Sequence[int], scale_R: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.sizes, ctx.has_scale = sizes, scale_R is not None
        ctx.save_for_backward(*((bias_SO, scale_R) if scale_R is not None else ()))
        for slot, (rows, bias) in enumerate(zip(rows_RO.split(sizes), bias_SO, strict=True)):
            if scale_R is None:
                rows.add_(bias)
            else:
                scale = scale_R.split(sizes)[slot].unsqueeze(-1)
                rows.add_((bias * scale).to(rows.dtype))
        ctx.mark_dirty(rows_RO)
        return rows_RO

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor | None]:
        (gradient,) = gradients
        chunks = gradient.split(ctx.sizes)
        if not ctx.has_scale:
            return gradient, torch.stack([chunk.sum(0) for chunk in chunks]), None, None
        bias_SO, scale_R = ctx.saved_tensors
        scales = scale_R.split(ctx.sizes)
        weighted = [(chunk * scale.unsqueeze(-1)).sum(0) for chunk, scale in zip(chunks, scales, strict=True)]
        to_scale = [(chunk * bias).sum(-1) for chunk, bias in zip(chunks, bias_SO, strict=True)]
        return gradient, torch.stack(weighted).to(bias_SO.dtype), None, torch.cat(to_scale).to(scale_R.dtype)
