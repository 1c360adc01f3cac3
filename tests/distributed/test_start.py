"""Jobs that cannot start: every rank ends with one sentence that names the error, its place and the remedy."""

import functools
import importlib
import os
import resource
import socket
from pathlib import Path

import pytest

from megatron_balance.profile import cluster_profile
from tests.distributed.jobs import Ended, Job
from tests.distributed.runs import BASE

FLAGS = f"{BASE} --expert-model-parallel-size 2 --distributed-timeout-minutes 1"
PATIENT = f"{BASE} --distributed-timeout-minutes 10"
THREE = "--expert-model-parallel-size 3 --num-experts 6"

REMEDY = "; start all with the same flags, packages, program and files (docs/running.md says what may differ)"

ANSWERING: list[socket.socket] = []
"""Listening sockets of a rank."""


def sentences(ended: Ended) -> list[str]:
    """Return the one sentence that each rank printed, ignoring torch's line about what it waited for."""
    assert ended.codes == [1] * len(ended.codes), ended.text
    said = [[line for line in text.splitlines() if "waitForInput" not in line] for text in ended.output]
    assert all(len(lines) == 1 for lines in said), ended.text
    return [lines[0].removeprefix("pretrain_gpt_moe.py: error: ") for lines in said]


def with_another_package_and_program(directories: tuple[Path, Path], rank: int) -> None:
    """Give rank 1 another version of a package, another program, and another working directory."""
    os.chdir(directories[rank == 1])
    if rank == 1:
        facts = importlib.import_module("megatron_balance.app.facts")
        version = facts._version
        content = facts.content_digest
        facts._version = lambda package: "1.0" if package == "numpy" else version(package)
        facts.content_digest = lambda path: "0123" if path.name == "plan.py" else content(path)


def test_every_kind_of_difference_in_three_ranks(tmp_path: Path) -> None:
    directories = tmp_path / "ours", tmp_path / "theirs"
    for directory, width in zip(directories, (32, 64), strict=True):
        directory.mkdir()
        cluster_profile.builtin(3, 3, width, 64).save(directory / "profile.json")
    flags = f"{FLAGS} {THREE} --balance-policy top2 --balance-profile profile.json"
    odd = functools.partial(with_another_package_and_program, directories)
    others = {1: "--seed 7 --lr 2e-3 --train-iters 7", 2: "--seed 8 --balance-policy pro_prophet"}
    (said,) = {*sentences(Job(3, lambda rank: f"{flags} {others.get(rank, '')}", tmp_path, odd).wait())}
    assert said.count("the ranks of this job differ: ") == 1
    for cause in (
        "; --train-iters is 20 on ranks 0, 2, but 7 on rank 1; ",
        "; --seed is 1234 on rank 0, but 7 on rank 1, 8 on rank 2; ",
        "; --lr is 0.001 on ranks 0, 2, but 0.002 on rank 1; ",
        " --balance-policy is top2 on ranks 0-1, but pro_prophet on rank 2; ",
        " on ranks 0, 2, but 1.0 on rank 1; the content of --balance-profile profile.json is ",
        " on rank 1; the source of megatron_balance/flow/plan.py is ",
        f" on ranks 0, 2, but 0123 on rank 1{REMEDY}",
    ):
        assert cause in said


@pytest.mark.parametrize(
    ("rank", "flags", "reason"),
    [
        (0, "--hidden-size 31", "--hidden-size 31: "),
        pytest.param(1, "--balance-policy nobodys:Policy", "--balance-policy nobodys:Policy: ", marks=pytest.mark.slow),
        pytest.param(2, "--lr high", "argument --lr: invalid float value: 'high'", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_of_one_rank_ends_all_at_once(tmp_path: Path, rank: int, flags: str, reason: str) -> None:
    ended = Job(3, lambda own: f"{PATIENT} {THREE} {flags if own == rank else ''}", tmp_path).wait()
    assert all(ended.codes), ended.text
    said = [text.splitlines()[-1] for text in ended.output]
    own = said.pop(rank).partition(": error: ")[2]
    assert own.startswith(reason)
    assert said == [f"pretrain_gpt_moe.py: error: rank {rank} on {socket.gethostname()} cannot start: {own}"] * 2


def with_few_descriptors(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))


def test_what_a_process_finds_by_itself(tmp_path: Path) -> None:
    said = sentences(Job(2, FLAGS, tmp_path, with_few_descriptors).wait())
    assert all(one.startswith("ulimit -n 90: a job of 2 processes needs about ") for one in said), said


def with_too_large_a_model_on_rank_1(rank: int) -> None:
    launch = importlib.import_module("megatron_balance.app.launch")
    torch = importlib.import_module("torch")
    if rank == 1:
        launch.build_run = lambda *args, **kwargs: torch.empty(2**55, dtype=torch.uint8)


def test_a_rank_without_memory(tmp_path: Path) -> None:
    ended = Job(2, f"{PATIENT} --expert-model-parallel-size 2", tmp_path, with_too_large_a_model_on_rank_1).wait()
    assert ended.codes == [1, 1]
    told = (
        "rank 1 failed with OutOfResources: this machine's memory is too small for this run; "
        "--dry-run shows each rank's memory by use (iteration 0, start); this rank ("
    )
    for rank, output in enumerate(ended.output):
        assert output.splitlines()[-1].startswith(f"{told}{rank}) ")
        assert "Traceback" not in output and "Thread 0x" not in output
