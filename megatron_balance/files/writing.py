"""Write output that appears only when complete, and report failures with the path and the system's reason."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

INCOMPLETE = ".incomplete-"
"""Prefix of the names of folders with incomplete output."""


def sync(path: Path) -> None:
    """Flush a file's data, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_creatable(directory: str, flag: str) -> None:
    """Check that a directory can be written to or, where it is absent, that it can be made. Nothing is written. Raise
    ValueError, which names the reason and the flag that named the directory, if it cannot."""
    there = Path(directory).absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"{flag} {directory}: {there} is not a directory; choose another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {directory}: this user may not write to {there}; choose a writable directory")


def system_error(error: BaseException) -> OSError | None:
    """Return the operating system's error behind a library's exception, or None. Libraries hide it: torch reports an
    unexpected length of its archive, and safetensors only mentions the error's number in its text."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return seen
        if number := re.search(r"\(os error (\d+)\)", str(seen)):
            return OSError(int(number[1]), os.strerror(int(number[1])))
        seen = seen.__cause__ or seen.__context__
    return None


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error of the operating system inside the block into an OSError that names `path` and the reason. A
    ValueError passes unchanged because its message already names the problem, which may be the data."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        reason = system_error(error)
        if reason is None:
            raise
        raise OSError(reason.errno, reason.strerror, os.fspath(path)) from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on disk; raise OSError, which names it, if it could not be written."""
    with writing(path), open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def staged(directory: Path, last: str = "") -> Iterator[Path]:
    """Yield a temporary folder inside `directory`. When the block succeeds, flush the folder's files to disk and move
    them up, replacing older ones; the file named `last` moves last, because without it, a reader does not take the
    output for complete. If the block fails or is interrupted, `directory` stays as it was. Raise OSError, which names
    the directory or the file, if it cannot be written."""
    existed = directory.is_dir()
    directory.mkdir(parents=True, exist_ok=True)
    staging = ""
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix=INCOMPLETE, ignore_cleanup_errors=True) as staging:
            yield Path(staging)
            files = sorted(Path(staging).iterdir(), key=lambda file: (file.name == last, file.name))
            for file in files:
                sync(file)
            for file in files:
                os.replace(file, directory / file.name)
            sync(directory)
    except BaseException as error:
        if not existed:
            directory.rmdir()
        if not isinstance(error, OSError):
            raise
        # The user does not know the temporary folder
        name = os.fspath(error.filename or directory).replace(f"{staging}{os.sep}", f"{directory}{os.sep}")
        raise OSError(error.errno, error.strerror or str(error), name) from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield where to write a file that appears at `path` when the block ends; create its directory if it is missing. If
    the file could not be written, raise OSError and leave no part of it."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        os.replace(unfinished, path)
    except OSError:
        # The disk may be full
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
