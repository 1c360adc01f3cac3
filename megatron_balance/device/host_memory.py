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
    def __init__(self, reader: "HostReader", result: Callable[[], torch.Tensor], done: torch.cuda.Event) -> None:
        # Kept, so that the result's memory is not used again before the copy
        self.reader, self.result, self.done = reader, result, done
        # The host memory is pinned
        self.copy = result().to("cpu", non_blocking=True)
        reader.started += 1
        self.number = reader.started

    def wait(self) -> torch.Tensor:
        reader = self.reader
        if self.number > reader.arrived:
            self.done.synchronize()
            reader.arrived = reader.started
        return self.copy


class HostReader:
    """Brings small results of a device to the host while the device does what is queued after them."""

    def __init__(self) -> None:
        self._device = (torch.cuda.Stream(), torch.cuda.Event()) if torch.cuda.is_available() else None
        """The stream of the copies, which arrive in order, and the event that is recorded after each."""
        self.started = self.arrived = 0
        """Number of copies that have started, and of those that the host has waited for."""

    def read(self, result: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Start copying a result to the host; return the function that waits for the copies that have started by then.

        Args:
            result: returns the tensor. On CUDA, it is called on a stream of its own, and lets this stream wait for the
                collective that makes the tensor. Where there is no CUDA, it is called once, when the result is needed.
        """
        if self._device is None:
            return functools.cache(result)
        stream, done = self._device
        # As torch.cuda.stream does, but in less time, for which the device may have nothing to do
        before = torch.cuda.current_stream()
        torch.cuda.set_stream(stream)
        try:
            copy = _Copy(self, result, done)
            done.record(stream)
        finally:
            torch.cuda.set_stream(before)
        return copy.wait
