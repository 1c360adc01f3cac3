"""What people bring: files of other programs, keys of config.json, and what an export says about them."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_balance.checkpoint import saved_flags
from megatron_balance.convert.architectures import PREDICTED
from megatron_balance.convert.config_fields import IRRELEVANT
from megatron_balance.convert.conversion import export_model, import_model
from megatron_balance.convert.model import Model
from megatron_balance.convert.pieces import rotary_pairs
from megatron_balance.convert.safetensors_files import INDEX, SINGLE, Weights
from megatron_balance.convert.settings import NOT_WRITTEN, run_config, trained_config
from tests import hf_models
from tests.hf_models import change, quiet, read_json, reconfigure
from tests.unit.published_models import PUBLISHED

TABLE = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[..., Path]:
    """Return a directory with a model, which a test may change."""

    def of(name: str, **changes: Any) -> Path:
        directory = tmp_path_factory.mktemp("hf")
        hf_models.save(name, directory, **changes)
        return directory

    return of


def exported(directory: Path, *without: str) -> dict[str, torch.Tensor]:
    """Import and export a model; return its tensors."""
    there = directory / "there"
    back = directory / "back"
    import_model(directory, there, quiet, without)
    export_model(there, back, quiet)
    weights = Weights(back)
    return {name: weights.read(name) for name in weights.shapes}


def refusal(directory: Path, *without: str) -> str:
    """Return the error of an import, which leaves nothing."""
    with pytest.raises(ValueError) as refused:
        import_model(directory, directory / "there", quiet, without)
    assert not (directory / "there").exists()
    return str(refused.value)


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_rotary_frequencies_follow_from_the_configuration(models) -> None:
    """Old versions of transformers, and Moonlight's files, have them."""
    source = models("deepseek_v3")
    expected = load_file(source / SINGLE)
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(3)}
    change(source, lambda all: all.update(frequencies))
    assert equal(exported(source), expected)


