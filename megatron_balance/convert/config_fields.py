"""Check config.json against known types and ranges; the program can read only the entries listed here.

The upper limits are far above every published model. They keep sizes small enough to iterate over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_balance.cli.checks import AT_MOST
from megatron_balance.files.reading import number_in, shown


@dataclass(frozen=True)
class Number:
    """Rule for a number from `low` to `high`."""

    low: float
    high: float
    whole: bool = True
    or_null: bool = False

    def check(self, value: Any, name: str) -> None:
        if not (value is None and self.or_null):
            # A library may have written the integer 10000 as 10000.0
            integral = self.whole and isinstance(value, float) and value.is_integer()
            number_in(int(value) if integral else value, self.low, self.high, name, whole=self.whole)


@dataclass(frozen=True)
class OfType:
    """Rule for a value of a type other than a number."""

    type: type
    description: str
    or_null: bool = False

    def check(self, value: Any, name: str) -> None:
        if type(value) is not self.type and not (value is None and self.or_null):
            raise ValueError(f"{name}: {shown(value)} is not {self.description}")


LAYERS, EXPERTS, WIDTH = (AT_MOST[name] for name in ("num_layers", "num_moe_experts", "hidden_size"))
HEADS, TOKENS = AT_MOST["num_attention_heads"], AT_MOST["seq_length"]

_SWITCH, _TEXT = OfType(bool, "true or false"), OfType(str, "a text")
_OBJECT = OfType(dict, "an object", or_null=True)

FIELDS: Mapping[str, Number | OfType] = {
    **dict.fromkeys(("model_type", "hidden_act", "topk_method", "scoring_func"), _TEXT),
    **dict.fromkeys(("attention_bias", "norm_topk_prob", "qkv_bias", "tie_word_embeddings"), _SWITCH),
    "use_sliding_window": _SWITCH,
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "mlp_only_layers": OfType(list, "a list", or_null=True),
    "num_hidden_layers": Number(1, LAYERS),
    "first_k_dense_replace": Number(0, LAYERS),
    "decoder_sparse_step": Number(1, LAYERS),
    "moe_layer_freq": Number(1, LAYERS),
    "num_nextn_predict_layers": Number(0, LAYERS, or_null=True),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), Number(1, EXPERTS)),
    **dict.fromkeys(("num_experts_per_tok",), Number(1, EXPERTS)),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), Number(0, EXPERTS, or_null=True)),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), Number(1, WIDTH)),
    "shared_expert_intermediate_size": Number(1, WIDTH),
    "vocab_size": Number(1, AT_MOST["vocab_size"]),
    "num_attention_heads": Number(1, HEADS),
    "num_key_value_heads": Number(1, HEADS, or_null=True),
    "head_dim": Number(1, WIDTH, or_null=True),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), Number(1, WIDTH)),
    "q_lora_rank": Number(1, WIDTH, or_null=True),
    "max_position_embeddings": Number(1, TOKENS),
    "sliding_window": Number(0, TOKENS, or_null=True),
    "clip_qkv": Number(0, 1e9, whole=False, or_null=True),
    "rms_norm_eps": Number(1e-20, 1, whole=False),
    "rope_theta": Number(1, 1e15),
    "router_aux_loss_coef": Number(0, 1e6, whole=False),
    "routed_scaling_factor": Number(1e-6, 1e6, whole=False),
}
"""Rules for all keys of config.json that are read."""

ROPE: Mapping[str, Number | OfType] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    "rope_theta": Number(1, 1e15),
    "factor": Number(1, 1e6, whole=False),
    "original_max_position_embeddings": Number(1, TOKENS),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), Number(0, 1e6, whole=False)),
}
"""Rules for the keys of `rope_scaling` and `rope_parameters`."""


class Fields(dict[str, Any]):
    """The known entries of an object; reading any other key is an error of the program."""

    def __init__(self, content: Mapping[str, Any], known: Mapping[str, Number | OfType], where: str = "") -> None:
        """
        Raises:
            ValueError: an entry has another type or is out of its range; the message names it.
        """
        self.known, self.where = known, where
        for name, rule in known.items():
            if name in content:
                rule.check(content[name], where + name)
                value = content[name]
                whole = isinstance(rule, Number) and rule.whole and value is not None
                self[name] = int(value) if whole else value

    def get(self, name: str, default: Any = None) -> Any:
        assert name in self.known, name
        return super().get(name, default)

    def __missing__(self, name: str) -> Any:
        assert name in self.known, name
        raise ValueError(f"{self.where}{name}: is missing")


def read_config(content: Mapping[str, Any]) -> Fields:
    """Return the checked entries of config.json.

    Raises:
        ValueError: an entry has another type or is out of its range, or two entries contradict each other; the message
            names them.
    """
    config = Fields(content, FIELDS)
    for name in ("rope_scaling", "rope_parameters"):
        if config.get(name):
            config[name] = Fields(config[name], ROPE, f"{name}.")
    layers = config["num_hidden_layers"]
    if config.get("first_k_dense_replace", 0) > layers:
        raise ValueError(f"first_k_dense_replace {config['first_k_dense_replace']}: there are {layers} layers")
    dense = config.get("mlp_only_layers") or []
    if len(dense) > layers:
        raise ValueError(f"mlp_only_layers: has {len(dense)} entries for {layers} layers")
    for layer in dense:
        number_in(layer, 0, layers - 1, "mlp_only_layers", whole=True)
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    if heads % groups:
        raise ValueError(f"num_key_value_heads {groups}: does not divide num_attention_heads {heads}")
    return config
