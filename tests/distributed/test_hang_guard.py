"""A rank that stops, dies, sleeps or fails ends the whole job, and all other ranks name it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import guarded
from tests.distributed.guarded import (
    FLAGS,
    LIMIT,
    WORLD_SIZE,
    Guarded,
    Impatient,
    replace_forward,
)
from tests.distributed.jobs import Prepare
from tests.distributed.runs import BASE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Guarded]]:
    jobs: list[Guarded] = []

    def of(mischief: Prepare | None = None, flags: str = FLAGS) -> Guarded:
        jobs.append(Guarded(WORLD_SIZE, f"{BASE} {flags}", tmp_path, mischief))
        return jobs[-1]

    yield of
    for job in jobs:
        job.kill()


def leave_in_rank_1(rank: int) -> None:
    """Exit with status 0, as a user's data loader or codec might."""
    replace_forward(sys.exit, (1,), 20, rank)


def fail_during_the_computation_of_rank_1(rank: int) -> None:
    from megatron_balance.comm.trans_agg import TransAgg

    original = TransAgg.agg
    count = 0

    def agg(transfer: TransAgg, *args) -> None:
        nonlocal count
        count += 1
        if count == 5 and rank == 1:
            raise ValueError("a bad link")
        original(transfer, *args)

    TransAgg.agg = agg


def add_up_in_rank_1(rank: int) -> None:
    """Enter a collective that the other ranks never enter."""
    replace_forward(lambda: dist.all_reduce(torch.zeros(3)), (1,), 20, rank)


def loop() -> None:
    while True:
        pass


def loop_on_all_ranks(rank: int) -> None:
    replace_forward(loop, (0, 1, 2), 20, rank)


def think_on_all_ranks(rank: int) -> None:
    replace_forward(lambda: time.sleep(5), tuple(range(WORLD_SIZE)), 20, rank)


def others(victim: int) -> list[int]:
    return [rank for rank in range(WORLD_SIZE) if rank != victim]


# Rank 0 holds the key-value store
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_stopped_rank_is_named(start, victim: int) -> None:
    job = start(Impatient(6.0))
    job.await_iteration(5)
    job.signal(victim, signal.SIGSTOP)
    assert job.join(others(victim), LIMIT) == [1, 1]
    for rank in others(victim):
        assert f"rank {victim} stalled or died: " in job.verdict(rank)
        assert re.search(rf"; this rank \({rank}\) waited in \w+ .*; exiting$", job.verdict(rank))
        if victim != 0:
            assert re.search(r"no sign of life for \d+ s \(last seen in iteration \d+, [\w-]+\)", job.verdict(rank))
    job.signal(victim, signal.SIGCONT)
    assert job.join([victim], LIMIT) == [1]


def test_a_failing_rank_is_named(start) -> None:
    job = start(leave_in_rank_1)
    job.await_iteration(4)
    assert job.join([0, 1, 2], LIMIT) == [1, 1, 1]
    for rank in (0, 1, 2):
        assert job.verdict(rank).startswith(f"rank 1 failed with SystemExit raised in forward_step ({guarded.__file__}")
        assert "(iteration 5, forward-backward)" in job.verdict(rank)
    assert "Traceback" in job.output(1)


@pytest.mark.parametrize("ranks", [(1,), pytest.param((0, 1, 2), marks=pytest.mark.slow)])
def test_an_interruption_ends_the_job_with_a_line(start, ranks: tuple[int, ...]) -> None:
    job = start()
    job.await_iteration(5)
    for rank in ranks:
        job.signal(rank, signal.SIGINT)
    assert job.join([0, 1, 2], LIMIT) == [130 if rank in ranks else 1 for rank in (0, 1, 2)]
    for rank in (0, 1, 2):
        lines = [line for line in job.output(rank).splitlines() if " iteration " not in line]
        assert re.match(r"rank \d was interrupted \(SIGINT\) in .* \(iteration \d+, [\w-]+\); this rank", lines[-1])
        assert not any("Thread" in line or "Traceback" in line for line in lines), job.output(rank)


def test_a_rank_that_fails_during_its_computation_is_named(start) -> None:
    """The other ranks wait for data that the failed thread should have sent."""
    flags = f"{FLAGS} --num-experts 6 --expert-model-parallel-size 3 --balance-policy top2 --balance-overlap blockwise"
    job = start(fail_during_the_computation_of_rank_1, flags)
    job.await_iteration(1)
    assert job.join([0, 1, 2], LIMIT) == [1, 1, 1]
    for rank in (0, 1, 2):
        assert job.verdict(rank).startswith("rank 1 failed with ValueError: a bad link (iteration ")


def test_a_rank_in_another_collective_is_named_with_the_difference(start) -> None:
    job = start(Impatient(6.0, add_up_in_rank_1))
    job.await_iteration(4)
    assert job.join([0, 1, 2], LIMIT) == [1, 1, 1]
    said = r"; group default-pg, operation \d+: rank 1 all-reduces 3 float32 \(.*\), but ranks 0, 2 did not: "
    for rank in (0, 1, 2):
        assert re.search(said, job.verdict(rank))


@pytest.mark.slow
def test_work_that_takes_longer_than_the_timeout_is_no_stall(start) -> None:
    job = start(Impatient(3.0, think_on_all_ranks), FLAGS.replace("100000", "8"))
    job.await_iteration(4)
    assert job.join([0, 1, 2], LIMIT + 20) == [0, 0, 0]


@pytest.mark.slow
def test_a_job_that_loops_everywhere_is_noticed(start) -> None:
    """All ranks loop outside collectives, which is a stall after ten times the limit."""
    job = start(Impatient(2.4, loop_on_all_ranks))
    job.await_iteration(4)
    assert job.join([0, 1, 2], LIMIT + 60) == [1, 1, 1]
    for rank in (0, 1, 2):
        for other in (0, 1, 2):
            said = rf"rank {other} stalled: no progress for \d+ s, not in a collective but in loop \(test_hang_guard.py"
            assert re.search(said, job.verdict(rank))


@pytest.mark.slow
def test_under_torchrun_all_ranks_speak_before_the_launcher_ends_them(tmp_path: Path) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text(
        "import os, sys\n"
        "from megatron_balance.device import cpu\n"
        "cpu.install()\n"
        "from tests.distributed.guarded import Impatient, sleep_in_rank_1\n"
        "Impatient(6.0, sleep_in_rank_1)(int(os.environ['RANK']))\n"
        "from megatron_balance.app import launch\n"
        "launch.pretrain(sys.argv[1:])\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD_SIZE}"]
    process = subprocess.run(
        [*torchrun, str(script), *BASE.split(), *FLAGS.split()],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode != 0
    for rank in range(WORLD_SIZE):
        said = r"rank 1 stalled: no progress for \d+ s, not in a collective but in oversleep \(guarded.py"
        assert re.search(rf"{said}.*; this rank \({rank}\) w.*; exiting", process.stderr)
