"""A process ends when the torchrun agent that started it ends; other processes continue."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_balance.job import launcher

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "MASTER_PORT": "1"}

AGENT = """
import os, subprocess, sys, time
subprocess.Popen(sys.argv[2:], env=os.environ | eval(sys.argv[1])).wait()
"""

RANK = """
import os, signal, time
from megatron_balance.job import launcher
if {number}:
    launcher.SIGNAL = signal.Signals({number})
launcher.follow()
print(os.getpid(), flush=True)
{then}
"""

WAIT = "time.sleep(3600)"
SOON = 60.0
"""Seconds within which a process ends, even on a busy machine."""
WITH_THE_LOCK = "sum(range(10**12))"
"""Like code that indexes a dataset, it keeps the interpreter from doing anything else."""

Start = Callable[..., tuple[subprocess.Popen, psutil.Process]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start an agent and, through it, a rank."""
    processes: list[psutil.Process] = []

    def of(
        variables: dict[str, str], then: str = WAIT, wrapper: tuple[str, ...] = (), number: int = 0
    ) -> tuple[subprocess.Popen, psutil.Process]:
        rank = [*wrapper, sys.executable, "-c", RANK.format(then=then, number=number)]
        with (tmp_path / "errors").open("w") as errors:
            agent = subprocess.Popen(
                [sys.executable, "-c", AGENT, repr(variables), *rank],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert agent.stdout is not None
        processes.extend([psutil.Process(int(agent.stdout.readline())), psutil.Process(agent.pid)])
        return agent, processes[0]

    yield of
    for process in processes:
        if process.is_running():
            process.kill()


def seconds_until_gone(process: psutil.Process, limit: float, since: float | None = None) -> float:
    """Wait for the end of a process; return the seconds since then, or since the call."""
    since = time.monotonic() if since is None else since
    psutil.wait_procs([process], timeout=limit)
    return time.monotonic() - since


# The shell runs another command afterwards, so that it does not replace itself with the rank
@pytest.mark.parametrize("wrapper", [(), ("sh", "-c", '"$@"; true', "sh")], ids=["agent", "script"])
def test_a_rank_ends_with_the_agent(start: Start, tmp_path: Path, wrapper: tuple[str, ...]) -> None:
    agent, rank = start(VARIABLES, wrapper=wrapper)
    time.sleep(2 * launcher.PERIOD)
    assert rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE
    agent.kill()
    assert seconds_until_gone(rank, SOON) < SOON
    assert (tmp_path / "errors").read_text() == (
        f"the launcher (process {agent.pid}) has ended; this rank (3) ends, too\n"
    )
    agent.wait()


def test_a_rank_that_holds_the_lock_ends_by_the_kernel(start: Start) -> None:
    agent, rank = start(VARIABLES, WITH_THE_LOCK, number=3)
    computed = rank.cpu_times().user
    while rank.cpu_times().user < computed + 0.2:
        time.sleep(0.02)
    since = time.monotonic()
    agent.kill()
    assert 2 < seconds_until_gone(rank, SOON, since) < SOON
    agent.wait()


def test_what_was_started_otherwise_goes_on(start: Start) -> None:
    agent, rank = start({"RANK": "3", "MASTER_PORT": "1"})
    agent.kill()
    agent.wait()
    assert seconds_until_gone(rank, 4 * launcher.PERIOD) >= 4 * launcher.PERIOD
    assert rank.is_running()


def test_it_imports_nothing_that_takes_time() -> None:
    code = "import sys; from megatron_balance.job import launcher; print({'torch', 'numpy'} & {*sys.modules})"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told == "set()\n"


def test_no_agent_above_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launcher.AGENT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert launcher.find() is None
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    found = launcher.find()
    assert found is not None and (found.process, found.child) == (os.getppid(), os.getpid())
