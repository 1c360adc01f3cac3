"""What the machine lets a process have: file descriptors, shared memory, memory. Running out ends in one sentence."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

SHARED_MEMORY = Path("/dev/shm")

BASE_DESCRIPTORS = {"gloo": 80, "nccl": 120}
"""Of a process with torch and one rank, as was counted (gloo), and without what NCCL itself opens."""

DESCRIPTORS_PER_RANK = {"gloo": 8, "nccl": 0}
"""A process's connections to each rank in all groups together, as was counted (gloo)."""

STORE_CONNECTIONS = 2
"""Of each rank with the key-value store: the job's, and the hang guard's own."""

HEADROOM = 8
"""So many times what is needed at least is asked for, where the system allows it."""


class OutOfResources(RuntimeError):
    """The machine does not give what this process needs; the message says to a user what that is, and what helps."""


def open_files(backend: str, world_size: int, holds_store: bool) -> None:
    """See to it that this process may open as many files as its connections take.

    Raises:
        ValueError: the system forbids it.
    """
    per_rank = DESCRIPTORS_PER_RANK[backend] + STORE_CONNECTIONS * holds_store
    needed = BASE_DESCRIPTORS[backend] + per_rank * world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _as_number(hard) < needed:
        raise ValueError(
            f"ulimit -n {hard}: a job of {world_size} processes needs about {needed} file descriptors in each; raise "
            f"the limit with ulimit -n {HEADROOM * needed} (as root, or in the settings of the service or container)"
        )
    if _as_number(soft) < HEADROOM * needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(_as_number(hard), HEADROOM * needed), hard))


def _as_number(limit: int) -> int:
    return 2**30 if limit == resource.RLIM_INFINITY else limit


def shared_memory(workers: int, batch_bytes: int, processes: int, directory: Path = SHARED_MEMORY) -> None:
    """Check that data loading has the shared memory that it passes batches through.

    Args:
        workers: `--num-workers` of each process.
        batch_bytes: of a microbatch; a worker prepares two.
        processes: on this node.

    Raises:
        ValueError: there is too little, or it cannot be written to.
    """
    if not workers or not directory.is_dir():
        return
    free, needed = os.statvfs(directory), processes * workers * 2 * batch_bytes
    available = free.f_bavail * free.f_frsize
    remedy = "give the container more (docker run --ipc host, or --shm-size 8g), or use --num-workers 0"
    if not os.access(directory, os.W_OK):
        raise ValueError(f"--num-workers {workers}: {directory}, where batches pass, cannot be written to; {remedy}")
    if available < needed:
        raise ValueError(
            f"--num-workers {workers}: batches of {processes} processes take {needed / 2**20:.0f} MiB of {directory}, "
            f"which has {available / 2**20:.0f} MiB; {remedy}"
        )


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Errors that say that something has run out become OutOfResources, with what helps; others stay as they are."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        sentence = explanation(error)
        if sentence is None:
            raise
        raise OutOfResources(sentence) from error


def explanation(error: Exception) -> str | None:
    """What has run out, and what helps; None: nothing has."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "the GPU's memory is too small for this run; --dry-run shows what each rank needs for what"
    if isinstance(error, MemoryError) or "Cannot allocate memory" in text or "not enough memory" in text:
        return "this machine's memory is too small for this run; --dry-run shows what each rank needs for what"
    if "Too many open files" in text:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"all file descriptors are in use; raise the limit of {soft} with ulimit -n"
    if "can't start new thread" in text or "Resource temporarily unavailable" in text:
        return (
            "the system starts no more threads; raise the limit with ulimit -u, or the container's limit of processes"
        )
    if "No space left on device" in text and str(SHARED_MEMORY) in text:
        return f"{SHARED_MEMORY} is full; give the container more (docker run --ipc host, or --shm-size 8g)"
    return None
