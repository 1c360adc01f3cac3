"""Output that appears only when it is whole, and failures to write that name the path and the system's reason."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

INCOMPLETE = ".incomplete-"
"""Begins the names of folders of output that is not whole."""


def sync(path: Path) -> None:
    """Wait until a file's data, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def system_error(error: BaseException) -> OSError | None:
    """The system's reason behind an exception of a library, or None.

    Libraries replace it by complaints of their own: torch that its archive has another length than it expects, and
    safetensors by a text with the number in it.
    """
    seen: BaseException | None = error
    for _ in range(10):
        if isinstance(seen, OSError) and seen.errno is not None:
            return seen
        if seen is not None and (number := re.search(r"\(os error (\d+)\)", str(seen))):
            return OSError(int(number[1]), os.strerror(int(number[1])))
        seen = seen and (seen.__cause__ or seen.__context__)
    return None


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """What fails inside because the system refused something becomes an OSError that names `path` and the reason.

    A ValueError says of itself what is wrong, with what is written perhaps.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        reason = system_error(error)
        if reason is None:
            raise
        raise OSError(reason.errno, reason.strerror, os.fspath(path)) from error


@contextlib.contextmanager
def staged(directory: Path, last: str = "") -> Iterator[Path]:
    """A temporary folder inside `directory`; its files move up, replacing older ones, when the block succeeds.

    Whatever ends the block early, Ctrl-C included, leaves `directory` as it was. Files are on disk before they move.

    Args:
        last: the file that moves after all others: without it, nobody takes the rest for whole.

    Raises:
        OSError: `directory` cannot be written; names it, or the file.
    """
    existed = directory.is_dir()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with _moving_up(directory, last) as staging:
            yield staging
    except BaseException:
        if not existed:
            directory.rmdir()
        raise


@contextlib.contextmanager
def _moving_up(directory: Path, last: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=directory, prefix=INCOMPLETE, ignore_cleanup_errors=True) as staging:
        try:
            yield Path(staging)
            files = sorted(Path(staging).iterdir(), key=lambda file: (file.name == last, file.name))
            for file in files:
                sync(file)
            for file in files:
                os.replace(file, directory / file.name)
            sync(directory)
        except OSError as error:
            if error.filename is not None:
                # The reader knows the folder by its name alone
                name = os.fspath(error.filename).replace(f"{staging}{os.sep}", f"{directory}{os.sep}")
                raise OSError(error.errno, error.strerror, name) from error
            raise OSError(error.errno, error.strerror or str(error), str(directory)) from error
