"""Neighbors of a placement, which have one expert moved or two exchanged, and how busy they keep links and workers.

B is the number of neighbors. Axes of size 2 are a step's source and target, the two workers that it changes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_balance.planning.demi.problem import Problem

NEIGHBORS = 512
"""Maximum number of neighbors that are all examined; above it, only some experts of the busiest worker are moved."""

LIGHT, EXPERTS = 4, 4
"""Number of light workers, of close ones and of sources that experts are moved to, and of experts that are moved."""

POWER = 4
"""Exponent of the soft maximum."""

SIGNS = np.array([-1, 1])
"""Signs of the changes of two workers: the source loses an amount, and the target gains it."""


class Times(NamedTuple):
    """Busy time of links, workers and migrated experts, in slots: lower bounds on the end of a schedule.

    An expert is busy during its migration and then during its computation.
    """

    link_DD: np.ndarray
    compute_D: np.ndarray
    expert_E: np.ndarray

    @property
    def longest(self) -> float:
        return max(float(part.max()) for part in self)

    @property
    def soft_maximum(self) -> float:
        """Soft maximum, which distinguishes placements with equal maxima but different sums."""
        longest = self.longest or 1.0
        return longest * sum(float(_raised(part / longest).sum()) for part in self) ** (1 / POWER)


def _raised(times: np.ndarray) -> np.ndarray:
    """Return times to the power of POWER; numpy's powers other than squares take many times as long."""
    squares = times * times
    return squares * squares


def times(problem: Problem, hosts_E: np.ndarray) -> Times:
    """Return the busy times of a placement."""
    return _times(problem, hosts_E, *_work(problem, hosts_E))


