"""Iterations with every policy under every workload on a slow network (slow_runs.py), beside none and even routing.

    python tools/bench/policy_time.py [--workloads NAME ...] [--variants NAME ...] [--balance="FLAGS"]
                                      [--markdown FILE] [flags of the run ...]

A job holds all variants of a workload; they take turns, one iteration each. A row is a workload: an iteration in
milliseconds without a policy, and where the router sends every expert equally much; then of each variant

    0.887 (0.880-0.905), 45%, 52.4 MB

its iterations over those without a policy, as means over iterations of medians over jobs (in brackets, of each job);
the share that it closes of the gap between none and even routing, more than all if guests also save messages; what
Trans and Agg move in an iteration, over all links; experts that change their owner in an iteration, if any do. An
iteration lasts as long as on its slowest rank.

A second table has the time of planning over that of the iteration, on average and at most, summed over layers, mean
over ranks, which share this machine's cores.
"""

import argparse
import sys
from pathlib import Path

import ranks
from megatron_balance.workloads.workloads import BURST, ROTATION, WORKLOADS
from namespaces import TestbedUnavailable
from policy_table import CEILING, NONE, Job, Sample, heads, joined, plan_heads, plan_row, row
from slow_runs import MODEL, Cluster, Variant, add_options, build, jobs

COMMON = f"{MODEL} --num-layers 2 --seq-length 256 --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 256"
"""Hot experts are a pair, so that hot_experts, hot_rank and spread_hot_experts differ. An expert is 0.5 MiB, 21 ms at
200 Mbit/s; at 2.5 GFLOP/s attention lasts 67 ms forward, experts 54 ms where loads are even. Later flags win."""

BALANCE = "--balance-guest-slots 3"

VARIANTS = {
    "top2": "top2",
    "fastermoe": "fastermoe",
    "pro_prophet": "pro_prophet",
    "flexmoe": "flexmoe",
    "demi": "demi",
    "demi transfer": "demi --balance-ownership transfer",
    "flexmoe transfer": "flexmoe --balance-ownership transfer",
}
"""Values of --balance-policy, with flags of their own."""

DEFAULT = ["fastermoe", "pro_prophet", "flexmoe", "demi", "demi transfer"]

PERIODS = {"rotating_hotspot": ROTATION, "burst": BURST[0]}
"""Iterations after which a workload comes round again; 1 for others."""


def variants_of(names: list[str], balance: str) -> dict[str, Variant]:
    """The two that others are compared with, and these."""
    compared = {NONE: Variant(""), CEILING: Variant("--moe-router-force-workload balanced")}
    return compared | {name: Variant(f"{balance} --balance-policy {VARIANTS[name]}") for name in names}


def whole_periods(workload: str, iterations: int) -> int:
    """At least so many iterations, in which every phase of the workload has its share."""
    period = PERIODS.get(workload, 1)
    return -(-iterations // period) * period


def measure(
    profile: Path, variants: dict[str, Variant], common: str, cluster: Cluster, iterations: int, warmup: int
) -> dict[str, list[Sample]]:
    """Task of every rank."""
    runs, _ = build(variants, common, profile, cluster)
    reports = ranks.take_turns(runs, iterations, warmup)
    return {name: [Sample.of(report) for report in steps] for name, steps in reports.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, gflops=2.5)
    others = [workload for workload in WORKLOADS if workload != "balanced"]
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=others, metavar="NAME")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=DEFAULT, metavar="NAME")
    parser.add_argument("--balance", default=BALANCE, metavar="FLAGS", help="of every variant, say --balance-overlap")
    parser.add_argument("--iterations", type=int, default=6, help="measured ones, rounded up to a workload's period")
    parser.add_argument("--warmup", type=int, default=3, help="iterations before: predictors and policies with memory")
    parser.add_argument("--repeats", type=int, default=3, help="jobs per workload")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables there")
    args, extra = parser.parse_known_args()
    cluster, variants = Cluster.of(args), variants_of(args.variants, args.balance)
    measured: dict[str, list[Job]] = {}
    print(f"{cluster}; {args.balance} {' '.join(extra)}\n")
    table = heads(args.variants)
    print("\n".join(table))
    try:
        with jobs(cluster) as job:
            for workload in args.workloads:
                common = f"{COMMON} --moe-router-force-workload {workload} {' '.join(extra)} {cluster.flags}"
                iterations = whole_periods(workload, args.iterations)
                task = (measure, variants, common, cluster, iterations, args.warmup)
                turns = (iterations + args.warmup) * len(variants)
                measured[workload] = [joined(job(*task, turns=turns)) for _ in range(args.repeats)]
                table.append(row(workload, measured[workload], args.variants))
                print(table[-1], flush=True)
    except TestbedUnavailable as error:
        print(f"policy_time.py: {error}", file=sys.stderr)
        return 2
    planning = [*plan_heads(args.variants), *(plan_row(name, of, args.variants) for name, of in measured.items())]
    print("", *planning, sep="\n")
    if args.markdown is not None:
        args.markdown.write_text("\n".join([*table, "", *planning, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
