"""One linear layer in all slots, as autograd sees it: a function of its rows alone.

Its backward pass computes the gradients of the rows, and hands over what the gradients of weights need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_balance.flow.grouped_gemm import RowSplit, Split
from megatron_balance.flow.slot_weights import Projection, slots_of
from megatron_balance.flow.weight_gradients import LinearGradients


@dataclass(frozen=True, eq=False)
class SlotLinear:
    """A linear layer in consecutive slots."""

    projections: Sequence[Projection]
    gradients: LinearGradients
    first: int = 0
    """Number of the first slot."""
    at_once: bool = False
    """Whether the gradients of weights are computed along with those of rows; otherwise when `gradients` finishes."""

    def __call__(self, rows_RI: torch.Tensor, split: Split, scale_R: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows by their slot's weight and add its bias, times `scale_R` [R] if given: [R, I] -> [R, O]."""
        biased = self.projections[0].bias is not None
        return _SlotLinear.apply(rows_RI, scale_R if biased else None, self, split)


class _SlotLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RI: torch.Tensor, scale_R: torch.Tensor | None, linear: SlotLinear, split: Split
    ) -> torch.Tensor:
        weights = [projection.weight for projection in linear.projections]
        biases = [projection.bias for projection in linear.projections if projection.bias is not None]
        ctx.linear, ctx.split, ctx.count = linear, split, len(weights)
        # Saving the weights lets autograd notice if something overwrites them before the backward pass
        ctx.save_for_backward(rows_RI, scale_R, *weights, *biases)
        output_RO = linear.gradients.gemm.outputs(rows_RI, weights, split)
        if biases:
            assert isinstance(split, RowSplit), "biases are added slot by slot"
            _add_biases(output_RO, biases, split, scale_R)
        return output_RO

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        rows_RI, scale_R, *tensors = ctx.saved_tensors
        weights, biases = tensors[: ctx.count], tensors[ctx.count :]
        # Grouped products refuse the expanded gradient that a plain sum() sends
        gradient_RO = gradients[0].contiguous()
        collected = ctx.linear.gradients
        to_rows = to_scale = None
        if ctx.needs_input_grad[0]:
            to_rows = collected.gemm.input_gradients(gradient_RO, weights, ctx.split)
        if ctx.needs_input_grad[1]:
            parts = zip(gradient_RO.split(ctx.split.sizes), slots_of(biases), strict=True)
            to_scale = torch.cat([(part_RO * bias_O).sum(-1) for part_RO, bias_O in parts]).to(scale_R.dtype)
        collected.add(ctx.linear.first, rows_RI, gradient_RO, scale_R, ctx.split)
        if ctx.linear.at_once:
            collected.sum()
        return to_rows, to_scale, None, None


def _add_biases(
    output_RO: torch.Tensor, biases: Sequence[torch.Tensor], split: RowSplit, scale_R: torch.Tensor | None
) -> None:
    """Add each slot's bias to its rows; slot by slot, because a bias for each row would be as large as the rows."""
    scales = None if scale_R is None else scale_R.unsqueeze(-1).split(split.sizes)
    for slot, (rows, bias_O) in enumerate(zip(output_RO.split(split.sizes), slots_of(biases), strict=True)):
        rows.add_(bias_O if scales is None else (bias_O * scales[slot]).to(rows.dtype))
