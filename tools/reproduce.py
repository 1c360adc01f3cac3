"""Simulates tables of the papers at their own models and clusters, next to the papers' numbers.

    python tools/reproduce.py [NAME ...]

Times are simulated (simulate.py) with the rates of data sheets for 16-bit numbers. Speedups are over the paper's
baseline. Loads have the shares that the papers' own figures have: a Zipf distribution whose three most popular experts
of 16 take more than half of all tokens (Pro-Prophet, Fig. 3), or whose ten most popular ones of 64 take three quarters
(FlexMoE, Fig. 3a). A plan takes a millisecond. Baselines:

    deepspeed    every expert computes and receives as many rows as the most popular one: padded to a capacity that
                 drops nothing
    fastermoe    our policy `fastermoe`, which copies experts to all ranks, without overlap
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_balance.device import cpu, quiet

if TYPE_CHECKING:
    from megatron_balance.simulate.job import LoadSource

ROOT = Path(__file__).parents[1]

RUNS = {
    "deepspeed": "",
    "fastermoe": "--balance-policy fastermoe",
    "pro_prophet": "--balance-policy pro_prophet --balance-token-split local_first --balance-overlap blockwise",
    "flexmoe": "--balance-policy flexmoe",
}
"""Flags of each system."""

PADDED = "deepspeed"

PLAN_SECONDS = 1e-3
"""Seconds of a plan, so that tables repeat; it is that of our planners on such clusters."""

COMMON = "--bf16 --micro-batch-size 1 --moe-router-pre-softmax --moe-token-dispatcher-type alltoall"

WITHIN = (0.1, 0.25)
"""Relative distances from the paper's number that the summary counts."""


class Row(NamedTuple):
    """A line of a table: a model with its flags, and the paper's speedups over the baseline by system."""

    label: str
    model: str
    """A file of configs/models."""
    flags: str
    speedups: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table or figure of a paper."""

    title: str
    cluster: str
    nodes: int
    load: str
    baseline: str
    rows: Sequence[Row]
    averages: bool = False
    """Whether the paper's text only gives the average over the rows."""


def _pro_prophet(experts: int, topk: int, speedups: Mapping[str, tuple[float, float]]) -> Iterator[Row]:
    tokens = {16: 1024, 8: 512, 32: 1024}[experts]
    shape = f"--num-experts {experts} --expert-model-parallel-size {experts} --moe-router-topk {topk}"
    batch = f"--seq-length {tokens} --global-batch-size {experts}"
    for model, (faster, ours) in speedups.items():
        label = f"{model.removeprefix('moe_gpt_').upper()}, k={topk}"
        yield Row(label, model, f"{shape} {batch}", {"fastermoe": faster, "pro_prophet": ours})


def _fig_10(experts: int, topk: int) -> Iterator[Row]:
    models = ("moe_gpt_s", "moe_gpt_m", "moe_gpt_l", "moe_gpt_ds", "moe_gpt_dm")
    for row in _pro_prophet(experts, topk, dict.fromkeys(models, (1.0, 1.19))):
        yield row._replace(speedups={"pro_prophet": 1.19})


def _flexmoe(model: str, experts: int) -> Row:
    flags = f"--expert-model-parallel-size {experts} --global-batch-size {4 * experts} --micro-batch-size 4"
    return Row(model, model, flags, {"flexmoe": 1.30})


TABLES = {
    "pro_prophet_iv": Table(
        title="Pro-Prophet, Table IV: 4 HPNV nodes, 16384 tokens, speedup over DeepSpeed-MoE",
        cluster="pro_prophet_hpnv.yaml",
        nodes=4,
        load="zipf:1.1",
        baseline="deepspeed",
        rows=[
            *_pro_prophet(
                16,
                1,
                {
                    "moe_gpt_s": (1.63, 1.98),
                    "moe_gpt_m": (1.99, 2.22),
                    "moe_gpt_l": (1.62, 1.80),
                    "moe_gpt_ds": (1.34, 1.70),
                    "moe_gpt_dm": (1.68, 2.26),
                },
            ),
            *_pro_prophet(
                16,
                2,
                {
                    "moe_gpt_s": (2.31, 2.62),
                    "moe_gpt_m": (1.82, 2.10),
                    "moe_gpt_l": (1.94, 2.23),
                    "moe_gpt_ds": (1.77, 1.94),
                    "moe_gpt_dm": (1.84, 2.07),
                },
            ),
        ],
    ),
    "pro_prophet_v": Table(
        title="Pro-Prophet, Table V: 2 LPWNV nodes, 4096 tokens, speedup over DeepSpeed-MoE",
        cluster="pro_prophet_lpwnv.yaml",
        nodes=2,
        load="zipf:1.1",
        baseline="deepspeed",
        rows=[
            *_pro_prophet(
                8,
                1,
                {
                    "moe_gpt_s": (1.20, 1.30),
                    "moe_gpt_m": (1.02, 1.18),
                    "moe_gpt_ds": (1.12, 1.30),
                    "moe_gpt_dm": (0.96, 1.26),
                },
            ),
            *_pro_prophet(
                8,
                2,
                {
                    "moe_gpt_s": (1.56, 1.91),
                    "moe_gpt_m": (1.29, 1.94),
                    "moe_gpt_ds": (1.44, 1.64),
                    "moe_gpt_dm": (1.25, 1.58),
                },
            ),
        ],
    ),
    "pro_prophet_fig_10": Table(
        title="Pro-Prophet, Fig. 10a and 10b: HPWNV nodes, k=1, average speedup over FasterMoE",
        cluster="pro_prophet_hpwnv.yaml",
        nodes=4,
        load="zipf:1.1",
        baseline="fastermoe",
        rows=[*_fig_10(16, 1)],
        averages=True,
    ),
    "flexmoe_fig_5": Table(
        title="FlexMoE, Fig. 5: 32 GPUs (S) and 64 GPUs (L), average speedup over FasterMoE",
        cluster="flexmoe.yaml",
        nodes=0,
        load="zipf:1.26",
        baseline="fastermoe",
        rows=[_flexmoe("gpt_moe_s", 32), _flexmoe("gpt_moe_l", 64)],
        averages=True,
    ),
}


