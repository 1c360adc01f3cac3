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

PIPELINE = "--num-layers 4 --pipeline-model-parallel-size 2"
INTERLEAVED = f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1"

EXACT = "--balance-policy quota --balance-load exact"
TWO_SCALES = "--balance-policy top2 --balance-inner-policy quota"

# test_layouts.py trains pairs with each other feature alone
CASES = {
    "alone": (2, ""),
    "full recomputation": (
        2,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --hidden-dropout 0.1",
    ),
    "dropout": (2, "--hidden-dropout 0.1 --attention-dropout 0.1"),
    "shared experts": (2, "--moe-shared-expert-intermediate-size 64 --disable-bias-linear"),
    "dense layers": (2, "--num-layers 4 --moe-layer-freq 2"),
    "expert bias": (2, "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"),
    "one microbatch": (2, "--global-batch-size 4"),
    "bfloat16": (2, "--bf16"),
    "policy": (2, "--balance-policy top2"),
    "policy and recomputation": (
        2,
        "--balance-policy top2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "blockwise": (
        4,
        "--balance-policy top2 --balance-overlap blockwise --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather --num-layers 4",
    ),
    "ownership": (2, "--balance-policy demi --balance-ownership transfer"),
    "pipeline, distributed optimizer": (
        8,
        f"{PIPELINE} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "pipeline, blockwise": (4, f"{PIPELINE} --balance-policy top2 --balance-overlap blockwise"),
    "pipeline, recomputation": (
        4,
        f"{PIPELINE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "pipeline, uneven stages, chunks": (
        4,
        f"{PIPELINE} --decoder-first-pipeline-num-layers 1 --moe-comm-chunks 3",
    ),
    "pipeline, described stages, batched messages": (
        4,
        f"{PIPELINE} --pipeline-model-parallel-layout Et|tttL --no-overlap-p2p-communication",
    ),
    "pipeline, multi-token prediction": (4, f"{PIPELINE} --mtp-num-layers 1 --position-embedding-type rope"),
    "pipeline, exact": (4, f"{PIPELINE} {EXACT} --balance-overlap blockwise"),
    "pipeline, two time scales": (4, f"{PIPELINE} {TWO_SCALES} --balance-overlap blockwise"),
    "four stages": (8, "--num-layers 4 --pipeline-model-parallel-size 4"),
    "exact": (2, f"{EXACT} --balance-overlap blockwise"),
    "exact, blocking, one buffer": (4, f"{EXACT} --balance-guest-ring 1"),
    "exact, chunks, codec": (
        2,
        f"{EXACT} --balance-overlap blockwise --moe-comm-chunks 3 --moe-comm-order interleaved --num-layers 4 "
        "--moe-comm-codec int8 --moe-comm-codec-directions all",
    ),
    "exact, full recomputation": (
        2,
        f"{EXACT} --balance-overlap blockwise --num-layers 4 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 2",
    ),
    "exact, layer recomputation": (
        2,
        f"{EXACT} --balance-overlap blockwise --recompute-granularity selective --recompute-modules moe",
    ),
    "exact, distributed optimizer": (
        4,
        f"{EXACT} --balance-overlap blockwise --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --num-layers 4",
    ),
    "exact, certified": (2, f"{EXACT} --balance-overlap blockwise --balance-certify 0.5"),
    "two time scales": (4, f"{TWO_SCALES} --balance-overlap blockwise --num-layers 4"),
    "two time scales, distributed optimizer": (
        4,
        f"{TWO_SCALES} --balance-overlap blockwise --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather",
    ),
    "interleaved, distributed optimizer": (
        8,
        f"{INTERLEAVED} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "interleaved, blockwise": (4, f"{INTERLEAVED} --balance-policy top2 --balance-overlap blockwise"),
    "interleaved, exact": (
        8,
        f"{INTERLEAVED} {EXACT} --balance-overlap blockwise --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather",
    ),
    "interleaved, two time scales": (4, f"{INTERLEAVED} {TWO_SCALES} --balance-overlap blockwise"),
    "interleaved, recomputation": (
        4,
        f"{INTERLEAVED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "interleaved, dense layers": (4, f"{INTERLEAVED} --moe-layer-freq 2"),
    "interleaved, multi-token prediction": (4, f"{INTERLEAVED} --mtp-num-layers 1 --position-embedding-type rope"),
}

QUICK = ("full recomputation", "interleaved, blockwise")


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
    moves = "--balance-ownership" in flags
    assert moves or (sum(number > 0 for number in hosts) >= iterations / 2) == balanced


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "exact", "two time scales"])
def test_validation_is_the_same_between_pairs(tmp_path: Path, profiles: dict[int, Path], more: str) -> None:
    flags = f"{runs.BASE} {EP2} --train-iters 4 --eval-interval 2 --eval-iters 2 --split 90,5,5 --log-interval 1"
    if more:
        flags += f" {CASES[more][1]} --balance-profile {profiles[2]}"
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
