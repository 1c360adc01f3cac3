"""Saves and loads a run's checkpoints. Every method of `Checkpoints` is collective: all ranks call it together.

Save: data (each rank its shards, in processes of their own) -> fsync and digest -> manifest -> final name -> tracker ->
pruning. Load: newest checkpoint first; one that its manifest does not confirm is named and passed over.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

from megatron_balance.device.groups import on_first_rank
from megatron_balance.training import manifest, run_state, saved_flags
from megatron_balance.training.checkpoint_directory import CheckpointDirectory
from megatron_balance.training.logging import RunLog
from megatron_balance.training.loop import Run
from megatron_balance.training.safe_pickle import check_pickles
from megatron_balance.training.writer import PartWriter, ShardStrategy

POLL_SECONDS = 0.02
COMMON_FILES = ("common.pt", "metadata.json", ".metadata", saved_flags.FILE)
"""What rank 0 writes beside the shards; since megatron-core 0.19, what was in common.pt is in its shards."""

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; the message names the file and says what is left.

    Every rank raises it, and at the same place.
    """


@dataclass
class _Save:
    """A save in flight."""

    iteration: int
    staged: Path
    writer: PartWriter
    start: float


@dataclass
class Checkpoints:
    """The checkpoints of one run."""

    run: Run
    log: RunLog
    patience: float
    """Seconds without progress after which a writer counts as stalled."""

    in_flight: _Save | None = None
    saved_iteration: int | None = None
    """Of the last save or load in `--save`."""

    _strategy: ShardStrategy | FullyParallelSaveStrategyWrapper | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.settings = self.run.config.checkpoint
        self.directory = CheckpointDirectory(Path(self.settings.save)) if self.settings.save else None

    def prepare(self) -> None:
        """Find out before the first step whether `--save` can be written; clean up after earlier processes.

        Raises:
            ValueError: it cannot; names the flag and the reason.
        """
        if self.directory is None:
            return
        directory = self.directory

        def try_it() -> list[str]:
            try:
                directory.root.mkdir(parents=True, exist_ok=True)
                notices = directory.recover()
                directory.stage(0).rmdir()
            except OSError as error:
                raise ValueError(f"--save {directory.root}: cannot write there ({error}); choose another") from error
            return notices

        for notice in on_first_rank(try_it):
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
        with _failing_as(self._failure(iteration)):
            self.in_flight = self._start(self.directory, iteration)
        if not self.settings.async_save:
            self.finish()

    def _start(self, directory: CheckpointDirectory, iteration: int) -> _Save:
        start = time.perf_counter()
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
        staged = on_first_rank(lambda: directory.stage(iteration))
        state = run_state.sharded_state(self.run, parts, is_loading=False)
        if "balancer" in parts:
            state |= run_state.balancer_state(self.run)
        balancer = self.run.balancer
        if balancer is not None and balancer.ownership is not None:
            # Strategies keep who writes what from the first save on, and owners may have changed
            self._strategy = None
        first = self._strategy is None
        request = dist_checkpointing.save(
            state | run_state.common_state(self.run, parts),
            str(staged),
            self._save_strategy(),
            # The structure is the same every time; comparing it across ranks once is enough
            validate_access_integrity=first,
            async_sharded_save=True,
            content_metadata=run_state.CONTENT,
        )
        writer = PartWriter(request, self.patience)
        raise_everywhere(_outcome(writer.start))
        return _Save(iteration, staged, writer, start)

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
            save.writer.stop()
            self.in_flight = None
            with _failing_as(self._failure(save.iteration)):
                raise_everywhere(error)
        return not writing

    def _complete(self, save: _Save) -> None:
        directory = self.directory
        assert directory is not None
        self.in_flight = None
        with _failing_as(self._failure(save.iteration)):
            written: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object((save.writer.results(), save.writer.entries()), written)
            save.writer.stop()
            pruned = on_first_rank(lambda: self._commit(directory, save, written))
        self.saved_iteration = save.iteration
        seconds = time.perf_counter() - save.start
        self.log.message(
            f"  successfully saved checkpoint from iteration {save.iteration:7d} to {directory.root} ({seconds:.2f} s)"
        )
        if pruned:
            self.log.message(f"  deleted checkpoints of iterations {', '.join(map(str, pruned))}")

    def _commit(self, directory: CheckpointDirectory, save: _Save, written: list[tuple[list, dict]]) -> list[int]:
        save.writer.describe([results for results, _ in written])
        (save.staged / saved_flags.FILE).write_text(saved_flags.to_json(self.run.config), encoding="utf-8")
        files = {name: entry for _, entries in written for name, entry in entries.items()}
        common = [save.staged / name for name in COMMON_FILES if (save.staged / name).exists()]
        files |= {path.name: manifest.sync_and_digest(path) for path in common}
        manifest.write(save.staged, save.iteration, files)
        directory.commit(save.staged, save.iteration)
        return directory.prune(save.iteration, self.settings.keep_last, self.settings.save_retain_interval)

    def _failure(self, iteration: int) -> str:
        assert self.directory is not None
        left = [str(self.directory.path(older)) for older in self.directory.iterations()[:1]]
        remains = f"{left[0]} is intact" if left else "there is no earlier one"
        return f"saving the checkpoint of iteration {iteration} failed ({remains})"

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
                self._load(found, weights_only)
                return
        if settings.load is None:
            return
        if settings.exit_on_missing_checkpoint:
            raise CheckpointError(f"--load {settings.load}: no checkpoint there (--exit-on-missing-checkpoint)")
        self.log.message(f"WARNING: --load {settings.load}: no checkpoint there; starting from random weights")

    def _load(self, path: Path, weights_only: bool) -> None:
        self._compare_flags(path)
        # common.pt again below, with the shards: this is a few kilobytes
        common = dist_checkpointing.load_common_state_dict(str(path))
        # A converted model has nothing else
        weights_only = weights_only or (not common["parts"] and "opt_param_scheduler" not in common)
        parts = self._parts_to_load(common, weights_only)
        self.log.message(f" loading checkpoint from {path} at iteration {common['iteration']}")
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
        self.log.message(f"  successfully loaded checkpoint from {path}")

    def _compare_flags(self, path: Path) -> None:
        saved = on_first_rank(lambda: saved_flags.read(path))
        refused, reported = saved_flags.differences(saved, self.run.config)
        if refused:
            raise ValueError(f"{'; '.join(refused)} ({path}); change the flag, or give --use-checkpoint-args")
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


