"""Triton kernels: on a GPU here, and without one in processes of their own, where triton can be imported."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in (ROOT / "tests" / "kernels").glob("test_*.py"))
COMPILED = ["test_compile.py"]
"""Files whose tests compile kernels; all others interpret them."""

INTERPRETED = [file for file in FILES if file not in COMPILED]


def path_of_triton() -> list[str]:
    """Return what PYTHONPATH needs so that triton can be imported."""
    if importlib.util.find_spec("triton"):
        return []
    (version,) = re.findall(r"^TRITON=(\S+)$", (ROOT / "scripts" / "fetch.sh").read_text(), re.MULTILINE)
    fetched = ROOT / ".cache" / f"triton-{version}"
    if not fetched.is_dir():
        pytest.fail(f"{fetched} is missing: scripts/test.sh fetches it before it runs the tests")
    return [str(fetched)]


@pytest.mark.parametrize("files", [COMPILED, INTERPRETED], ids=["compiled", "interpreted"])
def test_without_a_gpu(files: list[str], tmp_path: Path) -> None:
    inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *path_of_triton(), *inherited]),
        "TRITON_INTERPRET": str(int(files == INTERPRETED)),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    # Without conftest.py, which imports megatron-core and leaves these files out of all other runs
    flags = ["--noconftest", "-p", "no:cacheprovider", "--timeout=120"]
    command = [sys.executable, "-m", "pytest", *flags, *(f"tests/kernels/{file}" for file in files)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("order", range(4))
def test_fit_on_a_gpu(order: int) -> None:
    from tests.kernels.equal import fits_equal, zipf

    fits_equal(zipf(1, layers=8, order=order), "cuda")
