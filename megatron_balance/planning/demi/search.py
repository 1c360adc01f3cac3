"""Searches placements with short schedules, from the linear program's shares (DEMI's Algorithm 1, lines 1 and 2).

The paper draws one placement from the shares. Here, schedules time several candidates: some draws, the largest shares,
the owners, and a descent from the owners. Moves and exchanges then improve the best candidate.
"""

import math
from typing import NamedTuple

import numpy as np

from megatron_balance.planning.demi.listing import Pace, finishes
from megatron_balance.planning.demi.neighborhood import neighbors, soft_maxima, times
from megatron_balance.planning.demi.problem import Problem
from megatron_balance.planning.demi.program import Program, Relaxed

DRAWS = 8
"""Number of placements drawn from the shares."""

SEED = 0

MOST_VARIABLES = 4000
"""Approximate maximum number of variables of a linear program that is solved; this takes about 20 ms."""

TRIED = 8
"""Number of neighbors whose schedules are timed in each step of `improve`."""

PATH = 16
"""Maximum number of placements on the descent whose schedules are timed."""

LISTED = 200_000
"""Maximum number of mini-tasks, over all placements, that are timed together."""

MOST_STEPS = 256
"""Maximum number of steps of a descent."""

LONGEST = 4.0
"""Ratio of a schedule's end to that of the owners' schedule beyond which timing stops. An expert that crosses a slow
link may take many thousands of slots."""

GAIN = 1e-9
"""Relative improvement below which a step counts as rounding."""


class Found(NamedTuple):
    """Placements within all bounds, the shortest schedule first."""

    hosts_BE: np.ndarray
    finish_B: np.ndarray
    """End of each schedule, in slots; infinity beyond LONGEST times the end of the owners' schedule."""
    pace: Pace
    """Pace with which the schedules were listed."""


def relax_by_size(problem: Problem) -> Relaxed | None:
    """Solve the linear program; None if it is too large or infeasible. A limit on time would not be reproducible."""
    workers = problem.num_workers
    variables = (problem.num_experts + 3 * workers) * workers * problem.slots
    return Program(problem).solve() if variables <= MOST_VARIABLES else None


def best_pace(
    problem: Problem, hosts_BE: np.ndarray, relaxed: Relaxed | None, longest: float = math.inf
) -> tuple[Pace, np.ndarray]:
    """Return the linear program's pace, or the eager one if its best schedule is shorter, and [B] `finishes`."""
    paces = [Pace.eager(problem)] if relaxed is None else [relaxed.pace, Pace.eager(problem)]
    timed = ((pace, finishes(problem, hosts_BE, pace, longest)) for pace in paces)
    return min(timed, key=lambda pair: pair[1].min())


