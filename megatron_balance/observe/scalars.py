"""Writer of TensorBoard event files (`--tensorboard-dir`)."""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

# protobuf creates these classes during the import
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_balance.observe.optional import AppendedFile, writable

FLUSH_SECONDS = 120.0
"""Longest time before added numbers are written."""


class Scalars:
    """Writes one event file, on the thread that adds numbers: TensorBoard's writer thread would hide errors.

    `queue_size` is the number of events kept in memory before they are written.

    Raises:
        ValueError: the directory cannot be written to.
    """

    def __init__(self, directory: Path, queue_size: int) -> None:
        flag = f"--tensorboard-dir {directory}"
        now = time.time()
        path = directory / f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self.queue_size = queue_size
        self._written = time.monotonic()
        self._file = AppendedFile(path, flag)
        # RecordWriter frames each record and passes it on in one call
        self._records = RecordWriter(SimpleNamespace(write=self._file.add))
        with writable(flag):
            self._records.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
            self._file.write()

    def add_scalars(self, values: Mapping[str, float], iteration: int, samples: int | None = None) -> None:
        """Add numbers of one iteration by their tags, and by consumed samples as `{tag} vs samples`."""
        for name, value in values.items():
            self.add_scalar(name, value, iteration)
            if samples is not None:
                self.add_scalar(f"{name} vs samples", value, samples)

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        """Add a number; write all if the queue is full or FLUSH_SECONDS have passed."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        self._records.write(Event(wall_time=time.time(), step=iteration, summary=summary).SerializeToString())
        if len(self._file) >= self.queue_size or time.monotonic() - self._written > FLUSH_SECONDS:
            self._file.flush()
            self._written = time.monotonic()

    def close(self, failed: bool = False) -> None:
        """Write all remaining numbers."""
        self._file.flush(last=True)
