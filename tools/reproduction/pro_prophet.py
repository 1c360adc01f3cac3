"""Pro-Prophet's Tables IV and V, and its Figs. 10, 11, 12 and 14.

Loads: a Zipf distribution whose three most popular experts of 16 take more than half of all tokens (Fig. 3). Baselines:
DeepSpeed-MoE pads to a capacity that drops nothing; FasterMoE is our policy `fastermoe` without overlap.
"""

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from reproduction.simulated import FASTERMOE, Job, Seconds, System, padded, simulated
from reproduction.tables import Found, Table, found

if TYPE_CHECKING:
    from megatron_balance.simulate.job import SimulatedJob

LOAD = "zipf:1.1"
BLOCKWISE = "--balance-overlap blockwise"
PLANNER = "--balance-policy pro_prophet --balance-token-split local_first"

SYSTEMS = {
    "deepspeed": System(loads=padded),
    "fastermoe": System(f"{FASTERMOE} 7"),
    "pro_prophet": System(f"{PLANNER} {BLOCKWISE}"),
}


class Cluster(NamedTuple):
    """One of the paper's clusters, with one expert for each of its ranks."""

    file: str
    nodes: int
    tokens: int
    """Tokens of an iteration."""

    def job(self, model: str, topk: int) -> Job:
        """Return the training of a model."""
        ranks = 4 * self.nodes
        flags = (
            f"--bf16 --num-experts {ranks} --expert-model-parallel-size {ranks} --moe-router-topk {topk} "
            f"--seq-length {self.tokens // ranks} --global-batch-size {ranks}"
        )
        return Job(model=f"moe_gpt_{model.lower()}", flags=flags, cluster=self.file, nodes=self.nodes, load=LOAD)


HPNV = Cluster("pro_prophet_hpnv.yaml", 4, 16384)
HPWNV = Cluster("pro_prophet_hpwnv.yaml", 4, 16384)
LPWNV = Cluster("pro_prophet_lpwnv.yaml", 2, 4096)

Speedups = Mapping[tuple[str, int], tuple[float, float]]
"""Model, k -> speedups of FasterMoE and of Pro-Prophet over DeepSpeed-MoE."""

TABLE_IV: Speedups = {
    ("S", 1): (1.63, 1.98),
    ("M", 1): (1.99, 2.22),
    ("L", 1): (1.62, 1.80),
    ("DS", 1): (1.34, 1.70),
    ("DM", 1): (1.68, 2.26),
    ("S", 2): (2.31, 2.62),
    ("M", 2): (1.82, 2.10),
    ("L", 2): (1.94, 2.23),
    ("DS", 2): (1.77, 1.94),
    ("DM", 2): (1.84, 2.07),
}

TABLE_V: Speedups = {
    ("S", 1): (1.20, 1.30),
    ("M", 1): (1.02, 1.18),
    ("DS", 1): (1.12, 1.30),
    ("DM", 1): (0.96, 1.26),
    ("S", 2): (1.56, 1.91),
    ("M", 2): (1.29, 1.94),
    ("DS", 2): (1.44, 1.64),
    ("DM", 2): (1.25, 1.58),
}

FIG_10_MODELS = ("S", "M", "L", "DS", "DM")
FIG_10 = 1.19
"""Average over FasterMoE, k=1 (section VI-A)."""

FIG_11 = {"deepspeed": (1.60, 2.25), "fastermoe": (1.09, 1.49)}
"""Ranges over the layers of MoE-GPT-M, k=1 and k=2 (section VI-B)."""

FIG_12 = 1.34
"""Average over FasterMoE of MoE-GPT-M, k=1 (section VI-B)."""

FIG_14 = {1: (1.26, 1.14, 1.03), 2: (1.12, 1.01, 1.02)}
"""k -> speedups of the planner over no optimization, of the scheduler over that, and of both together over that."""


@dataclass(frozen=True)
class Unaware:
    """Pro-Prophet's planner, which does not know what computation hides (Eq. 6 in place of Eq. 8)."""

    policy: Any

    def plan(self, counts: Any, current: Any, cost: Any) -> Any:
        """See `Policy.plan`."""
        return self.policy.plan(counts, current, dataclasses.replace(cost, overlap=None))


