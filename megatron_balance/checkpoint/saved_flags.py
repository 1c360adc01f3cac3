"""The flags of the run that saved a checkpoint, in its `arguments.json`."""

import argparse
import contextlib
import enum
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_balance.checkpoint.directory import CheckpointDirectory
from megatron_balance.config.flags import flag_of
from megatron_balance.config.run_config import RunConfig
from megatron_balance.files.reading import MIB, read_object, shown
from megatron_balance.messages import cleaned

FILE = "arguments.json"

WEIGHT_FIELDS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("group_query_attention", "num_query_groups", "max_position_embeddings", "position_embedding_type"),
    *("rotary_interleaved", "normalization", "qk_layernorm", "qk_layernorm_across_heads"),
    *("layernorm_zero_centered_gamma", "add_bias_linear", "add_qkv_bias", "swiglu", "squared_relu", "quick_geglu"),
    *("glu_linear_offset", "qk_l2_norm", "attention_output_gate", "softmax_type", "window_size"),
    *("window_attn_skip_freq", "rope_scaling_factor", "no_rope_freq", "untie_embeddings_and_output_weights"),
    *("make_vocab_size_divisible_by", "padded_vocab_size", "num_moe_experts", "moe_layer_freq"),
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "mla_down_proj_fusion",  # since megatron-core 0.19
    *("moe_router_enable_expert_bias", "moe_router_score_function", "moe_router_pre_softmax"),
    *("moe_apply_probs_on_input", "mtp_num_layers"),
)
"""Fields that define the weights' shapes or meaning."""

FUNCTION_FIELDS = (
    *("layernorm_epsilon", "rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor"),
    *("use_rope_scaling", "activation_func_clamp_value", "fp32_residual_connection"),
    *("rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_router_group_score_topk", "moe_router_topk_scaling_factor"),
    *("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
    *("yarn_mscale", "yarn_mscale_all_dim", "yarn_correction_range_round_to_int"),
    *("moe_expert_capacity_factor", "moe_token_drop_policy", "attention_dropout", "hidden_dropout"),
)
"""Fields that define what the model computes from the same weights."""

MODEL_FIELDS = (*WEIGHT_FIELDS, *FUNCTION_FIELDS)
"""Fields that define the model. `--use-checkpoint-args` takes them from the checkpoint; resuming compares them."""

TOKENIZER_FIELDS = (
    *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size", "seq_length"),
    *("tokenizer_metadata", "tokenizer_special_tokens", "tokenizer_sentencepiece_legacy"),
    *("tokenizer_hf_include_special_tokens", "tiktoken_pattern", "tiktoken_num_special_tokens"),
)
"""Fields that `--use-checkpoint-args` takes in addition to the model's."""

CHECKPOINT_FIELDS = (*MODEL_FIELDS, *TOKENIZER_FIELDS)
"""All fields that are read from a checkpoint."""

NEGATED = {"add_bias_linear", "yarn_correction_range_round_to_int"}
"""Fields whose switches turn something off: given means False."""


def to_json(config: RunConfig, schedule: Mapping[str, Any] | None = None) -> str:
    """Return `sections` as text."""
    return json.dumps(sections(config, schedule), indent=1, allow_nan=False)


def sections(config: RunConfig, schedule: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return all settings that JSON can represent, as JSON would return them, by section and field. `schedule`: the
    settings of megatron-core's scheduler, which follow from the flags and the number of ranks."""
    parts = {name: vars(section) for name, section in vars(config).items()} | {"schedule": schedule or {}}
    return {
        name: {key: plain for key, value in section.items() if is_plain(plain := _plain(value))}
        for name, section in parts.items()
    }


def _plain(value: Any) -> Any:
    """Return an enumeration's member or a precision by name, and a tuple as a list."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def fields_of(config: RunConfig) -> dict[str, Any]:
    """Return all settings by field name, as `read` would after `to_json`."""
    return flat(sections(config))


def flat(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of all sections by field name."""
    return {name: value for section in sections.values() for name, value in section.items()}


def is_plain(value: Any) -> bool:
    """Return whether JSON can represent a value: a finite number, a string, a switch, None, or a list of them."""
    if isinstance(value, list | tuple):
        return all(is_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def read(checkpoint: Path) -> dict[str, Any]:
    """Return the settings of a checkpoint, by field name; raise ValueError if `to_json` did not write them."""
    path = checkpoint / FILE
    found = read_object(path, MIB)
    for name, section in found.items():
        if not isinstance(section, dict):
            raise ValueError(f"{path}: {cleaned(name)}: {shown(section)} is no section of flags")
    return flat(found)


def as_flag(action: argparse.Action, value: Any) -> Any:
    """Convert a checkpoint's value as if it had been given with its flag; raise ValueError if the flag refuses it."""
    left_out = value is None and (action.default is None or not (action.choices or action.type in (int, float)))
    if left_out or (action.nargs == 0 and type(value) is bool):
        return value
    entries = value if isinstance(value, list) and action.nargs is not None else [value]
    try:
        if action.nargs == 0 or isinstance(value, bool):
            raise ValueError(f"must {'' if action.nargs == 0 else 'not '}be true or false")
        # A flag whose value is a list has a converter that takes the list as one string
        words = [str(entry).replace(" ", "") if isinstance(entry, list) else str(entry) for entry in entries]
        converted = [action.type(word) if callable(action.type) else word for word in words]
        if action.choices is not None and any(one not in action.choices for one in converted):
            raise ValueError(f"choose from {', '.join(map(str, action.choices))}")
    except (ValueError, TypeError, OverflowError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"{flag_of(action.dest)}: the checkpoint has {shown(value)} ({cleaned(error)})") from error
    return converted if entries is value else converted[0]


def read_newest(root: Path, step: int | None) -> dict[str, Any]:
    """Return the model and tokenizer settings, by field name, of the checkpoint that `--load root` would load; raise
    ValueError if there is none, or its flags cannot be read."""
    CheckpointDirectory(root).check("--load")
    newest = newest_of(root, step)
    if newest is None:
        raise ValueError(f"--use-checkpoint-args: --load {root} holds no checkpoint; give the model's flags")
    fields = read(newest)
    return {name: fields[name] for name in CHECKPOINT_FIELDS if name in fields}


def newest_of(root: Path, step: int | None) -> Path | None:
    """Return the checkpoint that `--load root` would load if all are sound, or None if there is none."""
    directory = CheckpointDirectory(root)
    numbers = directory.iterations()
    # The search for a sound checkpoint passes over a damaged tracker, too
    with contextlib.suppress(ValueError):
        first = directory.tracked() if step is None else step
        numbers = numbers if first is None else [first, *numbers]
    return next((path for path in map(directory.path, numbers) if path.is_dir()), None)
