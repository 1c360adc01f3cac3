"""One linear layer in all slots, as a function of autograd that depends on rows alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_balance.flow.grouped_gemm import RowSplit, Split, slots_of
from megatron_balance.flow.slot_weights import LinearGradients, Projection


@dataclass(frozen=True, eq=False)
class SlotLinear:
    """A linear layer in consecutive slots."""

    projections: tuple[Sequence[Projection], Sequence[Projection]]
    """Weights for the forward pass and for the backward pass: equal values, maybe in different memory."""
    gradients: LinearGradients

    def weights(self, backward: bool = False) -> list[torch.Tensor]:
        """Return the weights of all slots, as tensors [S_i, O, I] of consecutive slots."""
        return [projection.weight for projection in self.projections[backward]]

    def biases(self, backward: bool = False) -> list[torch.Tensor]:
        """Return the biases of all slots, as tensors [S_i, O]; empty if there are none."""
        return [projection.bias for projection in self.projections[backward] if projection.bias is not None]

    def __call__(self, rows_RI: torch.Tensor, split: Split, scale_R: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows by their slot's weight and add its bias, scaled by `scale_R` [R] if given: [R, I] -> [R, O]."""
        return _SlotLinear.apply(rows_RI, scale_R if self.biases() else None, self, split)


class _SlotLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RI: torch.Tensor, scale_R: torch.Tensor | None, linear: SlotLinear, split: Split
    ) -> torch.Tensor:
        ctx.linear = linear
        ctx.split = split
        weights = linear.weights()
        biases = linear.biases()
        # Saving the weights lets autograd notice if something overwrites them before the backward pass
        ctx.save_for_backward(rows_RI, scale_R, *weights, *biases)
        output_RO = linear.gradients.gemm.outputs(rows_RI, weights, split)
        if biases:
            assert isinstance(split, RowSplit), "biases are added slot by slot"
            _add_biases(output_RO, biases, split, scale_R)
        return output_RO

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        linear = ctx.linear
        split = ctx.split
        rows_RI, scale_R, *_ = ctx.saved_tensors
        # Grouped products require contiguous tensors; the gradient of sum() is an expanded one
        gradient_RO = gradients[0].contiguous()
        to_rows = None
        if ctx.needs_input_grad[0]:
            to_rows = linear.gradients.gemm.input_gradients(gradient_RO, linear.weights(backward=True), split)
        to_scale = None
        if ctx.needs_input_grad[1]:
            parts = zip(split.parts(gradient_RO), slots_of(linear.biases(backward=True)), strict=True)
            sums = [(part_RO * bias_O).sum(-1) for part_RO, bias_O in parts]
            undefined = gradient_RO.new_empty(len(gradient_RO) - sum(split.sizes))
            to_scale = torch.cat([*sums, undefined]).to(scale_R.dtype)
        linear.gradients.add(rows_RI, gradient_RO, scale_R, split)
        return to_rows, to_scale, None, None


def _add_biases(
    output_RO: torch.Tensor, biases: Sequence[torch.Tensor], split: RowSplit, scale_R: torch.Tensor | None
) -> None:
    """Add each slot's bias to its rows, slot by slot: a bias for each row would be as large as the rows."""
    scales = None if scale_R is None else split.parts(scale_R.unsqueeze(-1))
    for slot, (rows, bias_O) in enumerate(zip(split.parts(output_RO), slots_of(biases), strict=True)):
        rows.add_(bias_O if scales is None else (bias_O * scales[slot]).to(rows.dtype))
