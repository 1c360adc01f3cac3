"""DEMI's list scheduling (Algorithm 1, lines 3 to 42), for several placements at once.

Two rules precede the paper's priority. First, no task depends on a combine or on a worker's computation of its own
tokens, so these tasks run only when their link or worker is otherwise idle. Second, a part of an expert is useless
(6b), so a migration in progress goes first. Otherwise, line 10 decides.

J counts the (source, expert) pairs with tokens. Q counts the mini-tasks of one placement (J of task 1, E of task 2, J
of task 3, J of task 4), or the mini-tasks of all placements that have available work.
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
    """Mean omega_t at which a linear program does a unit of each task, xi(k, a, i, j) / r in line 4. For tokens, the
    axes are expert, source and worker. Axes of size 1 are broadcast."""

    dispatch_EDD: np.ndarray
    trans_ED: np.ndarray
    compute_EDD: np.ndarray
    combine_EDD: np.ndarray

    @classmethod
    def eager(cls, problem: Problem) -> "Pace":
        """Return the pace without a linear program: every task in the first slot possible for its kind."""
        first, second, third = (np.full((1, 1, 1), problem.weight(slot)) for slot in range(3))
        return cls(first, first[0], second, third)


class _Tasks:
    """The mini-tasks of placements (lines 3 to 7), with their remaining work."""

    def __init__(self, problem: Problem, hosts_BE: np.ndarray, pace: Pace) -> None:
        workers = problem.num_workers
        (placements, experts) = hosts_BE.shape
        self.expert_J, self.source_J = np.nonzero(problem.tokens_DE.T)
        expert_J = self.expert_J
        source_J = self.source_J
        expert_E = np.arange(experts)
        tokens_J = problem.tokens_DE[source_J, expert_J]
        host_BJ = hosts_BE[:, expert_J]
        self.is_local_BJ = host_BJ == source_J
        crossing_BJ = np.where(self.is_local_BJ, 0.0, tokens_J)
        moved_BE = np.where(hosts_BE != problem.owner_E, problem.size_E, 0.0)
        pairs = len(expert_J)
        ends = np.cumsum([0, pairs, experts, pairs, pairs]).tolist()
        self.parts = [slice(*pair) for pair in pairwise(ends)]
        """Slices of the mini-tasks: tasks 1 to 4."""

        def joined(*parts: np.ndarray) -> np.ndarray:
            rows = [np.broadcast_to(part, (placements, part.shape[-1])) for part in parts]
            return np.concatenate(rows, axis=1)

        self.size_BQ = joined(crossing_BJ, moved_BE, tokens_J, crossing_BJ)
        """r: size of each mini-task."""
        links = workers * workers
        resource_BQ = joined(
            source_J * workers + host_BJ,
            problem.owner_E * workers + hosts_BE,
            links + host_BJ,
            host_BJ * workers + source_J,
        )
        self.resource_BQ = resource_BQ + (links + workers) * np.arange(placements)[:, None]
        others = np.zeros(pairs + experts, dtype=bool)
        self.queue_BQ = 3 * self.resource_BQ + 1 + joined(others, self.is_local_BJ, np.ones(pairs, dtype=bool))
        """Sort key: by resource; migrations in progress first, tasks that no task depends on last."""
        self.capacity = np.tile(np.concatenate([problem.passage_DD.ravel(), problem.compute_D]), placements)
        """Capacities of the links and workers of each placement."""
        shape = (experts, workers, workers)
        per_unit = joined(
            np.broadcast_to(pace.dispatch_EDD, shape)[expert_J, source_J, host_BJ],
            np.broadcast_to(pace.trans_ED, shape[:2])[expert_E, hosts_BE],
            np.broadcast_to(pace.compute_EDD, shape)[expert_J, source_J, host_BJ],
            np.broadcast_to(pace.combine_EDD, shape)[expert_J, source_J, host_BJ],
        )
        self.priority_BQ = self.size_BQ * per_unit
        """xi minus the weighted work done so far (line 10 without its last term)."""
        self.left_BQ = self.size_BQ.copy()

    def available(self) -> np.ndarray:
        """Return [B, Q]: each mini-task's work that the next slot may do (lines 16 to 33, ignoring capacities). It
        depends only on earlier slots, so the order within a slot matters only for capacities."""
        first, second, third, fourth = self.parts
        done_BQ = self.size_BQ - self.left_BQ
        available_BQ = self.left_BQ.copy()
        received_BJ = np.where(self.is_local_BJ, self.size_BQ[:, third], done_BQ[:, first])
        has_expert_BJ = (self.left_BQ[:, second] == 0)[:, self.expert_J]
        available_BQ[:, third] = np.where(has_expert_BJ, received_BJ - done_BQ[:, third], 0.0)
        returning_BJ = np.where(self.is_local_BJ, 0.0, done_BQ[:, third] - done_BQ[:, fourth])
        available_BQ[:, fourth] = returning_BJ
        return np.maximum(available_BQ, 0.0)

    def fill(self, weight: float) -> tuple[np.ndarray, np.ndarray]:
        """Do the work of a slot with this omega_t.

        Returns:
            [B, Q] the work done, and [B] the share of the slot that each placement's busiest link or worker needs.
        """
        available_BQ = self.available()
        resource = self.resource_BQ.ravel()
        left = self.left_BQ.ravel()
        amounts = available_BQ.ravel()
        needed = np.bincount(resource, weights=amounts, minlength=len(self.capacity)) / self.capacity
        # The order matters only where not all available work can be done
        (chosen_Q,) = ((needed > 1.0)[resource] & (amounts > 0)).nonzero()
        if len(chosen_Q):
            amounts[chosen_Q] = self._in_order(chosen_Q, amounts[chosen_Q], weight)
        is_last = left - amounts <= CRUMB * self.size_BQ.ravel()
        amounts[is_last] = left[is_last]
        left -= amounts
        self.priority_BQ -= weight * available_BQ
        return available_BQ, np.minimum(needed.reshape(len(self.left_BQ), -1).max(1), 1.0)

    def _in_order(self, chosen_Q: np.ndarray, wanted_Q: np.ndarray, weight: float) -> np.ndarray:
        """Return [Q]: the part of the wanted work that the mini-tasks' resources do, by priority."""
        second = self.parts[1]
        untouched = self.left_BQ[:, second] == self.size_BQ[:, second]
        self.queue_BQ[:, second] = 3 * self.resource_BQ[:, second] + untouched
        priority_Q = self.priority_BQ.ravel()[chosen_Q] - weight * self.left_BQ.ravel()[chosen_Q]
        order_Q = np.lexsort((priority_Q, self.queue_BQ.ravel()[chosen_Q]))
        resource_Q = self.resource_BQ.ravel()[chosen_Q[order_Q]]
        wanted_Q = wanted_Q[order_Q]
        # Work ahead of a task in its resource's queue: a prefix sum that restarts with each resource
        before_Q = wanted_Q.cumsum() - wanted_Q
        starts = np.concatenate([[0], (np.diff(resource_Q) != 0).nonzero()[0] + 1])
        before_Q -= np.repeat(before_Q[starts], np.diff(np.append(starts, len(order_Q))))
        amounts_Q = np.empty_like(wanted_Q)
        amounts_Q[order_Q] = np.minimum(wanted_Q, np.maximum(self.capacity[resource_Q] - before_Q, 0.0))
        return amounts_Q


