"""Checks the constraints of DEMI's schedules."""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from megatron_balance.planning.demi.problem import TOLERANCE, Problem
from megatron_balance.planning.demi.schedule import MiniTask, MiniTaskKind, MiniTaskSchedule


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


def parse(text: str) -> MiniTaskSchedule:
    """Return the schedule that prints as `text`."""
    first, _, *lines = text.splitlines()
    names, amounts = [], []
    for name, *cells in (line.split("|") for line in lines):
        expert, task, ends = name.split()
        names.append(MiniTask(int(expert[1:]), MiniTaskKind(task), *map(int, ends.split(">"))))
        amounts.append([float(cell or 0) for cell in map(str.strip, cells)])
    slots = max(map(len, amounts), default=0)
    rows = tuple((*row, *(0.0,) * (slots - len(row))) for row in amounts)
    return MiniTaskSchedule(tuple(tuple(map(int, part.split("+"))) for part in first.split()[1:]), tuple(names), rows)


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
