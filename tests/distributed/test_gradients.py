"""Gradients of every parameter, and printed numbers, equal those of one rank in every layout."""

import functools
import math
from collections.abc import Callable, Mapping

import pytest

from tests import layouts
from tests.distributed import gradients
from tests.distributed.gradients import Measured
from tests.layouts import Layout

COMMON = (
    "--global-batch-size 8 --vocab-size 511 --make-vocab-size-divisible-by 8 --moe-aux-loss-coeff 0 "
    "--moe-z-loss-coeff 0 --clip-grad 0 --log-num-zeros-in-grad --log-params-norm"
)
"""Flags of all runs. Auxiliary losses depend on how samples form microbatches, so they are left out."""

MODEL: Mapping[str, Mapping[str, str]] = {
    "experts' kind": {"SwiGLU": "--swiglu", "GELU": ""},
    "biases": {"no biases": "--disable-bias-linear", "biases": ""},
    "sinks": {"no sinks": "", "sinks": "--softmax-type learnable"},
    "shared": {
        "no shared experts": "",
        "shared experts": "--moe-shared-expert-intermediate-size 48",
        "gate": "--moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate",
    },
    "attention": {
        "plain": "",
        "groups": "--group-query-attention --num-query-groups 2",
        "norms": "--qk-layernorm",
        "norms across heads": "--qk-layernorm-across-heads",
        "latent": "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8",
        "latent queries": (
            "--multi-latent-attention --kv-lora-rank 16 --q-lora-rank 24 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
            "--v-head-dim 8"
        ),
        "latent norms": (
            "--multi-latent-attention --kv-lora-rank 16 --q-lora-rank 24 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
            "--v-head-dim 8 --qk-layernorm"
        ),
    },
    "positions": {"rope": "--position-embedding-type rope", "learned": ""},
    "predictions": {"no predictions": "", "predictions": "--mtp-num-layers 1"},
    "embeddings": {"untied": "--untie-embeddings-and-output-weights", "tied": ""},
    "normalization": {"LayerNorm": "", "RMSNorm": "--normalization RMSNorm"},
    "layers": {"2": "--num-layers 2", "every second": "--num-layers 2 --moe-layer-freq 2"},
    "precision": {"float32": "", "bfloat16": "--bf16 --moe-router-force-workload hot_experts"},
}
"""Dimension -> choice -> flags that change what is learned: the single rank has them, too."""

LAYOUT: Mapping[str, Mapping[str, str]] = {
    "tensor": {
        "TP1": "",
        "TP2": "--tensor-model-parallel-size 2",
        "TP2-SP": "--tensor-model-parallel-size 2 --sequence-parallel",
        "TP4": "--tensor-model-parallel-size 4",
    },
    "expert": {"EP1": "", "EP2": "--expert-model-parallel-size 2"},
    "shards": {"ETP1": "--expert-tensor-parallel-size 1", "ETP2": "--expert-tensor-parallel-size 2"},
    "context": {"CP1": "", "CP2": "--context-parallel-size 2"},
    "stages": {
        "PP1": "",
        "PP2": "--pipeline-model-parallel-size 2",
        "PP2-interleaved": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4",
    },
    "replicas": {"1-replica": "", "2-replicas": ""},
    "schedule": {
        "megatron": "",
        **{name: f"--moe-parallel-schedule {name}" for name in ("baseline", "s1", "s2")},
    },
    "layer": {"balanced": "", "megatron's layer": "--moe-layer-impl megatron"},
    "passes": {"one after the other": "", "paired": "--overlap-moe-expert-parallel-comm"},
    "optimizer": {"whole": "", "sharded": "--use-distributed-optimizer"},
    "balancing": {"owners": "", "exact": "--balance-policy top2 --balance-load exact --balance-overlap blockwise"},
    "initialization": {"initialized": "", "not initialized": "--no-initialization"},
}
"""Dimension -> choice -> flags that do not change what is learned."""

FLAGS = {**MODEL, **LAYOUT}
CHOICES = {dimension: tuple(flags) for dimension, flags in FLAGS.items()}


def model_flags(layout: Layout) -> str:
    """Return the flags of the single rank's run."""
    depth = "--num-layers 4" if layout["stages"] == "PP2-interleaved" else ""
    return " ".join([COMMON, *(MODEL[name][layout[name]] for name in MODEL), depth])


def flags_of(layout: Layout) -> str:
    return " ".join([model_flags(layout), *(LAYOUT[name][layout[name]] for name in LAYOUT)])


def world_size(layout: Layout) -> int:
    """Return the smallest number of ranks that hold the attention and the experts of a replica, times replicas."""
    sizes = {
        name: layouts.size(layout, name) for name in ("tensor", "expert", "shards", "context", "stages", "replicas")
    }
    attention = sizes["tensor"] * sizes["context"]
    experts = sizes["expert"] * sizes["shards"]
    return math.lcm(attention, experts) * sizes["stages"] * sizes["replicas"]


def is_possible(layout: Layout) -> bool:
    """Return whether the command line accepts the layout, on at most eight ranks."""
    return world_size(layout) <= 8 and layouts.refusal(world_size(layout), flags_of(layout)) is None


def tolerance(layout: Layout, name: str) -> float:
    """Return the largest accepted result of `gradients.differences`."""
    if name == "zeros":
        # Gradients that are zero but for rounding may or may not be exactly zero; so may small ones in half precision
        return 1e-3 if layout["precision"] == "float32" else 1
    return 1e-5 if layout["precision"] == "float32" else 5e-2


QUICK = {
    "no initialization": ("TP2", "ETP2", "not initialized"),
    "sinks": ("TP2", "sinks", "biases"),
    "biases": ("TP2-SP", "sinks", "biases"),
    "exact": ("EP2", "PP2", "exact", "biases"),
    "paired": ("EP2", "PP2-interleaved", "paired", "predictions", "exact"),
    "megatron's layer": ("TP2-SP", "EP2", "sinks", "biases", "megatron's layer"),
    "megatron's layer alone": ("2-replicas", "sinks", "biases", "megatron's layer"),
}
"""Rows in which a mark that megatron-core leaves out, or sets on the wrong parameters, changes a gradient or a norm."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Compute the covering array, which takes seconds, only when it is trained."""
    rows = [pytest.param(layouts.layout_of(*choices, table=CHOICES), id=name) for name, choices in QUICK.items()]
    slow = layouts.covering(CHOICES, is_possible)[0] if metafunc.config.getoption("--slow") else []
    rows += [pytest.param(row, id=layouts.name_of(row, CHOICES), marks=pytest.mark.slow) for row in slow]
    metafunc.parametrize("layout", rows)


def test_gradients_are_those_of_one_rank(ranks, alone, layout: Layout) -> None:
    measured = ranks(world_size(layout)).run(gradients.measure, flags_of(layout))
    found = gradients.differences(measured, alone(model_flags(layout)))
    assert {name: error for name, error in found.items() if error > tolerance(layout, name)} == {}


@pytest.fixture(scope="module")
def alone(ranks) -> Callable[[str], Measured]:
    """`alone(flags)`: what a single rank measures, once for each model."""
    return functools.cache(lambda flags: ranks(1).run(gradients.measure, flags)[0])
