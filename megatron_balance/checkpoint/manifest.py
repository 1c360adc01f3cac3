"""manifest.json: the list of all files of one checkpoint, so that damage is found before anything is read.

The manifest is written last and marks the checkpoint as complete. Its digests detect truncation, bit rot and exchanged
files. They do not prove who wrote the files: anyone who can change a file can also change the manifest.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_balance.files.writing import sync, write_file
from megatron_balance.messages import cleaned

NAME = "manifest.json"
FORMAT = 1
DIGEST_BYTES = 32
PACKAGES = ("megatron-balance", "megatron-core", "torch")
"""Packages whose versions a checkpoint records."""


def new_run_name() -> str:
    """Return a unique name for a run."""
    return time.strftime(f"%Y%m%d-%H%M%S-{secrets.token_hex(3)}", time.gmtime())


def utc_now() -> str:
    """Return the current time in UTC, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


class Damaged(ValueError):
    """A file of a checkpoint differs from what was saved, or is not safe to read."""

    def __init__(self, path: Path, reason: str) -> None:
        # Both become `args`, so that the exception survives being pickled and sent to other ranks
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Path]:
    """Inside the block, raise Damaged if the operating system cannot read the file."""
    try:
        yield path
    except FileNotFoundError as error:
        raise Damaged(path, "is absent: the checkpoint was not completed, or the file was lost") from error
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error


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
    started: str
    """When the process on `host` that saved the checkpoint was started, in UTC."""
    saved: str
    parent: str
    """Checkpoint that the process was loaded from, and its run; empty for random weights."""
    versions: Mapping[str, str]
    """Package versions by name."""

    @classmethod
    def now(cls, run: str, started: str, parent: str) -> "Origin":
        """Return the origin of a checkpoint that this process saves now."""
        versions = {}
        for name in PACKAGES:
            # A package may be used without being installed
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        host = socket.gethostname()
        return cls(run=run, host=host, started=started, saved=utc_now(), parent=parent, versions=versions)

    def __str__(self) -> str:
        return f"run {cleaned(self.run)}, saved on {cleaned(self.host)} at {cleaned(self.saved)}"


@dataclass(frozen=True)
class Manifest:
    """Content of a manifest; `files` maps the name of each file in the directory to its entry."""

    iteration: int
    origin: Origin
    files: Mapping[str, Entry]


def digest(path: Path) -> Entry:
    """Return the size and digest of a file; raise OSError if it cannot be read."""
    # Reading instead of a memory map: a file that is truncated meanwhile causes an error, not a SIGBUS
    with open(path, "rb", buffering=0) as file:
        hasher = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
        return Entry(file.tell(), hasher.hexdigest())


def sync_and_digest(path: Path) -> Entry:
    """Flush a file to disk and digest it at the same time, so that disk and processor work in parallel."""
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(sync, path)
        entry = digest(path)
        flushed.result()
    return entry


def is_plain_name(name: str) -> bool:
    """Return whether `name` names a file directly inside a directory, without a path."""
    return name not in ("", ".", "..") and name.isprintable() and not {"/", "\\"} & set(name)


def write(directory: Path, iteration: int, origin: Origin, entries: Mapping[str, Entry]) -> None:
    """Write the manifest of `directory` and wait until it is on disk; the caller does so for all other files and for
    the directory's entries."""
    write_file(directory / NAME, _render(Manifest(iteration, origin, entries)))


def read(directory: Path) -> Manifest:
    """Return the manifest of `directory`; raise Damaged unless it is byte for byte what `write` wrote."""
    path = directory / NAME
    with reading(path):
        raw = path.read_bytes()
    try:
        content = json.loads(raw)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, this version reads {FORMAT}")
        if outside := [name for name in content["files"] if not is_plain_name(name)]:
            raise ValueError(f"{outside[0]!r} is not a name of a file inside the directory")
        files = {name: Entry(**entry) for name, entry in content["files"].items()}
        manifest = Manifest(content["iteration"], Origin(**content["origin"]), files)
        # Each content has exactly one rendering, so that any changed byte is detected, even in order or white space
        was_changed = _render(manifest) != raw
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(path, f"is not a manifest: {error}") from error
    if was_changed:
        raise Damaged(path, "was changed after it was written: content and digest disagree")
    return manifest


def run_of(directory: Path) -> str | None:
    """Return the name of a checkpoint's run; None if its manifest cannot be read."""
    try:
        return read(directory).origin.run
    except Damaged:
        return None


def verify(directory: Path, names: Iterable[str]) -> None:
    """Compare the named files of `directory` with its manifest: first all sizes, which cost nothing, then the contents.
    Raise Damaged if a file is absent, not listed or differs, or if the manifest itself is damaged."""
    files = read(directory).files
    paths = [directory / name for name in names]
    for path in paths:
        if path.name not in files:
            raise Damaged(path, f"is not listed in {NAME}")
        with reading(path):
            size = path.stat().st_size
        if size != files[path.name].bytes:
            raise Damaged(path, f"has {size} bytes, {files[path.name].bytes} when saved")
    for path in paths:
        with reading(path):
            found = digest(path).blake2b
        if found != files[path.name].blake2b:
            raise Damaged(path, f"content was changed: digest {found}, {files[path.name].blake2b} when saved")


def _render(manifest: Manifest) -> bytes:
    """Render a manifest in its only form: sorted, one line per file, sealed by a digest of everything else."""
    files = {name: asdict(entry) for name, entry in sorted(manifest.files.items())}
    origin = asdict(manifest.origin)
    content = {"format": FORMAT, "iteration": manifest.iteration, "origin": origin, "files": files}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    seal = hashlib.blake2b(canonical, digest_size=DIGEST_BYTES).hexdigest()
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in files.items())
    return (
        f'{{\n  "format": {FORMAT},\n  "iteration": {manifest.iteration},\n'
        f'  "origin": {json.dumps(origin, sort_keys=True)},\n'
        f'  "files": {{\n{lines}\n  }},\n  "manifest": "{seal}"\n}}\n'
    ).encode()
