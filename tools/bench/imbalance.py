"""Compares MoE layers under the workloads of Megatron-LM's imbalance benchmark, in its three modes.

    python tools/bench/imbalance.py [--ranks 2] [--workloads W1 hot_rank ...] [--modes MODE ...] [--policies NAME ...]
                                    [--json FILE] [flags of the run ...]

The variants are megatron-core's layer, ours without a policy (`none`), and ours with each policy. Their models are in
the same processes and take turns, one iteration each. What a mode measures:

dispatch_only   forward exchanges of the MoE layers: rows travel to their experts, which return them unchanged, and
                back. The routing is given, so the router does not compute. Experts are copied before. This says nothing
                about the experts' computation, or about the cost of balancing.
moe_fwd_bwd     forward and backward passes of the MoE layers alone, with routers, experts, planning, Trans, Agg and the
                reduction of gradients. Nothing else computes that could hide communication.
training_step   iterations of a model that has these layers, with attention and optimizer.

After the measurement, each variant sends rows of integers through its placement, and its experts return them unchanged:
every rank must get back exactly K times what it sent, or the program exits with 1.

With --testbed, the model, devices and network are those of policy_time.py, where only our layer runs.

The table of a mode has the time of the slowest rank: the median over iterations, the 10th and 90th percentile, and the
ratio of the medians to the first variant; under W7, only the 90th percentile is that of a burst. `load` is max/mean of
the tokens for the ranks' own experts, before balancing. Ranks share this machine's cores.

Rank r has the tokens that follow those of rank r-1. Under W4, rank r has r+1 parts of all tokens; in training_step, all
ranks have equally many. All microbatches of a step have the same rows. Layer n draws with --seed plus n-1, so the
first layer has the experts of the benchmark.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import policy_time
import ranks
import slow_runs
from imbalance_ranks import measure, measure_emulated
from megatron_balance.planning.policies import registered
from megatron_balance.workloads import imbalance
from megatron_balance.workloads.synthetic import NAMES
from namespaces import TestbedUnavailable
from slow_runs import Cluster, add_options

MODES = ("dispatch_only", "moe_fwd_bwd", "training_step")

MEGATRON = "megatron"
NONE = "none"

COMMON = (
    "--num-layers 1 --hidden-size 512 --num-attention-heads 8 --num-experts 8 --moe-router-topk 2 --swiglu "
    "--moe-ffn-hidden-size 1024 --disable-bias-linear --micro-batch-size 1 --moe-token-dispatcher-type alltoall "
    "--position-embedding-type none --optimizer sgd --lr 1e-3 --train-iters 1000 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100 --num-workers 0 --attention-dropout 0 --hidden-dropout 0"
)
"""A layer of the benchmark's size; later flags override these."""


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the flags of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    policies = [name for name in registered() if name != NONE]
    parser.add_argument("--ranks", type=int, default=2, help="also the expert-parallel size")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE")
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=[*imbalance.WORKLOADS], metavar="NAME")
    parser.add_argument("--trace", metavar="DIR", help="route every step as in this trace (v1), instead of workloads")
    parser.add_argument("--write-trace", type=Path, metavar="DIR", help="write the first step's trace to DIR/WORKLOAD")
    parser.add_argument("--policies", nargs="*", default=policies, metavar="NAME", help="values of --balance-policy")
    parser.add_argument(
        "--balance", default=policy_time.BALANCE, metavar="FLAGS", help="flags of every variant with a policy"
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each rank, on average")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--iterations", type=int, default=20, help="measured, rounded up to whole periods")
    parser.add_argument("--warmup", type=int, default=5, help="iterations before")
    parser.add_argument("--testbed", action="store_true", help="run on the emulated cluster of the next five options")
    add_options(parser, gflops=2.5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all settings and times there")
    ranks.add_worker_option(parser)
    return parser.parse_known_args(argv)


def variants_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the flags of each variant."""
    theirs = {} if args.testbed else {MEGATRON: "--moe-layer-impl megatron"}
    return {**theirs, NONE: "", **{name: f"{args.balance} --balance-policy {name}" for name in args.policies}}


def tasks_of(args: argparse.Namespace, extra: Sequence[str]) -> list[ranks.Task]:
    """Return the parameters of all jobs, each of one workload in one mode; see imbalance_ranks.py."""
    layout = Cluster.of(args).flags if args.testbed else f"--expert-model-parallel-size {args.ranks}"
    model = policy_time.COMMON if args.testbed else COMMON
    return [
        {
            "mode": mode,
            "workload": workload,
            "trace": args.trace,
            # Only once, in the first mode
            "write_trace": str(args.write_trace / workload) if args.write_trace and mode == args.modes[0] else None,
            "seed": args.seed,
            "warmup": args.warmup,
            "iterations": policy_time.whole_periods(workload, args.iterations),
            "common": f"{model} --seq-length {args.tokens} {layout} {' '.join(extra)}",
            "variants": variants_of(args),
        }
        for mode in args.modes
        for workload in (args.workloads if args.trace is None else [Path(args.trace).name])
    ]


@contextmanager
def jobs(args: argparse.Namespace) -> Iterator[Callable[[ranks.Task], dict[str, Any]]]:
    """Yield `job(task)`, which measures a task on new ranks."""
    if args.testbed:
        cluster = Cluster.of(args)
        with slow_runs.jobs(cluster) as job:

            def measured(task: ranks.Task) -> dict[str, Any]:
                turns = (task["iterations"] + task["warmup"]) * len(task["variants"])
                return job(measure_emulated, task, cluster, turns=turns)[0]

            yield measured
    else:
        with ranks.noise():
            yield lambda task: ranks.job(__file__, args.ranks, task)


def worst(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Return the slowest rank's milliseconds in each iteration, given [iterations][ranks]."""
    return [1e3 * max(by_rank) for by_rank in seconds]


def records(task: ranks.Task, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return settings and results of each variant, given the result of `measure`."""
    settings = {key: value for key, value in task.items() if key != "variants"} | {"load": found["load"]}
    flags = task["variants"]
    return [
        {**settings, "variant": name, "flags": flags[name], "ms": statistics.median(worst(of["seconds"])), **of}
        for name, of in found["variants"].items()
    ]


def heads(mode: str, variants: Sequence[str]) -> list[str]:
    """Return the header lines of a mode's table."""
    return [_line([f"{mode}, ms", "load", *variants]), "|---" * (len(variants) + 2) + "|"]


def row(of_variants: Sequence[dict[str, Any]]) -> str:
    """Return the row of a workload, given its `records`, of which the first is the baseline."""
    first = of_variants[0]
    cells = []
    for record in of_variants:
        low, high = np.percentile(worst(record["seconds"]), [10, 90])
        cells.append(f"{record['ms']:.1f} ({low:.1f}-{high:.1f}), {record['ms'] / first['ms']:.3f}")
    return _line([first["workload"], f"{first['load']:.2f}", *cells])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    args, extra = parse(argv)
    if args.worker:
        return ranks.work(args.worker, measure)
    tasks = tasks_of(args, extra)
    everything = []
    try:
        with jobs(args) as job:
            for number, task in enumerate(tasks, start=1):
                print(f"{number} of {len(tasks)}: {task['mode']}, {task['workload']}", file=sys.stderr, flush=True)
                found = records(task, job(task))
                if not everything or everything[-1]["mode"] != task["mode"]:
                    print("", *heads(task["mode"], list(task["variants"])), sep="\n")
                print(row(found), flush=True)
                everything += found
    except TestbedUnavailable as error:
        print(f"imbalance.py: {error}", file=sys.stderr)
        return 2
    if args.json is not None:
        args.json.write_text(json.dumps(everything))
    changed = [record for record in everything if not record["exact"]]
    for record in changed:
        name = f"{record['mode']}, {record['workload']}, {record['variant']}"
        print(f"{name}: a rank did not get back the integers that it sent", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
