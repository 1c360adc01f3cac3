"""Measures the quality of DEMI's schedules, its planning time, and the evenness of the resulting loads.

    python tools/bench/demi.py [--instances 200] [--seeds 4] [--guest-slots 2]

Makespans are compared with the minimum, which a mixed-integer program finds by choosing placement and schedule
together, for random problems with two or three workers and three to five experts. Planning time is the CPU time of this
process, the median over unbalanced synthetic workloads and over seeds.

In the shapes, D counts workers and T time slots.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import milp

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.demi.listing import Pace, finishes, list_schedule
from megatron_balance.planning.demi.problem import Problem
from megatron_balance.planning.demi.program import ABSENT, Relaxed, Rows, relax
from megatron_balance.planning.demi.schedule import check
from megatron_balance.planning.demi.search import best_pace, draw, relax_by_size, repair, solve
from megatron_balance.planning.policies import load_policy
from megatron_balance.planning.policies.demi import Demi
from megatron_balance.workloads.synthetic import WORKLOADS, load_matrix
from planner import cost_model

LAYOUTS = ((4, 16), (4, 64), (16, 64), (64, 256))
"""(D, E) of the paper's settings 1 and 2, and of larger ones."""

LARGEST = {"full": 4 * 64, "aggregated": 16 * 64}
"""Maximum of workers times experts for which a form of the linear program is timed, even if it would not be chosen."""

POLICIES = ("none", "demi", "demi_s1", "demi_s2", "demi_s3", "pro_prophet")
BUSY = [name for name in WORKLOADS if name not in ("balanced", "burst")]
TOKENS, TOPK, STEP = 4096, 2, 0

Program = Callable[[Problem], Relaxed | None]

PROGRAMS: dict[str, Program] = {
    "by size": relax_by_size,
    "full": lambda problem: relax(problem, np.arange(problem.num_experts)),
    "aggregated": lambda problem: relax(problem, np.zeros(problem.num_experts, dtype=np.int64)),
    "none": lambda problem: None,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=200, help="random problems with a known optimum")
    parser.add_argument("--seeds", type=int, default=4, help="loads per workload")
    parser.add_argument("--guest-slots", type=int, default=2)
    args = parser.parse_args()
    _against_optimum(args.instances)
    _planning(args)
    _imbalance(args)
    return 0


def instance(seed: int) -> Problem:
    """Return a random problem: skewed tokens, experts of different sizes, unequal links and workers, limited rooms."""
    generator = np.random.default_rng(seed)
    workers, experts = int(generator.integers(2, 4)), int(generator.integers(3, 6))
    owner_E = np.sort(np.r_[generator.permutation(workers), generator.integers(0, workers, experts - workers)])
    popular_E = generator.lognormal(0, 0.8, experts)
    tokens_DE = np.rint(generator.lognormal(2, 1, (workers, experts)) * popular_E)
    tokens_DE[generator.random((workers, experts)) < 0.1] = 0
    load_E, mean = tokens_DE.sum(0), tokens_DE.sum() / experts
    size_E = np.rint(generator.uniform(0, 1) * generator.lognormal(0, 0.5, experts) * mean)
    link_DD, compute_D = generator.uniform(0.5, 1.5, (workers, workers)), generator.uniform(0.5, 3, workers)
    owned_DD = np.zeros((workers, workers))
    np.add.at(owned_DD, owner_E, tokens_DE.T)
    crossing_DD = (owned_DD + owned_DD.T) * ~np.eye(workers, dtype=bool)
    busiest = max((crossing_DD / link_DD).max(), (owned_DD.sum(1) / compute_D).max())
    slot = max(busiest, 1.0) / generator.uniform(4, 7)
    rooms = [
        np.maximum(np.bincount(owner_E, weights=sizes_E, minlength=workers), sizes_E.max()).clip(share * sizes_E.sum())
        for sizes_E, share in zip((load_E, size_E), generator.uniform(0.5, 1, 2), strict=True)
    ]
    return Problem(
        tokens_DE=tokens_DE,
        owner_E=owner_E,
        size_E=size_E,
        link_DD=link_DD * slot,
        compute_D=compute_D * slot,
        token_room_D=rooms[0],
        expert_room_D=rooms[1],
        slots=8,
        guests=[None, 1, 2][generator.integers(3)],
    )


