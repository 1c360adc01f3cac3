"""A job that is killed while it saves loses at most what came after the last checkpoint, and ends as if undisturbed."""

import random
import re
from pathlib import Path

import pytest

from megatron_balance.training import manifest
from megatron_balance.training.checkpoint_directory import CheckpointDirectory
from tests.distributed.checkpoints import unequal_tensors
from tests.distributed.jobs import POINTS, Death, Job
from tests.distributed.runs import BASE

RANKS = 2
FLAGS = (
    f"{BASE} --expert-model-parallel-size 2 --train-iters 6 --save-interval 2 --keep-last 2 --log-interval 1 "
    "--num-layers 1 --distributed-timeout-minutes 1 --hidden-dropout 0.1"
)
ITERATIONS = (2, 4, 6)


RANK_ZERO_ONLY = {"manifest": 1, "rename": 2, "tracker": 1, "prune": 1}
CALLS = {"serialize": 1, "plan": 1, "start writer": 2, "write": 1, "write tensor": 20, "digest": 5, "fsync": 12}
"""Points of a save, and how often one process calls them in it (at most; `write tensor` and the like per writer)."""


def deaths(count: int, seed: int) -> list[Death]:
    """Random places to die in, every point about as often."""
    chance = random.Random(seed)
    found = []
    for index in range(count):
        point = list(POINTS)[index % len(POINTS)]
        rank = 0 if point in RANK_ZERO_ONLY else chance.randrange(RANKS)
        call = chance.randint(1, (RANK_ZERO_ONLY | CALLS)[point])
        # Nothing is pruned before the third save
        save = 3 if point == "prune" else chance.randint(1, 3)
        found.append(Death(point, call, rank, save, parent=chance.random() < 0.5))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The checkpoints of a job that nothing happened to."""
    directory = tmp_path_factory.mktemp("undisturbed")
    ended = Job(RANKS, f"{FLAGS} --save {directory}", directory / "logs").wait()
    assert ended.codes == [0] * RANKS, ended.text
    return directory


def tracked(directory: Path) -> int | None:
    return CheckpointDirectory(directory).tracked()


def survive(death: Death, flags: str, directory: Path, undisturbed: Path, ranks) -> str:
    """Kill a job, look at what it left, restart it and compare its end; returns where it resumed."""
    flags = f"{FLAGS} {flags} --save {directory} --load {directory}"
    ended = Job(RANKS, flags, directory / "killed", death).wait(grace=5)
    left = tracked(directory)
    # What the tracker names is complete, and so is the one before it: keep-last is 2
    for iteration in [iteration for iteration in ITERATIONS if left and iteration in (left, left - 2)]:
        path = CheckpointDirectory(directory).path(iteration)
        manifest.verify(path, manifest.read(path).files)
    died = any(ended.codes)
    assert died or death.call > 1, f"{death}: nobody died"
    restarted = Job(RANKS, flags, directory / "restarted").wait()
    assert restarted.codes == [0] * RANKS, f"{death}: {restarted.text}"
    assert "is damaged" not in restarted.text, f"{death}: {restarted.text}"
    resumed = re.findall(r"successfully loaded checkpoint from \S*iter_(\d+)", restarted.text)
    assert [int(iteration) for iteration in resumed] == ([left] if left else []), f"{death}: {restarted.text}"
    assert tracked(directory) == ITERATIONS[-1]
    count, unequal = ranks(1).run(unequal_tensors, str(undisturbed), str(directory))[0]
    assert count and unequal == [], death
    leftovers = [path.name for path in directory.iterdir() if ".saving-" in path.name or ".deleting-" in path.name]
    assert leftovers == [], death
    return f"{death.point}: died {died}, resumed from {left}"


@pytest.mark.parametrize("flags", ["", "--async-save"], ids=["sync", "async"])
@pytest.mark.parametrize(
    "death",
    [
        Death("write tensor", 5, rank=1),
        Death("fsync", 1, rank=1, parent=True),
        Death("rename", 1, rank=0),
        Death("tracker", 1, rank=0),
        Death("prune", 1, rank=0, save=3),
    ],
    ids=lambda death: death.point,
)
def test_a_killed_job_resumes_and_ends_alike(death, flags, tmp_path, undisturbed, ranks):
    survive(death, flags, tmp_path, undisturbed, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--async-save"], ids=["sync", "async"])
def test_sixty_six_random_deaths(flags, tmp_path, undisturbed, ranks):
    for index, death in enumerate(deaths(33, seed=len(flags))):
        print(index, death, survive(death, flags, tmp_path / str(index), undisturbed, ranks), flush=True)
