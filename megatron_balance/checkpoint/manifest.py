"""manifest.json: the list of all files of one checkpoint, so that damage is found before anything is read.

The manifest is written last and marks the checkpoint as complete. Its digests detect truncation, bit rot and exchanged
files. They do not prove who wrote the files: anyone who can change a file can also change the manifest.
"""

import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_balance.files.writing import writing
from megatron_balance.messages import cleaned

NAME = "manifest.json"
FORMAT = 1

_DIGEST_BYTES = 32
_CHUNK_BYTES = 4 << 20
_MAX_BYTES = 64 << 20
"""Upper limit of a manifest's size. A file takes about 150 bytes, so that 100,000 ranks stay far below it."""

_HEAD_BYTES = 1 << 14
"""Enough bytes for everything before the list of files."""


class Damaged(ValueError):
    """A file of a checkpoint differs from what was saved, or is not safe to read."""

    def __init__(self, path: str | Path, reason: str) -> None:
        # Both become `args`, so that the exception survives being pickled and sent to other ranks
        super().__init__(str(path), reason)
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class Entry:
    """One file: its size, and the hex BLAKE2b digest (32 bytes) of its content."""

    bytes: int
    blake2b: str


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a checkpoint comes from, for people and to tell runs apart."""

    run: str
    """Name of the run, created when it first starts and kept when it resumes."""

    host: str
    """Host of the process that wrote the manifest; `started` and `saved` are read from its clock, in UTC."""

    started: str
    """When that process started."""

    saved: str
    """When the checkpoint was saved."""

    parent: str
    """Checkpoint that the process was loaded from, and its run; empty for random weights."""

    versions: Mapping[str, str]
    """Package versions by name."""

    def __str__(self) -> str:
        return f"run {cleaned(self.run)}, saved on {cleaned(self.host)} at {cleaned(self.saved)}"


@dataclass(frozen=True)
class Manifest:
    """Content of a manifest; `files` maps the name of each file in the directory to its entry."""

    iteration: int
    origin: Origin
    files: Mapping[str, Entry]


def digest(path: str | Path) -> Entry:
    """Return the size and digest of a file; raise OSError if it cannot be read."""
    # A buffer instead of a memory map: a file that is truncated while being read causes an error, not a SIGBUS
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    size = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            size += count
    return Entry(size, hasher.hexdigest())


def sync_and_digest(path: Path) -> Entry:
    """Flush a file to disk and digest it at the same time, so that disk and processor work in parallel."""
    failures: list[OSError] = []

    def sync() -> None:
        try:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=sync)
    thread.start()
    entry = digest(path)
    thread.join()
    if failures:
        raise failures[0]
    return entry


def is_plain_name(name: object) -> bool:
    """Return whether `name` names a file directly inside a directory, without a path."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return name.isprintable() and not {"/", "\\"} & set(name)


def write(directory: str | Path, iteration: int, origin: Origin, entries: Mapping[str, Entry]) -> None:
    """Write the manifest of `directory` and wait until it is on disk.

    The caller makes the other files durable, and the directory's entries, including that of the manifest.
    """
    for name in entries:
        assert is_plain_name(name) and name != NAME, name
    path = Path(directory) / NAME
    with writing(path), open(path, "wb") as file:
        file.write(_render(Manifest(iteration, origin, entries)))
        file.flush()
        os.fsync(file.fileno())


def read(directory: str | Path) -> Manifest:
    """Return the manifest of `directory`.

    Raises:
        Damaged: the manifest is absent, unreadable, not a manifest, or not byte for byte what `write` wrote.
    """
    path = Path(directory) / NAME
    raw = _read_small(path)
    try:
        manifest = _parse(json.loads(raw))
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"is not a manifest: {error}") from error
    # Each content has exactly one rendering, so that any changed byte is detected, even in order or white space
    if _render(manifest) != raw:
        raise Damaged(path, "was changed after it was written: content and digest disagree")
    return manifest


def run_of(directory: str | Path) -> str | None:
    """Return the name of a checkpoint's run, reading only the start of its manifest; None if it is not there."""
    try:
        with open(Path(directory) / NAME, "rb") as file:
            origin = re.search(rb'^  "origin": (\{.*\}),$', file.read(_HEAD_BYTES), re.MULTILINE)
        return str(json.loads(origin[1])["run"]) if origin else None
    except (OSError, ValueError, KeyError, RecursionError):
        return None


