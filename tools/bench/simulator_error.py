"""Compares simulated iterations with measured ones on a slow network with an emulated device (slow_runs.py).

    python tools/bench/simulator_error.py [--iterations 6] [--warmup 3] [--json FILE]

Nothing is fitted to what is measured: links and their latencies are those that the planners' profile of each job has,
and the loads are those of the measured runs. The real computation of the ranks, which is not emulated, is measured for
each job with even routing on a fast network with a fast device, and added to the simulated times.

A time is the mean over iterations of the slowest rank's. An error is the predicted time over the measured one, less 1.
Of runs with a policy, parts are compared too: exchanges, experts, and waits for Trans, Agg and Plan, all of them of the
first rank of each stage. The order of two runs of one job is right if the faster one is predicted to be faster; pairs
whose measured times differ by less than 2% are left out.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import ranks
from megatron_balance.device import cpu, quiet
from namespaces import TestbedUnavailable
from slow_runs import MODEL, Cluster, Variant, build, device_of, jobs, profile_of, sums_over_layers
from traffic import BURST

if TYPE_CHECKING:
    from megatron_balance.simulate.job import Result

PARTS = {
    "exchange": "measured_exchange_seconds",
    "experts": "measured_experts_seconds",
    "Trans": "trans_wait_seconds",
    "Agg": "agg_wait_seconds",
    "Plan": "plan_wait_seconds",
}
"""Parts of simulated iterations, and the fields of `LayerReport` that measure them."""

TIE = 0.02

SHAPE = f"{MODEL} --seq-length 256 --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 256"
GFLOPS = 2.5
LINK_MBIT = 200.0

FAST_GFLOPS = 1e6
FAST_MBIT = 1e5
"""A device and links that take hardly any time."""

EVEN = "--moe-router-force-workload balanced"

RUNS = {
    "even": EVEN,
    "none": "",
    **{name: f"--balance-policy {name} --balance-guest-slots 3" for name in ("flexmoe", "pro_prophet", "quota")},
    **{
        f"{name}, blockwise": f"--balance-policy {name} --balance-guest-slots 3 --balance-overlap blockwise"
        for name in ("flexmoe", "pro_prophet", "quota")
    },
    "4 chunks": "--moe-comm-chunks 4 --moe-comm-order optsche",
    "2dh": "--moe-comm-alltoall 2dh",
    "flat": "--moe-comm-alltoall flat",
}
RUNS["quota, 2 chunks"] = f"{RUNS['quota, blockwise']} --moe-comm-chunks 2"


class Job(NamedTuple):
    """Runs that take turns in the same processes."""

    name: str
    workload: str
    runs: Sequence[str]
    """Names in RUNS."""
    layers: int = 2
    sequences: int = 4
    """Sequences of an iteration, of all ranks together."""
    expert_parallel: int = 4
    stages: int = 1
    nodes: int = 2
    ranks_per_node: int = 2
    link_mbit: float = LINK_MBIT
    gflops: float = GFLOPS

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.nodes, self.ranks_per_node, self.link_mbit, self.gflops)

    @property
    def fast(self) -> "Job":
        """The job with even routing, where only the ranks' own computation takes time."""
        return self._replace(runs=("even",), link_mbit=FAST_MBIT, gflops=FAST_GFLOPS)

    @property
    def common(self) -> str:
        """Flags of all runs."""
        return (
            f"{SHAPE} --moe-router-force-workload {self.workload} --num-layers {self.layers} "
            f"--global-batch-size {self.sequences} --expert-model-parallel-size {self.expert_parallel} "
            f"--pipeline-model-parallel-size {self.stages} --moe-comm-node-size {self.ranks_per_node}"
        )


JOBS = (
    Job(
        "EP4, hot_rank",
        "hot_rank",
        ("even", "none", "pro_prophet", "pro_prophet, blockwise", "quota, blockwise", "flexmoe"),
    ),
    Job(
        "EP4, 4 layers, 2 microbatches, zero_load",
        "zero_load",
        ("even", "none", "quota, blockwise", "flexmoe, blockwise"),
        layers=4,
        sequences=8,
    ),
    Job(
        "EP4, chunks and all-to-alls, hot_experts",
        "hot_experts",
        ("none", "4 chunks", "2dh", "flat", "quota, 2 chunks"),
    ),
    Job(
        "two stages of EP2, 4 microbatches, hot_experts",
        "hot_experts",
        ("none", "quota, blockwise", "pro_prophet"),
        layers=4,
        sequences=8,
        expert_parallel=2,
        stages=2,
    ),
    Job(
        "two replicas of EP2 within nodes, spread_hot_experts",
        "spread_hot_experts",
        ("none", "quota, blockwise"),
        expert_parallel=2,
    ),
    Job(
        "EP4, one rank a node, rotating_hotspot",
        "rotating_hotspot",
        ("none", "pro_prophet, blockwise", "quota"),
        nodes=4,
        ranks_per_node=1,
    ),
)


