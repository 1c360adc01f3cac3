"""Simulates placements over time: policies plan each iteration of a sequence of loads from the previous one.

    python tools/bench/placement_history.py [--ranks 16] [--experts 64] [--policy NAME ...] [--trace DIR]

Loads are synthetic; with --trace, those recorded by --balance-log-dir follow, scaled to the same number of tokens. A
row shows:

- max/mean: the balance ratio (FlexMoE Eq. 6) with the placement in use, its mean over iterations and at four of them;
- changes: number of vExperts added or removed in all iterations, and the fraction of iterations with a change;
- moved: bytes of Trans and Agg; new: the part of Trans to guests that did not have the expert before;
- time: the modeled time of the layer in all iterations over that without balancing;
- plan ms: CPU time of this process per plan, mean over iterations.

The last rows are FlexMoE's comparisons: Fig. 6(a), the metric variance instead of max, and Fig. 6(b), plans at fixed
intervals regardless of the load, instead of whenever the balance ratio exceeds the threshold.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.model import CostModel, balance_ratio
from megatron_balance.observe.load_log import read_loads
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.planning.manager import Manager
from megatron_balance.planning.policies import load_policy, registered
from megatron_balance.planning.policies.flexmoe import FlexMoE
from megatron_balance.planning.policies.interface import Policy
from megatron_balance.planning.predictor import METHODS, Predictor
from megatron_balance.workloads.synthetic import load_matrix
from planner import TOPK, cost_model

DRIFTING = "drifting_router"
SEQUENCES = ("hot_experts", "rotating_hotspot", "burst", "W4", "W7", DRIFTING)

DRIFT = 0.1
"""drifting_router: standard deviation of each step of an expert's log popularity, whose initial one is 1."""

INTERVALS = (1, 5, 10, 20, 50)
"""Fixed intervals of FlexMoE's Fig. 6(b)."""

SHOWN = 4
"""Number of iterations whose balance ratio is shown, evenly spaced, including the last one."""


class Step(NamedTuple):
    """One iteration of one policy."""

    ratio: float
    changes: int
    moved_bytes: float
    new_bytes: float
    seconds: float
    plan_seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--guest-slots", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per rank")
    parser.add_argument("--iterations", type=int, default=60, help="number of iterations of synthetic loads")
    parser.add_argument("--policy", nargs="+", choices=registered(), default=list(registered()))
    parser.add_argument("--predictor", choices=METHODS, default="last")
    parser.add_argument("--trace", type=Path, help="directory written by --balance-log-dir")
    args = parser.parse_args()
    for name in SEQUENCES:
        _table(name, sequence(name, args.ranks, args.experts, args.tokens, args.iterations), args)
    for rank, loads in (read_loads(args.trace) if args.trace else {}).items():
        for layer, counts_NDE in loads.counts.items():
            scale = TOPK * args.tokens / counts_NDE.sum(2).mean()
            _table(f"rank {rank} layer {layer}", np.rint(scale * counts_NDE).astype(np.int64), args)
    return 0


def sequence(name: str, num_ranks: int, num_experts: int, tokens: int, iterations: int) -> np.ndarray:
    """Return the loads of N iterations, [N, D, E] int64."""
    if name == DRIFTING:
        return drifting_router(num_ranks, num_experts, tokens, iterations, seed=0)
    steps = range(1, iterations + 1)
    return np.stack(
        [
            load_matrix(
                name, num_ranks=num_ranks, num_experts=num_experts, topk=TOPK, tokens_per_rank=tokens, seed=0, step=step
            )
            for step in steps
        ]
    )


