"""Estimates the memory of a rank's activations from the layers' shapes, without running anything.

The estimate counts the tensors that autograd keeps from a microbatch's forward pass to its backward pass. It extends
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4: for a dense layer
with GELU, LayerNorm and dropout in 16 bits, `layer` is their s b h (34 + 5 a s / h). Not counted: tensors within one
operation, gradients of activations, buffers of libraries, and fragmentation.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_balance.config.run_config import RunConfig
from megatron_balance.timeline.lower import Pass


class Tokens(NamedTuple):
    """Tokens and rows of one microbatch on one rank."""

    whole: int
    """Tokens that attention and dense layers process."""

    part: int
    """Tokens outside attention and dense layers: all, or this rank's share under sequence parallelism."""

    rows: int
    """Rows that this rank's experts, or shards of experts, compute under even routing."""


class ChunkParts(NamedTuple):
    """The parts of a model chunk."""

    moe: tuple[bool, ...]
    """Whether each layer has experts; layers for multi-token prediction come last."""

    embedding: bool
    head: bool

    predictions: int = 0
    """Number of layers for multi-token prediction."""


class Kept(NamedTuple):
    """Bytes kept for one microbatch: `stored` until its backward pass, `recomputed` only during it."""

    stored: int
    recomputed: int = 0


def chunk_activations(config: RunConfig, chunk: ChunkParts, tokens: Tokens, vocab_size: int) -> Kept:
    """Return the bytes that a model chunk keeps for one microbatch."""
    transformer = config.transformer
    layers = [layer(config, moe, tokens) for moe in chunk.moe]
    boundary = tokens.part * transformer.hidden_size * transformer.params_dtype.itemsize
    kept = _with_recomputation(transformer, layers, boundary)
    ends = chunk.predictions * _prediction(config, tokens, vocab_size)
    ends += _embedding(config, tokens) if chunk.embedding else 0
    ends += _head(transformer, tokens, vocab_size) if chunk.head else 0
    return Kept(kept.stored + ends, kept.recomputed)


def peak(passes: Iterable[Pass], chunks: Sequence[Kept]) -> tuple[int, int]:
    """Return the largest number of bytes kept at any time, and the number of microbatches kept then.

    `passes` are the pipeline stage's, in order; `chunks` has the bytes of each model chunk for one microbatch.
    """
    alive: Counter[int] = Counter()
    most = (0, 0)
    for one in passes:
        alive[one.chunk] += one.forward
        present = sum(chunks[chunk].stored * count for chunk, count in alive.items())
        if not one.forward:
            present += chunks[one.chunk].recomputed
        if present > most[0]:
            most = (present, alive.total())
        alive[one.chunk] -= not one.forward
    return most


def _with_recomputation(config: TransformerConfig, layers: Sequence[Kept], boundary: int) -> Kept:
    """Return the bytes of all layers of a chunk; `boundary` is the size of the tensor between two layers."""
    stored = [one.stored for one in layers]
    recomputed = [one.recomputed for one in layers]
    if config.recompute_granularity != "full":
        return Kept(sum(stored), max(recomputed, default=0))
    together = config.recompute_num_layers or 1
    if config.distribute_saved_activations:
        boundary //= config.tensor_model_parallel_size
    if config.recompute_method == "block":
        return Kept(boundary * len(layers[:together]) + sum(stored[together:]), max(stored[:together], default=0))
    groups = [stored[first : first + together] for first in range(0, len(stored), together)]
    return Kept(boundary * len(groups), max(map(sum, groups), default=0))


