"""Copies between the host and a device, for which neither waits for the other's work.

Memory that is not pinned makes the host wait until a copy is done.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor in host memory as one on `device`; its stream copies it, and the host goes on."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class _Copy:
    tensor: torch.Tensor
    """Kept, so that its memory is not used again before the copy."""
    copy: torch.Tensor
    done: torch.cuda.Event
    number: int
    reader: "HostReader"

    def wait(self) -> torch.Tensor:
        if self.number > self.reader.arrived:
            self.done.synchronize()
            self.reader.arrived = self.number
        return self.copy


class HostReader:
    """Brings small results of a device to the host while the device does what is queued after them."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._started = self.arrived = 0
        """Number of copies that have started, and of those that the host has waited for: they arrive in order."""

    def read(self, result: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Start copying a result to the host; return the function that waits for the copy, and for nothing else.

        Args:
            result: returns the tensor. On CUDA, it is called on a stream of its own, after everything that the current
                stream has queued, so that only that stream waits for a collective. Where there is no CUDA, it is called
                when the result is needed.
        """
        if self._stream is None:
            return result
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            tensor = result()
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        self._started += 1
        return _Copy(tensor, copy, done, self._started, self).wait
