"""Shared parts of the text tools: strings of JSONL lines, compressed or not, argument types, and a progress bar."""

import argparse
import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

CHUNK_BYTES = 2**18

DECOMPRESSORS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
"""First bytes of a file -> the function that decompresses it."""

UNREADABLE = {
    b"\x28\xb5\x2f\xfd": "is compressed by Zstandard; decompress it with `zstd -d`",
    b"PK\x03\x04": "is a ZIP archive; extract the JSONL files with `unzip`",
    b"PAR1": "is a Parquet file; convert it to JSONL",
}
"""First bytes of a file -> why it is not read."""


class ToolError(Exception):
    """The input and the flags cannot produce an output; the message names the file or the flag, and the remedy."""


class BadLine(Exception):
    """An input line without a usable document; the message is `FILE:LINE: reason`."""

    def __init__(self, path: Path, number: int, reason: str) -> None:
        super().__init__(path, number, reason)  # as arguments, they survive pickling between processes

    def __str__(self) -> str:
        path, number, reason = self.args
        return f"{path}:{number}: {reason}"


class Chunk(NamedTuple):
    """Consecutive lines of one input file."""

    path: Path
    first: int
    """Number of the first line, from 1."""
    lines: list[bytes]
    size: int
    """Bytes of the file that were read for these lines: fewer than their text if it is compressed, 0 for a pipe."""

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not empty, with their numbers."""
        return ((number, line) for number, line in enumerate(self.lines, self.first) if line.strip())


def read_chunks(paths: Iterable[Path]) -> Iterator[Chunk]:
    """Read text files in order, in chunks of about CHUNK_BYTES of text.

    Raises:
        ToolError: a file cannot be read to its end, or is compressed otherwise than by gzip, bzip2 or xz.
    """
    for path in paths:
        with path.open("rb") as file:
            text = _decompressed(path, file)
            first = 1
            position = 0
            try:
                while lines := text.readlines(CHUNK_BYTES):
                    end = file.tell() if file.seekable() else 0
                    yield Chunk(path, first, lines, end - position)
                    first += len(lines)
                    position = end
            except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                raise ToolError(f"{path}: cannot be read to its end: {error}; copy the file again") from error


def _decompressed(path: Path, file: io.BufferedReader) -> IO[bytes]:
    start = file.peek(8)
    for magic, reason in UNREADABLE.items():
        if start.startswith(magic):
            raise ToolError(f"{path}: {reason}; gzip, bzip2 and xz need no such step")
    return next((opened(file) for magic, opened in DECOMPRESSORS.items() if start.startswith(magic)), file)


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


def progress(auto_refresh: bool) -> Progress:
    """Return a progress bar on stderr, which is shown only in a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, auto_refresh=auto_refresh)
