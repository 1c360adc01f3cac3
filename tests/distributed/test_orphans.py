"""A job whose torchrun was killed leaves no rank behind, and does not disturb the next one at the same address."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.distributed.jobs import free_port
from tests.distributed.runs import BASE

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0
"""Time limit for ranks to end, on a busy machine too."""


def torchrun(port: int, flags: str, log: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    with log.open("w") as output:
        return subprocess.Popen(
            [*command, "pretrain_gpt_moe.py", *f"{BASE} --log-interval 1 {flags}".split()],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def ranks_of(agent: subprocess.Popen) -> list[psutil.Process]:
    """Return the agent's ranks as soon as it has started them and each has a thread that watches it."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        children = psutil.Process(agent.pid).children(recursive=True)
        ranks = [child for child in children if "pretrain_gpt_moe.py" in child.cmdline()]
        if len(ranks) == 2 and all(rank.num_threads() > 1 for rank in ranks):
            return ranks
        time.sleep(0.02)
    raise AssertionError("torchrun has started no ranks")


@pytest.fixture
def killed(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[int, Path, list[psutil.Process]]]:
    """Port, log and ranks of a job whose torchrun has just been killed, at one of several moments."""
    port = free_port()
    log = tmp_path / "killed.txt"
    agent = torchrun(port, "--train-iters 100000 --exit-signal-handler", log)
    ranks = ranks_of(agent)
    if request.param == "training":
        while not re.search("iteration +3/", log.read_text()):
            assert agent.poll() is None
            time.sleep(0.1)
    else:
        time.sleep(request.param)
    agent.kill()
    agent.wait()
    yield port, log, ranks
    for rank in ranks:
        if rank.is_running():
            rank.kill()


@pytest.mark.parametrize("killed", [0.3], indirect=True)
def test_ranks_end_with_torchrun(killed: tuple[int, Path, list[psutil.Process]]) -> None:
    _, log, ranks = killed
    _, alive = psutil.wait_procs(ranks, timeout=SECONDS)
    assert not alive
    assert (
        len(re.findall(r"the launcher \(process \d+\) has ended; this rank \([01]\) ends, too\n", log.read_text())) == 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0.3, 1, 3, "training"], indirect=True)
def test_the_next_job_trains_as_if_alone(killed: tuple[int, Path, list[psutil.Process]], tmp_path: Path) -> None:
    port, _, ranks = killed
    losses = []
    for number, address in enumerate((port, free_port())):
        log = tmp_path / f"{number}.txt"
        assert torchrun(address, "--train-iters 3", log).wait(300) == 0, log.read_text()
        losses.append(re.findall(r"lm loss: (\S+) .* grad norm: (\S+)", log.read_text()))
    _, alive = psutil.wait_procs(ranks, timeout=0)
    assert not alive
    assert losses[0] == losses[1] and len(losses[0]) == 3
