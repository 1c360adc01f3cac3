"""Compares the simulator with published runs, exchanges and kernels (published_runs.yaml), and prints tables.

    python tools/bench/published_runs.py [--only WORD]

Each run has its source, its layout as flags, and the seconds of an iteration that its source states or that follow from
the throughput. Routing is even in all of them. Constants of configs/clusters/*_measured.yaml that have no other source
were fitted to the runs marked `fitted`; nothing was fitted to the others, whose errors are summed up below the table.

A run with many microbatches is simulated with few and with some more; each further microbatch takes as long as these.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_balance.device import cpu, quiet

ROOT = Path(__file__).parents[2]
SPREAD = 0.26
"""Measured in the quick start; see `drawn_loads`."""

COMMON = "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


class Row(NamedTuple):
    """A figure, measured and predicted."""

    name: str
    measured: float
    predicted: float
    fitted: bool = False

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", default="", help="only rows with this word in their name")
    args = parser.parse_args(argv)
    # Both must run before megatron.core is imported
    quiet.silence_expected_warnings()
    cpu.install(always=True)
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    tables = {
        "iteration, s": (predicted_run(run) for run in content["runs"] if args.only in run["name"]),
        "throughput with uneven over even routing": (
            predicted_ratio(one) for one in content["uneven"] if args.only in one["name"]
        ),
        "exchange, ms": (predicted_exchange(one) for one in content["exchanges"] if args.only in one["name"]),
        "four layers of DeepSeek-V3, forward and backward, ms": (
            row for row in predicted_trace(content["trace"]) if args.only in row.name
        ),
    }
    for title, rows in tables.items():
        found = []
        print(f"\n| {title} | measured | predicted | error | |\n|---|---|---|---|---|")
        for row in rows:
            found.append(row)
            kind = "fitted" if row.fitted else ""
            print(f"| {row.name} | {row.measured:.2f} | {row.predicted:.2f} | {row.error:+.0%} | {kind} |", flush=True)
        if errors := [abs(row.error) for row in found if not row.fitted]:
            print(f"\nnot fitted: {len(errors)} rows, error {median(errors):.0%} (median), {max(errors):.0%} (worst)")
    return 0


def predicted_run(run: Mapping[str, Any]) -> Row:
    """Return the seconds of an iteration of a published run."""
    return Row(run["name"], run["seconds"], _seconds(run), run["fitted"])


def _seconds(run: Mapping[str, Any], load: str = "even") -> float:
    flags = shlex.split(run["flags"])
    number = {flag: int(flags[flags.index(flag) + 1]) for flag in flags if flag in NUMBERS}
    tensor, stages, context, micro, whole = (number.get(flag, 1) for flag in NUMBERS)
    unit = run["gpus"] // (tensor * stages * context) * micro
    few = 2 * stages
    more = few + max(2, stages)
    microbatches = whole // unit
    if microbatches <= more:
        return _simulated(run, flags, whole, load)
    first, second = (_simulated(run, flags, count * unit, load) for count in (few, more))
    return first + (microbatches - few) / (more - few) * (second - first)


def predicted_ratio(one: Mapping[str, Any]) -> Row:
    """Return the throughput with the loads of a published max/mean, over that with even loads."""
    even, uneven = (_seconds(one, load) for load in ("even", f"gamma:{deviation(**one['published'])}"))
    return Row(one["name"], one["ratio"], even / uneven)


def deviation(max_mean: float, ranks: int, experts: int) -> float:
    """Return DEVIATION for which loads of experts from `gamma:DEVIATION` have this expected max/mean of ranks."""
    from scipy.optimize import brentq

    return brentq(lambda value: expected_max_mean(value, ranks, experts) - max_mean, 0.05, 5.0)


def expected_max_mean(deviation: float, ranks: int, experts: int) -> float:
    """Return the expected max/mean of ranks with equal numbers of experts, whose loads are `gamma:DEVIATION`.

    Sums of gamma variables are gamma variables, and their shares do not depend on their sum (E. Lukacs, "A
    characterization of the gamma distribution", 1955). So the largest share is the largest variable over the sum.
    """
    from scipy.integrate import quad
    from scipy.special import gammainc

    mean = experts / ranks / deviation**2
    most = mean + 40 * mean**0.5 + 40
    return quad(lambda value: 1 - gammainc(mean, value) ** ranks, 0, most, points=[mean], limit=200)[0] / mean


NUMBERS = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    *("--micro-batch-size", "--global-batch-size"),
)


def _simulated(run: Mapping[str, Any], flags: Sequence[str], batch: int, load: str) -> float:
    from megatron_balance.app.simulation import simulated_job
    from megatron_balance.simulate.job import Simulation
    from simulate import configured, loads_of

    place = flags.index("--global-batch-size") + 1
    words = [f"@{ROOT / word[1:]}" if word.startswith("@") else word for word in flags]
    words[place] = str(batch)
    real = {name: run[name] for name in ("graphs", "fp8") if name in run}
    cluster = ROOT / "configs/clusters" / f"{run['cluster']}.yaml"
    config, target = configured([*words, *COMMON.split()], cluster, run["gpus"], **real)
    job, _ = simulated_job(config, target)
    return Simulation(job, loads_of(config, load, 0, spread=SPREAD)).run(1).seconds


def predicted_exchange(one: Mapping[str, Any]) -> Row:
    """Return the milliseconds of DeepEP's combine, from the GB/s that its authors state.

    They count a token's bytes once for each rank (within a node) or each node (between nodes) with some of its experts.
    """
    from megatron_balance.cost.flex import FlexModel, Routing
    from megatron_balance.profile.cluster import Ranks, profile_of, read

    ranks, tokens, hidden = (one[name] for name in ("ranks", "tokens", "hidden"))
    nodes = ranks // 8
    routing = Routing(one["experts"], one["topk"], nodes, min(nodes, one["nodes_of_token"]))
    row_bytes = 2 * hidden
    counted = tokens * row_bytes * routing.distinct(nodes if nodes > 1 else ranks)
    profile = profile_of(read(ROOT / "configs/clusters" / f"{one['cluster']}.yaml"), Ranks(ranks, 8, 8), hidden, hidden)
    bytes_DD = np.full((ranks, ranks), tokens * one["topk"] * row_bytes / ranks)
    seconds = FlexModel.of(profile, routing).seconds(bytes_DD)
    return Row(one["name"], counted / one["gb_per_second"] / 1e6, 1e3 * seconds, one["fitted"])


def predicted_trace(trace: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the milliseconds of each kind of kernel in a profile of four layers of DeepSeek-V3.

    All of them ran beside exchanges, so computation and exchanges take longer than alone.
    """
    from megatron_balance.cost.flex import FlexModel, Routing
    from megatron_balance.profile.cluster import Ranks, profile_of, read
    from megatron_balance.profile.computation import Computation, recomputed
    from megatron_balance.profile.flops import attention_matrices
    from megatron_balance.profile.kernel_times import ACCUMULATED, Passes, cast, product
    from simulate import configured

    cluster = ROOT / "configs/clusters" / f"{trace['cluster']}.yaml"
    config, _ = configured(shlex.split(trace["flags"].replace("@", f"@{ROOT}/")), cluster, 64)
    transformer = config.transformer
    hidden = transformer.hidden_size
    inner = transformer.moe_ffn_hidden_size
    assert inner is not None and transformer.num_moe_experts is not None
    profile = profile_of(read(cluster), Ranks(64, 8, 8), hidden, inner, 1)
    kernels = profile.kernels
    assert kernels is not None
    tokens = trace["tokens"]
    rows = tokens * transformer.moe_router_topk
    expert = [(hidden, 2 * inner), (inner, hidden)]
    others = [*attention_matrices(transformer), *expert]
    repeated = attention_matrices(transformer)[1:4:2] if "mla_up_proj" in recomputed(transformer) else []
    local = transformer.num_moe_experts // 64
    weights = sum(i * o for i, o in others) + local * sum(i * o for i, o in expert)

    def of(part: Any, rows: float, matrices: Sequence[tuple[int, int]]) -> Passes:
        return Passes(0.0, 0.0).plus(*(part(kernels, rows, *sides) for sides in matrices))

    grouped = of(product, rows, expert)
    dense = of(product, tokens, others)
    # Products of input gradients read weights of 8 bits in the other layout
    transposed = kernels.read(2 * weights)
    casts = sum(of(cast, rows, expert).plus(of(cast, tokens, others))) + of(cast, tokens, repeated).forward + transposed
    computation = Computation(kernels, transformer, tokens, tokens)
    core, moved = computation.attention_parts()
    activations = Passes(4 * hidden + 3 * inner, 4 * hidden + 6 * inner)
    moved = moved.plus(computation.routing(), *(Passes(*map(kernels.read, (2 * rows * n for n in activations))),))
    gradients = kernels.read(ACCUMULATED * weights)
    seconds = {
        "grouped products, outputs and input gradients": 2 * grouped.forward,
        "gradients of weights": sum(one.backward - one.forward for one in (grouped, dense)) + gradients,
        "other products": 2 * dense.forward + of(product, tokens, repeated).forward,
        "attention, forward": core.forward,
        "attention, backward": core.backward,
        "casts": casts,
        "norms, permutation, activation and the rest": sum(moved),
    }
    rows_DD = np.full((64, 64), rows * 2 * hidden / 64)
    routing = Routing(transformer.num_moe_experts, transformer.moe_router_topk, 8, 4)
    # A cast row has a scale of 32 bits for each 128 numbers
    exchange = FlexModel.of(profile, routing).seconds
    times = {"combine": exchange(rows_DD), "dispatch of a known layout, fp8": exchange((0.5 + 2 / 128) * rows_DD)}
    # Eight of each in a pair. Passes hide all of them but the first and the last one
    alone = sum(times.values())
    computation = 4 * sum(seconds.values())
    added = kernels.beside.added(7 * alone, computation)[1]
    for name, one in seconds.items():
        yield Row(name, trace["ms"][name], 4e3 * one * (1 + added / computation))
    for name, one in times.items():
        yield Row(name, trace["ms"][name], 1e3 * (1 + kernels.beside.exchange) * one, name in trace["fitted"])
    yield Row("the pair of passes", trace["ms"]["the pair of passes"], 1e3 * (computation + added + alone))


if __name__ == "__main__":
    sys.exit(main())
