"""Turn text from outside, such as a user's exceptions or names in files, into one printable line of a log."""

import re

_COLORS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?", re.DOTALL)
"""Terminal sequences: colors and cursor movements, then titles and links, then any other."""


def cleaned(text: object, limit: int = 200) -> str:
    """Return `text` as one line of at most `limit` (10 or more) printable characters. Never raise.

    Each run of white space becomes one space, and terminal sequences are removed. Any other unprintable character
    (controls, changes of direction, lone surrogates) becomes a question mark.
    """
    try:
        whole = str(text)
    except BaseException:  # __str__ may be user code; not even its SystemExit may end the report
        return "(its text cannot be shown)"[:limit]
    words = _COLORS.sub("", whole).split()
    line = "".join(character if character.isprintable() else "?" for character in " ".join(words))
    return line if len(line) <= limit else f"{line[: limit - 4].rstrip()} ..."


def described(error: BaseException, limit: int = 200) -> str:
    """Return an exception as one line, `TypeError: its message`, cleaned."""
    message = cleaned(error, limit)
    return cleaned(f"{type(error).__name__}: {message}" if message else type(error).__name__, limit)
