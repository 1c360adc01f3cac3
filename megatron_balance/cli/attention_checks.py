"""Checks of flags of attention against each other. Called by checks.py."""

from collections.abc import Mapping
from typing import Any

from megatron_balance.config.flags import flag_of


def across_heads(values: Mapping[str, Any]) -> None:
    """Check what `--qk-layernorm-across-heads` requires."""
    for name in ("qk_layernorm", "qk_l2_norm"):
        if values[name]:
            raise ValueError(f"--qk-layernorm-across-heads and {flag_of(name)}: choose one norm")
    if values["normalization"] != "RMSNorm":
        raise ValueError(
            f"--normalization {values['normalization']}: --qk-layernorm-across-heads needs --normalization RMSNorm"
        )
    groups = values["num_query_groups"]
    tensor = values["tensor_model_parallel_size"]
    if values["group_query_attention"] and groups and groups % tensor:
        raise ValueError(
            f"--num-query-groups {groups}: with --qk-layernorm-across-heads it must be a multiple of "
            f"--tensor-model-parallel-size {tensor}"
        )


def latent_attention(values: Mapping[str, Any]) -> None:
    """Check what `--multi-latent-attention` requires."""
    if values["position_embedding_type"] != "rope":
        raise ValueError(
            f"--position-embedding-type {values['position_embedding_type']}: --multi-latent-attention has rotary "
            "embeddings itself; use --position-embedding-type rope"
        )
    tensor = values["tensor_model_parallel_size"]
    if tensor > 1 and not values["sequence_parallel"]:
        # Without it, megatron-core sums the gradients of the queries' norm over ranks that have all of them
        raise ValueError(
            f"--tensor-model-parallel-size {tensor}: with --multi-latent-attention, add --sequence-parallel"
        )
    # Without Transformer Engine, these projections are split, too
    widths = {
        "--q-lora-rank": values["q_lora_rank"] or 0,
        "--kv-lora-rank plus --qk-pos-emb-head-dim": values["kv_lora_rank"] + values["qk_pos_emb_head_dim"],
    }
    for name, width in widths.items():
        if width % tensor:
            raise ValueError(f"{name} {width}: must be a multiple of --tensor-model-parallel-size {tensor}")
    for name in ("qk_layernorm_across_heads", "qk_l2_norm", "group_query_attention", "window_size"):
        if values[name]:
            raise ValueError(f"{flag_of(name)}: does not go with --multi-latent-attention; leave it out")
