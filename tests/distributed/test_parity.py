"""Our MoE layer against megatron-core's own in the same training loop."""

import math

import pytest

from tests.distributed import runs
from tests.distributed.runs import deviation
from tests.variants import variants

TOLERANCE = 1e-6
"""Relative, in float32, for every loss and gradient norm."""

ITERATIONS = 5

EP4 = "--expert-model-parallel-size 4"
LAYOUTS = {
    "EP4": EP4,
    "EP4-sgd": f"{EP4} --optimizer sgd --lr 1e-1",
    "EP2xDP2-distributed-optimizer": "--expert-model-parallel-size 2 --use-distributed-optimizer",
    # megatron-core sums the experts' output biases over tensor-parallel ranks that hold different experts
    "TP2xEP2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
    "--expert-model-parallel-size 2 --disable-bias-linear --swiglu --normalization RMSNorm",
    "PP2xEP2-interleaved": "--num-layers 4 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8",
    "EP4-accumulation": f"{EP4} --global-batch-size 24",
}

FEATURES = {
    "recompute-full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "dense-layers": "--num-layers 4 --moe-layer-freq [0]*1+[1,0]*1+[1]",
}
"""Features of more than one layer; test_layer.py compares single layers with the others, test_layouts.py overlaps."""


def deviation_from_megatron(curve_of, flags: str, iterations: int) -> float:
    ours, theirs = (curve_of(f"{flags} --moe-layer-impl {layer}", iterations) for layer in ("balanced", "megatron"))
    return deviation(ours, theirs)


QUICK = ("EP4", "PP2xEP2-interleaved")


@pytest.mark.parametrize("flags", variants(LAYOUTS, QUICK))
def test_balanced_follows_megatron_in_every_layout(curve_of, length, flags: str) -> None:
    iterations = length(ITERATIONS)
    assert deviation_from_megatron(curve_of, flags, iterations) <= TOLERANCE
    ours = curve_of(f"{flags} --moe-layer-impl balanced", iterations)
    assert ours[-1][0] < ours[0][0] - 0.01


@pytest.mark.parametrize("flags", FEATURES.values(), ids=FEATURES)
def test_balanced_follows_megatron_with_every_feature(curve_of, flags: str) -> None:
    assert deviation_from_megatron(curve_of, f"--expert-model-parallel-size 2 {flags}", ITERATIONS) <= TOLERANCE


def test_the_other_dispatcher_gives_the_same_curve(curve_of) -> None:
    ours = curve_of(f"{EP4} --moe-token-dispatcher-type allgather --moe-layer-impl balanced", ITERATIONS)
    assert deviation(ours, curve_of(f"{EP4} --moe-layer-impl megatron", ITERATIONS)) <= TOLERANCE


def test_activation_recompute_changes_nothing(curve_of) -> None:
    flags = f"{EP4} --disable-bias-linear --swiglu"
    recompute = "--moe-grouped-gemm --recompute-granularity selective --recompute-modules moe_act"
    assert curve_of(f"{flags} {recompute}", ITERATIONS) == curve_of(flags, ITERATIONS)


@pytest.mark.parametrize("mutation", [runs.perturb_one_expert, runs.drop_one_token])
def test_parity_notices_a_wrong_layer(ranks, curve_of, mutation) -> None:
    wrong = ranks(4).run(runs.train_curve, EP4, ITERATIONS, mutation)[0]
    assert deviation(wrong, curve_of(f"{EP4} --moe-layer-impl megatron", ITERATIONS)) > 3 * TOLERANCE


def test_first_loss_is_near_the_logarithm_of_the_vocabulary(curve_of) -> None:
    first_loss, _ = curve_of(f"{EP4} --moe-layer-impl balanced", 1)[0]
    assert abs(first_loss - math.log(128)) < 0.1
