"""Compares iterations of training runs that take turns in the same processes.

    python tools/bench/iteration_time.py NAME [--variants NAME ...] [--cases NAME ...] [flags of the runs ...]

NAME is a comparison of comparisons.py, such as `chunks` or `overlap`; `--list` prints its variants and cases. Most
comparisons train on an emulated network (testbed.py) with emulated devices (emulated.py). `--add NAME=FLAGS` adds a
variant, and `--balance FLAGS` adds flags to every variant with a policy.

A row has, for one variant: its iteration time over that of the first variant, as the median over jobs with the lowest
and highest job in parentheses; milliseconds; and what there is of the following:

- megabytes that a node's link carries in an iteration, gradients of other parameters included;
- whether losses and gradient norms equal those of the first variant, bit for bit;
- milliseconds that ranks waited for Plan, Trans and Agg, and the time of planning, as sums over layers;
- megabytes of Trans and Agg over all links, and experts that changed their owner;
- milliseconds that ranks waited for exchanges of rows;
- what `auto` chose.

An iteration takes as long as on its slowest rank. Where loads change over iterations, a time is the mean over
iterations, whose number is rounded up to whole periods of the workload; otherwise it is the median.
"""

import argparse
import contextlib
import functools
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import psutil

import ranks
from comparisons import COMPARISONS, Comparison
from megatron_balance.workloads import imbalance
from megatron_balance.workloads.synthetic import BURST, NAMES, ROTATION
from slow_runs import Cluster, Variant, build, jobs, sums_over_layers
from testbed import TestbedUnavailable

if TYPE_CHECKING:
    from megatron_balance.training.progress import StepReport
    from megatron_balance.training.run import Run

PERIODS = {"rotating_hotspot": ROTATION, "burst": BURST[0], **imbalance.PERIODS}
"""Period of a workload in iterations; 1 for others."""


class Sample(NamedTuple):
    """One iteration of one variant. All fields after the first three are sums over layers."""

    seconds: float
    loss: float | None
    grad_norm: float
    plan_wait_seconds: float = 0.0
    trans_wait_seconds: float = 0.0
    agg_wait_seconds: float = 0.0
    plan_seconds: float = 0.0
    trans_bytes: float = 0.0
    agg_bytes: float = 0.0
    experts_moved: float = 0.0
    exchange_wait_seconds: float = 0.0

    @classmethod
    def of(cls, report: "StepReport", exchange_wait_seconds: float) -> "Sample":
        sums = sums_over_layers(report, cls._fields[3:-1])
        return cls(report.seconds, report.losses.get("lm loss"), report.grad_norm, *sums, exchange_wait_seconds)


class Outcome(NamedTuple):
    """Results of one variant in one job."""

    samples: list[Sample]
    link_bytes: int
    """Bytes that a node sends to others in one more iteration; 0 on one node."""
    chosen: str
    """The choice of `auto`."""


Job = Mapping[str, Outcome]


def measure(
    profile: Path,
    variants: Mapping[str, Variant],
    common: str,
    cluster: Cluster,
    comparison: Comparison,
    timeline: Path | None,
) -> dict[str, Outcome]:
    """Measure all variants; the task of every rank."""
    import torch.distributed as dist

    from megatron_balance.observe.trace import Timeline

    with _without_reductions() if comparison.layer_only else contextlib.nullcontext():
        runs = build(variants, common, profile, cluster, comparison.handling)
        for name, run in runs.items():
            if comparison.layer_only:
                _skip_attention(run)
            if timeline is not None and run.balancer is not None:
                directory = timeline / re.sub(r"[^a-z0-9]+", "-", name)
                run.balancer.timeline = Timeline(directory, dist.get_rank())
        with _measured_waits() if comparison.exchanges else contextlib.nullcontext([]) as waits:
            step = functools.partial(_sampled_step, waits)
            samples = ranks.take_turns(runs, comparison.iterations, comparison.warmup, step)
        for run in runs.values():
            if run.balancer is not None and run.balancer.timeline is not None:
                run.balancer.timeline.flush()
        return {
            name: Outcome(
                samples=steps,
                link_bytes=_sent_in_one(runs[name]),
                chosen=_chosen(runs[name]) if " auto" in variants[name].flags else "",
            )
            for name, steps in samples.items()
        }


def _sampled_step(waits: list[float], run: "Run") -> Sample:
    from megatron_balance.training.loop import train_step

    waits.clear()
    report = train_step(run)
    return Sample.of(report, sum(waits))


