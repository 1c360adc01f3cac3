"""Output that appears only when it is complete, and failures that name the path and the reason."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_balance.files.writing import staged, system_error, writing
from tests.disks import fill, small_disk


def by_stream(path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(torch.zeros(1 << 20), file)


def by_safetensors(path: Path) -> None:
    save_file({"a": torch.zeros(1 << 20)}, path)


def by_hand(path: Path) -> None:
    path.write_bytes(bytes(1 << 20))


@pytest.mark.parametrize("write", [by_stream, by_safetensors, by_hand])
@pytest.mark.parametrize("is_full", [False, True], ids=["little room", "no room"])
def test_every_library_gives_the_reason(tmp_path: Path, write: Callable[[Path], None], is_full: bool) -> None:
    with small_disk(tmp_path, 64) as disk:
        if is_full:
            fill(disk)
        with pytest.raises(OSError) as failure, writing(disk / "file"):
            write(disk / "file")
        assert str(failure.value) == f"[Errno 28] No space left on device: '{disk}/file'"


def test_other_errors_pass() -> None:
    for error in (KeyError("a"), ValueError("bad (os error 2)"), RuntimeError("no number")):
        with pytest.raises(type(error), match=re.escape(str(error))), writing("file"):
            raise error
    assert system_error(RuntimeError("no number")) is None and system_error(OSError("without a number")) is None


def test_the_last_file_is_the_last_to_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    replace = os.replace
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "replace", lambda old, new: moved.append(new.name) or replace(old, new))
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(len(moved)) or fsync(number))
    with staged(tmp_path / "new", last="a") as folder:
        for name in "bac":
            (folder / name).write_text(name)
    assert moved == ["b", "c", "a"] and sorted(os.listdir(tmp_path / "new")) == ["a", "b", "c"]
    # All files are synced before the first moves, and the directory after the last has moved
    assert synced == [0, 0, 0, 3]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_what_fails_leaves_everything_as_it_was(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a").write_text("old")
    for directory in (tmp_path / "old", tmp_path / "new"):
        with pytest.raises(type(error)) as failure, staged(directory) as folder:
            (folder / "a").write_text("new")
            raise error
        if isinstance(error, OSError):
            assert str(failure.value) == f"[Errno 5] Input/output error: '{directory}'"
    assert (tmp_path / "old" / "a").read_text() == "old" and os.listdir(tmp_path) == ["old"]
    assert os.listdir(tmp_path / "old") == ["a"]
