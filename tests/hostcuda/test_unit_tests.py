"""Unit tests that use a GPU if there is one, on the device in host memory, which refuses tensors of the host."""

import os
import subprocess
import sys
from pathlib import Path

from tests.hostcuda.library import library

FILES = ("tests/unit/test_experts.py", "tests/unit/test_rows.py")
SKIPPED = "sent_as_planned or one_loop or what_free_memory or float64"
"""Tests that compute what the host knows on every machine, and variants that other variants stand for."""


def test_no_devices_are_mixed(device: None) -> None:
    plugins = ("tests.hostcuda.plugin", "no:cacheprovider", "no:xdist")
    flags = [*(f"-p{plugin}" for plugin in plugins), "-x", "--timeout=300", "--timeout-method=thread"]
    selected = ["-m", "not gpu", "-k", f"not ({SKIPPED})"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *selected, *FILES],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "LD_PRELOAD": str(library()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
