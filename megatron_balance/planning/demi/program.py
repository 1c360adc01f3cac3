"""DEMI's linear program: (7) with (1) to (6e). Shares of workers relax the choice of one worker per expert.

Arrays of variables hold variables' indices, or ABSENT. Arrays of rows hold constraints' indices.

Tasks 1, 3 and 4 are summed over all experts, so the program has E times fewer variables for tokens than the paper's.
The optimum is the same except for (6b): experts take part in the work in proportion to their tokens, and (4), (5a),
(5b), (6a) and (6c) hold for each expert's part if they hold for the sum.
"""

from dataclasses import dataclass

import numpy as np
import scipy  # imports its parts at their first use, so that a process which does not use them starts sooner

from megatron_balance.planning.demi.listing import Pace
from megatron_balance.planning.demi.problem import Problem

ABSENT = -1

NEGLIGIBLE = 1e-9
"""Share of the largest expert's tokens or parameters below which amounts are the solver's rounding."""


@dataclass(frozen=True, eq=False)
class Relaxed:
    """An optimum of the linear program."""

    share_ED: np.ndarray
    """s-hat: the share of each expert on each worker."""
    objective: float
    """(7), in units of size times omega."""
    pace: Pace


class ProgramRows:
    """Constraints of one kind, equations or upper bounds, as entries of a sparse matrix."""

    def __init__(self) -> None:
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.bounds: list[np.ndarray] = []
        self.count = 0

    def new(self, shape: int | tuple[int, ...], bound: float | np.ndarray) -> np.ndarray:
        """Return new rows of this shape, for `put` to fill. Their sums equal `bound`, or are at most `bound`."""
        bounds = np.broadcast_to(bound, shape)
        rows = np.arange(self.count, self.count + bounds.size).reshape(shape)
        self.bounds.append(bounds.ravel())
        self.count += bounds.size
        return rows

    def put(self, rows: np.ndarray, variables: np.ndarray, factors: float | np.ndarray) -> None:
        """Add variables times factors to rows; the arguments broadcast."""
        rows, variables, factors = np.broadcast_arrays(rows, variables, factors)
        exist = (variables != ABSENT) & (factors != 0)
        self.entries.append((rows[exist], variables[exist], factors[exist]))

    def matrix(self, variables: int) -> "scipy.sparse.csc_array":
        """Return the matrix of all rows, with `variables` columns."""
        rows, columns, values = map(np.concatenate, zip(*self.entries, strict=True))
        return scipy.sparse.csc_array((values, (rows, columns)), shape=(self.count, variables))

    @property
    def bound(self) -> np.ndarray:
        """Bounds of all rows."""
        return np.concatenate(self.bounds)


