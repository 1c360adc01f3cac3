"""apex's layer norm."""

from typing import Any

import torch

from tests.hostcuda.packages import kernels


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """`torch.nn.functional.layer_norm`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        normalized_shape: torch.Size,
        eps: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        kernels.on_device(input=input, weight=weight, bias=bias)
        kernels.require(weight.shape == bias.shape == normalized_shape, "weight and bias are of the normalized shape")
        kernels.require(input.dtype == weight.dtype == bias.dtype, "input, weight and bias are of one type")
        input = input.contiguous()
        weight = weight.contiguous()
        bias = bias.contiguous()
        output, mean, scale = torch.native_layer_norm(input, list(normalized_shape), weight, bias, eps)
        ctx.save_for_backward(input, weight, bias, mean, scale)
        ctx.shape = list(normalized_shape)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        input, weight, bias, mean, scale = ctx.saved_tensors
        kernels.on_device(grad_output=grad_output)
        grads = torch.ops.aten.native_layer_norm_backward(
            grad_output.contiguous(), input, ctx.shape, mean, scale, weight, bias, [True] * 3
        )
        return *grads, None, None, None