def find_sound(directory: CheckpointDirectory, step: int | None, log: RunLog) -> Path | None:
    """The checkpoint to load: the one of `step`, else what the tracker names or the newest before it that is sound.

    All files are read once, each by one rank, before anything is loaded.

    Raises:
        CheckpointError: checkpoints are there, but none is sound (or that of `step` is not).
    """
    candidates, notices = on_first_rank(lambda: _candidates(directory, step))
    for notice in notices:
        log.message(f"WARNING: {notice}")
    for iteration in candidates:
        path = directory.path(iteration)
        damage = _damage(path)
        if damage is None:
            return path
        log.message(f"WARNING: the checkpoint of iteration {iteration} is damaged: {damage}")
    if candidates:
        raise CheckpointError(
            f"{directory.root}: no sound checkpoint among iterations {candidates}; the damaged files are named above. "
            "Restore them, choose one with --ckpt-step, or start afresh with another directory"
        )
    return None


def _candidates(directory: CheckpointDirectory, step: int | None) -> tuple[list[int], list[str]]:
    iterations, notices = directory.iterations(), []
    if step is not None:
        if step not in iterations:
            raise CheckpointError(f"--ckpt-step {step}: {directory.root} holds iterations {iterations}")
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
            f"{directory.root}: checkpoints of iterations {later} are later than the tracker's {tracked} and are left "
            "alone; --ckpt-step chooses one"
        )
    if tracked not in iterations:
        notices.append(f"{directory.path(tracked)}: missing, although the tracker names it")
    return unnamed + [iteration for iteration in iterations if iteration <= tracked], notices


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None. The ranks share the files."""

    def check() -> None:
        files = manifest.read(path).files
        by_size = sorted(files, key=lambda name: (-files[name].bytes, name))
        manifest.verify(path, by_size[dist.get_rank() :: dist.get_world_size()])

    errors = [error for error in gather(_outcome(check)) if error is not None]
    if not errors:
        # Only once the bytes are known to be what was saved; a large .metadata takes seconds
        errors = [error] if (error := on_first_rank(lambda: _outcome(lambda: check_pickles(path)))) else []
    return str(errors[0]) if errors else None


def _outcome(action: Callable[[], object]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def gather(value: Result) -> list[Result]:
    """Every rank's value, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raise_everywhere(error: Exception | None) -> None:
    """Raise on every rank if any rank has an error: the first rank's that has one."""
    for rank, failure in enumerate(gather(None if error is None else f"{type(error).__name__}: {error}")):
        if failure is not None:
            raise CheckpointError(f"rank {rank}: {failure}") from error


@contextlib.contextmanager
def _failing_as(text: str) -> Iterator[None]:
    """Turn what all ranks agreed has gone wrong inside into a CheckpointError that begins with `text`."""
    try:
        yield
    except (CheckpointError, OSError, ValueError) as error:
        raise CheckpointError(f"{text}: {error}") from error