class Program:
    """The program's variables, and its constraints by equation. (2a) to (2d) eliminate r."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        workers = problem.num_workers
        slots = np.arange(problem.slots)
        # Sizes near 1 suit the solver's tolerances
        self.unit = max(float(problem.load_E.max()), float(problem.size_E.max())) or 1.0
        self.tokens_ED = problem.tokens_DE.T / self.unit
        self.size_E = problem.size_E / self.unit
        self.apart_DD = ~np.eye(workers, dtype=bool)
        self.foreign_ED = problem.owner_E[:, None] != np.arange(workers)
        self.migrates_ED = self.foreign_ED & (problem.size_E > 0)[:, None]
        pairs = np.any(self.tokens_ED, axis=0)[:, None, None] & np.ones((workers, 1), dtype=bool)
        crossing = pairs & self.apart_DD[..., None]
        local = pairs & ~self.apart_DD[..., None]
        # (6a) to (6e) forbid some tasks in the first and last slots
        end = problem.slots
        self.count = 0
        self.share_ED = self._variables(np.ones(self.foreign_ED.shape, dtype=bool))
        self.dispatch_DDU = self._variables(crossing & (slots < end - 2))
        self.trans_EDU = self._variables(self.migrates_ED[..., None] & (slots < end - 1))
        self.compute_DDU = self._variables(crossing & (slots >= 1) & (slots < end - 1) | local & (slots >= 0))
        self.combine_DDU = self._variables(crossing & (slots >= 2))
        """Axes: source, worker."""
        self.equal, self.most = ProgramRows(), ProgramRows()
        self._place()
        self._complete()
        self._share_capacities()
        self._keep_order()
        self._wait_for_experts()
        self.matrices = self.most.matrix(self.count), self.equal.matrix(self.count)

    def _variables(self, exist: np.ndarray) -> np.ndarray:
        variables = np.full(exist.shape, ABSENT)
        number = int(exist.sum())
        variables[exist] = np.arange(self.count, self.count + number)
        self.count += number
        return variables

    @property
    def _remote_DDU(self) -> np.ndarray:
        """Variables of task 3 for other workers' tokens."""
        return np.where(self.apart_DD[..., None], self.compute_DDU, ABSENT)

    def _place(self) -> None:
        """Add (1), (3a), (3b) and the bound on guests."""
        problem = self.problem
        workers = self.problem.num_workers
        self.equal.put(self.equal.new(problem.num_experts, 1.0)[:, None], self.share_ED, 1.0)
        tokens = self.most.new(workers, problem.token_room_D / self.unit)
        self.most.put(tokens, self.share_ED, self.tokens_ED.sum(1)[:, None])
        experts = self.most.new(workers, problem.expert_room_D / self.unit)
        self.most.put(experts, self.share_ED, self.size_E[:, None])
        if problem.guests is not None:
            self.most.put(self.most.new(workers, problem.guests), self.share_ED, self.foreign_ED.astype(np.float64))

    def _complete(self) -> None:
        """Add (2a) to (2d) with (4): shares determine the work over all slots."""
        first = np.where(self.apart_DD[..., None], self.dispatch_DDU, self.compute_DDU)
        tokens = self.equal.new(first.shape[:-1], 0.0)
        self.equal.put(tokens[..., None], first, 1.0)
        self.equal.put(tokens, self.share_ED[:, None, :], -self.tokens_ED[:, :, None])
        remote_DDU = self._remote_DDU
        for before, after in ((self.dispatch_DDU, remote_DDU), (remote_DDU, self.combine_DDU)):
            rows = self.equal.new(first.shape[:-1], 0.0)[..., None]
            self.equal.put(rows, before, 1.0)
            self.equal.put(rows, after, -1.0)
        experts = self.equal.new(self.share_ED.shape, 0.0)
        self.equal.put(experts[..., None], self.trans_EDU, 1.0)
        self.equal.put(experts, self.share_ED, -np.where(self.migrates_ED, self.size_E[:, None], 0.0))

    def _share_capacities(self) -> None:
        problem = self.problem
        workers = problem.num_workers
        slots = problem.slots
        link = np.where(self.apart_DD, problem.link_DD, 0.0) / self.unit
        links_DDU = self.most.new((workers, workers, slots), link[..., None])
        self.most.put(links_DDU, self.dispatch_DDU, 1.0)
        self.most.put(links_DDU[problem.owner_E], self.trans_EDU, 1.0)
        self.most.put(links_DDU.swapaxes(0, 1), self.combine_DDU, 1.0)
        computers_DU = self.most.new((workers, slots), problem.compute_D[:, None] / self.unit)
        self.most.put(computers_DU, self.compute_DDU, 1.0)

    def _keep_order(self) -> None:
        """Add (6a) and (6c). The variables' slots satisfy (6d) and (6e), and (4) covers the last slot."""
        remote_DDU = self._remote_DDU
        end = self.problem.slots
        ways = ((remote_DDU, self.dispatch_DDU, 1, end - 2), (self.combine_DDU, remote_DDU, 2, end - 1))
        for later, earlier, first, last in ways:
            # Up to each slot, at most the work that the earlier task did up to the previous slot
            rows = self.most.new((*later.shape[:-1], last - first), 0.0)[..., None]
            self.most.put(rows, later[..., None, :], self._up_to(0)[first:last])
            self.most.put(rows, earlier[..., None, :], -self._up_to(-1)[first:last])

    def _up_to(self, offset: int) -> np.ndarray:
        return np.tri(self.problem.slots, k=offset)

    def _wait_for_experts(self) -> None:
        """Add (6b) for fractional shares: the computed part of an expert does not exceed the part that has arrived.

        The paper bounds the computed part by a variable g, which it bounds only from below, so (6b) has no effect
        there. Its bound, max(0, B * x + 1 - B) of the arrived part x, is 1 for x = 1 and may be 0 below. It equals x
        for x = 0 and x = 1, and the least concave bound above it is x itself. Multiplying both sides by the share gives
        parts of tokens and of the expert, by (4). Rows are sums over experts. An expert without migration contributes
        all of its tokens; another one contributes the part of its tokens that equals its arrived part.
        """
        slots = self.problem.slots
        rows = self.most.new((*self.compute_DDU.shape[:-1], slots - 1), 0.0)
        self.most.put(rows[..., None], self.compute_DDU[..., None, :], self._up_to(0)[:-1])
        stays_ED = ~self.migrates_ED
        here = np.where(stays_ED[:, None], self.tokens_ED[:, :, None], 0.0)
        self.most.put(rows, self.share_ED[:, None, :, None], -here[..., None])
        per_size = self.tokens_ED / np.where(self.size_E > 0, self.size_E, 1.0)[:, None]
        factors = -per_size[:, :, None, None, None] * self._up_to(-1)[:-1]
        self.most.put(rows[..., None], self.trans_EDU[:, None, :, None, :], factors)

    def solve(self) -> Relaxed | None:
        """Minimize (7) with the dual simplex method of HiGHS; return None if the work does not fit."""
        tasks = (self.dispatch_DDU, self.trans_EDU, self.compute_DDU, self.combine_DDU)
        weight_U = np.array([self.problem.weight(slot) for slot in range(self.problem.slots)])
        costs = np.zeros(self.count)
        for task in tasks:
            exist = task != ABSENT
            costs[task[exist]] = np.broadcast_to(weight_U, task.shape)[exist]
        most, equal = self.matrices
        bounds = self.most.bound, self.equal.bound
        answer = scipy.optimize.linprog(costs, most, bounds[0], equal, bounds[1], method="highs-ds")
        if not answer.success:
            return None
        # ABSENT indexes the last value
        values = np.append(answer.x, 0.0)
        share_ED = values[self.share_ED].clip(0.0)
        means = [_mean_weights(values[task], weight_U, stage) for task, stage in zip(tasks, (0, 0, 1, 2), strict=True)]
        dispatch, trans, compute, combine = means
        pace = Pace(dispatch[None], trans, compute[None], combine[None])
        return Relaxed(share_ED / share_ED.sum(1, keepdims=True), float(answer.fun) * self.unit, pace)


def _mean_weights(amounts: np.ndarray, weight_U: np.ndarray, stage: int) -> np.ndarray:
    """Return the mean omega of each task's work; without work, the mean of its kind, or its kind's first slot."""
    total = amounts.sum(-1)
    weighted = amounts @ weight_U
    mean = weighted.sum() / total.sum() if total.sum() > NEGLIGIBLE else weight_U[stage]
    return np.divide(weighted, total, out=np.full_like(total, mean), where=total > NEGLIGIBLE)
