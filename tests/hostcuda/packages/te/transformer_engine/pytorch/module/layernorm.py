"""Layer norm."""

from typing import Any

import torch

from ._norm import Norm, normalize


class LayerNorm(Norm):
    """Scales to mean zero and variance one, then applies the weight and the bias."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._add("bias", torch.zeros_like(self.weight.data))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return normalize("LayerNorm", input, self.weight, self.bias, self.eps, self.zero_centered_gamma)
