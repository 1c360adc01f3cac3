"""What megatron-core's attention lacks without Transformer Engine."""

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention


class LatentDotProductAttention(DotProductAttention):
    """Core attention whose keys and values differ in width, as multi-latent attention has them (DeepSeek-V2, 2.1)."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        """
        Args:
            k_channels: of a head's query and key; the scale of their products is given with `softmax_scale`.
            v_channels: of a head's value, and of its output; None in what megatron-core makes and then replaces.
        """
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels


LATENT_KEYS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Norms' names in a checkpoint: with Transformer Engine, the layer after a norm contains it."""
