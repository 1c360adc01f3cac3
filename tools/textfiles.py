"""Shared functions of the text tools: read strings from JSONL lines, and argument types."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path


class BadLine(Exception):
    """An input line without a usable document; the message is `FILE:LINE: reason`."""

    def __init__(self, path: Path, number: int, reason: str) -> None:
        super().__init__(path, number, reason)  # as arguments, they survive pickling between processes

    def __str__(self) -> str:
        path, number, reason = self.args
        return f"{path}:{number}: {reason}"


def parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """Return the strings under `keys` of a JSONL line, in that order; raise ValueError if the line is invalid."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or of open brackets
        raise ValueError(f"not JSON that Python can read: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"holds {type(record).__name__} instead of a JSON object")
    return [_string(record, key) for key in keys]


def _string(record: dict[str, object], key: str) -> str:
    if key not in record:
        raise ValueError(f"no key {key!r}")
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"key {key!r} holds {type(value).__name__} instead of a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON may contain half a surrogate pair, which no tokenizer accepts
        raise ValueError(f"key {key!r} is not Unicode text: {error.reason} at character {error.start + 1}") from error
    return value


def existing_file(text: str) -> Path:
    """Parse the path of an existing file, as an argparse type."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file; check the path")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is a directory; name the JSONL files in it")
    return path


def positive_int(text: str) -> int:
    """Parse an integer of at least 1, as an argparse type."""
    value = int(text) if text.strip().lstrip("+-").isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: give an integer of at least 1")
    return value
