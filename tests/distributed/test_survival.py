"""A job killed during a save loses at most the progress since the last checkpoint, and ends as if undisturbed."""

import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_balance.checkpoint import manifest
from megatron_balance.checkpoint.directory import CheckpointDirectory
from tests.distributed.checkpoints import unequal_tensors
from tests.distributed.jobs import POINTS, Death, Job
from tests.distributed.runs import BASE
from tests.distributed.wandering import wandering

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
FLAGS = (
    f"{BASE} --expert-model-parallel-size 2 --train-iters 6 --save-interval 2 --keep-last 2 --log-interval 1 "
    "--num-layers 1 --distributed-timeout-minutes 10 --hidden-dropout 0.1"
)
ITERATIONS = (2, 4, 6)


RANK_ZERO_ONLY = {"manifest": 1, "rename": 2, "tracker": 1, "prune": 1}
CALLS = {"serialize": 1, "plan": 1, "start writer": 2, "write": 1, "write tensor": 20, "digest": 4, "fsync": 9}
"""Points of a save, and the most calls of each by one process (`write tensor` and the like: by one writer)."""

TRANSFERS = 4
"""Transfers in the first iterations of a job whose experts change owners."""

TRANSFER_POINTS = ("messages", "rounds", "pack", "exchange", "unpack", "own")
ROUNDS, STAGING_BYTES = 3, 10_000
"""Each Transfer of these jobs has at least `ROUNDS` rounds with this staging memory."""

SAVE_POINTS = [point for point in POINTS if point not in TRANSFER_POINTS]


def deaths(count: int, seed: int) -> list[Death]:
    """Draw random deaths in a save, with every point about equally often."""
    chance = random.Random(seed)
    found = []
    for index in range(count):
        point = SAVE_POINTS[index % len(SAVE_POINTS)]
        rank = 0 if point in RANK_ZERO_ONLY else chance.randrange(RANKS)
        # A writer digests and syncs only its own file; rank 0 also the common files
        once = rank and point in ("digest", "fsync")
        call = 1 if once else chance.randint(1, (RANK_ZERO_ONLY | CALLS)[point])
        # Nothing is pruned before the third save
        turn = 3 if point == "prune" else chance.randint(1, 3)
        found.append(Death(point, call, rank, turn, parent=chance.random() < 0.5))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The checkpoints of a job without a fault."""
    directory = tmp_path_factory.mktemp("undisturbed")
    ended = Job(RANKS, f"{FLAGS} --save {directory}", directory / "logs").wait()
    assert ended.codes == [0] * RANKS, ended.text
    return directory


def tracked(directory: Path) -> int | None:
    return CheckpointDirectory(directory).tracked()


def survive(death: Death, flags: str, directory: Path, undisturbed: Path, ranks) -> str:
    """Kill a job, check what it left, restart it and compare its end; return where it resumed."""
    flags = f"{FLAGS} {flags} --save {directory} --load {directory}"
    ended = Job(RANKS, flags, directory / "killed", death).wait(grace=5)
    # All checkpoints are complete, and the one before the newest exists too, because keep-last is 2
    left = CheckpointDirectory(directory).iterations()
    for iteration in left:
        path = CheckpointDirectory(directory).path(iteration)
        manifest.verify(path, manifest.read(path).files)
    assert left[:2] == [iteration for iteration in ITERATIONS[::-1] if left and iteration <= left[0]][:2], death
    died = any(ended.codes)
    assert died, f"{death}: nobody died"
    restarted = Job(RANKS, flags, directory / "restarted").wait()
    assert restarted.codes == [0] * RANKS, f"{death}: {restarted.text}"
    assert "is damaged" not in restarted.text, f"{death}: {restarted.text}"
    resumed = re.findall(r"successfully loaded checkpoint from \S*iter_(\d+)", restarted.text)
    assert [int(iteration) for iteration in resumed] == left[:1], f"{death}: {restarted.text}"
    assert tracked(directory) == ITERATIONS[-1]
    count, unequal = ranks(1).run(unequal_tensors, str(undisturbed), str(directory))[0]
    assert count and unequal == [], death
    leftovers = [path.name for path in directory.iterdir() if ".saving-" in path.name or ".deleting-" in path.name]
    assert leftovers == [], death
    return f"{death.point}: died {died}, resumed from {left[:1]}"


DEATHS = {
    "write tensor": (Death("write tensor", 5, rank=1), "--async-save"),
    "tracker": (Death("tracker", 1, rank=0), ""),
}
"""Two of the deaths that the long campaign draws."""


@pytest.mark.parametrize(("death", "flags"), DEATHS.values(), ids=DEATHS)
def test_a_killed_job_resumes_and_ends_alike(death, flags, tmp_path, undisturbed, ranks):
    survive(death, flags, tmp_path, undisturbed, ranks)


def under_torchrun(flags: str, kills: int, seed: int = 0) -> tuple[int, str]:
    """Run the entry point under `torchrun --max-restarts` and kill ranks; return exit status and output.

    Each kill waits until the job has come further than at the previous kill.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [f"--max-restarts={kills}", "--monitor-interval=0.2", "pretrain_gpt_moe.py", *flags.split()]
    chance = random.Random(seed)
    output = []
    waiting_for = 3
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as torchrun:
        for line in torchrun.stdout:
            output.append(line)
            match = re.match(r" \[.*\] iteration +(\d+)/", line)
            if kills and match and int(match[1]) >= waiting_for:
                ranks = [
                    child
                    for child in psutil.Process(torchrun.pid).children()
                    if "pretrain" in " ".join(child.cmdline())
                ]
                chance.choice(ranks).kill()
                kills = kills - 1
                waiting_for = int(match[1]) + chance.randint(10, 20)
    return torchrun.returncode, "".join(output)


