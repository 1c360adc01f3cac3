"""Copies between the host and a device, for which neither waits for the other's work.

Memory that is not pinned makes the host wait until a copy is done.
"""

import functools
from collections.abc import Callable, Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor in host memory as one on `device`; its stream copies it, and the host goes on."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def staging(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialized host memory, which `device` can read while the host goes on.

    It is not used again before the copies from it are done.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


class _Copy:
    def __init__(self, reader: "HostReader", result: Callable[[], torch.Tensor]) -> None:
        # Kept, so that the result's memory is not used again before the copy
        self.reader, self.result = reader, result
        # On the reader's stream; the host memory is pinned
        self.copy = result().to("cpu", non_blocking=True)
        self.done = torch.cuda.Event()
        self.done.record()
        reader.started += 1
        self.number = reader.started

    def wait(self) -> torch.Tensor:
        if self.number > self.reader.arrived:
            self.done.synchronize()
            self.reader.arrived = self.number
        return self.copy


class HostReader:
    """Brings small results of a device to the host while the device does what is queued after them."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.started = self.arrived = 0
        """Number of copies that have started, and of those that the host has waited for: they arrive in order."""

    def read(self, result: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Start copying a result to the host; return the function that waits for the copy, and for nothing else.

        Args:
            result: returns the tensor. On CUDA, it is called on a stream of its own, and lets this stream wait for the
                collective that makes the tensor. Where there is no CUDA, it is called once, when the result is needed.
        """
        if self._stream is None:
            return functools.cache(result)
        with torch.cuda.stream(self._stream):
            return _Copy(self, result).wait
