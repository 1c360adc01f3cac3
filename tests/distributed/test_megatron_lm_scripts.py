"""The flags of a published script keep their meaning here, and train."""

import math

from megatron_balance.cli.arguments import build_parser, parse_args
from megatron_balance.cli.checks import Machine, check
from megatron_balance.training.loop import train_step
from tests.distributed.runs import Curve, build, curve_of
from tests.megatron_lm_scripts import MIXTRAL, MIXTRAL_FILES, MIXTRAL_NODES

SMALL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 8 --seq-length 32 "
    "--pipeline-model-parallel-size 1 --expert-model-parallel-size 2 --global-batch-size 4 --train-iters 2 "
    "--mock-data --split 99990,8,2 --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0"
)
OFF = "--sequence-parallel is off: it has no effect with --tensor-model-parallel-size 1"


def test_nvidias_mixtral_is_understood_at_its_own_size() -> None:
    world_size = 8 * MIXTRAL_NODES
    flags = [*MIXTRAL.split(), *MIXTRAL_FILES.split()]
    config, notices, _ = parse_args(flags, Machine(world_size, cuda=False, transformer_engine=False, apex=False))
    assert not config.transformer.sequence_parallel and OFF in notices
    assert config.model.position_embedding_type == "rope"
    assert any(notice.startswith("--no-position-embedding: ") for notice in notices)
    on_gpus = Machine(world_size, cuda=True, transformer_engine=True, apex=True)
    layout, _ = check(vars(build_parser().parse_args(flags)), (), on_gpus)
    assert (layout.backend, layout.transformer_impl, layout.sequence_parallel) == ("nccl", "transformer_engine", False)


def train_in_small() -> Curve:
    run = build(SMALL, base=MIXTRAL)
    assert not run.config.transformer.sequence_parallel
    assert not any(getattr(parameter, "sequence_parallel", False) for parameter in run.model[0].parameters())
    return curve_of([train_step(run) for _ in range(run.length.iterations)])


def test_nvidias_mixtral_trains_in_small(ranks) -> None:
    for curve in ranks(2).run(train_in_small):
        assert len(curve) == 2
        for loss, norm in curve:
            assert math.log(64) < loss < math.log(512) and math.isfinite(norm) and norm > 0
