"""Compares the parallel schedules of tensor-parallel ranks and sharded experts, on a slow network (slow_runs.py).

    python tools/bench/schedule_time.py [--layouts 2x2 2x4 4x2 4x4] [--markdown FILE] [flags of the run ...]
    python tools/bench/schedule_time.py --model

A layout is N_MP x N_ESP; all ranks share the experts. Without --model, the shapes are those of Parm's Table III, scaled
to this network: one MoE layer, padded to its capacity. Attention does nothing and gradients are not reduced, because
the paper excludes them. With --model, it is Table V's whole GPT-2 with N_MP = N_ESP = 4, scaled.

All variants are in the same processes and take turns. Each row is for one shape: the milliseconds of `baseline`, the
speedups of the others, and the choice of `auto`. Times are medians over iterations, whose time is that of the slowest
rank. The row ends with the time of `auto` over that of the fastest schedule that it chooses from, by its own iterations
and by all iterations with its schedule. The second table is the paper's Table IV: means over shapes, with the slowest
and the fastest in brackets.
"""

import argparse
import contextlib
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import ranks
from emulated import emulate
from megatron_balance.cost.exchange import resized
from megatron_balance.profile.cluster_profile import ParallelLines
from namespaces import TestbedUnavailable
from slow_runs import MODEL, Cluster, add_options, device_of, jobs, profile_of

CANDIDATES = ("s1", "s2", "megatron")
"""The schedules that `auto` chooses from."""

VARIANTS = ("baseline", "megatron", "s1", "s2", "auto")

COMMON = (
    f"{MODEL} --max-position-embeddings 4096 --moe-router-load-balancing-type none "
    "--moe-router-force-workload balanced --moe-pad-expert-input-to-capacity --moe-router-topk 1"
)


class Shape(NamedTuple):
    """A layer, with the parameters of Parm's Table III."""

    batch: int
    length: int
    width: int
    """M, the width of the model."""
    inner: int
    """H, the experts' inner width."""
    factor: float
    """f, the capacity over the mean load of an expert."""

    def flags(self, mp: int, esp: int, world_size: int) -> str:
        """Return the flags of a run with one such layer and 8 experts."""
        return (
            f"{layout_flags(mp, esp, world_size)} --num-layers 1 --num-experts 8 --micro-batch-size {self.batch} "
            f"--seq-length {self.length} --hidden-size {self.width} --moe-ffn-hidden-size {self.inner} "
            f"--moe-expert-capacity-factor {self.factor}"
        )


SHAPES = tuple(
    Shape(batch, length, width, inner, factor)
    for batch, length, width, inner in ((4, 256, 256, 256), (2, 512, 256, 512), (2, 256, 512, 256))
    for factor in (1.2, 2.4)
)

GPT2 = (
    "--num-layers 4 --num-experts 2 --micro-batch-size 2 --seq-length 256 --hidden-size 384 --moe-ffn-hidden-size 1536 "
    "--num-attention-heads 12 --moe-expert-capacity-factor 1.2"
)
"""GPT-2 with a third of its layers and half of its width."""


def layout_flags(mp: int, esp: int, world_size: int) -> str:
    """Return the flags of a layout in which all ranks share the experts."""
    return (
        f"--tensor-model-parallel-size {mp} --expert-tensor-parallel-size {esp} "
        f"--expert-model-parallel-size {world_size // esp}"
    )


class Measured(NamedTuple):
    """Results of one job on one rank."""

    seconds: dict[str, list[float]]
    """Seconds of every variant's iterations."""
    chosen: str
    """Schedule that `auto` chose."""
    lines: ParallelLines
    """Times from which it chose."""


def install() -> None:
    """Prepare this process; call it before megatron-core is imported."""
    from megatron_balance.device import cpu, quiet

    quiet.silence_expected_warnings()
    cpu.install()


