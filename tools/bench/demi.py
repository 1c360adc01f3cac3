"""Measures the quality of DEMI's schedules, its planning time, and the evenness of the resulting loads.

    python tools/bench/demi.py [--instances 200] [--seeds 4] [--guest-slots 2]
    python tools/bench/demi.py --settings [1] [2] [--time-limit 600]

Makespans are compared with the minimum, which a mixed-integer program finds by choosing placement and schedule
together, for random problems with two or three workers and three to five experts. Planning time is the CPU time of this
process, the median over unbalanced synthetic workloads and over seeds.

With --settings, the paper's linear program is solved in full for its settings 1 and 2, and its rounding is compared
with the plans of this repository.

In the shapes, D counts workers and T time slots.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from demi_check import check
from demi_exact import least_makespan
from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.demi.listing import Pace, finishes, list_schedule
from megatron_balance.planning.demi.problem import Problem
from megatron_balance.planning.demi.program import Program, Relaxed, relax
from megatron_balance.planning.demi.search import best_pace, draw, relax_by_size, repair, round_shares, solve
from megatron_balance.planning.policies import load_policy
from megatron_balance.planning.policies.demi import Demi
from megatron_balance.profile.cluster import Ranks, load_profile
from megatron_balance.profile.cluster_profile import builtin
from megatron_balance.workloads.synthetic import WORKLOADS, load_matrix

LAYOUTS = ((4, 16), (4, 64), (16, 64), (64, 256))
"""(D, E) of the paper's settings 1 and 2, and of larger ones."""

LARGEST = {"full": 4 * 64, "aggregated": 16 * 64}
"""Maximum of workers times experts for which a form of the linear program is timed, even if it would not be chosen."""

POLICIES = ("none", "demi", "demi_s1", "demi_s2", "demi_s3", "pro_prophet")
BUSY = [name for name in WORKLOADS if name not in ("balanced", "burst")]
TOKENS = 4096
TOPK = 2
STEP = 0
HIDDEN = 1024
FFN = 2048
NUMBER_BYTES = 2
NODE = 8

SETTINGS = {1: 16, 2: 64}
"""Number of experts in the paper's settings, both on the four workers of one V100 server (its Section V-A)."""

PAPER_WORKERS, PAPER_HIDDEN, PAPER_FFN, PAPER_TOKENS = 4, 500, 1000, 200 * 20
"""Workers, widths of the model and of an expert, and tokens of each worker: 200 sequences of 20 tokens."""

PAPER_EXPERT_BYTES, PAPER_NUMBER_BYTES = 7.64e6, 4
"""Bytes of an expert as the paper gives them, and of a number."""

PAPER_CLUSTER = Path(__file__).parents[2] / "configs/clusters/demi.yaml"

METHODS = {"simplex": "highs-ds", "interior point": "highs-ipm"}

Solver = Callable[[Problem], Relaxed | None]

