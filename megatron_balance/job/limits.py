"""Limits of the machine: file descriptors, shared memory and memory. A shortage is reported in one sentence."""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

SHARED_MEMORY = Path("/dev/shm")

BASE_DESCRIPTORS = {"gloo": 80, "nccl": 120}
DESCRIPTORS_PER_RANK = {"gloo": 8, "nccl": 0}
"""File descriptors of a process, and additional ones for each rank. Measured for gloo; NCCL's own not counted."""

STORE_CONNECTIONS = 2
"""Connections of each rank to the key-value store: one of the job, one of the hang guard."""

HEADROOM = 8
"""Ratio of the requested limit to the minimum, if the system allows it."""


class OutOfResources(RuntimeError):
    """The machine lacks a resource that this process needs; the message names the resource and a remedy."""


def open_files(backend: str, world_size: int, holds_store: bool) -> None:
    """Raise this process's limit of open files to what its connections need; ValueError: not allowed."""
    per_rank = DESCRIPTORS_PER_RANK[backend] + STORE_CONNECTIONS * holds_store
    needed = BASE_DESCRIPTORS[backend] + per_rank * world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if most < needed:
        raise ValueError(
            f"ulimit -n {hard}: a job of {world_size} processes needs about {needed} file descriptors in each; raise "
            f"the limit with ulimit -n {HEADROOM * needed} (as root, or in the settings of the service or container)"
        )
    if soft != resource.RLIM_INFINITY and soft < HEADROOM * needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, HEADROOM * needed), hard))


def shared_memory(workers: int, batch_bytes: int, processes: int, directory: Path = SHARED_MEMORY) -> None:
    """Raise ValueError if workers lack the shared memory through which they pass batches.

    Args:
        workers: `--num-workers` of each process.
        batch_bytes: bytes of a microbatch; a worker prepares two.
        processes: number of processes on this node.
    """
    if not workers or not directory.is_dir():
        return
    free = os.statvfs(directory)
    needed = processes * workers * 2 * batch_bytes
    available = free.f_bavail * free.f_frsize
    remedy = "give the container more (docker run --ipc host, or --shm-size 8g), or use --num-workers 0"
    if not os.access(directory, os.W_OK):
        raise ValueError(f"--num-workers {workers}: {directory}, which batches need, cannot be written to; {remedy}")
    if available < needed:
        raise ValueError(
            f"--num-workers {workers}: batches of {processes} processes take {needed / 2**20:.0f} MiB of {directory}, "
            f"which has {available / 2**20:.0f} MiB; {remedy}"
        )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn errors about an exhausted resource into OutOfResources with a remedy; pass other errors on."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        sentence = explanation(error)
        if sentence is None:
            raise
        raise OutOfResources(sentence) from error


def explanation(error: Exception) -> str | None:
    """Return a sentence that names the exhausted resource and a remedy; None if the error has another cause."""
    text = str(error)
    on_device = isinstance(error, torch.OutOfMemoryError)
    if on_device or isinstance(error, MemoryError) or "Cannot allocate memory" in text or "not enough memory" in text:
        whose = "the GPU" if on_device else "this machine"
        return f"{whose}'s memory is too small for this run; --dry-run shows each rank's memory by use"
    if "Too many open files" in text:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"all file descriptors are in use; raise the limit of {soft} with ulimit -n"
    if "can't start new thread" in text or "Resource temporarily unavailable" in text:
        return "the system cannot start more threads; raise the limit with ulimit -u, or the container's process limit"
    if "No space left on device" in text and str(SHARED_MEMORY) in text:
        return f"{SHARED_MEMORY} is full; give the container more (docker run --ipc host, or --shm-size 8g)"
    return None
