"""Command lines: how pipeline stages share the layers."""

import pytest

from tests.unit.commands import parse


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", None),
        ("--pipeline-model-parallel-size 2", None),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2),
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --num-layers 12", 3),
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --num-layers 16", 2),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 16", 2),
        ("--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split --num-layers 3", None),
    ],
)
def test_virtual_pipeline_size(flags: str, expected: int | None) -> None:
    config, *_ = parse(f"{flags} --global-batch-size 32")
    assert config.transformer.virtual_pipeline_model_parallel_size == expected
    assert config.transformer.overlap_p2p_comm == (expected is not None)
    # Only the interleaved schedule aligns gathers
    assert config.ddp.align_param_gather == (expected is not None)
    assert config.transformer.batch_p2p_comm == (expected is None)