def losses(output: str) -> dict[int, set[str]]:
    """Return the printed losses and gradient norms by iteration; more than one value means a difference."""
    found: dict[int, set[str]] = {}
    for iteration, loss, norm in re.findall(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+) ", output):
        found.setdefault(int(iteration), set()).add(f"{loss} {norm}")
    return found


EACH_MICROBATCH = (
    "--balance-policy quota --balance-inner-policy quota --balance-overlap blockwise --balance-guest-slots 1 "
    "--moe-router-force-workload rotating_hotspot"
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kills", "balance"), [(10, ""), (20, EACH_MICROBATCH)], ids=["without a policy", "with plans of each microbatch"]
)
def test_torchrun_restarts_a_killed_job(kills, balance, tmp_path, ranks, profiles):
    iterations = 20 * kills
    flags = f"{BASE} --expert-model-parallel-size 2 --num-layers 1 --hidden-dropout 0.1 --log-interval 1 --async-save"
    flags += f" --train-iters {iterations} --save-interval 5 --keep-last 2 {balance}"
    flags += f" --balance-profile {profiles[RANKS]}" if balance else ""
    directories = [tmp_path / "undisturbed", tmp_path / "killed"]
    outputs = []
    for directory, number in zip(directories, (0, kills), strict=True):
        status, output = under_torchrun(f"{flags} --save {directory} --load {directory}", number)
        assert status == 0, output[-5000:]
        outputs.append(output)
    undisturbed, killed = map(losses, outputs)
    assert undisturbed == killed and len(killed) == iterations
    assert not balance or len(re.findall(r"hosts added: [1-9]", outputs[1])) > iterations // 2
    resumed = [int(iteration) for iteration in re.findall(r"loaded checkpoint from \S*iter_(\d+)", outputs[1])]
    assert len(resumed) >= kills - 1 and outputs[1].count("no checkpoint there") == 1 + kills - len(resumed)
    count, unequal = ranks(1).run(unequal_tensors, *map(str, directories))[0]
    assert count and unequal == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("flags", ["", "--async-save"], ids=["sync", "async"])
def test_sixty_six_random_deaths(flags, tmp_path, undisturbed, ranks):
    for index, death in enumerate(deaths(33, seed=len(flags))):
        print(index, death, survive(death, flags, tmp_path / str(index), undisturbed, ranks), flush=True)


@pytest.fixture(scope="module")
def wandering_flags(tmp_path_factory) -> str:
    flags = wandering(RANKS, tmp_path_factory.mktemp("profile"))
    return f"{flags} --num-layers 2 --moe-router-force-workload hot_experts"


@pytest.fixture(scope="module")
def undisturbed_transfers(tmp_path_factory, wandering_flags) -> Path:
    """The checkpoints of a job whose experts changed owners without a fault."""
    directory = tmp_path_factory.mktemp("undisturbed_transfers")
    ended = Job(RANKS, f"{FLAGS} {wandering_flags} --save {directory}", directory / "logs").wait()
    assert ended.codes == [0] * RANKS and ended.text.count("exchange owners") >= TRANSFERS, ended.text
    return directory


def transfer_deaths(count: int) -> list[Death]:
    """Draw random deaths in a Transfer, with every point about equally often."""
    chance = random.Random(0)
    found = []
    for point in itertools.islice(itertools.cycle(TRANSFER_POINTS), count):
        call = ROUNDS if point in ("pack", "exchange", "unpack") else 1
        rank = chance.randrange(RANKS)
        turn = chance.randint(1, TRANSFERS)
        found.append(Death(point, call, rank, turn, during="transfer", staging_bytes=STAGING_BYTES))
    return found


@pytest.mark.parametrize(
    "death",
    [
        pytest.param(death, marks=[] if index == 4 else [pytest.mark.slow], id=f"{index}-{death.point}")
        for index, death in enumerate(transfer_deaths(21))
    ],
)
def test_a_job_killed_in_a_transfer_resumes_and_ends_alike(
    death, tmp_path, wandering_flags, undisturbed_transfers, ranks
):
    survive(death, wandering_flags, tmp_path, undisturbed_transfers, ranks)
