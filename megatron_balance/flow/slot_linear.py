"""One linear layer in all slots, as a function of autograd that depends on rows alone.

On a CPU, SwiGLU and the next projection are one function, which saves only its input for the backward pass and
recomputes the rest. Autograd would save three tensors of half the input's size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.flow.grouped_gemm import RowSplit, Split, slots_of
from megatron_balance.flow.slot_weights import LinearGradients, Projection


@dataclass(frozen=True, eq=False)
class SlotLinear:
    """A linear layer in consecutive slots."""

    projections: Sequence[Projection]
    gradients: LinearGradients
    first: int = 0
    """Number of the first slot."""
    at_once: bool = False
    """Whether weight gradients are computed together with row gradients; otherwise when `gradients` finishes."""

    @property
    def weights(self) -> list[torch.Tensor]:
        """Weights of all slots, as tensors [S_i, O, I] of consecutive slots."""
        return [projection.weight for projection in self.projections]

    @property
    def biases(self) -> list[torch.Tensor]:
        """Biases of all slots, as tensors [S_i, O]; empty if there are none."""
        return [projection.bias for projection in self.projections if projection.bias is not None]

    def __call__(self, rows_RI: torch.Tensor, split: Split, scale_R: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows by their slot's weight and add its bias, scaled by `scale_R` [R] if given: [R, I] -> [R, O]."""
        return _SlotLinear.apply(rows_RI, scale_R if self.biases else None, self, split)

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
        """Return the gradient of `scale_R`: [R]."""
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
        # Grouped products require contiguous tensors; the gradient of sum() is an expanded one
        gradient_RO = gradients[0].contiguous()
        to_rows = linear.to_rows(gradient_RO, split) if ctx.needs_input_grad[0] else None
        to_scale = linear.to_scale(gradient_RO, split).to(scale_R.dtype) if ctx.needs_input_grad[1] else None
        linear.to_weights(rows_RI, gradient_RO, scale_R, split)
        return to_rows, to_scale, None, None


def _add_biases(
    output_RO: torch.Tensor, biases: Sequence[torch.Tensor], split: RowSplit, scale_R: torch.Tensor | None
) -> None:
    """Add each slot's bias to its rows, slot by slot: a bias for each row would be as large as the rows."""
    scales = None if scale_R is None else scale_R.unsqueeze(-1).split(split.sizes)
    for slot, (rows, bias_O) in enumerate(zip(output_RO.split(split.sizes), slots_of(biases), strict=True)):
        rows.add_(bias_O if scales is None else (bias_O * scales[slot]).to(rows.dtype))


def is_swiglu(config: TransformerConfig) -> bool:
    """Return whether experts use plain SwiGLU, without a clamp, an offset or a fused kernel."""
    plain = config.activation_func_clamp_value is None and not config.glu_linear_offset
    swiglu = config.gated_linear_unit and config.activation_func is F.silu
    return swiglu and plain and not config.bias_activation_fusion


def swiglu_linear(inner: torch.Tensor, probs_R: torch.Tensor, linear: SlotLinear, split: Split) -> torch.Tensor:
    """Apply SwiGLU, weight the result by `probs_R`, and multiply by the slots' weights: [R, 2 I] -> [R, O];
    differentiable. `inner` holds gates, then linear parts; `probs_R` also scales biases."""
    return _SwigluLinear.apply(inner, probs_R, linear, split)


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: torch.Tensor, probs_R: torch.Tensor, linear: SlotLinear, split: Split) -> torch.Tensor:
        ctx.linear = linear
        ctx.split = split
        # Saving the weights lets autograd notice if something overwrites them before the backward pass
        ctx.save_for_backward(inner, probs_R, *linear.weights, *linear.biases)
        gate_RI, linear_RI = inner.chunk(2, dim=-1)
        weighted_RI = F.silu(gate_RI).mul_(linear_RI).mul_(probs_R.unsqueeze(-1))
        return linear.outputs(weighted_RI, split, probs_R)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        linear = ctx.linear
        split = ctx.split
        inner, probs_R, *_ = ctx.saved_tensors
        gate_RI, linear_RI = inner.chunk(2, dim=-1)
        gradient_RO = gradients[0].contiguous()
        probs_R1 = probs_R.unsqueeze(-1)
        gradient_RI = linear.to_rows(gradient_RO, split)
        silu_RI = F.silu(gate_RI)
        units_RI = silu_RI * linear_RI
        exact = torch.promote_types(gradient_RI.dtype, probs_R.dtype)
        to_probs_R = (gradient_RI.to(exact) * units_RI).sum(-1).to(probs_R.dtype)
        if linear.biases:
            to_probs_R += linear.to_scale(gradient_RO, split).to(probs_R.dtype)
        linear.to_weights(units_RI.mul_(probs_R1), gradient_RO, probs_R, split)
        to_inner = torch.empty_like(inner)
        to_gate_RI, to_linear_RI = to_inner.chunk(2, dim=-1)
        torch.mul(gradient_RI.mul_(probs_R1), silu_RI, out=to_linear_RI)
        torch.ops.aten.silu_backward.grad_input(gradient_RI.mul_(linear_RI), gate_RI, grad_input=to_gate_RI)
        return to_inner, to_probs_R, None, None
