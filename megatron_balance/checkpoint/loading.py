"""Find the checkpoint that a run should load, and load it. Collective, unless a function says otherwise."""

import contextlib
import copy
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_balance.checkpoint import manifest, run_state, saved_flags
from megatron_balance.checkpoint.comparison import Differences, Loaded, compare
from megatron_balance.checkpoint.directory import CheckpointDirectory
from megatron_balance.checkpoint.safe_pickle import check_pickles, read_common
from megatron_balance.config.run_config import CheckpointConfig, RunConfig
from megatron_balance.job.errors import CheckpointError, everywhere
from megatron_balance.job.groups import on_first_rank
from megatron_balance.training.logging import RunLog
from megatron_balance.training.run import Run
from megatron_balance.training.schedule import Length, scheduler_settings

strategies = importlib.import_module("megatron.core.dist_checkpointing.strategies")


def missing(settings: CheckpointConfig) -> str | None:
    """Return the error of a run that finds no checkpoint, or None if it may start from random weights."""
    hint = "give a directory with iter_0000001 or the like"
    if settings.pretrained_checkpoint is not None:
        return f"--pretrained-checkpoint {settings.pretrained_checkpoint}: no checkpoint there; {hint}, or leave it out"
    if settings.load is not None and (settings.exit_on_missing_checkpoint or settings.finetune):
        flag = "--exit-on-missing-checkpoint" if settings.exit_on_missing_checkpoint else "--finetune"
        return f"--load {settings.load}: no checkpoint there ({flag}); {hint}"
    return None


def sources(settings: CheckpointConfig) -> list[tuple[Path, bool]]:
    """Return the directories that a run may load from, in order, and whether it loads only the weights from each."""
    roots = ((settings.load, settings.finetune), (settings.pretrained_checkpoint, True))
    return [(Path(root), weights_only) for root, weights_only in roots if root is not None]


def _no_step(step: int, root: Path, iterations: list[int]) -> str:
    return f"--ckpt-step {step}: {root} holds iterations {iterations}; choose one of them"


def find_sound(directory: CheckpointDirectory, step: int | None, log: RunLog) -> Path | None:
    """Return the checkpoint to load, or None if the directory has none.

    This is the checkpoint of iteration `step`; by default, the newest sound one that the tracker does not rule out.
    Every file is read once, each by one rank.

    Raises:
        CheckpointError: there are checkpoints, but none is sound, or the one of `step` is absent or damaged.
    """
    deleted = True
    candidates = []
    while deleted:
        # Another run may delete checkpoints while it saves newer ones, which the next search finds
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
    raise CheckpointError(
        f"{directory.root}: no sound checkpoint among iterations {candidates}; the damaged files are named above. "
        "Restore them, choose one with --ckpt-step, or start over with another directory"
    )


def _candidates(directory: CheckpointDirectory, step: int | None) -> tuple[list[int], list[str]]:
    """Return the iterations to try, in order, and notices about what the tracker names or leaves out."""
    iterations = directory.iterations()
    if step is not None:
        if step not in iterations:
            raise CheckpointError(_no_step(step, directory.root, iterations))
        return [step], []
    try:
        tracked = directory.tracked()
    except ValueError as error:
        return iterations, [f"{error}; taking the newest checkpoint"]
    if tracked is None:
        return iterations, []
    notices = []
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

    try:
        everywhere(check)
        # Only after the digests match, because a large .metadata takes seconds
        on_first_rank(lambda: check_pickles(path))
    except ValueError as error:
        return str(error)
    return None


