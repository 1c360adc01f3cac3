"""Compares iterations with each policy and workload to no policy and to even routing, on a slow network (slow_runs.py).

    python tools/bench/policy_time.py [--workloads NAME ...] [--variants NAME ...] [--balance="FLAGS"]
                                      [--markdown FILE] [flags of the run ...]

A job has all variants of a workload, which take turns, one iteration each. Each row is for one workload. It starts with
the milliseconds of an iteration without a policy, and with even routing. A cell of a variant, such as

    0.887 (0.880-0.905), 45%, 52.4 MB

has:
- its iteration time over that without a policy, as the mean over iterations of medians over jobs, with the lowest and
  highest job in brackets;
- the closed part of the gap between none and even routing, which is above 100% if guests also save messages;
- the bytes that Trans and Agg move in an iteration over all links;
- the number of experts that change their owner in an iteration, if any.

The time of an iteration is that of its slowest rank.

A second table has the mean and maximum of the planning time over the iteration time. Planning times are summed over
layers and averaged over ranks, which share this machine's cores.
"""

import argparse
import sys
from pathlib import Path

import ranks
from megatron_balance.workloads import imbalance
from megatron_balance.workloads.synthetic import BURST, NAMES, ROTATION, WORKLOADS
from namespaces import TestbedUnavailable
from policy_table import CEILING, NONE, Job, Sample, heads, joined, plan_heads, plan_row, row
from slow_runs import MODEL, Cluster, Variant, add_options, build, jobs

COMMON = f"{MODEL} --num-layers 2 --seq-length 256 --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 256"
"""There are two hot experts, so that hot_experts, hot_rank and spread_hot_experts differ. An expert is 0.5 MiB, 21 ms
at 200 Mbit/s; at 2.5 GFLOP/s attention takes 67 ms forward, experts 54 ms if loads are even. Later flags override
these."""

BALANCE = "--balance-guest-slots 3"

VARIANTS = {
    "top2": "top2",
    "fastermoe": "fastermoe",
    "pro_prophet": "pro_prophet",
    "flexmoe": "flexmoe",
    "quota": "quota",
    "demi": "demi",
    "demi transfer": "demi --balance-ownership transfer",
    "flexmoe transfer": "flexmoe --balance-ownership transfer",
}
"""Values of --balance-policy, with additional flags."""

DEFAULT = ["fastermoe", "pro_prophet", "flexmoe", "quota", "demi", "demi transfer"]

PERIODS = {"rotating_hotspot": ROTATION, "burst": BURST[0], **imbalance.PERIODS}
"""Period of a workload in iterations; 1 for others."""


def variants_of(names: list[str], balance: str) -> dict[str, Variant]:
    """Return the named variants, and the two that they are compared with."""
    compared = {NONE: Variant(""), CEILING: Variant("--moe-router-force-workload balanced")}
    return compared | {name: Variant(f"{balance} --balance-policy {VARIANTS[name]}") for name in names}


def whole_periods(workload: str, iterations: int) -> int:
    """Round `iterations` up to whole periods of the workload."""
    period = PERIODS.get(workload, 1)
    return -(-iterations // period) * period


def measure(
    profile: Path, variants: dict[str, Variant], common: str, cluster: Cluster, iterations: int, warmup: int
) -> dict[str, list[Sample]]:
    """Measure all variants; the task of every rank."""
    runs, _ = build(variants, common, profile, cluster)
    reports = ranks.take_turns(runs, iterations, warmup)
    return {name: [Sample.of(report) for report in steps] for name, steps in reports.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, gflops=2.5)
    others = [workload for workload in WORKLOADS if workload != "balanced"]
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=others, metavar="NAME")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=DEFAULT, metavar="NAME")
    parser.add_argument("--balance", default=BALANCE, metavar="FLAGS", help="flags of every variant")
    parser.add_argument("--iterations", type=int, default=6, help="measured iterations, rounded up to whole periods")
    parser.add_argument("--warmup", type=int, default=3, help="iterations before, for predictors and policies' memory")
    parser.add_argument("--repeats", type=int, default=3, help="jobs per workload")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables there")
    args, extra = parser.parse_known_args()
    cluster = Cluster.of(args)
    variants = variants_of(args.variants, args.balance)
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
