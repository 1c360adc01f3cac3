"""The layout of `--save DIR`, and the order in which it changes.

    iter_0000020/                        a complete checkpoint: its manifest names every file
    latest_checkpointed_iteration.txt    the tracker: the iteration to resume from, as Megatron writes it
    iter_0000020.saving-xxxxxxxx/        being written, or left by a process that died
    iter_0000020.replaced-xxxxxxxx/      an older checkpoint of the same iteration, about to be replaced
    iter_0000020.deleting-xxxxxxxx/      being pruned
    lease.000007                         names the process that may change the directory, or the last one (lease.py)

A save proceeds in this order: all files and the manifest are written to disk, the directory gets its final name, the
tracker names it, and older checkpoints are pruned. A process may therefore die at any point: the checkpoint that the
tracker names is always complete.
"""

import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_balance.checkpoint import manifest
from megatron_balance.files.reading import KIB, read_bounded
from megatron_balance.files.writing import sync, write_file

TRACKER = "latest_checkpointed_iteration.txt"
COMPLETE = re.compile(r"iter_(\d{7,})")
PROBE_BYTES = 1 << 20
"""Bytes written to find a full disk before the collective part of a save, in which rank 0 writes less than that."""

UNFINISHED = re.compile(r"(iter_\d{7,})\.(saving|replaced|deleting)-[0-9a-f]{8}")


@dataclass(frozen=True)
class CheckpointDirectory:
    """A directory of checkpoints. Only the process that holds its lease may change it."""

    root: Path

    def path(self, iteration: int) -> Path:
        return self.root / f"iter_{iteration:07d}"

    def check(self, flag: str) -> None:
        """Raise ValueError if the value of `flag` is a file, or one checkpoint of a directory."""
        whole = self.root.resolve()
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"{flag} {self.root}: is no directory; give the one that has iter_0000001 or the like")
        if (match := COMPLETE.fullmatch(whole.name)) and not self.iterations():
            instead = f"{flag} {whole.parent} --ckpt-step {int(match[1])}"
            raise ValueError(f"{flag} {self.root}: is a single checkpoint; give {instead}")

    def iterations(self) -> list[int]:
        """Return the iterations whose directories have their final names, newest first."""
        if not self.root.is_dir():
            return []
        found = [COMPLETE.fullmatch(entry.name) for entry in self.root.iterdir() if entry.is_dir()]
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def tracked(self) -> int | None:
        """Return the iteration that the tracker names; None without one; raise ValueError if it holds anything else."""
        path = self.root / TRACKER
        if not path.exists():
            return None
        text = read_bounded(path, KIB)
        if not re.fullmatch(rb"\d{1,15}\s*", text):
            raise ValueError(f"{path}: holds {text[:20]!r} instead of an iteration")
        return int(text)

    def chosen(self, step: int | None) -> Path:
        """Return the checkpoint of iteration `step`, or of the tracker's; raise ValueError if there is none."""
        self.check("--load-dir")
        try:
            iteration = self.tracked() if step is None else step
        except ValueError as error:
            raise ValueError(f"{error}; choose one of {self.iterations()} with --ckpt-step") from error
        if iteration is None:
            instead = "give a directory of checkpoints, or --ckpt-step"
            raise ValueError(f"--load-dir {self.root}: has no {TRACKER}; {instead}")
        if not self.path(iteration).is_dir():
            held = f"holds no checkpoint of iteration {iteration}, but of {self.iterations()}"
            raise ValueError(f"--load-dir {self.root}: {held}; choose one with --ckpt-step")
        return self.path(iteration)

    def finished_after_tracker(self, tracked: int) -> list[int]:
        """Return the iterations after the tracker's that were finished after it was written, newest first. Their
        process died before it could update the tracker. Other later iterations were left behind by a run that went
        back, or the tracker was set back by hand."""

        def finished(path: Path) -> int:
            return path.stat().st_mtime_ns if path.exists() else 0

        since = finished(self.root / TRACKER)
        later = [iteration for iteration in self.iterations() if iteration > tracked]
        return [iteration for iteration in later if finished(self.path(iteration) / manifest.NAME) > since]

    def stage(self, iteration: int) -> Path:
        """Create an empty directory for an iteration; raise OSError if that fails or the disk is almost full."""
        path = self._aside(iteration, "saving")
        path.mkdir()
        probe = path / "probe"
        try:
            write_file(probe, b"\1" * PROBE_BYTES)
            probe.unlink()
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return path

    def commit(self, staged: Path, iteration: int) -> None:
        """Give a staged directory, complete and on disk, its final name, and update the tracker."""
        sync(staged)
        final = self.path(iteration)
        replaced = self._aside(iteration, "replaced")
        if final.exists():
            # If this process dies before the next rename, `recover` renames it back
            os.rename(final, replaced)
        os.rename(staged, final)
        sync(self.root)
        new = self.root / f"{TRACKER}.new"
        write_file(new, str(iteration).encode())
        os.replace(new, self.root / TRACKER)
        sync(self.root)
        if replaced.exists():
            shutil.rmtree(replaced)

    def prune(self, run: str, newest: int, keep_last: int | None, retain_interval: int | None) -> list[int]:
        """Delete checkpoints of this run up to `newest`, except the last `keep_last` and multiples of
        `retain_interval`; return their iterations. With neither limit, all checkpoints are kept."""
        if keep_last is None and retain_interval is None:
            return []
        own = self.iterations_of_runs().get(run, [])
        old = [iteration for iteration in own if iteration <= newest][keep_last or 1 :]
        doomed = [iteration for iteration in old if not retain_interval or iteration % retain_interval]
        for iteration in doomed:
            aside = self._aside(iteration, "deleting")
            # A half-deleted directory must not look like a checkpoint
            os.rename(self.path(iteration), aside)
            shutil.rmtree(aside)
        return doomed

    def iterations_of_runs(self) -> dict[str | None, list[int]]:
        """Return the iterations of checkpoints by run; None if a manifest cannot be read."""
        found: dict[str | None, list[int]] = {}
        for iteration in self.iterations():
            found.setdefault(manifest.run_of(self.path(iteration)), []).append(iteration)
        return found

    def recover(self) -> list[str]:
        """Clean up after processes that died, and return one sentence for each leftover."""
        notices = []
        for entry in sorted(self.root.glob("iter_*.*")):
            if (match := UNFINISHED.fullmatch(entry.name)) is None:
                continue
            if match[2] == "replaced" and not (self.root / match[1]).exists():
                os.rename(entry, self.root / match[1])
                notices.append(f"{entry}: its replacement was never finished; it is {match[1]} again")
            else:
                shutil.rmtree(entry, ignore_errors=True)
                notices.append(f"{entry}: not finished ({match[2]}); removed")
        return notices

    def _aside(self, iteration: int, why: str) -> Path:
        # A unique name: a writer that outlives its rank must not write into the next attempt
        path = self.path(iteration)
        return path.with_name(f"{path.name}.{why}-{secrets.token_hex(4)}")