class Sample(NamedTuple):
    """An iteration on one rank."""

    seconds: float
    parts: list[float]
    """Seconds of PARTS; zeros without a policy."""


def measure(profile: Path, job: Job, iterations: int, warmup: int) -> tuple[dict[str, list[Sample]], str]:
    """Measure all runs; the task of every rank. Return the samples, and the profile of the job."""
    variants = {name: Variant(RUNS[name]) for name in job.runs}
    runs = build(variants, job.common, profile, job.cluster, handling=True)
    reports = ranks.take_turns(runs, iterations, warmup)
    samples = {
        name: [Sample(step.seconds, sums_over_layers(step, PARTS.values())) for step in steps]
        for name, steps in reports.items()
    }
    return samples, profile.read_text()


@dataclass(frozen=True, eq=False)
class ForcedLoads:
    """The loads of a run with `--moe-router-force-workload`, exactly; a `simulate.job.LoadSource`."""

    workload: str
    num_ranks: int
    teams: int
    num_experts: int
    topk: int
    tokens: int
    """Tokens of a rank in a microbatch."""
    seed: int

    def __call__(self, iteration: int, layer: int, team: int, microbatches: int) -> np.ndarray:
        from megatron_balance.workloads.synthetic import workload_choices

        sources = self.teams * self.num_ranks
        counts_BDE = np.zeros((microbatches, self.num_ranks, self.num_experts), dtype=np.int64)
        for microbatch, rank in itertools.product(range(microbatches), range(self.num_ranks)):
            first = (microbatch * sources + team * self.num_ranks + rank) * self.tokens
            chosen_TK = workload_choices(
                self.workload,
                num_experts=self.num_experts,
                topk=self.topk,
                tokens=range(first, first + self.tokens),
                total_tokens=microbatches * sources * self.tokens,
                seed=self.seed + layer,
                step=iteration,
            )
            counts_BDE[microbatch, rank] = np.bincount(chosen_TK.ravel(), minlength=self.num_experts)
        return counts_BDE


def simulated(job: Job, name: str, profile: Path, iterations: int, warmup: int) -> "list[Result]":
    """Return the simulated iterations of a run."""
    from megatron_balance.app.simulation import Target, simulated_job
    from megatron_balance.cli.arguments import parse_args
    from megatron_balance.cli.checks import Machine
    from megatron_balance.job.groups import Topology
    from megatron_balance.simulate.job import Simulation

    flags = f"{job.common} {RUNS[name]} --dry-run --distributed-backend gloo"
    world = job.cluster.world_size
    config = parse_args(flags.split(), Machine.here(world)).config
    transformer = config.transformer
    length = config.model.seq_length
    assert transformer.num_moe_experts is not None and length is not None
    target = Target(
        topology=Topology(world, job.ranks_per_node),
        profile=profile,
        whole=profile_of(device_of(config, job.gflops), job.nodes, job.ranks_per_node, job.link_mbit),
        burst=BURST,
    )
    described, _ = simulated_job(config, target)
    loads = ForcedLoads(
        workload="balanced" if name == "even" else job.workload,
        num_ranks=transformer.expert_model_parallel_size,
        teams=described.stages[0].stage.teams,
        num_experts=transformer.num_moe_experts,
        topk=transformer.moe_router_topk,
        tokens=length,
        seed=config.train.seed,
    )
    simulation = Simulation(described, loads)
    return [simulation.iteration(number) for number in range(warmup + iterations)][warmup:]


