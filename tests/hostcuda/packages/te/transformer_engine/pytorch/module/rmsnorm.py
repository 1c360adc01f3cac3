"""RMS norm."""

import torch

from ._norm import Norm, normalize


class RMSNorm(Norm):
    """Scales to a mean square of one, then multiplies by the weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return normalize("RMSNorm", input, self.weight, None, self.eps, self.zero_centered_gamma)
