"""Texts that others wrote (exceptions of a user's code, names out of files), made fit for one line of a log."""

import re

_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?", re.DOTALL)
"""Terminal sequences: colours and movements, titles and links, and all others."""

_CUT = " ..."

_SPARE = 20
"""So many times the limit is read: what is removed may hide what follows it."""


def cleaned(text: object, limit: int = 200) -> str:
    """One line of printable characters, at most `limit` of them, whatever `text` is; never raises.

    Line breaks and other runs of white space become a space, terminal sequences vanish, and each further character that
    does not print (control characters, changes of direction, lone surrogates) becomes a question mark.

    Args:
        limit: at least 10.
    """
    try:
        whole = str(text)
        # A subclass of str may redefine everything but this
        start = str.__getitem__(whole, slice(limit * _SPARE))
        length = str.__len__(whole)
    except BaseException:  # anybody's __str__: not even its SystemExit may end what reports it
        return "(its text cannot be shown)"[:limit]
    words = _COLOURS.sub("", start).split()
    line = "".join(character if character.isprintable() else "?" for character in " ".join(words))
    if len(line) <= limit and length <= len(start):
        return line
    return (line[: limit - len(_CUT)].rstrip() + _CUT).lstrip()
