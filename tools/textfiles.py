"""What the text tools share: JSONL lines -> strings, argument types."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path


class BadLine(Exception):
    """An input line that holds no usable document; its text reads `FILE:LINE: reason`."""

    def __init__(self, path: Path, number: int, reason: str) -> None:
        super().__init__(path, number, reason)  # these arguments let it travel between processes

    def __str__(self) -> str:
        path, number, reason = self.args
        return f"{path}:{number}: {reason}"


def parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """The strings that one JSONL line holds under `keys`, in that order. ValueError says what is wrong with it."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of open brackets
        raise ValueError(f"not JSON that Python can read: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object but {type(record).__name__}")
    return [_string(record, key) for key in keys]


def _string(record: dict[str, object], key: str) -> str:
    if key not in record:
        raise ValueError(f"no key {key!r}")
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"key {key!r} holds no string but {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no tokenizer takes
        raise ValueError(f"key {key!r} is not Unicode text: {error.reason} at character {error.start + 1}") from error
    return value


def existing_file(text: str) -> Path:
    """argparse type: a path to read."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file; check the path")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is a directory; name the JSONL files in it")
    return path


def positive_int(text: str) -> int:
    """argparse type: an integer of at least 1."""
    value = int(text) if text.strip().lstrip("+-").isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: give an integer of at least 1")
    return value
