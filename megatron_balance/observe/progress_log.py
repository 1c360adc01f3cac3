"""progress.txt in `--save` (`--log-progress`): starts of a run's jobs, and the progress of each checkpoint."""

import contextlib
import datetime
import os
import time
from pathlib import Path

from megatron_balance.files.reading import MIB, read_text
from megatron_balance.observe.optional import AppendedFile

TIME = "%Y-%m-%d %H:%M:%S"
MOST_BYTES = 64 * MIB
START = "Starting job"
SAVED = "Saved checkpoint"


class ProgressLog:
    """Appends lines to `directory`/progress.txt in Megatron's form, beginning with this job's start, on one rank.

    Args:
        samples: number of samples that earlier jobs of the run have consumed.
        flops_per_sample: floating-point operations of a sample, forward and backward.
        tokens_per_sample: `--seq-length`.
        world_size: number of ranks, among which operations are divided.
    """

    def __init__(
        self, directory: Path, samples: int, *, flops_per_sample: float, tokens_per_sample: int, world_size: int
    ) -> None:
        path = directory / "progress.txt"
        self.world_size = world_size
        self._flops = flops_per_sample
        self._tokens = tokens_per_sample
        self._file = AppendedFile(path, f"--log-progress {path}", path.stat().st_size if path.is_file() else 0)
        self._job = self._first = time.time(), samples * flops_per_sample
        self._add(START)
        with contextlib.suppress(ValueError):
            self._first = first_job(read_text(path, MOST_BYTES), world_size) or self._job

    def saved(self, iteration: int, samples: int) -> None:
        """Add the line of a checkpoint; the run has consumed `samples` samples at this iteration."""
        operations = samples * self._flops
        job, cumulative = (
            (operations - before) / max(time.time() - since, 1e-3) / self.world_size / 1e12
            for since, before in (self._job, self._first)
        )
        self._add(
            f"{SAVED}\tIteration: {iteration}\tJob throughput: {job:.1f} TFLOP/s/GPU\t"
            f"Cumulative throughput: {cumulative:.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {operations:.2e}\t"
            f"Tokens (in billions): {samples * self._tokens / 1e9:.2f}"
        )

    def _add(self, text: str) -> None:
        job = os.environ.get("SLURM_JOB_ID", "")
        line = f"{datetime.datetime.now():{TIME}}\tJob ID: {job}\t# GPUs: {self.world_size}\t{text}\n"
        self._file.add(line.encode())
        self._file.flush(last=True)


def first_job(text: str, world_size: int) -> tuple[float, float] | None:
    """Return the start of the first job since the number of ranks last changed, and the operations before it.

    Lines of `text`, a progress.txt, that have another form are skipped. The result is seconds since the epoch and
    floating-point operations; None if there is no such job.
    """
    found = None
    saved = 0.0
    for fields in (line.split("\t") for line in text.splitlines()):
        with contextlib.suppress(IndexError, ValueError):
            ranks = int(fields[2].removeprefix("# GPUs: "))
            if ranks != world_size:
                found = None
            if fields[3] == SAVED:
                saved = float(fields[7].removeprefix("Floating-point operations: "))
            elif fields[3] == START and found is None and ranks == world_size:
                found = datetime.datetime.strptime(fields[0], TIME).timestamp(), saved
    return found
