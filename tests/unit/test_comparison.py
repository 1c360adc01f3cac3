"""Which flags may change between saving and loading: every flag has a kind, and every kind its consequence."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_balance.checkpoint import saved_flags
from megatron_balance.checkpoint.comparison import FIELDS, SECTIONS, Kind, Loaded, compare, kind_of
from megatron_balance.checkpoint.loading import check_newest
from megatron_balance.checkpoint.saved_flags import MODEL_FIELDS, flag_of
from megatron_balance.cli.arguments import build_parser, parse_args
from megatron_balance.config.run_config import RunConfig
from megatron_balance.device.machine import Machine
from megatron_balance.training.schedule import run_length, scheduler_settings
from tests.unit.test_help import IN_SOME_VERSIONS

OTHER_FIELDS = {
    "how many ranks there are and what each holds": """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split context_parallel_size
        expert_model_parallel_size expert_tensor_parallel_size microbatch_group_size_per_vp_stage
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage num_layers_per_virtual_pipeline_stage
        num_virtual_stages_per_pipeline_rank pipeline_model_parallel_layout pipeline_model_parallel_size
        sequence_parallel
        tensor_model_parallel_size""",
    "which implementation computes the same function": """
        apply_rope_fusion attention_backend bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion
        cross_entropy_fusion_impl cross_entropy_loss_fusion masked_softmax_fusion moe_grouped_gemm moe_permute_fusion
        moe_router_fusion moe_use_legacy_grouped_gemm persist_layer_norm transformer_impl
        use_fused_weighted_squared_relu use_te_activation_func""",
    "how it is repeated, and padded": """
        deterministic_mode moe_router_padding_for_fp8 moe_router_padding_for_quantization""",
    "how tokens and gradients travel, and when": """
        clone_scatter_output_in_embedding cp_comm_type defer_embedding_wgrad_compute gradient_accumulation_fusion
        hierarchical_context_parallel_sizes moe_deepep_num_sms moe_enable_deepep moe_flex_dispatcher_backend
        moe_hybridep_num_sms moe_pad_expert_input_to_capacity moe_shared_expert_overlap moe_token_dispatcher_type
        overlap_p2p_comm overlap_p2p_comm_warmup_flush overlap_param_gather use_distributed_optimizer
        wgrad_deferral_limit""",
    "what is kept for the backward pass": """
        distribute_saved_activations moe_layer_recompute recompute_granularity recompute_method recompute_modules
        recompute_num_layers""",
    "what weights are before the first step": "embedding_init_method_std init_method_std perform_initialization",
    "what is logged": "barrier_with_L1_time log_num_zeros_in_grad moe_per_layer_logging",
}
"""What flags of the model and of the optimizer choose instead of what is learned -> their fields."""

OTHERS = {name for names in OTHER_FIELDS.values() for name in names.split()}

GOOD = (
    "--hidden-size 48 --num-attention-heads 4 --seq-length 32 --num-layers 2 --num-experts 8 --micro-batch-size 2 "
    "--train-iters 20 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 127 --mock-data"
)
LATENT = "--multi-latent-attention --position-embedding-type rope"
RESUMED = Loaded(progress=True, schedule=True, optimizer=True)
WITHOUT_OPTIMIZER = Loaded(progress=True, schedule=False, optimizer=False)
WEIGHTS_ONLY = Loaded(progress=False, schedule=False, optimizer=False)

Sections = dict[str, dict[str, Any]]


def config_of(flags: str) -> RunConfig:
    machine = Machine(1, cuda=False, transformer_engine=False, apex=False)
    return parse_args(f"{GOOD} {flags}".split(), machine).config


def sections_of(flags: str) -> Sections:
    config = config_of(flags)
    return saved_flags.sections(config, scheduler_settings(config, run_length(config.train, 1)))


def flat(sections: Sections) -> dict[str, Any]:
    return {name: value for section in sections.values() for name, value in section.items()}


def places() -> dict[str, list[str]]:
    """Return the parts of the configuration that have the field of each flag."""
    parts: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(RunConfig)}
    parts["transformer"] = MLATransformerConfig
    names = {part: {field.name for field in dataclasses.fields(cls)} for part, cls in parts.items()}
    shown = {action.dest for action in build_parser()._actions if action.help is not argparse.SUPPRESS}
    return {name: [part for part in names if name in names[part]] for name in shown - {"help", "yaml_cfg"}}


def test_every_flag_has_one_kind() -> None:
    flags = places()
    assert not OTHERS & FIELDS.keys()
    unclassified = [
        name for name, parts in flags.items() if name not in FIELDS.keys() | OTHERS and not SECTIONS.keys() & {*parts}
    ]
    assert not unclassified, f"may these change between saving and resuming? {unclassified}"
    assert FIELDS.keys() | OTHERS <= flags.keys() | IN_SOME_VERSIONS
    assert {name for name, parts in flags.items() if len({kind_of(part, name) for part in parts}) > 1} <= OTHERS


def another(value: Any) -> Any:
    """Return any different value; only equality counts."""
    return not value if isinstance(value, bool) else [value, "another"]


@pytest.mark.parametrize("flags", ["", LATENT])
def test_every_difference_has_the_consequence_of_its_kind(flags: str) -> None:
    mine = sections_of(flags)
    saved = flat(mine)
    assert compare(saved, mine, RESUMED) == ([], [])
    spellings = {flag for action in build_parser()._actions for flag in action.option_strings}
    seen = set()
    for section, names in mine.items():
        for name in names if section != "schedule" else ():
            kind = kind_of(section, name)
            if kind in (Kind.ANY, Kind.SCHEDULE) or name in ("bf16", "fp16", "max_position_embeddings"):
                continue
            seen.add(name)
            refused, warned = compare(saved | {name: another(saved[name])}, mine, RESUMED)
            (text,) = refused if kind in (Kind.WEIGHTS, Kind.STATE) else warned
            assert len(refused) + len(warned) == 1 and text.startswith(f"{kind.value}: {flag_of(name)} ")
            assert flag_of(name) in spellings
    if flags:
        assert {*MODEL_FIELDS} <= seen | IN_SOME_VERSIONS | {"max_position_embeddings"}


class Change(NamedTuple):
    """Flags of a run and of the checkpoint that it loads, and what the error and the warning contain, if any."""

    mine: str
    saved: str = ""
    loaded: Loaded = RESUMED
    refused: str = ""
    warned: str = ""


ROPE = "--position-embedding-type rope"
SIGMOID = "--moe-router-score-function sigmoid"
BIASED = f"{SIGMOID} --moe-router-enable-expert-bias"
CHANGED = {
    "shape": Change("--num-layers 4", refused=f"{Kind.WEIGHTS.value}: --num-layers 4: the checkpoint has 2; change"),
    "shape of a model to tune": Change(
        "--swiglu", loaded=WEIGHTS_ONLY, refused="--swiglu given: the checkpoint was saved without it"
    ),
    "a switch that turns off": Change("--disable-bias-linear", refused="--disable-bias-linear given: the checkpoint"),
    "function": Change("--moe-router-topk 3", loaded=WEIGHTS_ONLY, warned="--moe-router-topk 3: the checkpoint has 2"),
    "precision": Change(
        "--bf16",
        refused="--bf16 given: the checkpoint was saved without it; change them, or give --no-load-optim",
        warned="--accumulate-allreduce-grads-in-fp32 given",
    ),
    "precision alone": Change("", "--fp16", WITHOUT_OPTIMIZER, warned="--fp16 missing: the checkpoint has it"),
    "precision of a model to tune": Change("--bf16", loaded=WEIGHTS_ONLY),
    "half precision": Change("--bf16", "--fp16", warned="--fp16 missing: the checkpoint has it; --bf16 given"),
    "optimizer": Change("--optimizer sgd", refused="--optimizer sgd: the checkpoint has adam"),
    "no momentum yet": Change("--optimizer sgd", "--optimizer sgd --sgd-momentum 0", refused="--sgd-momentum 0.9: the"),
    "no momentum now": Change("--optimizer sgd --sgd-momentum 0", "--optimizer sgd", refused="--sgd-momentum 0.0: the"),
    "seed": Change("--seed 7", warned=f"{Kind.DATA.value}: --seed 7: the checkpoint has 1234"),
    "seed of a new run": Change("--seed 7", loaded=WEIGHTS_ONLY),
    "longer samples": Change(f"{ROPE} --seq-length 64", ROPE, warned="--seq-length 64: the checkpoint has 32"),
    "more positions": Change(
        "--seq-length 64", refused="--max-position-embeddings 64: the checkpoint has 32", warned="--seq-length"
    ),
    "rate": Change("--lr 2e-3", refused="--lr 0.002: the checkpoint has 0.001; give --override-opt_param-scheduler"),
    "rate of the flags": Change("--lr 2e-3 --override-opt_param-scheduler", warned="follows the flags: --lr 0.002"),
    "rate of the checkpoint": Change(
        "--lr 2e-3 --use-checkpoint-opt_param-scheduler", warned="follows the checkpoint: --lr 0.002"
    ),
    "rate of a new schedule": Change("--lr 2e-3", loaded=WITHOUT_OPTIMIZER),
    "start of the warmup": Change("--lr-warmup-init 1e-4", warned="follows the flags: --lr-warmup-init 0.0001"),
    "the same length": Change("--lr-decay-samples 40 --lr-warmup-fraction 0"),
    "another length": Change(
        "--train-iters 30", refused="--train-iters or --train-samples (in samples) 60: the checkpoint has 40"
    ),
    "bias": Change(BIASED, SIGMOID, warned="--moe-router-enable-expert-bias given"),
    "no bias": Change(SIGMOID, BIASED, refused="--moe-router-enable-expert-bias missing: the checkpoint has it"),
    "taken from the checkpoint": Change("--use-checkpoint-args --load x", "--swiglu", refused="; leave them out"),
    "layout": Change("--recompute-granularity selective --log-interval 1 --num-workers 1"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_consequences(name: str) -> None:
    mine, saved, loaded, refused, warned = CHANGED[name]
    if "--load x" in mine:
        sections = sections_of("")
        sections["checkpoint"]["use_checkpoint_args"] = True
    else:
        sections = sections_of(mine)
    found = compare(flat(sections_of(saved)), sections, loaded)
    for texts, wanted in zip(found, (refused, warned), strict=True):
        assert len(texts) == bool(wanted), found
        assert all(wanted in text for text in texts), found


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("", False),
        ("--seed 7", False),
        ("--bf16", True),
        ("--bf16 --no-load-optim", False),
        ("--bf16 --finetune", False),
        ("--num-layers 4", True),
        ("--num-layers 4 --finetune", True),
        ("--lr 2e-3", True),
        ("--lr 2e-3 --finetune", False),
    ],
)
def test_flags_are_compared_before_anything_is_built(tmp_path: Path, flags: str, refused: bool) -> None:
    config = config_of("")
    path = tmp_path / "iter_0000003"
    path.mkdir()
    schedule = scheduler_settings(config, run_length(config.train, 1))
    (path / saved_flags.FILE).write_text(saved_flags.to_json(config, schedule))
    for place in (f"--load {tmp_path}", f"--load {tmp_path}/nothing --pretrained-checkpoint {tmp_path}"):
        config = config_of(f"{flags} {place}")
        if refused and (("--load" in place.split("nothing")[0] and "nothing" not in place) or "layers" in flags):
            with pytest.raises(ValueError, match=f"{path}: .*{flags.split()[0]}"):
                check_newest(config, run_length(config.train, 1))
        else:
            check_newest(config, run_length(config.train, 1))


def test_a_damaged_checkpoint_is_left_to_the_search(tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    config = config_of(f"--load {tmp_path}")
    check_newest(config, run_length(config.train, 1))
