"""Schedules of mini-tasks (DEMI, Section III) as data and as text.

The workers that host an expert's parts are joined by `+`.

hosts 0 0 1+2
mini-task       | 0    | 1    | 2
E1 TRANS 1>0    | 40.0 |      |
E1 DISPATCH 1>0 | 8.0  |      |
E1 COMPUTE 1>0  |      | 8.0  |
E1 COMBINE 0>1  |      |      | 8.0
"""

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
    """Other end of the link from `source`; for COMPUTE, the worker that computes `source`'s tokens."""

    def __str__(self) -> str:
        """Return a text such as `E3 DISPATCH 0>2`."""
        return f"E{self.expert} {self.task} {self.source}>{self.target}"


@dataclass(frozen=True)
class MiniTaskSchedule:
    """Hosts of each (whole) expert, and the work of each mini-task in each slot."""

    hosts: tuple[tuple[int, ...], ...]
    """s, [E]: the workers that compute each expert or its parts."""
    mini_tasks: tuple[MiniTask, ...]

    amounts: tuple[tuple[float, ...], ...]
    """z: for each mini-task, the size done in each slot."""

    @property
    def makespan(self) -> int:
        """Number of slots until all work is done."""
        return max(map(len, self.amounts), default=0)

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
