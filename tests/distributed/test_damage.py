"""Damaged checkpoints are detected before use and named, and the previous checkpoint is loaded."""

import random
import shutil
from pathlib import Path

import pytest

from megatron_balance.checkpoint.checkpoints import CheckpointError
from megatron_balance.checkpoint.directory import TRACKER, CheckpointDirectory
from megatron_balance.checkpoint.loading import find_sound
from megatron_balance.training.loop import train_step
from tests.distributed.checkpoints import Said, patient
from tests.distributed.runs import build

FLAGS = "--expert-model-parallel-size 2 --num-layers 1"
NEWEST = "iter_0000003"


def flip_a_bit(content: bytearray, chance: random.Random) -> None:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def truncate(content: bytearray, chance: random.Random) -> None:
    del content[chance.randrange(len(content)) :]


def lengthen(content: bytearray, chance: random.Random) -> None:
    content += chance.randbytes(chance.randint(1, 100))


def invert_a_block(content: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(content))
    content[start : start + 512] = bytes(255 - byte for byte in content[start : start + 512])


HARMS = (flip_a_bit, flip_a_bit, truncate, lengthen, invert_a_block, None)
"""Kinds of damage to a file; None: it is removed."""


def save_three(directory: str) -> None:
    """Save checkpoints of iterations 1, 2 and 3."""
    run = build(f"{FLAGS} --save {directory}")
    checkpoints = patient(run)
    for _ in range(3):
        train_step(run)
        checkpoints.save()


def look(directory: str) -> tuple[str | None, list[str]]:
    """Return the checkpoint that would be loaded, and the messages about the others."""
    said = Said()
    found = find_sound(CheckpointDirectory(Path(directory)), None, said)
    return found and found.name, said.lines


@pytest.fixture(scope="module")
def sound(ranks, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    ranks(2).run(save_three, str(directory))
    return directory


def harmed(sound: Path, directory: Path, name: str, chance: random.Random) -> Path:
    """Copy the checkpoints and damage one file of the newest; return the copy."""
    shutil.copytree(sound, directory)
    path = directory / NEWEST / name
    harm = chance.choice(HARMS)
    if harm is None:
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        harm(content, chance)
        path.write_bytes(content)
    return directory


def test_sound_checkpoints_are_taken_newest_first(sound, ranks):
    assert ranks(2).run(look, str(sound)) == [(NEWEST, [])] * 2


@pytest.mark.parametrize("seed", [0, 1, pytest.param(range(2, 40), marks=pytest.mark.slow)], ids=str)
def test_every_damage_is_found_and_named(seed, sound, ranks, tmp_path):
    names = sorted(path.name for path in (sound / NEWEST).iterdir())
    for one in seed if isinstance(seed, range) else [seed]:
        chance = random.Random(one)
        for name in names:
            directory = harmed(sound, tmp_path / f"{one}{name}", name, chance)
            for found, said in ranks(2).run(look, str(directory)):
                assert found == "iter_0000002", (one, name)
                assert any("damaged" in line and f"{NEWEST}/{name}" in line for line in said), (said, one, name)
            shutil.rmtree(directory)


def test_a_missing_directory_and_a_wrong_tracker_are_named(sound, ranks, tmp_path):
    directory = shutil.copytree(sound, tmp_path / "missing")
    shutil.rmtree(directory / NEWEST)
    for found, said in ranks(2).run(look, str(directory)):
        assert found == "iter_0000002" and any("missing" in line and NEWEST in line for line in said)
    for content, expected in ((b"\xb3", NEWEST), (b"1", "iter_0000001"), (b"", NEWEST), (b"9", NEWEST)):
        directory = shutil.copytree(sound, tmp_path / f"tracker{content!r}")
        (directory / TRACKER).write_bytes(content)
        for found, said in ranks(2).run(look, str(directory)):
            assert found == expected and any("tracker" in line or TRACKER in line for line in said)


def look_and_fail(directory: str) -> str:
    try:
        look(directory)
    except CheckpointError as error:
        return str(error)
    return ""


def test_nothing_is_loaded_when_all_are_damaged(sound, ranks, tmp_path):
    directory = shutil.copytree(sound, tmp_path / "all")
    for path in directory.glob("iter_*/.metadata"):
        path.unlink()
    for message in ranks(2).run(look_and_fail, str(directory)):
        assert "no sound checkpoint" in message and str(directory) in message


def test_an_unfinished_directory_is_no_checkpoint(sound, ranks, tmp_path):
    directory = shutil.copytree(sound, tmp_path / "unfinished")
    (directory / NEWEST).rename(directory / "iter_0000004.saving-00000000")
    (directory / "iter_0000009").mkdir()
    (directory / TRACKER).unlink()
    for found, said in ranks(2).run(look, str(directory)):
        assert found == "iter_0000002"
        assert any("iter_0000009/manifest.json" in line for line in said)
