"""Schedules of mini-tasks (DEMI, Section III) as data, and as text that can be parsed.

The workers of an expert's parts are joined by `+`.

hosts 0 0 1+2
mini-task       | 0    | 1    | 2
E1 TRANS 1>0    | 40.0 |      |
E1 DISPATCH 1>0 | 8.0  |      |
E1 COMPUTE 1>0  |      | 8.0  |
E1 COMBINE 0>1  |      |      | 8.0
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class MiniTaskKind(StrEnum):
    """The paper's tasks 1 to 4."""

    DISPATCH = "DISPATCH"
    """1: tokens go from their source to the worker that has the expert."""

    TRANS = "TRANS"
    """2: an expert migrates from its owner to another worker."""

    COMPUTE = "COMPUTE"
    """3: the worker computes the tokens of one source."""

    COMBINE = "COMBINE"
    """4: tokens return to their source."""


class MiniTask(NamedTuple):
    """The paper's tuple (k, a, i, j)."""

    expert: int
    task: MiniTaskKind
    source: int
    target: int
    """With `source`, the link that is crossed; for COMPUTE, the tokens' source and the worker."""

    def __str__(self) -> str:
        """Return, for example, `E3 DISPATCH 0>2`."""
        return f"E{self.expert} {self.task} {self.source}>{self.target}"

    @classmethod
    def parse(cls, text: str) -> "MiniTask":
        """Return the mini-task that prints as `text`.

        Raises:
            ValueError: `text` is not a mini-task.
        """
        match = _MINI_TASK.fullmatch(text.strip())
        if match is None or match["task"] not in list(MiniTaskKind):
            raise ValueError(f"mini-task {text!r}: give one like 'E3 DISPATCH 0>2'")
        return cls(int(match["expert"]), MiniTaskKind(match["task"]), int(match["source"]), int(match["target"]))


_MINI_TASK = re.compile(r"E(?P<expert>\d+) (?P<task>[A-Z]+) (?P<source>\d+)>(?P<target>\d+)")


@dataclass(frozen=True)
class MiniTaskSchedule:
    """The hosts of each expert, and the work of each mini-task in each slot. Here, experts are whole."""

    hosts: tuple[tuple[int, ...], ...]
    """s, [E]: the worker that computes each expert, or those of its parts."""

    mini_tasks: tuple[MiniTask, ...]

    amounts: tuple[tuple[float, ...], ...]
    """z: for each mini-task, the size done in each slot."""

    @property
    def makespan(self) -> int:
        """Number of slots until all work is done."""
        return max(map(len, self.amounts), default=0)

    @property
    def transfers(self) -> tuple[MiniTask, ...]:
        """Migrations of experts in order of completion; ties go to the earlier start."""
        busy = {
            mini_task: [slot for slot, amount in enumerate(row) if amount]
            for mini_task, row in zip(self.mini_tasks, self.amounts, strict=True)
            if mini_task.task is MiniTaskKind.TRANS
        }
        return tuple(sorted(busy, key=lambda mini_task: (busy[mini_task][-1], busy[mini_task][0], mini_task)))

    def __str__(self) -> str:
        """Return the hosts, then a table with a line per mini-task and a column per slot."""
        cells = [("mini-task", *map(str, range(self.makespan)))]
        for mini_task, row in zip(self.mini_tasks, self.amounts, strict=True):
            cells.append((str(mini_task), *(repr(amount) if amount else "" for amount in row)))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        table = [
            " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        return "\n".join([" ".join(("hosts", *("+".join(map(str, workers)) for workers in self.hosts))), *table]) + "\n"

    @classmethod
    def parse(cls, text: str) -> "MiniTaskSchedule":
        """Return the schedule that prints as `text`.

        Raises:
            ValueError: a line does not belong to a schedule.
        """
        first, header, *lines = text.splitlines()
        slots = len(header.split("|")) - 1
        word, *hosts = first.split()
        if word != "hosts" or header.split() != ["mini-task", *_columns(slots)]:
            raise ValueError(f"schedule {first!r}, {header!r}: begins with the hosts and the numbers of slots")
        rows = [_parse_row(line, slots) for line in lines]
        workers = tuple(tuple(map(int, part.split("+"))) for part in hosts)
        return cls(workers, tuple(row[0] for row in rows), tuple(row[1] for row in rows))


def _columns(slots: int) -> list[str]:
    return [part for slot in range(slots) for part in ("|", str(slot))]


def _parse_row(line: str, slots: int) -> tuple[MiniTask, tuple[float, ...]]:
    name, *cells = line.split("|")
    cells += [""] * (slots - len(cells))
    try:
        amounts = tuple(float(cell) if cell.strip() else 0.0 for cell in cells)
    except ValueError as error:
        raise ValueError(f"schedule line {line!r}: {error}") from error
    if len(amounts) != slots:
        raise ValueError(f"schedule line {line!r}: has {len(amounts)} of {slots} slots")
    return MiniTask.parse(name), amounts
