"""SwiGLU and the projection after it, which keep nothing but their input for the backward pass.

Autograd would keep three tensors of half the input's size: the gate's SiLU, its product with the linear part, and that
product times the combine weights. They are computed again, in few passes over memory.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.flow.grouped_gemm import Split
from megatron_balance.flow.slot_linear import SlotLinear


def is_swiglu(config: TransformerConfig) -> bool:
    """Return whether experts have SwiGLU units, without a clamp, an offset or a fused kernel."""
    plain = config.activation_func_clamp_value is None and not config.glu_linear_offset
    swiglu = config.gated_linear_unit and config.activation_func is F.silu
    return swiglu and plain and not config.bias_activation_fusion


def swiglu_linear(inner: torch.Tensor, probs_R: torch.Tensor, linear: SlotLinear, split: Split) -> torch.Tensor:
    """Compute SwiGLU units, weight them, and multiply them by their slot's weight: [R, 2F] -> [R, O]; differentiable.

    Args:
        inner: gates, then linear parts.
        probs_R: weights of the rows, also of their biases.
        linear: the projection of the units.
        split: number of rows of each slot.
    """
    return _SwigluLinear.apply(inner, probs_R, linear, split)


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: torch.Tensor, probs_R: torch.Tensor, linear: SlotLinear, split: Split) -> torch.Tensor:
        ctx.linear = linear
        ctx.split = split
        # Saving the weights lets autograd notice if something overwrites them before the backward pass
        ctx.save_for_backward(inner, probs_R, *linear.weights, *linear.biases)
        gate_RF, linear_RF = inner.chunk(2, dim=-1)
        weighted_RF = F.silu(gate_RF).mul_(linear_RF).mul_(probs_R.unsqueeze(-1))
        return linear.outputs(weighted_RF, split, probs_R)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        linear = ctx.linear
        split = ctx.split
        inner, probs_R, *_ = ctx.saved_tensors
        gate_RF, linear_RF = inner.chunk(2, dim=-1)
        gradient_RO = gradients[0].contiguous()
        probs_R1 = probs_R.unsqueeze(-1)
        gradient_RF = linear.to_rows(gradient_RO, split)
        silu_RF = F.silu(gate_RF)
        units_RF = silu_RF * linear_RF
        exact = torch.promote_types(gradient_RF.dtype, probs_R.dtype)
        to_probs_R = (gradient_RF.to(exact) * units_RF).sum(-1).to(probs_R.dtype)
        if linear.biases:
            to_probs_R += linear.to_scale(gradient_RO, split).to(probs_R.dtype)
        linear.to_weights(units_RF.mul_(probs_R1), gradient_RO, probs_R, split)
        to_inner = torch.empty_like(inner)
        to_gate_RF, to_linear_RF = to_inner.chunk(2, dim=-1)
        torch.mul(gradient_RF.mul_(probs_R1), silu_RF, out=to_linear_RF)
        torch.ops.aten.silu_backward.grad_input(gradient_RF.mul_(linear_RF), gate_RF, grad_input=to_gate_RF)
        return to_inner, to_probs_R, None, None
