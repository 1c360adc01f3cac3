"""Copies between the host and a device, for which neither waits for the other's work.

Memory that is not pinned makes the host wait until a copy is done.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor in host memory as one on `device`; its stream copies it, and the host goes on."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_current_device(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in host memory, or nested lists of numbers, as a tensor on this rank's device."""
    return to_device(torch.as_tensor(values, dtype=dtype), torch.device(torch.cuda.current_device()))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, which is complete when the device has done all that is queued by now."""
    if not torch.cuda.is_available():
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def staging(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialized host memory, which is not used again before the copies from it to `device` are done."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


@dataclass(frozen=True, eq=False)
class Reading:
    """A tensor that comes to the host; a call waits for it."""

    wait: Callable[[], torch.Tensor]
    arrived: Callable[[], bool] = lambda: True
    """Returns whether a call would find the tensor in host memory; waits for nothing."""

    def __call__(self) -> torch.Tensor:
        return self.wait()

    def then(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Reading":
        """Return the reading of `change(tensor)`, which is computed once."""
        return Reading(functools.cache(lambda: change(self.wait())), self.arrived)


class _Copy:
    """A copy to pinned host memory."""

    def __init__(self, result: Callable[[], torch.Tensor]) -> None:
        self.copy = result().to("cpu", non_blocking=True)
        # Kept until the copy is done, so that the result's memory is not used again before
        self.pending: tuple[torch.cuda.Event, Callable[[], torch.Tensor]] | None = torch.cuda.Event(), result
        self.pending[0].record()

    def arrived(self) -> bool:
        if self.pending is not None and self.pending[0].query():
            self.pending = None
        return self.pending is None

    def wait(self) -> torch.Tensor:
        if self.pending is not None:
            self.pending[0].synchronize()
            self.pending = None
        return self.copy


class HostReader:
    """Brings small results of a device to the host while the device does the work that is queued after them.

    A process needs one: torch has few streams, and further readers would share the streams of Trans or NCCL.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def read(self, result: Callable[[], torch.Tensor]) -> Reading:
        """Start copying a result to the host.

        On CUDA, `result` is called on a stream of its own, and lets this stream wait for the collective that makes the
        tensor. Where there is no CUDA, it is called once, when the result is needed.
        """
        if self._stream is None:
            return Reading(functools.cache(result))
        # As torch.cuda.stream does, but in less time, for which the device may have nothing to do
        before = torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)
        try:
            copy = _Copy(result)
        finally:
            torch.cuda.set_stream(before)
        return Reading(copy.wait, copy.arrived)
