"""Save and load a run's checkpoints. Every method of `Checkpoints` is collective: all ranks call it together.

Save: data (each rank writes its shards in separate processes) -> fsync and digest -> manifest -> final name -> tracker
-> pruning. Load: newest checkpoint first; a checkpoint that does not match its manifest is logged and skipped.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from megatron_balance.checkpoint import manifest, run_state, saved_flags
from megatron_balance.checkpoint.directory import CheckpointDirectory
from megatron_balance.checkpoint.lease import LeaseLost
from megatron_balance.checkpoint.loading import find_sound, load_checkpoint, missing, sources
from megatron_balance.checkpoint.safe_pickle import COMMON, CONFIG, METADATA
from megatron_balance.checkpoint.save_directory import SaveDirectory
from megatron_balance.checkpoint.writer import PartWriter, ShardStrategy, common_state_in_memory
from megatron_balance.files.writing import write_file
from megatron_balance.job.errors import CheckpointError, everywhere, raise_everywhere
from megatron_balance.job.groups import gather, on_first_rank
from megatron_balance.observe.progress_log import ProgressLog
from megatron_balance.training.logging import RunLog
from megatron_balance.training.run import Run
from megatron_balance.training.schedule import scheduler_settings

POLL_SECONDS = 0.02
COMMON_FILES = (COMMON, CONFIG, METADATA, saved_flags.FILE)
"""Files that rank 0 writes in addition to the shards. Since megatron-core 0.19, its shards contain COMMON."""


@dataclass
class _Save:
    """A save in flight."""

    iteration: int
    samples: int
    """Consumed at this iteration."""
    start: float
    staged: Path | None = None
    """Directory of the files until the save is complete."""
    writer: PartWriter | None = None
    """None until the save is planned."""


class Checkpoints:
    """The checkpoints of one run. A writer without progress for `patience` seconds counts as stalled. `save_directory`
    defaults to `--save`, which `prepare` or the first save takes."""

    def __init__(self, run: Run, log: RunLog, *, patience: float, save_directory: SaveDirectory | None = None) -> None:
        self.run = run
        self.log = log
        self.patience = patience
        self.settings = run.config.checkpoint
        save = self.settings.save
        self.save_directory = save_directory or SaveDirectory(Path(save) if save else None)
        self.directory = self.save_directory.directory
        self.progress: ProgressLog | None = None
        """File that gets a line for each checkpoint; None on all ranks but one, and unless it is asked for."""

        self.in_flight: _Save | None = None
        self.saved_iteration: int | None = None
        """Iteration of the last save to, or load from, `--save`."""

        self._strategy: ShardStrategy | FullyParallelSaveStrategyWrapper | None = None

    def prepare(self) -> None:
        """Take `--save` for this job, unless this job already holds it, and log what was found there; raise ValueError,
        which names the flag and the reason, if another run holds it or it cannot be written."""
        if not self.save_directory.is_held:
            self.save_directory.prepare()
        while self.save_directory.notices:
            self.log.message(f"note: {self.save_directory.notices.pop(0)}")

    def after_step(self, last: bool) -> None:
        """Poll, and save if this iteration is due. After the `last` iteration, return once everything is on disk."""
        self.poll()
        interval = self.settings.save_interval
        if last or (interval and self.run.progress.iteration % interval == 0):
            self.save()
        if last:
            self.finish()

    def save(self) -> None:
        """Save the run's current state; with `--async-save`, only start the save. Raise CheckpointError if it failed on
        some rank; earlier checkpoints are then intact."""
        if self.directory is None or self.saved_iteration == self.run.progress.iteration:
            return
        self.finish()
        iteration = self.run.progress.iteration
        self.log.message(
            f"saving checkpoint at iteration {iteration:7d} to {self.directory.root} in {self.settings.ckpt_format} "
            "format"
        )
        self.prepare()
        self.in_flight = self._start(self.directory, iteration)
        if not self.settings.async_save:
            self.finish()

    def _start(self, directory: CheckpointDirectory, iteration: int) -> _Save:
        save = _Save(iteration, self.run.progress.consumed_samples, time.perf_counter())
        with self._undone_on_failure(save):
            save.staged = on_first_rank(lambda: self._still_held(directory).stage(iteration))
            save.writer = self._plan(save.staged)
            everywhere(save.writer.start, CheckpointError)
        return save

    def _plan(self, staged: Path) -> PartWriter:
        """Agree with all ranks which rank writes which shard."""
        balancer = self.run.balancer
        kept = {
            "optimizer": not self.settings.no_save_optim,
            "rng": not self.settings.no_save_rng,
            "balancer": balancer is not None,
            "chunks": self.run.chunks is not None,
        }
        parts = frozenset(part for part in kept if kept[part])
        state = run_state.sharded_state(self.run, parts, is_loading=False)
        if balancer is not None:
            state |= run_state.balancer_state(self.run)
            if balancer.mover is not None:
                # A strategy keeps the distribution of its first save, and owners may have changed since
                self._strategy = None
        first = self._strategy is None
        if first:
            strategy = ShardStrategy("torch_dist", 1)
            fully = self.settings.ckpt_fully_parallel_save
            group = self.run.groups.dp_cp
            self._strategy = FullyParallelSaveStrategyWrapper(strategy, group, True) if fully else strategy
        try:
            with common_state_in_memory() as common:
                request: Any = dist_checkpointing.save(
                    state | run_state.common_state(self.run, parts),
                    str(staged),
                    self._strategy,
                    # Every save has the same structure, so comparing it across ranks once is enough
                    validate_access_integrity=first,
                    async_sharded_save=True,
                    content_metadata=run_state.CONTENT,
                )
        except OSError as error:
            # Only this rank failed: the others wait in a collective of megatron-core's until the hang guard ends them
            raise RuntimeError(f"{staged}: planning the checkpoint failed: {error}") from error
        return PartWriter(request, self.patience, common.getvalue())

    def poll(self) -> None:
        """Complete the save in flight if every rank has written its part."""
        if self.in_flight is not None and self._written(self.in_flight):
            self._complete(self.in_flight)

    def finish(self) -> None:
        """Wait for the save in flight, if any."""
        while self.in_flight is not None:
            self.poll()
            time.sleep(POLL_SECONDS)

    def _written(self, save: _Save) -> bool:
        """Return whether all ranks' parts are on disk."""
        assert save.writer is not None
        error = None
        done = False
        try:
            done = save.writer.poll()
        except OSError as failure:
            error = failure
        # [ranks still writing, ranks that failed]: one small reduction, so no rank waits for a slow writer
        state = torch.tensor([not done, error is not None], dtype=torch.int32, device=torch.cuda.current_device())
        dist.all_reduce(state)
        writing, failed = state.tolist()
        if failed:
            self.in_flight = None
            with self._undone_on_failure(save):
                raise_everywhere(error, CheckpointError)
        return not writing

    def _complete(self, save: _Save) -> None:
        directory = self.directory
        writer = save.writer
        assert directory is not None and writer is not None
        self.in_flight = None
        with self._undone_on_failure(save):
            written: list[Any] = [None] * dist.get_world_size()
            dist.gather_object((writer.results(), writer.entries()), written if dist.get_rank() == 0 else None)
            writer.stop()
            pruned = on_first_rank(lambda: self._commit(directory, save, written))
        self.saved_iteration = save.iteration
        seconds = time.perf_counter() - save.start
        self.log.message(
            f"  successfully saved checkpoint from iteration {save.iteration:7d} to {directory.root} ({seconds:.2f} s)"
        )
        if self.progress is not None:
            self.progress.saved(save.iteration, save.samples)
        if pruned:
            self.log.message(f"  deleted checkpoints of iterations {', '.join(map(str, pruned))}")

    def _commit(self, directory: CheckpointDirectory, save: _Save, written: list[tuple[list, dict]]) -> list[int]:
        assert save.writer is not None and save.staged is not None
        save.writer.describe([results for results, _ in written])
        schedule = scheduler_settings(self.run.config, self.run.length)
        write_file(save.staged / saved_flags.FILE, saved_flags.to_json(self.run.config, schedule).encode())
        files = {name: entry for _, entries in written for name, entry in entries.items()}
        common = [save.staged / name for name in COMMON_FILES if (save.staged / name).exists()]
        files |= {path.name: manifest.sync_and_digest(path) for path in common}
        origin = self.save_directory.origin()
        manifest.write(save.staged, save.iteration, origin, files)
        self._still_held(directory).commit(save.staged, save.iteration)
        limits = self.settings.keep_last, self.settings.save_retain_interval
        return self._still_held(directory).prune(origin.run, save.iteration, *limits)

    def _still_held(self, directory: CheckpointDirectory) -> CheckpointDirectory:
        """Return the directory after checking that this job still holds it. Called on rank 0."""
        assert self.save_directory.lease is not None
        self.save_directory.lease.check()
        return directory

    @contextlib.contextmanager
    def _undone_on_failure(self, save: _Save) -> Iterator[None]:
        """If all ranks raise an error inside the block, remove the files and raise a CheckpointError."""
        assert self.directory is not None
        try:
            yield
        except (CheckpointError, LeaseLost, OSError, ValueError) as error:
            if save.writer is not None:
                save.writer.stop()
            if (staged := save.staged) is not None:
                # Wait until every rank has stopped its writers: none may write into the directory any more
                gather(None)
                on_first_rank(lambda: shutil.rmtree(staged, ignore_errors=True))
            left = self.directory.iterations()
            remains = f"{self.directory.path(left[0])} is intact" if left else "there is no earlier one"
            text = f"saving the checkpoint of iteration {save.iteration} failed ({remains}): {error}"
            raise CheckpointError(text) from error

    def load(self) -> None:
        """Load the newest sound checkpoint of `--load` into the run, if there is one.

        Raises:
            CheckpointError: all checkpoints are damaged, or there is none and flags require one.
            ValueError: the checkpoint belongs to another model; the message names the flag.
        """
        settings = self.settings
        found = None
        for root, weights_only in sources(settings):
            found = find_sound(CheckpointDirectory(root), settings.ckpt_step, self.log)
            if found is not None:
                origin, weights_only = load_checkpoint(self.run, found, self.log, weights_only)
                if self.directory and root.resolve() == self.directory.root.resolve() and not weights_only:
                    self.saved_iteration = self.run.progress.iteration
                self.save_directory.resumed(found, origin, not weights_only)
                self.log.message(f"  successfully loaded checkpoint from {found}")
                break
        if self.save_directory.is_held and (others := on_first_rank(self.save_directory.others)):
            self.log.message(
                f"WARNING: --save {settings.save}: holds {others}, and this is run {self.save_directory.run}; they "
                "stay, unless this run saves the same iteration and replaces them; use another directory to keep runs "
                "apart"
            )
        if found is None and (error := missing(settings)):
            raise CheckpointError(error)
        if found is None and settings.load is not None:
            self.log.message(f"WARNING: --load {settings.load}: no checkpoint there; starting from random weights")
