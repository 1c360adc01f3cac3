"""The products of a linear layer, with tensor parallelism's collectives."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.hostcuda.packages import kernels

from ..distributed import gather_along_first_dim, reduce_scatter_along_first_dim
from .base import get_dummy_wgrad


@dataclass(frozen=True)
class How:
    """Settings of a linear layer's computation."""

    parallel_mode: str | None
    group: dist.ProcessGroup | None
    ranks: int
    sequence_parallel: bool
    accumulate: bool
    """Whether weight gradients are added to `main_grad`."""

    @property
    def gathers(self) -> bool:
        return self.parallel_mode == "column" and self.sequence_parallel

    @property
    def scatters(self) -> bool:
        return self.parallel_mode == "row" and self.sequence_parallel

    def reduces(self, mode: str) -> bool:
        return self.parallel_mode == mode and self.ranks > 1 and not self.sequence_parallel


class LinearFunction(torch.autograd.Function):
    """y = x W^T + b, in megatron-core's order of operations."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, inp: torch.Tensor, bias: torch.Tensor | None, how: How) -> torch.Tensor:
        assert inp.shape[-1] == weight.shape[1], "GEMM not possible"
        kernels.dense(weight=weight, inp=inp, bias=bias)
        ctx.save_for_backward(inp, weight)
        ctx.how = how
        ctx.has_bias = bias is not None
        # Tensors that autograd saves may lack the parameter's attributes, such as `main_grad`
        ctx.weight = weight
        total = gather_along_first_dim(inp, how.group) if how.gathers else inp
        out = torch.matmul(total, weight.t())
        out = out if bias is None else out + bias
        if how.scatters:
            return reduce_scatter_along_first_dim(out, how.group)
        if how.reduces("row"):
            dist.all_reduce(out, group=how.group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        (inp, weight) = ctx.saved_tensors
        how = ctx.how
        kernels.on_device(grad=grad)
        grad = grad.contiguous()
        if how.scatters:
            grad = gather_along_first_dim(grad, how.group)
        total = gather_along_first_dim(inp, how.group) if how.gathers and ctx.needs_input_grad[0] else inp
        grad_inp = grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_inp = grad.matmul(weight)
            if how.gathers:
                grad_inp = reduce_scatter_along_first_dim(grad_inp, how.group)
            elif how.reduces("column"):
                dist.all_reduce(grad_inp, group=how.group)
        if ctx.needs_input_grad[0]:
            grad_weight = weight_gradient(ctx.weight, total.flatten(0, -2), grad.flatten(0, -2), how.accumulate)
        if ctx.has_bias:
            grad_bias = grad.flatten(0, -2).sum(0)
        return grad_weight, grad_inp, grad_bias, None


def weight_gradient(
    weight: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, accumulate: bool
) -> torch.Tensor | None:
    """Return the gradient, or its placeholder if it is added to `main_grad`."""
    if not accumulate:
        return grad.t().matmul(rows)
    main = weight.main_grad
    kernels.dense(main_grad=main)
    assert main.shape == weight.shape and main.dtype in (torch.float32, weight.dtype)
    product = grad.float().t().matmul(rows.float())
    if getattr(weight, "overwrite_main_grad", False):
        main.copy_(product)
    else:
        main.add_(product)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(list(main.shape), weight.dtype, zero=getattr(weight, "zero_out_wgrad", False))
