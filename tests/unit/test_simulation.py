"""Simulations of whole configurations: the command, its limits, and what must hold between runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FLAGS = (
    "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 "
    "--num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 8192 --moe-token-dispatcher-type alltoall "
    "--global-batch-size 64 --expert-model-parallel-size 8 --pipeline-model-parallel-size 2 --bf16 "
    "--use-distributed-optimizer --balance-overlap blockwise"
)


def simulate(*arguments: str, flags: str = FLAGS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/simulate.py", "--cluster", "configs/clusters/h100.yaml", *arguments]
    return subprocess.run([*command, *flags.split()], cwd=ROOT, capture_output=True, text=True)


def test_a_policy_helps_where_loads_are_uneven(tmp_path: Path) -> None:
    options = ["--nodes", "4", "--load", "hot_rank", "--iterations", "3", "--plan-ms", "1", "--trace-ranks", "0", "31"]
    files = ["--json", str(tmp_path / "found.json"), "--trace", str(tmp_path / "trace.json")]
    ended = simulate(*options, *files, "--compare", "balance-policy=none,quota")
    assert ended.returncode == 0, ended.stderr
    assert "over none" in ended.stdout
    none, quota = json.loads((tmp_path / "found.json").read_text())
    assert quota["seconds"] < 0.7 * none["seconds"]
    # The same tokens are computed, only elsewhere
    assert quota["mean_seconds"]["experts"] == pytest.approx(none["mean_seconds"]["experts"], rel=1e-3)
    assert none["seconds"] >= max(busy for _, busy in none["busy"].values()) * none["seconds"]
    assert sum(none["mean_seconds"].values()) <= none["seconds"] * (1 + 1e-9)
    for name in ("none", "quota"):
        events = json.loads((tmp_path / f"trace_{name}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {0, 31}


def test_even_loads_wait_for_nobody(tmp_path: Path) -> None:
    ended = simulate(
        "--nodes", "2", "--json", str(tmp_path / "found.json"), flags=FLAGS.replace("--balance-overlap blockwise", "")
    )
    assert ended.returncode == 0, ended.stderr
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert found["mean_seconds"].get("others' experts", 0.0) == pytest.approx(0.0, abs=1e-9)
    assert "Trans" not in found["mean_seconds"]


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        (
            ["--nodes", "4"],
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2 --disable-bias-linear",
            "--expert-tensor-parallel-size 2: cannot be simulated yet",
        ),
        (["--nodes", "2", "--load", "nothing"], "", "--load nothing: give even"),
        (["--nodes", "2", "--compare", "balance-policy"], "", "--compare balance-policy: write FLAG=VALUE,VALUE"),
        (["--nodes", "0"], "", "--nodes 0"),
        (["--nodes", "2", "--iterations", "0"], "", "--iterations 0"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], more: str, message: str) -> None:
    ended = simulate(*arguments, flags=f"{FLAGS} --balance-policy quota {more}")
    assert ended.returncode != 0
    assert message in ended.stderr and "Traceback" not in ended.stderr