def measure(profile: Path, common: str, cluster: Cluster, whole: bool, iterations: int, warmup: int) -> Measured:
    """Measure all variants; the task of every rank."""
    install()
    import torch.distributed as dist

    from megatron_balance.build.profiles import measure_schedules
    from megatron_balance.cli.arguments import parse_args
    from megatron_balance.cli.checks import Machine
    from megatron_balance.flow.layer import BalancedMoELayer
    from megatron_balance.flow.parallel_schedule import SCHEDULES
    from megatron_balance.job.layout import build_groups

    machine = Machine.here(dist.get_world_size())
    config = parse_args(common.split(), machine).config
    device = device_of(config, cluster.gflops)
    groups = build_groups(config.transformer, config.train.seed)
    lines = measure_schedules(config, groups)
    if dist.get_rank() == 0:
        known = profile_of(device, cluster.nodes, cluster.ranks_per_node, cluster.link_mbit)
        hosts = config.transformer.expert_model_parallel_size
        node_size = cluster.ranks_per_node // lines.esp
        replace(resized(known, hosts, node_size), parallel=lines).save(profile)
    flags = {name: f"{common} --moe-parallel-schedule {name}" for name in VARIANTS}
    flags["auto"] += f" --balance-profile {profile}"
    with contextlib.nullcontext() if whole else no_reductions():
        runs = ranks.build(flags, machine)
        for run in runs.values():
            emulate(run.model, device if whole else replace(device, attention_seconds=None), log=lambda line: None)
            if not whole:
                skip_attention(run.model)
        reports = ranks.take_turns(runs, iterations, warmup, turn)
    modules = (module for chunk in runs["auto"].model for module in chunk.modules())
    steps = next(module.parallel.steps for module in modules if isinstance(module, BalancedMoELayer))
    chosen = next(name for name, order in SCHEDULES.items() if order == steps)
    return Measured({name: [report.seconds for report in found] for name, found in reports.items()}, chosen, lines)


def turn(number: int) -> list[str]:
    """Return the variants that train in a turn.

    The three similar ones train six times each; over three turns, each of them follows a slow one twice.
    """
    near = ["s1", "s2", "auto"] * 3
    first, second = (near[start:] + near[:start] for start in (2 * number % 3, (2 * number + 1) % 3))
    return ["baseline", *first, "megatron", *second]


@contextlib.contextmanager
def no_reductions() -> Iterator[None]:
    """Do not reduce gradients, except those of s1's routers, whose sum is part of the schedule."""
    with (
        mock.patch("megatron_balance.build.run.finalize_model_grads", lambda *_, **__: None),
        mock.patch("megatron_balance.build.run._is_copied", lambda weight: False),
    ):
        yield


def skip_attention(model: Sequence[Any]) -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for module in (module for chunk in model for module in chunk.modules()):
        if isinstance(module, TransformerLayer):
            attention: Any = module.self_attention
            attention.forward = lambda hidden_states, *_, **__: (hidden_states, None)


def job_of(by_rank: Sequence[Measured]) -> Measured:
    """Combine the ranks' results of one job; the time of an iteration is that of its slowest rank."""
    seconds = {
        name: [max(iteration) for iteration in zip(*(one.seconds[name] for one in by_rank), strict=True)]
        for name in VARIANTS
    }
    return by_rank[0]._replace(seconds=seconds)


def speedups(measured: Measured) -> dict[str, float]:
    """Return the speedup of each variant over `baseline`."""
    medians = {name: statistics.median(times) for name, times in measured.seconds.items()}
    return {name: medians["baseline"] / seconds for name, seconds in medians.items()}


def over_better(measured: Measured) -> tuple[float, float]:
    """Return the time of `auto` over that of the fastest of CANDIDATES.

    The first number is for its own iterations; the second is for all iterations with its schedule, which run the same
    program.
    """
    own = speedups(measured)
    chosen = measured.chosen
    together = measured.seconds[chosen] + measured.seconds["auto"]
    all_of_it = speedups(measured._replace(seconds=measured.seconds | {chosen: together, "auto": together}))
    one, other = (max(faster[name] for name in CANDIDATES) / faster["auto"] for faster in (own, all_of_it))
    return one, other


HEADS = (
    "N_MP",
    "N_ESP",
    "B",
    "L",
    "M",
    "H",
    "f",
    "baseline, ms",
    *VARIANTS[1:],
    "auto / better",
    "its schedule / better",
)


def row(mp: int, esp: int, shape: Shape, measured: Measured) -> str:
    """Return the row of one shape."""
    faster = speedups(measured)
    baseline = statistics.median(measured.seconds["baseline"])
    cells = [str(mp), str(esp), *(f"{number:g}" for number in shape), f"{1e3 * baseline:.0f}"]
    cells += [f"{faster[name]:.2f}x" for name in VARIANTS[1:]]
    cells[-1] += f" ({measured.chosen})"
    return cells_of([*cells, *(f"{ratio:.3f}" for ratio in over_better(measured))])


