"""Runs a cell: the job with its fault, then the restarted job, and checks what both leave behind."""

import getpass
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_balance.checkpoint.directory import CheckpointDirectory
from tests.distributed.jobs import Ended, Job
from tests.distributed.wandering import wandering
from tests.faults.cells import ITERATIONS, LAYOUTS, Cell, End
from tests.faults.faults import Inject, repair

LIMIT = 240.0
"""Seconds after which a job counts as hanging; 12 s after the fault, its ranks no longer wait for each other."""

TOLERANCE = 1e-5
"""Relative, for logged losses and gradient norms where placements may differ."""

CACHES = (f"torchinductor_{getpass.getuser()}",)
"""Caches that torch keeps among temporary files."""

Losses = dict[int, tuple[float, float]]
"""Iteration -> (lm loss, gradient norm) as logged."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell."""

    cell: Cell
    seconds: float
    """From the fault to the end of the last rank."""
    resumed_from: int | None
    equal: bool
    """Whether losses and gradient norms equal those of the undisturbed run digit by digit."""

    def __str__(self) -> str:
        resumed = "" if self.resumed_from is None else f", again from {self.resumed_from}"
        losses = "equal" if self.equal else f"within {TOLERANCE}"
        return f"{self.cell}: {self.cell.end.name.lower()} after {self.seconds:.1f} s{resumed}, losses {losses}"


def losses(text: str) -> Losses:
    """Return the losses and gradient norms that the ranks of a job logged."""
    lines = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+) ", text)
    return {int(iteration): (float(loss), float(norm)) for iteration, loss, norm in lines}


def flags_of(layout: str, shared: Path) -> tuple[int, str]:
    """Return the number of ranks and the flags; `shared` is one directory for all jobs."""
    world_size, flags = LAYOUTS[layout]
    return world_size, flags.format(wandering=wandering(world_size, shared))


def undisturbed(layout: str, directory: Path) -> Losses:
    """Train a layout without a fault, and return its losses."""
    world_size, flags = flags_of(layout, directory)
    own = directory / layout.replace(" ", "_")
    ended = Job(world_size, f"{flags} --save {own}/save", own / "logs").wait(LIMIT)
    assert ended.codes == [0] * world_size, ended.text
    found = losses(ended.text)
    assert len(found) == ITERATIONS, ended.text
    return found


def run(cell: Cell, disk: Path, directory: Path, shared: Path, expected: Losses) -> Outcome:
    """Run a cell, check how it ends, and return the outcome.

    Args:
        disk: an empty file system for this cell alone.
        directory: where the logs go.
        shared: directory with the files that all jobs need.
        expected: losses of the layout without a fault.
    """
    world_size, flags = flags_of(cell.layout, shared)
    # If the fault affects the disk with the logs, checkpoints go elsewhere
    save = (directory if "{disk}" in cell.flags else disk) / "save"
    noted = directory / "noted"
    temporary = directory / "temporary"
    noted.mkdir()
    temporary.mkdir()
    flags += f" --save {save} --load {save}"
    before = _others()
    job = Job(
        world_size,
        f"{flags} {cell.timeout} {cell.flags.format(disk=disk)}",
        directory / "disturbed",
        Inject(cell, disk, noted, temporary),
    )
    ended = _wait(job, cell)
    happened = [float(path.read_text()) for path in noted.iterdir()]
    assert happened, f"{cell}: nothing happened\n{ended.text}"
    seconds = time.monotonic() - min(happened)
    _check_end(cell, ended)
    _check_leavings(cell, before)
    left = [path.name for path in temporary.iterdir() if path.name not in CACHES]
    assert not left, f"{cell}: left behind: {left}"
    found = losses(ended.text)
    resumed_from = None
    if cell.end is End.RESUMES:
        repair(cell.fault, disk)
        left = CheckpointDirectory(save).iterations()
        resumed_from = left[0] if left else 0
        again = Job(world_size, flags, directory / "again").wait(LIMIT)
        assert again.codes == [0] * world_size, f"{cell}: {again.text}"
        came_from = re.findall(r"successfully loaded checkpoint from \S*iter_(\d+)", again.text)
        assert [int(iteration) for iteration in came_from] == left[:1], f"{cell}: {left}: {again.text}"
        assert set(range(resumed_from + 1, ITERATIONS + 1)) == losses(again.text).keys(), f"{cell}: {again.text}"
        found |= losses(again.text)
        _check_leavings(cell, before)
    if cell.end is not End.REFUSED:
        assert all(_alike(found[iteration], expected[iteration]) for iteration in found), (cell, found, expected)
        assert found.keys() == expected.keys() or cell.end is End.RESUMES
        names = sorted(path.name for path in save.iterdir())
        assert not [name for name in names if re.search(r"\.(saving|replaced|deleting)-", name)], names
    equal = all(found[iteration] == expected[iteration] for iteration in found)
    return Outcome(cell, seconds, resumed_from, equal)


