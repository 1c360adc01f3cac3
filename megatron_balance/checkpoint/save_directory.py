"""The `--save` directory of a job: take its lease, check that every rank can write there, and clean up."""

import dataclasses
import os
import socket
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megatron_balance.checkpoint.directory import CheckpointDirectory
from megatron_balance.checkpoint.lease import Lease, Owner
from megatron_balance.checkpoint.manifest import Origin, new_run_name, utc_now
from megatron_balance.job.groups import gather, on_first_rank
from megatron_balance.job.job import Launch
from megatron_balance.messages import cleaned

Result = TypeVar("Result")


@dataclass
class SaveDirectory:
    """A directory that only this job changes, from `prepare` to `close`."""

    root: Path | None
    """None if the job saves nothing."""
    launch: Launch = field(default_factory=Launch.from_environment)
    _: KW_ONLY
    run: str = ""
    """Name of the run; the same on all ranks once `prepare` has returned."""
    parent: str = ""
    """Checkpoint that the run was loaded from; empty for random weights."""
    notices: list[str] = field(default_factory=list)
    """Leftovers that `prepare` found, one sentence each."""
    is_held: bool = False
    started: str = field(default_factory=utc_now)
    lease: Lease | None = None
    """The lease, which rank 0 holds for all."""

    @property
    def directory(self) -> CheckpointDirectory | None:
        return self.root and CheckpointDirectory(self.root)

    def prepare(self) -> None:
        """Take the lease, clean up, and check that every rank can write here. Collective. Raise ValueError, which names
        the flag and the reason, if another run saves here or the directory cannot be written."""
        self.run = self.run or on_first_rank(new_run_name)
        if self.root is None:
            return
        directory = CheckpointDirectory(self.root)
        owner = Owner.here(self.run, self.launch.job, self.launch.restarts)
        lease = self.lease = Lease(self.root, owner, f"--save {self.root}")
        self._on_first_rank(lambda: directory.root.mkdir(parents=True, exist_ok=True))
        lease.acquire(lambda text: print(text, flush=True), lambda: self._on_first_rank(lease.attempt))
        try:
            self.notices += self._on_first_rank(directory.recover)
            self._check_all_ranks_can_write(self._on_first_rank(lambda: directory.stage(0)))
        except BaseException:
            self.close()
            raise
        self.is_held = True
        if dist.get_rank() == 0:
            lease.keep()

    def _on_first_rank(self, action: Callable[[], Result]) -> Result:
        """Return the result of `action` on rank 0; an OSError becomes a mistake of the user."""
        try:
            return on_first_rank(action)
        except OSError as error:
            raise ValueError(f"--save {self.root}: cannot write there ({error}); choose another") from error

    def _check_all_ranks_can_write(self, staged: Path) -> None:
        """Check that every rank, on every host, can write into a directory that rank 0 has created."""
        failures = gather(write_obstacle(staged))
        if dist.get_rank() == 0:
            staged.rmdir()
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise ValueError(
                    f"--save {self.root}: rank {rank} cannot write into the directory that rank 0 created ({failure}); "
                    "choose a directory on a file system that all hosts share"
                )

    def resumed(self, checkpoint: Path, origin: Origin, whole: bool) -> None:
        """Record which checkpoint this run was loaded from. If it was loaded as a `whole`, this run continues the
        checkpoint's run and takes its name; otherwise it only starts from its weights."""
        self.parent = f"{checkpoint.resolve()} of {origin}"
        if whole:
            self.run = origin.run
            if self.lease is not None:
                self.lease.owner = dataclasses.replace(self.lease.owner, run=origin.run)

    def others(self) -> str:
        """Describe the checkpoints of other runs in the directory; empty if there are none. Called on rank 0."""
        assert self.directory is not None
        runs = self.directory.iterations_of_runs()
        others = (run for run in runs if run not in (None, self.run))
        return "; ".join(f"iterations {runs[run]} of run {cleaned(run)}" for run in others)

    def origin(self) -> Origin:
        """Return the origin of a checkpoint that is saved now."""
        return Origin.now(self.run, self.started, self.parent)

    def close(self) -> None:
        """Release the directory."""
        self.is_held = False
        if self.lease is not None:
            self.lease.release()


def write_obstacle(staged: Path) -> str | None:
    """Return why this process cannot write into a directory, and its host; None if it can write."""
    try:
        os.stat(staged)
        reason = None if os.access(staged, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        reason = error.strerror
    return reason and f"{staged} on host {socket.gethostname()}: {reason}"
