"""Operations and time of a layer's non-expert part, which are known before training (Pro-Prophet section V-B)."""

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_balance.profile.cluster_profile import ClusterProfile


def non_expert_seconds(
    profile: ClusterProfile, config: TransformerConfig, tokens: int, seq_length: int, dense_layers: int = 0
) -> tuple[float, float]:
    """Return the forward and backward seconds of one block's non-MoE part, T_FNEC and T_BNEC of Eq. 8.

    The device is assumed to compute this part as fast as experts, which are fast, so the time to overlap with is rather
    underestimated.

    Args:
        tokens: tokens of one microbatch, on all ranks that share its attention.
        dense_layers: number of dense layers between this block's MoE layer and the next one.
    """
    assert config.moe_ffn_hidden_size is not None and config.ffn_hidden_size is not None
    shared = config.moe_shared_expert_intermediate_size or 0
    flops = (1 + dense_layers) * attention_flops(config, seq_length) + mlp_flops(config, shared)
    flops += dense_layers * mlp_flops(config, config.ffn_hidden_size)
    experts_tokens = tokens * flops / mlp_flops(config, config.moe_ffn_hidden_size) / config.tensor_model_parallel_size
    return experts_tokens * profile.forward.seconds_per_token, experts_tokens * profile.backward.seconds_per_token


def attention_flops(config: TransformerConfig, seq_length: int) -> float:
    """Return the floating-point operations of one token's causal self-attention, forward."""
    # On average, a token attends to half of the sequence, with two products: the scores, and the weighted values
    return 2 * attention_weights(config) + seq_length * attended_width(config)


def attention_weights(config: TransformerConfig) -> int:
    """Return the number of weights in the matrices of one layer's attention."""
    hidden = config.hidden_size
    heads = config.num_attention_heads
    if isinstance(config, MLATransformerConfig):
        query = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
        rank = config.q_lora_rank
        queries = (hidden + query) * rank if rank else hidden * query
        keys_values = config.kv_lora_rank * heads * (config.qk_head_dim + config.v_head_dim)
        latent = hidden * (config.kv_lora_rank + config.qk_pos_emb_head_dim)
        return queries + latent + keys_values + heads * config.v_head_dim * hidden
    assert config.kv_channels is not None and config.num_query_groups is not None
    return 2 * hidden * config.kv_channels * (heads + config.num_query_groups)


def attended_width(config: TransformerConfig) -> int:
    """Return the key and value channels of all heads, which are multiplied for each pair of tokens."""
    if isinstance(config, MLATransformerConfig):
        channels = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
    else:
        assert config.kv_channels is not None
        channels = 2 * config.kv_channels
    return config.num_attention_heads * channels


def mlp_flops(config: TransformerConfig, inner: int) -> float:
    """Return the floating-point operations of one token in an MLP or expert of this inner width, forward."""
    matrices = 3 if config.gated_linear_unit else 2
    return 2 * matrices * config.hidden_size * inner