def least_makespan(problem: Problem, most: int) -> int | None:
    """Return the exact minimum number of slots for all tasks, or None if it exceeds `most`.

    This is problem (7) with whole experts and the intended form of (6b), with a binary variable per expert, worker and
    slot, but with the number of used slots as the objective.
    """
    return _Exact(problem, most).solve()


class _Exact:
    """Variables and constraints of the mixed-integer program; axes of tokens are expert, source, worker and slot."""

    def __init__(self, problem: Problem, slots: int) -> None:
        self.problem, self.slots, self.count = problem, slots, 0
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
        self.equal, self.most = Rows(), Rows()

    def _variables(self, shape: tuple[int, ...]) -> np.ndarray:
        self.count += math.prod(shape)
        return np.arange(self.count - math.prod(shape), self.count).reshape(shape)

    def solve(self) -> int | None:
        self._places()
        self._capacities()
        self._order()
        costs = np.zeros(self.count)
        costs[self.used_T] = 1
        equal, most = self.equal.matrix(self.count), self.most.matrix(self.count)
        binary = np.arange(self.count) < self.binaries
        # Binary variables are bounded by 1 in rows
        bounded = Rows()
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
        problem, tokens_ED = self.problem, self.problem.tokens_DE.T
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
        problem, workers = self.problem, self.problem.num_workers
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
        up_to, before = np.tri(self.slots), np.tri(self.slots, k=-1)
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


class _Ratios(NamedTuple):
    """Makespans over the minimum."""

    values: list[float]
    broken: list[str]
    """Constraints that schedules violate."""

    def add(self, problem: Problem, hosts_E: np.ndarray, relaxed: Relaxed | None, optimum: int) -> None:
        schedule = list_schedule(problem, hosts_E, best_pace(problem, hosts_E[None], relaxed)[0])
        self.values.append(schedule.makespan / optimum)
        self.broken.extend(check(problem, schedule))


def _against_optimum(instances: int) -> None:
    rows: dict[str, _Ratios] = {}
    for seed in range(instances):
        problem = instance(seed)
        plans = {name: program(problem) for name, program in PROGRAMS.items()}
        found = {name: solve(problem, relaxed) for name, relaxed in plans.items()}
        chosen = {name: placements.hosts_BE[0] for name, placements in found.items()}
        optimum = least_makespan(problem, math.ceil(min(each.finish_B[0] for each in found.values()) - 1e-6))
        assert optimum is not None
        for name, hosts_E in chosen.items():
            rows.setdefault(f"program {name}", _Ratios([], [])).add(problem, hosts_E, plans[name], optimum)
        full = plans["full"]
        drawn = repair(problem, draw(full.share_ED, 1, seed)[0]) if full else None
        single = rows.setdefault("program full, one draw", _Ratios([], []))
        single.add(problem, problem.owner_E if drawn is None else drawn, full, optimum)
        rows.setdefault("owners", _Ratios([], [])).add(problem, problem.owner_E, None, optimum)
    print(f"makespan over the least one, {instances} random problems")
    print("                          mean     p99   worst  optimal  constraints broken")
    for name, (values, broken) in rows.items():
        share = np.mean(np.array(values) < 1 + 1e-9)
        print(
            f"{name:23s} {np.mean(values):7.3f} {np.quantile(values, 0.99):7.3f} {max(values):7.3f} {share:7.0%} "
            f"{len(broken):8d}",
            flush=True,
        )


