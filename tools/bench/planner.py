"""What each policy plans on each synthetic workload, how long that takes, and how close to the optimum it comes.

    python tools/bench/planner.py [--links direct] [--tokens 4096] [--seeds 4] [--skip-optimum]

Seconds of layers are the cost model's, on the built-in cluster of nodes of eight; planning time is measured, as CPU
time of this process. RB is Pro-Prophet's: the spread of the ranks' loads before balancing over that after it.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator

import numpy as np

from megatron_balance.observe.workloads import WORKLOADS, load_matrix
from megatron_balance.placement.cost_model import LINKS, CostModel, balance_gain, balance_ratio
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", choices=LINKS, default="direct", help="how Trans reaches several guests")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per rank")
    parser.add_argument("--guest-slots", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=4, help="loads per workload where the optimum is searched")
    parser.add_argument("--skip-optimum", action="store_true")
    args = parser.parse_args()
    for num_ranks, num_experts in LAYOUTS:
        print(f"\nD={num_ranks} E={num_experts} guest slots={args.guest_slots} links={args.links}")
        _table(num_ranks, num_experts, args)
    if not args.skip_optimum:
        _against_optimum(args)
    return 0


def cost_model(num_ranks: int, links: str) -> CostModel:
    expert = 2 * HIDDEN * FFN * DTYPE_BYTES
    profile = builtin(num_ranks, NODE, HIDDEN, FFN, DTYPE_BYTES)
    return CostModel(profile, HIDDEN * DTYPE_BYTES, expert, expert, links=links)


def _table(num_ranks: int, num_experts: int, args: argparse.Namespace) -> None:
    cost = cost_model(num_ranks, args.links)
    current = Placement.identity(num_experts, num_ranks, args.guest_slots)
    print("workload            policy       plan ms  layer ms  speedup  max/mean      RB  guests")
    gains: list[tuple[str, float, float]] = []
    for workload in WORKLOADS:
        counts_DE = load_matrix(workload, num_ranks, num_experts, TOPK, args.tokens, seed=0, step=BURST_STEP)
        before_D = cost.traffic(counts_DE, current).sum(0)
        plain = cost.layer_seconds(counts_DE, current)
        reached = {}
        for name in POLICIES:
            placement, milliseconds = _timed(name, counts_DE, current, cost)
            seconds = cost.layer_seconds(counts_DE, placement)
            after_D = cost.traffic(counts_DE, placement).sum(0)
            reached[name] = balance_gain(before_D, after_D)
            print(
                f"{workload:19s} {name:11s} {milliseconds:8.2f} {1e3 * seconds:9.3f} {plain / seconds:8.2f} "
                f"{balance_ratio(after_D):9.2f} {reached[name]:7.2f} {placement.added_hosts:7d}",
                flush=True,
            )
        gains.append((workload, reached["pro_prophet"], reached["fastermoe"]))
    ratios = ", ".join(
        f"{name} {ours / theirs:.2f}" for name, ours, theirs in gains if np.isfinite([ours, theirs]).all()
    )
    print(f"RB of pro_prophet over RB of fastermoe: {ratios}")


def _timed(name: str, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> tuple[Placement, float]:
    """The policy's placement and its median CPU time in milliseconds."""
    policy, seconds = load_policy(name), []
    for _ in range(REPEATS):
        start = time.process_time()
        placement = policy.plan(counts_DE, current, cost)
        seconds.append(time.process_time() - start)
    return placement, 1e3 * statistics.median(seconds)


def _against_optimum(args: argparse.Namespace) -> None:
    print("\nmodelled layer time over that of the best placement, local_first, links direct")
    print("D   E   G  policy       median    mean     90%     max  optimal  loads")
    for num_ranks, num_experts, guest_slots in SMALL:
        cost = cost_model(num_ranks, "direct")
        current = Placement.identity(num_experts, num_ranks, guest_slots)
        ratios: dict[str, list[float]] = {name: [] for name in POLICIES}
        for counts_DE in _small_loads(num_ranks, num_experts, args):
            optimum = best_seconds(counts_DE, current, cost)
            for name, values in ratios.items():
                values.append(cost.layer_seconds(counts_DE, load_policy(name).plan(counts_DE, current, cost)) / optimum)
        for name, values in ratios.items():
            share = np.mean(np.array(values) < 1 + 1e-9)
            print(
                f"{num_ranks} {num_experts:3d} {guest_slots:3d}  {name:11s} {np.median(values):7.3f} "
                f"{np.mean(values):7.3f} {np.quantile(values, 0.9):7.3f} {max(values):7.3f}  "
                f"{share:6.0%} {len(values):6d}",
                flush=True,
            )


def _small_loads(num_ranks: int, num_experts: int, args: argparse.Namespace) -> Iterator[np.ndarray]:
    for workload, seed in itertools.product(WORKLOADS, range(args.seeds)):
        yield load_matrix(workload, num_ranks, num_experts, TOPK, args.tokens, seed, BURST_STEP)
    generator = np.random.default_rng(0)
    for _ in range(4 * args.seeds):
        # Log-normal experts with sources that differ: what a young router does
        weights_DE = generator.lognormal(0, 1, num_experts) * generator.lognormal(0, 0.5, (num_ranks, num_experts))
        shares_DE = weights_DE / weights_DE.sum(1, keepdims=True)
        yield np.stack([generator.multinomial(TOPK * args.tokens, row) for row in shares_DE])


def best_seconds(counts_DE: np.ndarray, current: Placement, cost: CostModel) -> float:
    """The least layer time over all ways to fill the guest slots with any experts, by trying all of them.

    Each rank's choice of guests moves tokens between it and owners, whatever the others choose, so every quantity of a
    placement is a sum over ranks of a table's row.
    """
    assert (cost.split, cost.links) == ("local_first", "direct")
    num_ranks, slots = current.num_ranks, current.guest_slots
    owner_E = np.array([current.owner(expert) for expert in range(current.num_experts)])
    owned_ED = owner_E[:, None] == np.arange(num_ranks)
    traffic_DD = cost.traffic(counts_DE, current)
    local_D = traffic_DD.diagonal()
    base = [traffic_DD.sum(0), traffic_DD.sum(0) - local_D, traffic_DD.sum(1) - local_D]
    # Computed, received, sent, experts sent and experts received by each rank; [..., D] with an axis per deciding rank
    sums = [*(part.astype(np.float64) for part in base), np.zeros(num_ranks), np.zeros(num_ranks)]
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
        changes = (own_OD - moved_OD, -moved_OD, -own_OD, chosen_OE @ owned_ED, taken_OD)
        sums = [
            (part[..., None, :] + change).reshape(-1, num_ranks) for part, change in zip(sums, changes, strict=True)
        ]
    computed, received, sent, out, into = (part.max(-1) for part in sums)
    return float(cost.time_of(np.maximum(received, sent), computed, np.maximum(out, into)).total.min())


if __name__ == "__main__":
    sys.exit(main())
