"""How the program ends. Exit status 0 says that what was asked for has been done, so nobody else may give it."""

import contextlib
import sys
import traceback
from collections.abc import Iterator

from megatron_balance.messages import described

INTERRUPTED = 130
"""The exit status of a program that SIGINT ended, as shells have it."""


class Ending(SystemExit):
    """An end that the program itself has decided on, as SystemExit: a message, with exit status 1, or a status."""


@contextlib.contextmanager
def only_our_own(program: str) -> Iterator[None]:
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
