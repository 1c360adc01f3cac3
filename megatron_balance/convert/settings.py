"""Translate config.json into the settings of a run, and the settings of a trained run back into config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_balance.checkpoint import saved_flags
from megatron_balance.cli.arguments import parse_args
from megatron_balance.config.flags import flag_of
from megatron_balance.config.run_config import RunConfig
from megatron_balance.convert.architectures import PREDICTED
from megatron_balance.convert.config_fields import EXPERTS
from megatron_balance.convert.model import Model
from megatron_balance.device.machine import Machine
from megatron_balance.files.reading import number_in

WRITTEN = {
    "moe_router_topk": ("num_experts_per_tok", "experts_per_token", "moe_k"),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    "layernorm_epsilon": ("rms_norm_eps",),
    "max_position_embeddings": ("max_position_embeddings",),
    "activation_func_clamp_value": ("swiglu_limit",),
}
"""Keys of config.json with the same values as a run's fields. A model without any of them cannot express the field."""

ROPE = {
    "rotary_scaling_factor": "factor",
    **{
        name: name
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    },
}
"""The same for the keys of YaRN in the object of rotary embeddings, with latent attention."""

PLAIN_ROPE = {f"yarn_{name}": key for name, key in ROPE.items()} | {"yarn_correction_range_round_to_int": "truncate"}
"""The same without latent attention."""

GROUPS = ("moe_router_num_groups", "moe_router_group_topk")
SCORE = "moe_router_group_score_topk"

DEFAULTS = {"moe_router_topk_scaling_factor": 1.0, **dict.fromkeys(GROUPS, 1)}
"""Values that have the effect of None."""

