"""Compares simulated iterations with measured ones on a slow network with an emulated device (slow_runs.py).

    python tools/bench/simulator_error.py [--iterations 6] [--warmup 3] [--json FILE]

Runs of FITTED determine two numbers: the CPU time of a layer's pass and that of an iteration, which the emulated device
does not emulate. Runs of HELD_OUT differ from them in layout, workload, policy, overlap, chunks or all-to-all, and are
predicted with these numbers; nothing is fitted to them. Links and their latencies are those that the planners' profile
of each job has. The loads are those of the measured runs.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import ranks
from namespaces import TestbedUnavailable
from simulator_jobs import EVEN, GFLOPS, JOBS, LINK_MBIT, Job, passes_of, stages_of
from slow_runs import Variant, build, device_of, jobs, profile_of, sums_over_layers

if TYPE_CHECKING:
    from megatron_balance.simulate.job import Result

PARTS = ("exchange", "experts", "Trans", "Agg", "Plan")
FIELDS = (
    "measured_exchange_seconds",
    "measured_experts_seconds",
    "trans_wait_seconds",
    "agg_wait_seconds",
    "plan_wait_seconds",
)
"""The fields of `LayerReport` that measure PARTS."""

TIE = 0.02


class Sample(NamedTuple):
    """An iteration on one rank."""

    seconds: float
    parts: list[float]
    """Seconds of PARTS; zeros without a policy."""


def measure(profile: Path, job: Job, iterations: int, warmup: int) -> tuple[dict[str, list[Sample]], str]:
    """Measure all runs; the task of every rank. Return the samples, and the profile of the job."""
    variants = {name: Variant(flags) for name, flags in job.variants.items()}
    runs, _ = build(variants, job.common, profile, job.cluster, handling=True)
    reports = ranks.take_turns(runs, iterations, warmup)
    samples = {
        name: [Sample(step.seconds, sums_over_layers(step, FIELDS)) for step in steps]
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

    def draw(self, iteration: int, layer: int, team: int, microbatches: int) -> np.ndarray:
        """See `LoadSource.draw`."""
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


def simulated(
    job: Job, name: str, profile: Path, iterations: int, warmup: int, cpu: tuple[float, float] = (0.0, 0.0)
) -> "list[Result]":
    """Return the simulated iterations of a run.

    Args:
        cpu: seconds of a layer's pass and of an iteration.
    """
    from megatron_balance.app.simulation import Target, simulated_job
    from megatron_balance.cli.arguments import parse_args
    from megatron_balance.cli.checks import Machine
    from megatron_balance.job.groups import Topology
    from megatron_balance.simulate.job import Simulation

    flags = f"{job.common} {job.variants[name]} --dry-run --distributed-backend gloo"
    world = job.nodes * job.ranks_per_node
    config = parse_args(flags.split(), Machine.here(world)).config
    transformer = config.transformer
    length = config.model.seq_length
    assert transformer.num_moe_experts is not None and length is not None
    target = Target(
        topology=Topology(world, job.ranks_per_node),
        profile=profile,
        whole=profile_of(device_of(config, GFLOPS), job.nodes, job.ranks_per_node, LINK_MBIT),
        layer_seconds=cpu[0],
        iteration_seconds=cpu[1],
    )
    simulated, _ = simulated_job(config, target)
    loads = ForcedLoads(
        workload="balanced" if job.variants[name] == EVEN else job.workload,
        num_ranks=transformer.expert_model_parallel_size,
        teams=simulated.stages[0].stage.teams,
        num_experts=transformer.num_moe_experts,
        topk=transformer.moe_router_topk,
        tokens=length,
        seed=config.train.seed,
    )
    simulation = Simulation(simulated, loads)
    return [simulation.iteration(number) for number in range(warmup + iterations)][warmup:]


def fitted(found: Sequence[tuple[Job, str, float, float]]) -> tuple[float, float]:
    """Return the CPU seconds of a layer's forward pass and of an iteration, at least 0, by least squares.

    Args:
        found: job, run, measured and simulated seconds without CPU time.
    """
    from scipy.optimize import nnls

    # A backward pass takes as many times longer as the emulated one
    rows = np.array([[3.0 * passes_of(job), 1.0] for job, *_ in found])
    rest = np.array([max(0.0, measured - predicted) for *_, measured, predicted in found])
    (layer, iteration), _ = nnls(rows, rest)
    return float(layer), float(iteration)


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
    is_fitted: bool
    measured: float
    predicted: float
    parts: list[tuple[float, float]]
    """Measured and predicted seconds of PARTS; zeros without a policy."""

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
    rows = _rows(measured, args)
    print("\n".join([*_table(rows), "", *_summary(rows)]))
    return 0


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    """Return by job the samples of every run and rank, and the profile."""
    measured: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        measured = json.loads(args.json.read_text())
    for number, one in enumerate(JOBS):
        if one.name in measured or (args.jobs is not None and number not in args.jobs):
            continue
        print(f"measuring {one.name}", file=sys.stderr, flush=True)
        with jobs(one.cluster) as job:
            turns = (args.iterations + args.warmup) * len(one.variants) * 4
            by_rank = job(measure, one, args.iterations, args.warmup, turns=turns)
        measured[one.name] = {"samples": [samples for samples, _ in by_rank], "profile": by_rank[0][1]}
        if args.json is not None:
            args.json.write_text(json.dumps(measured))
    return measured


def _rows(measured: Mapping[str, Any], args: argparse.Namespace) -> list[Row]:
    import tempfile

    from megatron_balance.device import cpu, quiet

    quiet.silence_expected_warnings()
    cpu.install(always=True)
    here = [job for job in JOBS if job.name in measured]
    with tempfile.TemporaryDirectory() as directory:
        profiles = {}
        for number, job in enumerate(here):
            profiles[job.name] = Path(directory) / f"{number}.json"
            profiles[job.name].write_text(measured[job.name]["profile"])

        def seconds(job: Job, name: str) -> float:
            by_rank = [samples[name] for samples in measured[job.name]["samples"]]
            return statistics.mean(max(one[0] for one in samples) for samples in zip(*by_rank, strict=True))

        def simulate(job: Job, name: str, cpu: tuple[float, float] = (0.0, 0.0)) -> "list[Result]":
            return simulated(job, name, profiles[job.name], args.iterations, args.warmup, cpu)

        def mean(results: "list[Result]") -> float:
            return statistics.mean(one.seconds for one in results)

        known = [(job, name, seconds(job, name), mean(simulate(job, name))) for job in here for name in job.fitted]
        cpu_seconds = fitted(known)
        print(
            f"fitted CPU time: {1e3 * cpu_seconds[0]:.2f} ms a layer's pass, {1e3 * cpu_seconds[1]:.1f} ms an iteration"
        )
        rows = []
        for job in here:
            for name, flags in job.variants.items():
                results = simulate(job, name, cpu_seconds)
                found = np.array([one[1] for one in measured[job.name]["samples"][0][name]]).mean(0)
                parts = np.array([parts_of(one, stages_of(job)) for one in results]).mean(0)
                pairs = list(zip(found.tolist(), parts.tolist(), strict=True)) if "--balance-policy" in flags else []
                rows.append(Row(job.name, name, name in job.fitted, seconds(job, name), mean(results), pairs))
        return rows


def _table(rows: Sequence[Row]) -> Iterator[str]:
    head = "| job | run | measured, ms | simulated, ms | error |"
    yield head + "".join(f" {part} |" for part in PARTS)
    yield "|---" * (5 + len(PARTS)) + "|"
    for row in rows:
        cells = [f"{1e3 * measured:.0f} → {1e3 * predicted:.0f}" for measured, predicted in row.parts]
        cells = cells or [""] * len(PARTS)
        name = f"{row.run} (fitted)" if row.is_fitted else row.run
        yield (
            f"| {row.job} | {name} | {1e3 * row.measured:.0f} | {1e3 * row.predicted:.0f} | {row.error:+.1%} |"
            + "".join(f" {cell} |" for cell in cells)
        )


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    held_out = [row for row in rows if not row.is_fitted]
    errors = [abs(row.error) for row in held_out]
    worst = max(held_out, key=lambda row: abs(row.error))
    yield f"{len(held_out)} held-out runs: mean |error| {statistics.mean(errors):.1%}, worst {worst.error:+.1%}"
    pairs = [
        (one, other)
        for one, other in itertools.combinations(rows, 2)
        if one.job == other.job and abs(one.measured / other.measured - 1) > TIE
    ]
    right = sum((one.measured < other.measured) == (one.predicted < other.predicted) for one, other in pairs)
    yield f"order of {len(pairs)} pairs of runs of one job: {right / max(1, len(pairs)):.0%} right"
    for index, part in enumerate(PARTS):
        both = np.array([row.parts[index] for row in held_out if row.parts])
        measured, predicted = both.sum(0)
        yield f"{part}: {1e3 * measured / len(both):.1f} ms measured, {1e3 * predicted / len(both):.1f} ms simulated"


if __name__ == "__main__":
    sys.exit(main())
