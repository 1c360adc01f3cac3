"""Asynchronous copies between the host and a device; with host memory that is not pinned, the host would wait."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from host memory to `device` on its current stream; the host does not wait."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_current_device(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """Copy a tensor in host memory, or nested lists of numbers, to this rank's device."""
    host = torch.as_tensor(values, dtype=dtype)
    if torch.cuda.is_available():
        host = host.pin_memory()
    return host.to(torch.cuda.current_device(), non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory; it is complete when the device has finished all work queued so far."""
    if not torch.cuda.is_available():
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def staging(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialized host memory that is not reused before copies from it to `device` are complete."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


@dataclass(frozen=True, eq=False)
class Reading:
    """A tensor on its way to the host; a call waits for it."""

    wait: Callable[[], torch.Tensor]
    arrived: Callable[[], bool] = lambda: True
    """Returns, without waiting, whether the tensor has arrived."""

    def __call__(self) -> torch.Tensor:
        return self.wait()

    def then(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Reading":
        """Return the reading of `change(tensor)`, computed once."""
        return Reading(functools.cache(lambda: change(self.wait())), self.arrived)


class _Copy:
    """A copy to host memory: the `number`-th one of a reader; copies arrive in order."""

    def __init__(self, reader: "HostReader", result: Callable[[], torch.Tensor]) -> None:
        self.reader = reader
        self.number = reader.started
        # Kept until the host has waited, so the result's memory is not reused before the copy
        self.result: Callable[[], torch.Tensor] | None = result
        # This copy allocates pinned host memory
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
    """Copies small results to the host while the device continues with the work queued after them. A process should
    have only one: torch has few streams, and more readers would share those of Trans or NCCL."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.started = self.arrived = 0
        """Number of copies that have started, and that are known to have arrived."""

    def read(self, result: Callable[[], torch.Tensor]) -> Reading:
        """Start copying a result to the host. On CUDA, `result` is called on the reader's stream and makes this stream
        wait for the collective that produces the tensor. Without CUDA, it is called once, when the result is needed."""
        if self._stream is None:
            return Reading(functools.cache(result))
        # Like torch.cuda.stream, but faster: the device may be idle meanwhile
        before = torch.cuda.current_stream()
        torch.cuda.set_stream(self._stream)
        try:
            self.started += 1
            copy = _Copy(self, result)
            copy.done.record(self._stream)
        finally:
            torch.cuda.set_stream(before)
        return Reading(copy.wait, copy.arrived)
