"""Compares iterations with tokens in chunks, in different orders, to those without, on a slow network (slow_runs.py).

    python tools/bench/chunk_time.py [--speeds 3 6 12] [--chunks 2 4 8] [--markdown FILE] [flags of the run ...]
    python tools/bench/chunk_time.py --ablation fp8 [--speeds 6]

Each row is for one speed of the emulated device (GFLOP/s), with the ratio of a layer's exchange time to its experts'
time, by the model. All variants are in the same processes and take turns, one iteration each. The first column has the
milliseconds without chunks. The others have ratios to these: medians over jobs of ratios of medians over iterations,
with the lowest and highest job in brackets. The column of `auto` also has its choice, and its ratio to the best of the
others. The time of an iteration is that of its slowest rank.

The ablation is ScheMoE's Table 10: the backend's all-to-all, a codec, Pipe-A2A, and chunks in the optimal order, each
in addition to the previous ones.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

import ranks
from namespaces import TestbedUnavailable
from slow_runs import MODEL, Cluster, Variant, add_options, build, jobs

EXPERTS = 16
TOPK = 4
SEQUENCE = 512

COMMON = (
    f"{MODEL} --num-layers 2 --seq-length {SEQUENCE} --num-experts {EXPERTS} --moe-router-topk {TOPK} "
    "--moe-ffn-hidden-size 256 --moe-router-force-workload balanced"
)
"""A rank's rows are 2 MiB. Later flags override these."""

PLAIN = "1 chunk"

ORDERS = ("sequential", "interleaved", "optsche")


def variants_of(chunks: Sequence[int]) -> dict[str, Variant]:
    """Return the variants without chunks, with every order and number of chunks, and with `auto`."""
    fixed = {
        f"{order} {degree}": Variant(f"--moe-comm-chunks {degree} --moe-comm-order {order}")
        for degree in chunks
        for order in ORDERS
    }
    return {PLAIN: Variant(""), **fixed, "auto": Variant("--moe-comm-chunks auto")}


def ablation(codec: str) -> dict[str, Variant]:
    """Return the variants of the ablation, each with the flags of the previous ones."""
    steps = {
        "naive": "--moe-comm-alltoall flat",
        "+ codec": f"--moe-comm-codec {codec} --moe-comm-codec-directions all",
        "+ pipe": "--moe-comm-alltoall pipe",
        "+ scheduling": "--moe-comm-chunks auto",
    }
    names = list(steps)
    return {name: Variant(" ".join(list(steps.values())[: names.index(name) + 1])) for name in names}


class Measured(NamedTuple):
    """Results of one job on one rank."""

    seconds: dict[str, list[float]]
    """Seconds of every variant's iterations."""
    chosen: str
    """Numbers of chunks in the layers of the last variant."""
    network_share: float
    """Exchange time without chunks over the experts' time."""


def measure(
    profile: Path, variants: Mapping[str, Variant], common: str, cluster: Cluster, iterations: int, warmup: int
) -> Measured:
    """Measure all variants; the task of every rank."""
    runs, _ = build(variants, common, profile, cluster, handling=True)
    reports = ranks.take_turns(runs, iterations, warmup)
    choice = list(runs.values())[-1].chunks
    assert choice is not None
    each = SEQUENCE * TOPK / EXPERTS
    ways = choice.decide.model.times(np.full((cluster.nodes * cluster.ranks_per_node, EXPERTS), each))
    network = sum(way.a1 + way.a2 for way in ways)
    experts = sum(way.e for way in ways)
    degrees = sorted({chunking.chunks for chunking in choice.chosen.values()})
    seconds = {name: [report.seconds for report in steps] for name, steps in reports.items()}
    return Measured(seconds, "/".join(map(str, degrees)), network / experts)


def job_of(by_rank: Sequence[Measured]) -> Measured:
    """Combine the ranks' results of one job; the time of an iteration is that of its slowest rank."""
    seconds = {
        name: [max(iteration) for iteration in zip(*(one.seconds[name] for one in by_rank), strict=True)]
        for name in by_rank[0].seconds
    }
    return by_rank[0]._replace(seconds=seconds)


def heads(names: Sequence[str]) -> list[str]:
    """Return the two header lines of the table."""
    cells = ["GFLOP/s", "network / experts", f"{names[0]}, ms", *names[1:], f"{names[-1]} / best of others"]
    return [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]


def row(speed: float, measured: Sequence[Measured]) -> str:
    """Return the row of one speed."""
    first, *others, last = measured[0].seconds
    medians = [{name: statistics.median(times) for name, times in one.seconds.items()} for one in measured]
    plain = statistics.median(one[first] for one in medians)
    ratios = {name: [one[name] / one[first] for one in medians] for name in medians[0]}
    best = min([first, *others], key=lambda name: statistics.median(ratios[name]))
    chosen = ", ".join(dict.fromkeys(one.chosen for one in measured))
    cells = [f"{speed:g}", f"{measured[0].network_share:.2f}", f"{1e3 * plain:.0f}"]
    cells += [_spread(ratios[name]) for name in others]
    cells.append(f"{_spread(ratios[last])}: {chosen}")
    cells.append(_spread([one[last] / one[best] for one in medians]))
    return f"| {' | '.join(cells)} |"


def _spread(ratios: Sequence[float]) -> str:
    """Format the median, the lowest and the highest job."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, gflops=6.0)
    parser.add_argument("--speeds", nargs="+", type=float, default=[3.0, 6.0, 12.0], help="GFLOP/s of the devices")
    parser.add_argument("--chunks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--ablation", metavar="CODEC", help="ScheMoE's Table 10 with this codec")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="jobs per speed")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there")
    args, extra = parser.parse_known_args()
    cluster = Cluster.of(args)
    variants = ablation(args.ablation) if args.ablation else variants_of(args.chunks)
    print(f"{replace(cluster, gflops=args.speeds[0])} and other speeds; {' '.join(extra)}\n")
    table = heads(list(variants))
    print("\n".join(table))
    try:
        with jobs(cluster) as job:
            for speed in args.speeds:
                at_speed = replace(cluster, gflops=speed)
                common = f"{COMMON} {' '.join(extra)} {at_speed.flags}"
                task = (measure, variants, common, at_speed, args.iterations, args.warmup)
                turns = (args.iterations + args.warmup) * len(variants)
                table.append(row(speed, [job_of(job(*task, turns=turns)) for _ in range(args.repeats)]))
                print(table[-1], flush=True)
    except TestbedUnavailable as error:
        print(f"chunk_time.py: {error}", file=sys.stderr)
        return 2
    if args.markdown is not None:
        args.markdown.write_text("\n".join([*table, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
