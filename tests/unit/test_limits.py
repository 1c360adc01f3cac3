"""Missing resources of a machine are reported in one sentence, with a remedy."""

import errno
import os
import resource
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from megatron_balance.job import limits


@pytest.fixture
def descriptors(monkeypatch: pytest.MonkeyPatch):
    """`descriptors(soft, hard)` simulates these limits and returns a list of all limits that are set."""

    def of(soft: int, hard: int) -> list[tuple[int, int]]:
        now = [(soft, hard)]
        monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
        monkeypatch.setattr(resource, "setrlimit", lambda _, pair: now.append(pair))
        return now

    return of


def test_too_few_file_descriptors(descriptors) -> None:
    descriptors(64, 64)
    with pytest.raises(ValueError, match=r"^ulimit -n 64: a job of 2 processes needs about 100 file .* ulimit -n 800"):
        limits.open_files("gloo", 2, True)


def test_the_soft_limit_is_raised_as_far_as_needed(descriptors) -> None:
    now = descriptors(64, resource.RLIM_INFINITY)
    limits.open_files("gloo", 2, False)
    assert now[1:] == [(8 * 96, resource.RLIM_INFINITY)]
    now = descriptors(64, 500)
    limits.open_files("gloo", 2, False)
    assert now[1:] == [(500, 500)]
    now = descriptors(1024, 4096)
    limits.open_files("gloo", 2, False)
    assert now[1:] == []
    # Each rank is connected to the store
    now = descriptors(1024, 10**6)
    limits.open_files("nccl", 4096, True)
    assert now[-1][0] > 2 * 4096


def test_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    statistics = namedtuple("statistics", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda _: statistics(2**10, 2**10))
    limits.shared_memory(2, 2**15, 8, tmp_path)
    limits.shared_memory(0, 2**40, 8, tmp_path)
    with pytest.raises(
        ValueError, match=r"--num-workers 2: .* 8 processes take 2 MiB of .*, which has 1 MiB; .*--shm-s"
    ):
        limits.shared_memory(2, 2**16, 8, tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="cannot be written to; give the container more"):
        limits.shared_memory(2, 1, 8, tmp_path)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "this machine's memory is too small for this run; --dry-run shows"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried ..."), "the GPU's memory is too small for this run; --dry"),
        (OSError(errno.EMFILE, "Too many open files"), "all file descriptors are in use; raise the limit of "),
        (
            RuntimeError("can't start new thread"),
            "the system cannot start more threads; raise the limit with ulimit -u",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x"), "/dev/shm is full; give the container more"),
    ],
)
def test_what_has_run_out(error: Exception, told: str) -> None:
    with pytest.raises(limits.OutOfResources) as raised, limits.explained():
        raise error
    assert str(raised.value).startswith(told)


def test_other_errors_stay_as_they_are() -> None:
    for error in (RuntimeError("shapes differ"), OSError(errno.ENOSPC, "No space left on device", "/data")):
        with pytest.raises(type(error)) as raised, limits.explained():
            raise error
        assert raised.value is error
