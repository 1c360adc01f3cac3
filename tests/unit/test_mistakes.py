"""Mistakes that people make: each one ends with a sentence that names flag, value and remedy, before the rank joins."""

from pathlib import Path
from typing import Any

import pytest

from megatron_balance.app import launch
from megatron_balance.app.preflight import preflight
from megatron_balance.job.endings import Ending
from tests import mistakes
from tests.mistakes import JOINING, MISTAKES, NOT_DRY, REFUSALS, VALID, Mistake

BEFORE = [mistake for mistake in MISTAKES if mistake.name not in JOINING]
NAMES = [mistake.name for mistake in BEFORE]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mistakes")
    mistakes.write_files(directory)
    return directory


@pytest.fixture
def started(files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that starts a command line in this process, and returns its output, or `joined`."""

    def join(*_: Any) -> None:
        raise Ending("joined")

    monkeypatch.setattr(launch.job, "start", join)
    monkeypatch.setattr(launch, "dry_run", join)
    monkeypatch.chdir(files)
    monkeypatch.syspath_prepend(str(files))

    def start(mistake: Mistake, *flags: str) -> str:
        for name in mistakes.ADDRESS:
            monkeypatch.delenv(name, raising=False)
        for name, value in {**mistakes.LAUNCHED, **mistake.environment}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            launch.pretrain([*mistake.argv, *flags])
        return f"{capsys.readouterr().err}\n{ended.value.code if isinstance(ended.value.code, str) else ''}".strip()

    return start


@pytest.mark.parametrize("flags", [(), ("--dry-run",), ("--eval-interval", "10")], ids=" ".join)
def test_without_a_mistake_it_joins(started: Any, flags: tuple[str, ...]) -> None:
    assert started(Mistake("none"), *flags) == "joined"


@pytest.mark.parametrize("mistake", BEFORE, ids=NAMES)
def test_a_mistake_is_told_before_the_rank_joins(started: Any, files: Path, mistake: Mistake) -> None:
    output = started(mistake)
    told = mistakes.message(output, files)
    assert mistakes.is_told(mistake.told, told), told
    if mistake.name not in NOT_DRY:
        assert started(mistake, "--dry-run") == output


@pytest.mark.parametrize("rank", range(8))
def test_only_ranks_that_read_samples_need_the_data(started: Any, rank: int) -> None:
    """The stages are ranks 0-1, 2-3, 4-5 and 6-7; rank 0 also builds the caches of indices."""
    layout = "--pipeline-model-parallel-size 4 --num-layers 4 --expert-model-parallel-size 2 --global-batch-size 16"
    mistake = Mistake("absent", f"RANK={rank} {layout} --data-path absent")
    output = started(mistake)
    assert ("absent.bin: no such file" in output) == (rank in (0, 1, 6, 7))
    assert ("joined" in output) == (rank in (2, 3, 4, 5))


def test_a_directory_that_cannot_be_written(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    for flag in ("--save", "--tensorboard-dir", "--moe-routing-trace-path", "--data-cache-path"):
        told = started(Mistake("unwritable", f"{flag} new/directory"))
        assert f"{flag} new/directory: this user may not write to " in told and "choose a writable" in told


def test_evaluation_without_data_is_a_notice(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Megatron-LM, the run goes on."""
    monkeypatch.chdir(files)
    argv = Mistake("", "--split 1,0,0 --eval-interval 5").argv
    monkeypatch.setenv("WORLD_SIZE", "8")
    told = "--eval-interval 5 has no effect: there are no validation data (--split 1,0,0)"
    assert told in preflight(argv).notices


@pytest.mark.parametrize("mistake", REFUSALS, ids=[mistake.name for mistake in REFUSALS])
def test_flags_are_refused(mistake: Mistake) -> None:
    told = mistakes.refusal(mistake)
    assert mistakes.is_told(mistake.told, told), told


def test_the_tables_are_complete() -> None:
    assert len(MISTAKES) >= 60 and len(REFUSALS) >= 140
    assert len(set(NAMES)) == len(NAMES) and {*NOT_DRY} <= {mistake.name for mistake in MISTAKES}
    for mistake in MISTAKES:
        assert mistake.told and {*mistake.without} <= {*VALID}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_a_mistake_of_a_real_process(files: Path, mistake: Mistake) -> None:
    ended = mistakes.run(mistake, files)
    assert ended.returncode in (1, 2) and "Traceback" not in ended.stderr
    assert mistakes.is_told(mistake.told, mistakes.message(ended.stderr, files)), ended.stderr
