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
    host = torch.as_tensor(values, dtype=dtype)
    if torch.cuda.is_available():
        host = host.pin_memory()
    return host.to(torch.cuda.current_device(), non_blocking=True)


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
    """A copy to host memory: the `number`-th of a reader, all of which arrive in order."""

    def __init__(self, reader: "HostReader", result: Callable[[], torch.Tensor]) -> None:
        self.reader = reader
        self.number = reader.started
        # Kept until the host has waited, so that the result's memory is not used again before the copy
        self.result: Callable[[], torch.Tensor] | None = result
        # The host memory is pinned
        self.copy = result().to("cpu", non_blocking=True)
        self.done = torch.cuda.Event()

    def arrived(self) -> bool:
        if self.number > self.reader.arrived and self.done.query():
            self.reader.arrived = self.number
        return self.number <= self.reader.arrived

    def wait(self) -> torch.Tensor:
        if self.number > self.reader.arrived:
            self.done.synchronize()
            self.reader.arrived = self.number
        self.result = None
        return self.copy


class HostReader:
    """Brings small results of a device to the host while the device does the work that is queued after them.

    A process needs one: torch has few streams, and further readers would share the streams of Trans or NCCL.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.started = self.arrived = 0
        """Number of copies that have started, and of those that are known to have arrived."""

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
            self.started += 1
            copy = _Copy(self, result)
            copy.done.record(self._stream)
        finally:
            torch.cuda.set_stream(before)
        return Reading(copy.wait, copy.arrived)
