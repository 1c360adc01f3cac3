"""A norm and a linear layer."""

from typing import Any

import torch

from tests.hostcuda.packages import kernels

from ._norm import normalize
from .linear import Linear


class LayerNormLinear(Linear):
    """A norm followed by a linear layer, with the default random state."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **options: Any,
    ) -> None:
        kernels.check_names(f"{__name__}:LayerNormLinear.__init__", options)
        if return_layernorm_output:
            raise NotImplementedError("LayerNormLinear: return_layernorm_output")
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        super().__init__(in_features, out_features, **options)

    def _add_norm(self, new: dict[str, Any]) -> None:
        ones = torch.full((self.in_features,), float(not self.zero_centered_gamma), **new)
        self.layer_norm_weight = torch.nn.Parameter(ones)
        self.layer_norm_bias = None if self.normalization == "RMSNorm" else torch.nn.Parameter(torch.zeros_like(ones))
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the output; with `return_bias`, also the bias."""
        inp = self._prepare(inp)
        normal = normalize(
            self.normalization, inp, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma
        )
        return self._multiply(normal)
