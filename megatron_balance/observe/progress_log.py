"""progress.txt in `--save` (`--log-progress`): when the jobs of a run started, and how far each checkpoint is."""

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
    """Appends lines to `directory`/progress.txt in Megatron's form; one rank has it.

    Args:
        flops_per_sample: floating-point operations of a sample, forward and backward.
        tokens_per_sample: `--seq-length`.
        world_size: number of ranks, among which operations are divided.
    """

    def __init__(self, directory: Path, *, flops_per_sample: float, tokens_per_sample: int, world_size: int) -> None:
        self.path = directory / "progress.txt"
        self.world_size = world_size
        self._flops = flops_per_sample
        self._tokens = tokens_per_sample
        size = self.path.stat().st_size if self.path.is_file() else 0
        self._file = AppendedFile(self.path, f"--log-progress {self.path}", size)
        self._began = time.time()
        self._begun_with = 0.0

    def start(self, samples: int) -> None:
        """Add the line of a job that starts.

        Args:
            samples: number of samples that earlier jobs of the run have consumed.
        """
        self._began = time.time()
        self._begun_with = samples * self._flops
        self._add(START)

    def saved(self, iteration: int, samples: int) -> None:
        """Add the line of a checkpoint.

        Args:
            samples: number of samples that the run had consumed at this iteration.
        """
        now = time.time()
        operations = samples * self._flops
        since, before = first_job(self._text(), self.world_size) or (self._began, self._begun_with)
        job = self._throughput(operations - self._begun_with, now - self._began)
        cumulative = self._throughput(operations - before, now - since)
        self._add(
            f"{SAVED}\tIteration: {iteration}\tJob throughput: {job:.1f} TFLOP/s/GPU\t"
            f"Cumulative throughput: {cumulative:.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {operations:.2e}\t"
            f"Tokens (in billions): {samples * self._tokens / 1e9:.2f}"
        )

    def _throughput(self, operations: float, seconds: float) -> float:
        return operations / max(seconds, 1e-3) / self.world_size / 1e12

    def _text(self) -> str:
        try:
            return read_text(self.path, MOST_BYTES)
        except ValueError:
            return ""

    def _add(self, text: str) -> None:
        now = datetime.datetime.now()
        job = os.environ.get("SLURM_JOB_ID", "")
        line = f"{now.strftime(TIME)}\tJob ID: {job}\t# GPUs: {self.world_size}\t{text}\n"
        self._file.add(line.encode())
        self._file.flush(last=True)


def first_job(text: str, world_size: int) -> tuple[float, float] | None:
    """Return the start of the first job since the number of ranks last changed, and the operations before it.

    Args:
        text: progress.txt; lines of another form are skipped.

    Returns:
        seconds since the epoch, and floating-point operations; None if there is no such job.
    """
    found = None
    saved = 0.0
    for fields in (line.split("\t") for line in text.splitlines()):
        try:
            ranks = int(fields[2].removeprefix("# GPUs: "))
            if fields[3] == SAVED:
                saved = float(fields[7].removeprefix("Floating-point operations: "))
            elif fields[3] == START and found is None and ranks == world_size:
                found = datetime.datetime.strptime(fields[0], TIME).timestamp(), saved
        except (IndexError, ValueError):
            continue
        if ranks != world_size:
            found = None
    return found
