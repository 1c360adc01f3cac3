"""One Mixture-of-Experts model of Hugging Face: its config.json as flags, and its tensors as pieces of a checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_balance.convert.architectures import (
    ANY,
    ARCHITECTURES,
    CHOSEN,
    COUNTS,
    GATED,
    PREDICTED,
    REFUSED,
    REQUIRED,
)
from megatron_balance.convert.config_fields import FIELDS, IRRELEVANT, Fields, read_rope
from megatron_balance.convert.pieces import (
    ALTERNATING,
    ALTERNATING_COLUMNS,
    HALVES,
    ROW,
    SAME,
    TRANSPOSED,
    Join,
    Piece,
    Size,
    query_key_value,
    rotary_pairs,
)
from megatron_balance.files.reading import shown

TABLE, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the two tables of embeddings; models with tied ones have the first only."""

ROUTER = "block_sparse_moe."
"""Prefix of the names of some routers, which transformers 5 calls `mlp.`."""

Index = tuple[int | slice, ...]

LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latent channels in DeepSeek's code and in transformers, whatever rms_norm_eps is."""


class Model:
    """One model, with its flags and its pieces, given the `content` of its config.json. Raises ValueError if the
    architecture is unknown, an entry is invalid, or the model needs an unsupported feature; the message names it."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        model_type = content.get("model_type")
        if isinstance(model_type, str) and model_type in REFUSED:
            raise ValueError(f"model_type {shown(model_type)}: not supported, because {REFUSED[model_type]}")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            raise ValueError(
                f"model_type {shown(model_type)}: not known; choose from {', '.join(sorted(ARCHITECTURES))}"
            )
        config = Fields(content, FIELDS)
        self.content = content
        self.config = config
        self.architecture = ARCHITECTURES[model_type]
        self.model_type = model_type
        for name, value in {**REQUIRED, **self.architecture.required}.items():
            if value is not ANY:
                self._require(config, name, value)
        for name, kinds in {"layer_types": self.architecture.layer_types, "attn_type_list": (1,)}.items():
            if any(kind not in kinds for kind in config.get(name) or ()):
                raise ValueError(f"{name}: only {' or '.join(map(repr, kinds))} is supported for {model_type}")
        self.rope = read_rope(config)
        self.rope_type = self._rope_type()
        self._read()
        config.check_all_read(model_type, {"model_type", *IRRELEVANT, *self.architecture.irrelevant})
        self.rope.check_all_read(model_type)

    def _require(self, fields: Fields, name: str, value: Any) -> None:
        if fields.get(name) not in (None, value):
            raise ValueError(
                f"{fields.where}{name} {shown(fields[name])}: only {value!r} is supported for {self.model_type}"
            )

    def _rope_type(self) -> str:
        """Return the type of rotary embeddings after checking their settings."""
        rope = self.rope
        latent = self.architecture.latent
        supported = ["default"] if self.architecture.rotary_part else ["default", "yarn"]
        kind = rope.first_of("rope_type", "type", default="default")
        if kind not in supported:
            raise ValueError(
                f"{rope.where}rope_type {shown(kind)}: only {' or '.join(map(repr, supported))} is supported for "
                f"{self.model_type}"
            )
        self._require(rope, "attention_factor", None)
        if latent:
            self._require(rope, "truncate", True)
        if kind == "yarn":
            one = rope.get("mscale")
            both = rope.get("mscale_all_dim")
            if not (one and both) and (both or one not in (None, 1)):
                raise ValueError(
                    f"{rope.where}mscale {one}, mscale_all_dim {both}: programs differ in what one of them means "
                    "without the other; give both"
                )
        return kind

    def _read(self) -> None:
        config = self.config
        arch = self.architecture
        self.layers, self.hidden, self.vocabulary = (
            config[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size")
        )
        self.heads = config["num_attention_heads"]
        self.groups = config.get("num_key_value_heads") or self.heads
        if self.heads % self.groups:
            raise ValueError(f"num_key_value_heads {self.groups}: does not divide num_attention_heads {self.heads}")
        if arch.latent and self.groups != self.heads:
            raise ValueError(f"num_key_value_heads {self.groups}: must be num_attention_heads {self.heads}")
        self.rope_pairs = config.get("rope_interleave", True)
        """Whether rotary channels 2i and 2i + 1 of latent attention form a pair, instead of i and i + n/2."""
        self.channels = config["v_head_dim"] if arch.latent else config.get("head_dim") or self.hidden // self.heads
        self.rotary_part = self._rotary_part()
        self.experts = config.first_of(*COUNTS)
        self.width = config[arch.expert_width]
        self.dense = arch.dense_layers(config)
        self.dense_width = config["intermediate_size"]
        self.shared_width = arch.shared_width(config)
        self.tied = bool(config.get("tie_word_embeddings", False))
        self.normalized = arch.normalized(config)
        self.chosen = config.first_of(*CHOSEN)
        if self.normalized and self.chosen == 1:
            raise ValueError(
                f"num_experts_per_tok 1: the only expert of a token would have the weight one ({self.model_type} "
                "normalizes the weights), so its router could not learn; this is not supported"
            )
        further = range(self.layers, self.layers + config.first_of(*PREDICTED, default=0))
        self.prediction_layers = (*(f"model.layers.{layer}." for layer in further), *arch.prediction)
        """Prefixes of the tensors of multi-token prediction, which no piece contains."""
        # Raises if an entry that a flag needs is missing
        self.flags()

    def _rotary_part(self) -> float:
        """Return the fraction of a head's channels that are rotated."""
        default = self.architecture.rotary_part
        rotated = self.config.get("rotary_dim")
        parts = {
            "partial_rotary_factor": self.config.get("partial_rotary_factor"),
            f"{self.rope.where}partial_rotary_factor": self.rope.get("partial_rotary_factor"),
            "rotary_dim": None if rotated is None else rotated / self.channels,
        }
        given = {name: part for name, part in parts.items() if part is not None}
        name, part = next(iter(given.items()), ("partial_rotary_factor", default or 1))
        for other in given:
            if given[other] != part:
                raise ValueError(
                    f"{other}: rotates {given[other]} of a head's channels, {name} {part}; keep one of them"
                )
        if default is None and part != 1:
            raise ValueError(f"{name} {part}: only 1 is supported for {self.model_type}")
        if not 0 < part <= 1 or int(self.channels * part) % 2:
            raise ValueError(f"{name} {part}: must leave an even number of a head's {self.channels} channels to rotate")
        return part

    def notices(self, capacity: float | None = None) -> Iterator[str]:
        """Generate what differs from the model of transformers although config.json can be translated. `capacity`:
        `--moe-expert-capacity-factor` of the run that trained the model."""
        if capacity is not None:
            yield f"--moe-expert-capacity-factor {capacity}: the exported model has no capacity and drops no token"
        epsilon = self.config["rms_norm_eps"]
        if self.architecture.latent and epsilon != LATENT_EPSILON:
            yield (
                f"rms_norm_eps {epsilon}: applies to the norms of latent channels, too; transformers uses "
                f"{LATENT_EPSILON} there in every {self.model_type}"
            )

    def flags(self) -> list[str]:
        """Return the command line of the model."""
        config = self.config
        arch = self.architecture
        experts_in = str([int(layer not in self.dense) for layer in range(self.layers)]).replace(" ", "")
        values: dict[str, Any] = {
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "ffn-hidden-size": self.dense_width,
            "num-attention-heads": self.heads,
            "kv-channels": self.channels,
            "num-query-groups": None if arch.latent else self.groups,
            "max-position-embeddings": config["max_position_embeddings"],
            "seq-length": min(4096, config["max_position_embeddings"]),
            "position-embedding-type": "rope" if arch.latent or self.rope_type == "default" else "yarn",
            "rotary-base": self.rope["rope_theta"],
            "rotary-percent": None if self.rotary_part == 1 else self.rotary_part,
            "normalization": "RMSNorm",
            "norm-epsilon": config["rms_norm_eps"],
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "vocab-size": self.vocabulary,
            "num-experts": self.experts,
            "moe-router-topk": self.chosen,
            "moe-ffn-hidden-size": self.width,
            "moe-aux-loss-coeff": config.get("router_aux_loss_coef", 0.0),
            "moe-layer-freq": experts_in if self.dense else None,
            "moe-shared-expert-intermediate-size": self.shared_width,
            **(self._latent_flags() if arch.latent else self._rope_flags()),
            "swiglu": True,
            "disable-bias-linear": not arch.biases,
            "multi-latent-attention": arch.latent,
            "group-query-attention": not arch.latent,
            "untie-embeddings-and-output-weights": not self.tied,
            "add-qkv-bias": arch.qkv_bias(config) and not arch.biases,
            arch.qk_norm(config): bool(arch.qk_norm(config)),
            "moe-shared-expert-gate": arch.shared_gate and self.shared_width is not None,
            "moe-router-pre-softmax": not self.normalized,
            "moe-router-enable-expert-bias": arch.expert_bias is not None,
            **arch.flags(config),
        }
        given = ((name, value) for name, value in values.items() if value is not None and value is not False)
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given]

    def _rope_flags(self) -> dict[str, Any]:
        """Return the flags of YaRN without latent attention."""
        if self.rope_type == "default":
            return {}
        flags = {f"yarn-{name}": value for name, value in self._yarn_flags().items()}
        return flags | {"no-yarn-correction-range-round-to-int": not self.rope.get("truncate", True)}

    def _yarn_flags(self) -> dict[str, Any]:
        rope = self.rope
        return {
            "rotary-scaling-factor": rope["factor"],
            "original-max-position-embeddings": rope["original_max_position_embeddings"],
            "beta-fast": rope.get("beta_fast") or 32,
            "beta-slow": rope.get("beta_slow") or 1,
            "mscale": rope.get("mscale") or 1.0,
            "mscale-all-dim": rope.get("mscale_all_dim") or 0.0,
        }

    def _latent_flags(self) -> dict[str, Any]:
        config = self.config
        flags = {
            "q-lora-rank": config.get("q_lora_rank"),
            "kv-lora-rank": config["kv_lora_rank"],
            "qk-head-dim": config["qk_nope_head_dim"],
            "qk-pos-emb-head-dim": config["qk_rope_head_dim"],
            "v-head-dim": config["v_head_dim"],
            "rope-type": "rope",
        }
        if self.rope_type == "default":
            return flags
        return flags | {"rope-type": "yarn", **self._yarn_flags()}

    def pieces(self) -> list[list[Piece]]:
        """Return all weights in groups: before the first layer, of each layer, and after the last layer."""
        return [list(pieces) for pieces in self.files()]

    def files(self, experts: int | None = None) -> Iterator[Iterable[Piece]]:
        """Generate what `pieces` returns, because a config.json may describe more pieces than memory can hold; with at
        most `experts` experts of each layer."""
        table = (self.vocabulary, self.hidden)
        norm = Piece("decoder.final_layernorm.weight", (self.hidden,), (), ("model.norm.weight",))
        yield [Piece("embedding.word_embeddings.weight", table, (), (TABLE,))]
        for layer in range(self.layers):
            yield self._layer(layer, min(self.experts, experts or self.experts))
        yield [norm] if self.tied else [norm, Piece("output_layer.weight", table, (), (OUTPUT,))]

    def divisions(self, shapes: Mapping[str, Size]) -> Iterator[tuple[str, dict[str, Index]]]:
        """Generate the tensors with all experts of a layer, as transformers 5 keeps them, and their parts by name.
        `shapes`: those of all tensors that are there, by name. Raise ValueError if such a tensor has another shape."""
        arch = self.architecture
        if arch.expert is None:
            return
        gate, up, down = arch.expert
        halves: dict[str, slice] = {gate: slice(0, self.width), up: slice(self.width, 2 * self.width)}
        fused = {
            "gate_up_proj": ((self.experts, 2 * self.width, self.hidden), halves),
            "down_proj": ((self.experts, self.hidden, self.width), {down: slice(0, self.hidden)}),
        }
        for layer in range(self.layers):
            start = f"model.layers.{layer}."
            for last, (size, parts) in fused.items():
                name = f"{start}mlp.experts.{last}"
                if name not in shapes:
                    continue
                if shapes[name] != size:
                    raise ValueError(f"{name}: is {shapes[name]} instead of {size}")
                yield (
                    name,
                    {
                        f"{start}{arch.experts}.{expert}.{part}.weight": (expert, rows)
                        for expert in range(self.experts)
                        for part, rows in parts.items()
                    },
                )
            for own in (f"{arch.router}.weight", arch.expert_bias):
                name = f"{start}{(own or '').replace(ROUTER, 'mlp.')}"
                if own and name != f"{start}{own}" and name in shapes:
                    yield name, {f"{start}{own}": (slice(None),)}

    def _layer(self, layer: int, experts: int) -> Iterator[Piece]:
        arch = self.architecture
        hidden = self.hidden

        def piece(name: str, size: Size, join: Join, *sources: str) -> Piece:
            names = tuple(f"model.layers.{layer}.{source}" for source in sources)
            if self.dense:
                # Models with different layers have separate tensors for each layer
                return Piece(f"decoder.layers.{layer}.{name}", size, (), names, join=join)
            return Piece(f"decoder.layers.{name}", (self.layers, *size), (layer,), names, join=join)

        yield from self._latent_attention(piece) if arch.latent else self._attention(piece)
        norm = "mlp.linear_fc1.layer_norm_weight" if layer in self.dense else "pre_mlp_layernorm.weight"
        yield piece(norm, (hidden,), SAME, "post_attention_layernorm.weight")
        if layer in self.dense:
            yield from self._gated(piece, "mlp", "mlp", width=self.dense_width, names=GATED)
            return
        yield piece("mlp.router.weight", (self.experts, hidden), SAME, f"{arch.router}.weight")
        if arch.biases:
            yield piece("mlp.router.bias", (self.experts,), SAME, f"{arch.router}.bias")
        if arch.expert_bias is not None:
            yield piece(
                "mlp.router.expert_bias", (self.experts,), ROW if arch.expert_bias_row else SAME, arch.expert_bias
            )
        if arch.shared_expert is not None and self.shared_width is not None:
            width = self.shared_width
            yield from self._gated(piece, "mlp.shared_experts", arch.shared_expert, width=width, names=GATED)
        if arch.shared_gate:
            yield piece("mlp.shared_experts.gate_weight", (1, hidden), SAME, f"{arch.shared_expert}_gate.weight")
        if arch.expert is None:
            yield from self._experts_together(piece)
            return
        for expert in range(experts):
            source = f"{arch.experts}.{expert}"
            for one in self._gated(piece, "mlp.experts.experts", source, width=self.width, names=arch.expert):
                shape = (*one.shape[: len(one.at)], self.experts, *one.size)
                yield replace(one, shape=shape, at=(*one.at, expert))

    def _attention(self, piece: Callable[..., Piece]) -> Iterator[Piece]:
        arch = self.architecture
        hidden = self.hidden
        attention = "self_attention"
        qkv = [f"self_attn.{name}_proj" for name in "qkv"]
        rows = (self.heads + 2 * self.groups) * self.channels
        joined = query_key_value(self.heads, self.groups, self.channels)
        yield piece(f"{attention}.linear_qkv.layer_norm_weight", (hidden,), SAME, "input_layernorm.weight")
        yield piece(f"{attention}.linear_qkv.weight", (rows, hidden), joined, *(f"{name}.weight" for name in qkv))
        if arch.qkv_bias(self.config):
            yield piece(f"{attention}.linear_qkv.bias", (rows,), joined, *(f"{name}.bias" for name in qkv))
        if norm := arch.qk_norm(self.config):
            together = norm == "qk-layernorm-across-heads"
            for name, heads in (("q", self.heads), ("k", self.groups)):
                width = heads * self.channels if together else self.channels
                yield piece(f"{attention}.{name}_layernorm.weight", (width,), SAME, f"self_attn.{name}_norm.weight")
        inner = self.heads * self.channels
        yield piece(f"{attention}.linear_proj.weight", (hidden, inner), SAME, "self_attn.o_proj.weight")
        if arch.biases:
            yield piece(f"{attention}.linear_proj.bias", (hidden,), SAME, "self_attn.o_proj.bias")
        if arch.sinks is not None:
            yield piece(f"{attention}.core_attention.softmax_offset", (self.heads,), SAME, arch.sinks)

    def _latent_attention(self, piece: Callable[..., Piece]) -> Iterator[Piece]:
        config = self.config
        hidden = self.hidden
        position = config["qk_rope_head_dim"]
        latent = config["kv_lora_rank"]
        query = self.heads * (config["qk_nope_head_dim"] + position)
        key_value = self.heads * (config["qk_nope_head_dim"] + config["v_head_dim"])
        rank = config.get("q_lora_rank")
        of_queries = SAME
        of_keys = SAME
        if not self.rope_pairs:
            of_queries = rotary_pairs(self.heads, config["qk_nope_head_dim"], position)
            of_keys = rotary_pairs(1, latent, position)

        def one(name: str, size: Size, source: str, join: Join = SAME) -> Piece:
            return piece(f"self_attention.{name}", size, join, f"self_attn.{source}.weight")

        yield piece("input_layernorm.weight", (hidden,), SAME, "input_layernorm.weight")
        if rank:
            yield one("linear_q_down_proj.weight", (rank, hidden), "q_a_proj")
            yield one("linear_q_up_proj.layer_norm_weight", (rank,), "q_a_layernorm")
            yield one("linear_q_up_proj.weight", (query, rank), "q_b_proj", of_queries)
        else:
            yield one("linear_q_proj.weight", (query, hidden), "q_proj", of_queries)
        yield one("linear_kv_down_proj.weight", (latent + position, hidden), "kv_a_proj_with_mqa", of_keys)
        yield one("linear_kv_up_proj.layer_norm_weight", (latent,), "kv_a_layernorm")
        yield one("linear_kv_up_proj.weight", (key_value, latent), "kv_b_proj")
        yield one("linear_proj.weight", (hidden, self.heads * config["v_head_dim"]), "o_proj")

    def _experts_together(self, piece: Callable[..., Piece]) -> Iterator[Piece]:
        """Generate the pieces of experts that share tensors and have biases; see `Architecture.expert`."""
        source = self.architecture.experts
        first = (self.experts, 2 * self.width, self.hidden)
        second = (self.experts, self.hidden, self.width)
        key = "mlp.experts.experts.linear_fc"
        yield piece(f"{key}1.weight", first, ALTERNATING_COLUMNS, f"{source}.gate_up_proj")
        yield piece(f"{key}1.bias", first[:2], ALTERNATING, f"{source}.gate_up_proj_bias")
        yield piece(f"{key}2.weight", second, TRANSPOSED, f"{source}.down_proj")
        yield piece(f"{key}2.bias", second[:2], SAME, f"{source}.down_proj_bias")

    def _gated(
        self, piece: Callable[..., Piece], key: str, source: str, *, width: int, names: tuple[str, str, str]
    ) -> Iterator[Piece]:
        gate, up, down = (f"{source}.{name}.weight" for name in names)
        yield piece(f"{key}.linear_fc1.weight", (2 * width, self.hidden), HALVES, gate, up)
        yield piece(f"{key}.linear_fc2.weight", (self.hidden, width), SAME, down)
