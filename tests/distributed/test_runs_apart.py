"""Runs and directories: one run at a time saves, readers are not disturbed, and checkpoints name their run."""

import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_balance.checkpoint import loading, manifest, save_directory, saved_flags
from megatron_balance.checkpoint.checkpoints import Checkpoints
from megatron_balance.checkpoint.directory import TRACKER, CheckpointDirectory
from megatron_balance.checkpoint.lease import STALE_SECONDS, Lease, LeaseRecord, Owner
from megatron_balance.job.errors import CheckpointError
from megatron_balance.training.loop import train_step
from tests.distributed.checkpoints import Said, _forget, patient
from tests.distributed.jobs import Job
from tests.distributed.runs import BASE, build

FLAGS = "--expert-model-parallel-size 2 --num-layers 1"
SMALL = f"{BASE} --num-layers 1 --log-interval 1 --distributed-timeout-minutes 10"


def trained(flags: str, iterations: int = 1) -> tuple[Checkpoints, list[str]]:
    """Build a run that loads according to its flags, trains, and saves after each iteration."""
    run = build(f"{FLAGS} {flags}")
    checkpoints = patient(run, said := Said())
    checkpoints.prepare()
    checkpoints.load()
    for _ in range(iterations):
        train_step(run)
        checkpoints.save()
    return checkpoints, said.lines


def origin(directory: str, iteration: int) -> manifest.Origin:
    return manifest.read(CheckpointDirectory(Path(directory)).path(iteration)).origin


def test_a_second_job_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    where = tmp_path / "c"
    first = Job(2, f"{SMALL} --save {where} --save-interval 3 --train-iters 9999 --exit-signal-handler", tmp_path / "1")
    try:
        first.await_iteration()
        ended = Job(2, f"{SMALL} --save {where} --load {where} --train-iters 9999", tmp_path / "2").wait()
        assert ended.codes == [1, 1] and "Traceback" not in ended.text, ended.text
        assert f"error: --save {where}: another run saves there (run " in ended.text, ended.text
        assert f"process {first.ranks[0].pid} on host" in ended.text
        assert "choose another directory, or wait" in ended.text
        first.signal(0, signal.SIGTERM)
        ended = first.wait()
    finally:
        first.kill()
    assert ended.codes == [0, 0] and "another run" not in ended.text, ended.text
    assert LeaseRecord.parse(next(where.glob("lease.*")).read_bytes()).released


def lose(directory: str) -> tuple[str, list[str], list[str]]:
    """Save, lose the lease to a process on another host, save again; return the error, and files before and after."""
    checkpoints, _ = trained(f"--save {directory} --keep-last 1")
    now = [0.0]
    taker = Lease(
        Path(directory), Owner("other-run", host="far", process=7, since="noon", machine="far"), "", lambda: now[0]
    )

    def take() -> None:
        if dist.get_rank() == 0:
            assert not taker.attempt()
            now[0] = STALE_SECONDS
            assert taker.attempt()
            Path(directory, "iter_0000009.saving-00000000").mkdir()

    original = checkpoints._commit
    # When it is called, everything is written
    checkpoints._commit = lambda *args: (take(), original(*args))[1]
    before = sorted(os.listdir(directory))
    train_step(checkpoints.run)
    try:
        checkpoints.save()
    except CheckpointError as error:
        return str(error), before, sorted(os.listdir(directory))
    return "", before, []


def test_a_run_that_lost_its_directory_changes_nothing_there(ranks, tmp_path: Path) -> None:
    for message, before, after in ranks(2).run(lose, str(tmp_path)):
        assert "another run saves there (run other-run, process 7 on host far, since noon)" in message
        assert f"{tmp_path}/iter_0000001 is intact" in message
        kept = [name for name in after if not name.startswith("lease.")]
        assert kept == sorted([*(name for name in before if "lease" not in name), "iter_0000009.saving-00000000"])


