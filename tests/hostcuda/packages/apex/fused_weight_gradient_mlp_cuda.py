"""apex's GEMMs that add a weight's gradient to its main gradient, in single precision."""

import torch

from tests.hostcuda.packages import kernels


def wgrad_gemm_accum_fp32(input: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor, /) -> None:
    """Add the weight's gradient to `d_weight`, which is in single precision.

    Args:
        input: [..., columns].
        d_output: gradient of the output, [..., rows], in the input's dtype.
        d_weight: [rows, columns].
    """
    kernels.require(d_weight.dtype == torch.float32, "d_weight is in single precision")
    _accumulate(input, d_output, d_weight)


def wgrad_gemm_accum_fp16(input: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor, /) -> None:
    """Do as `wgrad_gemm_accum_fp32`, with all three tensors in one half-precision dtype."""
    kernels.require(d_weight.dtype == input.dtype, "d_weight is of the input's type")
    _accumulate(input, d_output, d_weight)


def _accumulate(input: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor) -> None:
    kernels.dense(input=input, d_output=d_output, d_weight=d_weight)
    d_weight.add_(d_output.flatten(0, -2).float().t().matmul(input.flatten(0, -2).float()))