PROGRAMS: dict[str, Solver] = {
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
    parser.add_argument("--settings", type=int, nargs="*", choices=SETTINGS, help="solve the paper's settings only")
    parser.add_argument("--time-limit", type=float, default=600, help="seconds for each linear program of --settings")
    args = parser.parse_args()
    if args.settings is not None:
        for setting in args.settings or SETTINGS:
            _setting(setting, args)
        return 0
    _against_optimum(args.instances)
    _planning(args)
    _imbalance(args)
    return 0


def instance(seed: int) -> Problem:
    """Return a random problem: skewed tokens, experts of different sizes, unequal links and workers, limited rooms."""
    generator = np.random.default_rng(seed)
    workers = int(generator.integers(2, 4))
    experts = int(generator.integers(3, 6))
    owner_E = np.sort(np.r_[generator.permutation(workers), generator.integers(0, workers, experts - workers)])
    popular_E = generator.lognormal(0, 0.8, experts)
    tokens_DE = np.rint(generator.lognormal(2, 1, (workers, experts)) * popular_E)
    tokens_DE[generator.random((workers, experts)) < 0.1] = 0
    load_E = tokens_DE.sum(0)
    mean = tokens_DE.sum() / experts
    size_E = np.rint(generator.uniform(0, 1) * generator.lognormal(0, 0.5, experts) * mean)
    link_DD = generator.uniform(0.5, 1.5, (workers, workers))
    compute_D = generator.uniform(0.5, 3, workers)
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
        cost = cost_model(num_ranks)
        current = Placement.identity(num_experts, num_ranks, args.guest_slots)
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


def _timed_program(problem: Problem, program: Solver) -> tuple[float, float, float]:
    """Return the milliseconds of the linear program and of the whole solution, and the best finish over the owners'."""
    start = time.process_time()
    relaxed = program(problem)
    middle = time.process_time()
    found = solve(problem, relaxed)
    end = time.process_time()
    owners = finishes(problem, problem.owner_E[None], Pace.eager(problem))[0]
    return 1e3 * (middle - start), 1e3 * (end - start), float(found.finish_B[0] / owners)


def paper_problem(setting: int, counts_DE: np.ndarray) -> Problem:
    """Return the problem of one of the paper's settings, where only rooms bound the experts of a worker."""
    workers = PAPER_WORKERS
    experts = SETTINGS[setting]
    ranks = Ranks(num_ranks=workers, node_size=workers, ranks_per_node=workers)
    cost = CostModel(
        load_profile(PAPER_CLUSTER, ranks, PAPER_HIDDEN, PAPER_FFN, PAPER_NUMBER_BYTES),
        token_bytes=PAPER_HIDDEN * PAPER_NUMBER_BYTES,
        param_bytes=PAPER_EXPERT_BYTES,
        grad_bytes=PAPER_EXPERT_BYTES,
    )
    return replace(Demi().problem(counts_DE, Placement.identity(experts, workers, experts), cost), guests=None)


def _paper_loads(experts: int, seeds: int) -> Iterator[np.ndarray]:
    for workload in BUSY:
        for seed in range(seeds):
            size = {"num_ranks": PAPER_WORKERS, "num_experts": experts, "tokens_per_rank": PAPER_TOKENS}
            yield load_matrix(workload, topk=TOPK, seed=seed, step=STEP, **size)


def _setting(setting: int, args: argparse.Namespace) -> None:
    loads = list(_paper_loads(SETTINGS[setting], args.seeds))
    print(f"\nsetting {setting}: {SETTINGS[setting]} experts, {PAPER_WORKERS} workers, {len(loads)} loads")
    sizes: list[tuple[int, int, int]] = []
    columns: dict[str, list[float]] = {}
    for index, counts_DE in enumerate(loads):
        problem = paper_problem(setting, counts_DE)
        start = time.process_time()
        program = Program(problem, np.arange(problem.num_experts))
        columns.setdefault("assembly, ms", []).append(1e3 * (time.process_time() - start))
        sizes.append(program.size)
        full = None
        for name, method in METHODS.items():
            start = time.process_time()
            full = program.solve(method, args.time_limit) or full
            columns.setdefault(f"{name}, ms", []).append(1e3 * (time.process_time() - start))
        if full is None:
            print(f"load {index}: not solved within {args.time_limit:g} s", file=sys.stderr, flush=True)
            continue
        for name, value in _rounded(problem, full, seed=index):
            columns.setdefault(name, []).append(value)
        print(f"{index + 1} of {len(loads)} loads", file=sys.stderr, flush=True)
    for name, values in zip(("variables", "rows", "nonzeros"), zip(*sizes, strict=True), strict=True):
        columns[name] = list(values)
    print(f"{'':44s}{'median':>10s}{'least':>10s}{'most':>10s}")
    for name, values in columns.items():
        print(f"{name:44s}" + "".join(f"{of(values):10.4g}" for of in (statistics.median, min, max)))


def _rounded(problem: Problem, full: Relaxed, seed: int) -> Iterator[tuple[str, float]]:
    """Yield the figures of the owners and of the placements that follow from the full program and from the search.

    They are the end of the schedule over that of the owners, and (7) of the schedule over the program's optimum.
    """
    drawn = repair(problem, draw(full.share_ED, 1, seed)[0])
    rounded = (repair(problem, hosts_E) for hosts_E in round_shares(problem, full.share_ED))
    rounded_BE = np.stack([problem.owner_E, *(hosts_E for hosts_E in rounded if hosts_E is not None)])
    pace, finish_B = best_pace(problem, rounded_BE, full)
    owners = best_pace(problem, problem.owner_E[None], full)
    online, offline = (solve(problem, relaxed) for relaxed in (relax_by_size(problem), full))
    plans = {
        "owners": (problem.owner_E, owners[0]),
        "one draw": (problem.owner_E if drawn is None else drawn, full.pace),
        "best of nine roundings": (rounded_BE[finish_B.argmin()], pace),
        "online search": (online.hosts_BE[0], online.pace),
        "search from the full program": (offline.hosts_BE[0], offline.pace),
    }
    for name, (hosts_E, paced) in plans.items():
        schedule = list_schedule(problem, hosts_E, paced)
        weights = np.array([problem.weight(slot) for slot in range(schedule.makespan)])
        yield f"{name}: end", finishes(problem, hosts_E[None], paced)[0] / owners[1][0]
        yield f"{name}: (7)", float((np.array(schedule.amounts) @ weights).sum()) / full.objective


def cost_model(num_ranks: int) -> CostModel:
    """Return the model of the built-in cluster with nodes of eight."""
    expert = 2 * HIDDEN * FFN * NUMBER_BYTES
    profile = builtin(num_ranks, NODE, HIDDEN, FFN, NUMBER_BYTES)
    return CostModel(profile, token_bytes=HIDDEN * NUMBER_BYTES, param_bytes=expert, grad_bytes=expert)


def imbalance(tokens_D: np.ndarray) -> float:
    """Return DEMI's workload imbalance degree for equal workers: 1 / sqrt(D) if even, 1 if all is on one worker."""
    return float(np.sqrt((tokens_D**2).sum()) / tokens_D.sum())


def _imbalance(args: argparse.Namespace) -> None:
    print("\nworkload imbalance degree D, the mean over seeds; even loads have 1 / sqrt(workers)")
    for num_ranks, num_experts in LAYOUTS[:3]:
        cost = cost_model(num_ranks)
        current = Placement.identity(num_experts, num_ranks, args.guest_slots)
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
