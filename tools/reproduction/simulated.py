"""Simulates a job of a paper on the paper's cluster, with the flags of one of the systems that it compares."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from megatron_balance.simulate.job import LoadSource, SimulatedJob
    from simulated_loads import Popularity

CONFIGS = Path(__file__).parents[2] / "configs"

COMMON = "--micro-batch-size 1 --moe-router-pre-softmax --moe-token-dispatcher-type alltoall"

PLAN_SECONDS = 1e-3
"""Seconds of a plan, so that tables repeat; it is that of our planners on such clusters."""

FASTERMOE = "--balance-policy fastermoe --balance-guest-slots"
"""With enough guest slots for all experts whose copies pay, because FasterMoE has no limit."""

LAYER_PARTS = ("experts", "codec", "exchange", "others' experts", "gathers", "Trans", "Agg", "Plan")
"""Parts of an iteration that belong to MoE layers."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run of a paper, without the system that is compared."""

    model: str
    """A file of configs/models."""
    flags: str
    cluster: str
    """A file of configs/clusters."""
    nodes: int
    load: "str | Popularity" = "even"
    """A load of tools/simulate.py, or how popular each expert is."""
    seed: int = 0


@dataclass(frozen=True)
class System:
    """One of the systems that are compared: the flags and changes with which it trains the job."""

    flags: str = ""
    loads: Callable[[np.ndarray], np.ndarray] = lambda counts_BDE: counts_BDE
    """Returns what becomes of the loads [B, D, E] of a layer."""
    adapt: "Callable[[SimulatedJob], None]" = lambda job: None
    """Changes the job before its first iteration."""


class Seconds(NamedTuple):
    """Means over iterations."""

    iteration: float
    parts: Mapping[str, float]
    """Mean of all ranks, by the parts of `simulate.result`."""
    layers: Mapping[int, float]
    """Seconds that the first rank spends in each MoE layer, by the layer's number."""

    @property
    def moe(self) -> float:
        """Seconds that a rank spends in MoE layers."""
        return sum(self.parts.get(part, 0.0) for part in LAYER_PARTS)


def padded(counts_BDE: np.ndarray) -> np.ndarray:
    """Return loads in which every source sends each expert as many rows as the most popular expert gets from any."""
    return np.broadcast_to(counts_BDE.max((1, 2), keepdims=True), counts_BDE.shape).copy()


def simulated(job: Job, system: System, iterations: int) -> Seconds:
    """Return the seconds of iterations; the first one, which has no plan, does not count.

    Args:
        iterations: at least 2.
    """
    from megatron_balance.app.simulation import simulated_job
    from megatron_balance.build.profiles import microbatch_tokens
    from megatron_balance.profile.cluster import read
    from megatron_balance.simulate.job import Simulation
    from simulate import configured, loads_of
    from simulated_loads import drawn_loads

    model = (CONFIGS / "models" / f"{job.model}.args").read_text(encoding="utf-8").splitlines()
    flags = [word for line in model if not line.startswith("#") for word in line.split()]
    flags += f"{COMMON} {job.flags} {system.flags}".split()
    path = CONFIGS / "clusters" / job.cluster
    config, target = configured(flags, path, job.nodes * int(read(path).gpus_per_node.value))
    loads: LoadSource
    if isinstance(job.load, str):
        loads = loads_of(config, job.load, job.seed)
    else:
        topk = config.transformer.moe_router_topk
        loads = drawn_loads(job.load, topk, microbatch_tokens(config), job.seed)
    described, _ = simulated_job(config, target, PLAN_SECONDS)
    system.adapt(described)
    simulation = Simulation(described, lambda *which: system.loads(loads(*which)))
    results = [simulation.iteration(number, (0,)) for number in range(iterations)][1:]
    parts = defaultdict[str, float](float)
    layers = defaultdict[int, float](float)
    for result in results:
        for part, seconds_D in result.recorder.seconds.items():
            parts[part] += float(seconds_D.mean()) / len(results)
        for layer, seconds in _by_layer(result.recorder.spans).items():
            layers[layer] += seconds / len(results)
    return Seconds(statistics.mean(result.seconds for result in results), parts, layers)


def _by_layer(spans: list) -> Mapping[int, float]:
    """Return the seconds of the spans that belong to each MoE layer; their labels begin with its number.

    Coding has no number, and does not count.
    """
    from megatron_balance.simulate.result import part_of

    layers = defaultdict[int, float](float)
    for span in spans:
        if span.lane in ("computation", "waits") and part_of(span.label) in LAYER_PARTS and span.label != "codec":
            layers[int(span.label.split()[0].removeprefix("L"))] += span.end - span.start
    return layers
