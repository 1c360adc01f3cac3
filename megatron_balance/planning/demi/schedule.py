"""Schedules of mini-tasks (DEMI, Section III) as data, as text that can be parsed, and the check of their constraints.

The workers of an expert's parts are joined by `+`.

hosts 0 0 1+2
mini-task       | 0    | 1    | 2
E1 TRANS 1>0    | 40.0 |      |
E1 DISPATCH 1>0 | 8.0  |      |
E1 COMPUTE 1>0  |      | 8.0  |
E1 COMBINE 0>1  |      |      | 8.0
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_balance.planning.demi.problem import TOLERANCE, Problem


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


def check(problem: Problem, schedule: MiniTaskSchedule) -> list[str]:
    """Return the violations of (1) to (6e) and of the bound on guests, each with the equation's number."""
    hosts_E = np.array([*chain.from_iterable(schedule.hosts)])
    parts = np.repeat(np.arange(len(schedule.hosts)), [*map(len, schedule.hosts)])
    if not np.array_equal(parts, problem.whole_E) or not ((hosts_E >= 0) & (hosts_E < problem.num_workers)).all():
        return [f"(1): hosts {schedule.hosts} of {problem.num_experts} experts on {problem.num_workers} workers"]
    done = _Done(problem, hosts_E, schedule)
    problems = [
        f"{name}: worker {worker} has {used[worker]:g} of {room[worker]:g}"
        for name, (used,), room in zip(
            ("(3a)", "(3b)", "guests"), problem.use(hosts_E[None]), problem.rooms(), strict=True
        )
        for worker in np.flatnonzero(used > room)
    ]
    return [*problems, *done.workloads(), *done.capacities(), *done.order()]


class _Done:
    """Work of a schedule: for each task, [E, D, D, T] by whole expert, source, target and slot."""

    def __init__(self, problem: Problem, hosts_E: np.ndarray, schedule: MiniTaskSchedule) -> None:
        """`hosts_E`: the worker of each expert of the problem, which may be a part."""
        self.problem = problem
        workers = problem.num_workers
        slots = schedule.makespan
        experts, (_, first_E) = len(schedule.hosts), np.unique(problem.whole_E, return_index=True)
        self.owner_E = problem.owner_E[first_E]
        size_E = problem.size_E[first_E]
        self.tokens_EDD = np.zeros((experts, workers, workers))
        """Axes: whole expert, source, worker."""
        np.add.at(self.tokens_EDD.swapaxes(1, 2), (problem.whole_E, hosts_E), problem.tokens_DE.T)
        self.moved_ED = np.zeros((experts, workers))
        """Sizes of whole experts that workers receive, one for each part."""
        np.add.at(self.moved_ED, (problem.whole_E, hosts_E), size_E[problem.whole_E])
        self.moved_ED[np.arange(experts), self.owner_E] = 0.0
        shape = (experts, workers, workers, slots)
        self.by_task = {task: np.zeros(shape) for task in MiniTaskKind}
        for (expert, task, source, target), row in zip(schedule.mini_tasks, schedule.amounts, strict=True):
            self.by_task[task][expert, source, target] += row

    def workloads(self) -> Iterator[str]:
        """Yield violations of (2a) to (2d) with (4), and of (7b)."""
        workers = self.problem.num_workers
        tokens = self.tokens_EDD
        crossing = tokens * ~np.eye(workers, dtype=bool)
        moved = (self.owner_E[:, None] == np.arange(workers))[:, :, None] * self.moved_ED[:, None, :]
        wanted = {
            MiniTaskKind.DISPATCH: ("(2a)", crossing),
            MiniTaskKind.TRANS: ("(2b)", moved),
            MiniTaskKind.COMPUTE: ("(2c)", tokens),
            MiniTaskKind.COMBINE: ("(2d)", crossing.swapaxes(1, 2)),
        }
        for task, (equation, sizes) in wanted.items():
            amounts = self.by_task[task]
            for cell in np.argwhere(amounts < 0):
                yield f"(7b): {_name(task, cell)} is negative in slot {cell[3]}"
            wrong = np.abs(amounts.sum(-1) - sizes) > TOLERANCE * np.maximum(sizes, amounts.sum(-1))
            for cell in np.argwhere(wrong):
                yield f"(4) with {equation}: {_name(task, cell)} is not done as a whole"

    def capacities(self) -> Iterator[str]:
        """Yield violations of (5a) and (5b)."""
        crossing = (
            self.by_task[task].sum(0) for task in (MiniTaskKind.DISPATCH, MiniTaskKind.TRANS, MiniTaskKind.COMBINE)
        )
        for source, target, slot in np.argwhere(sum(crossing) > self.problem.passage_DD[..., None] * (1 + TOLERANCE)):
            yield f"(5a): too much on the link {source}>{target} in slot {slot}"
        computed_DT = self.by_task[MiniTaskKind.COMPUTE].sum((0, 1))
        for worker, slot in np.argwhere(computed_DT > self.problem.compute_D[:, None] * (1 + TOLERANCE)):
            yield f"(5b): too much on worker {worker} in slot {slot}"

    def order(self) -> Iterator[str]:
        """Yield violations of (6a) to (6e): the inputs of a slot's work must be ready before the slot."""
        ready = {task: _before(amounts) for task, amounts in self.by_task.items()}
        done = {task: amounts.cumsum(-1) for task, amounts in self.by_task.items()}
        away_DD1 = ~np.eye(self.problem.num_workers, dtype=bool)[..., None]
        slack = TOLERANCE * self.tokens_EDD.sum(2)[:, :, None, None]
        computed = done[MiniTaskKind.COMPUTE]
        early = (computed > ready[MiniTaskKind.DISPATCH] + slack) & away_DD1
        yield from (
            f"(6a), (6d): {_name(MiniTaskKind.COMPUTE, cell)} before its tokens in slot {cell[3]}"
            for cell in np.argwhere(early)
        )
        returned = done[MiniTaskKind.COMBINE].swapaxes(1, 2)
        early = returned > ready[MiniTaskKind.COMPUTE] + slack
        yield from (
            f"(6c), (6e): {_name(MiniTaskKind.COMBINE, cell[[0, 2, 1]])} before COMPUTE in slot {cell[3]}"
            for cell in np.argwhere(early)
        )
        arrived_EDT = ready[MiniTaskKind.TRANS].sum(1)
        missing_EDT = arrived_EDT < self.moved_ED[..., None] * (1 - TOLERANCE)
        early = (computed > slack) & missing_EDT[:, None]
        yield from (
            f"(6b): {_name(MiniTaskKind.COMPUTE, cell)} before the expert in slot {cell[3]}"
            for cell in np.argwhere(early)
        )


def _before(amounts: np.ndarray) -> np.ndarray:
    """Return the work done before each slot."""
    return amounts.cumsum(-1) - amounts


def _name(task: MiniTaskKind, cell: Sequence[int] | np.ndarray) -> MiniTask:
    expert, source, target = map(int, cell[:3])
    return MiniTask(expert, task, source, target)
