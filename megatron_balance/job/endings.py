"""How the program ends. Exit status 0 means that the task was completed; only the program itself may set it."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from megatron_balance.messages import cleaned, described

INTERRUPTED = 130
"""Exit status after SIGINT, by the shells' convention."""


class Ending(SystemExit):
    """A SystemExit that the program itself raises, with a message (exit status 1) or with a status."""

    reason = "look at its output"
    """Reason for an ending with a status, in one line, for other ranks, which do not see this rank's output."""


@contextlib.contextmanager
def guarded_exit(program: str) -> Iterator[None]:
    """Let only Exceptions and Endings leave the block: a user module's SystemExit(0) would look like success."""
    try:
        yield
    except (Ending, Exception):
        raise
    except KeyboardInterrupt:
        sys.stderr.write(f"{program}: interrupted\n")
        raise Ending(INTERRUPTED) from None
    except BaseException as error:
        traceback.print_exception(error)
        raise Ending(f"{program}: error: {described(error)} raised in {raised_in(error)}") from None


def raised_in(error: BaseException) -> str:
    """Return the function, file and line that raised an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    last = frames[-1]
    return f"{last.name} ({last.filename}:{last.lineno})"


@contextlib.contextmanager
def unbreakable_output() -> Iterator[None]:
    """Inside the block, drop output that cannot be written, such as to a closed pipe or a full disk, and continue.

    The other stream reports the problem once. Output resumes as soon as writing succeeds again.
    """
    streams = output, errors = sys.stdout, sys.stderr
    sys.stdout = _Unbreakable(output, "standard output", errors)
    sys.stderr = _Unbreakable(errors, "standard error", output)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream in streams:
            try:
                stream.flush()
            except OSError:
                # Discard the rest; otherwise the interpreter would end with exit status 120
                with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), stream.fileno())


class _Unbreakable:
    """A text stream that reports its first error on the other stream and ignores later errors."""

    def __init__(self, stream: Any, name: str, other: Any) -> None:
        self._stream = stream
        self._name = name
        self._other = other
        self._reported = False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if not self._reported:
                self._reported = True
                text = f"{self._name}: {cleaned(error)}; the program continues without it"
                with contextlib.suppress(OSError):
                    print(text, file=self._other, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