@contextlib.contextmanager
def _measured_waits() -> Iterator[list[float]]:
    """Yield a list to which every wait for an exchange of rows appends its seconds."""
    from megatron_balance.comm import alltoall

    waits: list[float] = []
    start_exchange = alltoall.exchange_of

    def measured(*args: Any) -> alltoall.Exchange:
        exchange = start_exchange(*args)

        def wait() -> Any:
            start = time.perf_counter()
            rows = exchange.wait()
            waits.append(time.perf_counter() - start)
            return rows

        return alltoall.Exchange(wait)

    with mock.patch("megatron_balance.comm.alltoall.exchange_of", measured):
        yield waits


@contextlib.contextmanager
def _without_reductions() -> Iterator[None]:
    """Do not reduce gradients, except those of s1's routers, whose sum is part of the schedule."""
    with (
        mock.patch("megatron_balance.build.run.finalize_model_grads", lambda *_, **__: None),
        mock.patch("megatron_balance.build.run._is_copied", lambda weight: False),
    ):
        yield


def _skip_attention(run: "Run") -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for module in (module for chunk in run.model for module in chunk.modules()):
        if isinstance(module, TransformerLayer):
            attention: Any = module.self_attention
            attention.forward = lambda hidden_states, *_, **__: (hidden_states, None)


def _sent_in_one(run: "Run") -> int:
    """Return the bytes that leave this rank's node in one iteration, as counted by its network interface."""
    import torch.distributed as dist

    from megatron_balance.training.loop import train_step

    def sent() -> int:
        counters = psutil.net_io_counters(pernic=True)
        return counters["eth0"].bytes_sent if "eth0" in counters else 0

    dist.barrier()
    before = sent()
    train_step(run)
    dist.barrier()
    return sent() - before


def _chosen(run: "Run") -> str:
    """Return the numbers of chunks in the run's layers, or the parallel schedule."""
    from megatron_balance.flow.layer import moe_layers
    from megatron_balance.flow.parallel_schedule import SCHEDULES

    if run.chunks is not None:
        return "/".join(map(str, sorted({chunking.chunks for chunking in run.chunks.chosen.values()})))
    layers = [*moe_layers(run.model).values()]
    return next((name for name, steps in SCHEDULES.items() if layers and layers[0].parallel.steps == steps), "")


def combined(by_rank: Sequence[Job]) -> dict[str, Outcome]:
    """Combine all ranks' results of one job: the slowest rank's seconds, the mean of what ranks wait and plan."""
    return {
        name: first._replace(
            samples=[_over_ranks(samples) for samples in zip(*(job[name].samples for job in by_rank), strict=True)],
            link_bytes=max(job[name].link_bytes for job in by_rank),
        )
        for name, first in by_rank[0].items()
    }


def _over_ranks(samples: Sequence[Sample]) -> Sample:
    means = [statistics.fmean(values) for values in list(zip(*samples, strict=True))[3:]]
    slowest = max(sample.seconds for sample in samples)
    return Sample(slowest, samples[0].loss, samples[0].grad_norm, *means)


def rows(case: str, found: Sequence[Job]) -> list[list[str]]:
    """Return the cells of the rows of one case; `found` has one or more jobs."""
    first, *_ = found[0]
    middle = statistics.fmean if PERIODS.get(case, 1) > 1 else statistics.median
    firsts = [middle(sample.seconds for sample in job[first].samples) for job in found]
    table = []
    for name in found[0]:
        outcomes = [job[name] for job in found]
        seconds = [middle(sample.seconds for sample in outcome.samples) for outcome in outcomes]
        ratios = [own / other for own, other in zip(seconds, firsts, strict=True)]
        samples = [sample for outcome in outcomes for sample in outcome.samples]
        mean = Sample(0.0, None, 0.0, *map(statistics.fmean, list(zip(*samples, strict=True))[3:]))
        waits = [mean.plan_wait_seconds, mean.trans_wait_seconds, mean.agg_wait_seconds]
        same = all(_learned(job[name]) == _learned(job[first]) for job in found)
        table.append(
            [
                case,
                name,
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
                f"{1e3 * statistics.median(seconds):.0f}",
                _unless_zero(max(outcome.link_bytes for outcome in outcomes) / 1e6, "{:.1f}"),
                "yes" if same else "no",
                " / ".join(f"{1e3 * one:.1f}" for one in waits) if any(waits) else "",
                _unless_zero(1e3 * mean.plan_seconds, "{:.1f}"),
                _unless_zero((mean.trans_bytes + mean.agg_bytes) / 1e6, "{:.1f}"),
                _unless_zero(mean.experts_moved, "{:.1f}"),
                _unless_zero(1e3 * mean.exchange_wait_seconds, "{:.0f}"),
                ", ".join(dict.fromkeys(outcome.chosen for outcome in outcomes)),
            ]
        )
    return table


