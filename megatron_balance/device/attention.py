"""Attention that megatron-core lacks: norms across heads and, without Transformer Engine, latent attention's core."""

import dataclasses
from typing import Any

from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.device.norm import AcrossHeadsNorm


class AcrossHeadsSelfAttention(SelfAttention):
    """Self-attention that normalizes a token's queries, and its keys, over all heads together (OLMoE, section 2)."""

    def __init__(
        self, config: TransformerConfig, submodules: SelfAttentionSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        # A spec's norms receive only the channels of one head. Since 0.19 they also need --qk-layernorm, which sums
        # their gradients over tensor-parallel ranks, but here each rank has its own part of the norm
        bare = dataclasses.replace(submodules, q_layernorm=IdentityOp, k_layernorm=IdentityOp)
        super().__init__(config, bare, *args, **kwargs)
        channels, group = self.hidden_size_per_attention_head, self.pg_collection.tp
        self.q_layernorm = AcrossHeadsNorm(config, channels, config.num_attention_heads, group)
        self.k_layernorm = AcrossHeadsNorm(config, channels, config.num_query_groups, group)


class PlainQuerySelfAttention(MLASelfAttention):
    """Latent attention whose queries are neither compressed nor normalized (DeepSeek-V2-Lite)."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        # Since 0.19, with --qk-layernorm, megatron-core would normalize the input of these queries a second time
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class LatentDotProductAttention(DotProductAttention):
    """Core attention with keys and values of different widths, for multi-latent attention (DeepSeek-V2, 2.1)."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        """
        Args:
            k_channels: channels of a head's query and key; `softmax_scale` gives the scale of their products.
            v_channels: channels of a head's value and output; None in modules that megatron-core creates and replaces.
        """
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels


LATENT_KEYS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Prefixes of the norms' names, and their names in a checkpoint. With Transformer Engine, the next layer contains the
norm."""
