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
class EntryRule:
    """The type of an entry and, for a number, its range."""

    kind: type
    low: float = 0
    high: float = 0
    or_null: bool = False

    def checked(self, value: Any, name: str) -> Any:
        """Return the value, with 10000.0 in place of 10000 as an integer; raise ValueError if it breaks the rule."""
        if value is None and self.or_null:
            return None
        if self.kind in (int, float):
            if self.kind is int and isinstance(value, float) and value.is_integer():
                value = int(value)
            return number_in(value, self.low, self.high, name, whole=self.kind is int)
        if type(value) is not self.kind:
            raise ValueError(f"{name}: {shown(value)} is not {_TYPES[self.kind]}")
        return value


_TYPES = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}

LAYERS, EXPERTS, WIDTH = (AT_MOST[name] for name in ("num_layers", "num_moe_experts", "hidden_size"))
HEADS = AT_MOST["num_attention_heads"]
TOKENS = AT_MOST["seq_length"]

_SWITCH = EntryRule(bool)
_TEXT = EntryRule(str)
_LIST = EntryRule(list, or_null=True)
_OBJECT = EntryRule(dict, or_null=True)

BETAS = ("full_attention", "linear_attention", "mlp")
"""Parts of a layer of MiniMax-01, each of which has a factor of its residual connection."""

MAX_LISTED = 20
"""Limit of the entries or tensors that an error names."""

FIELDS: Mapping[str, EntryRule] = {
    **dict.fromkeys(("model_type", "hidden_act", "topk_method", "scoring_func", "qk_norm_type", "moe_gate"), _TEXT),
    **dict.fromkeys(("attention_bias", "mlp_bias", "norm_topk_prob", "qkv_bias", "tie_word_embeddings"), _SWITCH),
    **dict.fromkeys(("rope_interleave", "use_qk_norm", "use_routing_bias", "use_sliding_window"), _SWITCH),
    **dict.fromkeys(("moe_use_aux_free", "use_bias"), EntryRule(bool, or_null=True)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _OBJECT),
    **dict.fromkeys(("attn_type_list", "layer_types", "mlp_only_layers"), _LIST),
    **dict.fromkeys(("num_hidden_layers", "decoder_sparse_step", "moe_layer_freq"), EntryRule(int, 1, LAYERS)),
    "first_k_dense_replace": EntryRule(int, 0, LAYERS),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers"), EntryRule(int, 0, LAYERS, or_null=True)),
    "moe_layer_start_index": EntryRule(int, 0, LAYERS),
    "moe_layer_end_index": EntryRule(int, -1, LAYERS),
    "moe_layer_interval": EntryRule(int, 1, LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EntryRule(int, 1, EXPERTS)),
    **dict.fromkeys(("moe_num_experts", "num_experts_per_tok", "moe_k"), EntryRule(int, 1, EXPERTS)),
    **dict.fromkeys(
        ("n_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"),
        EntryRule(int, 0, EXPERTS, or_null=True),
    ),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), EntryRule(int, 1, WIDTH)),
    "shared_expert_intermediate_size": EntryRule(int, 1, WIDTH),
    "vocab_size": EntryRule(int, 1, AT_MOST["vocab_size"]),
    "num_attention_heads": EntryRule(int, 1, HEADS),
    "num_key_value_heads": EntryRule(int, 1, HEADS, or_null=True),
    "head_dim": EntryRule(int, 1, WIDTH, or_null=True),
    "partial_rotary_factor": EntryRule(float, 0, 1, or_null=True),
    "rotary_dim": EntryRule(int, 2, WIDTH, or_null=True),
    "shared_intermediate_size": EntryRule(int, 0, WIDTH),
    "swiglu_alpha": EntryRule(float, 0, 1e6),
    "swiglu_limit": EntryRule(float, 1e-6, 1e6),
    **dict.fromkeys((f"layernorm_{part}_beta" for part in BETAS), EntryRule(float, 0, 1e6)),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), EntryRule(int, 1, WIDTH)),
    "q_lora_rank": EntryRule(int, 1, WIDTH, or_null=True),
    "max_position_embeddings": EntryRule(int, 1, TOKENS),
    "sliding_window": EntryRule(int, 0, TOKENS, or_null=True),
    "clip_qkv": EntryRule(float, 0, 1e9, or_null=True),
    "rms_norm_eps": EntryRule(float, 1e-20, 1),
    "rope_theta": EntryRule(int, 1, 1e15),
    "router_aux_loss_coef": EntryRule(float, 0, 1e6),
    "moe_norm_min": EntryRule(float, 0, 1),
    "routed_scaling_factor": EntryRule(float, 1e-6, 1e6),
}
"""Rules for all keys of config.json that are read."""

ROPE: Mapping[str, EntryRule] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    "rope_theta": EntryRule(int, 1, 1e15),
    "factor": EntryRule(float, 1, 1e6),
    "original_max_position_embeddings": EntryRule(int, 1, TOKENS),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), EntryRule(float, 0, 1e6)),
    "partial_rotary_factor": EntryRule(float, 0, 1),
    "attention_factor": EntryRule(float, 0, 1e6, or_null=True),
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

    def __init__(self, content: Mapping[str, Any], known: Mapping[str, EntryRule], where: str = "") -> None:
        """Raise ValueError if an entry has another type or is out of its range."""
        self.known = known
        self.where = where
        self._unread = {name: value for name, value in content.items() if value is not None}
        for name, rule in known.items():
            if name in content:
                self[name] = rule.checked(content[name], where + name)

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
        """Return the entry under one of several names, or else the default; raise ValueError if entries differ."""
        there = [name for name in names if self.get(name) is not None]
        if not there:
            return self[names[0]] if default is None else default
        for name in there[1:]:
            if self[name] != self[there[0]]:
                raise ValueError(f"{self.where}{name} {self[name]}: {there[0]} is {self[there[0]]}; keep one of them")
        return self[there[0]]

    def check_all_read(self, model_type: str, irrelevant: Collection[str] = ()) -> None:
        """Raise ValueError if an entry has a value, was never read, and is not one of the `irrelevant` ones."""
        unread = [name for name in sorted(self._unread) if name not in irrelevant and not name.startswith("_")]
        if unread:
            texts = [f"{cleaned(self.where + name, 80)} {shown(self._unread[name])}" for name in unread[:MAX_LISTED]]
            raise ValueError(
                f"{', '.join(texts)}: not known for {cleaned(model_type)}, and may change what the model computes; "
                "remove from config.json what does not"
            )


def read_rope(config: Fields) -> Fields:
    """Return the checked settings of rotary embeddings, which are in `rope_parameters` since transformers 5; raise
    ValueError if an entry has another type or is out of its range, or two entries contradict each other."""
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
