"""RMS norm."""

import torch

from ._norm import Norm, normalize


class RMSNorm(Norm):
    """Of mean square one, times the weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return normalize("RMSNorm", input, self.weight, None, self.eps, self.zero_centered_gamma)
