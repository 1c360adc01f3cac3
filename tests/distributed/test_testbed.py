"""tools/bench/testbed.py: links have their nominal speed, and nothing is left behind after any end."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import testbed as bench
import traffic
from tests.harness import PRELOAD

TOOLS = Path(__file__).resolve().parents[2] / "tools"

MEGABYTE = 1 << 20
LINK, BUS = 100, 200
"""Mbit/s."""


@pytest.fixture(scope="module")
def testbed() -> Iterator:
    """Two nodes of two ranks."""
    import multiprocessing

    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    try:
        with bench.Testbed(2, 2, LINK, BUS) as built:
            yield built
    except bench.TestbedUnavailable as reason:
        pytest.skip(str(reason))


def transfer(source: int, target: int) -> tuple[float, float]:
    """Send 2 MiB; return when this rank started and finished its part."""
    rows = torch.zeros(2 * MEGABYTE, dtype=torch.uint8)
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == source:
        dist.send(rows, target)
    if dist.get_rank() == target:
        dist.recv(rows, source)
    return start, time.monotonic()


@pytest.mark.parametrize(
    ("source", "target"), [(1, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((3, 0), (3, 2)))]
)
def test_a_transfer_takes_the_time_of_its_link(testbed, source: int, target: int) -> None:
    times = testbed.run(transfer, source, target)
    bytes_DD = torch.zeros(4, 4).index_put((torch.tensor(source), torch.tensor(target)), torch.tensor(2.0 * MEGABYTE))
    limit = traffic.limit(bytes_DD.numpy(), 2, LINK, BUS).seconds
    # Queues pass a burst at full speed
    assert max(end for _, end in times) - min(start for start, _ in times) > 0.92 * limit
    # Sockets and queues buffer little, so a send does not finish before most of the message is out
    start, end = times[source]
    assert end - start > 0.6 * limit


def fail_on_rank_1() -> None:
    print("about to fail")
    if dist.get_rank() == 1:
        raise KeyError("a mistake")
    dist.barrier()


def test_a_rank_that_raises_ends_the_task_with_its_traceback(testbed) -> None:
    with pytest.raises(bench.RankFailure, match=r"(?s)rank 1 failed.*in fail_on_rank_1.*a mistake.*about to fail"):
        testbed.run(fail_on_rank_1)


def test_a_rank_that_hangs_ends_the_task(testbed) -> None:
    with pytest.raises(bench.RankFailure, match=r"ranks \[0, 1, 2, 3\] did not finish in 0.5 s"):
        testbed.run(time.sleep, 600, timeout=0.5)


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def test_a_command_gets_what_torchrun_would_give_it(testbed) -> None:
    program = f"import os, sys; print(*map(os.environ.get, {VARIABLES})); sys.exit(int(os.environ['RANK'] == '2') * 3)"
    ended = testbed.launch([sys.executable, "-c", program])
    assert ended.output == [f"{rank} 4 {rank % 2} 2\n" for rank in range(4)]
    assert ended.codes == [0, 0, 3, 0] and ended.worst_code == 3


def test_the_command_gives_all_words_to_the_script(testbed, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(sys.argv[1:])\nsys.exit(7 * int(os.environ['RANK'] == '0'))\n")
    words = ["--a", "1", "--", "--nodes", "3"]
    flags = ["--nodes", "2", "--ranks-per-node", "1", "--link-mbit", str(LINK)]
    assert bench.main([*flags, "--", str(script), *words]) == 7
    printed = capfd.readouterr()
    assert printed.out == f"{words}\n" and "{0: 7}; rank 0 said" in printed.err


@pytest.fixture
def sleeper(testbed, tmp_path: Path) -> Iterator[subprocess.Popen]:
    """The command with sleeping ranks, which print their process id first."""
    script = tmp_path / "sleeper.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    flags = f"--nodes 2 --ranks-per-node 1 --link-mbit {LINK} -- {script}".split()
    command = [sys.executable, str(TOOLS / "bench" / "testbed.py"), *flags]
    # Background test runs may ignore SIGINT, and child processes would inherit that
    accept_interrupts = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=accept_interrupts)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_after_a_signal(sleeper: subprocess.Popen, number: signal.Signals) -> None:
    rank = psutil.Process(int(sleeper.stdout.readline()))
    os.kill(sleeper.pid, number)
    if number == signal.SIGKILL:
        # The next testbed cleans up after this one, even before this one's exit code is collected
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        assert _of(sleeper) and rank.is_running()
        with bench.Testbed(1, 1, LINK):
            pass
    else:
        assert sleeper.wait(timeout=60) == 128 + number
    assert not _of(sleeper)
    rank.wait(timeout=60)


def _of(process: subprocess.Popen) -> list[str]:
    return [name for name in bench.existing_namespaces() if name.startswith(f"testbed-{process.pid}-")]
