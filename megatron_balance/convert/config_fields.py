"""Check config.json against known types and ranges; the program can read only the entries listed here.

An entry that the program neither reads nor knows as irrelevant is refused, because it may change what the model
computes. The upper limits are far above every published model. They keep sizes small enough to iterate over.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_balance.cli.checks import AT_MOST
from megatron_balance.files.reading import number_in, shown
from megatron_balance.messages import cleaned


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
HEADS = AT_MOST["num_attention_heads"]
TOKENS = AT_MOST["seq_length"]

_SWITCH = OfType(bool, "true or false")
_TEXT = OfType(str, "a text")
_LIST = OfType(list, "a list", or_null=True)
_OBJECT = OfType(dict, "an object", or_null=True)

MAX_LISTED = 20
"""Limit of the entries or tensors that an error names."""

FIELDS: Mapping[str, Number | OfType] = {
    **dict.fromkeys(("model_type", "hidden_act", "topk_method", "scoring_func"), _TEXT),
    **dict.fromkeys(("attention_bias", "mlp_bias", "norm_topk_prob", "qkv_bias", "tie_word_embeddings"), _SWITCH),
    **dict.fromkeys(("rope_interleave", "use_sliding_window"), _SWITCH),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _OBJECT),
    **dict.fromkeys(("layer_types", "mlp_only_layers"), _LIST),
    "num_hidden_layers": Number(1, LAYERS),
    "first_k_dense_replace": Number(0, LAYERS),
    "decoder_sparse_step": Number(1, LAYERS),
    "moe_layer_freq": Number(1, LAYERS),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers"), Number(0, LAYERS, or_null=True)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), Number(1, EXPERTS)),
    **dict.fromkeys(("num_experts_per_tok",), Number(1, EXPERTS)),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), Number(0, EXPERTS, or_null=True)),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), Number(1, WIDTH)),
    "shared_expert_intermediate_size": Number(1, WIDTH),
    "vocab_size": Number(1, AT_MOST["vocab_size"]),
    "num_attention_heads": Number(1, HEADS),
    "num_key_value_heads": Number(1, HEADS, or_null=True),
    "head_dim": Number(1, WIDTH, or_null=True),
    "partial_rotary_factor": Number(0, 1, whole=False, or_null=True),
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
    "partial_rotary_factor": Number(0, 1, whole=False),
    "attention_factor": Number(0, 1e6, whole=False, or_null=True),
    "truncate": _SWITCH,
}
"""Rules for the keys of `rope_scaling` and `rope_parameters`."""

IRRELEVANT = frozenset(
    (
        # Where the file and its weights come from; the types of the weights are in their own files
        *("architectures", "auto_map", "base_model_name_or_path", "compression_config", "dtype", "finetuning_task"),
        *("model_name", "name_or_path", "quantization_config", "tokenizer_class", "torch_dtype"),
        *("transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16"),
        # Training
        *("attention_dropout", "aux_loss_alpha", "ep_size", "initializer_range", "output_router_logits"),
        *("pretraining_tp", "router_jitter_noise", "seq_aux"),
        # How transformers runs any model
        *("attn_implementation", "chunk_size_feed_forward", "experts_implementation", "output_attentions"),
        *("output_hidden_states", "pruned_heads", "return_dict", "tf_legacy_loss", "torchscript", "use_cache"),
        # Models with an encoder, and classifiers
        *("add_cross_attention", "cross_attention_hidden_size", "decoder_start_token_id", "is_decoder"),
        *("is_encoder_decoder", "tie_encoder_decoder", "id2label", "label2id", "num_labels", "problem_type"),
        "task_specific_params",
        # Special tokens, and defaults of text generation
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "bad_words_ids", "begin_suppress_tokens"),
        *("diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size"),
        *("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty"),
        *("max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams"),
        *("num_return_sequences", "output_scores", "prefix", "remove_invalid_values", "repetition_penalty"),
        *("return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p"),
    )
)
"""Keys of config.json that do not change the logits of any supported model. So are keys that begin with `_`."""


class Fields(dict[str, Any]):
    """The known entries of an object; reading any other key is an error of the program."""

    def __init__(self, content: Mapping[str, Any], known: Mapping[str, Number | OfType], where: str = "") -> None:
        """
        Raises:
            ValueError: an entry has another type or is out of its range; the message names it.
        """
        self.known = known
        self.where = where
        self._unread = {name: value for name, value in content.items() if value is not None}
        for name, rule in known.items():
            if name in content:
                rule.check(content[name], where + name)
                value = content[name]
                whole = isinstance(rule, Number) and rule.whole and value is not None
                self[name] = int(value) if whole else value

    def __getitem__(self, name: str) -> Any:
        self._unread.pop(name, None)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        assert name in self.known, name
        self._unread.pop(name, None)
        return super().get(name, default)

    def __missing__(self, name: str) -> Any:
        assert name in self.known, name
        raise ValueError(f"{self.where}{name}: is missing")

    def first_of(self, *names: str, default: Any = None) -> Any:
        """Return the entry that is present under one of several names, or else the default.

        Raises:
            ValueError: entries differ, or none is present and there is no default.
        """
        there = [name for name in names if self.get(name) is not None]
        if not there:
            return self[names[0]] if default is None else default
        for name in there[1:]:
            if self[name] != self[there[0]]:
                raise ValueError(f"{self.where}{name} {self[name]}: {there[0]} is {self[there[0]]}; keep one of them")
        return self[there[0]]

    def check_all_read(self, model_type: str, irrelevant: Collection[str] = ()) -> None:
        """Raise ValueError if there is an entry that was never read, is not null and not irrelevant."""
        unread = [name for name in sorted(self._unread) if name not in irrelevant and not name.startswith("_")]
        if unread:
            texts = [f"{cleaned(self.where + name, 80)} {shown(self._unread[name])}" for name in unread[:MAX_LISTED]]
            raise ValueError(
                f"{', '.join(texts)}: not known for {cleaned(model_type)}, and may change what the model computes; "
                "remove from config.json what does not"
            )


def read_config(content: Mapping[str, Any]) -> Fields:
    """Return the checked entries of config.json.

    Raises:
        ValueError: an entry has another type or is out of its range, or two entries contradict each other; the message
            names them.
    """
    config = Fields(content, FIELDS)
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"] or config["num_attention_heads"]
    if heads % groups:
        raise ValueError(f"num_key_value_heads {groups}: does not divide num_attention_heads {heads}")
    return config


def read_rope(config: Fields) -> Fields:
    """Return the checked settings of rotary embeddings, which are in `rope_parameters` since transformers 5.

    Raises:
        ValueError: as for `read_config`.
    """
    there = [name for name in ("rope_parameters", "rope_scaling") if config.get(name)]
    if len(there) == 2 and config[there[0]] != config[there[1]]:
        raise ValueError("rope_parameters, rope_scaling: differ; keep one of them")
    content = config[there[0]] if there else {}
    rope = Fields(content, ROPE, f"{there[0]}." if there else "rope_parameters.")
    outer = config.get("rope_theta")
    inner = rope.get("rope_theta")
    if inner is None:
        rope["rope_theta"] = config["rope_theta"]
    elif outer not in (None, inner):
        raise ValueError(f"rope_theta {outer}: {rope.where}rope_theta is {inner}; keep one of them")
    return rope


def dense_layers(config: Fields) -> set[int]:
    """Return the dense layers that Qwen's `mlp_only_layers` and `decoder_sparse_step` name; raise as `read_config`."""
    layers = config["num_hidden_layers"]
    dense = config.get("mlp_only_layers") or []
    if len(dense) > layers:
        raise ValueError(f"mlp_only_layers: has {len(dense)} entries for {layers} layers")
    for layer in dense:
        number_in(layer, 0, layers - 1, "mlp_only_layers", whole=True)
    step = config.get("decoder_sparse_step", 1)
    return {*dense, *(layer for layer in range(layers) if (layer + 1) % step)}


def first_layers(config: Fields) -> set[int]:
    """Return the dense layers that DeepSeek's `first_k_dense_replace` names; raise as `read_config`."""
    layers = config["num_hidden_layers"]
    dense = config["first_k_dense_replace"]
    if dense > layers:
        raise ValueError(f"first_k_dense_replace {dense}: there are {layers} layers")
    return set(range(dense))