def layer(config: RunConfig, moe: bool, tokens: Tokens) -> Kept:
    """Return the bytes that one transformer layer keeps, ignoring `--recompute-granularity full`."""
    transformer = config.transformer
    hidden = tokens.part * transformer.hidden_size * transformer.params_dtype.itemsize
    dropped = tokens.part * transformer.hidden_size if transformer.hidden_dropout else 0
    heads, scores = _attention(config, tokens)
    # Each half of a layer keeps its norm's input and output, and the dropout mask (one byte per element)
    parts: list[tuple[tuple[str, ...], int]] = [((), 2 * ((_norm(transformer) - 1) * hidden + dropped) + heads)]
    parts += [(("layernorm",), 2 * hidden), (("core_attn",), scores)]
    if moe:
        inner, activated = _experts(config, tokens)
        parts += [(("moe",), inner + _router(transformer, tokens)), (("moe", "moe_act"), activated)]
        if shared := transformer.moe_shared_expert_intermediate_size:
            parts.append((("moe", "shared_experts"), sum(_dense(transformer, tokens, shared))))
    else:
        assert transformer.ffn_hidden_size is not None
        parts.append((("mlp",), sum(_dense(transformer, tokens, transformer.ffn_hidden_size))))
    selective = transformer.recompute_granularity == "selective"
    again = set(transformer.recompute_modules or ()) if selective else set()
    recomputed = sum(size for modules, size in parts if again & {*modules})
    return Kept(sum(size for _, size in parts) - recomputed, recomputed)


