"""Norms, as torch computes them."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from tests.hostcuda.packages import kernels


class Norm(torch.nn.Module):
    """Base class of both norms; the weight starts at one, or at zero with `zero_centered_gamma`."""

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            raise RuntimeError("give either `normalized_shape` or `hidden_size` (deprecated)")
        if params_dtype is not None and dtype is not None:
            raise RuntimeError("Both `dtype` and `params_dtype` (deprecated) kwargs are provided")
        shape: Any = hidden_size if normalized_shape is None else normalized_shape
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        new: dict[str, Any] = {"device": "cuda" if device is None else device, "dtype": params_dtype or dtype}
        self._add("weight", torch.full(torch.empty(shape, device="meta").shape, float(not zero_centered_gamma), **new))

    def _add(self, name: str, values: torch.Tensor) -> None:
        parameter = torch.nn.Parameter(values)
        if self.sequence_parallel is not None:
            parameter.sequence_parallel = self.sequence_parallel
        self.register_parameter(name, parameter)


def normalize(
    kind: str, inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, zero_centered: bool
) -> torch.Tensor:
    """Compute torch's norm of this kind over the weight's dimensions, in the weight's dtype."""
    kernels.on_device(inp=inp, weight=weight, bias=bias)
    if inp.shape[-weight.dim() :] != weight.shape:
        raise ValueError(
            f"Input (shape={tuple(inp.shape)}) and weight (shape={tuple(weight.shape)}) are not compatible"
        )
    inp = inp.contiguous().to(weight.dtype)
    gamma = 1 + weight if zero_centered else weight
    if kind == "RMSNorm":
        return F.rms_norm(inp, weight.shape, gamma, eps)
    return F.layer_norm(inp, weight.shape, gamma, bias, eps)
