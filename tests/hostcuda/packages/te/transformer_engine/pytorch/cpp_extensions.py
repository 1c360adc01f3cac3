"""Kernels that megatron-core calls directly."""

from typing import Any

import torch

from tests.hostcuda.packages import kernels

from .constants import TE_DType


def general_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """Multiply row-major matrices in single precision and round: `B A^T` in layout TN, `B A` in NN, `B^T A` in NT.

    Returns:
        The product, the bias's gradient (with `grad` and a bias), and two placeholders for results not computed here.
    """
    assert layout in ("TN", "NN", "NT"), f"GEMM layout {layout} not supported."
    if quantization_params is not None or gelu or ub is not None or bulk_overlap or alpha != 1.0:
        raise NotImplementedError("general_gemm: quantization, GELU, overlap of communication, alpha")
    kernels.dense(A=A, B=B, out=out, bias=bias, extra_output=extra_output)
    dtype = out_dtype or (A.dtype if out is None else out.dtype)
    kernels.require(A.dtype in TE_DType and A.dtype == B.dtype, f"no GEMM of {A.dtype} and {B.dtype}")
    kernels.require(dtype in (A.dtype, torch.float32), f"no GEMM of {A.dtype} into {dtype}")
    first = B.flatten(0, -2)
    second = A.flatten(0, -2)
    first = first.t() if layout[1] == "T" else first
    second = second.t() if layout[0] == "T" else second
    kernels.require(first.shape[1] == second.shape[0], "GEMM not possible")
    product = first.float().matmul(second.float())
    if bias is not None and not grad:
        product += bias
    grad_bias = first.float().sum(1).to(bias.dtype) if bias is not None and grad else None
    if out is None:
        return product.to(dtype), grad_bias, None, None
    kernels.require(out.shape == product.shape and out.dtype == dtype, "out is of the product's shape and type")
    return (out.add_(product) if accumulate else out.copy_(product)), grad_bias, None, None


def general_grouped_gemm(
    A: list[torch.Tensor],
    B: list[torch.Tensor],
    out: list[torch.Tensor],
    quantization_params: list[Any],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: list[torch.Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Write the products of `general_gemm` for matrices of each place into `out`, or one after the other into `out[0]`.

    The type of the result is that of `out`, whatever `out_dtype` says. Places without rows leave a zero product, or
    what they are to add to.
    """
    if any(one is not None for one in quantization_params) or gelu or use_bias or D_dtype is not None:
        raise NotImplementedError("general_grouped_gemm: quantization, GELU, bias, D_dtype")
    # The C++ function takes a vector of integers, not None
    kernels.require(
        m_splits is not None and all(isinstance(rows, int) for rows in m_splits), "rows of each place, on the host"
    )
    kernels.require(len(A) == len(B) == len(quantization_params) and len(A) > 0, "lists of matrices differ in length")
    kernels.require(len(out) == (1 if single_output else len(A)), "one output, or one for each place")
    kernels.dense(
        **{f"A{place}": one for place, one in enumerate(A)}, **{f"B{place}": one for place, one in enumerate(B)}
    )
    kernels.dense(**{f"out{place}": one for place, one in enumerate(out)})
    targets = out[0].split([len(rows) for rows in B]) if single_output else out
    for first, second, target in zip(A, B, targets, strict=True):
        if first.numel() and second.numel():
            general_gemm(first, second, layout=layout, out=target, accumulate=accumulate, grad=grad)
        elif target.numel() and not accumulate:
            target.zero_()
    return out, [], []