def finishes(problem: Problem, hosts_BE: np.ndarray, pace: Pace, longest: float = math.inf) -> np.ndarray:
    """Return [B]: the end of each placement's schedule, in slots; infinity beyond `longest` slots. The last slot counts
    by the share that its busiest link or worker needs, so the makespan is the end rounded up."""
    tasks = _Tasks(problem, hosts_BE, pace)
    finish_B = np.zeros(len(hosts_BE))
    slot = 0
    while (open_B := tasks.left_BQ.any(1)).any():
        if slot >= longest:
            return np.where(open_B, np.inf, finish_B)
        _, needed_B = tasks.fill(problem.weight(slot))
        finish_B[open_B] = slot + needed_B[open_B]
        slot += 1
    return finish_B


def list_schedule(problem: Problem, hosts_E: np.ndarray, pace: Pace) -> MiniTaskSchedule:
    """Return the schedule of one placement. Parts of an expert on one worker have mini-tasks of the same name."""
    tasks = _Tasks(problem, hosts_E[None], pace)
    slots = []
    while tasks.left_BQ.any():
        slots.append(tasks.fill(problem.weight(len(slots)))[0][0])
    amounts_QU = np.stack(slots, axis=1) if slots else np.zeros((tasks.size_BQ.shape[1], 0))
    whole_E = problem.whole_E
    experts = problem.whole_E[tasks.expert_J]
    sources = tasks.source_J
    hosts = hosts_E[tasks.expert_J]
    owned = (whole_E, problem.owner_E, hosts_E)
    columns = ((experts, sources, hosts), owned, (experts, sources, hosts), (experts, hosts, sources))
    mini_tasks = [
        MiniTask(expert, task, source, target)
        for task, ends in zip(MiniTaskKind, columns, strict=True)
        for expert, source, target in zip(*(part.tolist() for part in ends), strict=True)
    ]
    kept = [(name, tuple(row)) for name, row in zip(mini_tasks, amounts_QU.tolist(), strict=True) if any(row)]
    workers = tuple(tuple(part.tolist()) for part in np.split(hosts_E, np.diff(whole_E).nonzero()[0] + 1))
    return MiniTaskSchedule(workers, tuple(row[0] for row in kept), tuple(row[1] for row in kept))
