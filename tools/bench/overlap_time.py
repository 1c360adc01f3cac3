"""Measures the exposed cost of balancing, with Plan, Trans and Agg overlapped and not, on a slow network (testbed.py).

    python tools/bench/overlap_time.py [--nodes 2] [--ranks-per-node 2] [--link-mbit 200] [--gflops 10]
                                       [--variants NAME ...] [--timeline DIR] [flags of the run ...]

This is the ablation of Pro-Prophet (Fig. 14 and 15). Attention and experts sleep (emulated.py) like a device with one
FLOP rate, messages are real, and the planner's profile is exactly that device and network. Models of all variants are
in the same processes and take turns, one iteration each. For each variant this prints medians over iterations and jobs:
the iteration time of the slowest rank; the waits for Plan, Trans and Agg, summed over layers, mean over ranks; the
megabytes that Trans and Agg moved over all links. Then it prints checks; the exit code is 1 if one of them failed.
"""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ranks
from megatron_balance.cost.model import Overlap
from namespaces import TestbedUnavailable
from overlap_checks import (
    FULL,
    MUTANT,
    NONE,
    PLANNER,
    SCHEDULER,
    Job,
    Outcome,
    Sample,
    checks,
    lines,
    slowest,
    trans_share,
)
from slow_runs import MODEL, Cluster, Variant, add_options, build, jobs

if TYPE_CHECKING:
    from megatron_balance.training.run import Run

COMMON = (
    f"{MODEL} --num-layers 4 --seq-length 512 --num-experts 8 --moe-router-topk 1 --moe-ffn-hidden-size 1024 "
    "--moe-router-force-workload hot_experts"
)
"""An expert is 2 MiB, 84 ms at 200 Mbit/s; at 10 GFLOP/s attention takes 40 ms forward, experts 54 ms if loads are
even. Later flags override these."""

BALANCE = "--balance-guest-slots 3 --balance-policy"
"""With fewer guest slots, top3 would equal top2."""


def without_eq_8(run: "Run") -> None:
    """Let the planner account for Trans and Agg in full, as if nothing were overlapped."""
    for state in _balancer(run).layers.values():
        state.manager.cost = replace(state.manager.cost, overlap=Overlap(0.0, 0.0, experts=False))


def wait_at_issue(run: "Run") -> None:
    """Move every wait to the point where its operation is issued, so that nothing is overlapped."""
    from megatron_balance.timeline.lower import wait_at_once

    balancer = _balancer(run)
    original = balancer.schedule
    balancer.schedule = lambda microbatches: wait_at_once(original(microbatches))


def _balancer(run: "Run") -> Any:
    assert run.balancer is not None, "a variant without a policy is not changed"
    return run.balancer


PRO_PROPHET = f"{BALANCE} pro_prophet"

VARIANTS = {
    NONE: Variant(""),
    "top2": Variant(f"{BALANCE} top2"),
    "top3": Variant(f"{BALANCE} top3"),
    PLANNER: Variant(PRO_PROPHET),
    SCHEDULER: Variant(f"{PRO_PROPHET} --balance-overlap blockwise", without_eq_8),
    FULL: Variant(f"{PRO_PROPHET} --balance-overlap blockwise"),
    MUTANT: Variant(f"{PRO_PROPHET} --balance-overlap blockwise", wait_at_issue),
}


def measure(
    profile: Path, variants: dict[str, Variant], common: str, cluster: Cluster, iterations: int, timeline: Path | None
) -> dict[str, Outcome]:
    """Measure all variants; the task of every rank."""
    import torch.distributed as dist

    from megatron_balance.observe.trace import Timeline

    runs, device = build(variants, common, profile, cluster)
    for name, run in runs.items():
        if timeline is not None and run.balancer is not None:
            run.balancer.timeline = Timeline(timeline / re.sub(r"[^a-z0-9]+", "-", name), dist.get_rank())
    reports = ranks.take_turns(runs, iterations)
    for run in runs.values():
        if run.balancer is not None and run.balancer.timeline is not None:
            run.balancer.timeline.flush()
    assert device.attention_seconds is not None
    return {
        name: Outcome([Sample.of(report) for report in steps], device.attention_seconds, _estimate(runs[name]))
        for name, steps in reports.items()
    }


def _estimate(run: "Run") -> float | None:
    """Return the planner's estimate T_FNEC."""
    if run.balancer is None:
        return None
    cost = next(iter(run.balancer.layers.values())).manager.cost
    return None if cost.overlap is None else cost.overlap.forward


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, gflops=10.0)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--iterations", type=int, default=20, help="measured iterations per variant")
    parser.add_argument("--repeats", type=int, default=3, help="jobs")
    parser.add_argument(
        "--timeline", type=Path, help="directory for the last job's timelines, as with --balance-timeline, by variant"
    )
    args, extra = parser.parse_known_args()
    cluster = Cluster.of(args)
    variants = {name: VARIANTS[name] for name in args.variants}
    common = f"{COMMON} {' '.join(extra)} {cluster.flags}"
    turns = (args.iterations + ranks.WARMUP) * len(variants)
    measured: list[Job] = []
    try:
        with jobs(cluster) as job:
            for _ in range(args.repeats):
                task = (measure, variants, common, cluster, args.iterations, args.timeline)
                measured.append(slowest(job(*task, turns=turns)))
    except TestbedUnavailable as error:
        print(f"overlap_time.py: {error}", file=sys.stderr)
        return 2
    print(f"\n{cluster}")
    print("\n".join(lines(measured)))
    if MUTANT in measured[0]:
        print(trans_share(measured))
    found = list(checks(measured))
    print("\n".join(map(str, found)))
    return 0 if all(check.passed for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())
