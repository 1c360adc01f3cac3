"""FlexMoE's Figs. 5, 6a and 7b.

Loads: a Zipf distribution whose ten most popular experts of 64 take three quarters of all tokens (Fig. 3a). Baselines:
FasterMoE is our policy `fastermoe`. DeepSpeed has the capacity factor 1 of section 5.1, with which every expert
computes as many rows as with even routing, and drops the rest.
"""

import functools
import statistics
from collections.abc import Iterator

import numpy as np

from reproduction.simulated import FASTERMOE, Job, System, simulated
from reproduction.tables import ANY, Found, Table, found

EXPONENT = 1.26
FLEXMOE = System("--balance-policy flexmoe")
VARIANCE = System("--balance-policy flexmoe --balance-metric variance")

MODELS = {"gpt_moe_s": 32, "gpt_moe_l": 64}
"""Model -> its experts, one for each GPU."""

FIG_5 = 1.30
"""Average over FasterMoE (section 5.2)."""

FIG_6A = 1.03
"""Average of the maximum over the variance as metric (section 5.3)."""

FIG_7B = (8, 16, 32, 64)
"""GPUs that train one MoE layer with 64 experts."""

BATCH = 4
"""Sequences of 1024 tokens of a GPU: our choice, because the paper does not say."""


def _job(model: str, gpus: int, more: str = "", load: str = f"zipf:{EXPONENT}") -> Job:
    batch = f"--micro-batch-size {BATCH} --global-batch-size {BATCH * gpus}"
    flags = f"--bf16 --expert-model-parallel-size {gpus} {batch} {more}"
    return Job(model=model, flags=flags, cluster="flexmoe.yaml", nodes=gpus // 8, load=load)


def _models(system: str, base: System, paper: float, iterations: int) -> Iterator[Found]:
    speedups = []
    for model, gpus in MODELS.items():
        job = _job(model, gpus)
        speedups.append(simulated(job, base, iterations).iteration / simulated(job, FLEXMOE, iterations).iteration)
    each = ", ".join(f"{model} {one:.2f}" for model, one in zip(MODELS, speedups, strict=True))
    yield found(f"average ({each})", system, paper, statistics.mean(speedups))


def kept(experts: int) -> float:
    """Return the share of tokens that DeepSpeed keeps if no expert computes more than its even share."""
    shares_E = (1.0 + np.arange(experts)) ** -EXPONENT
    return float(np.minimum(shares_E / shares_E.sum(), 1 / experts).sum())


def _scaling(iterations: int) -> Iterator[Found]:
    rates: dict[tuple[str, int], float] = {}
    for gpus in FIG_7B:
        more = "--num-layers 1 --moe-layer-freq 1 --num-experts 64"
        layer = _job("gpt_moe_l", gpus, more)
        even = _job("gpt_moe_l", gpus, more, "even")
        rates["DeepSpeed", gpus] = kept(64) * gpus / simulated(even, System(), iterations).moe
        rates["FasterMoE", gpus] = gpus / simulated(layer, System(f"{FASTERMOE} 8"), iterations).moe
        rates["FlexMoE", gpus] = gpus / simulated(layer, FLEXMOE, iterations).moe
        one = rates["DeepSpeed", FIG_7B[0]]
        shown = ", ".join(f"{name} {rates[name, gpus] / one:.2f}" for name in ("DeepSpeed", "FasterMoE", "FlexMoE"))
        for base in ("DeepSpeed", "FasterMoE"):
            ratio = rates["FlexMoE", gpus] / rates[base, gpus]
            yield found(f"{gpus} GPUs ({shown})", f"flexmoe over {base}", (1.0, ANY), ratio)


TABLES = {
    "flexmoe_fig_5": Table(
        "FlexMoE, Fig. 5: 32 GPUs (S) and 64 GPUs (L), average speedup over FasterMoE",
        functools.partial(_models, "flexmoe", System(f"{FASTERMOE} 8"), FIG_5),
    ),
    "flexmoe_fig_6a": Table(
        "FlexMoE, Fig. 6a: the maximum as metric, speedup over the variance",
        functools.partial(_models, "max over variance", VARIANCE, FIG_6A),
    ),
    "flexmoe_fig_7b": Table(
        "FlexMoE, Fig. 7b: one MoE layer, throughput of kept tokens over that of DeepSpeed on 8 GPUs", _scaling
    ),
}
