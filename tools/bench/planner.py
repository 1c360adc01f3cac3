"""Compares the policies' plans for each synthetic workload: quality and planning time.

    OMP_NUM_THREADS=1 python tools/bench/planner.py [--tokens 4096] [--seeds 4] [--trace DIR]

Every policy is evaluated with its own split of tokens. Planning time is CPU time of this process; layer times are those
of the cost model, for the built-in cluster with nodes of eight. Measures of the ranks' loads: max/mean is FlexMoE's
balance ratio (Eq. 6), RB is Pro-Prophet's spread before balancing over that after it, and D is DEMI's degree of
imbalance, the root of the sum of squares over the sum: 1 if one rank has all tokens, 1 / sqrt(ranks) if loads are even.
`guests` counts guests, `moved` experts with hosts other than the owner, and `lent` experts that their owners do not
compute. Every number is a median over loads: over seeds of a workload, or iterations of a trace.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron_balance.cost.model import CostModel, balance_gain, balance_ratio
from megatron_balance.observe.load_log import read_loads
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies import load_policy, registered
from megatron_balance.profile.cluster_profile import builtin
from megatron_balance.workloads.synthetic import WORKLOADS, load_matrix

LAYOUTS = ((4, 16), (16, 16), (16, 64), (64, 256))
"""(D, E)."""

HIDDEN = 1024
FFN = 2048
DTYPE_BYTES = 2
TOPK = 2
NODE = 8
BURST_STEP = 9
REPEATS = 7
TRACED = 16
"""Number of iterations of each layer that are taken from a trace."""

COLUMNS = (
    *(("plan ms", 9, 2), ("layer ms", 10, 3), ("speedup", 9, 2)),
    *(("max/mean", 10, 2), ("RB", 8, 2), ("D", 7, 3)),
    *(("guests", 8, 0), ("moved", 7, 0), ("lent", 6, 0)),
)
"""(name, width, decimals)."""

Loads = dict[str, list[np.ndarray]]
"""Load matrices [D, E] by workload."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per rank")
    parser.add_argument("--guest-slots", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=4, help="loads per synthetic workload")
    parser.add_argument("--trace", type=Path, help="directory written by --balance-log-dir: also plan for its loads")
    args = parser.parse_args()
    traces = read_traces(args.trace) if args.trace else {}
    for num_ranks, num_experts in dict.fromkeys((*LAYOUTS, *traces)):
        print(f"\nD={num_ranks} E={num_experts} guest slots={args.guest_slots}")
        loads = (
            _synthetic(num_ranks, num_experts, args.tokens, args.seeds) if (num_ranks, num_experts) in LAYOUTS else {}
        )
        _table(num_ranks, num_experts, loads | traces.get((num_ranks, num_experts), {}), args)
    return 0


def read_traces(directory: Path) -> dict[tuple[int, int], Loads]:
    """Return load matrices of `--balance-log-dir`, by (D, E): a few evenly spaced iterations of every layer."""
    traces: dict[tuple[int, int], Loads] = {}
    for rank, recorded in read_loads(directory).items():
        for layer, counts_NDE in recorded.counts.items():
            chosen = np.unique(np.linspace(0, len(counts_NDE) - 1, TRACED).astype(int))
            loads = traces.setdefault(counts_NDE.shape[1:], {})
            loads[f"rank {rank} layer {layer}"] = list(counts_NDE[chosen])
    return traces


def _synthetic(num_ranks: int, num_experts: int, tokens: int, seeds: int) -> Loads:
    """Return every workload's loads, one for each seed."""
    sizes = {"num_ranks": num_ranks, "num_experts": num_experts, "topk": TOPK, "tokens_per_rank": tokens}
    return {
        name: [load_matrix(name, **sizes, seed=seed, step=BURST_STEP) for seed in range(seeds)] for name in WORKLOADS
    }


def cost_model(num_ranks: int, split: str) -> CostModel:
    expert = 2 * HIDDEN * FFN * DTYPE_BYTES
    profile = builtin(num_ranks, NODE, HIDDEN, FFN, DTYPE_BYTES)
    return CostModel(profile, token_bytes=HIDDEN * DTYPE_BYTES, param_bytes=expert, grad_bytes=expert, split=split)


