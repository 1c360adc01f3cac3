"""Jobs that cannot start: every rank ends with one sentence that names the error, its place and the remedy."""

import importlib
import os
import resource
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_balance.profile import cluster_profile
from tests.distributed.jobs import Ended, Job, Prepare
from tests.distributed.runs import BASE

FLAGS = f"{BASE} --expert-model-parallel-size 2 --distributed-timeout-minutes 1"
WITHOUT_RANK_0 = FLAGS.replace("minutes 1", "minutes 0.05")
"""Flags of a job that waits for what does not come."""

REMEDY = "; start all with the same flags, packages, program and files (docs/running.md says what may differ)"

ANSWERING: list[socket.socket] = []
"""Listening sockets of a rank."""


def sentences(ended: Ended) -> list[str]:
    """Return the one sentence that each rank printed, ignoring torch's line about what it waited for."""
    assert ended.codes == [1] * len(ended.codes), ended.text
    said = [[line for line in text.splitlines() if "waitForInput" not in line] for text in ended.output]
    assert all(len(lines) == 1 for lines in said), ended.text
    return [lines[0].removeprefix("pretrain_gpt_moe.py: error: ") for lines in said]


def sentence(ended: Ended) -> str:
    """Return the sentence that all ranks printed."""
    said = set(sentences(ended))
    assert len(said) == 1, said
    return said.pop()


def of_two(directory: Path, other: str = "", prepare: Prepare | None = None, common: str = "") -> list[str]:
    """Return the sentences of a job of two ranks where rank 1 has the `other` flags, too."""
    start = time.monotonic()
    ended = Job(2, lambda rank: f"{FLAGS} {common} {other if rank else ''}", directory, prepare).wait()
    print(f"{time.monotonic() - start:.1f} s")
    return sentences(ended)


@dataclass(frozen=True)
class Odd:
    """Gives one rank another version of a package, another program, or another working directory."""

    rank: int
    directories: tuple[Path, ...] = ()
    version: bool = False
    source: bool = False

    def __call__(self, rank: int) -> None:
        if self.directories:
            os.chdir(self.directories[rank == self.rank])
        if rank != self.rank:
            return
        facts = importlib.import_module("megatron_balance.app.facts")
        version = facts._version
        content = facts.content_digest
        if self.version:
            facts._version = lambda package: "1.0" if package == "numpy" else version(package)
        if self.source:
            facts.content_digest = lambda path: "0123" if path.name == "plan.py" else content(path)


@pytest.fixture
def profiles(tmp_path: Path) -> tuple[Path, ...]:
    """Directories, each with a different `profile.json`."""
    for name, width in (("ours", 32), ("theirs", 64)):
        (tmp_path / name).mkdir()
        cluster_profile.builtin(3, 3, width, 64).save(tmp_path / name / "profile.json")
    return tmp_path / "ours", tmp_path / "theirs"


def test_every_kind_of_difference_in_three_ranks(tmp_path: Path, profiles: tuple[Path, ...]) -> None:
    flags = FLAGS.replace("--expert-model-parallel-size 2", "--expert-model-parallel-size 3 --num-experts 6")
    flags += " --balance-policy top2 --balance-profile profile.json"
    odd = Odd(1, profiles, version=True, source=True)
    others = {1: "--seed 7 --lr 2e-3 --train-iters 7", 2: "--seed 8 --balance-policy pro_prophet"}
    said = sentence(Job(3, lambda rank: f"{flags} {others.get(rank, '')}", tmp_path, odd).wait())
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
    ("flag", "value", "reference"),
    [
        ("--seed", "7", "1234"),
        ("--lr", "0.002", "0.001"),
        ("--balance-policy", "top2", "none"),
        ("--hidden-size", "64", "32"),
        ("--train-iters", "7", "20"),
        ("--distributed-backend", "gloo", "nccl"),
        ("--use-distributed-optimizer", "", "not given"),
    ],
)
def test_a_flag_of_one_rank(tmp_path: Path, flag: str, value: str, reference: str) -> None:
    said = of_two(tmp_path, f"{flag} {value}")
    told = f"{flag} is {reference} on rank 0, but {value or 'given'} on rank 1"
    assert said == [f"the ranks of this job differ: {told}{REMEDY}"] * 2