def solve(problem: Problem, relaxed: Relaxed | None) -> Found:
    """Return placements with short schedules, including owners alone if they are within all bounds.

    Raises:
        ValueError: no placement within all bounds was found.
    """
    rounded = [] if relaxed is None else round_shares(problem, relaxed.share_ED)
    repaired = [repair(problem, hosts_E) for hosts_E in (problem.owner_E, *rounded)]
    starts = [hosts_E for hosts_E in repaired if hosts_E is not None]
    if not starts:
        raise ValueError("no placement was found that keeps within what workers may compute and hold")
    tasks = 3 * np.count_nonzero(problem.tokens_DE) + problem.num_experts
    descent = descend(problem, starts[0])
    thinned = np.unique(np.linspace(0, len(descent) - 1, int(min(PATH, max(2, LISTED // tasks)))).astype(int))
    hosts_BE = np.unique(np.stack([*starts, *(descent[index] for index in thinned)]), axis=0)
    longest = LONGEST * float(finishes(problem, starts[0][None], Pace.eager(problem))[0])
    pace, finish_B = best_pace(problem, hosts_BE, relaxed, longest)
    seen = [(hosts_BE, finish_B)]
    tried = int(min(TRIED, LISTED // (16 * tasks)))
    if tried:
        best = finish_B.argmin()
        seen += improve(problem, hosts_BE[best], float(finish_B[best]), pace=pace, tried=tried, longest=longest)
    hosts_BE, finish_B = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    hosts_BE, first_B = np.unique(hosts_BE, axis=0, return_index=True)
    finish_B = finish_B[first_B]
    best_first = np.lexsort(((hosts_BE != problem.owner_E).sum(1), finish_B))
    return Found(hosts_BE[best_first], finish_B[best_first], pace)


def round_shares(problem: Problem, share_ED: np.ndarray) -> np.ndarray:
    """Return [B, E]: the placement by the largest shares, then draws. Experts without tokens stay on their owners."""
    hosts_BE = np.stack([share_ED.argmax(1), *draw(share_ED, DRAWS, SEED)])
    return np.where(problem.load_E > 0, hosts_BE, problem.owner_E)


def draw(share_ED: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return [B, E]: `count` placements, with each expert's worker drawn by its shares; reproducible by `seed`."""
    random_BE = np.random.default_rng(seed).random((count, len(share_ED)))
    ends_ED = share_ED.cumsum(1)
    # The last worker gets the rest, so rounding does not matter
    return (random_BE[..., None] >= ends_ED[:, :-1]).sum(-1)


def repair(problem: Problem, hosts_E: np.ndarray) -> np.ndarray | None:
    """Move experts, lightest first, from overfull workers to the least loaded worker with room (line 2). Return [E]
    hosts within all bounds; None if a worker stays overfull."""
    hosts_E = hosts_E.copy()
    workers = np.arange(problem.num_workers)
    sizes = np.stack([problem.load_E, problem.size_E, np.ones(problem.num_experts)])
    rooms = np.stack(problem.rooms())
    # Experts move only to workers with room, so none moves twice
    for _ in range(problem.num_experts):
        used = np.stack([each[0] for each in problem.use(hosts_E[None])])
        over = used > rooms
        if not over.any():
            return hosts_E
        foreign_E = hosts_E != problem.owner_E
        helps_E = over[:2, hosts_E].any(0) | over[2, hosts_E] & foreign_E
        step = None
        for expert in np.argsort(np.where(helps_E, problem.load_E, np.inf), kind="stable")[: helps_E.sum()].tolist():
            needed = np.where([[True], [True], [False]], sizes[:, [expert]], workers != problem.owner_E[expert])
            roomy_D = (used + needed <= rooms).all(0) & (workers != hosts_E[expert])
            if roomy_D.any():
                step = expert, np.where(roomy_D, used[0] / problem.compute_D, np.inf).argmin()
                break
        if step is None:
            return None
        hosts_E[step[0]] = step[1]
    return hosts_E if problem.fits(hosts_E[None])[0] else None


def descend(problem: Problem, hosts_E: np.ndarray) -> list[np.ndarray]:
    """Return the descent from a placement, inclusive, over neighbors with decreasing soft maxima of busy times."""
    descent = [hosts_E]
    best = times(problem, hosts_E).soft_maximum
    while len(descent) <= MOST_STEPS and len((steps := neighbors(problem, descent[-1])).expert_A):
        busy_A = soft_maxima(problem, descent[-1], steps)
        chosen = busy_A.argmin()
        if busy_A[chosen] >= best * (1 - GAIN):
            break
        descent.append(steps.hosts(descent[-1])[chosen])
        best = float(busy_A[chosen])
    return descent


def improve(
    problem: Problem, hosts_E: np.ndarray, finish: float, *, pace: Pace, tried: int, longest: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Step to the neighbor with the shortest schedule, among the most promising ones, while the schedule gets shorter.
    Return the placements timed in each step, and the ends of their schedules."""
    seen = []
    while len((steps := neighbors(problem, hosts_E)).expert_A):
        order_A = np.argsort(soft_maxima(problem, hosts_E, steps), kind="stable")
        promising_BE = steps.hosts(hosts_E)[order_A[:tried]]
        finish_B = finishes(problem, promising_BE, pace, longest)
        seen.append((promising_BE, finish_B))
        chosen = finish_B.argmin()
        if finish_B[chosen] >= finish * (1 - GAIN):
            break
        hosts_E = promising_BE[chosen]
        finish = float(finish_B[chosen])
    return seen
