"""Multi-token prediction, latent attention, context parallelism: runs of our layer against megatron-core's, with a
policy, and on other layouts."""

from collections.abc import Mapping
from typing import NamedTuple

import pytest

from tests.distributed import runs
from tests.distributed.checkpoints import losses_of
from tests.distributed.runs import Curve, deviation
from tests.variants import variants

ITERATIONS = 3
TOLERANCE = 1e-6
"""Relative, in float32, for every loss and gradient norm."""

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
CP2 = "--context-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
ROPE = "--position-embedding-type rope"
EP2 = "--expert-model-parallel-size 2 --global-batch-size 8 --disable-bias-linear --swiglu"
MTP = f"{EP2} --mtp-num-layers 2 {ROPE}"
LATENT = (
    f"{EP2} --multi-latent-attention --kv-lora-rank 24 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12 {ROPE} "
    "--normalization RMSNorm --qk-layernorm --expert-tensor-parallel-size 1"
)
DEEPSEEK = (
    f"{LATENT} --q-lora-rank 32 --rope-type yarn --num-layers 3 --moe-layer-freq ([0]+[1]*2) --mtp-num-layers 1 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2 "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-shared-expert-intermediate-size 64"
)
"""DeepSeek-V3 in small."""

GPT_OSS = (
    "--expert-model-parallel-size 2 --global-batch-size 8 --normalization RMSNorm --quick-geglu --glu-linear-offset 1 "
    "--activation-func-clamp-value 1 --softmax-type learnable --window-size 3,0 --window-attn-skip-freq 2 "
    "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8"
)
"""gpt-oss in small."""

ERNIE = f"{EP2} {ROPE} --rotary-interleaved --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2"
"""ERNIE 4.5 in small: expert biases with softmax scores."""

MODELS = {
    "prediction, PP2": (4, f"{MTP} {PP2}"),
    "DeepSeek-V3": (2, DEEPSEEK),
    "CP2xDP2, a2a": (4, f"{EP2} {CP2} --cp-comm-type a2a --use-distributed-optimizer"),
    "prediction, CP2": (4, f"{MTP} {CP2}"),
    "prediction, TP2": (4, f"{MTP} {TP2}"),
    "latent, TP2": (2, f"{LATENT} --q-lora-rank 32 {TP2}"),
    "latent, plain queries, TP2xDP2": (4, f"{LATENT} {TP2} --use-distributed-optimizer"),
    "latent, CP2": (2, f"{LATENT} --q-lora-rank 32 {CP2}"),
    "latent, CP2, a2a": (2, f"{LATENT} --q-lora-rank 32 {CP2} --cp-comm-type a2a"),
    "latent, CP2xTP2": (4, f"{LATENT} --q-lora-rank 32 {CP2} {TP2}"),
    "DeepSeek-V3, TP2": (2, f"{DEEPSEEK} {TP2}"),
    "DeepSeek-V3, CP2xPP2": (4, f"{DEEPSEEK} {CP2} {PP2} --decoder-first-pipeline-num-layers 2"),
    "ERNIE 4.5": (2, ERNIE),
    "gpt-oss, TP2": (2, f"{GPT_OSS} {TP2}"),
    "gpt-oss, CP2": (2, f"{GPT_OSS} {CP2}"),
    "CP2": (2, f"{EP2} {CP2} {ROPE}"),
    "CP2xTP2": (4, f"{EP2} {CP2} {TP2}"),
    "CP2xPP2": (4, f"{EP2} {CP2} {PP2}"),
    "CP4xEP4": (4, f"{EP2} --expert-model-parallel-size 4 --context-parallel-size 4"),
}
QUICK = ("prediction, PP2", "CP2xDP2, a2a")
every_model = pytest.mark.parametrize(("world_size", "flags"), variants(MODELS, QUICK))


class Observed(NamedTuple):
    """What one rank observes in a run."""

    curve: Curve
    losses: list[dict[str, float]]
    """All losses of each iteration."""
    hosts: Mapping[int, float]
    """Layer -> hosts that the policy added."""


def observed(flags: str, iterations: int) -> Observed:
    reports = runs.train(flags, iterations)
    hosts: dict[int, float] = {}
    for report in reports:
        for number, layer in report.balance.items():
            hosts[number] = hosts.get(number, 0) + layer.hosts_added
    return Observed(runs.curve_of(reports), [report.losses for report in reports], hosts)


@every_model
def test_runs_follow_megatrons_layer(ranks, length, world_size: int, flags: str) -> None:
    ours, theirs = (
        # The last rank belongs to the last pipeline stage, which has the losses
        ranks(world_size).run(observed, f"{flags} --moe-layer-impl {layer}", length(ITERATIONS))[-1]
        for layer in ("balanced", "megatron")
    )
    assert deviation(ours.curve, theirs.curve) <= TOLERANCE
    for mine, other in zip(ours.losses, theirs.losses, strict=True):
        assert mine == pytest.approx(other, rel=TOLERANCE)
        assert ("mtp_1 loss" in mine) == ("--mtp" in flags)


@every_model
def test_policies_act_and_change_nothing(ranks, curve_of, profiles, world_size: int, flags: str) -> None:
    hot = f"{flags} --moe-router-force-workload hot_experts"
    profile = profiles[4 if "parallel-size 4" in flags else 2]
    policy = f"--balance-policy quota --balance-overlap blockwise --balance-profile {profile}"
    found = ranks(world_size).run(observed, f"{hot} {policy}", ITERATIONS)[-1]
    assert found.hosts and all(found.hosts.values()), found.hosts
    assert deviation(found.curve, curve_of(f"{hot} --moe-layer-impl megatron", ITERATIONS, world_size)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("per_token", ["", "--calculate-per-token-loss"])
@pytest.mark.parametrize("name", [name for name in MODELS if "CP" in name and "DeepSeek" not in name])
def test_parts_of_sequences_follow_whole_ones(curve_of, name: str, per_token: str) -> None:
    world_size, flags = MODELS[name]
    flags += f" {per_token}"
    # Some flag of a number that changes no training
    alone = flags.replace("--context-parallel-size", "--eval-iters")
    assert deviation(*(curve_of(one, ITERATIONS, world_size) for one in (flags, alone))) <= TOLERANCE


@pytest.mark.parametrize("flags", [LATENT, pytest.param(f"{LATENT} --q-lora-rank 32", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_heads_on_two_ranks_learn_what_they_learn_on_one(ranks, tmp_path, flags: str) -> None:
    """Layouts draw different initial weights, so both runs start from one checkpoint, whose vocabulary suits both."""
    start, *ends = (str(tmp_path / name) for name in ("start", "whole", "split"))
    # Small weights would attend to all tokens alike, so that the queries and keys hardly had gradients
    flags += " --make-vocab-size-divisible-by 64 --init-method-std 0.2"
    ranks(2).run(losses_of, flags, None, start, 1)
    whole, split = (
        ranks(2).run(losses_of, f"{flags} {layout}", start, end, ITERATIONS)[-1]
        for layout, end in zip(("", TP2), ends, strict=True)
    )
    assert split == pytest.approx(whole, rel=1e-5)