def unaware(job: "SimulatedJob") -> None:
    """Let the planners of a job not know what computation hides."""
    for stage in job.stages:
        for manager in stage.managers.values():
            manager.policy = Unaware(manager.policy)  # pyright: ignore[reportAttributeAccessIssue]


COMPONENTS = {
    "none": System(),
    "planner": System(PLANNER),
    "scheduler": System(f"{PLANNER} {BLOCKWISE}", adapt=unaware),
    "full": System(f"{PLANNER} {BLOCKWISE}"),
}


def _speedups(cluster: Cluster, speedups: Speedups, iterations: int) -> Iterator[Found]:
    for (model, topk), (faster, ours) in speedups.items():
        job = cluster.job(model, topk)
        base, *others = (simulated(job, system, iterations).iteration for system in SYSTEMS.values())
        label = f"{model}, k={topk}"
        yield found(label, "fastermoe", faster, base / others[0])
        yield found(label, "pro_prophet", ours, base / others[1])


def _over_fastermoe(models: Sequence[str], paper: float, iterations: int) -> Iterator[Found]:
    speedups = []
    for model in models:
        job = HPWNV.job(model, 1)
        base, ours = (simulated(job, SYSTEMS[name], iterations).iteration for name in ("fastermoe", "pro_prophet"))
        speedups.append(base / ours)
    each = ", ".join(f"{model} {one:.2f}" for model, one in zip(models, speedups, strict=True))
    yield found(f"average ({each}), k=1", "pro_prophet", paper, statistics.mean(speedups))


def _layers(iterations: int) -> Iterator[Found]:
    for topk in (1, 2):
        job = HPWNV.job("M", topk)
        layers: dict[str, Seconds] = {name: simulated(job, system, iterations) for name, system in SYSTEMS.items()}
        ours = layers["pro_prophet"].layers
        for base, paper in FIG_11.items():
            speedups = [layers[base].layers[number] / ours[number] for number in ours]
            yield found(f"over {base}, k={topk}, slowest layer", "pro_prophet", paper, min(speedups))
            yield found(f"over {base}, k={topk}, fastest layer", "pro_prophet", paper, max(speedups))


def _components(iterations: int) -> Iterator[Found]:
    for topk, paper in FIG_14.items():
        job = HPWNV.job("M", topk)
        before = 0.0
        for index, (name, system) in enumerate(COMPONENTS.items()):
            seconds = simulated(job, system, iterations).iteration
            if index:
                yield found(f"k={topk}", name, paper[index - 1], before / seconds)
            before = seconds


TABLES = {
    "pro_prophet_iv": Table(
        "Pro-Prophet, Table IV: 4 HPNV nodes, 16384 tokens, speedup over DeepSpeed-MoE",
        functools.partial(_speedups, HPNV, TABLE_IV),
    ),
    "pro_prophet_v": Table(
        "Pro-Prophet, Table V: 2 LPWNV nodes, 4096 tokens, speedup over DeepSpeed-MoE",
        functools.partial(_speedups, LPWNV, TABLE_V),
    ),
    "pro_prophet_fig_10": Table(
        "Pro-Prophet, Fig. 10a and 10b: 4 HPWNV nodes, k=1, average speedup over FasterMoE",
        functools.partial(_over_fastermoe, FIG_10_MODELS, FIG_10),
    ),
    "pro_prophet_fig_11": Table("Pro-Prophet, Fig. 11: MoE-GPT-M, 4 HPWNV nodes, speedup of each layer", _layers),
    "pro_prophet_fig_12": Table(
        "Pro-Prophet, Fig. 12: MoE-GPT-M, 4 HPWNV nodes, k=1, speedup of iterations over FasterMoE",
        functools.partial(_over_fastermoe, ("M",), FIG_12),
    ),
    "pro_prophet_fig_14": Table(
        "Pro-Prophet, Fig. 14: MoE-GPT-M, 4 HPWNV nodes, speedup of each component over those before it", _components
    ),
}