def verify(directory: str | Path, names: Iterable[str]) -> None:
    """Compare the named files of `directory` with its manifest; sizes first, because they cost nothing.

    This reads every named file once, so ranks divide the names among themselves.

    Raises:
        Damaged: a file is absent, not listed, or of another size or content; or the manifest itself is damaged.
    """
    directory, files = Path(directory), read(directory).files
    expected = {}
    for name in names:
        if name not in files:
            raise Damaged(directory / name, f"is not listed in {NAME}")
        expected[name] = files[name]
        _check_size(directory / name, files[name].bytes)
    for name, entry in expected.items():
        path = directory / name
        try:
            found = digest(path)
        except OSError as error:
            raise Damaged(path, f"cannot be read: {error.strerror}") from error
        if found != entry:
            raise Damaged(path, f"content was changed: digest {found.blake2b}, {entry.blake2b} when saved")


def _check_size(path: Path, expected: int) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(path, "is not a regular file")
    if status.st_size != expected:
        raise Damaged(path, f"has {status.st_size} bytes, {expected} when saved")


def _read_small(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise Damaged(path, "is absent: the checkpoint was not completed, or the file was lost")
        with open(path, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error
    if len(raw) > _MAX_BYTES:
        raise Damaged(path, f"has more than {_MAX_BYTES} bytes, which no manifest has")
    return raw


def _parse(content: Any) -> Manifest:
    """Return the typed manifest; raise ValueError if the JSON has another structure."""
    if not isinstance(content, dict) or content.keys() != {"format", "iteration", "origin", "files", "manifest"}:
        raise ValueError("wants the keys format, iteration, origin, files and manifest")
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r}, this version reads {FORMAT}")
    if type(content["iteration"]) is not int or content["iteration"] < 0:
        raise ValueError(f"iteration {content['iteration']!r}")
    if not isinstance(content["files"], dict):
        raise ValueError("files is not an object")
    files = {name: _parse_entry(name, entry) for name, entry in content["files"].items()}
    return Manifest(content["iteration"], _parse_origin(content["origin"]), files)


def _parse_origin(content: Any) -> Origin:
    names = [field.name for field in fields(Origin)]
    if not isinstance(content, dict) or content.keys() != set(names):
        raise ValueError(f"origin wants the keys {', '.join(names)}")
    versions = content["versions"]
    texts = [content[name] for name in names if name != "versions"]
    if not isinstance(versions, dict) or not all(isinstance(text, str) for text in (*texts, *versions.values())):
        raise ValueError("origin holds something else than texts")
    return Origin(**content)


def _parse_entry(name: str, entry: Any) -> Entry:
    if not is_plain_name(name) or name == NAME:
        raise ValueError(f"{name!r} is not a name of a file inside the directory")
    if not isinstance(entry, dict) or entry.keys() != {"bytes", "blake2b"}:
        raise ValueError(f"{name}: wants the keys bytes and blake2b")
    size = entry["bytes"]
    blake2b = entry["blake2b"]
    if type(size) is not int or size < 0:
        raise ValueError(f"{name}: bytes {size!r}")
    if not isinstance(blake2b, str) or not re.fullmatch(f"[0-9a-f]{{{2 * _DIGEST_BYTES}}}", blake2b):
        raise ValueError(f"{name}: blake2b {blake2b!r}")
    return Entry(size, blake2b)


def _render(manifest: Manifest) -> bytes:
    """Render a manifest in its only form: sorted, one line per file, sealed by a digest of everything else."""
    files = {name: asdict(entry) for name, entry in sorted(manifest.files.items())}
    origin = asdict(manifest.origin)
    content = {"format": FORMAT, "iteration": manifest.iteration, "origin": origin, "files": files}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    seal = hashlib.blake2b(canonical, digest_size=_DIGEST_BYTES).hexdigest()
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in files.items())
    return (
        f'{{\n  "format": {FORMAT},\n  "iteration": {manifest.iteration},\n'
        f'  "origin": {json.dumps(origin, sort_keys=True)},\n'
        f'  "files": {{\n{lines}\n  }},\n  "manifest": "{seal}"\n}}\n'
    ).encode()
