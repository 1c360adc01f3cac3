"""Find the checkpoint of a directory that a run should load. Collective: all ranks call it together."""

from pathlib import Path

import torch.distributed as dist

from megatron_balance.checkpoint import manifest
from megatron_balance.checkpoint.directory import CheckpointDirectory
from megatron_balance.checkpoint.safe_pickle import check_pickles
from megatron_balance.config.run_config import CheckpointConfig
from megatron_balance.job.errors import CheckpointError, outcome
from megatron_balance.job.groups import gather, on_first_rank
from megatron_balance.training.logging import RunLog

MAX_ATTEMPTS = 3
"""Maximum number of searches of a directory whose checkpoints are deleted while they are read. Each search finds the
newer checkpoints that the saving run has written in the meantime."""


def sources(settings: CheckpointConfig) -> list[tuple[Path, bool]]:
    """Return the directories that a run may load from, in order, and whether it loads only the weights from each."""
    roots = ((settings.load, settings.finetune), (settings.pretrained_checkpoint, True))
    return [(Path(root), weights_only) for root, weights_only in roots if root is not None]


def check_there(settings: CheckpointConfig) -> None:
    """Check that there is a checkpoint where the flags require one, without reading it. Not collective.

    Raises:
        ValueError: there is none; the error names the flag.
    """
    roots = [root for root, _ in sources(settings)]
    there = {root: CheckpointDirectory(root).iterations() for root in roots}
    if settings.ckpt_step is not None and roots and settings.ckpt_step not in there[roots[0]]:
        raise ValueError(_no_step(settings.ckpt_step, roots[0], there[roots[0]]))
    if settings.exit_on_missing_checkpoint and settings.load is not None and not any(there.values()):
        raise ValueError(
            f"--load {settings.load}: no checkpoint there (--exit-on-missing-checkpoint); give a directory with "
            "iter_0000001 or the like"
        )


def _no_step(step: int, root: Path, iterations: list[int]) -> str:
    return f"--ckpt-step {step}: {root} holds iterations {iterations}; choose one of them"


def find_sound(directory: CheckpointDirectory, step: int | None, log: RunLog) -> Path | None:
    """Return the checkpoint to load, or None if the directory has none.

    This is the checkpoint of iteration `step`; by default, the newest sound one that the tracker does not rule out.

    Before anything is loaded, every file is read once, each by one rank.

    Raises:
        CheckpointError: there are checkpoints, but none is sound, or the one of `step` is absent or damaged.
    """
    for _ in range(MAX_ATTEMPTS):
        candidates, notices = on_first_rank(lambda: _candidates(directory, step))
        for notice in notices:
            log.message(f"WARNING: {notice}")
        deleted = False
        for iteration in candidates:
            path = directory.path(iteration)
            damage = _damage(path)
            if damage is None:
                return path
            gone = not on_first_rank(path.is_dir)
            deleted |= gone
            reason = "was deleted while it was being read" if gone else f"is damaged: {damage}"
            log.message(f"WARNING: the checkpoint of iteration {iteration} {reason}")
        if not candidates:
            return None
        if not deleted:
            break
    raise CheckpointError(
        f"{directory.root}: no sound checkpoint among iterations {candidates}; the damaged files are named above. "
        "Restore them, choose one with --ckpt-step, or start over with another directory"
    )


def _candidates(directory: CheckpointDirectory, step: int | None) -> tuple[list[int], list[str]]:
    iterations = directory.iterations()
    notices = []
    if step is not None:
        if step not in iterations:
            raise CheckpointError(_no_step(step, directory.root, iterations))
        return [step], []
    try:
        tracked = directory.tracked()
    except ValueError as error:
        tracked = None
        notices.append(f"{error}; taking the newest checkpoint")
    if tracked is None:
        return iterations, notices
    unnamed = directory.finished_after_tracker(tracked)
    later = [iteration for iteration in iterations if iteration > tracked and iteration not in unnamed]
    if unnamed:
        notices.append(f"{directory.root}: iterations {unnamed} were saved after the tracker's {tracked}; taking them")
    if later:
        notices.append(
            f"{directory.root}: checkpoints of iterations {later} are later than the tracker's {tracked} and are "
            "ignored; --ckpt-step chooses one"
        )
    if tracked not in iterations:
        notices.append(f"{directory.path(tracked)}: missing, although the tracker names it")
    return unnamed + [iteration for iteration in iterations if iteration <= tracked], notices


def _damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None. The ranks divide the files among themselves."""

    def check() -> None:
        files = manifest.read(path).files
        by_size = sorted(files, key=lambda name: (-files[name].bytes, name))
        manifest.verify(path, by_size[dist.get_rank() :: dist.get_world_size()])

    errors = [error for error in gather(outcome(check)) if error is not None]
    if not errors:
        # Only after the digests match, because a large .metadata takes seconds
        errors = [error] if (error := on_first_rank(lambda: outcome(lambda: check_pickles(path)))) else []
    return str(errors[0]) if errors else None
