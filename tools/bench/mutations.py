"""Random edits of bytes and of JSON structures, for mutate_inputs.py."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A reader and its inputs."""

    read: Callable[[bytes], None]
    """Reads one input: returns to accept it, or raises `Refused` to refuse it; any other exception is a failure."""

    valid: list[bytes]
    hostile: list[bytes]

    structures: list[Any] | None = None
    """Contents of valid inputs, if they are JSON; half of all edits then change these."""


class Refused(Exception):
    """The reader refused its input with a clear error."""


RAW = {
    "RAW nan": "NaN",
    "RAW infinity": "-Infinity",
    "RAW float": "1e400",
    "RAW integer": "1" + "0" * 400,
    "RAW digits": "9" * 9999,
    "RAW deep": "[" * 5000 + "]" * 5000,
    "RAW deep objects": '{"a":' * 900 + "1" + "}" * 900,
    "RAW key": '{"a": 1, "a": 2}',
}
"""Texts that json.dumps cannot write, by their placeholders."""

STRANGE = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 8, 64, 1.0, 1.5, -0.5, 1e-300, 1e30, 1e308, 10**9, 2**31, 2**63, 10**19),
    *("", "1", "silu", "default", "yarn", "../x", "/etc/passwd", "\x1b[31mred\n", "\ud800", "a" * 5000, "0"),
    *([], [1], [0] * 3, [[]], {}, {"a": 1}, [10**9], [-1], [None], list(range(2000))),
    *RAW,
)


def edited(rng: random.Random, kind: Kind) -> bytes:
    """Return a valid or (short) hostile input with a few random changes."""
    if kind.structures and rng.random() < 0.5:
        return restructured(rng, rng.choice(kind.structures))
    return _bytes_changed(rng, kind.valid + [text for text in kind.hostile if len(text) < 1000])


def restructured(rng: random.Random, content: Any) -> bytes:
    """Return JSON in which one to three entries are changed, removed, renamed, swapped or duplicated."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.randint(1, 3)):
        places = list(_places(content))
        if not places:
            break
        (holder, key), (other, other_key) = rng.choice(places), rng.choice(places)
        edit = rng.randrange(6)
        if edit == 0:
            del holder[key]
        elif edit == 1:
            holder[key], other[other_key] = other[other_key], holder[key]
        elif edit == 2 and isinstance(holder, dict):
            holder[rng.choice((f"{key}x", "", "version", other_key if isinstance(other_key, str) else "y"))] = holder[
                key
            ]
        elif edit == 3 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = holder[key] * rng.choice((-1, 0, 2, 0.5, 1e6, 10**12, 1e-12))
        else:
            holder[key] = rng.choice(STRANGE)
        # Swapping two places may have created a cycle
        try:
            text = json.dumps(content)
        except (ValueError, RecursionError):
            return b"[]"
    text = json.dumps(content)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    if rng.random() < 0.1 and (quote := text.find('": ', rng.randrange(len(text) + 1))) >= 0:
        name = text[text.rfind('"', 0, quote) : quote]
        text = text[: quote + 3] + f'0, {name}": ' + text[quote + 3 :]
    return text.encode("utf-8", "surrogatepass")


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every entry of every object and list: its container and its key."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in entries:
        yield content, key
        yield from _places(value)


def _bytes_changed(rng: random.Random, inputs: list[bytes]) -> bytes:
    """Return an input with one to three random edits, some of which insert pieces of other inputs."""
    data = bytearray(rng.choice(inputs))
    for _ in range(rng.randint(1, 3)):
        start = rng.randint(0, len(data))
        stop = min(len(data), start + rng.choice((0, 0, 1, 1, 2, 8, 64)))
        piece = rng.choice(inputs)
        cut = rng.randint(0, len(piece))
        edits = (
            b"",
            rng.randbytes(rng.randint(1, 4)),
            bytes(rng.choices(b"0123456789[]{}()+*-,:'\"\\ \n\t&!%#|>?@`_=.eE~<", k=rng.randint(1, 4))),
            bytes(data[start:stop]) * rng.choice((2, 3, 200)),
            piece[cut : cut + rng.randint(1, 40)],
        )
        data[start:stop] = rng.choice(edits)
    return bytes(data)
