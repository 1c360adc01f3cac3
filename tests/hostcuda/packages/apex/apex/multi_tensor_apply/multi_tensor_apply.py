"""Calls kernels over lists of tensors."""

from collections.abc import Callable
from typing import Any

import torch


class MultiTensorApply:
    """Passes a kernel the size of its chunks."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable, noop_flag_buffer: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *args: Any
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