def _attention(config: RunConfig, tokens: Tokens) -> tuple[int, int]:
    """Return the bytes of queries, keys, values and their product, and of the scores (0 with fused attention)."""
    transformer = config.transformer
    itemsize = transformer.params_dtype.itemsize
    length = config.model.seq_length
    if isinstance(transformer, MLATransformerConfig):
        return _latent_attention(config, transformer, tokens)
    assert transformer.kv_channels is not None
    heads = transformer.num_attention_heads
    groups = transformer.num_query_groups or transformer.num_attention_heads
    width = transformer.kv_channels
    t = transformer.tensor_model_parallel_size
    query, key = (tokens.whole * count * width * itemsize // t for count in (heads, max(groups, t)))
    rotated = config.model.position_embedding_type in ("rope", "yarn")
    # The norm's input is a view of the projection's output. A rotation does not keep its input
    normed = (query + key) * (_norm(transformer) - (2 if rotated else 1)) if transformer.qk_layernorm else 0
    if config.model.qk_layernorm_across_heads:
        # Input of the scale; its output, unless the rotation keeps it; in half precision, the square's float32 input
        normed = (query + key) * (1 if rotated else 2)
        normed += (query + key) // itemsize * 4 if itemsize < 4 else 0
    if transformer.transformer_impl == "transformer_engine":
        # Values are a view of the projection's output; the softmax keeps one float32 per token and head
        statistics = tokens.whole * heads * 4 // t
        return query + 2 * key + (query + key if rotated else 0) + query + normed + statistics, 0
    # Groups are repeated for each head; without groups, values are a view of the projection's output
    inputs = 3 * query + (2 * query if rotated and groups == heads else 0)
    count = tokens.whole * length * heads // t
    short = itemsize < 4 and transformer.attention_softmax_in_fp32
    scores = count * (itemsize + (4 if short else 0) + (itemsize + 1 if transformer.attention_dropout else 0))
    return inputs + query + normed, scores + _hidden(config, tokens)


def _latent_attention(run: RunConfig, config: MLATransformerConfig, tokens: Tokens) -> tuple[int, int]:
    itemsize = config.params_dtype.itemsize
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    query = config.qk_head_dim + config.qk_pos_emb_head_dim
    # Compressed channels and their norm; position channels are rotated for all heads at once. If the channels of all
    # ranks are gathered, a rank's share of the tokens is a view of all tokens
    engine = config.transformer_impl == "transformer_engine"
    latent = config.kv_lora_rank + (config.q_lora_rank or 0)
    projected = (tokens.part if engine else tokens.whole) * (latent + config.qk_pos_emb_head_dim)
    normed = tokens.part * (_norm(config) - 1) * latent
    channels = projected + normed + tokens.whole * heads * (2 * query + 2 * config.v_head_dim)
    if engine:
        return channels * itemsize + tokens.whole * 4 * heads, 0
    scores = tokens.whole * run.model.seq_length * heads * itemsize
    scores += scores + scores // itemsize if config.attention_dropout else 0
    return channels * itemsize, scores + _hidden(run, tokens)


def _hidden(config: RunConfig, tokens: Tokens) -> int:
    """Return the bytes of the mask that keeps documents apart: one for each query and key."""
    return tokens.whole * config.model.seq_length if config.data.documents_apart else 0


def _dense(config: TransformerConfig, tokens: Tokens, inner: int) -> tuple[int, int]:
    """Return the bytes of a dense layer's first projection, and of the activation function's tensors."""
    elements = tokens.whole * inner // config.tensor_model_parallel_size * config.params_dtype.itemsize
    if not config.gated_linear_unit:
        return elements, elements
    return 2 * elements, elements if config.bias_activation_fusion else 3 * elements


def _experts(config: RunConfig, tokens: Tokens) -> tuple[int, int]:
    """Return the bytes of the experts' rows and first projection output, and of the weighted activations."""
    transformer = config.transformer
    itemsize = transformer.params_dtype.itemsize
    assert transformer.moe_ffn_hidden_size is not None and transformer.expert_tensor_parallel_size is not None
    elements = tokens.rows * transformer.moe_ffn_hidden_size // transformer.expert_tensor_parallel_size * itemsize
    rows = tokens.rows * transformer.hidden_size * itemsize
    if not transformer.gated_linear_unit:
        return rows + elements, 2 * elements
    unfused = 4 if transformer.glu_linear_offset else 3
    return rows + 2 * elements, elements if transformer.bias_activation_fusion else unfused * elements


def _router(config: TransformerConfig, tokens: Tokens) -> int:
    """Return the bytes of logits, weights, choices, their mask, and the indices that sort the rows."""
    itemsize = config.params_dtype.itemsize
    chosen = config.moe_router_topk
    assert config.num_moe_experts is not None
    return tokens.part * (config.num_moe_experts * (2 * itemsize + 4 + 1) + chosen * (8 + 8 + 8 + 4 + itemsize))


def _embedding(config: RunConfig, tokens: Tokens) -> int:
    dropped = tokens.part * config.transformer.hidden_size if config.transformer.hidden_dropout else 0
    ids = 2 if config.model.position_embedding_type == "learned_absolute" else 1
    return tokens.whole * 8 * ids + dropped


def _head(config: TransformerConfig, tokens: Tokens, vocab_size: int, norms: int = 1) -> int:
    """Return the bytes of the norms before the head and of the float32 softmax over the vocabulary."""
    normed = norms * tokens.part * config.hidden_size * config.params_dtype.itemsize * _norm(config)
    return normed + tokens.whole * (4 * vocab_size // config.tensor_model_parallel_size + 8 + 1)


def _prediction(config: RunConfig, tokens: Tokens, vocab_size: int) -> int:
    """Return the bytes of a layer for multi-token prediction beyond `layer`: its embedding and head."""
    transformer = config.transformer
    if transformer.recompute_granularity != "full":
        return _embedding(config, tokens) + _head(transformer, tokens, vocab_size, norms=3)
    # All three norms are recomputed; the embedding and the last norm's output remain
    remaining = 2 * tokens.part * transformer.hidden_size * transformer.params_dtype.itemsize
    return _embedding(config, tokens) + remaining + _head(transformer, tokens, vocab_size, norms=0)


def _norm(config: TransformerConfig) -> int:
    """Return the number of tensors that a norm and the projection after it keep."""
    # On a CPU, torch's RMSNorm also keeps the input of its scale and, in half precision, a float32 copy to square
    if config.transformer_impl != "local" or config.normalization != "RMSNorm":
        return 2
    return 3 if config.params_dtype.itemsize == 4 else 5
