"""The flags of the run that saved a checkpoint, in its `arguments.json`."""

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_balance.checkpoint.directory import CheckpointDirectory
from megatron_balance.config.run_config import RunConfig
from megatron_balance.files.reading import MIB, read_object, shown
from megatron_balance.messages import cleaned

FILE = "arguments.json"
MAX_BYTES = MIB

MODEL_FIELDS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("group_query_attention", "num_query_groups", "max_position_embeddings", "position_embedding_type"),
    *("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor"),
    *("normalization", "layernorm_epsilon", "qk_layernorm", "qk_layernorm_across_heads"),
    *("layernorm_zero_centered_gamma", "add_bias_linear", "add_qkv_bias", "swiglu", "squared_relu", "quick_geglu"),
    *("activation_func_clamp_value", "glu_linear_offset", "fp32_residual_connection"),
    *("qk_l2_norm", "attention_output_gate", "softmax_type", "window_size", "window_attn_skip_freq"),
    *("use_rope_scaling", "rope_scaling_factor", "no_rope_freq"),
    *("untie_embeddings_and_output_weights", "make_vocab_size_divisible_by", "padded_vocab_size"),
    *("num_moe_experts", "moe_layer_freq"),
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "mla_down_proj_fusion",  # since megatron-core 0.19
    *("rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk"),
    "moe_router_topk_scaling_factor",
    *("moe_router_enable_expert_bias", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
    *("moe_apply_probs_on_input", "moe_expert_capacity_factor", "moe_token_drop_policy"),
    *("attention_dropout", "hidden_dropout", "mtp_num_layers"),
)
"""Fields that define the model. `--use-checkpoint-args` takes them from the checkpoint; resuming compares them."""

TOKENIZER_FIELDS = (
    *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size", "seq_length"),
    *("tokenizer_metadata", "tokenizer_special_tokens", "tokenizer_sentencepiece_legacy"),
    *("tokenizer_hf_include_special_tokens", "tiktoken_pattern", "tiktoken_num_special_tokens"),
)
"""Fields that `--use-checkpoint-args` takes in addition to the model's."""

CHECKPOINT_FIELDS = (*MODEL_FIELDS, *TOKENIZER_FIELDS)
"""All fields that are read from a checkpoint."""

FLAG_NAMES = {
    "num_moe_experts": "--num-experts",
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "add_bias_linear": "--disable-bias-linear",
}
"""Flags whose names differ from their fields' names."""

CHANGEABLE_FIELDS = (
    *("moe_router_topk", "layernorm_epsilon", "rotary_base", "rotary_percent", "use_rope_scaling"),
    *("rotary_seq_len_interpolation_factor", "activation_func_clamp_value", "fp32_residual_connection"),
    *("moe_expert_capacity_factor", "moe_token_drop_policy", "attention_dropout", "hidden_dropout"),
)
"""Model fields that a user may change when resuming: a difference is reported, not refused."""


def to_json(config: RunConfig) -> str:
    """Return all settings that JSON can represent, by section and field."""
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    plain = {
        name: {
            field.name: value
            for field in dataclasses.fields(section)
            if is_plain(value := getattr(section, field.name))
        }
        for name, section in sections.items()
    }
    return json.dumps(plain, indent=1, allow_nan=False)


def is_plain(value: Any) -> bool:
    """Return whether JSON can represent a value: a finite number, a string, a switch, None, or a list of them."""
    if isinstance(value, list | tuple):
        return all(is_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def read(checkpoint: Path) -> dict[str, Any]:
    """Return the model and tokenizer settings of a checkpoint, by field name.

    Raises:
        ValueError: the file is missing, or `to_json` did not write it; the message names the file.
    """
    path = checkpoint / FILE
    sections = read_object(path, MAX_BYTES)
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise ValueError(f"{path}: {cleaned(name)}: {shown(section)} is no section of flags")
    fields = {name: value for section in sections.values() for name, value in section.items()}
    return {name: fields[name] for name in CHECKPOINT_FIELDS if name in fields}


def as_flag(action: argparse.Action, value: Any) -> Any:
    """Convert a checkpoint's value as if it had been given with its flag.

    Raises:
        ValueError: the flag does not accept the value.
    """
    left_out = value is None and (action.default is None or not (action.choices or action.type in (int, float)))
    if left_out or (action.nargs == 0 and type(value) is bool):
        return value
    entries = value if isinstance(value, list) and action.nargs is not None else [value]
    try:
        if action.nargs == 0 or isinstance(value, bool):
            raise ValueError("switches are true or false, other flags are not")
        # A flag whose value is a list has a converter that takes the list as one string
        words = [str(entry).replace(" ", "") if isinstance(entry, list) else str(entry) for entry in entries]
        converted = [action.type(word) if callable(action.type) else word for word in words]
        if action.choices is not None and any(one not in action.choices for one in converted):
            raise ValueError(f"choose from {', '.join(map(str, action.choices))}")
    except (ValueError, TypeError, OverflowError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"{flag_of(action.dest)}: the checkpoint has {shown(value)} ({cleaned(error)})") from error
    return converted if entries is value else converted[0]


def read_newest(root: Path, step: int | None) -> dict[str, Any]:
    """Return what `read` returns for the checkpoint that `--load root` would load.

    Raises:
        ValueError: there is no checkpoint, or its flags cannot be read.
    """
    directory = CheckpointDirectory(root)
    for iteration in [step or directory.tracked() or 0, *directory.iterations()]:
        if directory.path(iteration).is_dir():
            return read(directory.path(iteration))
    raise ValueError(f"--use-checkpoint-args: --load {root} holds no checkpoint; give the model's flags")


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return FLAG_NAMES.get(name, f"--{name.replace('_', '-')}")


def differences(saved: Mapping[str, Any], config: RunConfig) -> tuple[list[str], list[str]]:
    """Return the model settings that differ from a checkpoint's: first those to refuse, then those to report."""
    mine = {name: value for section in json.loads(to_json(config)).values() for name, value in section.items()}
    refused, reported = [], []
    for name in MODEL_FIELDS:
        if name in saved and name in mine and saved[name] != mine[name]:
            text = f"{flag_of(name)} {mine[name]}: the checkpoint has {saved[name]}"
            (reported if name in CHANGEABLE_FIELDS else refused).append(text)
    return refused, reported