def resume(directory: str) -> list[tuple[str, list[str]]]:
    """Return run name and messages for a new run, a resumed run, a finetuned run, and an unrelated run."""
    flags = ("", f"--load {directory}", f"--load {directory} --finetune", "--keep-last 1")
    found = []
    for more in flags:
        checkpoints, said = trained(f"--save {directory} {more}")
        found.append((checkpoints.save_directory.run, said))
        checkpoints.save_directory.close()
        _forget()
    return found


def test_checkpoints_say_which_run_they_are_from(ranks, tmp_path: Path) -> None:
    results = ranks(2).run(resume, str(tmp_path))
    assert [[run for run, _ in result] for result in results] == [[run for run, _ in results[0]]] * 2
    (new, _), (same, resumed), (tuned, tuning), (strange, _) = results[0]
    assert new == same and len({new, tuned, strange}) == 3
    second = origin(str(tmp_path), 2)
    assert second.run == new and "iter_0000001" in second.parent and new in second.parent
    assert second.versions.keys() >= {"megatron-core", "torch"} and second.saved >= second.started
    assert any(f"loading checkpoint from {tmp_path}/iter_0000001 at iteration 1 (run {new}, saved on" in line
               for line in resumed)  # fmt: skip
    assert not any("WARNING" in line for line in resumed)
    assert any(f"holds iterations [2, 1] of run {new}, and this is run {tuned}" in line for line in tuning)
    # The last two runs have saved their own iteration 1; they must not delete the first run's iteration 2
    assert origin(str(tmp_path), 1).run == strange and origin(str(tmp_path), 1).parent == ""
    assert CheckpointDirectory(tmp_path).iterations() == [2, 1]


def read_while_pruning(directory: str) -> tuple[str, list[str]]:
    """Search while another run, after the listing, saves a new checkpoint and deletes the listed one."""
    root = CheckpointDirectory(Path(directory))
    original = loading._candidates

    def candidates(*args: object) -> object:
        found = original(*args)
        if root.path(1).exists():
            os.rename(root.path(1), root.path(5))
            (root.root / TRACKER).write_text("5")
        return found

    said = Said()
    with mock.patch.object(loading, "_candidates", candidates):
        return loading.find_sound(root, None, said).name, said.lines


def load_while_pruning(directory: str) -> str:
    original = saved_flags.read

    def read(path: Path) -> dict:
        found = original(path)
        shutil.rmtree(path)
        return found

    with mock.patch.object(saved_flags, "read", read), pytest.raises(CheckpointError) as caught:
        trained(f"--load {directory}")
    return str(caught.value)


def save_once(directory: str) -> None:
    trained(f"--save {directory}")[0].save_directory.close()


def test_a_checkpoint_that_is_deleted_while_it_is_read(ranks, tmp_path: Path) -> None:
    ranks(2).run(save_once, str(tmp_path))
    for name, said in ranks(2).run(read_while_pruning, str(tmp_path)):
        assert name == "iter_0000005"
        assert any("iteration 1 was deleted while it was being read" in line for line in said)
    for message in ranks(2).run(load_while_pruning, str(tmp_path)):
        assert f"{tmp_path}/iter_0000005: was deleted while it was being loaded" in message


def prepare_apart(directory: str) -> str:
    """Prepare while rank 1 sees a different directory, as on another host."""
    original = save_directory.write_obstacle
    other = original if dist.get_rank() == 0 else lambda staged: original(staged.with_name("elsewhere"))
    with mock.patch.object(save_directory, "write_obstacle", other), pytest.raises(ValueError) as caught:
        save_directory.SaveDirectory(Path(directory)).prepare()
    return str(caught.value)


def test_every_host_has_to_see_the_directory(ranks, tmp_path: Path) -> None:
    for message in ranks(2).run(prepare_apart, str(tmp_path)):
        assert f"--save {tmp_path}: rank 1 cannot write into the directory that rank 0 created" in message
        assert "No such file or directory" in message and "on host" in message
    (lease,) = tmp_path.iterdir()
    assert LeaseRecord.parse(lease.read_bytes()).released
