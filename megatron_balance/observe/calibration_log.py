"""The factors by which plans were calibrated, as JSON lines (`--balance-calibrate`).

{"ranks": 4, "layers": 2}
{"iteration": 1, "exchange": 1.0, "experts": 1.0, "trans": 1.0, "agg": 1.0}
{"iteration": 2, "exchange": 1.31, "experts": 0.94, "trans": 1.0, "agg": 1.0}

`ranks` is the number of processes, and `layers` the number of MoE layers. Numbers are read back exactly.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_balance.cost.calibration import LEAST, MOST, Factors
from megatron_balance.files.reading import MIB, number_in, parse_json, read_text
from megatron_balance.observe.optional import AppendedFile, keep_lines, writable

NAME = "calibration.jsonl"

MAX_BYTES = 256 * MIB
"""Maximum size of a file that is replayed: two million iterations."""


class Job(NamedTuple):
    """Properties that a record has in common with the run that replays it."""

    ranks: int
    """Number of processes."""
    layers: int
    """Number of MoE layers."""


HEADER = dict.fromkeys(Job._fields, (1, 2**31))
LINE = {"iteration": (1, 2**31)} | dict.fromkeys(Factors._fields, (LEAST, MOST))
"""Names of the numbers in a line, with their minimum and maximum; if the minimum is an integer, so is the number."""


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

        def belongs(line: bytes, is_first: bool) -> bool:
            return line == header if is_first else _iteration(line, first_iteration) < first_iteration

        with writable(flag):
            self._file = AppendedFile(path, flag, keep_lines(path, belongs))
        if not self._file.size:
            self._file.add(header)

    def add(self, iteration: int, factors: Factors) -> None:
        """Add the factors that plans made in an iteration contain."""
        self._file.add(json.dumps({"iteration": iteration, **factors._asdict()}).encode() + b"\n")

    def flush(self, last: bool = False) -> None:
        """Write the iterations since the last flush."""
        self._file.flush(last)


def _iteration(line: bytes, default: int) -> int:
    try:
        return int(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return default


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
        """Return the factors of an iteration; after the record's end, its last ones."""
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
        ValueError: it cannot be read, is damaged, or is from a run with other ranks or layers.
    """
    flag = f"--balance-calibrate {path}"
    header, *lines = read_text(path, MAX_BYTES, "--balance-calibrate").splitlines() or [""]
    try:
        recorded = Job(**_numbers(header, HEADER, 1))
        entries = [_numbers(line, LINE, number) for number, line in enumerate(lines, 2)]
        iterations = [entry.pop("iteration") for entry in entries]
        if not iterations:
            raise ValueError("has no iterations")
        if iterations != [*range(iterations[0], iterations[0] + len(iterations))]:
            raise ValueError("its iterations are not consecutive")
        factors = tuple(Factors(*map(float, entry.values())) for entry in entries)
    except ValueError as error:
        raise ValueError(f"{flag}: is not a whole record of --balance-calibrate on ({error}); record again") from error
    if recorded != job:
        raise ValueError(
            f"{flag}: is from a run with {recorded.ranks} ranks and {recorded.layers} MoE layers, but this run has "
            f"{job.ranks} and {job.layers}; use the flags of the recorded run, or --balance-calibrate on"
        )
    return CalibrationRecord(path, iterations[0], factors)


def _numbers(line: str, bounds: Mapping[str, tuple[float, float]], number: int) -> dict[str, Any]:
    content = parse_json(line)
    if not isinstance(content, dict) or content.keys() != bounds.keys():
        raise ValueError(f"line {number}: holds something else than {', '.join(bounds)}")
    return {
        name: number_in(content[name], low, high, f"line {number}: {name}", whole=isinstance(low, int))
        for name, (low, high) in bounds.items()
    }
