"""Operations of a layer, which are known before training."""

from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention


def attention_flops(config: TransformerConfig, seq_length: int) -> float:
    """Return the floating-point operations of one token's causal self-attention, forward."""
    # Each key costs two products: the score, and the weighted value
    return 2 * (attention_weights(config) + attended_keys(config, seq_length) * attended_width(config))


def attended_keys(config: TransformerConfig, seq_length: int) -> float:
    """Return the number of keys that a token attends to, on average over tokens and layers."""
    whole = seq_length / 2
    before = config.window_size[0] if config.window_size else -1
    if before < 0:
        return whole
    window = min(before + 1, seq_length)
    # The first tokens have fewer keys than the window
    within = window * (1 - window / (2 * seq_length))
    skip: Any = config.window_attn_skip_freq  # megatron-core takes None, unlike its annotation
    windows = [is_layer_window_attention(config.window_size, skip, layer + 1) for layer in range(config.num_layers)]
    return whole + (within - whole) * sum(windows) / len(windows)


def attention_weights(config: TransformerConfig) -> int:
    """Return the number of weights in the matrices of one layer's attention."""
    return sum(inputs * outputs for inputs, outputs in attention_matrices(config))


def attention_matrices(config: TransformerConfig) -> list[tuple[int, int]]:
    """Return the inputs and outputs of the matrices of one layer's attention."""
    hidden = config.hidden_size
    heads = config.num_attention_heads
    if isinstance(config, MLATransformerConfig):
        query = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
        rank = config.q_lora_rank
        queries = [(hidden, rank), (rank, query)] if rank else [(hidden, query)]
        latent = (hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        keys_values = (config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim))
        return [*queries, latent, keys_values, (heads * config.v_head_dim, hidden)]
    assert config.kv_channels is not None and config.num_query_groups is not None
    channels = config.kv_channels * heads
    return [(hidden, channels + 2 * config.kv_channels * config.num_query_groups), (channels, hidden)]


def attended_width(config: TransformerConfig) -> int:
    """Return the key and value channels of all heads, which are multiplied for each pair of tokens."""
    return config.num_attention_heads * head_channels(config)


def head_channels(config: TransformerConfig) -> int:
    """Return the channels of a head's key and value, which are as many as those of its query and output."""
    if isinstance(config, MLATransformerConfig):
        return config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
    assert config.kv_channels is not None
    return 2 * config.kv_channels


def key_value_width(config: TransformerConfig) -> int:
    """Return the key and value channels of a token that a tensor-parallel rank's attention reads."""
    tensor = config.tensor_model_parallel_size
    heads = config.num_attention_heads
    if not isinstance(config, MLATransformerConfig):
        assert config.num_query_groups is not None
        heads = config.num_query_groups
    return max(1, heads // tensor) * head_channels(config)


def mlp_flops(config: TransformerConfig, inner: int) -> float:
    """Return the floating-point operations of one token in an MLP or expert of this inner width, forward."""
    matrices = 3 if config.gated_linear_unit else 2
    return 2 * matrices * config.hidden_size * inner
