"""The least makespan of a small DEMI problem, by a mixed-integer program that chooses placement and schedule together.

In the shapes, D counts workers and T time slots.
"""

import math

import numpy as np
from scipy.optimize import milp

from megatron_balance.planning.demi.problem import Problem
from megatron_balance.planning.demi.program import ABSENT, ProgramRows


def least_makespan(problem: Problem, most: int) -> int | None:
    """Return the exact minimum number of slots for all tasks, or None if it exceeds `most`.

    This is problem (7) with whole experts and the intended form of (6b), with a binary variable per expert, worker and
    slot, but with the number of used slots as the objective.
    """
    return _Exact(problem, most).solve()


class _Exact:
    """Variables and constraints of the mixed-integer program; axes of tokens are expert, source, worker and slot."""

    def __init__(self, problem: Problem, slots: int) -> None:
        self.problem = problem
        self.slots = slots
        self.count = 0
        workers = problem.num_workers
        self.apart_DD = ~np.eye(workers, dtype=bool)
        self.foreign_ED = problem.owner_E[:, None] != np.arange(workers)
        self.host_ED, self.used_T = self._variables(self.foreign_ED.shape), self._variables((slots,))
        self.arrived_EDT = self._variables((*self.foreign_ED.shape, slots))
        self.binaries = self.count
        shape = (problem.num_experts, workers, workers, slots)
        self.dispatch, self.compute, self.combine = (self._variables(shape) for _ in range(3))
        for crossing in (self.dispatch, self.combine):
            crossing[:, ~self.apart_DD] = ABSENT
        self.trans_EDT = np.where(self.foreign_ED[..., None], self._variables(self.arrived_EDT.shape), ABSENT)
        self.equal, self.most = ProgramRows(), ProgramRows()

    def _variables(self, shape: tuple[int, ...]) -> np.ndarray:
        self.count += math.prod(shape)
        return np.arange(self.count - math.prod(shape), self.count).reshape(shape)

    def solve(self) -> int | None:
        self._places()
        self._capacities()
        self._order()
        costs = np.zeros(self.count)
        costs[self.used_T] = 1
        equal = self.equal.matrix(self.count)
        most = self.most.matrix(self.count)
        binary = np.arange(self.count) < self.binaries
        # Binary variables are bounded by 1 in rows
        bounded = ProgramRows()
        bounded.put(bounded.new(self.binaries, 1.0), np.arange(self.binaries), 1.0)
        constraints = [
            (equal, self.equal.bound, self.equal.bound),
            (most, np.full(len(self.most.bound), -np.inf), self.most.bound),
            (bounded.matrix(self.count), np.zeros(self.binaries), bounded.bound),
        ]
        answer = milp(costs, integrality=binary.astype(int), constraints=constraints, options={"mip_rel_gap": 0})
        assert answer.status in (0, 2), answer.message
        return None if answer.x is None else round(answer.fun)

    def _places(self) -> None:
        """Add constraints (1) to (4) and the bound on guests."""
        problem = self.problem
        tokens_ED = self.problem.tokens_DE.T
        self.equal.put(self.equal.new(problem.num_experts, 1.0)[:, None], self.host_ED, 1.0)
        for task, present_DD in ((self.dispatch, self.apart_DD), (self.combine, self.apart_DD), (self.compute, True)):
            rows = self.equal.new(task.shape[:-1], 0.0)
            self.equal.put(rows[..., None], task, 1.0)
            self.equal.put(rows, self.host_ED[:, None], -np.where(present_DD, tokens_ED[:, :, None], 0.0))
        rows = self.equal.new(self.host_ED.shape, 0.0)
        self.equal.put(rows[..., None], self.trans_EDT, 1.0)
        self.equal.put(rows, self.host_ED, -problem.size_E[:, None] * self.foreign_ED)
        for room_D, sizes_E1 in (
            (problem.token_room_D, problem.load_E[:, None]),
            (problem.expert_room_D, problem.size_E[:, None]),
            (np.minimum(problem.most_guests, problem.num_experts), self.foreign_ED.astype(float)),
        ):
            self.most.put(self.most.new(problem.num_workers, room_D), self.host_ED, sizes_E1)

    def _capacities(self) -> None:
        """Add constraints (5a) and (5b) for the slots in use, which are the first ones."""
        problem = self.problem
        workers = self.problem.num_workers
        links = self.most.new((workers, workers, self.slots), 0.0)
        self.most.put(links, self.dispatch, 1.0)
        self.most.put(links[problem.owner_E], self.trans_EDT, 1.0)
        self.most.put(links.swapaxes(0, 1), self.combine, 1.0)
        self.most.put(links, self.used_T, -np.where(self.apart_DD, problem.link_DD, 0.0)[..., None])
        computers = self.most.new((workers, self.slots), 0.0)
        self.most.put(computers, self.compute, 1.0)
        self.most.put(computers, self.used_T, -problem.compute_D[:, None])
        in_order = self.most.new(self.slots - 1, 0.0)
        self.most.put(in_order, self.used_T[1:], 1.0)
        self.most.put(in_order, self.used_T[:-1], -1.0)

    def _order(self) -> None:
        """Add constraints (6a) to (6e)."""
        up_to = np.tri(self.slots)
        before = np.tri(self.slots, k=-1)
        remote = np.where(self.apart_DD[..., None], self.compute, ABSENT)
        for later, earlier in ((remote, self.dispatch), (self.combine, remote)):
            rows = self.most.new(later.shape, 0.0)[..., None]
            self.most.put(rows, later[..., None, :], up_to)
            self.most.put(rows, earlier[..., None, :], -before)
        rows = self.most.new(self.compute.shape, 0.0)
        foreign = np.where(self.foreign_ED[:, None, :, None], self.compute, ABSENT)
        self.most.put(rows[..., None], foreign[..., None, :], up_to)
        tokens = self.problem.tokens_DE.T[:, :, None, None]
        self.most.put(rows, self.arrived_EDT[:, None], -tokens * self.foreign_ED[:, None, :, None])
        rows = self.most.new(self.arrived_EDT.shape, 0.0)
        self.most.put(rows, self.arrived_EDT, self.problem.size_E[:, None, None])
        self.most.put(rows[..., None], self.trans_EDT[..., None, :], -before)
