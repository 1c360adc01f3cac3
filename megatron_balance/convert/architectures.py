"""Translate Mixture-of-Experts models of Hugging Face: config.json into flags, and their tensors into ours.

An `Architecture` is data: how its config.json translates into flags, and the names of its tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_balance.convert.config_fields import BETAS, Fields
from megatron_balance.files.reading import number_in, shown


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The common properties of all models of one `model_type`."""

    expert: tuple[str, str, str] | None
    """Names of an expert's gate, up and down projections. None: one tensor has each projection of all experts, and gate
    and up projections alternate in it (gpt-oss)."""
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert_width: str = "moe_intermediate_size"
    """Key of an expert's width in config.json."""
    shared_expert: str | None = None
    shared_width: Callable[[Fields], int | None] = lambda config: None
    shared_gate: bool = False
    expert_bias: str | None = None
    """Name of the numbers that are added to scores in order to choose experts."""
    expert_bias_row: bool = False
    """Whether the expert biases are the only row of a matrix."""
    latent: bool = False
    """Whether the model has multi-latent attention."""
    qk_norm: Callable[[Fields], Literal["", "qk-layernorm", "qk-layernorm-across-heads"]] = lambda config: ""
    """Flag that selects the norm of queries and keys; empty without a norm."""
    qkv_bias: Callable[[Fields], bool] = lambda config: False
    biases: bool = False
    """Whether all other projections, of experts too, and the router have biases."""
    sinks: str | None = None
    """Name of the learned numbers, one for each head, in the denominators of attention."""
    rotary_part: float | None = None
    """Fraction of a head's channels that are rotated, unless config.json sets another; None: always all of them."""
    rotary_interleaved: bool = False
    """Whether channels 2i and 2i + 1 of a head rotate together, instead of i and i + n/2."""
    normalized: Callable[[Fields], bool] = lambda config: bool(config["norm_topk_prob"])
    """Whether the weights of a token's experts sum to one."""
    dense_layers: Callable[[Fields], set[int]] = lambda config: set()
    layer_types: tuple[str, ...] = ("full_attention",)
    """Supported entries of `layer_types` in config.json."""
    prediction: tuple[str, ...] = ()
    """Prefixes of tensors of multi-token prediction, besides those of layers after the last one."""
    flags: Callable[[Fields], Mapping[str, Any]] = lambda config: {}
    """Flags in addition to those of all models, or with other values; True or False for a switch."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json with the only supported value; they may be absent. `ANY`: all values are supported."""
    irrelevant: frozenset[str] = frozenset()
    """Keys of config.json that do not change the logits of this kind of model, in addition to those of any model."""


def _softmax_routing(config: Fields) -> dict[str, Any]:
    """Return the flags of DeepSeek-V2's router (its section 2.2)."""
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method {shown(method)}: choose 'greedy' or 'group_limited_greedy'")
    return {
        "moe-router-topk-scaling-factor": config["routed_scaling_factor"],
        **(_groups(config, best=1) if method == "group_limited_greedy" else {}),
    }


def _sigmoid_routing(config: Fields) -> dict[str, Any]:
    """Return the flags of DeepSeek-V3's router (its section 2.1.2)."""
    return {
        "moe-router-score-function": "sigmoid",
        "moe-router-topk-scaling-factor": config["routed_scaling_factor"],
        **_groups(config, best=2),
    }


def _shared_experts(config: Fields) -> int | None:
    """Return the width of all shared experts together; None without any."""
    return (config["n_shared_experts"] or 0) * config["moe_intermediate_size"] or None


def _groups(config: Fields, best: int) -> dict[str, int]:
    """Return the flags of group-limited routing; a group's score is the sum of its `best` highest experts' scores."""
    groups = config["n_group"] or 1
    chosen = config["topk_group"] or 1
    experts = config.first_of(*COUNTS)
    topk = config.first_of(*CHOSEN)
    if groups == chosen == 1:
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


