"""configs/models: every file describes an MoE model, and `@FILE` reads flags from it."""

from pathlib import Path

import pytest

from megatron_balance.cli.arguments import build_parser, parse_args
from megatron_balance.cli.checks import Machine

MODELS = sorted((Path(__file__).parents[2] / "configs" / "models").glob("*.args"))
RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer"
ALONE = Machine(world_size=1, cuda=False, transformer_engine=False, apex=False)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_every_file_is_an_moe_model(path: Path) -> None:
    config = parse_args([f"@{path}", *RUN.split()], ALONE).config
    assert config.transformer.num_moe_experts >= 8


PUBLISHED = {"mixtral_8x7b": (46.7e9, 12.9e9), "qwen3_30b_a3b": (30.5e9, 3.3e9), "gpt_moe_s": (0.988e9, None)}
"""Total and active parameters, from Mistral's and Qwen's announcements and FlexMoE's Table 1."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    config = parse_args([f"@{next(path for path in MODELS if path.stem == name)}", *RUN.split()], ALONE).config
    shape = config.transformer
    gated = 3 if shape.gated_linear_unit else 2
    hidden = shape.hidden_size
    groups = shape.num_query_groups or shape.num_attention_heads
    attention = hidden * shape.kv_channels * 2 * (shape.num_attention_heads + groups)
    expert = gated * hidden * shape.moe_ffn_hidden_size
    dense = shape.num_layers - shape.num_layers // shape.moe_layer_freq
    mixtures = shape.num_layers - dense
    tables = hidden * (config.tokenizer.vocab_size or 50257)
    tables *= 2 if config.model.untie_embeddings_and_output_weights else 1
    rest = shape.num_layers * attention + dense * gated * hidden * shape.ffn_hidden_size + tables
    total, active = PUBLISHED[name]
    assert rest + mixtures * shape.num_moe_experts * expert == pytest.approx(total, rel=0.02)
    if active is not None:
        assert rest + mixtures * shape.moe_router_topk * expert == pytest.approx(active, rel=0.02)


def test_files_hold_flags_and_comments_and_later_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "some.args"
    file.write_text("# a model's size\n--num-layers 3  # few\n\n--split '98, 1,1' --bf16\n--seq-length\n7\n")
    values = build_parser().parse_args(["--seq-length", "5", f"@{file}", "--num-layers", "4"])
    assert (values.num_layers, values.split, values.bf16, values.seq_length) == (4, "98, 1,1", True, 7)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--lr 'x", "--lr 'x"),
        ("@other.args", "cannot include another"),
        ("--no-such-flag", "--no-such-flag"),
        (None, "some"),
    ],
)
def test_bad_files(tmp_path: Path, text: str | None, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "some.args"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        build_parser().parse_args([f"@{file}"])
    assert said in capsys.readouterr().err
