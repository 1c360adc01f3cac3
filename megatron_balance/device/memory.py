"""Memory that this rank uses: on its device or, without CUDA, in its process."""

import contextlib
import pickle
from pathlib import Path

import torch

from megatron_balance.files.writing import whole_file

MEGABYTE = 1024 * 1024
HISTORY_EVENTS = 100_000
"""Number of allocations and releases that a memory history keeps."""


def peak_bytes() -> int:
    """Return the peak memory of tensors on the device or, without CUDA, the peak resident size."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    # The system updates the peak less often than the size
    return max(allocated_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def line(with_device: bool) -> str:
    """Return Megatron's memory report; `with_device` adds the memory of the device that all processes use."""
    sizes = {"allocated": allocated_bytes(), "max allocated": peak_bytes()}
    if torch.cuda.is_available():
        sizes |= {"reserved": torch.cuda.memory_reserved(), "max reserved": torch.cuda.max_memory_reserved()}
        if with_device:
            free, total = torch.cuda.mem_get_info()
            sizes["total device memory used"] = total - free
    return "memory (MB)" + "".join(f" | {name}: {size / MEGABYTE:.2f}" for name, size in sizes.items())


def scalars() -> dict[str, float]:
    """Return this rank's memory by Megatron's TensorBoard tags; without CUDA, only the resident size and its peak."""
    sizes = {"mem-allocated-bytes": allocated_bytes(), "mem-max-allocated-bytes": peak_bytes()}
    if torch.cuda.is_available():
        statistics = torch.cuda.memory_stats()
        sizes["mem-reserved-bytes"] = statistics["reserved_bytes.all.current"]
        sizes["mem-allocated-count"] = statistics["allocation.all.current"]
    return {name: float(size) for name, size in sizes.items()}


def allocated_bytes() -> int:
    """Return the memory of tensors on the device or, without CUDA, the resident size."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    import psutil

    return psutil.Process().memory_info().rss


def record_history(when_full: Path) -> None:
    """Record later allocations on the device; write them to `when_full` if an allocation fails."""
    torch.cuda.memory._record_memory_history(max_entries=HISTORY_EVENTS)

    def observe(device: int, allocation: int, of_device: int, free: int) -> None:
        # Report the allocation's error only
        with contextlib.suppress(OSError):
            write_history(when_full)

    torch._C._cuda_attach_out_of_memory_observer(observe)  # pyright: ignore[reportAttributeAccessIssue]


def write_history(path: Path) -> None:
    """Write the history that `record_history` has recorded; OSError if the file cannot be written."""
    with whole_file(path) as unfinished, unfinished.open("wb") as file:
        pickle.dump(torch.cuda.memory._snapshot(), file)