@dataclass(frozen=True, eq=False)
class PaddedLoads:
    """Loads in which every source sends each expert as many rows as the most popular expert gets from any of them."""

    loads: "LoadSource"

    def draw(self, iteration: int, layer: int, team: int, microbatches: int) -> np.ndarray:
        """See `LoadSource.draw`."""
        counts_BDE = self.loads.draw(iteration, layer, team, microbatches)
        return np.broadcast_to(counts_BDE.max((1, 2), keepdims=True), counts_BDE.shape).copy()


class Found(NamedTuple):
    """A simulated speedup, and the paper's."""

    table: str
    row: str
    system: str
    paper: float
    ours: float

    @property
    def ratio(self) -> float:
        return self.ours / self.paper


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"tables (default: all): {', '.join(TABLES)}")
    parser.add_argument("--iterations", type=int, default=4, help="iterations to simulate; the last one counts")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in TABLES:
            parser.error(f"{name}: choose from {', '.join(TABLES)}")
    quiet.silence_expected_warnings()
    cpu.install(always=True)
    found: list[Found] = []
    for name in args.names or TABLES:
        rows = [*_reproduced(name, TABLES[name], args.iterations)]
        print(f"\n{TABLES[name].title}\n")
        print("| row | system | paper | simulated | ratio |\n|---|---|---|---|---|")
        for one in rows:
            print(f"| {one.row} | {one.system} | {one.paper:.2f} | {one.ours:.2f} | {one.ratio:.2f} |", flush=True)
        found += rows
    print()
    for name in dict.fromkeys(one.table for one in found):
        print(_summary(name, [one for one in found if one.table == name]))
    return 0


def _reproduced(name: str, table: Table, iterations: int) -> Iterator[Found]:
    rows = []
    for row in table.rows:
        seconds = {system: _seconds(table, row, system, iterations) for system in (table.baseline, *row.speedups)}
        rows += [
            Found(name, row.label, system, paper, seconds[table.baseline] / seconds[system])
            for system, paper in row.speedups.items()
        ]
    if not table.averages:
        yield from rows
        return
    for system in dict.fromkeys(one.system for one in rows):
        some = [one for one in rows if one.system == system]
        each = ", ".join(f"{one.row} {one.ours:.2f}" for one in some)
        yield Found(name, f"average ({each})", system, some[0].paper, statistics.mean(one.ours for one in some))


def _seconds(table: Table, row: Row, system: str, iterations: int) -> float:
    """Return the seconds of a simulated iteration."""
    from megatron_balance.app.simulation import simulated_job
    from megatron_balance.simulate.job import Simulation
    from simulate import configured, loads_of

    model = (ROOT / "configs/models" / f"{row.model}.args").read_text().splitlines()
    flags = [word for line in model if not line.startswith("#") for word in line.split()]
    flags += f"{COMMON} {row.flags} {RUNS[system]}".split()
    cluster = ROOT / "configs/clusters" / table.cluster
    experts = int(flags[len(flags) - 1 - flags[::-1].index("--expert-model-parallel-size") + 1])
    nodes = table.nodes or experts // 8
    config, target = configured(flags, cluster, nodes)
    job, _ = simulated_job(config, target, PLAN_SECONDS)
    loads = loads_of(config, table.load, 0)
    simulation = Simulation(job, PaddedLoads(loads) if system == PADDED else loads)
    return statistics.mean(simulation.iteration(number).seconds for number in range(iterations) if number)


def _summary(name: str, found: Sequence[Found]) -> str:
    counts = [sum(abs(one.ratio - 1) <= limit for one in found) for limit in WITHIN]
    texts = ", ".join(f"{count} within {limit:.0%}" for count, limit in zip(counts, WITHIN, strict=True))
    return f"{name}: {len(found)} numbers: {texts}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