def parts_of(result: "Result", stages: int) -> list[float]:
    """Return the simulated seconds of PARTS on the first rank of each stage, added up, as reports add up layers."""
    found = []
    for part in PARTS:
        seconds_D = result.recorder.seconds.get(part)
        found.append(0.0 if seconds_D is None else float(seconds_D[:: len(seconds_D) // stages].sum()))
    return found


class Row(NamedTuple):
    """A run, measured and simulated."""

    job: str
    run: str
    measured: float
    predicted: float
    parts: list[tuple[float, float]]
    """Measured and predicted seconds of PARTS; empty without a policy."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=6, help="measured iterations")
    parser.add_argument("--warmup", type=int, default=3, help="iterations before")
    parser.add_argument("--jobs", type=int, nargs="+", help="numbers of the jobs to run (default: all)")
    parser.add_argument("--json", type=Path, help="keep what is measured in this file, and measure only what it lacks")
    args = parser.parse_args()
    try:
        measured = _measured(args)
    except TestbedUnavailable as error:
        print(f"simulator_error.py: {error}", file=sys.stderr)
        return 2
    quiet.silence_expected_warnings()
    cpu.install(always=True)
    rows = []
    for job in JOBS:
        if job.name in measured:
            (fast,) = _rows(job.fast, measured[job.name]["fast"], args)
            computed = fast.measured - fast.predicted
            slow = _rows(job, measured[job.name]["slow"], args)
            rows += [row._replace(predicted=row.predicted + computed) for row in slow]
    print("\n".join([*_table(rows), "", *_summary(rows)]))
    return 0


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    """Return by job, and for its fast network (`Job.fast`), the samples of every run and rank, and the profile."""
    measured: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        measured = json.loads(args.json.read_text())
    for number, one in enumerate(JOBS):
        if args.jobs is not None and number not in args.jobs:
            continue
        found = measured.setdefault(one.name, {})
        for kind, runs in (("slow", one), ("fast", one.fast)):
            if kind in found:
                continue
            print(f"measuring {one.name}, {kind}", file=sys.stderr, flush=True)
            with jobs(runs.cluster) as job:
                turns = (args.iterations + args.warmup) * len(runs.runs) * 4
                by_rank = job(measure, runs, args.iterations, args.warmup, turns=turns)
            found[kind] = {"samples": [samples for samples, _ in by_rank], "profile": by_rank[0][1]}
            if args.json is not None:
                args.json.write_text(json.dumps(measured))
    return measured


def _rows(job: Job, measured: Mapping[str, Any], args: argparse.Namespace) -> Iterator[Row]:
    """Simulate the runs of a job."""
    with tempfile.TemporaryDirectory() as directory:
        profile = Path(directory) / "profile.json"
        profile.write_text(measured["profile"])
        for name in job.runs:
            by_rank = [samples[name] for samples in measured["samples"]]
            seconds = statistics.mean(max(one[0] for one in samples) for samples in zip(*by_rank, strict=True))
            results = simulated(job, name, profile, args.iterations, args.warmup)
            parts = []
            if "--balance-policy" in RUNS[name]:
                found = np.array([one[1] for one in by_rank[0]]).mean(0)
                expected = np.array([parts_of(one, job.stages) for one in results]).mean(0)
                parts = list(zip(found.tolist(), expected.tolist(), strict=True))
            yield Row(job.name, name, seconds, statistics.mean(one.seconds for one in results), parts)


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| job | run | measured, ms | simulated, ms | error | {' | '.join(PARTS)} |"
    yield "|---" * (5 + len(PARTS)) + "|"
    for row in rows:
        cells = [f"{1e3 * measured:.0f} → {1e3 * predicted:.0f}" for measured, predicted in row.parts]
        cells = [f"{1e3 * row.measured:.0f}", f"{1e3 * row.predicted:.0f}", f"{row.error:+.1%}", *cells]
        yield f"| {row.job} | {row.run} | {' | '.join(cells)} |"


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    errors = [abs(row.error) for row in rows]
    worst = max((row.error for row in rows), key=abs)
    yield f"{len(rows)} runs: mean |error| {statistics.mean(errors):.1%}, worst {worst:+.1%}"
    pairs = [
        (one, other)
        for one, other in itertools.combinations(rows, 2)
        if one.job == other.job and abs(one.measured / other.measured - 1) > TIE
    ]
    right = sum((one.measured < other.measured) == (one.predicted < other.predicted) for one, other in pairs)
    yield f"order of {len(pairs)} pairs of runs of one job: {right / max(1, len(pairs)):.0%} right"
    for index, part in enumerate(PARTS):
        both = np.array([row.parts[index] for row in rows if row.parts])
        measured, predicted = both.mean(0)
        yield f"{part}: {1e3 * measured:.1f} ms measured, {1e3 * predicted:.1f} ms simulated"


if __name__ == "__main__":
    sys.exit(main())
