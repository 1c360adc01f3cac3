"""Tiny random models of every architecture that can be converted, made by Hugging Face's own library."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 16, "intermediate_size": 48}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
GLM: dict[str, Any] = {
    **{"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 16, "intermediate_size": 48},
    **{"n_group": 1, "topk_group": 1, "num_mtp_layers": 0, "head_dim": 16},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
    "deepseek_v2 groups": {
        **LATENT,
        **{"q_lora_rank": 24, "first_k_dense_replace": 1, "routed_scaling_factor": 16.0},
        **{"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    },
    "deepseek_v3": {**LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v3 groups": {
        **LATENT,
        **{"q_lora_rank": None, "n_group": 4, "topk_group": 3, "num_experts_per_tok": 3, "first_k_dense_replace": 2},
    },
    "deepseek_v3 yarn": {**LATENT, "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "rope_parameters": YARN},
    "deepseek_v3 halves": {**LATENT, "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    "ernie4_5_moe": {
        **{"moe_num_experts": 8, "moe_num_shared_experts": 2, "moe_intermediate_size": 16, "intermediate_size": 48},
        **{"moe_layer_start_index": 1, "tie_word_embeddings": False},
    },
    "glm4_moe": {
        **GLM,
        **{"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2},
    },
    "glm4_moe groups": {
        **GLM,
        "n_group": 4,
        "topk_group": 3,
        "first_k_dense_replace": 0,
        "partial_rotary_factor": 0.25,
    },
    "gpt_oss": {
        **{"num_local_experts": 8, "intermediate_size": 16, "head_dim": 16, "swiglu_limit": 0.25, "sliding_window": 5},
        "rope_parameters": {name: YARN[name] for name in YARN if "mscale" not in name} | {"truncate": False},
    },
    "minimax_m2": {"num_local_experts": 8, "intermediate_size": 16, "head_dim": 16, "rotary_dim": 8},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 48, "rope_theta": 1e6},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": False},
    "qwen2_moe tied": {**EXPERTS, "shared_expert_intermediate_size": 24, "tie_word_embeddings": True},
    "qwen2_moe dense": {**EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "olmoe": {"num_experts": 8, "intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "num_key_value_heads": 4},
    "qwen3_moe yarn": {**EXPERTS, "head_dim": 16, "norm_topk_prob": True, "rope_parameters": YARN},
}
"""Entries of config.json in addition to `COMMON`; the first word of a name is the model type."""


def save(name: str, directory: Path, shard_bytes: int | None = None, **changes: Any) -> Any:
    """Write a random model as safetensors files of at most `shard_bytes` bytes each, and return it.

    Args:
        changes: entries of config.json to override.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(name.split()[0], **{**COMMON, **CONFIGS[name], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights too, which would otherwise all be one
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        for biases in model.state_dict().items():
            if biases[0].endswith("e_score_correction_bias"):
                biases[1].uniform_(-0.2, 0.2)
    model.save_pretrained(directory, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
    return model


def load(directory: Path) -> Any:
    """Return the model in a directory."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def logits(model: Any, tokens: Any) -> Any:
    """Return a model's logits in float32."""
    import torch

    with torch.no_grad():
        return model.eval()(tokens).logits


def quiet(text: str) -> None:
    """Take the place of a function that prints."""


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def reconfigure(directory: Path, **values: Any) -> None:
    """Change entries of a model's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(read_json(path) | values))


def change(directory: Path, update: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors of a model in one file."""
    from safetensors.torch import load_file, save_file

    content = load_file(directory / "model.safetensors")
    update(content)
    save_file(content, directory / "model.safetensors")
