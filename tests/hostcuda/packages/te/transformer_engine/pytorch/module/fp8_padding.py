"""Padding of rows to the multiples that low precision needs."""

import torch


class Fp8Padding(torch.nn.Module):
    """Can be constructed, but not called."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.align_size = align_size

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> None:
        raise NotImplementedError(type(self).__name__)


class Fp8Unpadding(Fp8Padding):
    """The inverse of the padding; can be constructed, but not called."""