def _layers_between(config: Fields) -> set[int]:
    """Return the dense layers that ERNIE's `moe_layer_start_index`, `_end_index` and `_interval` name."""
    layers = config["num_hidden_layers"]
    start = config["moe_layer_start_index"]
    end = config.get("moe_layer_end_index", -1)
    every = config.get("moe_layer_interval", 1)
    if end >= layers:
        raise ValueError(f"moe_layer_end_index {end}: there are {layers} layers")
    last = layers - 1 if end == -1 else end
    return {layer for layer in range(layers) if (layer + 1) % every or not start <= layer <= last}


def _head_size(config: Fields) -> int:
    """Return the channels of a head; raise ValueError if the entry is missing, where transformers has its own value."""
    return config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]


def _gpt_oss(config: Fields) -> dict[str, Any]:
    """Return the flags of gpt-oss (its model card, section 2), whose windows include the token itself."""
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"layer_types: has {len(kinds)} entries for {layers} layers")
    windows = [int(kind == "sliding_attention") for kind in kinds]
    window = config.get("sliding_window") or 0
    if any(windows) and window < 1:
        raise ValueError(f"sliding_window {window}: must be 1 or more")
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        raise ValueError("rope_scaling: is missing; transformers would take YaRN with settings of its own")
    return {
        "kv-channels": _head_size(config),
        "swiglu": False,
        "quick-geglu": True,
        "activation-func-clamp-value": config.get("swiglu_limit") or 7.0,
        "glu-linear-offset": 1.0,
        "softmax-type": "learnable",
        "window-size": f"{window - 1},0" if any(windows) else None,
        "window-attn-skip-freq": str(windows).replace(" ", "") if any(windows) else None,
    }


def _dense_layers(config: Fields) -> set[int]:
    """Return the dense layers that Qwen's `mlp_only_layers` and `decoder_sparse_step` name."""
    layers = config["num_hidden_layers"]
    dense = config.get("mlp_only_layers") or []
    if len(dense) > layers:
        raise ValueError(f"mlp_only_layers: has {len(dense)} entries for {layers} layers")
    for layer in dense:
        number_in(layer, 0, layers - 1, "mlp_only_layers", whole=True)
    step = config.get("decoder_sparse_step", 1)
    return {*dense, *(layer for layer in range(layers) if (layer + 1) % step)}


def _first_layers(config: Fields) -> set[int]:
    """Return the dense layers that DeepSeek's `first_k_dense_replace` names."""
    layers = config["num_hidden_layers"]
    dense = config["first_k_dense_replace"]
    if dense > layers:
        raise ValueError(f"first_k_dense_replace {dense}: there are {layers} layers")
    return set(range(dense))


def _deepseek(irrelevant: frozenset[str] = frozenset(), **more: Any) -> Architecture:
    return Architecture(
        expert=GATED,
        shared_expert="mlp.shared_experts",
        shared_width=_shared_experts,
        qk_norm=lambda config: "qk-layernorm",
        latent=True,
        dense_layers=_first_layers,
        # The head size follows from the sizes of its two parts
        irrelevant=irrelevant | {"head_dim", "qk_head_dim"},
        **more,
    )


GATED = ("gate_proj", "up_proj", "down_proj")
PREDICTED = ("num_nextn_predict_layers", "num_mtp_layers")
"""Names of the number of layers of multi-token prediction in config.json."""

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in config.json."""

CHOSEN = ("num_experts_per_tok", "moe_k")
"""Names of the number of experts of a token in config.json."""

ANY = object()
"""Permits all values of an entry."""

WINDOWS = frozenset({"sliding_window", "max_window_layers"})
"""Keys of Qwen's models that only matter with use_sliding_window."""

