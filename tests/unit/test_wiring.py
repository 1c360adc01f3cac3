"""Wiring on one rank of a simulated job: the profile is found once, if needed, and by every rank of the job."""

from pathlib import Path
from unittest import mock

import pytest

from megatron_balance.app.dry_run import imagined_run
from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.profile.cluster_profile import builtin
from tests.distributed.runs import BASE

FOUR_RANKS = "--dry-run --distributed-backend gloo --expert-model-parallel-size 2 --disable-bias-linear"
TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2"


def times_read(flags: str, rank: int, directory: Path) -> int:
    """Build one rank's run with a profile in a file, and return how many times the file was read."""
    path = directory / "profile.json"
    profile = builtin(2, 2, 32, 64)
    path.touch()
    line = f"{BASE} {FOUR_RANKS} --balance-profile {path} {flags}"
    config = parse_args(line.split(), Machine.here(4)).config
    with (
        mock.patch("megatron_balance.build.profiles.load", return_value=profile) as load,
        imagined_run(config, rank, 4),
    ):
        return load.call_count


@pytest.mark.parametrize(
    ("flags", "times"),
    [
        # Experts that are not sharded have one schedule where tensor-parallel ranks have different tokens
        (
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel "
            "--moe-parallel-schedule auto",
            0,
        ),
        (f"{TENSOR_PARALLEL} --sequence-parallel --moe-parallel-schedule auto", 1),
        ("--balance-policy top2", 1),
        (f"{TENSOR_PARALLEL} --moe-parallel-schedule auto", 1),
        (
            f"{TENSOR_PARALLEL} --moe-parallel-schedule auto --moe-comm-alltoall auto --moe-comm-chunks auto "
            "--balance-policy top2",
            1,
        ),
    ],
)
def test_the_profile_is_read_once_if_it_is_needed(flags: str, times: int, tmp_path: Path) -> None:
    assert times_read(flags, 0, tmp_path) == times


@pytest.mark.parametrize("rank", [0, 2], ids=["dense stage", "MoE stage"])
def test_every_pipeline_stage_takes_part_in_reading_the_profile(rank: int, tmp_path: Path) -> None:
    flags = "--pipeline-model-parallel-size 2 --global-batch-size 8 --moe-layer-freq ([0]+[1]) --balance-policy top2"
    assert times_read(flags, rank, tmp_path) == 1
