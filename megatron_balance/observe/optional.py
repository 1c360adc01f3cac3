"""Writing of optional output files: a failure is a warning and never stops training.

`AppendedFile` appends records. `writable` refuses a directory when a run starts.
"""

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_balance.messages import cleaned

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""Seconds between attempts to write after a failure."""

MOST_BYTES = 2**26
"""Maximum size of the records kept in memory while writing fails; above it, the oldest are dropped."""


class Attempts:
    """Attempts to write a flag's output, which logs when they begin to fail and when they succeed again.

    Args:
        flag: the flag and its value, for the log.
    """

    def __init__(self, flag: str) -> None:
        self.flag = flag
        self.dropped = 0
        """Number of records dropped since writing began to fail."""
        self._next: float | None = None

    @property
    def failing(self) -> bool:
        return self._next is not None

    def run(self, write: Callable[[], None], last: bool = False) -> bool:
        """Call `write` and return whether it succeeded; an OSError is a failure.

        After a failure, `write` is not called for RETRY_SECONDS, except if `last`.
        """
        if self._next is not None and not last and time.monotonic() < self._next:
            return False
        try:
            write()
        except OSError as error:
            if not self.failing:
                message = "%s: %s; training continues, and writing will be retried"
                logger.warning(message, self.flag, cleaned(error))
            self._next = time.monotonic() + RETRY_SECONDS
            return False
        if self.failing:
            lost = f"; {self.dropped} records were dropped in the meantime" if self.dropped else ""
            logger.warning("%s: writing works again%s", self.flag, lost)
            self._next = None
            self.dropped = 0
        return True


@contextlib.contextmanager
def writable(flag: str) -> Iterator[None]:
    """Turn an OSError in the block, where a run opens its files, into a ValueError that names the flag."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag}: {cleaned(error)}; choose a writable directory") from error


def keep_lines(path: Path, belongs: Callable[[bytes, bool], bool]) -> int:
    """Truncate a file before the first line that is incomplete or does not belong to it, and return its size.

    A file or directory that does not exist is created.

    Args:
        belongs: called with a line and whether it is the first one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    end = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n") or not belongs(line, end == 0):
                break
            end += len(line)
        file.truncate(end)
    return end


class AppendedFile:
    """A file to which records are appended, each completely or not at all.

    Args:
        flag: the flag and its value, for the log.
        size: number of bytes of an existing file to keep.
    """

    def __init__(self, path: Path, flag: str, size: int = 0) -> None:
        self.path = path
        self.size = size
        self.attempts = Attempts(flag)
        self._pending: deque[bytes] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        """Return the number of records that have not been written yet."""
        return len(self._pending)

    def add(self, record: bytes) -> None:
        """Add a record for the next `flush`."""
        self._pending.append(record)
        self._bytes += len(record)
        while self._bytes > MOST_BYTES and self.attempts.failing:
            self._bytes -= len(self._pending.popleft())
            self.attempts.dropped += 1

    def flush(self, last: bool = False) -> None:
        """Write the records added since the last flush; keep them for the next one if writing fails."""
        if self._pending:
            self.attempts.run(self.write, last)

    def write(self) -> None:
        """Write the pending records.

        Raises:
            OSError: they could not be written; the file is restored as far as possible.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            # Remove the part of a record that a failed attempt may have left; a new file is empty
            size = min(self.size, os.fstat(file.fileno()).st_size)
            os.ftruncate(file.fileno(), size)
            try:
                data = memoryview(b"".join(self._pending))
                while data:
                    data = data[file.write(data) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file.fileno(), size)
                raise
            self.size = os.fstat(file.fileno()).st_size
        self._pending.clear()
        self._bytes = 0
