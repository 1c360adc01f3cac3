"""The flags in a checkpoint, which include every flag that defines the model."""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_balance.checkpoint import saved_flags
from megatron_balance.checkpoint.saved_flags import CHANGEABLE_FIELDS, CHECKPOINT_FIELDS, MODEL_FIELDS
from megatron_balance.cli.arguments import Parsed, build_parser, parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.config.run_config import ModelConfig, TokenizerConfig

OF_MODELS = (ModelConfig, TokenizerConfig, MLATransformerConfig)
"""Dataclasses whose fields may define the model or its tokenizer."""

NEWER = {"mla_down_proj_fusion"}
"""Flags of a model that only some versions of megatron-core have."""

OTHER_FIELDS = {
    "how many ranks there are and what each holds": """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split context_parallel_size
        expert_model_parallel_size expert_tensor_parallel_size microbatch_group_size_per_vp_stage
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage num_layers_per_virtual_pipeline_stage
        num_virtual_stages_per_pipeline_rank pipeline_model_parallel_layout pipeline_model_parallel_size
        sequence_parallel
        tensor_model_parallel_size""",
    "which implementation computes the same function": """
        apply_rope_fusion attention_backend bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion
        cross_entropy_fusion_impl cross_entropy_loss_fusion masked_softmax_fusion moe_grouped_gemm moe_permute_fusion
        moe_router_fusion moe_use_legacy_grouped_gemm persist_layer_norm transformer_impl
        use_fused_weighted_squared_relu use_te_activation_func tokenizer_hf_use_fast""",
    "in which precision, and with which guarantees": """
        apply_query_key_layer_scaling attention_softmax_in_fp32 bf16 deterministic_mode
        disable_bf16_reduced_precision_matmul fp16 moe_router_dtype moe_router_padding_for_fp8
        moe_router_padding_for_quantization""",
    "how tokens and gradients travel, and when": """
        clone_scatter_output_in_embedding cp_comm_type defer_embedding_wgrad_compute gradient_accumulation_fusion
        hierarchical_context_parallel_sizes moe_deepep_num_sms moe_enable_deepep moe_flex_dispatcher_backend
        moe_hybridep_num_sms moe_pad_expert_input_to_capacity moe_shared_expert_overlap moe_token_dispatcher_type
        overlap_p2p_comm overlap_p2p_comm_warmup_flush
        wgrad_deferral_limit""",
    "what is kept for the backward pass": """
        distribute_saved_activations moe_layer_recompute recompute_granularity recompute_method recompute_modules
        recompute_num_layers""",
    "what weights are before the first step": "embedding_init_method_std init_method_std perform_initialization",
    "what the model is trained on or with, other than the data": """
        calculate_per_token_loss moe_aux_loss_coeff moe_input_jitter_eps moe_router_bias_update_rate
        moe_router_load_balancing_type moe_z_loss_coeff mtp_loss_scaling_factor""",
    "what is logged": "barrier_with_L1_time moe_per_layer_logging",
    "synthetic loads and tests": "moe_router_force_load_balancing test_mode",
    "leave to run a tokenizer's code is given on this machine, never by a checkpoint": "trust_remote_code",
}
"""Fields of models and tokenizers that do not define the model, and what they define instead."""

OTHERS = {name for names in OTHER_FIELDS.values() for name in names.split()}

GOOD = (
    "--hidden-size 48 --num-attention-heads 4 --seq-length 32 --num-layers 2 --num-experts 8 --micro-batch-size 2 "
    "--train-iters 20 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 127 --mock-data"
)


def parsed(flags: str) -> Parsed:
    return parse_args(f"{GOOD} {flags}".split(), Machine(1, cuda=False, transformer_engine=False, apex=False))


def checkpoint(directory: Path, flags: str) -> Path:
    """Write a checkpoint that contains only its flags."""
    path = directory / "iter_0000003"
    path.mkdir()
    (path / saved_flags.FILE).write_text(saved_flags.to_json(parsed(flags).config))
    return path


def flags_of_models() -> set[str]:
    """Return the fields of models and tokenizers that a flag sets."""
    fields = {field.name for cls in OF_MODELS for field in dataclasses.fields(cls)}
    return fields & {action.dest for action in build_parser()._actions if action.help is not argparse.SUPPRESS}


def test_every_flag_of_a_model_is_either_in_checkpoints_or_says_something_else() -> None:
    flags = flags_of_models()
    assert not OTHERS & set(CHECKPOINT_FIELDS)
    unclassified = flags - OTHERS - set(CHECKPOINT_FIELDS)
    assert not unclassified, f"does it make the model another one? {sorted(unclassified)}"


def test_no_field_of_checkpoints_is_without_a_flag() -> None:
    assert set(CHECKPOINT_FIELDS) - NEWER <= flags_of_models()
    assert len(set(CHECKPOINT_FIELDS)) == len(CHECKPOINT_FIELDS)
    assert set(CHANGEABLE_FIELDS) <= set(MODEL_FIELDS)


def another(value: Any) -> Any:
    """Return any different value; only equality counts."""
    return not value if isinstance(value, bool) else [value, "another"]


@pytest.mark.parametrize("kind", ["", "--multi-latent-attention --position-embedding-type rope"])
def test_every_field_of_a_model_is_compared(tmp_path: Path, kind: str) -> None:
    config = parsed(kind).config
    saved = saved_flags.read(checkpoint(tmp_path, kind))
    assert saved_flags.differences(saved, config) == ([], [])
    latent = {"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "mscale"}
    latent |= {"rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale_all_dim"}
    flags = {flag for action in build_parser()._actions for flag in action.option_strings}
    for name in set(MODEL_FIELDS) - NEWER - (set() if kind else latent):
        refused, reported = saved_flags.differences(saved | {name: another(saved[name])}, config)
        (text,) = reported if name in CHANGEABLE_FIELDS else refused
        assert len(refused) + len(reported) == 1 and text.startswith(saved_flags.flag_of(name))
        assert saved_flags.flag_of(name) in flags


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
    config = parsed(f"--load {tmp_path} --use-checkpoint-args").config
    found = json.loads(saved_flags.to_json(config))
    assert [section[name] for section in found.values() if name in section] == [value]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, [1.0, math.inf]])
def test_settings_that_json_does_not_have_are_left_out(tmp_path: Path, value: Any) -> None:
    """megatron-core 0.19 has limits that are infinite by default."""
    config = parse_args(GOOD.split(), Machine(1, cuda=False, transformer_engine=False, apex=False)).config
    before = saved_flags.to_json(config)
    config.optimizer.clip_grad = value
    assert json.loads(before)["optimizer"].keys() - json.loads(saved_flags.to_json(config))["optimizer"].keys() == {
        "clip_grad"
    }
    (tmp_path / saved_flags.FILE).write_text(saved_flags.to_json(config))
    assert saved_flags.read(tmp_path)["num_layers"] == 2


def test_a_run_that_does_not_take_it_is_told(tmp_path: Path) -> None:
    saved = saved_flags.read(checkpoint(tmp_path, "--swiglu --glu-linear-offset 0.75 --activation-func-clamp-value 7"))
    assert saved_flags.differences(saved, parsed("--swiglu --activation-func-clamp-value 6").config) == (
        ["--glu-linear-offset 0.0: the checkpoint has 0.75"],
        ["--activation-func-clamp-value 6.0: the checkpoint has 7.0"],
    )


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
        parse_args([*run, "--use-checkpoint-args"], Machine(1, cuda=False, transformer_engine=False, apex=False))


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
