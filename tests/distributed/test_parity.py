"""Our MoE layer against megatron-core's own in the same training loop."""

import pytest

from tests.distributed import runs
from tests.distributed.runs import Curve

TOLERANCE = 1e-6
"""Relative, over 20 iterations in float32, for every loss and gradient norm."""

LAYOUTS = {
    "EP4": "--expert-model-parallel-size 4",
    "EP4-sgd": "--expert-model-parallel-size 4 --optimizer sgd --lr 1e-1",
    "EP2xDP2-distributed-optimizer": "--expert-model-parallel-size 2 --use-distributed-optimizer",
    # megatron-core sums the experts' output biases over tensor-parallel ranks that hold different experts
    "TP2xEP2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
    "--expert-model-parallel-size 2 --disable-bias-linear --swiglu --normalization RMSNorm",
    "PP2xEP2": "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --global-batch-size 16",
    "PP2xEP2-interleaved": "--num-layers 4 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 16",
    "EP4-accumulation": "--expert-model-parallel-size 4 --global-batch-size 32",
}

FEATURES = {
    "overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --global-batch-size 16",
    "shared-experts": "--disable-bias-linear --moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate",
    "capacity": "--moe-expert-capacity-factor 1.0",
    "capacity-padded": "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    "recompute-full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "recompute-moe": "--recompute-granularity selective --recompute-modules moe",
    "expert-bias": "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 0",
    "squared-relu": "--squared-relu",
    "dense-layers": "--num-layers 4 --moe-layer-freq [0]*1+[1,0]*1+[1]",
    "one-expert-per-rank": "--num-experts 4 --expert-model-parallel-size 4",
}


def curve(ranks, flags: str, implementation: str, **options) -> Curve:
    """The curve that all of four ranks saw."""
    curves = ranks(4).run(runs.train_curve, f"{flags} --moe-layer-impl {implementation}", *options.values())
    assert all(other == curves[0] for other in curves)
    return curves[0]


def deviation(one: Curve, other: Curve) -> float:
    """Largest relative difference of a loss or gradient norm."""
    pairs = [(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.parametrize("flags", LAYOUTS.values(), ids=LAYOUTS)
def test_balanced_follows_megatron_in_every_layout(ranks, flags: str) -> None:
    ours, theirs = curve(ranks, flags, "balanced"), curve(ranks, flags, "megatron")
    assert deviation(ours, theirs) <= TOLERANCE
    assert ours[-1][0] < ours[0][0] - 0.01


@pytest.mark.parametrize("flags", FEATURES.values(), ids=FEATURES)
def test_balanced_follows_megatron_with_every_feature(ranks, flags: str) -> None:
    flags = f"--expert-model-parallel-size 2 {flags}"
    ours, theirs = curve(ranks, flags, "balanced", iterations=5), curve(ranks, flags, "megatron", iterations=5)
    assert deviation(ours, theirs) <= TOLERANCE


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_every_dispatcher_gives_the_same_curve(ranks, dispatcher: str) -> None:
    flags = "--expert-model-parallel-size 4"
    ours = curve(ranks, f"{flags} --moe-token-dispatcher-type {dispatcher}", "balanced", iterations=5)
    assert deviation(ours, curve(ranks, flags, "megatron", iterations=5)) <= TOLERANCE


def test_activation_recompute_changes_nothing(ranks) -> None:
    flags = "--expert-model-parallel-size 4 --disable-bias-linear --swiglu"
    recompute = "--moe-grouped-gemm --recompute-granularity selective --recompute-modules moe_act"
    assert curve(ranks, f"{flags} {recompute}", "balanced", iterations=5) == curve(
        ranks, flags, "balanced", iterations=5
    )


@pytest.mark.parametrize("mutation", [runs.perturb_one_expert, runs.swap_two_experts, runs.drop_one_token])
def test_parity_notices_a_wrong_layer(ranks, mutation) -> None:
    flags = "--expert-model-parallel-size 4"
    wrong = curve(ranks, flags, "balanced", iterations=20, mutate=mutation)
    assert deviation(wrong, curve(ranks, flags, "megatron")) > 3 * TOLERANCE


def test_two_runs_are_equal_bit_for_bit(ranks) -> None:
    flags = "--expert-model-parallel-size 4 --attention-dropout 0.1 --hidden-dropout 0.1"
    assert curve(ranks, flags, "balanced") == curve(ranks, flags, "balanced")


def test_first_loss_is_near_the_logarithm_of_the_vocabulary(ranks) -> None:
    import math

    first_loss, _ = curve(ranks, "--expert-model-parallel-size 4", "balanced", iterations=1)[0]
    assert abs(first_loss - math.log(128)) < 0.1


def test_bf16_trains(ranks) -> None:
    losses = [loss for loss, _ in curve(ranks, "--expert-model-parallel-size 4 --bf16 --lr 3e-3", "balanced")]
    assert losses[-1] < losses[0] - 0.05
