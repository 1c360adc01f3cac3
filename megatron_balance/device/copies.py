"""Copies between host and device for which the host does not wait: they need page-locked host memory."""

from typing import Any

import torch


def to_device(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in host memory, or nested lists of numbers, as a tensor on the device."""
    host = torch.as_tensor(values, dtype=dtype)
    if torch.cuda.is_available():
        host = host.pin_memory()
    return host.to(torch.cuda.current_device(), non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, which is complete when the device has done all that is queued by now."""
    if not torch.cuda.is_available():
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
