"""Shared parts of the benchmarks of one device: times of work on it, and results of which some may fail.

Times on a GPU are those of its events. Before the timed calls are queued, the GPU is kept busy until the host has
queued them all, so that a time does not contain the host's: the host's time to queue a call is a number of its own.
Without CUDA, everything is timed by the host's clock and runs at tiny sizes, which tries the program and measures
nothing.
"""

import contextlib
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from megatron_balance.messages import described

WARMUP = 2
CYCLES_PER_SECOND = 2e9
"""Highest clock of a GPU. At a lower clock, it is kept busy for longer than asked."""

LONGEST_WAIT = 0.05
"""Most seconds for which a GPU is kept busy."""

UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9, "us": 1e-6}

Call = Callable[[int], object]
"""Queues the work to be timed; the argument numbers the calls, so that calls can take turns among inputs."""

Made = TypeVar("Made")


class Time(NamedTuple):
    """Seconds of a call on the device: median and quartiles."""

    seconds: float
    low: float
    high: float
    host: float
    """Seconds in which the host queues a call."""
    ahead: bool
    """Whether the host had queued all calls before the device began the first one; otherwise seconds may be the
    host's."""

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a part of the median."""
        return (self.high - self.low) / 2 / self.seconds


class Timer:
    """Times work on a device.

    Args:
        target: seconds that all timed calls together should take.
        most: largest number of timed calls; the smallest is 3.
    """

    def __init__(self, device: torch.device, target: float = 0.03, most: int = 15) -> None:
        self.device = device
        self.target = target
        self.most = most
        self.cuda = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def time(self, call: Call) -> Time:
        """Time a call after some that are not timed."""
        for number in range(WARMUP):
            call(number)
        self.synchronize()
        start = time.perf_counter()
        call(0)
        host = time.perf_counter() - start
        self.synchronize()
        whole = time.perf_counter() - start
        repeats = max(3, min(self.most, int(self.target / max(whole, 1e-9))))
        if not self.cuda:
            marks = [time.perf_counter()]
            for number in range(repeats):
                call(number)
                marks.append(time.perf_counter())
            seconds = [after - before for before, after in pairwise(marks)]
            return _time(seconds, statistics.median(seconds), True)
        found = self._events(call, repeats, 1.5 * host * repeats + 1e-3)
        # A host that was interrupted gets another chance
        return found if found.ahead else self._events(call, repeats, 8 * found.host * repeats + 1e-3)

    def _events(self, call: Call, repeats: int, wait: float) -> Time:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda._sleep(int(CYCLES_PER_SECOND * min(wait, LONGEST_WAIT)))
        start = time.perf_counter()
        for number, (before, after) in enumerate(marks):
            before.record()
            call(number)
            after.record()
        host = (time.perf_counter() - start) / repeats
        ahead = not marks[0][0].query()
        self.synchronize()
        return _time([before.elapsed_time(after) / 1000 for before, after in marks], host, ahead)


def _time(seconds: Sequence[float], host: float, ahead: bool) -> Time:
    # Clocks tick; no rate must be infinite
    low, middle, high = (max(one, 1e-7) for one in statistics.quantiles(seconds, n=4, method="inclusive"))
    return Time(middle, low, high, host, ahead)


def in_turns(make: Callable[[], Made], num_bytes: float, timer: Timer) -> list[Made]:
    """Return inputs that calls take turns among: so many that the device's cache does not keep them.

    Args:
        num_bytes: size of the inputs and results of one call.
    """
    cache = torch.cuda.get_device_properties(timer.device).L2_cache_size if timer.cuda else 1
    return [make() for _ in range(max(1, min(8, math.ceil(4 * cache / max(num_bytes, 1)))))]


class Results:
    """Measured numbers in named tables. After a failure, which is noted, the remaining work goes on.

    Args:
        output: file that is written after each section, so that a run which is stopped leaves what it has.
        seconds: sections that have not begun by then are left out.
    """

    def __init__(self, timer: Timer, output: Path | None, seconds: float) -> None:
        self.timer = timer
        self.output = output
        self.seconds = seconds
        self.start = time.perf_counter()
        self.tables: dict[str, dict[str, Any]] = {}
        self.failures: list[str] = []
        self.facts = facts(timer.device)

    def section(self, name: str, measure: Callable[[], object]) -> None:
        """Call a function that measures; note if it fails, or if there is no time left to begin."""
        if time.perf_counter() - self.start > self.seconds:
            self.failures.append(f"{name}: left out, {self.seconds:g} s are over")
            return
        self._attempt(name, measure)
        if self.timer.cuda:
            # Some errors stay with the device: everything after them fails, and must be reported
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
        self.write()

    def rate(
        self,
        table: str,
        key: Mapping[str, Any],
        call: Call,
        *,
        flops: float = 0,
        num_bytes: float = 0,
        parts: int = 1,
        timer: Timer | None = None,
    ) -> None:
        """Time a call and add its rate to a table, or its microseconds where neither operations nor bytes are given.

        Args:
            key: what was measured, as named texts and numbers; the same names in all rows of a table.
            parts: number of equal parts of a call, one of which counts.
            timer: default: that of all results.
        """
        unit, amount = ("TFLOP/s", flops) if flops else ("GB/s", num_bytes) if num_bytes else ("us", 0)

        def measure() -> None:
            found = (timer or self.timer).time(call)
            value = amount / found.seconds / UNITS[unit] if amount else found.seconds / parts / UNITS[unit]
            more = {"seconds": found.seconds, "host_us": 1e6 * found.host / parts, "ahead": found.ahead}
            self.add(table, unit, key, value, found.spread, **more)

        self._attempt(f"{table}: {', '.join(map(str, key.values()))}", measure)

    def add(
        self, table: str, unit: str, key: Mapping[str, Any], value: float, spread: float | None = None, **more: Any
    ) -> None:
        """Add a row to a table."""
        rows = self.tables.setdefault(table, {"unit": unit, "columns": [*key], "rows": []})["rows"]
        rows.append({**key, "value": value, "spread": spread, **more})

    def _attempt(self, name: str, measure: Callable[[], object]) -> None:
        try:
            measure()
        except Exception as error:
            self.failures.append(f"{name}: {described(error, 400)}")
            print(f"FAILED {self.failures[-1]}", flush=True)

    def write(self) -> None:
        """Write everything so far."""
        if self.output is not None:
            part = self.output.with_name(f"{self.output.name}.part")
            content = {"facts": self.facts, "tables": self.tables, "failures": self.failures}
            part.write_text(json.dumps(content, indent=1) + "\n")
            part.replace(self.output)

    def finish(self, across: Mapping[str, Sequence[str]] | None = None) -> int:
        """Write and print everything; return the exit status.

        Args:
            across: columns whose values become columns of the printed table, by table.
        """
        self.facts["seconds"] = round(time.perf_counter() - self.start, 1)
        self.write()
        print(*(f"{name}: {value}" for name, value in self.facts.items()), sep="\n")
        for name, table in self.tables.items():
            print(f"\n{name}, {table['unit']}\n{pictured(table, (across or {}).get(name, ()))}")
        print(*(f"FAILED {failure}" for failure in self.failures), sep="\n", flush=True)
        return int(bool(self.failures))


def pictured(table: Mapping[str, Any], across: Sequence[str] = ()) -> str:
    """Return a table as lines of text, `*` at numbers that may contain time of the host."""
    down = [column for column in table["columns"] if column not in across]
    heads = [*dict.fromkeys(" ".join(str(row[column]) for column in across) or "value" for row in table["rows"])]
    lines: dict[tuple, dict[str, str]] = {}
    for row in table["rows"]:
        head = " ".join(str(row[column]) for column in across) or "value"
        spread = "" if row["spread"] is None else f" ±{100 * row['spread']:.0f}%"
        lines.setdefault(tuple(str(row[column]) for column in down), {})[head] = (
            f"{row['value']:.4g}{spread}{'' if row.get('ahead', True) else '*'}"
        )
    cells = [[*down, *heads], *([*key, *(found.get(head, "-") for head in heads)] for key, found in lines.items())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def facts(device: torch.device) -> dict[str, Any]:
    """Return the device, the date, and the versions of programs."""
    found: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return found


def device_of(cpu: bool) -> torch.device:
    """Return the device to measure: the GPU, or with `--cpu` the host, where the benchmark is only tried.

    Raises:
        SystemExit: there is no GPU.
    """
    if cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --cpu tries the program at tiny sizes")
    return torch.device("cuda", torch.cuda.current_device())