FREE = frozenset(
    (
        # They follow from the names and shapes of tensors, which are compared themselves
        *("group_query_attention", "num_query_groups", "make_vocab_size_divisible_by", "padded_vocab_size"),
        *("mla_down_proj_fusion", "mtp_num_layers", "moe_layer_freq", "kv_channels"),
        *("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
        # Training, and the precision of the computation
        *("attention_dropout", "hidden_dropout", "fp32_residual_connection"),
        # Without effect unless another field is set; `Model.notices` mentions the capacity
        *("rope_scaling_factor", "moe_expert_capacity_factor", "moe_token_drop_policy"),
    )
)
"""Fields of a model that may differ from what its config.json says."""

NOT_WRITTEN = ("quantization_config", "compression_config")
"""Keys of config.json that describe weights of another type than those that are exported."""


def run_config(model: Model, tokenizer: Path | None) -> RunConfig:
    """Return the configuration of a run of this model; settings that the model does not determine are placeholders."""
    flags = [*model.flags(), "--micro-batch-size=1", "--train-iters=1", "--lr=1e-5", "--mock-data"]
    if tokenizer is None:
        flags += ["--tokenizer-type=NullTokenizer"]
    else:
        flags += ["--tokenizer-type=HuggingFaceTokenizer", f"--tokenizer-model={tokenizer}"]
    return parse_args(flags, Machine(1, cuda=False, transformer_engine=False, apex=False)).config


def trained_config(model: Model, saved: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json that describes a model as it was trained.

    Args:
        model: the model before training, or another one of its architecture and sizes.
        saved: the settings of the run that trained it, as `saved_flags.read` returns them.
        dtype: type of the exported weights.

    Raises:
        ValueError: config.json cannot express a setting; the message names its flag.
    """
    content = {name: value for name, value in model.content.items() if name not in NOT_WRITTEN}
    content |= {name: str(dtype).removeprefix("torch.") for name in ("dtype", "torch_dtype") if name in content}
    # The layers of multi-token prediction are not exported
    content |= {name: 0 for name in PREDICTED if content.get(name)}
    if type(size := saved.get("vocab_size")) is int:
        content["vocab_size"] = max(model.vocabulary, size)
    # A checkpoint may lack flags that its program did not have
    saved = {**saved_flags.fields_of(run_config(model, None)), **saved}
    for name in ("moe_router_topk", *GROUPS):
        value = DEFAULTS.get(name) if saved[name] is None else saved[name]
        number_in(value, 1, EXPERTS, flag_of(name), whole=True)
    for kind in ("sinkhorn", "quantile_balancing"):
        if kind in str(saved["moe_router_load_balancing_type"]):
            raise ValueError(f"config.json cannot express the weights of --moe-router-load-balancing-type {kind}")
    changed = {name: theirs for name, (theirs, _) in _differences(model, saved).items()}
    written = {key: changed[name] for name, keys in WRITTEN.items() if name in changed for key in keys}
    content |= {key: value for key, value in written.items() if key in content}
    if "moe_router_pre_softmax" in changed and "norm_topk_prob" in content:
        content["norm_topk_prob"] = not changed["moe_router_pre_softmax"]
    if model.architecture.latent and changed.keys() & {*GROUPS, SCORE}:
        content |= _groups(content, saved)
    if changed.keys() & {"rotary_base", "rotary_percent", "rope_type", "position_embedding_type", *ROPE, *PLAIN_ROPE}:
        content |= _rope(model, content, saved)
    try:
        left = _differences(Model(content), saved)
    except ValueError as error:
        raise ValueError(f"the settings of this run are not those of a {model.model_type}: {error}") from error
    if left:
        texts = [
            f"{flag_of(name)} {mine} (config.json can only mean {implied})" for name, (mine, implied) in left.items()
        ]
        raise ValueError(f"config.json of a {model.model_type} cannot express {', '.join(texts)}")
    return content


def _differences(model: Model, saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which a trained run differs from what its config.json means: their values in both."""
    implied = _effective(saved_flags.fields_of(run_config(model, None)), model.layers)
    theirs = _effective(saved, model.layers)
    return {name: (theirs[name], value) for name, value in implied.items() if theirs.get(name, value) != value}


def _effective(fields: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the fields of a model with so many layers that determine logits, with one of the values that have the
    same effect."""
    found = {name: fields[name] for name in saved_flags.MODEL_FIELDS if name in fields and name not in FREE}
    found |= {name: value for name, value in DEFAULTS.items() if found.get(name) is None}
    idle = {
        *(ROPE if found.get("rope_type") != "yarn" else ()),
        *(PLAIN_ROPE if found["position_embedding_type"] != "yarn" else ()),
        *(("moe_router_pre_softmax",) if found["moe_router_score_function"] == "sigmoid" else ()),
        *((SCORE,) if found["moe_router_num_groups"] == 1 else ()),
        *(("window_attn_skip_freq",) if found["window_size"] is None else ()),
    }
    if found["position_embedding_type"] == "yarn" and None in (found["yarn_mscale"], found["yarn_mscale_all_dim"]):
        # megatron-core reads neither of them
        found |= {"yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0}
    every = found["window_attn_skip_freq"]
    if type(every) is int and every > 0:
        # Every so many layers have full attention
        found["window_attn_skip_freq"] = [int((layer + 1) % every != 0) for layer in range(layers)]
    if SCORE not in idle and found[SCORE] is None:
        # megatron-core's own score
        found[SCORE] = found["moe_router_topk"] // found["moe_router_group_topk"]
    return {name: value for name, value in found.items() if name not in idle}


def _groups(content: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of group-limited routing."""
    number, chosen = (saved[name] or 1 for name in GROUPS)
    method = {"topk_method": "greedy" if number == 1 else "group_limited_greedy"}
    return {"n_group": number, "topk_group": chosen} | (method if content["model_type"] == "deepseek_v2" else {})


def _rope(model: Model, content: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of rotary embeddings, in the form that config.json already has."""
    base = saved["rotary_base"]
    part = number_in(saved["rotary_percent"], 0, 1, flag_of("rotary_percent"))
    names = {"rope_type": ROPE, "position_embedding_type": PLAIN_ROPE}
    scaled = [fields for name, fields in names.items() if saved.get(name) == "yarn"]
    yarn = {key: saved[name] for fields in scaled for name, key in fields.items()}
    inside = content.get("rope_parameters")
    found: dict[str, Any] = {"rope_theta": base} if "rope_theta" in content or not inside else {}
    parts = {"partial_rotary_factor": part, "rotary_dim": int(model.channels * part)}
    found |= {name: value for name, value in parts.items() if content.get(name) is not None}
    if inside:
        kept = {name: part for name in ("partial_rotary_factor",) if name in inside}
        found["rope_parameters"] = {"rope_theta": base, "rope_type": "yarn" if yarn else "default", **kept, **yarn}
    if "rope_scaling" in content or (yarn and not inside):
        found["rope_scaling"] = {"type": "yarn", **yarn} if yarn and not inside else None
    return found
