"""Write one rank's part of a checkpoint in separate processes, durably, and digest the files.

The processes are forked, so they see the tensors as they are now while training continues; on CUDA they get copies in
host memory. A process that dies or stalls makes the save fail; no rank waits for it forever.
"""

import contextlib
import gc
import importlib
import inspect
import io
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.metadata import Metadata

from megatron_balance.checkpoint import manifest
from megatron_balance.checkpoint.safe_pickle import COMMON, CONFIG, METADATA
from megatron_balance.files.writing import system_error, writing

# megatron-core would start a server process for this queue, which is not used here
filesystem_async._results_queue = queue.SimpleQueue()


@contextlib.contextmanager
def common_state_in_memory() -> Iterator[io.BytesIO]:
    """Inside the block, let `dist_checkpointing.save` write common.pt into the returned buffer on rank 0. megatron-core
    writes it in the collective part of a save, where a failure on one rank leaves the others waiting."""
    content = io.BytesIO()
    strategies = importlib.import_module("megatron.core.dist_checkpointing.strategies")
    if not hasattr(strategies, "base"):
        yield content
        return

    def save_common(_: object, common_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        if torch.distributed.get_rank() == 0:
            torch.save(common_state_dict, content)

    with mock.patch.object(strategies.common.TorchCommonSaveStrategy, "save_common", save_common):
        yield content


class ShardStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's torch_dist format; a PartWriter does the writing."""

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, *_: object) -> AsyncRequest:
        """Plan a save. 0.19 would use nvidia-resiliency-ext by default; 0.16.1 has no `async_strategy`."""
        plan = super().async_save
        choice = {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(plan).parameters else {}
        return plan(sharded_state_dict, checkpoint_dir, **choice)

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, save_state_dict_ret: tuple, *_: object):
        return AsyncRequest(None, (writer, save_state_dict_ret[1]), [])


@dataclass
class _FilePart:
    """One file being written."""

    path: Path
    process: BaseProcess
    pipe: Connection
    outcome: Any = None
    """megatron-core's write results, and the manifest entry."""


class PartWriter:
    """Writes a rank's files, each in its own process.

    Args:
        request: the request that `dist_checkpointing.save(async_sharded_save=True)` returned for a ShardStrategy.
        patience: seconds without a written byte after which a writer counts as stalled.
        common: content of common.pt; empty if this rank writes none.
    """

    def __init__(self, request: AsyncRequest, patience: float, common: bytes = b"") -> None:
        self.patience = patience
        self.common = common
        self.writer, self.metadata = request.async_fn_args
        self.parts: list[_FilePart] = []
        self.sizes: list[int] = []
        self.last_growth = time.monotonic()

    def start(self) -> None:
        """Start the processes; raise OSError if the system cannot start one."""
        transforms = [self.writer.transforms] if hasattr(self.writer, "transforms") else []
        buckets = self.writer.preload_tensors(self.writer.write_buckets) if self.writer.write_buckets else []
        for bucket in buckets:
            self.parts.append(_start(bucket, transforms))

    def poll(self) -> bool:
        """Return whether all files are on disk. Raise OSError, which names the file and the reason, if a writer failed,
        died or stalled."""
        for part in self.parts:
            if part.outcome is None and part.pipe.poll():
                part.outcome = _receive(part)
        unfinished = [part.path for part in self.parts if part.outcome is None]
        sizes = [path.stat().st_size if path.exists() else 0 for path in unfinished]
        if sizes != self.sizes:
            self.sizes = sizes
            self.last_growth = time.monotonic()
        if unfinished and time.monotonic() - self.last_growth > self.patience:
            names = ", ".join(map(str, unfinished))
            raise OSError(f"{names}: nothing was written for {self.patience:.0f} s; the writer has stalled")
        return not unfinished

    def entries(self) -> dict[str, manifest.Entry]:
        """Return the manifest entries of the written files. Valid once `poll` has returned True."""
        return {part.path.name: part.outcome[1] for part in self.parts}

    def results(self) -> list:
        """Return where each tensor was written, for `describe`. Valid once `poll` has returned True."""
        return [result for part in self.parts for result in part.outcome[0]]

    def describe(self, results: list[list]) -> None:
        """Write the files that describe the whole checkpoint, given every rank's `results`. Called on rank 0."""
        assert isinstance(self.metadata, Metadata)
        directory = Path(self.writer.checkpoint_dir)
        with writing(directory / METADATA):
            self.writer.finish(self.metadata, results)
        with writing(directory / CONFIG):
            save_config(CheckpointingConfig("torch_dist", 1), str(directory))
        if self.common:
            with writing(directory / COMMON):
                (directory / COMMON).write_bytes(self.common)

    def stop(self) -> None:
        """End all processes."""
        for part in self.parts:
            part.process.kill()
            part.process.join()
            part.pipe.close()


def _start(bucket: tuple, transforms: list) -> _FilePart:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_serve, args=(theirs, bucket, transforms), name=f"writer of {bucket[1]}"
    )
    # The child must not collect garbage that this process has left: the destructor of a process group would wait
    # forever for its threads, which a fork does not copy
    collecting = gc.isenabled()
    gc.disable()
    try:
        process.start()
    finally:
        if collecting:
            gc.enable()
    theirs.close()
    return _FilePart(Path(bucket[0]), process, ours)


def _receive(part: _FilePart) -> Any:
    try:
        error, outcome = part.pipe.recv()
    except EOFError:
        part.process.join()
        raise OSError(f"{part.path}: its writer died (exit code {part.process.exitcode})") from None
    if error is not None:
        raise OSError(f"{part.path}: {error}")
    return outcome


def _serve(pipe: Connection, bucket: tuple, transforms: list) -> None:
    """Run the writer process: write one file, flush it to disk and digest it."""
    # The rank decides when its writers end: the file being written may still be needed
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Sockets held open here would hide the rank's death from its peers
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    try:
        pipe.send((None, _write(bucket, transforms)))
    except Exception as error:
        reason = system_error(error)
        pipe.send((f"{type(error).__name__}: {error}" if reason is None else reason.strerror, None))


def _write(bucket: tuple, transforms: list) -> tuple[list, manifest.Entry]:
    results: Any = queue.SimpleQueue()
    unfinished: Any = queue.Queue()
    unfinished.put(0)
    FileSystemWriterAsync.write_preloaded_data(transforms, 0, bucket, results, unfinished, use_fsync=False)
    _, outcome = results.get()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome, manifest.sync_and_digest(Path(bucket[0]))
