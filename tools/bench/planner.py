"""What each policy plans on each synthetic workload, how long that takes, and how close to the optimum it comes.

    python tools/bench/planner.py [--links relay] [--tokens 4096] [--seeds 4] [--trace DIR] [--skip-optimum]

Seconds of layers are the cost model's, on the built-in cluster of nodes of eight; planning time is measured, as CPU
time of this process. RB is Pro-Prophet's: the spread of the ranks' loads before balancing over that after it. Every
number of a table is a median over loads: over seeds of a synthetic workload, over iterations of a layer of a trace.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_balance.observe.load_log import read_loads
from megatron_balance.observe.workloads import WORKLOADS, load_matrix
from megatron_balance.placement.cost_model import LINKS, MOST_CHUNKS, CostModel, balance_gain, balance_ratio
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.policies import POLICIES, load_policy
from megatron_balance.profile.cluster_profile import builtin

LAYOUTS = ((4, 16), (16, 16), (16, 64), (64, 256))
"""(D, E)."""

SMALL = ((4, 4, 2), (3, 6, 2), (4, 8, 1), (4, 8, 2), (4, 16, 1))
"""(D, E, guest slots) where every placement can be tried."""

HIDDEN, FFN, DTYPE_BYTES, TOPK, NODE = 1024, 2048, 2, 2, 8
BURST_STEP = 9
REPEATS = 7
TRACED = 16
"""Iterations of each layer that are taken from a trace."""

Loads = dict[str, list[np.ndarray]]
"""Load matrices [D, E] by workload."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", choices=LINKS, default="relay", help="how Trans reaches several guests")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per rank")
    parser.add_argument("--guest-slots", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=4, help="loads per synthetic workload")
    parser.add_argument("--trace", type=Path, help="a directory that --balance-log-dir filled: plan on it as well")
    parser.add_argument("--skip-optimum", action="store_true")
    args = parser.parse_args()
    traces = read_traces(args.trace) if args.trace else {}
    for num_ranks, num_experts in dict.fromkeys((*LAYOUTS, *traces)):
        print(f"\nD={num_ranks} E={num_experts} guest slots={args.guest_slots} links={args.links}")
        loads = _synthetic(num_ranks, num_experts, args) if (num_ranks, num_experts) in LAYOUTS else {}
        _table(num_ranks, num_experts, loads | traces.get((num_ranks, num_experts), {}), args)
    if not args.skip_optimum:
        _against_optimum(traces, args)
    return 0


def read_traces(directory: Path) -> dict[tuple[int, int], Loads]:
    """Load matrices that `--balance-log-dir` recorded, by (D, E): of every layer, a few iterations evenly spaced."""
    traces: dict[tuple[int, int], Loads] = {}
    for rank, recorded in read_loads(directory).items():
        for layer, counts_NDE in recorded.counts.items():
            chosen = np.unique(np.linspace(0, len(counts_NDE) - 1, TRACED).astype(int))
            loads = traces.setdefault(counts_NDE.shape[1:], {})
            loads[f"rank {rank} layer {layer}"] = list(counts_NDE[chosen])
    return traces


def _synthetic(num_ranks: int, num_experts: int, args: argparse.Namespace) -> Loads:
    """Every workload's loads, one for each seed."""
    return {
        name: [
            load_matrix(name, num_ranks, num_experts, TOPK, args.tokens, seed, BURST_STEP) for seed in range(args.seeds)
        ]
        for name in WORKLOADS
    }


def cost_model(num_ranks: int, links: str) -> CostModel:
    expert = 2 * HIDDEN * FFN * DTYPE_BYTES
    profile = builtin(num_ranks, NODE, HIDDEN, FFN, DTYPE_BYTES)
    return CostModel(profile, HIDDEN * DTYPE_BYTES, expert, expert, links=links)


