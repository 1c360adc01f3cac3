"""The checkpoint directory: the tracker always names a complete checkpoint, even after an interrupted save."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.checkpoint import manifest
from megatron_balance.checkpoint.directory import TRACKER, CheckpointDirectory


class Killed(BaseException):
    """Simulates SIGKILL: nothing catches it."""


def save(directory: CheckpointDirectory, iteration: int, keep_last: int | None = 2) -> None:
    """Save as rank 0 does, with one data file."""
    directory.root.mkdir(exist_ok=True)
    staged = directory.stage(iteration)
    (staged / "data").write_text(f"iteration {iteration}")
    manifest.write(staged, iteration, origin(), {"data": manifest.digest(staged / "data")})
    directory.commit(staged, iteration)
    directory.prune("this", iteration, keep_last, None)


def origin(run: str = "this") -> manifest.Origin:
    return manifest.Origin(run=run, host="node7", started="yesterday", saved="today", parent="", versions={})


def newest(directory: CheckpointDirectory) -> int:
    """Return the tracked iteration, whose checkpoint must be complete."""
    tracked = directory.tracked()
    assert tracked is not None
    path = directory.path(tracked)
    manifest.verify(path, manifest.read(path).files)
    return tracked


def count_operations(action: Callable[[], None], monkeypatch: pytest.MonkeyPatch, die_at: int = 0) -> int:
    """Run `action` and count its file system operations; kill it just before operation `die_at`."""
    count = 0

    def counted(original: Callable) -> Callable:
        def operation(*args, **kwargs):
            nonlocal count
            count += 1
            if count == die_at:
                raise Killed
            return original(*args, **kwargs)

        return operation

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "fsync", "open", "mkdir", "unlink", "rmdir", "write"):
            patch.setattr(os, name, counted(getattr(os, name)))
        action()
    return count


@pytest.mark.parametrize("again", [False, True], ids=["a new iteration", "the same iteration again"])
def test_death_at_any_operation_loses_nothing(tmp_path, monkeypatch, again):
    before = tmp_path / "before"
    for iteration in (1, 2, 3):
        save(CheckpointDirectory(before), iteration)
    iteration = 3 if again else 4
    whole = CheckpointDirectory(shutil.copytree(before, tmp_path / "whole"))
    operations = count_operations(lambda: save(whole, iteration), monkeypatch)
    assert operations > 15 and newest(whole) == iteration
    for die_at in range(1, operations + 1):
        directory = CheckpointDirectory(shutil.copytree(before, tmp_path / str(die_at)))
        with pytest.raises(Killed):
            count_operations(lambda: save(directory, iteration), monkeypatch, die_at)  # noqa: B023
        directory.recover()
        assert newest(directory) in (3, iteration)
        assert not [path for path in directory.root.iterdir() if path.name.count(".") and path.name != TRACKER
                    and not path.name.startswith(TRACKER)]  # fmt: skip
        # The next attempt succeeds and leaves the same files as an uninterrupted one
        save(directory, iteration)
        assert newest(directory) == iteration
        assert directory.iterations() == whole.iterations()


@given(
    iterations=st.sets(st.integers(1, 60), min_size=1, max_size=12),
    foreign=st.sets(st.integers(1, 60), max_size=6),
    keep_last=st.none() | st.integers(1, 5),
    interval=st.none() | st.integers(1, 7),
)
def test_pruning_keeps_the_newest_and_the_retained(tmp_path_factory, iterations, foreign, keep_last, interval):
    directory = CheckpointDirectory(tmp_path_factory.mktemp("prune"))
    foreign -= iterations
    for iteration in iterations | foreign:
        directory.path(iteration).mkdir()
        run = "this" if iteration in iterations else "another"
        manifest.write(directory.path(iteration), iteration, origin(run), {})
    assert directory.iterations_of_runs().get("another", []) == sorted(foreign, reverse=True)
    newest = sorted(iterations)[len(iterations) // 2]
    deleted = directory.prune("this", newest, keep_last, interval)
    left = set(directory.iterations())
    assert left == (iterations | foreign) - set(deleted) and not foreign & set(deleted)
    assert {iteration for iteration in iterations if iteration >= newest} <= left
    if keep_last is None and interval is None:
        assert not deleted
    older = sorted(iteration for iteration in iterations if iteration <= newest)
    for iteration in deleted:
        assert iteration not in older[-(keep_last or 1) :]
        assert interval is None or iteration % interval


def test_what_the_tracker_could_not_name_any_more_is_told_from_what_was_left_behind(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    for iteration in (1, 2, 3):
        save(directory, iteration, keep_last=None)
    assert directory.finished_after_tracker(3) == []
    (tmp_path / TRACKER).write_text("1")
    os.utime(tmp_path / TRACKER, ns=(0, directory.path(2).joinpath(manifest.NAME).stat().st_mtime_ns))
    assert directory.finished_after_tracker(1) == [3]
    (directory.path(3) / manifest.NAME).unlink()
    assert directory.finished_after_tracker(1) == []


def test_an_empty_or_absent_directory_has_nothing(tmp_path):
    for root in (tmp_path, tmp_path / "absent"):
        directory = CheckpointDirectory(root)
        assert directory.iterations() == [] and directory.tracked() is None and directory.recover() == []


def test_a_directory_without_the_checkpoint_to_read_is_named_with_a_remedy(tmp_path):
    with pytest.raises(ValueError, match=f"--load-dir {tmp_path}: has no {TRACKER}; give"):
        CheckpointDirectory(tmp_path).chosen(None)
    save(CheckpointDirectory(tmp_path), 3)
    assert CheckpointDirectory(tmp_path).chosen(None) == tmp_path / "iter_0000003"
    with pytest.raises(
        ValueError, match=r"holds no checkpoint of iteration 4, but of \[3\]; choose one with --ckpt-step"
    ):
        CheckpointDirectory(tmp_path).chosen(4)
    (tmp_path / TRACKER).write_text("?")
    with pytest.raises(ValueError, match=r"instead of an iteration; choose one of \[3\] with --ckpt-step"):
        CheckpointDirectory(tmp_path).chosen(None)
    with pytest.raises(ValueError, match=f"is a single checkpoint; give --load-dir {tmp_path} --ckpt-step 3"):
        CheckpointDirectory(tmp_path / "iter_0000003").chosen(None)


@pytest.mark.parametrize("content", [b"", b"release", b"-1", b"1 2", b"\xff", b"9" * 50])
def test_a_tracker_without_an_iteration_is_named(tmp_path, content):
    (tmp_path / TRACKER).write_bytes(content)
    with pytest.raises(ValueError, match=TRACKER):
        CheckpointDirectory(tmp_path).tracked()


def test_what_does_not_belong_to_us_stays(tmp_path):
    for name in ("iter_1", "iter_0000001.saving-zz", "notes", "iter_0000002.saving-00000000.bak"):
        (tmp_path / name).mkdir()
    directory = CheckpointDirectory(Path(tmp_path))
    assert directory.recover() == [] and directory.iterations() == []
    assert len(list(tmp_path.iterdir())) == 4
