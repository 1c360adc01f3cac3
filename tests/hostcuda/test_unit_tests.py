"""Unit tests that use a GPU if there is one, on the device in host memory, which refuses tensors of the host."""

import contextlib
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from tests.hostcuda import ranks, torch_cuda
from tests.hostcuda.host_clock import HostClock

FILES = ("tests/unit/test_experts.py", "tests/unit/test_rows.py")
SKIPPED = "sent_as_planned or one_loop or what_free_memory or float64"
"""Tests that compute what the host knows on every machine, and variants that other variants stand for."""


def test_no_devices_are_mixed(device: None, tmp_path: Path) -> None:
    printed = tmp_path / "printed.txt"
    process = multiprocessing.get_context("forkserver").Process(target=run_tests, args=(printed,))
    ranks.start(process)
    process.join()
    assert process.exitcode == 0, printed.read_text()


def run_tests(printed: Path) -> None:
    """Run the tests in this process, which is on the device."""
    os.chdir(Path(__file__).parents[2])
    # The checker of streams and memory is slow, and keeps its lock if an error frees a tensor
    torch_cuda.report_to(HostClock())
    flags = ["-pno:cacheprovider", "-pno:xdist", "-x"]
    selected = ["-m", "not gpu", "-k", f"not ({SKIPPED})"]
    with printed.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        sys.exit(pytest.main([*flags, "--timeout=300", "--timeout-method=thread", *selected, *FILES]))
