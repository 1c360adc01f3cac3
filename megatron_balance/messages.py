"""Turn text from outside, such as a user's exceptions or names in files, into one printable line of a log."""

import re

_COLORS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?", re.DOTALL)
"""Terminal sequences: first colors and cursor movements, then titles and links, then all others."""


def cleaned(text: object, limit: int = 200) -> str:
    """Return `text` as one line of at most `limit` printable characters, which is at least 10. Never raise.

    Each run of white space, including line breaks, becomes a space. Terminal sequences are removed. Any other character
    that does not print (control characters, changes of direction, lone surrogates) becomes a question mark.
    """
    try:
        whole = str(text)
    except BaseException:  # __str__ may be a user's code; not even a SystemExit in it may end the report
        return "(its text cannot be shown)"[:limit]
    words = _COLORS.sub("", whole).split()
    line = "".join(character if character.isprintable() else "?" for character in " ".join(words))
    return line if len(line) <= limit else f"{line[: limit - 4].rstrip()} ..."


def described(error: BaseException, limit: int = 200) -> str:
    """Return an exception as one line, `TypeError: its message`, as `cleaned` formats it."""
    message = cleaned(error, limit)
    return cleaned(f"{type(error).__name__}: {message}" if message else type(error).__name__, limit)