def _work(problem: Problem, hosts_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes of tokens by worker and source, and of experts by owner and worker, each [D, D]."""
    workers = problem.num_workers
    cells_DE = hosts_E * workers + np.arange(workers)[:, None]
    links_E = problem.owner_E * workers + hosts_E
    tokens_DD, experts_DD = (
        np.bincount(cells.ravel(), weights=sizes.ravel(), minlength=workers * workers).reshape(workers, workers)
        for cells, sizes in ((cells_DE, problem.tokens_DE), (links_E, problem.size_E))
    )
    return tokens_DD, experts_DD


def _times(problem: Problem, hosts_E: np.ndarray, tokens_DD: np.ndarray, experts_DD: np.ndarray) -> Times:
    link_DD = (tokens_DD + tokens_DD.T + experts_DD) / problem.passage_DD
    busy_E = _expert_time(problem, np.arange(problem.num_experts), hosts_E)
    return Times(link_DD, tokens_DD.sum(1) / problem.compute_D, busy_E)


def _expert_time(problem: Problem, expert_B: np.ndarray, host_B: np.ndarray) -> np.ndarray:
    """Return [B]: `expert_E` of Times for these experts on these workers."""
    owner_B = problem.owner_E[expert_B]
    size_B = problem.size_E[expert_B]
    busy_B = size_B / problem.passage_DD[owner_B, host_B] + problem.load_E[expert_B] / problem.compute_D[host_B]
    return np.where((owner_B != host_B) & (size_B > 0), busy_B, 0.0)


class Steps(NamedTuple):
    """Steps from a placement to neighbors: an expert moves, and one of the target's experts may take its place."""

    expert_B: np.ndarray
    source_B: np.ndarray
    target_B: np.ndarray
    other_B: np.ndarray
    """Expert that moves from the target to the source; `expert_B` where none does."""

    @property
    def ends_B2(self) -> np.ndarray:
        return np.stack([self.source_B, self.target_B], axis=1)

    @property
    def exchanges_B(self) -> np.ndarray:
        """Whether an expert moves to the source."""
        return self.expert_B != self.other_B

    def moved(self, sizes_E: np.ndarray) -> np.ndarray:
        """Return [B, ...]: how much the target gains and the source loses if experts have these sizes, [E, ...]."""
        exchanges = self.exchanges_B.reshape(-1, *(1 for _ in sizes_E.shape[1:]))
        return sizes_E[self.expert_B] - sizes_E[self.other_B] * exchanges

    def hosts(self, hosts_E: np.ndarray) -> np.ndarray:
        """Return [B, E]: the neighbors of `hosts_E`."""
        rows = np.arange(len(self.expert_B))
        hosts_BE = np.repeat(hosts_E[None], len(self.expert_B), axis=0)
        hosts_BE[rows, self.other_B] = self.source_B
        hosts_BE[rows, self.expert_B] = self.target_B
        return hosts_BE


def neighbors(problem: Problem, hosts_E: np.ndarray) -> Steps:
    """Return the steps from a placement that respects all bounds to others that do."""
    workers = problem.num_workers
    experts = problem.num_experts
    used = problem.use(hosts_E[None])
    if experts * (workers + experts) <= NEIGHBORS:
        moved = np.arange(experts)
        others = np.arange(experts)
        targets = np.broadcast_to(np.arange(workers), (experts, workers))
    else:
        busy_D = used[0][0] / problem.compute_D
        light = np.argsort(busy_D, kind="stable")[:LIGHT]
        on_heavy = (hosts_E == busy_D.argmax()).nonzero()[0]
        on_heavy = on_heavy[np.argsort(-problem.load_E[on_heavy], kind="stable")]
        # Parts of an expert are alike
        moved = on_heavy[np.sort(np.unique(problem.whole_E[on_heavy], return_index=True)[1])][:EXPERTS]
        others = (hosts_E == light[0]).nonzero()[0][: 2 * EXPERTS]
        nearest = np.argsort(-problem.tokens_DE[:, moved].T, axis=1, kind="stable")[:, :LIGHT]
        lightest = np.broadcast_to(light, (len(moved), len(light)))
        # The lightest workers may be far away
        links_MD = problem.link_DD[problem.owner_E[moved]]
        close = np.lexsort((np.broadcast_to(busy_D, links_MD.shape), -links_MD))[:, :LIGHT]
        targets = np.concatenate([lightest, close, nearest, problem.owner_E[moved][:, None]], axis=1)
    alone = np.repeat(moved, targets.shape[1])
    left = np.repeat(moved, len(others))
    right = np.tile(others, len(moved))
    expert_B = np.concatenate([alone, left])
    other_B = np.concatenate([alone, right])
    target_B = np.concatenate([targets.ravel(), hosts_E[right]])
    steps = Steps(expert_B, hosts_E[expert_B], target_B, other_B)
    kept_B = (steps.source_B != target_B) & _fit(problem, used, steps)
    return Steps(*(part_B[kept_B] for part_B in steps))


def _fit(problem: Problem, used: Sequence[np.ndarray], steps: Steps) -> np.ndarray:
    """Return [B] bool: whether the source and the target respect all bounds after a step.

    Args:
        used: `Problem.use` of the placement before the step.
    """
    ends_B2 = steps.ends_B2
    foreign_B2, back_B2 = (problem.owner_E[part_B][:, None] != ends_B2 for part_B in (steps.expert_B, steps.other_B))
    moved = (
        steps.moved(problem.load_E)[:, None],
        steps.moved(problem.size_E)[:, None],
        foreign_B2 - 1.0 * back_B2 * steps.exchanges_B[:, None],
    )
    fits_B2 = np.ones(ends_B2.shape, dtype=bool)
    for used_1D, moved_B2, room_D in zip(used, moved, problem.rooms(), strict=True):
        fits_B2 &= used_1D[0, ends_B2] + SIGNS * moved_B2 <= room_D[ends_B2]
    return fits_B2.all(1)


def soft_maxima(problem: Problem, hosts_E: np.ndarray, steps: Steps) -> np.ndarray:
    """Return [B]: soft maxima of the busy times of neighbors of `hosts_E`.

    They follow from the busy times of `hosts_E`, because a step changes only its experts and what its two workers
    compute, send and receive.
    """
    expert_B, source_B, target_B, other_B = steps
    rows_B = np.arange(len(expert_B))
    ends_B2 = steps.ends_B2
    tokens_DD, experts_DD = _work(problem, hosts_E)
    now = _times(problem, hosts_E, tokens_DD, experts_DD)
    longest = now.longest or 1.0
    link_DD, compute_D, expert_E = (_raised(part / longest) for part in now)
    ending_B = expert_E[expert_B] + expert_E[other_B] * steps.exchanges_B + compute_D[ends_B2].sum(1)
    ending_B += (link_DD.sum(0) + link_DD.sum(1))[ends_B2].sum(1)
    ending_B -= link_DD[source_B, target_B] + link_DD[target_B, source_B]

    moved_BD = steps.moved(problem.tokens_DE.T)
    crossing_B2D = (tokens_DD + tokens_DD.T)[ends_B2] + SIGNS[:, None] * moved_BD[:, None]
    # Between both ends, the target's tokens for a moved expert stop crossing, and the source's tokens start to cross
    crossing_B2D[rows_B[:, None], [0, 1], ends_B2[:, ::-1]] -= SIGNS * np.take_along_axis(moved_BD, ends_B2, axis=1)
    into_B2D = experts_DD.T[ends_B2]
    into_B2D[rows_B, :, problem.owner_E[expert_B]] += SIGNS * problem.size_E[expert_B][:, None]
    back_B = problem.size_E[other_B] * steps.exchanges_B
    into_B2D[rows_B, :, problem.owner_E[other_B]] -= SIGNS * back_B[:, None]
    outward_B2D = (crossing_B2D + experts_DD[ends_B2]) / problem.passage_DD[ends_B2]
    # The links between both ends are among those into them
    outward_B2D[rows_B[:, None], :, ends_B2] = 0.0
    busy = (
        ((crossing_B2D + into_B2D) / problem.passage_DD.T[ends_B2]).reshape(-1, 2 * problem.num_workers),
        outward_B2D.reshape(-1, 2 * problem.num_workers),
        (tokens_DD.sum(1)[ends_B2] + SIGNS * moved_BD.sum(1, keepdims=True)) / problem.compute_D[ends_B2],
        _expert_time(problem, expert_B, target_B)[:, None],
        (_expert_time(problem, other_B, source_B) * steps.exchanges_B)[:, None],
    )
    beginning_B = sum(_raised(part / longest).sum(1) for part in busy)
    total = link_DD.sum() + compute_D.sum() + expert_E.sum()
    return longest * (total - ending_B + beginning_B).clip(0.0) ** (1 / POWER)