def _table(num_ranks: int, num_experts: int, loads: Loads, args: argparse.Namespace) -> None:
    cost = cost_model(num_ranks, args.links)
    current = Placement.identity(num_experts, num_ranks, args.guest_slots)
    print("workload            policy       plan ms  layer ms  speedup  max/mean      RB  guests")
    gains: dict[str, list[float]] = {}
    for workload, matrices in loads.items():
        reached = {}
        for name in POLICIES:
            rows = np.array([_row(name, counts_DE, current, cost) for counts_DE in matrices])
            reached[name] = rows[:, 4]
            plan, layer, speedup, ratio, gain, guests = np.median(rows, axis=0)
            print(
                f"{workload:19s} {name:11s} {plan:8.2f} {layer:9.3f} {speedup:8.2f} {ratio:9.2f} {gain:7.2f} "
                f"{guests:7.0f}",
                flush=True,
            )
        pairs = zip(reached["pro_prophet"].tolist(), reached["fastermoe"].tolist(), strict=True)
        gains[workload] = [ours / theirs for ours, theirs in pairs if np.isfinite([ours, theirs]).all()]
    _print_gains(gains)


def _print_gains(gains: dict[str, list[float]]) -> None:
    """RB of pro_prophet over RB of fastermoe; 1 where neither adds guests."""
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


