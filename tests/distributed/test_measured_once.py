"""Profiles in files: one rank measures or reads, and all ranks get its profile or its error."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_balance.measure.measure import measured_once
from megatron_balance.profile.cluster_profile import ClusterProfile, builtin


def count_once(path: Path) -> tuple[int, int, list[ClusterProfile]]:
    calls: list[int] = []

    def measuring() -> ClusterProfile:
        calls.append(1)
        # A rank must not keep its own measurement
        return builtin(4, 2, 64, 128 + dist.get_rank())

    first = measured_once([path], 4, 2, measuring)
    after_first = len(calls)
    second = measured_once([path], 4, 2, measuring)
    return after_first, len(calls), [first, second]


def test_measured_once_measures_once(ranks, tmp_path: Path) -> None:
    path = tmp_path / "not there yet" / "profile.json"
    expected = builtin(4, 2, 64, 128)
    assert ranks(4).run(count_once, path) == [(1, 1, [expected, expected])] * 4
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]


def error_of_measured_once(path: Path, num_ranks: int) -> str:
    with pytest.raises(ValueError) as error:
        measured_once([path], num_ranks, 2, lambda: builtin(num_ranks, 2, 64, 128))
    # The ranks are still together
    dist.all_reduce(torch.ones(1))
    return str(error.value)


def test_errors_are_everyones(ranks, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    builtin(8, 2, 64, 128).save(path)
    message, *others = ranks(4).run(error_of_measured_once, path, 4)
    assert "is for 8 expert-parallel ranks" in message and others == [message] * 3
    path.write_text("{")
    message, *others = ranks(4).run(error_of_measured_once, path, 4)
    assert "is not JSON" in message and others == [message] * 3
    message, *others = ranks(4).run(error_of_measured_once, path / "below", 4)
    assert "--balance-profile auto: " in message and "cannot be written" in message and others == [message] * 3
