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

    @property
    def weights(self) -> list[torch.Tensor]:
        """Weights of all slots: [S_i, O, I] for some consecutive slots each."""
        return [projection.weight for projection in self.projections]

    @property
    def biases(self) -> list[torch.Tensor]:
        """Biases of all slots, [S_i, O] each; empty if there are none."""
        return [projection.bias for projection in self.projections if projection.bias is not None]

    def __call__(self, rows_RI: torch.Tensor, split: Split, scale_R: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows by their slot's weight and add its bias, times `scale_R` [R] if given: [R, I] -> [R, O]."""
        return _SlotLinear.apply(rows_RI, scale_R if self.biases else None, self, split)

    # The parts of the function and of its backward pass, for other functions that contain it

    def outputs(self, rows_RI: torch.Tensor, split: Split, scale_R: torch.Tensor | None) -> torch.Tensor:
        """Do the same as a call, but not differentiably."""
        output_RO = self.gradients.gemm.outputs(rows_RI, self.weights, split)
        if biases := self.biases:
            assert isinstance(split, RowSplit), "biases are added slot by slot"
            _add_biases(output_RO, biases, split, scale_R)
        return output_RO

    def to_rows(self, gradient_RO: torch.Tensor, split: Split) -> torch.Tensor:
        """Return the gradient of the rows, a new tensor: [R, O] -> [R, I]."""
        return self.gradients.gemm.input_gradients(gradient_RO, self.weights, split)

    def to_scale(self, gradient_RO: torch.Tensor, split: Split) -> torch.Tensor:
        """Return the gradient of the scale of the biases: [R]."""
        assert isinstance(split, RowSplit), "biases are added slot by slot"
        parts = zip(gradient_RO.split(split.sizes), slots_of(self.biases), strict=True)
        return torch.cat([(part_RO * bias_O).sum(-1) for part_RO, bias_O in parts])

    def to_weights(
        self, rows_RI: torch.Tensor, gradient_RO: torch.Tensor, scale_R: torch.Tensor | None, split: Split
    ) -> None:
        """Collect the gradients of weights and biases."""
        self.gradients.add(self.first, rows_RI, gradient_RO, scale_R, split)
        if self.at_once:
            self.gradients.sum()


class _SlotLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RI: torch.Tensor, scale_R: torch.Tensor | None, linear: SlotLinear, split: Split
    ) -> torch.Tensor:
        ctx.linear = linear
        ctx.split = split
        # Saving the weights lets autograd notice if something overwrites them before the backward pass
        ctx.save_for_backward(rows_RI, scale_R, *linear.weights, *linear.biases)
        return linear.outputs(rows_RI, split, scale_R)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        linear = ctx.linear
        split = ctx.split
        rows_RI, scale_R, *_ = ctx.saved_tensors
        # Grouped products refuse the expanded gradient that a plain sum() sends
        gradient_RO = gradients[0].contiguous()
        to_rows = linear.to_rows(gradient_RO, split) if ctx.needs_input_grad[0] else None
        to_scale = linear.to_scale(gradient_RO, split).to(scale_R.dtype) if ctx.needs_input_grad[1] else None
        linear.to_weights(rows_RI, gradient_RO, scale_R, split)
        return to_rows, to_scale, None, None


def _add_biases(
    output_RO: torch.Tensor, biases: Sequence[torch.Tensor], split: RowSplit, scale_R: torch.Tensor | None
) -> None:
    """Add each slot's bias to its rows; slot by slot, because a bias for each row would be as large as the rows."""
    scales = None if scale_R is None else scale_R.unsqueeze(-1).split(split.sizes)
    for slot, (rows, bias_O) in enumerate(zip(output_RO.split(split.sizes), slots_of(biases), strict=True)):
        rows.add_(bias_O if scales is None else (bias_O * scales[slot]).to(rows.dtype))