def _row(name: str, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> tuple[float, ...]:
    """One load's numbers of one policy, in the order of the table's columns."""
    placement, milliseconds = _timed(name, counts_DE, current, cost)
    plain, seconds = (cost.layer_seconds(counts_DE, each) for each in (current, placement))
    before_D, after_D = (cost.traffic(counts_DE, each).sum(0) for each in (current, placement))
    gain = balance_gain(before_D, after_D)
    return milliseconds, 1e3 * seconds, plain / seconds, balance_ratio(after_D), gain, placement.added_hosts


def _timed(name: str, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> tuple[Placement, float]:
    """The policy's placement and its median CPU time in milliseconds."""
    policy, seconds = load_policy(name), []
    for _ in range(REPEATS):
        start = time.process_time()
        placement = policy.plan(counts_DE, current, cost)
        seconds.append(time.process_time() - start)
    return placement, 1e3 * statistics.median(seconds)


def _against_optimum(traces: dict[tuple[int, int], Loads], args: argparse.Namespace) -> None:
    print(f"\nmodelled layer time over that of the best placement, local_first, links {args.links}")
    if args.links == "relay":
        print("the best placement's links are counted from below, so the true ratios are these or smaller")
    print("D   E   G  policy         10%  median     90%     max  optimal  loads")
    for num_ranks, num_experts, guest_slots in SMALL:
        cost = cost_model(num_ranks, args.links)
        current = Placement.identity(num_experts, num_ranks, guest_slots)
        ratios: dict[str, list[float]] = {name: [] for name in POLICIES}
        recorded = itertools.chain.from_iterable(traces.get((num_ranks, num_experts), {}).values())
        for counts_DE in itertools.chain(_small_loads(num_ranks, num_experts, args), recorded):
            optimum = best_seconds(counts_DE, current, cost)
            for name, values in ratios.items():
                values.append(cost.layer_seconds(counts_DE, load_policy(name).plan(counts_DE, current, cost)) / optimum)
        for name, values in ratios.items():
            low, median, high = np.quantile(values, (0.1, 0.5, 0.9))
            share = np.mean(np.array(values) < 1 + 1e-9)
            print(
                f"{num_ranks} {num_experts:3d} {guest_slots:3d}  {name:11s} {low:7.3f} {median:7.3f} {high:7.3f} "
                f"{max(values):7.3f}  {share:6.0%} {len(values):6d}",
                flush=True,
            )


def _small_loads(num_ranks: int, num_experts: int, args: argparse.Namespace) -> Iterator[np.ndarray]:
    yield from itertools.chain.from_iterable(_synthetic(num_ranks, num_experts, args).values())
    generator = np.random.default_rng(0)
    for _ in range(4 * args.seeds):
        # Log-normal experts with sources that differ: what a young router does
        weights_DE = generator.lognormal(0, 1, num_experts) * generator.lognormal(0, 0.5, (num_ranks, num_experts))
        shares_DE = weights_DE / weights_DE.sum(1, keepdims=True)
        yield np.stack([generator.multinomial(TOPK * args.tokens, row) for row in shares_DE])


def best_seconds(counts_DE: np.ndarray, current: Placement, cost: CostModel) -> float:
    """The least layer time over all ways to fill the guest slots with any experts, by trying all of them.

    With links `relay` a lower bound of it: what a rank relays is left out.
    Each rank's choice of guests moves tokens between it and owners, whatever the others choose, so every quantity of a
    placement is a sum over ranks of a table's row.
    """
    assert cost.split == "local_first"
    num_ranks, slots = current.num_ranks, current.guest_slots
    owner_E = np.array([current.owner(expert) for expert in range(current.num_experts)])
    owned_ED = owner_E[:, None] == np.arange(num_ranks)
    traffic_DD = cost.traffic(counts_DE, current)
    local_D = traffic_DD.diagonal()
    base = [traffic_DD.sum(0), traffic_DD.sum(0) - local_D, traffic_DD.sum(1) - local_D]
    # Tokens computed, received, sent; guests on each rank; guests of each expert; with an axis per deciding rank before
    # that of ranks [D] or of experts [E]
    sums = [*(part.astype(np.float64) for part in base), np.zeros(num_ranks), np.zeros(current.num_experts)]
    for rank in range(num_ranks):
        strangers = np.flatnonzero(owner_E != rank).tolist()
        options = [set_ for size in range(slots + 1) for set_ in itertools.combinations(strangers, size)]
        chosen_OE = np.zeros((len(options), current.num_experts))
        for row, option in enumerate(options):
            chosen_OE[row, list(option)] = 1
        moved_OD = chosen_OE * counts_DE[rank] @ owned_ED
        own_OD = np.zeros_like(moved_OD)
        own_OD[:, rank] = moved_OD.sum(1)
        taken_OD = np.zeros_like(moved_OD)
        taken_OD[:, rank] = chosen_OE.sum(1)
        changes = (own_OD - moved_OD, -moved_OD, -own_OD, taken_OD, chosen_OE)
        sums = [
            (part[..., None, :] + change).reshape(-1, change.shape[-1])
            for part, change in zip(sums, changes, strict=True)
        ]
    computed, received, sent = (part.max(-1) for part in sums[:3])
    rounds, chunks = _rounds(sums[3], sums[4], owned_ED, cost)
    trans, agg = cost.trans_seconds(rounds, chunks), cost.agg_seconds(rounds, chunks)
    return float(cost.time_of(np.maximum(received, sent), computed, trans, agg).total.min())


def _rounds(
    into_PD: np.ndarray, guests_PE: np.ndarray, owned_ED: np.ndarray, cost: CostModel
) -> tuple[np.ndarray, np.ndarray]:
    """[P] rounds and pieces of P placements, from the guests on each rank and of each expert.

    With `relay` as few seconds of Trans as any route could take.
    """
    if cost.links == "average":
        return into_PD.mean(-1), np.ones(len(into_PD))
    if cost.links == "direct":
        return np.maximum(into_PD.max(-1), (guests_PE @ owned_ED).max(-1)), np.ones(len(into_PD))
    started_PD = (guests_PE > 0) @ owned_ED.astype(np.float64)
    experts_P = np.maximum(into_PD.max(-1), started_PD.max(-1))
    # A piece reaches at most twice as many ranks in each round
    extra_P = np.ceil(np.log2(guests_PE.max(-1) + 1)) - 1
    chunks_C = np.arange(1, MOST_CHUNKS + 1)
    cases_2N, index_P = np.unique(np.stack([experts_P, extra_P]), axis=1, return_inverse=True)
    experts_N1, extra_N1 = cases_2N[..., None]
    rounds_NC = np.maximum(experts_N1 * chunks_C, chunks_C + extra_N1) * (experts_N1 > 0)
    best_N = cost.trans_seconds(rounds_NC, chunks_C).argmin(-1)
    return rounds_NC[np.arange(len(best_N)), best_N][index_P.ravel()], chunks_C[best_N][index_P.ravel()]


if __name__ == "__main__":
    sys.exit(main())