def _wait(job: Job, cell: Cell) -> Ended:
    if cell.fault != "stops":
        return job.wait(LIMIT)
    # The stopped rank stays until it is killed here, after all others have ended
    deadline = time.monotonic() + LIMIT
    for rank, process in enumerate(job.ranks):
        if rank != cell.rank:
            process.join(max(0.0, deadline - time.monotonic()))
    job.signal(cell.rank, signal.SIGKILL)
    return job.wait(60.0)


def _check_end(cell: Cell, ended: Ended) -> None:
    victims = range(len(ended.codes)) if cell.rank is None else [cell.rank]
    named = "" if cell.end is End.GOES_ON else rf"rank {cell.rank} (stalled|died|failed|left|ended|is gone)"
    said = cell.said or named
    assert re.search(said, ended.text), f"{cell}: {said} was not said\n{ended.codes}\n{ended.text}"
    assert None not in ended.codes, f"{cell}: hangs\n{ended.codes}\n{ended.text}"
    if cell.end is End.GOES_ON:
        assert set(ended.codes) == {0}, f"{cell}: {ended.codes}\n{ended.text}"
    else:
        others = {code for rank, code in enumerate(ended.codes) if rank not in victims}
        assert others <= {1}, f"{cell}: {ended.codes}\n{ended.text}"
        # Nothing in a process can prevent its immediate exit: the other ranks make the job fail
        if cell.fault != "leaves at once with status 0":
            assert 0 not in ended.codes, f"{cell}: {ended.codes}\n{ended.text}"
    if cell.end is End.REFUSED:
        assert not losses(ended.text) and "Traceback" not in ended.text, f"{cell}: {ended.text}"


def _alike(found: tuple[float, float], expected: tuple[float, float]) -> bool:
    return all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(found, expected, strict=True))


def _others() -> set[str]:
    """Return what jobs may leave outside their directories: descendants of this process, shared memory."""
    processes = {f"process {process.pid}" for process in psutil.Process().children(recursive=True)}
    return processes | {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}


def _check_leavings(cell: Cell, before: set[str]) -> None:
    """Check that nothing new stays; processes have 60 seconds to end.

    Anything that appears later belongs to tests that run at the same time.
    """
    deadline = time.monotonic() + 60
    left = set(_new_leavings(before))
    while left:
        assert time.monotonic() < deadline, f"{cell}: left behind: {sorted(left)}"
        time.sleep(0.2)
        left &= set(_new_leavings(before))


def _new_leavings(before: set[str]) -> Iterator[str]:
    for name in _others() - before:
        if name.startswith("process "):
            try:
                process = psutil.Process(int(name.removeprefix("process ")))
                command = " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if "forkserver" in command or "resource_tracker" in command or process.status() == psutil.STATUS_ZOMBIE:
                continue
            name = f"{name} ({command[:200]})"
        yield name
