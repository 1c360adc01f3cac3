"""Norms across heads, which megatron-core lacks, and norms and attention that it has only with Transformer Engine."""

import copy
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_balance.job.groups import sequence_chunks


class TorchNorm:
    """Builds the module that `config.normalization` names: `torch.nn.LayerNorm` or `torch.nn.RMSNorm`. megatron-core's
    fallback (`WrappedTorchNorm`) refuses sequence parallelism, although a mark on the parameters suffices: marked
    gradients are summed over the tensor-parallel group."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> torch.nn.Module:
        norm = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        module = norm(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module


class AcrossHeadsNorm(torch.nn.Module):
    """RMS norm over all heads of a token's queries or keys (OLMoE, section 2; OLMo 2). Each tensor-parallel rank has
    part of the heads, so the ranks all-reduce the sum of squares."""

    def __init__(self, config: TransformerConfig, hidden_size: int, heads: int, tp_group: dist.ProcessGroup) -> None:
        """`hidden_size`: channels of a head; `heads`: number of heads on all tensor-parallel ranks together."""
        super().__init__()
        self.channels = heads * hidden_size
        self.eps = config.layernorm_epsilon
        self.tp_group = tp_group
        mine = heads // tp_group.size() * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(mine, dtype=config.params_dtype))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalize this rank's heads [s, b, heads, channels]."""
        single = heads.float()
        squares = single.square().sum((-2, -1), keepdim=True)
        if self.tp_group.size() > 1:
            squares = differentiable.all_reduce(squares, group=self.tp_group)
        normal = single * torch.rsqrt(squares / self.channels + self.eps)
        return self.weight.view(heads.shape[-2:]) * normal.to(heads.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class AcrossHeadsSelfAttention(SelfAttention):
    """Self-attention that normalizes a token's queries, and its keys, over all heads together (OLMoE, section 2)."""

    def __init__(
        self, config: TransformerConfig, submodules: SelfAttentionSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        # A spec's norms see one head only, and since 0.19 need --qk-layernorm, which would sum gradients of different
        # parts
        bare = dataclasses.replace(submodules, q_layernorm=IdentityOp, k_layernorm=IdentityOp)
        super().__init__(config, bare, *args, **kwargs)
        channels = self.hidden_size_per_attention_head
        group = self.pg_collection.tp
        self.q_layernorm = AcrossHeadsNorm(config, channels, config.num_attention_heads, group)
        assert config.num_query_groups is not None
        self.k_layernorm = AcrossHeadsNorm(config, channels, config.num_query_groups, group)


class LatentSelfAttention(MLASelfAttention):
    """Latent attention with tensor and sequence parallelism.

    Without Transformer Engine, megatron-core splits the projection to compressed keys and values among ranks, and loses
    a part of the gradient. All heads share the keys' rotated channels, but only heads on the ranks that hold these
    channels contribute. This class brings the projection's output into Transformer Engine's form.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        projection: Any = self.linear_kv_down_proj
        projection.register_forward_hook(self._own_tokens)

    def _own_tokens(
        self, module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Exchange [s, b, channels / ranks] for [s / ranks, b, channels]."""
        projected, bias = output
        if projected.shape[-1] == self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            return output
        whole = gather_from_tensor_model_parallel_region(projected, group=self.pg_collection.tp)
        return scatter_to_sequence_parallel_region(whole, group=self.pg_collection.tp), bias


class PlainQuerySelfAttention(LatentSelfAttention):
    """Latent attention whose queries are neither compressed nor normalized (DeepSeek-V2-Lite)."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        # With --qk-layernorm, megatron-core since 0.19 would normalize the input of these queries twice
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class LatentDotProductAttention(DotProductAttention):
    """Core attention with keys and values of different widths, for multi-latent attention (DeepSeek-V2, 2.1)."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        """Channels are per head; None in modules that megatron-core creates and then replaces."""
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels


class ContextParallelAttention(LatentDotProductAttention):
    """Core attention over sequences split among ranks: replaces Transformer Engine's implementation on a CPU.

    With `a2a`, each rank computes the whole sequence for its part of the heads (DeepSpeed-Ulysses). Otherwise, each
    rank combines its queries with the keys and values of all ranks. Transformer Engine passes keys and values around a
    ring (`p2p`) and updates the softmax in every step; this class gathers them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ) -> None:
        alone = copy.copy(config)
        # The base class refuses larger sizes
        alone.context_parallel_size = 1
        super().__init__(alone, *args, pg_collection=pg_collection, **kwargs)
        self.config = config
        self.cp_group = pg_collection.cp
        self.splits_heads = cp_comm_type == "a2a"
        if self.splits_heads:
            self.hidden_size_per_partition //= self.cp_group.size()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the output for this rank's tokens, [s, b, heads * channels]. `query`, `key` and `value`
        [s, b, heads, channels] have the tokens of this rank's `sequence_chunks`; `attention_mask` is what `hidden`
        takes."""
        if self.splits_heads:
            query, key, value = (_whole_sequence(one, self.cp_group) for one in (query, key, value))
            hidden = self.hidden(len(query), len(key), attention_mask)
            return _own_tokens(super().forward(query, key, value, hidden, *args, **kwargs), self.cp_group)
        # The backward pass of the gather sums gradients of keys and values over ranks
        gathered = (gather_from_sequence_parallel_region(one, group=self.cp_group) for one in (key, value))
        key, value = (_in_order(one, self.cp_group) for one in gathered)
        parts = []
        length = len(query) // 2
        own = sequence_chunks(self.cp_group.rank(), self.cp_group.size())
        for part, chunk in zip(query.chunk(2), own, strict=True):
            seen = (chunk + 1) * length
            hidden = self.hidden(length, seen, attention_mask)
            parts.append(super().forward(part, key[:seen], value[:seen], hidden, *args, **kwargs))
        return torch.cat(parts)

    def hidden(self, queries: int, keys: int, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return which of the first `keys` tokens the last `queries` of them do not see: later ones, whatever the mask.
        None if these are all tokens, for which the base makes this mask."""
        if queries == keys:
            return None
        return torch.ones(queries, keys, dtype=torch.bool, device=torch.cuda.current_device()).triu(keys - queries + 1)


def _whole_sequence(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange [s / ranks, b, heads, channels] for [s, b, heads / ranks, channels], in the order of the sequence."""
    tokens, samples, heads, channels = own.shape
    exchanged = all_to_all_sp2hp(own.reshape(tokens * samples, -1), group)
    return _in_order(exchanged.view(-1, samples, heads // group.size(), channels), group)


def _own_tokens(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange the output [s, b, width / ranks] of some heads for [s / ranks, b, width]."""
    _, samples, width = whole.shape
    chunks = whole.chunk(2 * group.size())
    by_rank = torch.cat([chunks[chunk] for chunk in _held_chunks(group.size())])
    return all_to_all_hp2sp(by_rank.view(-1, width), group).view(-1, samples, width * group.size())


def _in_order(by_rank: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sort the chunks of all ranks by their order in the sequence."""
    held = zip(_held_chunks(group.size()), by_rank.chunk(2 * group.size()), strict=True)
    return torch.cat([values for _, values in sorted(held, key=lambda item: item[0])])


def _held_chunks(ranks: int) -> list[int]:
    return [chunk for rank in range(ranks) for chunk in sequence_chunks(rank, ranks)]


LATENT_KEYS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Prefix of a norm's names -> its prefix in a checkpoint, where the next layer contains the norm (Transformer
Engine)."""