def test_kimi_k2_is_deepseek_v3(models) -> None:
    source = models("deepseek_v3")
    reconfigure(source, model_type="kimi_k2", architectures=["KimiK2ForCausalLM"])
    assert equal(exported(source), load_file(source / SINGLE))
    assert read_json(source / "back" / "config.json")["model_type"] == "kimi_k2"


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_tensors_of_all_experts_together(models, name: str) -> None:
    """transformers 5 keeps them so; `torch.save` of its modules does, too."""
    source = models(name)
    arch = Model(read_json(models(name) / "config.json")).architecture
    expected = load_file(source / SINGLE)

    def fuse(all: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            start = f"model.layers.{layer}."
            parts = [[all.pop(f"{start}{arch.experts}.{expert}.{part}.weight", None) for expert in range(8)]
                     for part in arch.expert]  # fmt: skip
            if parts[0][0] is None:
                continue
            gate, up, down = (torch.stack(part) for part in parts)
            all[f"{start}mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
            all[f"{start}mlp.experts.down_proj"] = down
            all[f"{start}mlp.gate.weight"] = all.pop(f"{start}{arch.router}.weight")

    change(source, fuse)
    assert equal(exported(source), expected)
    shutil.rmtree(source / "there")
    change(source, lambda all: all.update({"model.layers.2.mlp.experts.down_proj": torch.ones(8, 16, 32)}))
    assert "model.layers.2.mlp.experts.down_proj: is (8, 16, 32) instead of (8, 32, " in refusal(source)


def test_the_output_layer_of_a_tied_model(models) -> None:
    source = models("qwen2_moe tied")
    expected = load_file(source / SINGLE)
    change(source, lambda all: all.update({OUTPUT: all[TABLE].clone()}))
    assert equal(exported(source), expected)
    for directory in ("there", "back"):
        shutil.rmtree(source / directory)
    change(source, lambda all: all.update({OUTPUT: all[TABLE] + 1}))
    assert f"leave it out with --without {OUTPUT}, or set tie_word_embeddings to false" in refusal(source)
    assert equal(exported(source, OUTPUT), expected)


def test_patterns_of_tensors_to_leave_out(models) -> None:
    source = models("mixtral")
    expected = load_file(source / SINGLE)
    change(source, lambda all: all.update({f"model.layers.{layer}.extra.scale": torch.ones(1) for layer in range(3)}))
    assert "--without PATTERN leaves tensors out" in refusal(source)
    assert equal(exported(source, "model.layers.*.extra"), expected)


def test_a_tensor_of_all_experts_can_be_left_out(models) -> None:
    """Patterns are those of the names in the files."""
    source = models("mixtral")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    expected = load_file(source / SINGLE)
    change(source, lambda all: all.update({name: torch.ones(8, 96, 32)}))
    assert f"{name} also contains model.layers.1.block_sparse_moe.experts.0.w1.weight" in refusal(source)
    assert equal(exported(source, name), expected)


def test_one_expert_for_each_token(models) -> None:
    assert "num_experts_per_tok 1: the only expert of a token" in refusal(models("mixtral", num_experts_per_tok=1))
    source = models("qwen2_moe", num_experts_per_tok=1)
    assert equal(exported(source), load_file(source / SINGLE))


OTHERS = {
    "an adapter": ({"adapter_config.json": "{}"}, "an adapter (LoRA), not a whole model; merge it"),
    "pickles": ({"pytorch_model-00001-of-00002.bin": ""}, "1 of its 1 files of weights are missing: model.safetensors"),
    "missing shards": (
        {INDEX: json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})},
        "2 of its 2 files of weights are missing: model-1.safetensors, model-2.safetensors; only",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_named_with_a_remedy(models, name: str) -> None:
    source = models("mixtral")
    (source / SINGLE).unlink()
    files, message = OTHERS[name]
    for file, content in files.items():
        (source / file).write_text(content)
    assert message in refusal(source)


BASES = {config["model_type"]: config for _, config in PUBLISHED.values()}

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}

UNKNOWN: dict[str, list[tuple[str, Any]]] = {
    "mixtral": [
        ("attn_logit_softcapping", 30.0),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("sliding_window", 4096),
        ("tie_word_embeddings", None),
    ],
    "qwen3_moe": [
        ("router_logit_softcap", 5),
        ("layer_types", ["sliding_attention"]),
        ("use_sliding_window", True),
        ("rope_scaling", YARN | {"rope_type": "llama3"}),
        ("rope_scaling", {"factor": 2.0}),
        ("text_config", {"tie_word_embeddings": True}),
    ],
    "qwen2_moe": [
        ("shared_expert_scale", 2),
        ("attention_bias", True),
        ("partial_rotary_factor", 0.5),
        ("mlp_only_layers", [99]),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ],
    "glm4_moe": [
        ("norm_topk_prob", False),
        ("partial_rotary_factor", 0.48),
        ("rope_scaling", YARN),
        ("layer_types", ["sliding_attention"]),
    ],
    "gpt_oss": [
        ("layer_types", ["full_attention"]),
        ("sliding_window", 0),
        ("attention_bias", False),
        ("swiglu_alpha", 1.5),
        ("rope_scaling", None),
    ],
    "minimax_m2": [
        ("qk_norm_type", "per_head"),
        ("use_routing_bias", False),
        ("shared_intermediate_size", 1536),
        ("attn_type_list", [1, 0]),
        ("partial_rotary_factor", 0.25),
        ("layernorm_mlp_beta", 3.5),
    ],
    "olmoe": [("clip_qkv", 8.0), ("final_logit_softcapping", 30.0), ("mlp_bias", True), ("norm_topk_prob", None)],
    "deepseek_v2": [
        ("norm_topk_prob", True),
        ("rope_interleave", False),
        ("embedding_multiplier", 12),
        ("num_key_value_heads", 2),
        ("rope_scaling", YARN | {"attention_factor": 2.0}),
    ],
    "deepseek_v3": [
        ("topk_method", "greedy"),
        ("moe_layer_freq", 2),
        ("residual_scale", 0.1),
        ("rope_interleave", None),
        ("num_local_experts", 32),
        ("first_k_dense_replace", 99),
        ("rope_scaling", YARN | {"mscale": 0.7}),
        ("rope_scaling", YARN | {"rope_type": "linear"}),
    ],
}
"""`model_type` -> keys of config.json that change what a model computes, in a way that is not supported."""


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_entry_that_may_change_the_model_is_refused_by_name(name: str) -> None:
    for key, value in UNKNOWN[name]:
        with pytest.raises(ValueError, match=key):
            Model(BASES[name] | {key: value})


@pytest.mark.parametrize("name", BASES)
def test_entries_without_effect_are_accepted(name: str) -> None:
    more = {"architectures": ["A"], "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": 1, "_from": "x"}
    expected = Model(BASES[name]).flags()
    assert Model(BASES[name] | more | {"unknown_but_null": None}).flags() == expected


def another(value: Any) -> Any:
    """Return another value of an entry of config.json."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 1
    return f"{value}x" if isinstance(value, str) else [0] if isinstance(value, list) else 1


@pytest.mark.parametrize("name", BASES)
def test_every_entry_is_used_or_known_to_have_no_effect(name: str) -> None:
    """Another value of any entry changes flags or tensors, or is refused, unless the entry has no effect."""
    from transformers import AutoConfig

    contents = [BASES[name]]
    if name in hf_models.CONFIGS:
        contents.append(AutoConfig.for_model(name, **hf_models.COMMON | hf_models.CONFIGS[name]).to_dict())
    for content in contents:
        model = Model(content)
        meaning = model.flags(), [list(file) for file in model.files(1)]
        idle = {*IRRELEVANT, *model.architecture.irrelevant, *PREDICTED}
        for key in sorted(content.keys() - idle):
            with contextlib.suppress(ValueError):
                other = Model(content | {key: another(content[key])})
                found = other.flags(), [list(file) for file in other.files(1)]
                assert found != meaning or key.startswith("_"), key


def fields(model: Model, **changes: Any) -> dict[str, Any]:
    return saved_flags.fields_of(run_config(model, None)) | changes


def test_an_export_does_not_describe_weights_of_another_type() -> None:
    quantized = BASES["deepseek_v3"] | {"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "float8"}
    model = Model(quantized)
    found = trained_config(model, fields(model), torch.bfloat16)
    assert "quantization_config" not in found and found["torch_dtype"] == "bfloat16"


def test_what_an_export_cannot_express_is_refused_by_flag() -> None:
    model = Model(BASES["qwen3_moe"])
    with pytest.raises(ValueError, match=r"cannot express --moe-router-topk-scaling-factor 2.0 \(.*can only mean 1.0"):
        trained_config(model, fields(model, moe_router_topk_scaling_factor=2.0), torch.float32)
    assert list(model.notices(1.5)) == [
        "--moe-expert-capacity-factor 1.5: the exported model has no capacity and drops no token"
    ]


def test_a_choice_of_experts_that_no_config_describes_is_refused() -> None:
    model = Model(BASES["qwen3_moe"])
    for kind in ("sinkhorn", ["aux_loss", "sinkhorn"]):
        with pytest.raises(ValueError, match="cannot express the weights of --moe-router-load-balancing-type sinkhorn"):
            trained_config(model, fields(model, moe_router_load_balancing_type=kind), torch.float32)


WITHOUT_EFFECT = {
    "Kimi-K2": {"kv_channels": 112, "moe_router_pre_softmax": True, "moe_router_num_groups": 1,
                "moe_router_group_topk": 1},
    "gpt-oss-20b": {"window_attn_skip_freq": 2, "yarn_mscale": None, "yarn_mscale_all_dim": None},
    "GLM-4.5-Air": {"window_attn_skip_freq": 2, "yarn_beta_fast": 7.0, "moe_router_pre_softmax": True},
    "Qwen3-30B-A3B": {"ffn_hidden_size": 8192, "moe_layer_freq": [1] * 48, "rotary_scaling_factor": 40.0},
    "DeepSeek-V3": {"moe_router_topk_scaling_factor": 2.5, "moe_router_group_score_topk": 2, "q_lora_rank": 1536},
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_flags_without_effect_on_logits_do_not_change_an_export(name: str) -> None:
    """A run with flags of its own, not an import's, may have them."""
    content = PUBLISHED[name][1]
    model = Model(content)
    expected = trained_config(model, fields(model), torch.bfloat16)
    assert trained_config(model, fields(model, **WITHOUT_EFFECT[name]), torch.bfloat16) == expected
    written = {key: value for key, value in content.items() if key not in NOT_WRITTEN}
    assert expected == written | {key: 0 for key in PREDICTED if key in content}


def test_flags_that_a_checkpoint_lacks_are_the_sources() -> None:
    model = Model(PUBLISHED["DeepSeek-V3"][1])
    saved = fields(model, rotary_base=7)
    for name in ("moe_router_topk", "rotary_scaling_factor", "rope_type", "moe_router_load_balancing_type"):
        del saved[name]
    found = trained_config(model, saved, torch.float32)
    assert found == trained_config(model, fields(model, rotary_base=7), torch.float32) and found["rope_theta"] == 7


@pytest.mark.parametrize("value", ["x", [], {}, 0, -1, 1e300])
@pytest.mark.parametrize("name", ["moe_router_topk", "moe_router_group_topk", "rotary_base", "layernorm_epsilon"])
def test_damaged_flags_of_a_checkpoint_are_refused(name: str, value: Any) -> None:
    model = Model(PUBLISHED["DeepSeek-V3"][1])
    with pytest.raises(ValueError, match=saved_flags.flag_of(name) + "|rope_theta|rms_norm_eps"):
        trained_config(model, fields(model, **{name: value}), torch.float32)


@pytest.mark.parametrize(("heads", "before"), [(1, 5), (3, 2), (2, 0)])
def test_rotary_channels_are_paired_and_separated(heads: int, before: int) -> None:
    pairs = rotary_pairs(heads, before, 6)
    whole = torch.randn(heads * (before + 6), 2)
    assert torch.equal(pairs.split(pairs.join([whole]))[0], whole)
    channels = pairs.join([torch.arange(before + 6.0).repeat(heads)])[before : before + 6]
    assert (channels - before).tolist() == [0, 3, 1, 4, 2, 5]