def with_rank_8(rank: int) -> None:
    os.environ["RANK"] = "8"


def with_rank_1_gone(rank: int) -> None:
    if rank == 1:
        os._exit(1)


def with_a_taken_port(rank: int) -> None:
    if rank == 0:
        ANSWERING.append(socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))))


def with_no_address(rank: int) -> None:
    os.environ["MASTER_ADDR"] = "no-such-machine.invalid"


def with_few_descriptors(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))


def of_three(directory: Path, flags: Mapping[int, str]) -> tuple[float, list[str]]:
    """Run three ranks with these extra flags by rank and a timeout of ten minutes; return seconds and last lines."""
    common = f"{FLAGS.replace('minutes 1', 'minutes 10')} --expert-model-parallel-size 3 --num-experts 6"
    start = time.monotonic()
    ended = Job(3, lambda rank: f"{common} {flags.get(rank, '')}", directory).wait()
    assert all(ended.codes), ended.text
    return time.monotonic() - start, [text.splitlines()[-1] for text in ended.output]


@pytest.mark.parametrize(
    ("rank", "flags", "reason"),
    [
        (0, "--hidden-size 31", "--hidden-size 31: "),
        pytest.param(1, "--balance-policy nobodys:Policy", "--balance-policy nobodys:Policy: ", marks=pytest.mark.slow),
        (2, "--lr high", "argument --lr: invalid float value: 'high'"),
    ],
)
def test_a_mistake_of_one_rank_ends_all_at_once(tmp_path: Path, rank: int, flags: str, reason: str) -> None:
    seconds, said = of_three(tmp_path, {rank: flags})
    print(f"{seconds:.1f} s", *said, sep="\n")
    own = said.pop(rank).partition(": error: ")[2]
    assert own.startswith(reason)
    told = f"pretrain_gpt_moe.py: error: rank {rank} on {socket.gethostname()} cannot start: {own}"
    assert said == [told] * 2


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        pytest.param(with_rank_8, "RANK=8: has to be at least 0 and below WORLD_SIZE, which", marks=pytest.mark.slow),
        pytest.param(with_no_address, "MASTER_ADDR=no-such-machine.invalid: ", marks=pytest.mark.slow),
        (with_few_descriptors, "ulimit -n 90: a job of 2 processes needs about "),
    ],
)
def test_what_a_process_finds_by_itself(tmp_path: Path, prepare: Prepare, told: str) -> None:
    said = of_two(tmp_path, prepare=prepare)
    assert all(one.startswith(told) for one in said), said


@pytest.mark.slow
def test_a_taken_port(tmp_path: Path) -> None:
    ended = Job(2, WITHOUT_RANK_0, tmp_path, with_a_taken_port).wait()
    assert ended.codes == [1, 1]
    # torch logs a lot about failed connections
    ours, theirs = (text.splitlines()[-1] for text in ended.output)
    assert (
        ours.startswith("pretrain_gpt_moe.py: error: MASTER_PORT=")
        and "another program listens on this port here" in ours
    )
    assert "no key-value store of rank 0 there within 0.05 minutes (--distributed-timeout-minutes)" in theirs


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
    build_run = launch.build_run

    def build(*args, **kwargs):
        if rank == 1:
            torch.empty(2**55, dtype=torch.uint8)
        return build_run(*args, **kwargs)

    launch.build_run = build


def test_a_rank_without_memory(tmp_path: Path) -> None:
    ended = Job(2, FLAGS.replace("minutes 1", "minutes 10"), tmp_path, with_too_large_a_model_on_rank_1).wait()
    assert ended.codes == [1, 1]
    told = (
        "rank 1 failed with OutOfResources: this machine's memory is too small for this run; "
        "--dry-run shows each rank's memory by use (iteration 0, start); this rank ("
    )
    for rank, output in enumerate(ended.output):
        assert output.splitlines()[-1].startswith(f"{told}{rank}) ")
        assert "Traceback" not in output and "Thread 0x" not in output
