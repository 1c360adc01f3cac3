"""Every flag may change between saving and resuming: it is refused by name, warned of, or accepted; nothing else."""

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_balance.build.run import build_run
from megatron_balance.checkpoint.loading import check_newest
from megatron_balance.cli.arguments import parse_args
from megatron_balance.device.machine import Machine
from megatron_balance.job.errors import CheckpointError
from megatron_balance.training.loop import train_step
from tests import fused_adam
from tests.distributed.checkpoints import Said, patient
from tests.distributed.runs import build
from tests.mistakes import write_files
from tests.resume_changes import CONTEXTS, base_of

CASES = [
    pytest.param(name, line, id=f"{name}: {line}")
    for name, context in CONTEXTS.items()
    for line in map(str.strip, context.changes.strip().splitlines())
]


def save(flags: str, directory: str, fused: bool) -> None:
    """Train a step and save."""
    if fused:
        with fused_adam.installed():
            return save(flags, directory, fused=False)
    run = build(f"--save {directory}", flags)
    checkpoints = patient(run)
    train_step(run)
    checkpoints.save()
    checkpoints.finish()


def resume(flags: str, fused: bool) -> tuple[str, list[str]]:
    """Resume and train a step; return what became of it, and what was said."""
    if fused:
        with fused_adam.installed():
            return resume(flags, fused=False)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        # megatron-core sets them for --attention-backend
        os.environ.pop(name, None)
    config = parse_args(flags.split(), Machine.here(dist.get_world_size())).config
    said = Said()
    try:
        run = build_run(config)
        check_newest(config, run.length)
        patient(run, said).load()
        train_step(run)
    except (ValueError, CheckpointError) as error:
        return "refused", [str(error)]
    warnings = [line for line in said.lines if line.startswith("WARNING")]
    return "warned" if warnings else "accepted", warnings


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_files(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(("name", "line"), CASES)
def test_a_changed_flag_is_refused_warned_of_or_accepted(
    ranks, files: Path, tmp_path: Path, record_property, name: str, line: str
) -> None:
    context = CONTEXTS[name]
    saved = files / name.replace(" ", "_")
    base = base_of(context)
    fused = name.startswith("fused")
    places = {"data": files, "other": tmp_path}
    if not saved.exists():
        ranks(context.ranks).run(save, base.format(**places), str(saved), fused)
    results = ranks(context.ranks).run(resume, f"{base} --load {saved} {line}".format(**places), fused)
    assert len({outcome for outcome, _ in results}) == 1, results
    outcome, said = results[0]
    record_property("outcome", outcome)
    if outcome == "refused":
        # Some flags change the defaults of others
        assert re.search(r"--[a-z][\w-]+.*: ", said[0])
