"""Attention, unfused."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.hostcuda.packages import kernels

from ..module.base import TransformerEngineBaseModule

MASKED = -10000.0

HARMLESS = (
    *("attention_type", "core_attention_bias_type", "cp_global_ranks", "cp_stream", "fast_zero_fill", "layer_number"),
    "num_splits",
)
"""Arguments that megatron-core gives, and of whose values only one is used here."""


class _Gathered(torch.autograd.Function):
    """All ranks' tensors, one after the other; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = own.new_empty(group.size() * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(whole, own.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradients[0].contiguous()
        own = whole.new_empty(len(whole) // ctx.group.size(), *whole.shape[1:])
        dist.reduce_scatter_tensor(own, whole, group=ctx.group)
        return own, None


def _without_extra_state(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """Accept checkpoints without the state of 8-bit attention."""
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if "core_attention._extra_state" not in key]


class DotProductAttention(TransformerEngineBaseModule):
    """Scores in the input's type, softmax in single precision, in megatron-core's order of operations."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group: dist.ProcessGroup | None = None,
        cp_group: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        qkv_format: str = "sbhd",
        **others: Any,
    ) -> None:
        super().__init__()
        assert qkv_format == "sbhd"
        kernels.check_others(f"{__name__}:DotProductAttention.__init__", others, harmless=HARMLESS)
        if softmax_type != "vanilla" or cp_comm_type != "p2p":
            raise NotImplementedError("DotProductAttention: softmax_type, cp_comm_type")
        self.cp_group = cp_group if cp_group is not None and cp_group.size() > 1 else None
        self._set_tensor_parallelism(tp_group, tp_size)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        assert num_attention_heads % groups == 0, "The number of attention heads must be divisible by the GQA groups!"
        self.groups = groups // self.tp_size
        self.attn_mask_type = attn_mask_type
        self.channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else tuple(kv_channels)
        self.scale = softmax_scale or 1.0 / math.sqrt(self.channels[0])
        self.dropout = torch.nn.Dropout(attention_dropout)
        self.tracker = None if sequence_parallel else get_rng_state_tracker
        self.register_load_state_dict_post_hook(_without_extra_state)

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        qkv_format: str = "sbhd",
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Return the attended values, [sequence, batch, heads times channels].

        Args:
            query_layer: [sequence, batch, heads, channels]; keys and values have a head for each group.
            attention_mask: true where a key is hidden, broadcast to [batch, heads, queries, keys]; not with `causal`.
            qkv_format: `thd` for tensors [tokens, heads, channels] of sequences that begin at `cu_seqlens`.
        """
        kernels.check_others(f"{__name__}:DotProductAttention.forward", others, harmless=HARMLESS)
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if qkv_format == "thd":
            assert kind == "padding_causal" and self.cp_group is None, kind
            assert cu_seqlens_q is not None and cu_seqlens_kv is cu_seqlens_q and cu_seqlens_q.dtype == torch.int32
            assert isinstance(max_seqlen_q, int) and max_seqlen_kv == max_seqlen_q
            kernels.on_device(cu_seqlens_q=cu_seqlens_q)
            assert query_layer.dim() == key_layer.dim() == value_layer.dim() == 3, "packed tensors are 3D"
            tokens = torch.arange(len(query_layer), dtype=torch.int32, device=query_layer.device)
            numbers = torch.bucketize(tokens, cu_seqlens_q[1:], right=True)
            near = (tokens[:, None] - tokens).abs() < max_seqlen_q
            hidden = (tokens > tokens[:, None]) | (numbers[:, None] != numbers) | ~near
            one_batch = (one[:, None] for one in (query_layer, key_layer, value_layer))
            return DotProductAttention.forward(self, *one_batch, hidden, "arbitrary").squeeze(1)
        if kind not in ("causal", "no_mask", "arbitrary"):
            raise NotImplementedError(f"DotProductAttention with attn_mask_type {kind}")
        self._check(query_layer, key_layer, value_layer)
        if self.cp_group is not None:
            assert kind == "causal" and len(query_layer) % 2 == 0, "Sequence length per GPU needs to be divisible by 2!"
            ranks = self.cp_group.size()
            chunks = torch.arange(len(query_layer) * ranks, device=query_layer.device).chunk(2 * ranks)
            held = [torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)]
            attention_mask = torch.cat(held)[None, :] > held[self.cp_group.rank()][:, None]
            key_layer, value_layer = (_Gathered.apply(one, self.cp_group) for one in (key_layer, value_layer))
            kind = "arbitrary"
        queries, batch, heads, _ = query_layer.shape
        keys = key_layer.shape[0]
        # megatron-core's own order: [batch times heads, sequence, channels]
        query, key, value = (
            one.repeat_interleave(heads // one.shape[2], 2) if one.shape[2] != heads else one
            for one in (query_layer, key_layer, value_layer)
        )
        query, key, value = (one.reshape(len(one), batch * heads, -1).transpose(0, 1) for one in (query, key, value))
        scores = torch.baddbmm(
            query.new_empty(batch * heads, queries, keys), query, key.transpose(1, 2), beta=0.0, alpha=self.scale
        ).view(batch, heads, queries, keys)
        if kind == "causal":
            attention_mask = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1)
        single = scores.float()
        if kind != "no_mask":
            assert attention_mask is not None
            kernels.on_device(attention_mask=attention_mask)
            single = single.masked_fill(attention_mask, MASKED)
        probs = single.softmax(-1).to(scores.dtype)
        with contextlib.nullcontext() if self.tracker is None else self.tracker().fork():
            probs = self.dropout(probs)
        context = torch.bmm(probs.view(batch * heads, queries, keys), value).view(batch, heads, queries, -1)
        return context.permute(2, 0, 1, 3).contiguous().view(queries, batch, -1)

    def _check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        tensors = (query, key, value)
        assert all(one.is_cuda for one in tensors), "DotProductAttention only supports CUDA tensors."
        assert query.dtype == key.dtype == value.dtype, "Queries, keys and values must have the same data type!"
        assert all(one.dim() == 4 for one in tensors), "Queries, keys and values must be 4D tensors!"
        assert key.shape[:-1] == value.shape[:-1], "Keys and values must have the same batch, sequence and heads!"
        assert query.shape[-1] == key.shape[-1] == self.channels[0], f"Keys have head_dim = {key.shape[-1]}"
        assert value.shape[-1] == self.channels[1], f"Values have head_dim = {value.shape[-1]}"
        assert key.shape[-2] == self.groups, f"Keys and values must have num_gqa_group = {self.groups} heads!"
        assert all(one.stride(-1) == 1 for one in tensors), "channels are contiguous"