def median_ms(task: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Return the milliseconds of CPU time of a task, the median of the repetitions; `before` is
    called before each of them, and does not count."""
    seconds = []
    for _ in range(repeats):
        before()
        start = time.process_time()
        task()
        seconds.append(time.process_time() - start)
    return 1e3 * statistics.median(seconds)


def imbalance_degree(tokens_D: np.ndarray) -> float:
    """Return DEMI's degree of imbalance, sqrt(sum F^2) / sum F; 0 without tokens."""
    tokens = float(np.sum(tokens_D))
    return float(np.linalg.norm(tokens_D)) / tokens if tokens else 0.0


def _table(num_ranks: int, num_experts: int, loads: Loads, args: argparse.Namespace) -> None:
    current = Placement.identity(num_experts, num_ranks, args.guest_slots)
    columns = "".join(f"{name:>{width}s}" for name, width, _ in COLUMNS)
    print(f"{'workload':19s} {'policy':11s}{columns}")
    gains: dict[str, list[float]] = {}
    for workload, matrices in loads.items():
        reached = {}
        for name in registered():
            rows = np.array([_row(name, counts_DE, current) for counts_DE in matrices])
            reached[name] = rows[:, [column for column, *_ in COLUMNS].index("RB")]
            numbers = zip(np.median(rows, axis=0), COLUMNS, strict=True)
            cells = "".join(f"{number:{width}.{digits}f}" for number, (_, width, digits) in numbers)
            print(f"{workload:19s} {name:11s}{cells}", flush=True)
        pairs = zip(reached["pro_prophet"].tolist(), reached["fastermoe"].tolist(), strict=True)
        gains[workload] = [ours / theirs for ours, theirs in pairs if np.isfinite([ours, theirs]).all()]
    _print_gains(gains)


def _print_gains(gains: dict[str, list[float]]) -> None:
    """Print RB of pro_prophet over RB of fastermoe, which is 1 if neither adds guests."""
    values = list(itertools.chain.from_iterable(gains.values()))
    differing = [value for value in values if value != 1]
    medians = ", ".join(f"{name} {statistics.median(ratios):.2f}" for name, ratios in gains.items() if ratios)
    print(f"RB of pro_prophet over RB of fastermoe, median per workload: {medians}")
    if differing:
        print(
            f"  over all {len(values)} loads {statistics.median(values):.2f}, over the {len(differing)} where they "
            f"differ {statistics.median(differing):.2f}"
        )
    worse = [
        f"{name}[{index}] {ratio:.2f}" for name, row in gains.items() for index, ratio in enumerate(row) if ratio < 1
    ]
    print(f"  exceptions, below 1: {', '.join(worse) or 'none'}")


def _row(name: str, counts_DE: np.ndarray, current: Placement) -> tuple[float, ...]:
    """Return the numbers of one policy for one load, in the order of COLUMNS."""
    policy = load_policy(name)
    cost = cost_model(current.num_ranks, policy.split)
    placement = policy.plan(counts_DE, current, cost)
    milliseconds = median_ms(lambda: policy.plan(counts_DE, current, cost), REPEATS)
    plain, seconds = (cost.layer_seconds(counts_DE, each) for each in (current, placement))
    before_D, after_D = (cost.traffic(counts_DE, each).sum((0, 1)) for each in (current, placement))
    owners = [placement.owner(expert) for expert in range(placement.num_experts)]
    hosts = [{*ranks} for ranks in placement.hosts]
    return (
        *(milliseconds, 1e3 * seconds, plain / seconds),
        *(balance_ratio(after_D), balance_gain(before_D, after_D), imbalance_degree(after_D)),
        placement.added_hosts,
        sum(ranks != {owner} for ranks, owner in zip(hosts, owners, strict=True)),
        sum(owner not in ranks for ranks, owner in zip(hosts, owners, strict=True)),
    )


if __name__ == "__main__":
    sys.exit(main())
