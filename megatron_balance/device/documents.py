"""Documents that share a sample are kept apart: a token attends to tokens of its own document only.

One value describes the documents of a microbatch, and takes the place of the attention mask on its way through
megatron-core's layers. `documents` [1 + D] int32: where each of the D documents begins, counted in tokens, sample after
sample; then the number of all tokens. No document crosses a sample.

b is the number of samples of the microbatch, s the number of tokens of a sample.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.utils import get_sliding_window_causal_mask

from megatron_balance.device.attention import ContextParallelAttention, LatentDotProductAttention


def documents_of(position_ids_bs: torch.Tensor) -> torch.Tensor:
    """Return `documents`, given positions in host memory that restart at 0 in every document."""
    starts = (position_ids_bs.flatten() == 0).nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=position_ids_bs.numel()).int()


def document_numbers(documents: torch.Tensor, samples: int, length: int) -> torch.Tensor:
    """Return the number [b, s] of each token's document in the microbatch, without waiting for the device."""
    tokens = torch.arange(samples * length, dtype=torch.int32, device=documents.device)
    return torch.bucketize(tokens, documents[1:], right=True).view(samples, length)


def hidden_keys(numbers_bs: torch.Tensor, queries: int, window: tuple[int, int] | None = None) -> torch.Tensor:
    """Return which keys a query does not see, [b, 1, queries, s]: later ones, and those of other documents.

    The queries are the last tokens of the s. `window` limits what is seen, as megatron-core's `window_size`.
    """
    keys = numbers_bs.shape[1]
    numbers_b1s = numbers_bs[:, None]
    if window is None:
        unseen = torch.ones(queries, keys, dtype=torch.bool, device=numbers_bs.device).triu(1 + keys - queries)
    else:
        unseen = get_sliding_window_causal_mask(queries, keys, window)
    return unseen | (numbers_b1s[..., keys - queries :, None] != numbers_b1s[..., None, :])


class DocumentAttention(ContextParallelAttention):
    """Core attention within documents, of whole sequences and of sequences split among ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        softmax = self.scale_mask_softmax
        self.window: tuple[int, int] | None = softmax.window_size
        # With a window, and in a fused kernel, megatron-core would ignore the mask, which has the window already
        softmax.window_size = None
        softmax.scaled_masked_softmax_fusion = False

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the output for this rank's tokens, as the base does; `attention_mask` is `documents`."""
        tokens, samples = query.shape[:2]
        ranks = self.cp_group.size()
        numbers_bs = document_numbers(attention_mask, samples, tokens * ranks)
        if ranks > 1:
            return super().forward(query, key, value, numbers_bs, *args, **kwargs)
        hidden = self.hidden(tokens, tokens, numbers_bs)
        return LatentDotProductAttention.forward(self, query, key, value, hidden, *args, **kwargs)

    def hidden(self, queries: int, keys: int, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return what queries do not see; `attention_mask` has the number of each token's document."""
        return hidden_keys(attention_mask[:, :keys], queries, self.window)


def packed_documents(attention: Any) -> type:
    """Return a subclass of Transformer Engine's core attention that computes each document as a sequence of its own.

    Only this class packs tokens ("thd"); the tensors of all other layers remain [s, b, ...].
    """

    class PackedDocumentAttention(attention):
        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor,
            attn_mask_type: Any,
            **_: Any,
        ) -> torch.Tensor:
            """Return the output [s, b, heads * channels]; `attention_mask` is `documents`, and other tensors are
            [s, b, heads, channels]."""
            length, samples = query.shape[:2]
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=attention_mask,
                cu_seqlens_kv=attention_mask,
                # A bound that the host knows without waiting for the device
                max_seqlen_q=length,
                max_seqlen_kv=length,
            )
            flat = (one.transpose(0, 1).flatten(0, 1) for one in (query, key, value))
            output = super().forward(*flat, None, attn_mask_type, packed_seq_params=packed)
            return output.view(samples, length, -1).transpose(0, 1).contiguous()

    return PackedDocumentAttention
