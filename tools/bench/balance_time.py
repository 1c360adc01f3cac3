"""Compares the iteration time with balancing policies to that without one, in the same training loop.

    python tools/bench/balance_time.py [--ranks 4] [--policy NAME ...] [--workload NAME ...]
                                       [--balance="FLAGS"] [flags of the run ...]

All models of a workload are in the same processes and take turns, one iteration each. In addition to the ratio of
times, a row shows the balance as in the training log: sums or means over layers, means over iterations.

Balancing can only help if each rank has its own cores: with more ranks than cores, heavy ranks use the idle time of
light ones anyway. Without imbalance (`--workload balanced`), a ratio should be 1.02 at most.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import ranks
from megatron_balance.workloads.synthetic import NAMES

if TYPE_CHECKING:
    from megatron_balance.cli.checks import Machine

COMMON = (
    "--num-layers 2 --num-attention-heads 4 --hidden-size 256 --moe-ffn-hidden-size 1024 --num-experts 8 "
    "--moe-router-topk 2 --seq-length 256 --micro-batch-size 8 --moe-token-dispatcher-type alltoall --lr 1e-3 "
    "--train-iters 1000 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-workers 0 "
    "--attention-dropout 0 --hidden-dropout 0"
)
"""Experts compute 2048 tokens per rank, twice, which is most of an iteration. Later flags override these."""

BASELINE = "none"
AGAIN = "none again"
"""A second run without a policy, which shows this machine's noise: its ratio should be 1."""

EVEN = "even routing"
"""The same run with a router that sends every expert the same number of tokens."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="also the expert-parallel size")
    parser.add_argument("--policy", nargs="+", default=["pro_prophet"], help="values of --balance-policy")
    parser.add_argument("--workload", nargs="+", choices=NAMES, default=["balanced", "hot_experts"])
    parser.add_argument("--balance", default="", metavar="FLAGS", help="flags of every variant with a policy")
    parser.add_argument("--repeats", type=int, default=3, help="jobs per workload")
    parser.add_argument("--iterations", type=int, default=20, help="measured iterations per policy and job")
    ranks.add_worker_option(parser)
    args, extra = parser.parse_known_args()
    if args.worker:
        return ranks.work(args.worker, _measure)
    print("workload, policy: ratio policy/none of the median iteration time | ms | what balancing did")
    with tempfile.TemporaryDirectory() as directory, ranks.noise():
        # --balance-profile auto keeps its measurement, once for all jobs, in the checkpoints' directory
        common = f"{COMMON} {' '.join(extra)} --expert-model-parallel-size {args.ranks} --save {directory}"
        for workload in args.workload:
            forced = f"{common} --moe-router-force-workload {workload}"
            flags = {BASELINE: forced, AGAIN: forced, EVEN: f"{common} --moe-router-force-workload balanced"}
            flags |= {policy: f"{forced} --balance-policy {policy} {args.balance}" for policy in args.policy}
            task = {"flags": flags, "iterations": args.iterations}
            jobs = [ranks.job(__file__, args.ranks, task) for _ in range(args.repeats)]
            times = [job["seconds"] for job in jobs]
            for policy in (AGAIN, EVEN, *args.policy):
                ratio = ranks.compare(times, policy, BASELINE)
                done = jobs[0]["balance"].get(policy, "")
                print(f"{workload}, {policy}: {ratio} |{done}", flush=True)
            for policy in (BASELINE, *args.policy):
                print(f"{workload}, {policy} over even routing: {ranks.compare(times, policy, EVEN)}", flush=True)
        for profile in Path(directory).glob("*.json"):
            print(f"profile: {_summary(profile)}")
    return 0


def _summary(path: Path) -> str:
    """Format the lines of a measured profile that the cost model reads."""
    profile = json.loads(path.read_text())
    links = {name: profile["links"][name]["ep"] for name in ("all_to_all", "p2p")}
    lines = [f"{name} {1e6 * line['alpha']:.0f} us + {1e9 * line['beta']:.2f} ns/B" for name, line in links.items()]
    return ", ".join(
        lines + [f"{name} {1e6 * profile[name]['seconds_per_token']:.2f} us/token" for name in ("forward", "backward")]
    )


def _measure(task: ranks.Task, machine: "Machine") -> dict:
    """Return a rank's seconds of every iteration by policy, and the log's fields about balance."""
    from megatron_balance.observe.balance import log_fields

    reports = ranks.take_turns(ranks.build(task["flags"], machine), task["iterations"])
    return {
        "seconds": {policy: [report.seconds for report in steps] for policy, steps in reports.items()},
        "balance": {
            policy: log_fields([report.balance for report in steps])
            for policy, steps in reports.items()
            if steps[0].balance
        },
    }


if __name__ == "__main__":
    sys.exit(main())
