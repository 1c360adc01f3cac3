"""tests/workers.py: every test runs once, and what fails in another process is reported."""

import subprocess
import sys
from pathlib import Path

from tests.workers import Queues

PLUGIN = """
from tests import workers

workers.PRELOAD = []


def pytest_configure(config):
    config.pluginmanager.register(workers.Workers(2, config))
"""

TESTS = """
import os


def test_passes(tmp_path):
    print("nothing of this is shown")


def test_fails():
    os.system("echo what a process prints")
    assert 1 == 2


def test_dies():
    os._exit(3)


def test_after_it():
    pass
"""


def test_each_test_has_one_worker() -> None:
    queues = Queues([[0, 1, 2, 3, 4], [5, 6]], workers=2)
    assert [queues.next(worker) for worker in (0, 1, 1)] == [0, 5, 6]
    # Half of what the other worker has left, rounded up
    assert [queues.next(worker) for worker in (1, 1, 0, 1, 1, 0)] == [3, 4, 1, 2, None, None]


def test_failures_and_deaths_are_reported(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stdout
    for said in ("assert 1 == 2", "what a process prints", "1 failed, ", "exit code 3 in or after "):
        assert said in ended.stdout
    assert "nothing of this is shown" not in ended.stdout
