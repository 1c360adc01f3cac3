"""Files that a run writes for people to look at: trouble with them is a warning, and never ends training."""

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from megatron_balance.messages import cleaned

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""Between attempts to write, once one has failed."""

MOST_BYTES = 2**26
"""Limit on the records that wait in memory while writing fails; beyond it, the oldest are dropped."""


class Attempts:
    """Attempts to write for a flag: says when they begin to fail and when they succeed again.

    Args:
        flag: with its value.
    """

    def __init__(self, flag: str) -> None:
        self.flag, self.dropped = flag, 0
        """What could not be kept since writing fails."""
        self._next: float | None = None

    @property
    def failing(self) -> bool:
        return self._next is not None

    def run(self, write: Callable[[], None], last: bool = False) -> bool:
        """Whether `write` was called and succeeded; after a failure it is not called for a while, except as the last.

        Only an OSError is a failure.
        """
        if self._next is not None and not last and time.monotonic() < self._next:
            return False
        try:
            write()
        except OSError as error:
            if not self.failing:
                message = "%s: %s; training goes on, and writing is tried again"
                logger.warning(message, self.flag, cleaned(error))
            self._next = time.monotonic() + RETRY_SECONDS
            return False
        if self.failing:
            lost = f"; {self.dropped} records were dropped meanwhile" if self.dropped else ""
            logger.warning("%s: writing works again%s", self.flag, lost)
            self._next, self.dropped = None, 0
        return True


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` write a file that appears whole or not at all; its directory is made if it is gone.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        os.replace(unfinished, path)
    except OSError:
        # The space may be what is missing
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


class AppendedFile:
    """A file that records are appended to, each whole or not at all.

    Args:
        size: bytes of the file that are to stay.
    """

    def __init__(self, path: Path, flag: str, size: int = 0) -> None:
        self.path, self.size = path, size
        self.attempts = Attempts(flag)
        self._pending: deque[bytes] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        """Records that are not written yet."""
        return len(self._pending)

    def add(self, record: bytes) -> None:
        """Note a record for the next `flush`."""
        self._pending.append(record)
        self._bytes += len(record)
        while self._bytes > MOST_BYTES and self.attempts.failing:
            self._bytes -= len(self._pending.popleft())
            self.attempts.dropped += 1

    def flush(self, last: bool = False) -> None:
        """Write what was added since the last time; what cannot be written is kept for the next."""
        if self._pending:
            self.attempts.run(self.write, last)

    def write(self) -> None:
        """Write what is pending.

        Raises:
            OSError: it could not be written; the file is as before, as far as possible.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            # Whatever half a record another attempt has left; and a file that is new begins at its beginning
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
