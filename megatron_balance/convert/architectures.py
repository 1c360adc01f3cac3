"""Translate Mixture-of-Experts models of Hugging Face: config.json into flags, and their tensors into ours.

An `Architecture` is data: how its config.json translates into flags, and the names of its tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_balance.convert.config_fields import ROPE, Fields, read_config
from megatron_balance.convert.pieces import Join, Piece, QueryKeyValue, Rows, Same, Size
from megatron_balance.files.reading import shown
from megatron_balance.messages import cleaned

Config = Fields
"""A model's config.json."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The common properties of all models of one `model_type`."""

    expert: tuple[str, str, str]
    """Names of an expert's gate, up and down projections."""
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    num_experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    """Alternative keys of the number of experts in config.json."""
    expert_width: str = "moe_intermediate_size"
    """Key of an expert's width in config.json."""
    shared_expert: str | None = None
    shared_width: Callable[[Config], int | None] = lambda config: None
    shared_gate: bool = False
    expert_bias: str | None = None
    latent: bool = False
    """Whether the model has multi-latent attention."""
    qk_norm: Literal["", "qk-layernorm", "qk-layernorm-across-heads"] = ""
    """Flag that selects the norm of queries and keys; empty without a norm."""
    qkv_bias: Callable[[Config], bool] = lambda config: bool(config.get("attention_bias"))
    normalized: Callable[[Config], bool] = lambda config: bool(config["norm_topk_prob"])
    """Whether the weights of a token's experts sum to one."""
    dense_layers: Callable[[Config], set[int]] = lambda config: set()
    routing: Callable[[Config], Mapping[str, Any]] = lambda config: {}
    """Flags of the router in addition to those of all models."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json with the only supported value; they may be absent."""


def _sparse_steps(config: Config) -> set[int]:
    """Return Qwen's dense layers."""
    step, dense = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    return dense | {layer for layer in range(config["num_hidden_layers"]) if (layer + 1) % step}


def _first_layers(config: Config) -> set[int]:
    """Return DeepSeek's dense layers."""
    return set(range(config["first_k_dense_replace"]))


def _softmax_routing(config: Config) -> dict[str, Any]:
    """Return the flags of DeepSeek-V2's router (its section 2.2)."""
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method {shown(method)}: choose 'greedy' or 'group_limited_greedy'")
    return {
        "moe-router-topk-scaling-factor": config["routed_scaling_factor"],
        **(_groups(config, best=1) if method == "group_limited_greedy" else {}),
    }


def _sigmoid_routing(config: Config) -> dict[str, Any]:
    """Return the flags of DeepSeek-V3's router (its section 2.1.2)."""
    return {
        "moe-router-score-function": "sigmoid",
        "moe-router-topk-scaling-factor": config["routed_scaling_factor"],
        **_groups(config, best=2),
    }