def load_checkpoint(run: Run, path: Path, log: RunLog, weights_only: bool) -> tuple[manifest.Origin, bool]:
    """Load the checkpoint in `path` into the run.

    Returns:
        The checkpoint's origin, and whether only its weights were loaded: a converted model has nothing else.

    Raises:
        CheckpointError: the checkpoint was deleted in the meantime.
        ValueError: flags differ that must not; the message names them, both values and the remedies.
    """
    with _deletion_named(path):
        origin = on_first_rank(lambda: manifest.read(path).origin)
        saved = on_first_rank(lambda: saved_flags.read(path))
        refused, warned = _compare_flags(saved, run.config, run.length, weights_only)
        if refused:
            raise ValueError(f"{path} of {origin}: {'; '.join(refused)}")
        for difference in warned:
            log.message(f"WARNING: {path}: {difference}")
        common = on_first_rank(lambda: read_common(path))
        # A converted model consists of weights only
        weights_only = weights_only or (not common["parts"] and "opt_param_scheduler" not in common)
        parts = _parts_to_load(run, common, weights_only, log)
        log.message(f" loading checkpoint from {path} at iteration {common['iteration']} ({origin})")
        if "balancer" in parts:
            assert run.balancer is not None
            found: Any = dist_checkpointing.load(run_state.balancer_state(run), str(path), **sharing(common))
            run.balancer.restore(found["balancer"])
        state = run_state.sharded_state(run, parts, is_loading=True)
        if not saved.get("moe_router_enable_expert_bias"):
            run_state.keep_own_biases(state, "expert_bias")
        if "quantile_balancing" not in str(saved.get("moe_router_load_balancing_type")):
            run_state.keep_own_biases(state, "qb_beta")
        strategy: TorchDistLoadShardedStrategy | FullyParallelLoadStrategyWrapper = TorchDistLoadShardedStrategy()
        if run.config.checkpoint.ckpt_fully_parallel_load:
            strategy = FullyParallelLoadStrategyWrapper(strategy, run.groups.dp_cp)
        loaded: Any = dist_checkpointing.load(state, str(path), strategy, **sharing(common))
        run_state.restore(run, loaded, parts, weights_only)
    return origin, weights_only


def sharing(common: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for `load`: before 0.19, megatron-core needs a common.pt, which newer checkpoints lack."""
    if not hasattr(strategies, "base"):
        return {}

    class Given(strategies.common.TorchCommonLoadStrategy):
        def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
            return copy.deepcopy(common)

    return {"common_strategy": Given()}


def check_newest(config: RunConfig, length: Length) -> None:
    """Compare a run's flags with those of the checkpoint that it will load if no file is damaged. Not collective. Raise
    ValueError, with both values and the remedies, if there is no checkpoint where flags require one, or if flags differ
    that must not."""
    settings = config.checkpoint
    for flag, root in {"--load": settings.load, "--pretrained-checkpoint": settings.pretrained_checkpoint}.items():
        if root is not None:
            CheckpointDirectory(Path(root)).check(flag)
    there = [(root, CheckpointDirectory(root).iterations()) for root, _ in sources(settings)]
    if settings.ckpt_step is not None and there and settings.ckpt_step not in there[0][1]:
        raise ValueError(_no_step(settings.ckpt_step, *there[0]))
    if not any(found for _, found in there) and (error := missing(settings)):
        raise ValueError(error)
    for root, weights_only in sources(settings):
        try:
            newest = saved_flags.newest_of(root, settings.ckpt_step)
            if newest is None:
                continue
            saved = saved_flags.read(newest)
        except ValueError:
            # The search for a sound checkpoint will name the damage, and take an earlier one
            return
        if refused := _compare_flags(saved, config, length, weights_only).refused:
            raise ValueError(f"{newest}: {'; '.join(refused)}")
        return


def _compare_flags(saved: Mapping[str, Any], config: RunConfig, length: Length, weights_only: bool) -> Differences:
    mine = saved_flags.sections(config, scheduler_settings(config, length))
    # A converted model has no schedule
    progress = not weights_only and "max_lr" in saved
    schedule = progress and not config.checkpoint.no_load_optim
    return compare(saved, mine, Loaded(progress, schedule, optimizer=schedule and not saved.get("no_save_optim")))


def _parts_to_load(run: Run, common: dict[str, Any], weights_only: bool, log: RunLog) -> run_state.Parts:
    settings = run.config.checkpoint
    parts = set(common["parts"])
    if weights_only or settings.no_load_optim:
        parts.discard("optimizer")
    if weights_only or settings.no_load_rng:
        parts.discard("rng")
    layout = run_state.layout(run.config)
    if "rng" in parts and common["layout"] != layout:
        parts.discard("rng")
        log.message("note: the checkpoint is of another layout: random number generators start afresh")
    if weights_only or run.chunks is None or (common["layout"], common["comm"]) != (layout, asdict(run.config.comm)):
        # The first iteration chooses them again
        parts.discard("chunks")
    if weights_only or run.balancer is None:
        parts.discard("balancer")
    elif "balancer" in parts and common["balance"] != run_state.balance(run.config):
        parts.discard("balancer")
        log.message("note: the checkpoint is of another layout or policy: placements start afresh")
    return frozenset(parts)


@contextlib.contextmanager
def _deletion_named(path: Path) -> Iterator[None]:
    """Raise a CheckpointError if the block fails because the checkpoint was deleted."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        if path.is_dir():
            raise
        raise CheckpointError(
            f"{path}: was deleted while it was being loaded, by the run that saves there or by hand; start again to "
            "load the newest, or keep more with --keep-last"
        ) from error
