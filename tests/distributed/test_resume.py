"""Stopping and resuming a run: the checkpoint flags from a user's view."""

import errno
import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_balance.checkpoint import manifest, writer
from megatron_balance.checkpoint.checkpoints import CheckpointError
from megatron_balance.checkpoint.directory import CheckpointDirectory
from megatron_balance.config.run_config import TrainConfig
from megatron_balance.training.loop import Stopping, train_step
from tests.disks import small_disk
from tests.distributed.checkpoints import Outcome, Said, outcome, patient, unequal_tensors
from tests.distributed.jobs import Job
from tests.distributed.runs import BASE, build
from tests.variants import variants

EP2 = "--expert-model-parallel-size 2 --num-layers 1 --log-interval 1 --distributed-timeout-minutes 10"


def iterations(directory: Path) -> list[int]:
    return CheckpointDirectory(directory).iterations()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Checkpoints of iteration 2, from the save interval, and of iteration 3, from `--exit-interval`."""
    directory = tmp_path_factory.mktemp("saved")
    flags = f"{BASE} {EP2} --save {directory} --save-interval 2 --exit-interval 3"
    ended = Job(2, flags, directory / "log").wait()
    assert ended.codes == [0, 0], ended.text
    return directory


def test_exit_interval_saves(saved):
    assert iterations(saved) == [3, 2]


def test_a_signal_saves_and_exits_with_status_0(tmp_path):
    flags = f"{BASE} {EP2} --train-iters 100000 --save {tmp_path} --load {tmp_path} --exit-signal-handler"
    for earlier in ([], [1]):
        job = Job(2, flags, tmp_path / "log")
        job.await_iteration()
        job.signal(0, signal.SIGTERM)
        ended = job.wait()
        assert ended.codes == [0, 0], ended.text
        assert "SIGTERM was received" in ended.text
        assert ("successfully loaded checkpoint" in ended.text) == bool(earlier)
        assert ("WARNING: --load" in ended.text) != bool(earlier)
    assert len(iterations(tmp_path)) == 2


def test_validation_goes_on_where_it_stopped(tmp_path):
    flags = f"{BASE} {EP2} --train-iters 4 --eval-interval 2 --eval-iters 1 --split 90,5,5"
    straight = Job(2, f"{flags} --save {tmp_path} --save-interval 2", tmp_path / "log").wait().text
    resumed = Job(2, f"{flags} --load {tmp_path} --ckpt-step 2", tmp_path / "log").wait().text
    lines = [
        next(line for line in text.splitlines() if "validation loss at iteration 4" in line)
        for text in (straight, resumed)
    ]
    assert lines[0] == lines[1]


def reasons_to_stop(late: int, signalled: int) -> list[str | None]:
    """Return each rank's decisions if one rank's time is up or one rank got a signal."""
    rank = torch.distributed.get_rank()
    stopping = Stopping(TrainConfig(exit_duration_in_mins=1, exit_signal_handler=True, exit_interval=5))
    with stopping.listening():
        stopping.start -= 61 * (rank == late)
        if rank == signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        return [stopping.reason(iteration) for iteration in (1, 2, 5)]


@pytest.mark.parametrize(
    ("late", "signalled", "reason"),
    [(9, 9, None), (1, 9, "--exit-duration-in-mins 1"), (9, 0, "SIGTERM was received"), (0, 1, "SIGTERM was received")],
)
def test_all_ranks_stop_for_one(late, signalled, reason, ranks):
    assert ranks(2).run(reasons_to_stop, late, signalled) == [[None, reason, "--exit-interval 5"]] * 2


def test_the_checkpoint_gives_the_models_shape(saved, tmp_path):
    flags = (
        f"--load {saved} --use-checkpoint-args --micro-batch-size 2 --lr 1e-3 --train-iters 20 --exit-interval 4 "
        "--mock-data --num-workers 0 --attention-dropout 0 --hidden-dropout 0 --expert-model-parallel-size 2 "
        "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall --log-interval 1"
    )
    ended = Job(2, flags, tmp_path).wait()
    assert ended.codes == [0, 0], ended.text
    assert "iteration        4/" in ended.text


def test_another_models_checkpoint_is_refused(saved, tmp_path):
    ended = Job(2, f"{BASE} {EP2} --load {saved} --hidden-size 64 --num-experts 4", tmp_path).wait()
    assert ended.codes == [1, 1]
    assert "--hidden-size 64: the checkpoint has 32" in ended.text
    assert "--num-experts 4: the checkpoint has 8" in ended.text
    assert "Traceback" not in ended.text


class Loaded(NamedTuple):
    """A run right after loading."""

    iteration: int
    samples: int
    steps: int
    """Samples that the schedule of the learning rate has seen."""
    random: torch.Tensor
    settings: list[tuple[float, tuple[float, float]]]
    """The largest learning rate and the betas of each group of parameters."""
    state: Outcome


def loaded(flags: str) -> Loaded:
    run = build(f"{EP2} {flags}")
    patient(run, said := Said()).load()
    settings = [(group["max_lr"], group["betas"]) for group in run.optimizer.param_groups if group["params"]]
    progress = run.progress
    steps = run.scheduler.num_steps
    state = outcome(run, [], said)
    return Loaded(progress.iteration, progress.consumed_samples, steps, torch.get_rng_state(), settings, state)


def save(flags: str, directory: str) -> None:
    run = build(f"{EP2} {flags} --save {directory}")
    train_step(run)
    patient(run).save()


@pytest.mark.parametrize("optimizer", [pytest.param("", marks=pytest.mark.slow), "--use-distributed-optimizer"])
def test_the_optimizers_settings_are_those_of_the_flags(tmp_path, ranks, optimizer: str):
    ranks(2).run(save, optimizer, str(tmp_path))
    changed = f"{optimizer} --lr 2e-3 --decoupled-lr 3e-3 --adam-beta1 0.8 --override-opt_param-scheduler"
    found = [group for own in ranks(2).run(loaded, f"--load {tmp_path} {changed}") for group in own.settings]
    assert set(found) == {(2e-3, (0.8, 0.999)), (3e-3, (0.8, 0.999))}


def test_flags_choose_what_is_loaded(saved, ranks):
    newest, older, tuned, bare, fresh, pretrained = (
        ranks(2).run(loaded, flags)[0]
        for flags in (
            f"--load {saved} --seed 7",
            f"--load {saved} --ckpt-step 2",
            f"--load {saved} --finetune",
            f"--load {saved} --no-load-optim --seed 8 --lr 2e-3 --train-iters 40",
            f"--load {saved} --no-load-rng --seed 7",
            f"--load {saved}/nothing --pretrained-checkpoint {saved}",
        )
    )
    # Without the optimizer, its schedule starts afresh
    assert [run[:3] for run in (newest, older, tuned, bare, pretrained)] == [
        (3, 12, 12), (2, 8, 8), (0, 0, 0), (3, 12, 0), (0, 0, 0),
    ]  # fmt: skip
    name = next(name for name in newest.state.weights if "linear_fc1" in name)
    assert not torch.equal(older.state.weights[name], newest.state.weights[name])
    for other in (tuned, bare, pretrained):
        assert torch.equal(other.state.weights[name], newest.state.weights[name])
        assert len(other.state.moments) < len(newest.state.moments)
    assert torch.equal(bare.random, newest.random) and not torch.equal(fresh.random, newest.random)


def resave(load: str, save: str, flags: str) -> None:
    """Load with the given flags, such as another layer implementation or way of reading, and save again."""
    run = build(f"{EP2} {flags} --load {load} --save {save}")
    checkpoints = patient(run)
    checkpoints.load()
    checkpoints.save()
    checkpoints.finish()


@pytest.mark.parametrize("activation", [pytest.param("", marks=pytest.mark.slow), "--swiglu"], ids=["gelu", "swiglu"])
def test_both_layers_share_one_format(activation, ranks, tmp_path):
    model = f"{activation} --disable-bias-linear"
    ours, theirs, back = (str(tmp_path / name) for name in ("ours", "theirs", "back"))
    ranks(2).run(save_one, ours, model)
    ranks(2).run(resave, ours, theirs, f"{model} --moe-layer-impl megatron")
    ranks(2).run(resave, theirs, back, f"{model} --ckpt-fully-parallel-load --async-save")
    for other in (theirs, back):
        count, unequal = ranks(1).run(unequal_tensors, ours, other)[0]
        assert count >= 20 and unequal == []


def save_one(directory: str, flags: str, sabotage: str = "") -> str:
    """Train and save; with `sabotage`, do so again with a sabotaged save and return its error message."""
    run = build(f"{EP2} --save {directory} {flags}")
    checkpoints = patient(run)
    checkpoints.prepare()
    train_step(run)
    checkpoints.save()
    checkpoints.finish()
    if not sabotage:
        return ""
    train_step(run)
    if sabotage == "stall" and dist.get_rank() == 1:
        checkpoints.patience = 2.0
    (holder, name), action, _ = SABOTAGE[sabotage]
    original = getattr(holder, name)

    def sabotaged(*args):
        if holder is not writer or os.path.basename(args[0][0]) == "__1_0.distcp":
            action(*args)
        return original(*args)

    with mock.patch.object(holder, name, sabotaged):
        try:
            checkpoints.save()
            checkpoints.finish()
        except CheckpointError as error:
            return str(error)
    return ""


def fill_the_disk(bucket: tuple, *_: object) -> None:
    """Fail as on a full disk: the file is cut off, and torch complains about its archive."""
    Path(bucket[0]).write_bytes(b"half")
    with open("/dev/full", "wb") as file:
        torch.save(torch.zeros(1 << 20), file)


def refuse(*_: object) -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def kill_with(number: signal.Signals) -> Callable[..., None]:
    return lambda *_: os.kill(os.getpid(), number)


WRITER = (writer, "_write")
SABOTAGE: dict[str, tuple[tuple[object, str], Callable[..., object], str]] = {
    "die": (WRITER, kill_with(signal.SIGKILL), "__1_0.distcp: its writer died (exit code -9)"),
    "stall": (
        *(WRITER, kill_with(signal.SIGSTOP)),
        "__1_0.distcp: nothing was written for 2 s; the writer has stalled",
    ),
    "fill": (WRITER, fill_the_disk, "__1_0.distcp: No space left on device"),
    "quota": (WRITER, refuse, "__1_0.distcp: Disk quota exceeded"),
    "manifest": ((manifest, "_render"), refuse, "Disk quota exceeded"),
    "common": ((writer.PartWriter, "describe"), refuse, "Disk quota exceeded"),
    "unseen": (
        (writer.PartWriter, "start"),
        lambda part: shutil.rmtree(part.writer.path, ignore_errors=True),
        "No such file or directory",
    ),
    "removed": (
        (CheckpointDirectory, "stage"),
        lambda directory, *_: shutil.rmtree(directory.root),
        "No such file or directory",
    ),
}
"""Name -> the function at which it happens (that of one writer: of rank 1), what happens there, and what is said."""

QUICK = (("die", ""), ("stall", ""), ("fill", "--async-save"), ("manifest", ""), ("unseen", ""))


FAILURES = itertools.product([name for name in SABOTAGE if name != "removed"], ("", "--async-save"))


@pytest.mark.parametrize(("sabotage", "flags"), variants(FAILURES, QUICK))
def test_a_failing_save_names_the_reason_and_leaves_nothing(sabotage, flags, ranks, tmp_path):
    messages = ranks(2).run(save_one, str(tmp_path), flags, sabotage)
    assert messages[0] == messages[1]
    told = SABOTAGE[sabotage][2].format(tmp_path)
    assert told in messages[0] and f"{tmp_path}/iter_0000001 is intact" in messages[0], messages
    assert [path.name for path in tmp_path.glob("iter*")] == ["iter_0000001"]


def save_while_torch_refuses(directory: str) -> str:
    """Save while no rank can write a file in the collective part of the save."""
    original = torch.save

    def save(content: object, file: object, *args: object, **kwargs: object) -> None:
        if isinstance(file, str | Path):
            refuse()
        original(content, file, *args, **kwargs)

    with mock.patch.object(torch, "save", save):
        return save_one(directory, "")


def test_nothing_is_written_in_the_collective_part_of_a_save(ranks, tmp_path):
    assert ranks(2).run(save_while_torch_refuses, str(tmp_path)) == ["", ""]
    assert iterations(tmp_path) == [1]


def test_a_removed_directory_is_not_made_again(ranks, tmp_path):
    for message in ranks(2).run(save_one, str(tmp_path / "c"), "", "removed"):
        assert "No such file or directory" in message and f"{tmp_path}/c/iter_0000002.saving" in message
    assert not (tmp_path / "c").exists()


def test_a_full_disk_leaves_the_checkpoint_before(ranks, tmp_path):
    """The disk has room for one checkpoint, not for two, and later not even for a directory's first file."""
    with small_disk(tmp_path / "disk", 3000) as disk:
        flags = f"{BASE} {EP2} --save {disk}/c --load {disk}/c --save-interval 1 --train-iters 9"
        for _ in range(2):
            ended = Job(2, flags, tmp_path / "log").wait()
            assert ended.codes == [1, 1], ended.text
            assert "No space left on device" in ended.text and "Traceback" not in ended.text, ended.text
            newest = iterations(disk / "c")[0]
        disk_copy = shutil.copytree(disk / "c", tmp_path / "copy")
        assert ranks(2).run(loaded, f"--load {disk_copy} --train-iters 9")[0].iteration == newest > 0
