"""Writes one rank's part of a checkpoint in processes of its own, durably, and digests what was written.

The processes are forked, so they see the tensors as they are now while training goes on; on CUDA they get copies that
were made on the host. A process that dies or stalls is an error of the save, never a wait for ever.
"""

import gc
import inspect
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata

from megatron_balance.training import manifest

# megatron-core would start a server process for a queue that is not used here
filesystem_async._results_queue = queue.SimpleQueue()


class ShardStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's torch_dist format; the writing itself is left to a PartWriter."""

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, *_: object) -> AsyncRequest:
        """Plan a save; 0.19 would by default leave it to nvidia-resiliency-ext, 0.16.1 does not know the choice."""
        plan = super().async_save
        choice = {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(plan).parameters else {}
        return plan(sharded_state_dict, checkpoint_dir, **choice)

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, planned: tuple, *_: object
    ) -> AsyncRequest:
        return AsyncRequest(None, (writer, planned[1]), [])


@dataclass
class _Part:
    """One file being written."""

    path: Path
    process: BaseProcess
    pipe: Connection
    size: int = 0
    outcome: Any = None
    """(megatron-core's write results, manifest entry)."""


class PartWriter:
    """One process a file, for all files that a rank has to write.

    Args:
        request: what `dist_checkpointing.save(async_sharded_save=True)` with a ShardStrategy returned.
        patience: seconds without a byte written after which a writer counts as stalled.
    """

    def __init__(self, request: AsyncRequest, patience: float) -> None:
        self.patience = patience
        self.writer, self.metadata = request.async_fn_args
        self.parts: list[_Part] = []
        self.last_growth = time.monotonic()

    def start(self) -> None:
        """Start the processes.

        Raises:
            OSError: the system refuses to.
        """
        transforms = [self.writer.transforms] if hasattr(self.writer, "transforms") else []
        buckets = self.writer.preload_tensors(self.writer.write_buckets) if self.writer.write_buckets else []
        self.parts = [_start(bucket, transforms) for bucket in buckets]

    def poll(self) -> bool:
        """Whether everything is on disk.

        Raises:
            OSError: a writer failed, died or stalled; the message says which file and why.
        """
        waiting = {part.pipe: part for part in self.parts if part.outcome is None}
        for pipe in multiprocessing.connection.wait(list(waiting), timeout=0):
            part = waiting[pipe]
            part.outcome = _receive(part)
            self.last_growth = time.monotonic()
        unfinished = [part for part in self.parts if part.outcome is None]
        for part in unfinished:
            size = part.path.stat().st_size if part.path.exists() else 0
            if size != part.size:
                part.size, self.last_growth = size, time.monotonic()
        if unfinished and time.monotonic() - self.last_growth > self.patience:
            names = ", ".join(str(part.path) for part in unfinished)
            raise OSError(f"{names}: nothing was written for {self.patience:.0f} s; the writer has stalled")
        return not unfinished

    def entries(self) -> dict[str, manifest.Entry]:
        """Manifest entries of the files written, once `poll` is true."""
        return {part.path.name: part.outcome[1] for part in self.parts}

    def results(self) -> list:
        """Where each tensor was written, for `describe`, once `poll` is true."""
        return [result for part in self.parts for result in part.outcome[0]]

    def describe(self, results: list[list]) -> None:
        """On rank 0: write the files that describe the whole checkpoint, given every rank's `results`."""
        assert isinstance(self.metadata, Metadata)
        self.writer.finish(self.metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(self.writer.checkpoint_dir))

    def stop(self) -> None:
        """End all processes."""
        for part in self.parts:
            part.process.kill()
            part.process.join()
            part.pipe.close()


def _start(bucket: tuple, transforms: list) -> _Part:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_serve, args=(theirs, bucket, transforms), name=f"writer of {bucket[1]}"
    )
    # What waits for the garbage collector here must not be collected there: the destructor of a process group would
    # wait for ever for threads, which are not forked
    collecting = gc.isenabled()
    gc.disable()
    try:
        process.start()
    finally:
        if collecting:
            gc.enable()
    theirs.close()
    return _Part(Path(bucket[0]), process, ours)


def _receive(part: _Part) -> Any:
    try:
        error, outcome = part.pipe.recv()
    except EOFError:
        part.process.join()
        raise OSError(f"{part.path}: its writer died (exit code {part.process.exitcode})") from None
    if error is not None:
        raise OSError(f"{part.path}: {error}")
    return outcome


def _serve(pipe: Connection, bucket: tuple, transforms: list) -> None:
    """The writer process: write, put on disk and digest one file."""
    # The end of the job is the rank's business: what is being written may still be of use
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Sockets held open here would hide the rank's death from its peers
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    try:
        pipe.send((None, _write(bucket, transforms)))
    except Exception as error:
        pipe.send((f"{type(error).__name__}: {error}", None))


def _write(bucket: tuple, transforms: list) -> tuple[list, manifest.Entry]:
    results: queue.SimpleQueue = queue.SimpleQueue()
    unfinished: queue.Queue = queue.Queue()
    unfinished.put(0)
    FileSystemWriterAsync.write_preloaded_data(transforms, 0, bucket, results, unfinished, use_fsync=False)
    _, outcome = results.get()
    if isinstance(outcome, Exception):
        raise outcome
    path = Path(bucket[0])
    return outcome, manifest.sync_and_digest(path)