def _learned(outcome: Outcome) -> list[tuple[float | None, float]]:
    return [(sample.loss, sample.grad_norm) for sample in outcome.samples]


def _unless_zero(number: float, form: str) -> str:
    return form.format(number) if number else ""


HEADS = (
    *("case", "variant", "time over the first's", "ms", "MB per link", "same bits"),
    *("waited for Plan / Trans / Agg, ms", "planning, ms", "Trans and Agg, MB", "experts moved"),
    *("waited for exchanges, ms", "chosen"),
)


def line(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def asked(args: argparse.Namespace) -> tuple[Comparison, list[Cluster]]:
    """Return the comparison with what the options change, and the clusters that it runs on."""
    known = COMPARISONS[args.comparison]
    added = dict(one.split("=", 1) for one in args.add)
    every = {**known.variants, **{name: Variant(flags) for name, flags in added.items()}}
    every = {
        name: variant._replace(flags=f"{variant.flags} {args.balance}")
        if "--balance-policy" in variant.flags
        else variant
        for name, variant in every.items()
    }
    cases = {**known.cases, **{name: f"--moe-router-force-workload {name}" for name in NAMES}}
    comparison = replace(
        known,
        variants={name: every[name] for name in args.variants or every},
        cases={name: cases[name] for name in args.cases or known.cases},
        iterations=args.iterations or known.iterations,
        warmup=known.warmup if args.warmup is None else args.warmup,
    )
    own = known.cluster
    clusters = [
        replace(
            own,
            nodes=args.nodes or own.nodes,
            ranks_per_node=args.ranks_per_node or own.ranks_per_node,
            link_mbit=link,
            bus_mbit=args.bus_mbit or own.bus_mbit,
            gflops=speed,
        )
        for link in args.link_mbit or [own.link_mbit]
        for speed in args.gflops or known.speeds
    ]
    return comparison, clusters


def whole_periods(case: str, iterations: int) -> int:
    """Round `iterations` up to whole periods of the case's workload."""
    period = PERIODS.get(case, 1)
    return -(-iterations // period) * period


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--nodes", type=int, help="these options replace the comparison's own cluster")
    parser.add_argument("--ranks-per-node", type=int)
    parser.add_argument("--link-mbit", type=float, nargs="+", help="Mbit/s of each node's link, one table for each")
    parser.add_argument("--bus-mbit", type=float, help="Mbit/s within each node; default: the loopback's rate")
    parser.add_argument("--gflops", type=float, nargs="+", help="1e9 operations per second of the emulated device")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="the first is compared with the others")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="cases, or workloads of --moe-router-force-workload")
    parser.add_argument("--add", nargs="+", default=[], metavar="NAME=FLAGS", help="more variants")
    parser.add_argument("--balance", default="", metavar="FLAGS", help="more flags of every variant with a policy")
    parser.add_argument("--iterations", type=int, help="measured iterations")
    parser.add_argument("--warmup", type=int, help="iterations before")
    parser.add_argument("--repeats", type=int, default=3, help="jobs of a case")
    parser.add_argument("--timeline", type=Path, help="directory for the last job's timelines, by variant")
    parser.add_argument("--list", action="store_true", help="print the variants and cases, and stop")
    args, extra = parser.parse_known_args()
    try:
        comparison, clusters = asked(args)
    except KeyError as error:
        parser.error(f"{error}: not among the variants and cases of {args.comparison}; --list prints them")
    if args.list:
        print("\n".join(["variants:", *comparison.variants, "", "cases:", *comparison.cases]))
        return 0
    try:
        for cluster in clusters:
            print("", f"{cluster} {' '.join(extra)}", "", line(HEADS), "|---" * len(HEADS) + "|", sep="\n", flush=True)
            with jobs(cluster) as job:
                for case, flags in comparison.cases.items():
                    common = f"{comparison.common} {cluster.flags} {flags} {' '.join(extra)}"
                    now = replace(comparison, iterations=whole_periods(case, comparison.iterations))
                    turns = (now.iterations + now.warmup + 1) * len(now.variants)
                    task = (measure, now.variants, common, cluster, now, args.timeline)
                    found = [combined(job(*task, turns=turns)) for _ in range(args.repeats)]
                    print("\n".join(line(cells) for cells in rows(case, found)), flush=True)
    except TestbedUnavailable as error:
        print(f"iteration_time.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
