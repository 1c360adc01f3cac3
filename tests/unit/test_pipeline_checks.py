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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--pipeline-model-parallel-layout Ett|tL", ("Number of decoder layers", "--pipeline-model-parallel-size 2")),
        ("--pipeline-model-parallel-layout Ett", ("must be divisible", "--pipeline-model-parallel-size 2")),
        (
            "--pipeline-model-parallel-layout Ett|ttL --pipeline-model-parallel-size 1",
            ("describes 2 stages, but --pipeline-model-parallel-size is 1",),
        ),
        ("--pipeline-model-parallel-layout |", ("--pipeline-model-parallel-layout |", "with E")),
        ("--pipeline-model-parallel-layout Et*99999999999|L", ("smaller numbers",)),
        ("--pipeline-model-parallel-layout Ex|L", ("Invalid layer character",)),
        (
            "--pipeline-model-parallel-layout Et|tL --num-layers-per-virtual-pipeline-stage 1",
            ("--num-layers-per-virtual-pipeline-stage: not with --pipeline-model-parallel-layout",),
        ),
        (
            "--pipeline-model-parallel-layout Et|tL --decoder-first-pipeline-num-layers 1",
            ("--decoder-first-pipeline-num-layers: not with --pipeline-model-parallel-layout",),
        ),
        (
            "--pipeline-model-parallel-layout Ett|tt|m|L --mtp-num-layers 1 --position-embedding-type rope",
            ("before the last stage", "write m before L"),
        ),
        (
            "--use-tp-pp-dp-mapping --tensor-model-parallel-size 2",
            ("--use-tp-pp-dp-mapping", "--expert-model-parallel-size 2", "leave it out"),
        ),
    ],
)
def test_mistakes_about_stages(flags: str, said: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        parse(f"--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {flags}", 8)
    assert all(part in str(error.value) for part in said), str(error.value)
