"""A killed conversion leaves nothing that looks finished, and the next one equals an undisturbed one."""

import hashlib
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_balance.checkpoint.directory import CheckpointDirectory
from tests import hf_models

ROOT = Path(__file__).resolve().parents[2]
KILLS = 6
ABOUT = r"manifest\.json|\.metadata|lease\.\d+"

pytestmark = pytest.mark.slow


def convert(action: str, source: Path, target: Path) -> subprocess.Popen:
    command = [sys.executable, "tools/convert_checkpoint.py", action, "--load-dir", source, "--save-dir", target]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def finish(action: str, source: Path, target: Path) -> float:
    start = time.monotonic()
    with convert(action, source, target) as process:
        _, said = process.communicate()
    assert process.returncode == 0, said
    return time.monotonic() - start


def contents(directory: Path) -> dict[str, str]:
    """Return digests of all files except those that record when and where they were written."""
    paths = (path for path in directory.rglob("*") if path.is_file() and not re.fullmatch(ABOUT, path.name))
    return {str(path.relative_to(directory)): hashlib.blake2b(path.read_bytes()).hexdigest() for path in paths}


def wait_for_half(process: subprocess.Popen, target: Path) -> None:
    """Return once the target holds a file of an unfinished conversion, or the process has ended."""
    while process.poll() is None and not (any(target.glob("*.saving-*/*")) or any(target.glob(".incomplete-*/*"))):
        time.sleep(0.001)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("action", ["import", "export"])
def test_a_killed_conversion_is_done_again(action: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    checkpoint = tmp_path / "checkpoint"
    hf_models.save("qwen2_moe", model, shard_bytes=20_000)
    if action == "export":
        finish("import", model, checkpoint)
    source, whole = (model, tmp_path / "whole") if action == "import" else (checkpoint, tmp_path / "whole")
    seconds = finish(action, source, whole)
    expected = contents(whole)
    chance = random.Random(action)
    killed = 0
    for number in range(KILLS):
        target = tmp_path / f"target{number}"
        process = convert(action, source, target)
        if number % 2:
            # Imports take the first half of the time
            time.sleep(chance.uniform(0.5, 1.0) * seconds)
        else:
            wait_for_half(process, target)
        process.kill()
        process.communicate()
        killed += process.returncode != 0
        if process.returncode:
            if action == "export" and target.exists():
                # Without its config.json, an export is no model. Only checkpoints are cleaned up by the next writer
                assert contents(target) == expected or not (target / "config.json").exists()
                shutil.rmtree(target)
            elif CheckpointDirectory(target).iterations():
                # The conversion was killed at its very end
                assert contents(target).items() >= expected.items()
                continue
            finish(action, source, target)
        assert contents(target) == expected
    assert killed
