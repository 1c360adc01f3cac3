"""Calibration factors of plans, as JSON lines (`--balance-calibrate`).

{"ranks": 4, "layers": 2}
{"iteration": 1, "exchange": 1.0, "experts": 1.0, "trans": 1.0, "agg": 1.0}
{"iteration": 2, "exchange": 1.31, "experts": 0.94, "trans": 1.0, "agg": 1.0}

`ranks` is the number of processes, and `layers` the number of MoE layers. Numbers are read back exactly.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_balance.cost.calibration import LEAST, MOST, Factors
from megatron_balance.files.reading import MIB, number_in, parse_json, read_text
from megatron_balance.observe.optional import AppendedFile

NAME = "calibration.jsonl"

MAX_BYTES = 256 * MIB
"""Maximum size of a replayed file: two million iterations."""


class Job(NamedTuple):
    """Number of processes and of MoE layers: equal in a recorded run and the run that replays its record."""

    ranks: int
    layers: int


class CalibrationLog:
    """Writes `calibration.jsonl` into the directory of `--balance-log-dir`.

    An existing file keeps its iterations before `first_iteration`, where the run starts or resumes.

    Raises:
        ValueError: the directory cannot be written to.
    """

    def __init__(self, directory: Path, job: Job, first_iteration: int) -> None:
        header = json.dumps(job._asdict()).encode() + b"\n"

        def belongs(line: bytes, is_first: bool) -> bool:
            try:
                return line == header if is_first else int(json.loads(line)["iteration"]) < first_iteration
            except (ValueError, KeyError, TypeError):
                return False

        self._file = AppendedFile.continued(directory / NAME, f"--balance-log-dir {directory}", belongs)
        if not self._file.size:
            self._file.add(header)

    def add(self, iteration: int, factors: Factors) -> None:
        """Add the factors of the plans made in an iteration."""
        self._file.add(json.dumps({"iteration": iteration, **factors._asdict()}).encode() + b"\n")

    def flush(self, last: bool = False) -> None:
        """Write the iterations since the last flush."""
        self._file.flush(last)


@dataclass(frozen=True)
class CalibrationRecord:
    """The factors of consecutive iterations."""

    path: str
    first: int
    """Number of the first iteration."""
    factors: tuple[Factors, ...]

    @property
    def last(self) -> int:
        """Number of the last iteration."""
        return self.first + len(self.factors) - 1

    def at(self, iteration: int) -> Factors:
        """Return the factors of an iteration; after the end of the record, its last factors."""
        assert iteration >= self.first
        return self.factors[min(iteration, self.last) - self.first]

    def check_start(self, iteration: int) -> None:
        """Raise ValueError if the record begins after the iteration where the run starts or resumes."""
        if iteration < self.first:
            raise ValueError(
                f"--balance-calibrate {self.path}: begins with iteration {self.first}, but this run starts with "
                f"iteration {iteration}; resume from the same checkpoint as the recorded run, or use on"
            )


def read_record(path: str, job: Job) -> CalibrationRecord:
    """Read a file of CalibrationLog.

    Raises:
        ValueError: it cannot be read, is damaged, or is from a run with other numbers of ranks or layers.
    """
    flag = f"--balance-calibrate {path}"
    header, *lines = read_text(path, MAX_BYTES, "--balance-calibrate").splitlines() or [""]
    try:
        recorded = Job(*_numbers(header, 1, Job._fields))
        entries = [_numbers(line, number, ("iteration",), Factors._fields) for number, line in enumerate(lines, 2)]
        iterations = [int(entry[0]) for entry in entries]
        if not iterations:
            raise ValueError("has no iterations")
        if iterations != [*range(iterations[0], iterations[0] + len(iterations))]:
            raise ValueError("its iterations are not consecutive")
    except ValueError as error:
        raise ValueError(f"{flag}: is not a whole record of --balance-calibrate on ({error}); record again") from error
    if recorded != job:
        raise ValueError(
            f"{flag}: is from a run with {recorded.ranks} ranks and {recorded.layers} MoE layers, but this run has "
            f"{job.ranks} and {job.layers}; use the flags of the recorded run, or --balance-calibrate on"
        )
    return CalibrationRecord(path, iterations[0], tuple(Factors(*map(float, entry[1:])) for entry in entries))


def _numbers(line: str, number: int, whole: tuple[str, ...], factors: tuple[str, ...] = ()) -> list:
    content = parse_json(line)
    if not isinstance(content, dict) or content.keys() != {*whole, *factors}:
        raise ValueError(f"line {number}: holds something other than {', '.join(whole + factors)}")
    return [number_in(content[name], 1, sys.maxsize, f"line {number}: {name}", whole=True) for name in whole] + [
        number_in(content[name], LEAST, MOST, f"line {number}: {name}") for name in factors
    ]
