"""The flags in a checkpoint, which include every flag that defines the model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_balance.checkpoint import saved_flags
from megatron_balance.checkpoint.directory import TRACKER
from megatron_balance.checkpoint.saved_flags import CHECKPOINT_FIELDS
from megatron_balance.cli.arguments import parse_args
from tests.unit.commands import CPU, parse


def checkpoint(directory: Path, flags: str, iteration: int = 3) -> Path:
    """Write a checkpoint that contains only its flags."""
    path = directory / f"iter_{iteration:07d}"
    path.mkdir()
    (path / saved_flags.FILE).write_text(saved_flags.to_json(parse(flags).config))
    return path


def test_every_field_is_named_once() -> None:
    assert len(set(CHECKPOINT_FIELDS)) == len(CHECKPOINT_FIELDS)


TAKEN = {
    "activation_func_clamp_value": ("--activation-func-clamp-value 7.5", 7.5),
    "glu_linear_offset": ("--swiglu --glu-linear-offset 0.75", 0.75),
    "moe_apply_probs_on_input": ("--moe-router-topk 1 --moe-router-pre-softmax --moe-apply-probs-on-input", True),
    "fp32_residual_connection": ("--fp32-residual-connection", True),
    "moe_expert_capacity_factor": ("--moe-expert-capacity-factor 1.5", 1.5),
    "rotary_seq_len_interpolation_factor": (
        "--position-embedding-type rope --rotary-seq-len-interpolation-factor 3",
        3,
    ),
    "tokenizer_special_tokens": ("--tokenizer-special-tokens <a> <b>", ["<a>", "<b>"]),
}


@pytest.mark.parametrize(("name", "flags", "value"), [(name, *given) for name, given in TAKEN.items()], ids=TAKEN)
def test_a_run_takes_the_model_from_its_checkpoint(tmp_path: Path, name: str, flags: str, value: Any) -> None:
    checkpoint(tmp_path, flags)
    config = parse(f"--load {tmp_path} --use-checkpoint-args").config
    found = json.loads(saved_flags.to_json(config))
    assert [section[name] for section in found.values() if name in section] == [value]


@pytest.mark.parametrize(("tracker", "step", "taken"), [("3", None, 3), ("3", 0, 0), ("?", None, 3), ("0", None, 0)])
def test_the_flags_are_those_of_the_checkpoint_that_is_loaded(
    tmp_path: Path, tracker: str, step: int | None, taken: int
):
    for iteration in (0, 3):
        checkpoint(tmp_path, f"--num-layers {8 + iteration}", iteration)
    (tmp_path / TRACKER).write_text(tracker)
    assert saved_flags.read_newest(tmp_path, step)["num_layers"] == 8 + taken


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, [1.0, math.inf]])
def test_settings_that_json_does_not_have_are_left_out(tmp_path: Path, value: Any) -> None:
    """megatron-core 0.19 has limits that are infinite by default."""
    config = parse().config
    before = saved_flags.to_json(config)
    config.optimizer.clip_grad = value
    assert json.loads(before)["optimizer"].keys() - json.loads(saved_flags.to_json(config))["optimizer"].keys() == {
        "clip_grad"
    }
    (tmp_path / saved_flags.FILE).write_text(saved_flags.to_json(config))
    assert saved_flags.read(tmp_path)["num_layers"] == 4


STRANGE = {
    "num_layers": ["2.5", 2.5, True, [2], {}, "many", 10**9],
    "num_moe_experts": [10**9, "x"],
    "moe_router_topk": [None, "2.5"],
    "swiglu": [1, "true", [True]],
    "layernorm_epsilon": ["x", [1e-5], {}],
    "moe_layer_freq": [[2, 2], 0, [[1]], "print(1)", [1] * 5000],
    "window_size": [[1], 5, [1, 2, 3]],
    "tokenizer_type": ["Pickle", 3],
    "normalization": ["None", None, 1],
    "position_embedding_type": ["learned", [1]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in STRANGE.items() for value in values])
def test_a_checkpoint_with_strange_flags(tmp_path: Path, name: str, value: Any) -> None:
    path = checkpoint(tmp_path, "--window-size 8,0") / saved_flags.FILE
    content = json.loads(path.read_text())
    (section,) = [section for section in content.values() if name in section]
    section[name] = value
    path.write_text(json.dumps(content))
    run = [*f"--micro-batch-size 2 --train-iters 20 --lr 1e-3 --mock-data --load {tmp_path}".split()]
    with pytest.raises(ValueError, match=saved_flags.flag_of(name)):
        parse_args([*run, "--use-checkpoint-args"], CPU)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "a list instead of a JSON object"),
        ('{"model": 1}', "model: 1 is no section"),
        ("{" * 9000, "is not JSON"),
    ],
)
def test_a_file_that_holds_no_flags(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / saved_flags.FILE).write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path / saved_flags.FILE}: .*{said}"):
        saved_flags.read(tmp_path)
