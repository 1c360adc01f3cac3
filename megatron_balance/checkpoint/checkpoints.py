"""Saves and loads a run's checkpoints. Every method of `Checkpoints` is collective: all ranks call it together.

Save: data (each rank its shards, in processes of their own) -> fsync and digest -> manifest -> final name -> tracker ->
pruning. Load: newest checkpoint first; one that its manifest does not confirm is named and passed over.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import InitVar, asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_balance.checkpoint import manifest, run_state, saved_flags
from megatron_balance.checkpoint.directory import CheckpointDirectory
from megatron_balance.checkpoint.lease import LeaseLost
from megatron_balance.checkpoint.save_directory import SaveDirectory, write_obstacle
from megatron_balance.checkpoint.search import find_sound
from megatron_balance.checkpoint.writer import (
    COMMON,
    CONFIG,
    METADATA,
    PartWriter,
    ShardStrategy,
    common_state_in_memory,
)
from megatron_balance.files.writing import writing
from megatron_balance.job.errors import CheckpointError, gather, outcome, raise_everywhere
from megatron_balance.job.groups import on_first_rank
from megatron_balance.training.logging import RunLog
from megatron_balance.training.run import Run

POLL_SECONDS = 0.02
COMMON_FILES = (COMMON, CONFIG, METADATA, saved_flags.FILE)
"""Files that rank 0 writes in addition to the shards."""


@dataclass
class _Save:
    """A save in flight."""

    iteration: int
    staged: Path
    start: float
    writer: PartWriter | None = None
    """None: not even planned."""


@dataclass
class Checkpoints:
    """The checkpoints of one run."""

    run: Run
    log: RunLog
    patience: float
    """Seconds without progress after which a writer counts as stalled."""

    held: InitVar[SaveDirectory | None] = None
    """Where it saves; default: `--save`, taken by `prepare` or the first save."""

    in_flight: _Save | None = None
    saved_iteration: int | None = None
    """Of the last save or load in `--save`."""

    _strategy: ShardStrategy | FullyParallelSaveStrategyWrapper | None = field(default=None, repr=False)

    def __post_init__(self, held: SaveDirectory | None) -> None:
        self.settings = self.run.config.checkpoint
        save = self.settings.save
        self.place = held or SaveDirectory(Path(save) if save else None)
        self.directory = self.place.directory

    def prepare(self) -> None:
        """Take `--save` for this job, unless it was taken before, and say what was found there.

        Raises:
            ValueError: another run has it, or it cannot be written; names the flag and the reason.
        """
        if not self.place.is_held:
            self.place.prepare()
        for notice in self.place.notices:
            self.log.message(f"note: {notice}")

    def after_step(self, last: bool) -> None:
        """What is due after an iteration; after the `last` one, everything is on disk when this returns."""
        self.poll()
        interval = self.settings.save_interval
        if last or (interval and self.run.progress.iteration % interval == 0):
            self.save()
        if last:
            self.finish()

    def save(self) -> None:
        """Save the run as it is now; with `--async-save`, only start to.

        Raises:
            CheckpointError: it failed on some rank; earlier checkpoints are intact.
        """
        if self.directory is None or self.saved_iteration == self.run.progress.iteration:
            return
        self.finish()
        iteration = self.run.progress.iteration
        self.log.message(
            f"saving checkpoint at iteration {iteration:7d} to {self.directory.root} in {self.settings.ckpt_format} "
            "format"
        )
        if not self.place.is_held:
            self.place.prepare()
        with self._as_checkpoint_error(iteration):
            self.in_flight = self._start(self.directory, iteration)
        if not self.settings.async_save:
            self.finish()

    def _start(self, directory: CheckpointDirectory, iteration: int) -> _Save:
        start = time.perf_counter()
        staged = on_first_rank(lambda: self._still_held(directory).stage(iteration))
        save = _Save(iteration, staged, start)
        with self._removing_on_failure(save):
            reason = write_obstacle(staged)
            raise_everywhere(OSError(reason) if reason else None)
            save.writer = self._plan(staged)
            raise_everywhere(outcome(save.writer.start))
        return save

    def _plan(self, staged: Path) -> PartWriter:
        """Agree with all ranks on who writes what."""
        parts = frozenset(
            part
            for part, kept in (
                ("optimizer", not self.settings.no_save_optim),
                ("rng", not self.settings.no_save_rng),
                ("balancer", self.run.balancer is not None),
                ("chunks", self.run.chunks is not None),
            )
            if kept
        )
        state = run_state.sharded_state(self.run, parts, is_loading=False)
        if "balancer" in parts:
            state |= run_state.balancer_state(self.run)
        balancer = self.run.balancer
        if balancer is not None and balancer.ownership is not None:
            # Strategies keep who writes what from the first save on, and owners may have changed
            self._strategy = None
        first = self._strategy is None
        try:
            with common_state_in_memory() as common:
                request = dist_checkpointing.save(
                    state | run_state.common_state(self.run, parts),
                    str(staged),
                    self._save_strategy(),
                    # The structure is the same every time; comparing it across ranks once is enough
                    validate_access_integrity=first,
                    async_sharded_save=True,
                    content_metadata=run_state.CONTENT,
                )
        except OSError as error:
            # This rank alone has it: the others are in a collective of megatron-core's, and the hang guard ends them
            raise RuntimeError(f"{staged}: planning the checkpoint failed: {error}") from error
        return PartWriter(request, self.patience, *common)

    def poll(self) -> None:
        """Complete an asynchronous save once every rank has written its part."""
        if self.in_flight is not None and self._written(self.in_flight):
            self._complete(self.in_flight)

    def finish(self) -> None:
        """Wait for the save in flight, if there is one."""
        while self.in_flight is not None:
            self.poll()
            time.sleep(POLL_SECONDS)

    def _written(self, save: _Save) -> bool:
        """Whether all ranks' parts are on disk."""
        assert save.writer is not None
        error, done = None, False
        try:
            done = save.writer.poll()
        except OSError as failure:
            error = failure
        # (ranks still writing, ranks that failed): nobody waits long for a rank that writes slowly
        state = torch.tensor([not done, error is not None], dtype=torch.int32, device=torch.cuda.current_device())
        dist.all_reduce(state)
        writing, failed = state.tolist()
        if failed:
            self.in_flight = None
            with self._as_checkpoint_error(save.iteration), self._removing_on_failure(save):
                raise_everywhere(error)
        return not writing

    def _complete(self, save: _Save) -> None:
        directory, writer = self.directory, save.writer
        assert directory is not None and writer is not None
        self.in_flight = None
        with self._as_checkpoint_error(save.iteration), self._removing_on_failure(save):
            written: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object((writer.results(), writer.entries()), written)
            writer.stop()
            pruned = on_first_rank(lambda: self._commit(directory, save, written))
        self.saved_iteration = save.iteration
        seconds = time.perf_counter() - save.start
        self.log.message(
            f"  successfully saved checkpoint from iteration {save.iteration:7d} to {directory.root} ({seconds:.2f} s)"
        )
        if pruned:
            self.log.message(f"  deleted checkpoints of iterations {', '.join(map(str, pruned))}")

    def _commit(self, directory: CheckpointDirectory, save: _Save, written: list[tuple[list, dict]]) -> list[int]:
        assert save.writer is not None
        save.writer.describe([results for results, _ in written])
        flags = save.staged / saved_flags.FILE
        with writing(flags):
            flags.write_text(saved_flags.to_json(self.run.config), encoding="utf-8")
        files = {name: entry for _, entries in written for name, entry in entries.items()}
        common = [save.staged / name for name in COMMON_FILES if (save.staged / name).exists()]
        files |= {path.name: manifest.sync_and_digest(path) for path in common}
        origin = self.place.origin()
        manifest.write(save.staged, save.iteration, origin, files)
        self._still_held(directory).commit(save.staged, save.iteration)
        limits = self.settings.keep_last, self.settings.save_retain_interval
        return self._still_held(directory).prune(origin.run, save.iteration, *limits)

    def _still_held(self, directory: CheckpointDirectory) -> CheckpointDirectory:
        """The directory, once it is certain that it is still this job's. On rank 0."""
        assert self.place.lease is not None
        self.place.lease.check()
        return directory

    @contextlib.contextmanager
    def _as_checkpoint_error(self, iteration: int) -> Iterator[None]:
        """Turn what all ranks agreed has gone wrong inside into a CheckpointError that says what is left."""
        assert self.directory is not None
        try:
            yield
        except (CheckpointError, LeaseLost, OSError, ValueError) as error:
            left = [str(self.directory.path(older)) for older in self.directory.iterations()[:1]]
            remains = f"{left[0]} is intact" if left else "there is no earlier one"
            text = f"saving the checkpoint of iteration {iteration} failed ({remains}): {error}"
            raise CheckpointError(text) from error

    @contextlib.contextmanager
    def _removing_on_failure(self, save: _Save) -> Iterator[None]:
        """Remove what was written if all ranks agree that something has gone wrong inside."""
        try:
            yield
        except (CheckpointError, LeaseLost, OSError, ValueError) as error:
            if save.writer is not None:
                save.writer.stop()
            # No writer of any rank is left to write into the directory
            gather(None)
            if not on_first_rank(lambda: _removed(save.staged)):
                raise CheckpointError(f"{error}; {save.staged} could not be removed") from error
            raise

    def _save_strategy(self) -> ShardStrategy | FullyParallelSaveStrategyWrapper:
        if self._strategy is None:
            self._strategy = ShardStrategy("torch_dist", 1)
            if self.settings.ckpt_fully_parallel_save:
                self._strategy = FullyParallelSaveStrategyWrapper(self._strategy, self.run.groups.dp_cp, True)
        return self._strategy

    def load(self) -> None:
        """Put the newest sound checkpoint of `--load` into the run, if there is one.

        Raises:
            CheckpointError: `--exit-on-missing-checkpoint` and there is none, or all that are there are damaged.
            ValueError: the checkpoint is of another model; names the flag.
        """
        settings = self.settings
        for root, weights_only in ((settings.load, settings.finetune), (settings.pretrained_checkpoint, True)):
            if root is None:
                continue
            found = find_sound(CheckpointDirectory(Path(root)), settings.ckpt_step, self.log)
            if found is not None:
                with _reading(found):
                    self._load(found, weights_only)
                self._warn_of_other_runs()
                return
        self._warn_of_other_runs()
        if settings.load is None:
            return
        if settings.exit_on_missing_checkpoint:
            raise CheckpointError(f"--load {settings.load}: no checkpoint there (--exit-on-missing-checkpoint)")
        self.log.message(f"WARNING: --load {settings.load}: no checkpoint there; starting from random weights")

    def _warn_of_other_runs(self) -> None:
        if self.place.is_held and (others := on_first_rank(self.place.others)):
            self.log.message(
                f"WARNING: --save {self.settings.save}: holds {others}, and this is run {self.place.run}; they stay, "
                "but are replaced where this run saves the same iteration: another directory keeps runs apart"
            )

    def _load(self, path: Path, weights_only: bool) -> None:
        origin = on_first_rank(lambda: manifest.read(path).origin)
        self._compare_flags(path, origin)
        # common.pt again below, with the shards: this is a few kilobytes
        common = dist_checkpointing.load_common_state_dict(str(path))
        # A converted model has nothing else
        weights_only = weights_only or (not common["parts"] and "opt_param_scheduler" not in common)
        parts = self._parts_to_load(common, weights_only)
        self.log.message(f" loading checkpoint from {path} at iteration {common['iteration']} ({origin})")
        if "balancer" in parts:
            assert self.run.balancer is not None
            found = dist_checkpointing.load(run_state.balancer_state(self.run), str(path))
            self.run.balancer.restore(found["balancer"])
        state = run_state.sharded_state(self.run, parts, is_loading=True)
        strategy: TorchDistLoadShardedStrategy | FullyParallelLoadStrategyWrapper = TorchDistLoadShardedStrategy()
        if self.settings.ckpt_fully_parallel_load:
            strategy = FullyParallelLoadStrategyWrapper(strategy, self.run.groups.dp_cp)
        loaded = dist_checkpointing.load(state, str(path), strategy)
        run_state.restore(self.run, loaded, parts, weights_only)
        if self.directory is not None and path.parent.resolve() == self.directory.root.resolve() and not weights_only:
            self.saved_iteration = self.run.progress.iteration
        self.place.resumed(path, origin, not weights_only)
        self.log.message(f"  successfully loaded checkpoint from {path}")

    def _compare_flags(self, path: Path, origin: manifest.Origin) -> None:
        saved = on_first_rank(lambda: saved_flags.read(path))
        refused, reported = saved_flags.differences(saved, self.run.config)
        if refused:
            raise ValueError(
                f"{'; '.join(refused)} ({path} of {origin}); change the flag, or give --use-checkpoint-args"
            )
        for difference in reported:
            self.log.message(f"WARNING: {difference} ({path})")

    def _parts_to_load(self, common: dict[str, Any], weights_only: bool) -> run_state.Parts:
        parts = set(common["parts"])
        if weights_only or self.settings.no_load_optim:
            parts.discard("optimizer")
        if weights_only or self.settings.no_load_rng:
            parts.discard("rng")
        layout = run_state.layout(self.run.config)
        if "rng" in parts and common["layout"] != layout:
            parts.discard("rng")
            self.log.message("note: the checkpoint is of another layout: random number generators start afresh")
        asked = asdict(self.run.config.comm)
        if weights_only or self.run.chunks is None or (common["layout"], common["comm"]) != (layout, asked):
            # Chosen anew in the first iteration
            parts.discard("chunks")
        if weights_only or self.run.balancer is None:
            parts.discard("balancer")
        elif "balancer" in parts and common["balance"] != run_state.balance(self.run.config):
            parts.discard("balancer")
            self.log.message("note: the checkpoint is of another layout or policy: placements start afresh")
        return frozenset(parts)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Say so if what goes wrong inside is that the checkpoint is not there any more."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        if path.is_dir():
            raise
        raise CheckpointError(
            f"{path}: was deleted while it was being loaded, by the run that saves there or by hand; start again to "
            "load the newest, or keep more with --keep-last"
        ) from error


def _removed(directory: Path) -> bool:
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()
