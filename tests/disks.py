"""Small file systems that really run full."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(directory: Path, kilobytes: int) -> Iterator[Path]:
    """Mount a file system of this size at `directory`; skip the test without permission to mount."""
    directory.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def fill(disk: Path) -> None:
    """Fill the file system of a directory."""
    with contextlib.suppress(OSError), open(disk / "fill", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