def cells_of(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(cells: Sequence[str]) -> str:
    return f"{cells_of(cells)}\n{'|---' * len(cells)}|"


def table_iv(found: Mapping[tuple[int, int], Sequence[Measured]]) -> list[str]:
    """Return the mean speedups, with the columns of the paper's Table IV."""
    rows = [head(("Schedule", "N_MP", "N_ESP", "Speedup"))]
    for name in VARIANTS[1:]:
        for (mp, esp), measured in found.items():
            faster = [speedups(one)[name] for one in measured]
            spread = f"{statistics.mean(faster):.2f}x ({min(faster):.2f}-{max(faster):.2f})"
            rows.append(cells_of(["Parm (auto)" if name == "auto" else name, str(mp), str(esp), spread]))
    return rows


def layers(job: Any, cluster: Cluster, args: argparse.Namespace, extra: str) -> list[str]:
    """Measure the single layers; return their tables."""
    world_size = cluster.nodes * cluster.ranks_per_node
    found = defaultdict(list)
    rows = [head(HEADS)]
    print(rows[0])
    for layout in args.layouts:
        mp, esp = map(int, layout.split("x"))
        for shape in SHAPES[:: args.every]:
            flags = f"{shape.flags(mp, esp, world_size)} --moe-comm-node-size {cluster.ranks_per_node}"
            common = f"{COMMON} {flags} {extra}"
            turns = (args.iterations + args.warmup) * len(turn(0))
            for _ in range(args.repeats):
                task = (measure, common, cluster, False, args.iterations, args.warmup)
                found[mp, esp].append(job_of(job(*task, turns=turns)))
                rows.append(row(mp, esp, shape, found[mp, esp][-1]))
                print(rows[-1], flush=True)
    by_iterations = zip(*(over_better(one) for measured in found.values() for one in measured), strict=True)
    own, all_of_it = (f"{sum(ratio <= 1.03 for ratio in ratios)} of {len(ratios)}" for ratios in by_iterations)
    best = f"the best of {', '.join(CANDIDATES)}"
    summary = f"auto is within 3% of {best} in {own} rows, the schedule that it took in {all_of_it}"
    tables = [*rows, "", *table_iv(found), "", summary]
    print("\n".join(tables[len(rows) :]))
    return tables


def model(job: Any, cluster: Cluster, args: argparse.Namespace, extra: str) -> list[str]:
    """Measure GPT-2; return its row of Table V."""
    world_size = cluster.nodes * cluster.ranks_per_node
    runs = []
    common = f"{COMMON} {layout_flags(4, 4, world_size)} {GPT2} --moe-comm-node-size {cluster.ranks_per_node} {extra}"
    turns = (args.iterations + args.warmup) * len(turn(0))
    for _ in range(args.repeats):
        task = (measure, common, cluster, True, args.iterations, args.warmup)
        runs.append(job_of(job(*task, turns=turns)))
    rows = [head(("Base Model", *VARIANTS, "Speedup of auto"))]
    for one in runs:
        cells = [
            f"{1e3 * statistics.mean(times):.0f} ± {1e3 * statistics.stdev(times):.0f}"
            for times in one.seconds.values()
        ]
        cells[-1] += f" ({one.chosen})"
        rows.append(cells_of(["GPT-2", *cells, f"{speedups(one)['auto']:.2f}x"]))
    print("\n".join(rows))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, gflops=6.0)
    parser.set_defaults(ranks_per_node=4, link_mbit=200.0, bus_mbit=800.0)
    parser.add_argument("--layouts", nargs="+", default=["2x2", "2x4", "4x2", "4x4"], help="N_MP x N_ESP")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth shape")
    parser.add_argument("--model", action="store_true", help="the scaled GPT-2 instead of single layers")
    parser.add_argument("--iterations", type=int, default=3, help="turns, preferably a multiple of 3, see turn()")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1, help="jobs per shape")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables there")
    args, extra = parser.parse_known_args()
    cluster = Cluster.of(args)
    print(f"{cluster}; {' '.join(extra)}\n")
    try:
        with jobs(cluster) as job:
            tables = (model if args.model else layers)(job, cluster, args, " ".join(extra))
    except TestbedUnavailable as error:
        print(f"schedule_time.py: {error}", file=sys.stderr)
        return 2
    if args.markdown is not None:
        args.markdown.write_text("\n".join([*tables, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
