"""Measures the error of the cost model's times, with sizes that its profile was not fitted to.

    python tools/bench/cost_model.py [--ranks 4] [--node-size 4] [--rounds 5] [--seed 1] [flags of the run ...]

A ClusterProfile of this machine is measured before and after every round. A round measures the operations themselves:
exchanges of uneven loads, Trans and Agg of random placements with experts of several sizes, and computation of uneven
loads. Trans and Agg are executed along the routes that a run would choose by the profile before the round, and along
chains. A prediction is the mean of those by both profiles, because the machine is faster at some times than at others.
Sizes are between and beyond the fitted ones, and drawn by `--seed` like loads and placements. A time is the slowest
rank's, the interquartile mean over `--repeats`, or over as many as take `--patience` seconds; all cases take turns.
Links are this machine's own; no slower network is emulated.

Every rank needs its own core: a rank that waits for a heavier one on the same core makes that one faster, which a model
of the busiest rank cannot predict.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

import ranks

if TYPE_CHECKING:
    from megatron_balance.cli.checks import Machine

COMMON = (
    "--num-layers 1 --num-attention-heads 4 --hidden-size 256 --moe-ffn-hidden-size 1024 --num-experts 8 "
    "--moe-router-topk 2 --seq-length 512 --micro-batch-size 2 --moe-token-dispatcher-type alltoall --lr 1e-3 "
    "--train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)
"""Experts are fitted to 256 to 4096 tokens per rank. Later flags override these."""

KINDS = ("all_to_all", "trans", "agg", "trans_in_many_batches", "agg_in_many_batches", "forward", "backward")
PAPERS = "Pro-Prophet reports below 5%, FlexMoE below 3%"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="also the expert-parallel size")
    parser.add_argument("--node-size", type=int, help="ranks per node (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="profiles, each followed by all cases")
    parser.add_argument("--repeats", type=int, default=9, help="minimum number of runs of each case in a round")
    parser.add_argument("--patience", type=float, default=0.15, help="seconds for which short cases are run")
    parser.add_argument("--seed", type=int, default=1, help="of sizes, loads and placements")
    ranks.add_worker_option(parser)
    args, extra = parser.parse_known_args()
    if args.worker:
        return ranks.work(args.worker, _measure)
    flags = f"{COMMON} {' '.join(extra)} --expert-model-parallel-size {args.ranks}"
    task = {name: getattr(args, name) for name in ("rounds", "repeats", "patience", "seed")}
    task |= {"flags": flags, "node_size": args.node_size or args.ranks}
    with ranks.noise():
        result = ranks.job(__file__, args.ranks, task)
    cases = result["cases"]
    seconds = np.array(result["seconds"])  # [rounds, cases, (predicted, measured)]
    for line in itertools.chain(_table(cases, seconds), _summary(cases, seconds)):
        print(line)
    return 0


def _table(cases: list[tuple[str, str]], seconds: np.ndarray) -> Iterator[str]:
    errors = seconds[..., 0] / seconds[..., 1] - 1
    yield f"{'':12} {'case':42} {'measured ms':>11} {'predicted':>9} {'error':>6}  rounds"
    for index, (kind, label) in enumerate(cases):
        predicted, measured = 1e3 * np.median(seconds[:, index], axis=0)
        each = " ".join(f"{error:+.0%}" for error in errors[:, index])
        error = np.median(errors[:, index])
        yield f"{kind:12} {label:42} {measured:11.3f} {predicted:9.3f} {error:+6.0%}  {each}"


def _summary(cases: list[tuple[str, str]], seconds: np.ndarray) -> Iterator[str]:
    """Yield mean absolute errors, their values in each round, mean signed errors, and the drift.

    `drift` is the mean distance of measured times from their median over rounds, a lower limit of any model's error.
    """
    errors = seconds[..., 0] / seconds[..., 1] - 1
    drift = np.abs(seconds[..., 1] / np.median(seconds[..., 1], axis=0) - 1)
    yield f"{'kind':12} cases  mean |error|: median (of every round)  signed  drift   ({PAPERS})"
    for kind in KINDS:
        chosen = [index for index, (name, _) in enumerate(cases) if name == kind]
        each = np.abs(errors[:, chosen]).mean(1).tolist()
        rounds = " ".join(f"{error:.1%}" for error in each)
        signed = np.median(errors[:, chosen].mean(1))
        yield (
            f"{kind:12} {len(chosen):5d}  {statistics.median(each):.1%} ({rounds})  {signed:+.1%}  "
            f"{drift[:, chosen].mean():.1%}"
        )


def _measure(task: ranks.Task, machine: "Machine") -> dict:
    """Return kind and label of every case, and a rank's predicted and measured seconds [rounds][cases]."""
    import cost_cases

    return cost_cases.measure(task, machine)


if __name__ == "__main__":
    sys.exit(main())
