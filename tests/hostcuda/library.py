"""Builds the device's library once for each version of its source and of torch."""

import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "device.cpp"
CACHE = Path(__file__).parents[2] / ".cache"


def compiler() -> str | None:
    """Return the C++ compiler of this machine, if any."""
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def library() -> Path:
    """Return the library's file, which is built first if it does not exist.

    Raises:
        subprocess.CalledProcessError: the compiler rejects the source.
    """
    found = compiler()
    assert found is not None, "without a compiler, these tests are skipped"
    identity = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    target = CACHE / f"hostcuda-{identity}.so"
    if not target.exists():
        CACHE.mkdir(exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}.part")
        root = Path(torch.__file__).parent
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
        options = [
            "-std=c++20",
            "-O1",
            "-shared",
            "-fPIC",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        ]
        subprocess.run([found, *options, *includes, str(SOURCE), "-o", str(part), *libraries], check=True)
        part.rename(target)
    return target
