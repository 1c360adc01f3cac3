"""DEMI's list scheduling (Algorithm 1, lines 3 to 42), for several placements at once.

Two rules take precedence over the paper's priority. No task depends on a combine or on the computation of a worker's
own tokens, so these run only when their link or worker has no other work. And a part of an expert is useless (6b), so a
migration in progress goes first. Otherwise line 10 decides.

P is the number of (source, expert) pairs with tokens; M that of mini-tasks of one placement: P of task 1, E of task 2,
P of task 3 and P of task 4; A that of mini-tasks with available work, over all placements.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_balance.planning.demi.problem import Problem
from megatron_balance.planning.demi.schedule import MiniTask, MiniTaskKind, MiniTaskSchedule

CRUMB = 1e-9
"""Share of a mini-task below which the rest is rounding, and is done at once."""


@dataclass(frozen=True, eq=False)
class Pace:
    """When a linear program does the tasks: the mean omega_t of a unit of each task, xi(k, a, i, j) / r in line 4.

    For tokens the axes are expert, source and worker. Axes of size 1 are broadcast.
    """

    dispatch_EDD: np.ndarray
    trans_ED: np.ndarray
    compute_EDD: np.ndarray
    combine_EDD: np.ndarray

    @classmethod
    def eager(cls, problem: Problem) -> "Pace":
        """Return the pace without a linear program: every task in the first slot in which any of its kind may run."""
        first, second, third = (np.full((1, 1, 1), problem.weight(slot)) for slot in range(3))
        return cls(first, first[0], second, third)


class _Tasks:
    """The mini-tasks of placements (lines 3 to 7) and their remaining work."""

    def __init__(self, problem: Problem, hosts_BE: np.ndarray, pace: Pace) -> None:
        workers = problem.num_workers
        (placements, experts) = hosts_BE.shape
        self.expert_P, self.source_P = np.nonzero(problem.tokens_DE.T)
        expert_P = self.expert_P
        source_P = self.source_P
        expert_E = np.arange(experts)
        tokens_P = problem.tokens_DE[source_P, expert_P]
        host_BP = hosts_BE[:, expert_P]
        self.is_local_BP = host_BP == source_P
        crossing_BP = np.where(self.is_local_BP, 0.0, tokens_P)
        moved_BE = np.where(hosts_BE != problem.owner_E, problem.size_E, 0.0)
        pairs = len(expert_P)
        ends = np.cumsum([0, pairs, experts, pairs, pairs]).tolist()
        self.parts = [slice(*pair) for pair in pairwise(ends)]
        """Slices of the mini-tasks: tasks 1 to 4."""

        def joined(*parts: np.ndarray) -> np.ndarray:
            rows = [np.broadcast_to(part, (placements, part.shape[-1])) for part in parts]
            return np.concatenate(rows, axis=1)

        self.size_BM = joined(crossing_BP, moved_BE, tokens_P, crossing_BP)
        """r: size of each mini-task."""
        links = workers * workers
        resource_BM = joined(
            source_P * workers + host_BP,
            problem.owner_E * workers + hosts_BE,
            links + host_BP,
            host_BP * workers + source_P,
        )
        self.resource_BM = resource_BM + (links + workers) * np.arange(placements)[:, None]
        others = np.zeros(pairs + experts, dtype=bool)
        self.queue_BM = 3 * self.resource_BM + 1 + joined(others, self.is_local_BP, np.ones(pairs, dtype=bool))
        """Sort key: by resource, migrations in progress first, tasks that no task depends on last."""
        self.capacity = np.tile(np.concatenate([problem.passage_DD.ravel(), problem.compute_D]), placements)
        """Capacities of the links and workers of each placement."""
        shape = (experts, workers, workers)
        per_unit = joined(
            np.broadcast_to(pace.dispatch_EDD, shape)[expert_P, source_P, host_BP],
            np.broadcast_to(pace.trans_ED, shape[:2])[expert_E, hosts_BE],
            np.broadcast_to(pace.compute_EDD, shape)[expert_P, source_P, host_BP],
            np.broadcast_to(pace.combine_EDD, shape)[expert_P, source_P, host_BP],
        )
        self.priority_BM = self.size_BM * per_unit
        """xi less the weighted work done so far (line 10 without its last term)."""
        self.left_BM = self.size_BM.copy()

    def available(self) -> np.ndarray:
        """Return [B, M]: the work of each mini-task that the next slot may do (lines 16 to 33 without capacities).

        It depends on earlier slots only, so the order within a slot matters for capacities only.
        """
        first, second, third, fourth = self.parts
        done_BM = self.size_BM - self.left_BM
        available_BM = self.left_BM.copy()
        received_BP = np.where(self.is_local_BP, self.size_BM[:, third], done_BM[:, first])
        has_expert_BP = (self.left_BM[:, second] == 0)[:, self.expert_P]
        available_BM[:, third] = np.where(has_expert_BP, received_BP - done_BM[:, third], 0.0)
        returning_BP = np.where(self.is_local_BP, 0.0, done_BM[:, third] - done_BM[:, fourth])
        available_BM[:, fourth] = returning_BP
        return np.maximum(available_BM, 0.0)

    def fill(self, weight: float) -> tuple[np.ndarray, np.ndarray]:
        """Do the work of a slot with this omega_t.

        Returns:
            [B, M] the work done, and [B] the share of the slot that each placement's busiest link or worker needs.
        """
        available_BM = self.available()
        resource = self.resource_BM.ravel()
        left = self.left_BM.ravel()
        amounts = available_BM.ravel()
        needed = np.bincount(resource, weights=amounts, minlength=len(self.capacity)) / self.capacity
        # Only where not all available work can be done does the order matter
        (chosen_A,) = ((needed > 1.0)[resource] & (amounts > 0)).nonzero()
        if len(chosen_A):
            amounts[chosen_A] = self._in_order(chosen_A, amounts[chosen_A], weight)
        is_last = left - amounts <= CRUMB * self.size_BM.ravel()
        amounts[is_last] = left[is_last]
        left -= amounts
        self.priority_BM -= weight * available_BM
        return available_BM, np.minimum(needed.reshape(len(self.left_BM), -1).max(1), 1.0)

    def _in_order(self, chosen_A: np.ndarray, wanted_A: np.ndarray, weight: float) -> np.ndarray:
        """Return [A]: how much of the wanted work of these mini-tasks their resources do, by their priorities."""
        second = self.parts[1]
        untouched = self.left_BM[:, second] == self.size_BM[:, second]
        self.queue_BM[:, second] = 3 * self.resource_BM[:, second] + untouched
        priority_A = self.priority_BM.ravel()[chosen_A] - weight * self.left_BM.ravel()[chosen_A]
        order_A = np.lexsort((priority_A, self.queue_BM.ravel()[chosen_A]))
        resource_A = self.resource_BM.ravel()[chosen_A[order_A]]
        wanted_A = wanted_A[order_A]
        # Work ahead of a task in its resource's queue: a running sum that restarts with each resource
        before_A = wanted_A.cumsum() - wanted_A
        starts = np.concatenate([[0], (np.diff(resource_A) != 0).nonzero()[0] + 1])
        before_A -= np.repeat(before_A[starts], np.diff(np.append(starts, len(order_A))))
        amounts_A = np.empty_like(wanted_A)
        amounts_A[order_A] = np.minimum(wanted_A, np.maximum(self.capacity[resource_A] - before_A, 0.0))
        return amounts_A


def finishes(problem: Problem, hosts_BE: np.ndarray, pace: Pace, longest: float = math.inf) -> np.ndarray:
    """Return [B]: the end of each placement's schedule, in slots; infinity if that takes more than `longest` slots.

    The last slot counts by the share that its busiest link or worker needs, so the makespan is the end rounded up.
    """
    tasks = _Tasks(problem, hosts_BE, pace)
    finish_B = np.zeros(len(hosts_BE))
    slot = 0
    while (open_B := tasks.left_BM.any(1)).any():
        if slot >= longest:
            return np.where(open_B, np.inf, finish_B)
        _, needed_B = tasks.fill(problem.weight(slot))
        finish_B[open_B] = slot + needed_B[open_B]
        slot += 1
    return finish_B


def list_schedule(problem: Problem, hosts_E: np.ndarray, pace: Pace) -> MiniTaskSchedule:
    """Return the schedule of one placement.

    Parts of an expert on one worker have mini-tasks of the same name.
    """
    tasks = _Tasks(problem, hosts_E[None], pace)
    slots = []
    while tasks.left_BM.any():
        slots.append(tasks.fill(problem.weight(len(slots)))[0][0])
    amounts_MT = np.stack(slots, axis=1) if slots else np.zeros((tasks.size_BM.shape[1], 0))
    whole_E = problem.whole_E
    experts = problem.whole_E[tasks.expert_P]
    sources = tasks.source_P
    hosts = hosts_E[tasks.expert_P]
    owned = (whole_E, problem.owner_E, hosts_E)
    columns = ((experts, sources, hosts), owned, (experts, sources, hosts), (experts, hosts, sources))
    mini_tasks = [
        MiniTask(expert, task, source, target)
        for task, ends in zip(MiniTaskKind, columns, strict=True)
        for expert, source, target in zip(*(part.tolist() for part in ends), strict=True)
    ]
    kept = [(name, tuple(row)) for name, row in zip(mini_tasks, amounts_MT.tolist(), strict=True) if any(row)]
    workers = tuple(tuple(part.tolist()) for part in np.split(hosts_E, np.diff(whole_E).nonzero()[0] + 1))
    return MiniTaskSchedule(workers, tuple(row[0] for row in kept), tuple(row[1] for row in kept))
