"""Numbers over iterations for TensorBoard (`--tensorboard-dir`), as its own event files."""

import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_balance.messages import cleaned
from megatron_balance.observe.optional import AppendedFile

FLUSH_SECONDS = 120.0
"""After which what was added is written, however little it is."""


class Scalars:
    """Writes one event file, from the thread that adds numbers: a writer's own thread would hide its errors.

    Args:
        queue_size: so many numbers are kept before they are written.

    Raises:
        ValueError: the directory cannot be written to.
    """

    def __init__(self, directory: Path, queue_size: int) -> None:
        flag, now = f"--tensorboard-dir {directory}", time.time()
        path = directory / f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self.queue_size, self._written = queue_size, time.monotonic()
        self._file = AppendedFile(path, flag)
        # It frames records, and passes each on in one piece
        self._records = RecordWriter(_Adding(self._file))
        try:
            self._records.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
            self._file.write()
        except OSError as error:
            raise ValueError(f"{flag}: {cleaned(error)}; choose a writable directory") from error

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        """Note a number; now and then all are written."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        self._records.write(Event(wall_time=time.time(), step=iteration, summary=summary).SerializeToString())
        if len(self._file) >= self.queue_size or time.monotonic() - self._written > FLUSH_SECONDS:
            self._file.flush()
            self._written = time.monotonic()

    def close(self) -> None:
        """Write what is left."""
        self._file.flush(last=True)


class _Adding:
    """A file as RecordWriter wants it."""

    def __init__(self, file: AppendedFile) -> None:
        self.write = file.add
