"""Simulate iterations of a training run on a cluster that need not exist.

    python tools/simulate.py --cluster configs/clusters/h100_measured.yaml --nodes 32 --load zipf:0.7 \\
        @configs/models/mixtral_8x7b.args <the flags of the training run>

The run's flags are those of pretrain_gpt_moe.py. Flags for data, tokenizer, learning rate and length may be left out,
because nothing is trained. Loads are even, or those of zipf:EXPONENT, gamma:DEVIATION, a workload of
--moe-router-force-workload, or a run's --balance-log-dir. With --compare FLAG=VALUE,VALUE the run is simulated with
each value, and compared with the first one; with --over-even, also with even routing without balancing.

A cluster's file either says what kernels of training reach (configs/clusters/h100_measured.yaml), or has the rates of
data sheets, which no run reaches. Below the table, a line states the error to expect, and another one names each run
that needs more memory than a GPU has.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatron_balance.device import cpu, quiet
from textfiles import positive_int

if TYPE_CHECKING:
    from megatron_balance.app.simulation import Target
    from megatron_balance.config.run_config import RunConfig
    from megatron_balance.simulate.job import LoadSource
    from megatron_balance.simulate.result import Recorder

GIB = 2**30
EVEN = "even"
"""Label of the run with even routing."""

MOVES = ("Trans", "Agg", "Plan", "Transfer")
"""Parts whose time in progress is shown, too."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--cluster", type=Path, metavar="FILE", required=True, help="a file like those of configs/clusters")
    add("--nodes", type=positive_int, metavar="N", required=True, help="number of nodes")
    add("--load", default="even", help="where tokens go (default: even)")
    add(
        "--iterations", type=positive_int, metavar="N", default=4, help="iterations; the last one is shown (default: 4)"
    )
    add("--seed", type=int, metavar="N", default=0, help="seed of the loads (default: 0)")
    spread = "how far a microbatch's loads are from --load: standard deviation of their logarithm (default: 0)"
    add("--spread", type=float, metavar="SIGMA", default=0.0, help=spread)
    graphs = "what CUDA graphs contain, which training does not support (default: none)"
    add("--cuda-graphs", choices=("none", "router", "attention", "full"), default="none", help=graphs)
    add("--fp8", action="store_true", help="as if products had 8-bit numbers, which training does not support")
    add("--compare", metavar="FLAG=VALUE,VALUE", help="simulate with each value of a flag")
    add("--plan-ms", type=float, metavar="MS", help="milliseconds of a plan (default: measured on this machine)")
    add("--trace", type=Path, metavar="FILE", help="write what ranks do in the last iteration, for Perfetto")
    add("--trace-ranks", type=int, metavar="RANK", nargs="+", default=[0], help="ranks of --trace (default: 0)")
    add("--over-even", action="store_true", help="also simulate even routing without balancing")
    first = "first iteration of a recorded run; below 0: from its end (default: 0)"
    add("--first-iteration", type=int, metavar="N", default=0, help=first)
    add("--html", type=Path, metavar="FILE", help="also write a page with the results as charts")
    add("--json", type=Path, metavar="FILE", help="also write the results as JSON")
    args, flags = parser.parse_known_args(argv)
    # Both must run before megatron.core is imported
    quiet.silence_expected_warnings()
    cpu.install(always=True)
    try:
        variants = [(label, args.load, run_flags) for label, run_flags in _variants(args.compare, flags)]
        if args.over_even:
            variants.insert(0, (EVEN, "even", [*_without_balancing(flags)]))
        results = [_simulate(args, *variant) for variant in variants]
    except ValueError as error:
        raise SystemExit(f"simulate.py: error: {error}") from error
    misfits = [f"{one['label']}: {one['misfit']}" for one in results if one["misfit"]]
    print("\n".join([*_table(results), expected_error(args.cluster), *misfits]))
    if args.html is not None:
        from simulation_page import page

        title = f"{args.nodes} nodes of {args.cluster.stem}, load {args.load}"
        args.html.write_text(page(title, results), encoding="utf-8")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def _variants(compare: str | None, flags: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return a label and the flags of each run; without a policy, other flags of balancing have no effect."""
    if compare is None:
        return [("run", [*flags])]
    flag, _, values = compare.partition("=")
    flag = f"--{flag.lstrip('-')}"
    if not values:
        raise ValueError(f"--compare {compare}: write FLAG=VALUE,VALUE")
    runs = []
    for value in values.split(","):
        kept = _without_balancing(flags) if (flag, value) == ("--balance-policy", "none") else flags
        runs.append((value, [*kept, flag, value]))
    return runs


def _without_balancing(flags: Sequence[str]) -> Iterator[str]:
    dropped = False
    for word in flags:
        if word.startswith(("-", "@")):
            dropped = word.startswith("--balance-")
        if not dropped:
            yield word


def expected_error(path: Path) -> str:
    """Return a sentence about the error of predictions for the cluster in a file."""
    from megatron_balance.profile.cluster import read

    cluster = read(path)
    if cluster.error is not None:
        return f"error to expect: {cluster.error.value:.0%}, {cluster.error.source}"
    if all(gpu.reached is not None for gpu in cluster.gpus):
        return "error to expect: unknown, no published run was predicted for this cluster"
    return f"error to expect: large, {path} has rates of data sheets, which training does not reach"


def configured(flags: Sequence[str], cluster: Path, ranks: int, **real: Any) -> "tuple[RunConfig, Target]":
    """Return the configuration of a run, and what it runs on; `cpu.install(always=True)` must have been called.

    Args:
        flags: the run's; those for data, tokenizer, learning rate and length may be missing.
        ranks: number of GPUs.
        real: more fields of Target.
    """
    from megatron_balance.app.simulation import Target
    from megatron_balance.cli.arguments import parse_args
    from megatron_balance.cli.checks import Machine
    from megatron_balance.job.groups import Topology
    from megatron_balance.profile.cluster import Ranks, profile_of, read
    from profile_cluster import with_stand_ins

    described = read(cluster)
    node_size = min(int(described.gpus_per_node.value), ranks)
    topology = Topology(ranks, node_size)
    own = ["--moe-comm-node-size", str(node_size), "--dry-run"]
    config = parse_args(with_stand_ins([*flags, *own]), Machine.here(topology.world_size)).config
    hidden = config.transformer.hidden_size
    # Only its links count, and they do not depend on the shape of experts
    whole = profile_of(described, Ranks(topology.world_size, node_size, node_size), hidden, hidden)
    bandwidth = described.memory_bandwidth
    return config, Target(topology=topology, profile=cluster, whole=whole, memory_bandwidth=bandwidth, **real)


def loads_of(config: "RunConfig", load: str, seed: int, first: int = 0, spread: float = 0.0) -> "LoadSource":
    """Return the loads that `--load` names.

    Args:
        first: index of the recorded iteration to begin with.
        spread: see `drawn_loads`.

    Raises:
        ValueError: there are no such loads.
    """
    from megatron_balance.build.profiles import microbatch_tokens
    from megatron_balance.observe.load_log import read_loads
    from simulated_loads import distribution, drawn_loads, even_loads, recorded

    transformer = config.transformer
    ranks = transformer.expert_model_parallel_size
    experts = transformer.num_moe_experts
    topk = transformer.moe_router_topk
    assert experts is not None
    # Of all shards of a host; ranks with the same tokens share them
    shards = transformer.expert_tensor_parallel_size or 1
    tokens = microbatch_tokens(config) * shards // transformer.tensor_model_parallel_size
    if load == "even":
        return even_loads(ranks, experts, topk, tokens)
    if Path(load).is_dir():
        _, found = next(iter(read_loads(Path(load)).items()))
        popularity = recorded(found.counts, ranks, experts, first)
    else:
        popularity = distribution(load, ranks, experts, seed)
    sharing = transformer.tensor_model_parallel_size * transformer.context_parallel_size // shards
    return drawn_loads(popularity, topk, tokens, seed, spread, max(1, sharing))


def _simulate(args: argparse.Namespace, label: str, load: str, flags: Sequence[str]) -> dict[str, Any]:
    from megatron_balance.app.dry_run import verdict
    from megatron_balance.app.simulation import simulated_job
    from megatron_balance.profile.cluster import read
    from megatron_balance.simulate.job import Simulation

    real = {"graphs": args.cuda_graphs, "fp8": args.fp8}
    ranks = args.nodes * int(read(args.cluster).gpus_per_node.value)
    config, target = configured(flags, args.cluster, ranks, **real)
    loads = loads_of(config, load, args.seed, args.first_iteration, args.spread)
    job, memory = simulated_job(config, target, None if args.plan_ms is None else args.plan_ms / 1000)
    misfit = None
    try:
        verdict([one.uses for one in memory], read(args.cluster), f"--cluster {args.cluster}")
    except ValueError as error:
        misfit = str(error)
    spans_of = args.trace_ranks if args.trace is not None else ()
    with Console(stderr=True).status(label) as status:
        simulation = Simulation(job, loads, lambda text: status.update(f"{label}: {text}"))
        seconds, recorder, busy = simulation.run(args.iterations, spans_of)
    if args.trace is not None:
        save_trace(recorder, args.trace.with_stem(f"{args.trace.stem}_{label}") if args.compare else args.trace)
    ranks = target.topology.world_size
    links = {"links within nodes": busy[:ranks], "links between nodes": busy[ranks : 2 * ranks]}
    links["adapters"] = busy[2 * ranks :]
    assert config.train.global_batch_size is not None and config.model.seq_length is not None
    return {
        "label": label,
        "seconds": seconds,
        "tokens_per_second": config.train.global_batch_size * config.model.seq_length / seconds,
        "mean_seconds": {part: float(one_D.mean()) for part, one_D in recorder.seconds.items()},
        "in_progress_seconds": dict(recorder.in_progress),
        "busy": {name: [float(one.mean() / seconds), float(one.max() / seconds)] for name, one in links.items()},
        "memory_gib": [sum(one.uses.values()) / GIB for one in memory],
        "misfit": misfit,
    }


def save_trace(recorder: "Recorder", path: Path) -> None:
    """Write the recorder's spans in the Trace Event Format, for Perfetto: one thread per lane, in microseconds."""
    lanes = sorted({(span.rank, span.lane) for span in recorder.spans})
    threads = {place: number for number, place in enumerate(lanes)}
    events: list[dict] = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}
        for (rank, lane), number in threads.items()
    ]
    events += [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({rank for rank, _ in lanes})
    ]
    events += [
        {
            "ph": "X",
            "name": span.label,
            "pid": span.rank,
            "tid": threads[span.rank, span.lane],
            "ts": round(1e6 * span.start, 3),
            "dur": round(1e6 * (span.end - span.start), 3),
        }
        for span in recorder.spans
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _table(results: Sequence[dict[str, Any]]) -> list[str]:
    from megatron_balance.simulate.result import PARTS

    width = max(12, *(len(one["label"]) + 2 for one in results))
    even = [one["seconds"] for one in results if one["label"] == EVEN]
    reference = results[len(even)] if len(results) > len(even) else results[0]
    first = reference["seconds"]

    def line(name: str, cells: Sequence[str]) -> str:
        return f"{name:36}" + "".join(f"{cell:>{width}}" for cell in cells)

    def parts(key: str, names: Sequence[str]) -> Iterator[str]:
        for name in names:
            cells = [one[key].get(name, 0.0) for one in results]
            if any(cells):
                yield line(f"  {name}", [f"{1e3 * cell:.2f}" for cell in cells])

    lines = [line("", [one["label"] for one in results])]
    lines.append(line("iteration, ms", [f"{1e3 * one['seconds']:.2f}" for one in results]))
    if len(results) > 1:
        lines.append(line(f"over {reference['label']}", [f"{one['seconds'] / first:.3f}" for one in results]))
    if even:
        lines.append(line("throughput over even routing", [f"{even[0] / one['seconds']:.3f}" for one in results]))
    lines.append(line("10^3 tokens/s", [f"{one['tokens_per_second'] / 1e3:.1f}" for one in results]))
    lines += ["mean of ranks, ms", *parts("mean_seconds", PARTS)]
    lines += ["in progress, hidden or not, ms", *parts("in_progress_seconds", MOVES)]
    lines.append("busy, mean (most)")
    for name in results[0]["busy"]:
        cells = [one["busy"][name] for one in results]
        lines.append(line(f"  {name}", [f"{mean:.0%} ({most:.0%})" for mean, most in cells]))
    lines.append(line("memory of the fullest stage, GiB", [f"{max(one['memory_gib']):.1f}" for one in results]))
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
