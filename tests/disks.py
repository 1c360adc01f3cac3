"""Small disks that are really full."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(directory: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of this size at `directory`; skips the test where nobody may mount one."""
    directory.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def fill(disk: Path) -> None:
    """Leave no room on the disk that a directory is on."""
    with contextlib.suppress(OSError), open(disk / "fill", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
