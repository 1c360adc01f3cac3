"""Writing of optional output files: a failure is a warning and never stops training."""

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
"""Maximum size of records in memory while writing fails; beyond it, the oldest are dropped."""


class Attempts:
    """Attempts to write the output of `flag`, which log when writing begins to fail and when it works again."""

    def __init__(self, flag: str) -> None:
        self.flag = flag
        self.failing = False
        self._next = 0.0

    def run(self, write: Callable[[], None], last: bool = False) -> bool:
        """Call `write` and return whether it succeeded; an OSError is a failure.

        For RETRY_SECONDS after a failure, do not call `write`, unless this is the `last` attempt.
        """
        if self.failing and not last and time.monotonic() < self._next:
            return False
        try:
            write()
        except OSError as error:
            if not self.failing:
                logger.warning("%s: %s; training continues, and writing will be retried", self.flag, cleaned(error))
            self.failing = True
            self._next = time.monotonic() + RETRY_SECONDS
            return False
        if self.failing:
            logger.warning("%s: writing works again", self.flag)
        self.failing = False
        return True


@contextlib.contextmanager
def writable(flag: str) -> Iterator[None]:
    """Turn an OSError in the block, where a run opens its files, into a ValueError that names the flag."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag}: {cleaned(error)}; choose a writable directory") from error


class AppendedFile:
    """A file to which records are appended, each completely or not at all.

    `flag` is the flag and its value, for the log; `size` is the number of bytes of an existing file to keep.
    """

    def __init__(self, path: Path, flag: str, size: int = 0) -> None:
        self.path = path
        self.size = size
        self.attempts = Attempts(flag)
        self._pending: deque[bytes] = deque()
        self._bytes = 0

    @classmethod
    def continued(cls, path: Path, flag: str, belongs: Callable[[bytes, bool], bool]) -> "AppendedFile":
        """Open a file of lines; drop the first line that is incomplete or does not belong, and all lines after it.

        `belongs` receives a line and whether it is the first one.

        Raises:
            ValueError: the file cannot be written to.
        """
        size = 0
        with writable(flag):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            with path.open("r+b") as file:
                for line in file:
                    if not line.endswith(b"\n") or not belongs(line, size == 0):
                        break
                    size += len(line)
                file.truncate(size)
        return cls(path, flag, size)

    def __len__(self) -> int:
        """Return the number of records not written yet."""
        return len(self._pending)

    def add(self, record: bytes) -> None:
        """Add a record for the next `flush`."""
        self._pending.append(record)
        self._bytes += len(record)
        while self._bytes > MOST_BYTES and self.attempts.failing:
            self._bytes -= len(self._pending.popleft())

    def flush(self, last: bool = False) -> None:
        """Write the records added since the last flush; if writing fails, keep them for the next flush."""
        if self._pending:
            self.attempts.run(self.write, last)

    def write(self) -> None:
        """Write the pending records; OSError: writing failed, and the file was restored as far as possible."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            # Remove a partial record that a failed attempt may have left. If the file is new, it is empty
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
