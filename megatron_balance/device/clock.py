"""Points in time on this device, and seconds between them."""

import time

import torch

Mark = torch.cuda.Event | float


def mark() -> Mark:
    """Return a mark for the present: an event on the current CUDA stream, or the host's clock without CUDA."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Mark, end: Mark) -> float:
    """Return the seconds from one mark to a later one; the device must have reached both."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1000
    assert isinstance(start, float) and isinstance(end, float), "both marks must be of the same device"
    return end - start
