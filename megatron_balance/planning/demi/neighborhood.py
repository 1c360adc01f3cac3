"""Neighbors of a placement, in which one expert moves or two are exchanged, and their busy times of links and workers.

A counts neighbors. Names without letters have the shapes [A, 2] and [A, 2, D]. The axes of size 2 are the two workers
that a step changes, its source and its target.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_balance.planning.demi.problem import Problem

NEIGHBORS = 512
"""Maximum number of neighbors that are all examined; beyond it, only some experts of the busiest worker move."""

LIGHT, EXPERTS = 4, 4
"""Numbers of target workers of each kind (light, close, sources of tokens), and of experts that move."""

POWER = 4
"""Exponent of the soft maximum."""

SIGNS = np.array([-1, 1])
"""Signs of the changes of two workers: the source loses an amount, and the target gains it."""


class BusyTimes(NamedTuple):
    """Busy time of links, workers and migrated experts, in slots: lower bounds on the end of a schedule. An expert is
    busy during its migration and then during its computation."""

    link_DD: np.ndarray
    compute_D: np.ndarray
    expert_E: np.ndarray

    @property
    def longest(self) -> float:
        return max(float(part.max()) for part in self)

    @property
    def soft_maximum(self) -> float:
        """Soft maximum. It distinguishes placements with equal maxima but different sums."""
        longest = self.longest or 1.0
        return longest * sum(float(_raised(part / longest).sum()) for part in self) ** (1 / POWER)


def _raised(times: np.ndarray) -> np.ndarray:
    """Return times to the power of POWER; numpy's powers other than squares are many times slower."""
    squares = times * times
    return squares * squares


def times(problem: Problem, hosts_E: np.ndarray) -> BusyTimes:
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


def _times(problem: Problem, hosts_E: np.ndarray, tokens_DD: np.ndarray, experts_DD: np.ndarray) -> BusyTimes:
    link_DD = (tokens_DD + tokens_DD.T + experts_DD) / problem.passage_DD
    busy_E = _expert_time(problem, np.arange(problem.num_experts), hosts_E)
    return BusyTimes(link_DD, tokens_DD.sum(1) / problem.compute_D, busy_E)


def _expert_time(problem: Problem, expert_A: np.ndarray, host_A: np.ndarray) -> np.ndarray:
    """Return [A]: `BusyTimes.expert_E` for these experts on these workers."""
    owner_A = problem.owner_E[expert_A]
    size_A = problem.size_E[expert_A]
    busy_A = size_A / problem.passage_DD[owner_A, host_A] + problem.load_E[expert_A] / problem.compute_D[host_A]
    return np.where((owner_A != host_A) & (size_A > 0), busy_A, 0.0)


class Steps(NamedTuple):
    """Steps from a placement to neighbors: an expert moves, and one of the target's experts may take its place."""

    expert_A: np.ndarray
    source_A: np.ndarray
    target_A: np.ndarray
    other_A: np.ndarray
    """Expert that moves from the target to the source; equal to `expert_A` if there is none."""

    @property
    def ends(self) -> np.ndarray:
        return np.stack([self.source_A, self.target_A], axis=1)

    @property
    def exchanges_A(self) -> np.ndarray:
        """Whether an expert moves to the source."""
        return self.expert_A != self.other_A

    def moved(self, sizes_E: np.ndarray) -> np.ndarray:
        """Return [A, ...]: the target's gain and the source's loss if experts have these sizes, [E, ...]."""
        exchanges = self.exchanges_A.reshape(-1, *(1 for _ in sizes_E.shape[1:]))
        return sizes_E[self.expert_A] - sizes_E[self.other_A] * exchanges

    def hosts(self, hosts_E: np.ndarray) -> np.ndarray:
        """Return [A, E]: the neighbors of `hosts_E`."""
        rows = np.arange(len(self.expert_A))
        hosts_AE = np.repeat(hosts_E[None], len(self.expert_A), axis=0)
        hosts_AE[rows, self.other_A] = self.source_A
        hosts_AE[rows, self.expert_A] = self.target_A
        return hosts_AE