def drifting_router(num_ranks: int, num_experts: int, tokens: int, iterations: int, seed: int) -> np.ndarray:
    """Like `sequence`, with popularities that follow a random walk (FlexMoE Fig. 3(b)) and slightly unequal sources."""
    generator = np.random.default_rng(seed)
    log_E = generator.normal(0, 1, num_experts)
    source_DE = generator.normal(0, 0.3, (num_ranks, num_experts))
    loads = []
    for _ in range(iterations):
        weights_DE = np.exp(log_E + source_DE)
        shares_DE = weights_DE / weights_DE.sum(1, keepdims=True)
        loads.append(generator.multinomial(TOPK * tokens, shares_DE))
        log_E = log_E + generator.normal(0, DRIFT, num_experts)
    return np.stack(loads)


def play(policy: Policy, counts_NDE: np.ndarray, args: argparse.Namespace, interval: int = 1) -> list[Step]:
    """Simulate a policy for a sequence of loads, starting without guests."""
    _, num_ranks, num_experts = counts_NDE.shape
    cost = cost_model(num_ranks, policy.split)
    slots = min(args.guest_slots, num_experts - num_experts // num_ranks)
    owners = Placement.identity(num_experts, num_ranks, slots)
    manager = Manager(policy, cost, Predictor(args.predictor), owners, interval=interval)
    steps = []
    before = owners
    plan_seconds = 0.0
    for counts_DE in counts_NDE:
        steps.append(_step(before, manager.placement, counts_DE, cost, plan_seconds))
        before = manager.placement
        start = time.process_time()
        manager.observe(counts_DE[None])
        if manager.is_due(ahead=1) and manager.expected_BDE is not None:
            decision = manager.decide(manager.expected_BDE, 1)
            if decision.placement is None:
                raise RuntimeError(f"{policy}: {decision.problem}")
            manager.adopt(decision)
        plan_seconds = time.process_time() - start
    return steps


def _step(before: Placement, now: Placement, counts_DE: np.ndarray, cost: CostModel, plan_seconds: float) -> Step:
    old, new = (
        Counter((expert, rank) for expert, ranks in enumerate(placement.hosts) for rank in ranks)
        for placement in (before, now)
    )
    changes = (old - new).total() + (new - old).total()
    arrived = sum(
        expert not in (EMPTY, *kept) for kept, row in zip(before.guests, now.guests, strict=True) for expert in row
    )
    return Step(
        balance_ratio(cost.traffic(counts_DE, now).sum(1)),
        changes,
        now.added_hosts * (cost.param_bytes + cost.grad_bytes),
        arrived * cost.param_bytes,
        cost.layer_seconds(counts_DE, now),
        plan_seconds,
    )


def _table(name: str, counts_NDE: np.ndarray, args: argparse.Namespace) -> None:
    iterations, num_ranks, num_experts = counts_NDE.shape
    print(f"\n{name}: D={num_ranks} E={num_experts} guest slots={args.guest_slots}, {iterations} iterations")
    shown = np.linspace(0, iterations - 1, SHOWN + 1).astype(int)[1:]
    at = "".join(f"{f'at {index + 1}':>7s}" for index in shown)
    print(f"{'policy':18s} max/mean{at}  changes   in  moved GB  new GB   time  plan ms")
    plain = sum(step.seconds for step in play(load_policy("none"), counts_NDE, args))
    rows: dict[str, tuple[Policy, int]] = {policy: (load_policy(policy), 1) for policy in args.policy}
    if "flexmoe" in args.policy:
        rows["flexmoe variance"] = FlexMoE(metric="variance"), 1
        rows |= {f"flexmoe every {interval}": (FlexMoE(threshold=1.0), interval) for interval in INTERVALS}
    for label, (policy, interval) in rows.items():
        ratios, changes, moved, new, seconds, planning = np.array(play(policy, counts_NDE, args, interval)).T
        at = "".join(f"{ratio:7.2f}" for ratio in ratios[shown])
        bytes_moved = f"{moved.sum() / 1e9:9.2f} {new.sum() / 1e9:7.2f}"
        print(
            f"{label:18s} {ratios.mean():8.2f}{at} {changes.sum():8.0f} {(changes > 0).mean():4.0%} {bytes_moved} "
            f"{seconds.sum() / plain:6.3f} {1e3 * planning.mean():8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
