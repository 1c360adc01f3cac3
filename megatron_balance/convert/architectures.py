"""Translate Mixture-of-Experts models of Hugging Face: config.json into flags, and their tensors into ours.

An `Architecture` is data: how its config.json translates into flags, and the names of its tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_balance.convert.config_fields import Fields
from megatron_balance.files.reading import number_in, shown


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The common properties of all models of one `model_type`."""

    expert: tuple[str, str, str]
    """Names of an expert's gate, up and down projections."""
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert_width: str = "moe_intermediate_size"
    """Key of an expert's width in config.json."""
    shared_expert: str | None = None
    shared_width: Callable[[Fields], int | None] = lambda config: None
    shared_gate: bool = False
    expert_bias: str | None = None
    latent: bool = False
    """Whether the model has multi-latent attention."""
    qk_norm: Literal["", "qk-layernorm", "qk-layernorm-across-heads"] = ""
    """Flag that selects the norm of queries and keys; empty without a norm."""
    qkv_bias: Callable[[Fields], bool] = lambda config: bool(config.get("attention_bias"))
    normalized: Callable[[Fields], bool] = lambda config: bool(config["norm_topk_prob"])
    """Whether the weights of a token's experts sum to one."""
    dense_layers: Callable[[Fields], set[int]] = lambda config: set()
    routing: Callable[[Fields], Mapping[str, Any]] = lambda config: {}
    """Flags of the router in addition to those of all models."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json with the only supported value; they may be absent."""
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


def _groups(config: Fields, best: int) -> dict[str, int]:
    """Return the flags of group-limited routing; a group's score is the sum of its `best` highest experts' scores."""
    groups = config["n_group"] or 1
    chosen = config["topk_group"] or 1
    experts = config.first_of(*COUNTS)
    topk = config["num_experts_per_tok"]
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
        shared_width=lambda config: (config["n_shared_experts"] or 0) * config["moe_intermediate_size"] or None,
        qk_norm="qk-layernorm",
        latent=True,
        dense_layers=_first_layers,
        # The head size follows from the sizes of its two parts
        irrelevant=irrelevant | {"head_dim", "qk_head_dim"},
        **more,
    )


GATED = ("gate_proj", "up_proj", "down_proj")
PREDICTED = ("num_nextn_predict_layers", "num_mtp_layers")
"""Names of the number of layers of multi-token prediction in config.json."""

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in config.json."""

WINDOWS = frozenset({"sliding_window", "max_window_layers"})
"""Keys of Qwen's models that only matter with use_sliding_window."""

ARCHITECTURES = {
    "deepseek_v2": _deepseek(
        normalized=lambda config: False,
        routing=_softmax_routing,
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
        dense_layers=_dense_layers,
        required={"use_sliding_window": False},
        irrelevant=WINDOWS,
    ),
    "qwen3_moe": Architecture(
        expert=GATED,
        qk_norm="qk-layernorm",
        dense_layers=_dense_layers,
        required={"use_sliding_window": False},
        irrelevant=WINDOWS,
    ),
}
ARCHITECTURES["kimi_k2"] = ARCHITECTURES["deepseek_v3"]
"""Supported architectures by `model_type`."""

REQUIRED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1}
"""`Architecture.required` of all architectures."""