def _planning(args: argparse.Namespace) -> None:
    print(f"\nplanning: policy demi as a whole, and solve() with each linear program; {args.guest_slots} guest slots")
    print("finish: when the best schedule ends, over that of the owners; speedup: of the layer by the cost model")
    print("D   E    program      of it LP ms      ms  max ms  finish  speedup")
    for num_ranks, num_experts in LAYOUTS:
        cost, current = cost_model(num_ranks), Placement.identity(num_experts, num_ranks, args.guest_slots)
        loads = [
            load_matrix(
                name,
                num_ranks=num_ranks,
                num_experts=num_experts,
                topk=TOPK,
                tokens_per_rank=TOKENS,
                seed=seed,
                step=STEP,
            )
            for name in BUSY
            for seed in range(args.seeds)
        ]
        milliseconds, speedups = zip(*(_timed_policy(counts_DE, current, cost) for counts_DE in loads), strict=True)
        print(
            f"{num_ranks:2d} {num_experts:3d}  policy demi             {statistics.median(milliseconds):8.1f} "
            f"{max(milliseconds):7.1f}         {np.mean(speedups):8.2f}",
            flush=True,
        )
        problems = [Demi().problem(counts_DE, current, cost) for counts_DE in loads]
        for name, program in PROGRAMS.items():
            if num_ranks * num_experts > LARGEST.get(name, math.inf):
                continue
            relaxing, milliseconds, finish = zip(*(_timed_program(each, program) for each in problems), strict=True)
            print(
                f"{num_ranks:2d} {num_experts:3d}  {name:12s} {statistics.median(relaxing):10.1f} "
                f"{statistics.median(milliseconds):8.1f} {max(milliseconds):7.1f} {np.mean(finish):7.3f}",
                flush=True,
            )


def _timed_policy(counts_DE: np.ndarray, current: Placement, cost: CostModel) -> tuple[float, float]:
    """Return the milliseconds of planning, and the layer's speedup."""
    start = time.process_time()
    planned = Demi().plan(counts_DE, current, cost)
    seconds = time.process_time() - start
    return 1e3 * seconds, cost.layer_seconds(counts_DE, current) / cost.layer_seconds(counts_DE, planned)


def _timed_program(problem: Problem, program: Program) -> tuple[float, float, float]:
    """Return the milliseconds of the linear program and of the whole solution, and the best finish over the owners'."""
    start = time.process_time()
    relaxed = program(problem)
    middle = time.process_time()
    found = solve(problem, relaxed)
    end = time.process_time()
    owners = finishes(problem, problem.owner_E[None], Pace.eager(problem))[0]
    return 1e3 * (middle - start), 1e3 * (end - start), float(found.finish_B[0] / owners)


def imbalance(tokens_D: np.ndarray) -> float:
    """Return DEMI's workload imbalance degree for equal workers: 1 / sqrt(D) if even, 1 if all is on one worker."""
    return float(np.sqrt((tokens_D**2).sum()) / tokens_D.sum())


def _imbalance(args: argparse.Namespace) -> None:
    print("\nworkload imbalance degree D, the mean over seeds; even loads have 1 / sqrt(workers)")
    for num_ranks, num_experts in LAYOUTS[:3]:
        cost, current = cost_model(num_ranks), Placement.identity(num_experts, num_ranks, args.guest_slots)
        print(f"D={num_ranks} E={num_experts}, even {num_ranks**-0.5:.3f}")
        print(f"{'':20s}" + "".join(f"{name:>12s}" for name in POLICIES))
        for workload in BUSY:
            degrees = np.zeros((args.seeds, len(POLICIES)))
            for seed in range(args.seeds):
                counts_DE = load_matrix(
                    workload,
                    num_ranks=num_ranks,
                    num_experts=num_experts,
                    topk=TOPK,
                    tokens_per_rank=TOKENS,
                    seed=seed,
                    step=STEP,
                )
                for index, name in enumerate(POLICIES):
                    planned = load_policy(name).plan(counts_DE, current, cost)
                    degrees[seed, index] = imbalance(cost.traffic(counts_DE, planned).sum((0, 1)))
            print(f"{workload:20s}" + "".join(f"{degree:12.3f}" for degree in degrees.mean(0)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