ARCHITECTURES = {
    "deepseek_v2": _deepseek(
        normalized=lambda config: False,
        flags=_softmax_routing,
        required={
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "moe_layer_freq": 1,
            "rope_interleave": True,
        },
        # The greedy method reads neither
        irrelevant=frozenset({"n_group", "topk_group"}),
    ),
    "deepseek_v3": _deepseek(
        expert_bias="mlp.gate.e_score_correction_bias",
        normalized=lambda config: True,
        flags=_sigmoid_routing,
        required={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "moe_layer_freq": 1},
    ),
    "ernie4_5_moe": Architecture(
        expert=GATED,
        shared_expert="mlp.shared_experts",
        shared_width=lambda config: (config["moe_num_shared_experts"] or 0) * config["moe_intermediate_size"] or None,
        expert_bias="mlp.moe_statics.e_score_correction_bias",
        expert_bias_row=True,
        normalized=lambda config: True,
        dense_layers=_layers_between,
        prediction=("model.mtp_",),
        rotary_interleaved=True,
        required={"use_bias": False, "moe_norm_min": 1e-12, "moe_gate": "topk", "moe_use_aux_free": True},
        # transformers drops no tokens
        irrelevant=frozenset({"moe_capacity"}),
    ),
    "glm4_moe": Architecture(
        expert=GATED,
        shared_expert="mlp.shared_experts",
        shared_width=_shared_experts,
        expert_bias="mlp.gate.e_score_correction_bias",
        qk_norm=lambda config: "qk-layernorm" if config.get("use_qk_norm") else "",
        qkv_bias=lambda config: bool(config.get("attention_bias")),
        rotary_part=0.5,
        normalized=lambda config: True,
        dense_layers=_first_layers,
        flags=_sigmoid_routing,
        required={"attention_bias": ANY, "norm_topk_prob": True},
    ),
    "gpt_oss": Architecture(
        expert=None,
        router="mlp.router",
        expert_width="intermediate_size",
        qkv_bias=lambda config: True,
        biases=True,
        sinks="self_attn.sinks",
        normalized=lambda config: True,
        layer_types=("sliding_attention", "full_attention"),
        flags=_gpt_oss,
        required={"attention_bias": True, "swiglu_alpha": 1.702},
        # Other names of entries that must be there
        irrelevant=frozenset({"experts_per_token", "initial_context_length"}),
    ),
    "minimax_m2": Architecture(
        expert=("w1", "w3", "w2"),
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        expert_width="intermediate_size",
        expert_bias="block_sparse_moe.e_score_correction_bias",
        qk_norm=lambda config: "qk-layernorm-across-heads",
        rotary_part=1.0,
        normalized=lambda config: True,
        flags=lambda config: {"kv-channels": _head_size(config), "moe-router-score-function": "sigmoid"},
        required={
            **{"sliding_window": None, "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
            **{"qk_norm_type": "per_layer", "shared_intermediate_size": 0},
            **{f"layernorm_{part}_beta": 1 for part in BETAS},
        },
        # Published files have no layers of multi-token prediction, although config.json has their number
        irrelevant=frozenset(
            {"mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp"}
        ),
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
        qk_norm=lambda config: "qk-layernorm-across-heads",
        required={"clip_qkv": None},
    ),
    "qwen2_moe": Architecture(
        expert=GATED,
        shared_expert="mlp.shared_expert",
        shared_width=lambda config: config["shared_expert_intermediate_size"],
        shared_gate=True,
        qkv_bias=lambda config: config.get("qkv_bias", True),
        dense_layers=_dense_layers,
        required={"use_sliding_window": False},
        irrelevant=WINDOWS,
    ),
    "qwen3_moe": Architecture(
        expert=GATED,
        qk_norm=lambda config: "qk-layernorm",
        dense_layers=_dense_layers,
        required={"use_sliding_window": False},
        irrelevant=WINDOWS,
    ),
}
ARCHITECTURES["kimi_k2"] = ARCHITECTURES["deepseek_v3"]
"""Supported architectures by `model_type`."""

REFUSED = {
    "qwen3_next": "most of its layers have linear attention (gated delta nets), for which megatron-core needs the CUDA "
    "kernels of flash-linear-attention",
}
"""Other architectures by `model_type`, and the part that is missing."""

REQUIRED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""`Architecture.required` of all architectures."""
