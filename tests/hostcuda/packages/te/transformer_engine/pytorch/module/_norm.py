"""Norms, as torch computes them."""

from typing import Any

import torch
import torch.nn.functional as F

from tests.hostcuda.packages import kernels


class Norm(torch.nn.Module):
    """Base class of both norms; the weight starts at one, or at zero with `zero_centered_gamma`."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        size = hidden_size or normalized_shape
        assert size is not None
        self._add("weight", torch.full((size,), float(not zero_centered_gamma), device=device, dtype=params_dtype))

    def _add(self, name: str, values: torch.Tensor) -> None:
        parameter = torch.nn.Parameter(values)
        if self.sequence_parallel is not None:
            parameter.sequence_parallel = self.sequence_parallel
        self.register_parameter(name, parameter)


class LayerNorm(Norm):
    """Scales to mean zero and variance one, then applies the weight and the bias."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._add("bias", torch.zeros_like(self.weight.data))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return normalize("LayerNorm", input, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class RMSNorm(Norm):
    """Scales to a mean square of one, then multiplies by the weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return normalize("RMSNorm", input, self.weight, None, self.eps, self.zero_centered_gamma)


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
