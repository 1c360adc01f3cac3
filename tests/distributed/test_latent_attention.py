"""Multi-latent attention: split among ranks, with context parallelism, and with what DeepSeek-V3 combines it with."""

import pytest

from tests.distributed import runs
from tests.distributed.checkpoints import losses_of
from tests.distributed.runs import deviation

LATENT = (
    "--multi-latent-attention --kv-lora-rank 24 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12 "
    "--position-embedding-type rope --normalization RMSNorm --qk-layernorm --disable-bias-linear --swiglu "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --global-batch-size 8"
)
DEEPSEEK = (
    f"{LATENT} --q-lora-rank 32 --rope-type yarn --num-layers 3 --moe-layer-freq ([0]+[1]*2) --mtp-num-layers 1 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2 "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-shared-expert-intermediate-size 64"
)
"""DeepSeek-V3 in small."""

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
CP2 = "--context-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "TP2": (2, f"{LATENT} --q-lora-rank 32 {TP2}"),
    "TP2xDP2, plain queries": (4, f"{LATENT} {TP2} --use-distributed-optimizer"),
    "CP2": (2, f"{LATENT} --q-lora-rank 32 {CP2}"),
    "CP2, a2a": (2, f"{LATENT} --q-lora-rank 32 {CP2} --cp-comm-type a2a"),
    "CP2xTP2": (4, f"{LATENT} --q-lora-rank 32 {CP2} {TP2}"),
    "DeepSeek-V3": (2, DEEPSEEK),
    "DeepSeek-V3, TP2": (2, f"{DEEPSEEK} {TP2}"),
    "DeepSeek-V3, CP2xPP2": (4, f"{DEEPSEEK} {CP2} {PP2} --decoder-first-pipeline-num-layers 2"),
}
QUICK = ("TP2", "DeepSeek-V3")
ITERATIONS = 3

parametrized = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)


@parametrized
def test_runs_follow_megatrons_layer(curve_of, length, name: str) -> None:
    (world_size, flags), iterations = LAYOUTS[name], length(ITERATIONS)
    ours, theirs = (
        curve_of(f"{flags} --moe-layer-impl {layer}", iterations, world_size) for layer in ("balanced", "megatron")
    )
    assert deviation(ours, theirs) <= 1e-6


@parametrized
def test_policies_act_and_change_nothing(ranks, curve_of, profiles, name: str) -> None:
    world_size, flags = LAYOUTS[name]
    hot = f"{flags} --moe-router-force-workload hot_experts"
    policy = f"--balance-policy quota --balance-overlap blockwise --balance-profile {profiles[2]}"
    (curve, hosts), *_ = ranks(world_size).run(runs.train_hosts, f"{hot} {policy}", ITERATIONS)
    assert sum(added > 0 for added in hosts) >= ITERATIONS - 1
    assert deviation(curve, curve_of(f"{hot} --moe-layer-impl megatron", ITERATIONS, world_size)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYOUTS if "CP2" in name and "DeepSeek" not in name])
def test_parts_of_sequences_follow_whole_ones(curve_of, name: str) -> None:
    world_size, flags = LAYOUTS[name]
    alone = flags.replace("--context-parallel-size", "--eval-iters")
    assert deviation(*(curve_of(one, ITERATIONS, world_size) for one in (flags, alone))) <= 1e-6


@pytest.mark.parametrize("flags", [LATENT, pytest.param(f"{LATENT} --q-lora-rank 32", marks=pytest.mark.slow)])
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
