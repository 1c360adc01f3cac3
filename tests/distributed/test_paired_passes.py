"""`--overlap-moe-expert-parallel-comm` trains the same model, and its passes take turns where they wait."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_balance.device.turns import Turns
from megatron_balance.job.layout import build_groups
from megatron_balance.training.paired_passes import ON_HOST, give_way_in
from tests.distributed import runs
from tests.distributed.jobs import Job
from tests.distributed.layers import HIDDEN, build_layer, in_chunks, moe_config, own_gradients
from tests.distributed.runs import deviation
from tests.variants import variants

PAIRED = "--overlap-moe-expert-parallel-comm"
TOLERANCE = 1e-5
EP2 = "--expert-model-parallel-size 2 --global-batch-size 16 --moe-router-force-workload hot_experts"

FLAGS = {
    "pipeline": "--num-layers 4 --pipeline-model-parallel-size 2",
    "interleaved": "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "four stages": "--num-layers 4 --pipeline-model-parallel-size 4",
    "uneven stages": "--decoder-first-pipeline-num-layers 1",
    "described stages": "--pipeline-model-parallel-layout Et|tttL",
    "batched messages": "--no-overlap-p2p-communication",
    "policy": "--balance-policy top2",
    "blockwise": "--balance-overlap blockwise",
    "exact": "--balance-policy quota --balance-load exact",
    "two time scales": "--balance-policy top2 --balance-inner-policy quota",
    "one buffer": "--balance-guest-ring 1",
    "certified": "--balance-certify 0.5",
    "sharded": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "recomputed": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "recomputed by two": "--num-layers 4 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 2",
    "recomputed layer": "--recompute-granularity selective --recompute-modules moe",
    "chunks": "--moe-comm-chunks 3 --moe-comm-order interleaved",
    "codec": "--moe-comm-codec int8 --moe-comm-codec-directions all",
    "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1",
    "shared experts": "--moe-shared-expert-intermediate-size 64 --disable-bias-linear",
    "dense layers": "--num-layers 4 --moe-layer-freq 2",
    "expert bias": "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    "predictions": "--mtp-num-layers 1 --position-embedding-type rope",
    "one microbatch": "--global-batch-size 4",
    "bfloat16": "--bf16",
}

# test_layouts.py trains pairs with each other feature alone
NAMES = {
    2: """
        recomputed, dropout
        shared experts
        dense layers
        expert bias
        one microbatch
        bfloat16
        policy, recomputed
        exact, blockwise
        exact, blockwise, dense layers, chunks, codec
        exact, blockwise, recomputed by two
        exact, blockwise, recomputed layer
        exact, blockwise, certified""",
    4: """
        policy, blockwise, sharded, dense layers
        pipeline, policy, blockwise
        pipeline, recomputed
        pipeline, uneven stages, chunks
        pipeline, described stages, batched messages
        pipeline, predictions
        pipeline, exact, blockwise
        pipeline, two time scales, blockwise
        exact, one buffer
        exact, blockwise, sharded
        two time scales, blockwise
        two time scales, blockwise, sharded
        interleaved, policy, blockwise
        interleaved, two time scales, blockwise
        interleaved, recomputed
        interleaved, dense layers
        interleaved, predictions""",
    8: """
        pipeline, sharded
        four stages
        interleaved, sharded
        interleaved, exact, blockwise, sharded""",
}
"""Number of ranks -> cases, named after their FLAGS."""


def flags_of(name: str) -> str:
    return " ".join(FLAGS[part] for part in name.split(", "))


CASES = {
    name: (ranks, flags_of(name))
    for ranks, names in NAMES.items()
    for name in map(str.strip, names.strip().split("\n"))
}
QUICK = ("recomputed, dropout", "interleaved, policy, blockwise")


@pytest.mark.parametrize(("world_size", "flags"), variants(CASES, quick=QUICK))
def test_losses_are_those_of_one_pass_after_the_other(
    ranks, curve_of, length, profiles: dict[int, Path], world_size: int, flags: str
) -> None:
    iterations = length(3)
    plain = f"{EP2} {flags}"
    if balanced := "--balance-policy" in flags:
        plain += f" --balance-profile {profiles[2]}"
    paired, hosts = ranks(world_size).run(runs.train_hosts, f"{plain} {PAIRED}", iterations)[0]
    alone = curve_of(plain, iterations, world_size)
    # Sums have a fixed order; with a policy, it is that of passes without a pair
    assert paired == (alone if balanced else curve_of(f"{plain} {PAIRED}", iterations, world_size))
    assert deviation(paired, alone) <= TOLERANCE
    assert (sum(number > 0 for number in hosts) >= iterations / 2) == balanced


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "exact, blockwise", "two time scales, blockwise"])
def test_validation_is_the_same_between_pairs(tmp_path: Path, profiles: dict[int, Path], more: str) -> None:
    flags = f"{runs.BASE} {EP2} --train-iters 4 --eval-interval 2 --eval-iters 2 --split 90,5,5 --log-interval 1"
    if more:
        flags += f" {flags_of(more)} --balance-profile {profiles[2]}"
    said = [Job(2, f"{flags} {paired}", tmp_path / "log").wait().text for paired in ("", PAIRED)]
    losses = [re.findall(r"validation loss at iteration \d .*lm loss value: (\S+)", text) for text in said]
    assert len(losses[0]) >= 2 and [float(loss) for loss in losses[0]] == pytest.approx([*map(float, losses[1])])


def gradients_of_two_passes(chunks: int, paired: bool) -> list[torch.Tensor]:
    """Return the gradients of a layer's parameters and of its inputs in two passes, which may overlap."""
    config = moe_config(moe_router_topk=2)
    layer = build_layer(config, build_groups(config, seed=7))
    in_chunks(chunks, 3, own_gradients, layer)
    turns = Turns()
    give_way_in(layer, turns, ON_HOST)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randn(tokens, 1, HIDDEN, dtype=torch.float64, generator=generator) for tokens in (13, 8)]
    first, second = (one.requires_grad_() for one in inputs)
    output = layer(first)[0].square().sum()
    if paired:
        output, _ = turns.together(lambda: layer(second)[0].square().sum(), output.backward)
    else:
        output.backward()
        output = layer(second)[0].square().sum()
    output.backward()
    gradients = [parameter.grad for parameter in (*layer.parameters(), first, second)]
    return [one for one in gradients if one is not None]


@pytest.mark.parametrize("chunks", [1, 3])
def test_gradients_are_equal_to_the_bit(ranks, chunks: int) -> None:
    paired = ranks(2).run(gradients_of_two_passes, chunks, True)
    for found, expected in zip(paired, ranks(2).run(gradients_of_two_passes, chunks, False), strict=True):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
