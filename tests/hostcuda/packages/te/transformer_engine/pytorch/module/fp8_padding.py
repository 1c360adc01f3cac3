"""Rows in multiples that low precision wants."""

import torch


class Fp8Padding(torch.nn.Module):
    """To be built, not to be called."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> None:
        raise NotImplementedError(type(self).__name__)


class Fp8Unpadding(Fp8Padding):
    """The inverse."""
