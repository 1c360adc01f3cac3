"""How the program ends. Exit status 0 says that what was asked for has been done, so nobody else may give it."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from megatron_balance.messages import cleaned, described

INTERRUPTED = 130
"""The exit status of a program that SIGINT ended, as shells have it."""


class Ending(SystemExit):
    """An end that the program itself has decided on, as SystemExit: a message, with exit status 1, or a status."""

    reason = "look at what it says"
    """Why the program ends with a status, in one line, for other ranks: they do not see what it has printed."""


@contextlib.contextmanager
def guarded_exit(program: str) -> Iterator[None]:
    """Of what leaves the program without being an Exception, let only Endings pass.

    A SystemExit(0) out of a user's module would else be taken for success.
    """
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
    """The function, file and line that an exception comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    last = frames[-1]
    return f"{last.name} ({last.filename}:{last.lineno})"


@contextlib.contextmanager
def unbreakable_output() -> Iterator[None]:
    """Inside, a text that cannot be printed is lost and ends nothing: a pipe without reader, a full disk.

    The stream that still works is told. What is printed comes through again as soon as it can.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Unbreakable(streams[0], "standard output"), _Unbreakable(streams[1], "standard error")
    sys.stdout.other, sys.stderr.other = reversed(streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream in streams:
            _discard_unwritten(stream)


class _Unbreakable:
    """A text stream whose errors are told to another one, once."""

    other: Any = None

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name, self._told = stream, name, False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if not self._told:
                self._told = True
                with contextlib.suppress(OSError):
                    print(f"{self._name}: {cleaned(error)}; the program goes on without", file=self.other, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _discard_unwritten(stream: Any) -> None:
    """What a stream cannot write at the end would make the interpreter's exit status 120."""
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