def neighbors(problem: Problem, hosts_E: np.ndarray) -> Steps:
    """Return the steps that lead from a placement within all bounds to others within all bounds."""
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
    expert_A = np.concatenate([alone, left])
    other_A = np.concatenate([alone, right])
    target_A = np.concatenate([targets.ravel(), hosts_E[right]])
    steps = Steps(expert_A, hosts_E[expert_A], target_A, other_A)
    kept_A = (steps.source_A != target_A) & _fit(problem, used, steps)
    return Steps(*(part_A[kept_A] for part_A in steps))


def _fit(problem: Problem, used: Sequence[np.ndarray], steps: Steps) -> np.ndarray:
    """Return [A] bool: whether source and target are within all bounds after a step; `used`: `Problem.use`."""
    ends = steps.ends
    foreign, back = (problem.owner_E[part_A][:, None] != ends for part_A in (steps.expert_A, steps.other_A))
    changes = (
        steps.moved(problem.load_E)[:, None],
        steps.moved(problem.size_E)[:, None],
        foreign - 1.0 * back * steps.exchanges_A[:, None],
    )
    bounds = zip(used, changes, problem.rooms(), strict=True)
    return np.logical_and.reduce(
        [(used_BD[0, ends] + SIGNS * change <= room_D[ends]).all(1) for used_BD, change, room_D in bounds]
    )


def soft_maxima(problem: Problem, hosts_E: np.ndarray, steps: Steps) -> np.ndarray:
    """Return [A]: soft maxima of the neighbors' busy times; a step changes only its experts and two workers."""
    expert_A, source_A, target_A, other_A = steps
    rows_A = np.arange(len(expert_A))
    ends = steps.ends
    tokens_DD, experts_DD = _work(problem, hosts_E)
    now = _times(problem, hosts_E, tokens_DD, experts_DD)
    longest = now.longest or 1.0
    link_DD, compute_D, expert_E = (_raised(part / longest) for part in now)
    ending_A = expert_E[expert_A] + expert_E[other_A] * steps.exchanges_A + compute_D[ends].sum(1)
    ending_A += (link_DD.sum(0) + link_DD.sum(1))[ends].sum(1)
    ending_A -= link_DD[source_A, target_A] + link_DD[target_A, source_A]

    moved_AD = steps.moved(problem.tokens_DE.T)
    crossing = (tokens_DD + tokens_DD.T)[ends] + SIGNS[:, None] * moved_AD[:, None]
    # Between both ends, the target's tokens for a moved expert stop crossing, and the source's tokens start to cross
    crossing[rows_A[:, None], [0, 1], ends[:, ::-1]] -= SIGNS * np.take_along_axis(moved_AD, ends, axis=1)
    into = experts_DD.T[ends]
    into[rows_A, :, problem.owner_E[expert_A]] += SIGNS * problem.size_E[expert_A][:, None]
    back_A = problem.size_E[other_A] * steps.exchanges_A
    into[rows_A, :, problem.owner_E[other_A]] -= SIGNS * back_A[:, None]
    outward = (crossing + experts_DD[ends]) / problem.passage_DD[ends]
    # The links between both ends are already in `into`
    outward[rows_A[:, None], :, ends] = 0.0
    busy = (
        ((crossing + into) / problem.passage_DD.T[ends]).reshape(-1, 2 * problem.num_workers),
        outward.reshape(-1, 2 * problem.num_workers),
        (tokens_DD.sum(1)[ends] + SIGNS * moved_AD.sum(1, keepdims=True)) / problem.compute_D[ends],
        _expert_time(problem, expert_A, target_A)[:, None],
        (_expert_time(problem, other_A, source_A) * steps.exchanges_A)[:, None],
    )
    beginning_A = sum(_raised(part / longest).sum(1) for part in busy)
    total = link_DD.sum() + compute_D.sum() + expert_E.sum()
    return longest * (total - ending_A + beginning_A).clip(0.0) ** (1 / POWER)
