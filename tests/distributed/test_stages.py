"""Pipeline stages: which layers each holds, and which ranks hold it, change nothing that is learned."""

import pytest

from megatron_balance.training.loop import train_step
from tests.distributed.runs import Curve, build, curve_of

PP2 = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --position-embedding-type rope --disable-bias-linear "
    "--global-batch-size 16"
)
TP2 = f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
CHUNKS = f"{PP2} --expert-model-parallel-size 2 --moe-router-force-workload hot_experts --mtp-num-layers 1"
ALONE = "--pipeline-model-parallel-layout Et|tt|t|mL"
"""The last model chunk has no transformer layer, only that of multi-token prediction."""


def train(flags: str) -> Curve:
    run = build(flags)
    return curve_of([train_step(run) for _ in range(3)])


@pytest.mark.parametrize(
    ("world_size", "flags", "others"),
    [
        (2, PP2, f"{PP2} --pipeline-model-parallel-layout Ett|ttL"),
        (2, f"{PP2} --mtp-num-layers 1", f"{PP2} --mtp-num-layers 1 --pipeline-model-parallel-layout Ett|ttmL"),
        (
            2,
            f"{PP2} --num-layers-per-virtual-pipeline-stage 1",
            f"{PP2} --pipeline-model-parallel-layout Et|t|t|tL",
        ),
        (
            8,
            f"{TP2} --expert-model-parallel-size 2",
            f"{TP2} --expert-model-parallel-size 2 --use-tp-pp-dp-mapping",
        ),
        (4, f"{CHUNKS} {ALONE}", f"{CHUNKS} {ALONE} --balance-policy top2 --balance-overlap blockwise"),
    ],
    ids=["stages", "prediction", "chunks", "order of ranks", "chunk without layers"],
)
def test_stages_learn_the_same(ranks, world_size: int, flags: str, others: str) -> None:
    one, other = (ranks(world_size).run(train, text)[0] for text in (flags, others))
    assert len(set(one)) == 3
    for pair, same in zip(one, other, strict=True):
        assert pair == pytest.approx(same, rel=1e-5)