def _groups(config: Config, best: int) -> dict[str, int]:
    """Return the flags of group-limited routing; a group's score is the sum of its `best` highest experts' scores."""
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    experts, topk = _first_of(config, ROUTED), config["num_experts_per_tok"]
    if groups == 1:
        return {}
    if experts % groups or not best <= experts // groups:
        raise ValueError(f"n_group {groups}: must divide n_routed_experts {experts} into groups of {best} or more")
    if chosen > groups or chosen * (experts // groups) < topk:
        raise ValueError(
            f"topk_group {chosen}: must be at most n_group {groups}, and the groups must have num_experts_per_tok "
            f"{topk} experts or more"
        )
    flags = {"moe-router-num-groups": groups, "moe-router-group-topk": chosen}
    # megatron-core's own score
    return flags if topk // chosen == best else flags | {"moe-router-group-score-topk": best}


def _first_of(config: Config, names: tuple[str, ...]) -> Any:
    """Return the entry with the first of these names that is present."""
    return config[next((name for name in names if name in config), names[0])]


def _deepseek(**more: Any) -> Architecture:
    return Architecture(
        expert=GATED,
        num_experts=ROUTED,
        shared_expert="mlp.shared_experts",
        shared_width=lambda config: (config["n_shared_experts"] or 0) * config["moe_intermediate_size"] or None,
        qk_norm="qk-layernorm",
        latent=True,
        dense_layers=_first_layers,
        **more,
    )


GATED = ("gate_proj", "up_proj", "down_proj")
ROUTED = ("n_routed_experts", "num_local_experts")

ARCHITECTURES = {
    "deepseek_v2": _deepseek(
        normalized=lambda config: False,
        routing=_softmax_routing,
        required={"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1},
    ),
    "deepseek_v3": _deepseek(
        expert_bias="mlp.gate.e_score_correction_bias",
        normalized=lambda config: True,
        routing=_sigmoid_routing,
        required={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "moe_layer_freq": 1},
    ),
    "mixtral": Architecture(
        expert=("w1", "w3", "w2"),
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        expert_width="intermediate_size",
        normalized=lambda config: True,
        required={"sliding_window": None},
    ),
    "olmoe": Architecture(
        expert=GATED,
        expert_width="intermediate_size",
        qk_norm="qk-layernorm-across-heads",
        required={"clip_qkv": None},
    ),
    "qwen2_moe": Architecture(
        expert=GATED,
        shared_expert="mlp.shared_expert",
        shared_width=lambda config: config["shared_expert_intermediate_size"],
        shared_gate=True,
        qkv_bias=lambda config: config.get("qkv_bias", True),
        dense_layers=_sparse_steps,
        required={"use_sliding_window": False},
    ),
    "qwen3_moe": Architecture(
        expert=GATED, qk_norm="qk-layernorm", dense_layers=_sparse_steps, required={"use_sliding_window": False}
    ),
}
"""Supported architectures by `model_type`."""

REQUIRED = {"hidden_act": "silu", "attention_bias": False}


class Model:
    """One model, with its flags and its pieces."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        """
        Args:
            content: the model's config.json.

        Raises:
            ValueError: the architecture is unknown, an entry is invalid, or the model needs an unsupported feature;
                the message names it.
        """
        model_type = content.get("model_type")
        if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
            raise ValueError(
                f"model_type {shown(model_type)}: not known; choose from {', '.join(sorted(ARCHITECTURES))}"
            )
        config = read_config(content)
        self.config, self.architecture = config, ARCHITECTURES[model_type]
        for name, value in {**REQUIRED, **self.architecture.required}.items():
            if config.get(name, value) != value:
                raise ValueError(f"{name} {shown(config[name])}: only {value!r} is supported for {model_type}")
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        self.rope_type = rope.get("rope_type", rope.get("type", "default"))
        if self.rope_type not in ("default", "yarn" if self.architecture.latent else "default"):
            raise ValueError(
                f"rope scaling {cleaned(dict(rope))}: only unscaled rotary embeddings are supported for {model_type}"
            )
        self.rope = Fields(rope, ROPE, "rope scaling: ")
        self._read()

    def _read(self) -> None:
        config, arch = self.config, self.architecture
        self.layers, self.hidden, self.vocabulary = (
            config[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size")
        )
        self.heads = config["num_attention_heads"]
        self.groups = config.get("num_key_value_heads") or self.heads
        self.channels = config["v_head_dim"] if arch.latent else config.get("head_dim") or self.hidden // self.heads
        self.experts = _first_of(config, arch.num_experts)
        self.width = config[arch.expert_width]
        self.dense = arch.dense_layers(config)
        self.dense_width = config["intermediate_size"]
        self.shared_width = arch.shared_width(config)
        self.tied = bool(config.get("tie_word_embeddings", False))
        self.rotary_base = self.rope.get("rope_theta") or config["rope_theta"]
        self.normalized = arch.normalized(config)
        further = range(self.layers, self.layers + (config.get("num_nextn_predict_layers") or 0))
        self.prediction_layers = tuple(f"model.layers.{layer}." for layer in further)
        """Prefixes of the tensors of multi-token prediction, which no piece contains."""
        # Raises if an entry that a flag needs is missing
        self.flags()

    def flags(self) -> list[str]:
        """Return the command line of the model."""
        config, arch = self.config, self.architecture
        values: dict[str, Any] = {
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "ffn-hidden-size": self.dense_width,
            "num-attention-heads": self.heads,
            "kv-channels": self.channels,
            "num-query-groups": None if arch.latent else self.groups,
            "max-position-embeddings": config["max_position_embeddings"],
            "seq-length": min(4096, config["max_position_embeddings"]),
            "position-embedding-type": "rope",
            "rotary-base": self.rotary_base,
            "normalization": "RMSNorm",
            "norm-epsilon": config["rms_norm_eps"],
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "vocab-size": self.vocabulary,
            "num-experts": self.experts,
            "moe-router-topk": config["num_experts_per_tok"],
            "moe-ffn-hidden-size": self.width,
            "moe-aux-loss-coeff": config.get("router_aux_loss_coef", 0.0),
            "moe-layer-freq": str([int(layer not in self.dense) for layer in range(self.layers)]).replace(" ", ""),
            "moe-shared-expert-intermediate-size": self.shared_width,
            **arch.routing(config),
            **(self._latent_flags() if arch.latent else {}),
        }
        if not self.dense:
            del values["moe-layer-freq"]
        switches = {
            "swiglu": True,
            "disable-bias-linear": True,
            "multi-latent-attention": arch.latent,
            "group-query-attention": not arch.latent,
            "untie-embeddings-and-output-weights": not self.tied,
            "add-qkv-bias": arch.qkv_bias(config),
            arch.qk_norm: bool(arch.qk_norm),
            "moe-shared-expert-gate": arch.shared_gate and self.shared_width is not None,
            "moe-router-pre-softmax": not self.normalized,
            "moe-router-enable-expert-bias": arch.expert_bias is not None,
        }
        given = [f"--{name}={value}" for name, value in values.items() if value is not None]
        return given + [f"--{name}" for name, on in switches.items() if on]

    def _latent_flags(self) -> dict[str, Any]:
        config, rope = self.config, self.rope
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
        return flags | {
            "rope-type": "yarn",
            "rotary-scaling-factor": rope["factor"],
            "original-max-position-embeddings": rope["original_max_position_embeddings"],
            "beta-fast": rope.get("beta_fast", 32),
            "beta-slow": rope.get("beta_slow", 1),
            "mscale": rope.get("mscale", 1.0),
            "mscale-all-dim": rope.get("mscale_all_dim", 0.0),
        }

    def pieces(self) -> list[list[Piece]]:
        """Return all weights in groups: those before the first layer, of each layer, and after the last layer."""
        return [list(pieces) for pieces in self.files()]

    def files(self, experts: int | None = None) -> Iterator[Iterable[Piece]]:
        """Generate what `pieces` returns, because a config.json may describe more pieces than memory can hold.

        Args:
            experts: largest number of experts per layer to include; default: all.
        """
        table = (self.vocabulary, self.hidden)
        before = Piece("embedding.word_embeddings.weight", table, (), ("model.embed_tokens.weight",))
        after = [Piece("decoder.final_layernorm.weight", (self.hidden,), (), ("model.norm.weight",))]
        if not self.tied:
            after.append(Piece("output_layer.weight", table, (), ("lm_head.weight",)))
        yield [before]
        for layer in range(self.layers):
            yield self._layer(layer, min(self.experts, experts or self.experts))
        yield after

    def _layer(self, layer: int, experts: int) -> Iterator[Piece]:
        arch, hidden = self.architecture, self.hidden

        def piece(name: str, size: Size, join: Join, *sources: str) -> Piece:
            names = tuple(f"model.layers.{layer}.{source}" for source in sources)
            if self.dense:
                # Models with different layers have separate tensors for each layer
                return Piece(f"decoder.layers.{layer}.{name}", size, (), names, join=join)
            return Piece(f"decoder.layers.{name}", (self.layers, *size), (layer,), names, join=join)

        yield from self._latent_attention(piece) if arch.latent else self._attention(piece)
        norm = "mlp.linear_fc1.layer_norm_weight" if layer in self.dense else "pre_mlp_layernorm.weight"
        yield piece(norm, (hidden,), Same(), "post_attention_layernorm.weight")
        if layer in self.dense:
            yield from self._gated(piece, "mlp", "mlp", width=self.dense_width, names=GATED)
            return
        yield piece("mlp.router.weight", (self.experts, hidden), Same(), f"{arch.router}.weight")
        if arch.expert_bias is not None:
            yield piece("mlp.router.expert_bias", (self.experts,), Same(), arch.expert_bias)
        if arch.shared_expert is not None and self.shared_width is not None:
            width = self.shared_width
            yield from self._gated(piece, "mlp.shared_experts", arch.shared_expert, width=width, names=GATED)
        if arch.shared_gate:
            yield piece("mlp.shared_experts.gate_weight", (1, hidden), Same(), f"{arch.shared_expert}_gate.weight")
        for expert in range(experts):
            source = f"{arch.experts}.{expert}"
            for one in self._gated(piece, "mlp.experts.experts", source, width=self.width, names=arch.expert):
                at, size = (*one.at, expert), one.size
                yield Piece(one.key, (*one.shape[: len(one.at)], self.experts, *size), at, one.sources, join=one.join)

    def _attention(self, piece: Callable[..., Piece]) -> Iterator[Piece]:
        arch, hidden = self.architecture, self.hidden
        attention, qkv = "self_attention", [f"self_attn.{name}_proj" for name in "qkv"]
        rows = (self.heads + 2 * self.groups) * self.channels
        joined = QueryKeyValue(self.heads, self.groups, self.channels)
        yield piece(f"{attention}.linear_qkv.layer_norm_weight", (hidden,), Same(), "input_layernorm.weight")
        yield piece(f"{attention}.linear_qkv.weight", (rows, hidden), joined, *(f"{name}.weight" for name in qkv))
        if arch.qkv_bias(self.config):
            yield piece(f"{attention}.linear_qkv.bias", (rows,), joined, *(f"{name}.bias" for name in qkv))
        if arch.qk_norm:
            together = arch.qk_norm == "qk-layernorm-across-heads"
            for name, heads in (("q", self.heads), ("k", self.groups)):
                width = heads * self.channels if together else self.channels
                yield piece(f"{attention}.{name}_layernorm.weight", (width,), Same(), f"self_attn.{name}_norm.weight")
        inner = self.heads * self.channels
        yield piece(f"{attention}.linear_proj.weight", (hidden, inner), Same(), "self_attn.o_proj.weight")

    def _latent_attention(self, piece: Callable[..., Piece]) -> Iterator[Piece]:
        config, hidden = self.config, self.hidden
        position, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
        query = self.heads * (config["qk_nope_head_dim"] + position)
        key_value = self.heads * (config["qk_nope_head_dim"] + config["v_head_dim"])
        rank = config.get("q_lora_rank")

        def one(name: str, size: Size, source: str) -> Piece:
            return piece(f"self_attention.{name}", size, Same(), f"self_attn.{source}.weight")

        yield piece("input_layernorm.weight", (hidden,), Same(), "input_layernorm.weight")
        if rank:
            yield one("linear_q_down_proj.weight", (rank, hidden), "q_a_proj")
            yield one("linear_q_up_proj.layer_norm_weight", (rank,), "q_a_layernorm")
            yield one("linear_q_up_proj.weight", (query, rank), "q_b_proj")
        else:
            yield one("linear_q_proj.weight", (query, hidden), "q_proj")
        yield one("linear_kv_down_proj.weight", (latent + position, hidden), "kv_a_proj_with_mqa")
        yield one("linear_kv_up_proj.layer_norm_weight", (latent,), "kv_a_layernorm")
        yield one("linear_kv_up_proj.weight", (key_value, latent), "kv_b_proj")
        yield one("linear_proj.weight", (hidden, self.heads * config["v_head_dim"]), "o_proj")

    def _gated(
        self, piece: Callable[..., Piece], key: str, source: str, *, width: int, names: tuple[str, str, str]
    ) -> Iterator[Piece]:
        gate, up, down = (f"{source}.{name}.weight" for name in names)
        yield piece(f"{key}.linear_fc1.weight", (2 * width, self.hidden), Rows(2), gate, up)
        yield piece(f"{key}.linear_fc2.weight", (self.hidden, width), Same(), down)
