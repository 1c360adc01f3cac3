"""Load one checkpoint into a run. Collective: all ranks call it together."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_balance.checkpoint import manifest, run_state, saved_flags
from megatron_balance.job.errors import CheckpointError
from megatron_balance.job.groups import on_first_rank
from megatron_balance.training.logging import RunLog
from megatron_balance.training.run import Run


def load_checkpoint(run: Run, path: Path, log: RunLog, weights_only: bool) -> tuple[manifest.Origin, bool]:
    """Load the checkpoint in `path` into the run.

    Args:
        weights_only: whether to load nothing but the weights.

    Returns:
        The checkpoint's origin, and whether only its weights were loaded: a converted model has nothing else.

    Raises:
        CheckpointError: the checkpoint was deleted in the meantime.
        ValueError: the checkpoint belongs to another model; the message names the flag.
    """
    with _deletion_named(path):
        origin = on_first_rank(lambda: manifest.read(path).origin)
        _compare_flags(run, path, origin, log)
        # `load` below reads this again together with the shards; it is a few kilobytes
        common = dist_checkpointing.load_common_state_dict(str(path))
        # A converted model consists of weights only
        weights_only = weights_only or (not common["parts"] and "opt_param_scheduler" not in common)
        parts = _parts_to_load(run, common, weights_only, log)
        log.message(f" loading checkpoint from {path} at iteration {common['iteration']} ({origin})")
        if "balancer" in parts:
            assert run.balancer is not None
            found = dist_checkpointing.load(run_state.balancer_state(run), str(path))
            run.balancer.restore(found["balancer"])
        state = run_state.sharded_state(run, parts, is_loading=True)
        strategy: TorchDistLoadShardedStrategy | FullyParallelLoadStrategyWrapper = TorchDistLoadShardedStrategy()
        if run.config.checkpoint.ckpt_fully_parallel_load:
            strategy = FullyParallelLoadStrategyWrapper(strategy, run.groups.dp_cp)
        loaded = dist_checkpointing.load(state, str(path), strategy)
        run_state.restore(run, loaded, parts, weights_only)
    return origin, weights_only


def _compare_flags(run: Run, path: Path, origin: manifest.Origin, log: RunLog) -> None:
    saved = on_first_rank(lambda: saved_flags.read(path))
    refused, reported = saved_flags.differences(saved, run.config)
    if refused:
        raise ValueError(f"{'; '.join(refused)} ({path} of {origin}); change the flag, or give --use-checkpoint-args")
    for difference in reported:
        log.message(f"WARNING: {difference} ({path})")


def _parts_to_load(run: Run, common: dict[str, Any], weights_only: bool, log: RunLog) -> run_state.Parts:
    settings, parts = run.config.checkpoint, set(common["parts"])
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
