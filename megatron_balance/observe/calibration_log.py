"""The factors by which plans were calibrated, as JSON lines (`--balance-calibrate`).

{"ranks": 4, "layers": 2}
{"iteration": 1, "exchange": 1.0, "experts": 1.0, "trans": 1.0, "agg": 1.0}
{"iteration": 2, "exchange": 1.31, "experts": 0.94, "trans": 1.0, "agg": 1.0}

`ranks` is the number of processes, `layers` that of MoE layers. Numbers are written such that they are read back
exactly.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_balance.cost.calibration import LEAST, MOST, Factors
from megatron_balance.files.reading import MIB, number_in, parse_json, read_text
from megatron_balance.observe.optional import AppendedFile

NAME = "calibration.jsonl"

MAX_BYTES = 256 * MIB
"""Maximum size of a file that is replayed: two million iterations."""


MOST_NUMBER = 2**31


class Job(NamedTuple):
    """What a record must have in common with the run that replays it."""

    ranks: int
    """Number of processes."""
    layers: int
    """Number of MoE layers."""


class CalibrationLog:
    """Writes `calibration.jsonl` into the directory of `--balance-log-dir`.

    Args:
        first_iteration: iteration where the run starts or resumes; earlier ones of an existing file are kept.

    Raises:
        ValueError: the directory cannot be written to.
    """

    def __init__(self, directory: Path, job: Job, first_iteration: int) -> None:
        flag = f"--balance-log-dir {directory}"
        path = directory / NAME
        header = json.dumps(job._asdict()).encode() + b"\n"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            size = _cut(path, header, first_iteration)
        except OSError as error:
            raise ValueError(f"{flag}: {error}; choose a writable directory") from error
        self._file = AppendedFile(path, flag, size)
        if not size:
            self._file.add(header)

    def add(self, iteration: int, factors: Factors) -> None:
        """Add the factors that plans made in an iteration contain."""
        self._file.add(json.dumps({"iteration": iteration, **factors._asdict()}).encode() + b"\n")

    def flush(self, last: bool = False) -> None:
        """Write the iterations since the last flush."""
        self._file.flush(last)


def _cut(path: Path, header: bytes, first_iteration: int) -> int:
    """Truncate a record before an iteration, or before the first line that does not belong to it; return its size."""
    path.touch()
    end = 0
    with path.open("r+b") as file:
        for line in file:
            if line != header if not end else (_iteration(line) or first_iteration) >= first_iteration:
                break
            end += len(line)
        file.truncate(end)
    return end


def _iteration(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["iteration"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Record:
    """The factors of consecutive iterations."""

    path: str
    first: int
    """Number of the first iteration."""
    factors: tuple[Factors, ...]

    def at(self, iteration: int) -> Factors:
        """Return the factors of an iteration; after the record's end, its last ones."""
        assert iteration >= self.first
        return self.factors[min(iteration - self.first, len(self.factors) - 1)]

    def check_start(self, iteration: int) -> None:
        """Raise ValueError if the record begins after the iteration where the run starts or resumes."""
        if iteration < self.first:
            raise ValueError(
                f"--balance-calibrate {self.path}: begins with iteration {self.first}, but this run starts with "
                f"iteration {iteration}; resume from the same checkpoint as the recorded run, or use on"
            )

    @property
    def last(self) -> int:
        """Number of the last iteration."""
        return self.first + len(self.factors) - 1


def read_record(path: str, job: Job) -> Record:
    """Read a file of CalibrationLog.

    Raises:
        ValueError: it cannot be read, is damaged, or is from a run with other ranks or layers.
    """
    flag = f"--balance-calibrate {path}"
    lines = read_text(path, MAX_BYTES, "--balance-calibrate").splitlines()
    iterations = []
    factors = []
    try:
        if len(lines) < 2:
            raise ValueError("has no iterations")
        other = _header(parse_json(lines[0]))
        for number, line in enumerate(lines[1:], 2):
            iteration, found = _entry(parse_json(line), f"line {number}")
            if iterations and iteration != iterations[-1] + 1:
                raise ValueError(f"line {number}: iteration {iteration} after iteration {iterations[-1]}")
            iterations.append(iteration)
            factors.append(found)
    except ValueError as error:
        raise ValueError(f"{flag}: is not a whole record of --balance-calibrate on ({error}); record again") from error
    if other != job:
        raise ValueError(
            f"{flag}: is from a run with {other.ranks} ranks and {other.layers} MoE layers, but this run has "
            f"{job.ranks} and {job.layers}; use the flags of the recorded run, or --balance-calibrate on"
        )
    return Record(path, iterations[0], tuple(factors))


def _header(content: Any) -> Job:
    _check_keys(content, set(Job._fields), "line 1")
    return Job(*(number_in(content[name], 1, MOST_NUMBER, f"line 1: {name}", whole=True) for name in Job._fields))


def _entry(content: Any, where: str) -> tuple[int, Factors]:
    _check_keys(content, {"iteration", *Factors._fields}, where)
    factors = (float(number_in(content[name], LEAST, MOST, f"{where}: {name}")) for name in Factors._fields)
    return number_in(content["iteration"], 1, MOST_NUMBER, f"{where}: iteration", whole=True), Factors(*factors)


def _check_keys(content: Any, keys: set[str], where: str) -> None:
    if not isinstance(content, dict) or content.keys() != keys:
        raise ValueError(f"{where}: holds something else than {', '.join(sorted(keys))}")
