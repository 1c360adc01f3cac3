"""Pipeline stages: which layers each holds, and which ranks hold it, change nothing that is learned."""

import contextlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from megatron_balance.training.loop import train_step
from tests import fused_adam
from tests.distributed.checkpoints import losses_of
from tests.distributed.runs import Curve, build, curve_of
from tests.layouts import refusal
from tests.variants import variants

PP2 = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --position-embedding-type rope --disable-bias-linear "
    "--global-batch-size 8"
)
CHUNKS = f"{PP2} --expert-model-parallel-size 2 --moe-router-force-workload hot_experts --mtp-num-layers 1"
ALONE = "--pipeline-model-parallel-layout Et|tt|t|mL"
"""The last model chunk has no transformer layer, only that of multi-token prediction."""


def train(flags: str) -> Curve:
    run = build(flags)
    return curve_of([train_step(run) for _ in range(3)])


SAME = {
    "chunks": (2, PP2, "--num-layers-per-virtual-pipeline-stage 1", "--pipeline-model-parallel-layout Et|t|t|tL"),
    "order of ranks": (4, PP2, "", "--use-tp-pp-dp-mapping"),
    "chunk without layers": (4, f"{CHUNKS} {ALONE}", "", "--balance-policy top2 --balance-overlap blockwise"),
    "stages": (2, PP2, "", "--pipeline-model-parallel-layout Ett|ttL"),
    "prediction": (2, f"{PP2} --mtp-num-layers 1", "", "--pipeline-model-parallel-layout Ett|ttmL"),
}
"""Ranks, common flags, and those of either run."""


@pytest.mark.parametrize(("world_size", "flags", "one", "other"), variants(SAME, quick=("chunk without layers",)))
def test_stages_learn_the_same(ranks, world_size: int, flags: str, one: str, other: str) -> None:
    curve, wanted = (ranks(world_size).run(train, f"{flags} {more}")[0] for more in (one, other))
    assert len(set(curve)) == 3
    for pair, same in zip(curve, wanted, strict=True):
        assert pair == pytest.approx(same, rel=1e-5)


MODEL = (
    "--num-layers 4 --hidden-size 24 --seq-length 16 --moe-ffn-hidden-size 16 --disable-bias-linear "
    "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 12 --train-iters 40 "
    "--moe-router-force-workload hot_experts"
)
"""A model whose small buckets are padded."""

MODELS = {
    "experts": "",
    "dense first": "--moe-layer-freq [0,0,1,1]",
    "dense between": "--moe-layer-freq [1,0,0,1]",
    "prediction": "--mtp-num-layers 1",
    "bf16": "--bf16",
}
POLICIES = (
    "",
    "--balance-policy top2",
    "--balance-policy top2 --balance-overlap blockwise",
    "--balance-policy demi --balance-ownership transfer --balance-overlap blockwise",
    "--moe-layer-impl megatron",
)
OPTIMIZERS = (
    "",
    "--overlap-grad-reduce",
    "--use-distributed-optimizer",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000",
)
STEPS = 2
"""Iterations in each layout."""

Part = tuple[int, str]
"""A number of ranks, and the flags of a run on them."""

EMPTY = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett||tt|L"
"""The first stage has all layers, in two neighboring chunks; the second stage has an empty chunk, and one for the loss.
"""

QUICK: tuple[Part, ...] = (
    (4, f"{EMPTY} --expert-model-parallel-size 2 {POLICIES[2]} {OPTIMIZERS[3]}"),
    (2, f"--expert-model-parallel-size 2 {OPTIMIZERS[2]}"),
)


def random_part(random: Random, model: str) -> Part:
    """Return a random run of a model: stages with any number of layers, chunks, expert-parallel ranks and shards."""
    while True:
        stages, chunks = random.choice([(1, 1), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)])
        experts, shards = random.choice([(1, 1), (2, 1), (2, 1), (2, 2)])
        layers = "t" * 4 + "m" * ("mtp" in model)
        cuts = [0, *sorted(random.choices(range(len(layers) + 1), k=stages * chunks - 1)), len(layers)]
        text = "|".join(layers[start:end] for start, end in pairwise(cuts))
        sizes = f"--expert-model-parallel-size {experts} --expert-tensor-parallel-size {shards}"
        if stages > 1:
            sizes += f" --pipeline-model-parallel-size {stages} --pipeline-model-parallel-layout E{text}L"
        flags = f"{sizes} {random.choice(POLICIES)} {random.choice(OPTIMIZERS)}"
        world_size = stages * experts * shards
        if world_size <= 6 and refusal(world_size, f"{MODEL} {model} {flags}") is None:
            return world_size, flags


def with_adam(fused: bool, *args: str | int | None) -> list[float]:
    """Return `losses_of`, with the stand-in for Transformer Engine's optimizer if it is `fused`."""
    with fused_adam.installed() if fused else contextlib.nullcontext():
        return losses_of(*args)  # pyright: ignore[reportArgumentType]


def check_chain(ranks, directory: Path, model: str, parts: Sequence[Part], fused: bool = False) -> None:
    """Check that each run continues the checkpoint of the one before as a run on one rank does."""
    model = f"{MODEL} {model}"
    count = STEPS * (1 + len(parts))
    straight = ranks(1).run(with_adam, fused, model, None, f"{directory}/straight", count)[0]
    ranks(1).run(with_adam, fused, model, None, f"{directory}/0", STEPS)
    for index, (world_size, flags) in enumerate(parts, 1):
        found = ranks(world_size).run(
            with_adam, fused, f"{model} {flags}", f"{directory}/{index - 1}", f"{directory}/{index}", STEPS,
            # megatron-core lets stages without data wait for the data at another place in its code
            in_one_order="size 3" not in flags,
        )[0]  # fmt: skip
        place = slice(STEPS * index, STEPS * (index + 1))
        tolerance = 1e-2 if "--bf16" in model else 1e-6
        assert found == pytest.approx(straight[:count][place] + straight[count:][place], rel=tolerance), flags


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_empty_stages_and_without(ranks, tmp_path, fused: bool) -> None:
    check_chain(ranks, tmp_path, f"{MODELS['experts']} --global-batch-size 4", QUICK, fused)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_run_goes_on_in_any_layout(ranks, tmp_path, model: str, fused: bool, seed: int) -> None:
    random = Random(seed)
    check_chain(ranks, tmp_path, model, [random_part(random, model) for _ in range(6)], fused)
