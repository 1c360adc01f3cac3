"""Sizes of published models, and the fields of their config.json that define the model."""

from typing import Any

YARN: dict[str, Any] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}

COMMON: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-06, "tie_word_embeddings": False}

DEEPSEEK: dict[str, Any] = {
    **COMMON,
    "attention_bias": False,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "v_head_dim": 128,
}
"""Fields that all DeepSeek models share."""

KIMI: dict[str, Any] = {
    **DEEPSEEK,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "first_k_dense_replace": 1,
    "initializer_range": 0.02,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "rope_theta": 50000.0,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 163840,
}
"""Fields that Moonlight and Kimi-K2 share."""

DEEPSEEK_V2: dict[str, Any] = {
    **DEEPSEEK,
    "model_type": "deepseek_v2",
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "scoring_func": "softmax",
    "seq_aux": True,
    "vocab_size": 102400,
}

DEEPSEEK_V3: dict[str, Any] = {
    **DEEPSEEK,
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}

GLM: dict[str, Any] = {
    **COMMON,
    "model_type": "glm4_moe",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "initializer_range": 0.02,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "topk_group": 1,
    "vocab_size": 151552,
}

GPT_OSS: dict[str, Any] = {
    **COMMON,
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "initial_context_length": 4096,
    "num_experts_per_tok": 4,
    "output_router_logits": False,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}

MINIMAX: dict[str, Any] = {
    **COMMON,
    "model_type": "minimax_m2",
    "head_dim": 128,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "mlp_intermediate_size": 8192,
    "mtp_transformer_layers": 1,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}

MIXTRAL: dict[str, Any] = {
    **COMMON,
    "model_type": "mixtral",
    "attention_dropout": 0.0,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32000,
}

OLMOE: dict[str, Any] = {
    **COMMON,
    "model_type": "olmoe",
    "attention_bias": False,
    "clip_qkv": None,
    "norm_topk_prob": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "vocab_size": 50304,
}

QWEN2: dict[str, Any] = {
    **COMMON,
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

QWEN3: dict[str, Any] = {
    **COMMON,
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def sized(
    family: dict[str, Any],
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    query_groups: int,
    positions: int,
    **more: Any,
) -> dict[str, Any]:
    """Return config.json of a model of a family."""
    return {
        **family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": query_groups,
        "max_position_embeddings": positions,
        **more,
    }


PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "Mixtral-8x7B": (46.7, sized(MIXTRAL, 32, 4096, 14336, 32, 8, 32768, router_aux_loss_coef=0.02)),
    "Mixtral-8x22B": (140.6, sized(MIXTRAL, 56, 6144, 16384, 48, 8, 65536, router_aux_loss_coef=0.001)),
    "OLMoE-1B-7B": (6.92, sized(OLMOE, 16, 2048, 1024, 16, 16, 4096)),
    "Qwen1.5-MoE-A2.7B": (14.3, sized(QWEN2, 24, 2048, 5632, 16, 16, 8192)),
    "Qwen3-30B-A3B": (
        30.5,
        sized(QWEN3, 48, 2048, 6144, 32, 4, 40960, max_window_layers=48, moe_intermediate_size=768),
    ),
    "Qwen3-235B-A22B": (
        235.1,
        sized(QWEN3, 94, 4096, 12288, 64, 4, 40960, max_window_layers=94, moe_intermediate_size=1536),
    ),
    "DeepSeek-V2": (
        235.7,
        {
            **sized(DEEPSEEK_V2, 60, 5120, 12288, 128, 128, 163840, moe_intermediate_size=1536, q_lora_rank=1536),
            "n_group": 8,
            "n_routed_experts": 160,
            "routed_scaling_factor": 16.0,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
        },
    ),
    "DeepSeek-V2-Lite": (
        15.7,
        {
            **sized(DEEPSEEK_V2, 27, 2048, 10944, 16, 16, 163840, moe_intermediate_size=1408, q_lora_rank=None),
            "n_group": 1,
            "n_routed_experts": 64,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "topk_method": "greedy",
        },
    ),
    "DeepSeek-V3": (671.0, sized(DEEPSEEK_V3, 61, 7168, 18432, 128, 128, 163840)),
    "Moonlight-16B-A3B": (
        15.96,
        {
            **sized(KIMI, 27, 2048, 11264, 16, 16, 8192, moe_intermediate_size=1408, q_lora_rank=None),
            "model_type": "deepseek_v3",
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "routed_scaling_factor": 2.446,
        },
    ),
    "Kimi-K2": (
        1026.5,
        {
            **sized(KIMI, 61, 7168, 18432, 64, 64, 131072, moe_intermediate_size=2048, q_lora_rank=1536),
            "model_type": "kimi_k2",
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "rope_scaling": {**YARN, "beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "routed_scaling_factor": 2.827,
        },
    ),
    "GLM-4.5": (
        352.8,
        {
            **sized(GLM, 92, 5120, 12288, 96, 8, 131072, moe_intermediate_size=1536, n_routed_experts=160),
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
    ),
    "GLM-4.5-Air": (
        106.9,
        {
            **sized(GLM, 46, 4096, 10944, 96, 8, 131072, moe_intermediate_size=1408, n_routed_experts=128),
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
        },
    ),
    "MiniMax-M2": (228.7, sized(MINIMAX, 62, 3072, 1536, 48, 8, 196608, attn_type_list=[1] * 62)),
    "gpt-oss-20b": (
        20.91,
        sized(
            GPT_OSS,
            *(24, 2880, 2880, 64, 8, 131072),
            num_local_experts=32,
            layer_types=["sliding_attention", "full_attention"] * 12,
        ),
    ),
    "gpt-oss-120b": (
        116.83,
        sized(
            GPT_OSS,
            *(36, 2880, 2880, 64, 8, 131072),
            num_local_experts=128,
            layer_types=["sliding_attention", "full_attention"] * 18,
        ),
    ),
}
"""By name: the number of parameters in units of 10^9, and config.json."""
