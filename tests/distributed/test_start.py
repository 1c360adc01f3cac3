"""Jobs that cannot start: every rank ends with one sentence that names the error, its place and the remedy."""

import functools
import importlib
import os
import resource
import socket
from pathlib import Path

import pytest

from megatron_balance.profile import cluster_profile
from tests.distributed.jobs import Ended, Job, Prepare
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--distributed-backend gloo", "--distributed-backend is nccl on rank 0, but gloo on rank 1"),
        ("--use-distributed-optimizer", "--use-distributed-optimizer is not given on rank 0, but given on rank 1"),
    ],
)
def test_a_flag_of_one_rank(tmp_path: Path, flags: str, told: str) -> None:
    ended = Job(2, lambda rank: f"{FLAGS} {flags if rank else ''}", tmp_path).wait()
    assert sentences(ended) == [f"the ranks of this job differ: {told}{REMEDY}"] * 2


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


def with_rank_8(rank: int) -> None:
    os.environ["RANK"] = "8"


def with_no_address(rank: int) -> None:
    os.environ["MASTER_ADDR"] = "no-such-machine.invalid"


def with_few_descriptors(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        pytest.param(with_rank_8, "RANK=8: has to be at least 0 and below WORLD_SIZE, which", marks=pytest.mark.slow),
        pytest.param(with_no_address, "MASTER_ADDR=no-such-machine.invalid: ", marks=pytest.mark.slow),
        (with_few_descriptors, "ulimit -n 90: a job of 2 processes needs about "),
    ],
)
def test_what_a_process_finds_by_itself(tmp_path: Path, prepare: Prepare, told: str) -> None:
    said = sentences(Job(2, FLAGS, tmp_path, prepare).wait())
    assert all(one.startswith(told) for one in said), said


def with_a_taken_port(rank: int) -> None:
    if rank == 0:
        ANSWERING.append(socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))))


@pytest.mark.slow
def test_a_taken_port(tmp_path: Path) -> None:
    ended = Job(2, FLAGS.replace("minutes 1", "minutes 0.05"), tmp_path, with_a_taken_port).wait()
    assert ended.codes == [1, 1]
    # torch logs a lot about failed connections
    ours, theirs = (text.splitlines()[-1] for text in ended.output)
    assert ours.startswith("pretrain_gpt_moe.py: error: MASTER_PORT=")
    assert "another program listens on this port here" in ours
    assert "no key-value store of rank 0 there within 0.05 minutes (--distributed-timeout-minutes)" in theirs


def with_rank_1_gone(rank: int) -> None:
    if rank == 1:
        os._exit(1)


@pytest.mark.slow
def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    ended = Job(3, f"{FLAGS} --expert-model-parallel-size 1", tmp_path, with_rank_1_gone).wait()
    assert ended.codes == [1, 1, 1]
    for rank in (0, 2):
        assert "rank 1 of 3 has not joined at 127.0.0.1:" in ended.output[rank]
        assert "Traceback" not in ended.output[rank]


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
