"""scripts/quickstart.sh: the commands that it runs, with stand-ins for Python and torchrun."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine

ROOT = Path(__file__).parents[2]

STAND_IN = """#!/usr/bin/env bash
printf '%q ' "$(basename "$0")" "$@" >>commands; echo >>commands
"""


def commands(folder: Path, *arguments: str) -> list[list[str]]:
    """Return the commands that the script runs if the corpus exists."""
    (folder / "scripts").mkdir()
    (folder / "data" / "quickstart").mkdir(parents=True)
    (folder / "data" / "quickstart" / "english_text_document.idx").touch()
    shutil.copy(ROOT / "scripts" / "quickstart.sh", folder / "scripts")
    for name in ("python", "torchrun"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    (folder / "scripts" / "setup.sh").write_text(f"PYTHON={folder}/python TORCHRUN={folder}/torchrun\n")
    subprocess.run(["bash", str(folder / "scripts" / "quickstart.sh"), *arguments], check=True, timeout=300)
    return [shlex.split(line) for line in (folder / "commands").read_text().splitlines()]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--balance-policy", "flexmoe", "--balance-metric", "variance", "--train-iters", "7"],
        ["--train-iters", "7", "--balance-interval=2", "--moe-router-force-workload", "hot_experts"],
    ],
    ids=["none", "before others", "after others"],
)
def test_flags_of_both_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    *training, last, simulation = commands(tmp_path, *arguments)
    machine = Machine(world_size=4, cuda=False, transformer_engine=False, apex=False)
    flags = [command[command.index("pretrain_gpt_moe.py") + 1 :] for command in training]
    before, after = (parse_args(own, machine).config for own in flags)
    assert [before.balance.balance_policy, after.balance.balance_policy] == (
        ["none", "flexmoe" if "flexmoe" in arguments else "quota"]
    )
    # The policy plans for the machine: with the constants of a GPU cluster, no copy of so small an expert pays
    assert after.balance.balance_profile == "configs/clusters/cpu.yaml"
    assert after.balance.balance_overlap == "blockwise" and after.comm.moe_comm_alltoall == "pipe"
    for run in (before, after):
        assert run.train.train_iters == (7 if arguments else 100)
    # The report reads the output of the runs
    assert last[:2] == ["python", "tools/report.py"]
    given = dict(zip(last[2::2], last[3::2], strict=True))
    assert given["--before-tensorboard-dir"] == before.log.tensorboard_dir
    assert given["--tensorboard-dir"] == after.log.tensorboard_dir
    assert given["--balance-log-dir"] == after.balance.balance_log_dir
    assert given["--balance-timeline"] == after.balance.balance_timeline
    assert simulation[:4] == ["python", "-W", "ignore", "tools/simulate.py"]
    assert simulation[simulation.index("--load") + 1] == after.balance.balance_log_dir
    assert int(given["--token-bytes"]) == after.transformer.hidden_size * after.transformer.params_dtype.itemsize
