"""Command line -> RunConfig.

Megatron's flags are derived by reflection from megatron-core's config dataclasses, the others from ours (config/).
Parsing and checking need no process group: every rank does both before it joins the job, so a mistake stops all ranks.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_balance.checkpoint import saved_flags
from megatron_balance.cli.checks import REQUIRED, Layout, check
from megatron_balance.cli.data_args import data_in_files
from megatron_balance.cli.layer_frequency import parse_layer_frequency
from megatron_balance.cli.megatron_help import TEXTS
from megatron_balance.cli.named_values import named_values
from megatron_balance.cli.parser import HelpFormatter, Parser
from megatron_balance.cli.upstream_flags import ACCEPTED, refusal
from megatron_balance.cli.yaml_file import read_flags
from megatron_balance.config import log_config
from megatron_balance.config import run_config as ours
from megatron_balance.config.flags import add_flags, build, flag_names, in_words
from megatron_balance.device.machine import Machine

INTERNAL_FIELDS = {
    *("enable_autocast", "variable_seq_lengths", "batch_p2p_comm", "batch_p2p_sync", "deallocate_pipeline_outputs"),
    *("virtual_pipeline_model_parallel_size", "gated_linear_unit", "bias_activation_fusion", "softmax_scale"),
    *("num_microbatches_with_partial_activation_checkpoints", "hetereogenous_dist_checkpoint", "fused_single_qkv_rope"),
    *("use_te_rng_tracker", "moe_token_dropping", "memory_efficient_layer_norm", "disable_parameter_transpose_cache"),
    *("tp_only_amax_red", "activation_func_fp8_input_store", "moe_router_topk_limited_devices", "muon_split_qkv"),
    *("store_param_remainders", "decoupled_weight_decay", "preserve_fp32_weights", "use_custom_fsdp", "nccl_ub"),
    *("use_inference_optimized_layers", "gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
    *("cuda_graph_use_single_mempool", "soap_shampoo_beta", "soap_precondition_frequency", "soap_use_kl_shampoo"),
    *("adaptive_muon_moment2_method", "adaptive_muon_beta2", "adaptive_muon_eps", "grad_norm_skip_threshold"),
    *("use_layer_wise_distributed_optimizer", "num_buckets", "param_name_patterns_for_fp32_local_accumulation"),
    *("fsdp_all_gather_in_start_param_sync",),
}
"""Fields of megatron-core's dataclasses that have no flag: they are derived below, or internal to megatron-core."""

PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}

OPTIMIZER_PRECISIONS = {
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "fp16", "bf16", "fp8"),
}
"""Precisions in which the precision-aware optimizer may keep its state."""

MEGATRON_FLAGS: dict[str, dict[str, Any]] = {
    "num_moe_experts": {"arg_names": ["--num-experts"]},
    "window_size": {"type": lambda text: _window(text), "nargs": None, "metavar": "LEFT,RIGHT"},
    "moe_layer_freq": {"type": lambda text: parse_layer_frequency(text), "default": 1, "metavar": "LAYERS"},
    "moe_router_load_balancing_type": {
        "nargs": "+",
        "choices": ["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"],
        "default": "aux_loss",
    },
    "cp_comm_type": {"nargs": "+", "choices": ["p2p", "all_gather", "a2a", "a2a+p2p"], "default": ["p2p"]},
    "no_rope_freq": {"type": lambda text: parse_layer_frequency(text), "metavar": "LAYERS"},
    "window_attn_skip_freq": {"type": lambda text: parse_layer_frequency(text), "metavar": "LAYERS"},
    "moe_aux_loss_coeff": {"type": float, "nargs": "+", "default": 0.0},
    "pipeline_model_parallel_layout": {"type": str, "metavar": "LAYOUT"},
    "num_layers_in_first_pipeline_stage": {"arg_names": ["--decoder-first-pipeline-num-layers"]},
    "num_layers_in_last_pipeline_stage": {"arg_names": ["--decoder-last-pipeline-num-layers"]},
    "masked_softmax_fusion": {"arg_names": ["--no-masked-softmax-fusion"], "action": "store_false", "default": True},
    "bias_dropout_fusion": {"arg_names": ["--no-bias-dropout-fusion"], "action": "store_false", "default": True},
    "apply_rope_fusion": {"arg_names": ["--no-rope-fusion"], "action": "store_false", "default": True},
    "persist_layer_norm": {"arg_names": ["--no-persist-layer-norm"], "action": "store_false", "default": True},
    "gradient_accumulation_fusion": {
        "arg_names": ["--no-gradient-accumulation-fusion"],
        "action": "store_false",
        "default": True,
    },
    "overlap_p2p_comm": {"arg_names": ["--no-overlap-p2p-communication"], "action": "store_false", "default": True},
    "attention_softmax_in_fp32": {
        "action": "store_true",
        "arg_names": ["--attention-softmax-in-fp32"],
        "default": False,
    },
    "min_lr": {"default": 0.0},
    "q_lora_rank": {"default": None},
    "kv_lora_rank": {"default": 32},
    "rotary_scaling_factor": {"default": 1.0},
    "rope_type": {"choices": ["rope", "yarn"], "default": None},
    "optimizer": {"choices": ["adam", "sgd"]},
    **{name: {"choices": list(choices), "default": "fp32"} for name, choices in OPTIMIZER_PRECISIONS.items()},
    "grad_reduce_in_fp32": {"arg_names": ["--accumulate-allreduce-grads-in-fp32"]},
    "bucket_size": {"arg_names": ["--ddp-bucket-size"]},
    "check_for_nan_in_grad": {
        "arg_names": ["--no-check-for-nan-in-loss-and-grad"],
        "action": "store_false",
        "default": True,
    },
    "barrier_with_L1_time": {"action": "store_false", "default": True},
    "align_param_gather": {"arg_names": ["--no-align-param-gather"], "action": "store_false", "default": True},
    "average_in_collective": {"arg_names": ["--ddp-average-in-collective"]},
    "pad_buckets_for_high_nccl_busbw": {"arg_names": ["--ddp-pad-buckets-for-high-nccl-busbw"]},
    "reduce_scatter_with_fp32_accumulation": {"arg_names": ["--ddp-reduce-scatter-with-fp32-accumulation"]},
}
"""Upstream's flag names, types and defaults, where they differ from the field's."""

SHORTHANDS = {
    "--recompute-activations": ("recompute_granularity", "selective"),
    "--use-rotary-position-embeddings": ("position_embedding_type", "rope"),
}
"""Upstream's switches that set the value of another flag."""

MEGATRON_CLASSES = (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)

OF_MODELS = (TransformerConfig, ours.ModelConfig)

DIVIDED = (*MEGATRON_CLASSES, ours.ModelConfig, ours.LaunchConfig)
"""Dataclasses whose fields TEXTS divides among the groups of `--help`. A group that is not in TEXTS shows
all remaining fields."""

GROUPS = (
    ("expert balancing (megatron_balance)", ours.BalanceConfig),
    ("expert communication (megatron_balance)", ours.CommConfig),
    *((title, cls) for title in ("model", "attention", "mixture of experts") for cls in OF_MODELS),
    ("multi-latent attention", MLATransformerConfig),
    *(("parallelism", cls) for cls in OF_MODELS),
    ("data parallelism", DistributedDataParallelConfig),
    ("data parallelism", ours.LaunchConfig),
    ("precision", TransformerConfig),
    ("recomputation", TransformerConfig),
    ("training", ours.TrainConfig),
    ("learning rate and weight decay", ours.SchedulerConfig),
    ("optimizer", OptimizerConfig),
    ("data", ours.DataConfig),
    ("tokenizer", ours.TokenizerConfig),
    ("checkpointing", ours.CheckpointConfig),
    *(("kernels", cls) for cls in OF_MODELS),
    ("processes", ours.LaunchConfig),
    ("logging", log_config.LogConfig),
    ("logging", TransformerConfig),
    ("profiling", log_config.ProfilingConfig),
    *(("other", cls) for cls in DIVIDED),
)
"""Titles of the groups of `--help`, and the dataclasses whose fields they show."""


class Parsed(NamedTuple):
    """A checked command line."""

    config: ours.RunConfig
    notices: list[str]
    """Decisions made for the user, one sentence each, to be logged once."""

    flags: dict[str, str]
    """Value of every flag that has an effect, whether given or left at its default."""


@functools.cache
def build_parser() -> Parser:
    """Return the parser with all flags, grouped as `--help` shows them."""
    parser = Parser(
        usage="pretrain_gpt_moe.py [@FILE] [flags]  (--help shows them)",
        description="Train a GPT with mixture-of-experts layers on megatron-core. @FILE stands for the flags in FILE. "
        "Megatron-LM's flags keep their names, defaults and meanings; docs/flags.md also lists those that are refused.",
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--yaml-cfg", metavar="FILE", help="Read flags from a YAML file; flags on the command line override them."
    )
    skip = INTERNAL_FIELDS | {field.name for field in _megatron_fields() if _is_without_effect(field)}
    metadata = MEGATRON_FLAGS | named_values()
    for texts in TEXTS.values():
        metadata |= {name: metadata.get(name, {}) | {"help": text} for name, text in texts.items() if text}
    groups: dict[str, Any] = {}
    for title, cls in GROUPS:
        group = groups[title] = groups.get(title) or parser.add_argument_group(title)
        here = TEXTS.get(title) if cls in DIVIDED else None
        elsewhere = set() if here is None else {field.name for field in dataclasses.fields(cls)} - here.keys()
        add_flags(group, cls, skip=skip | elsewhere, metadata=metadata)
    for title, texts in TEXTS.items():
        places = {name: place for place, name in enumerate(texts)}
        groups[title]._group_actions.sort(key=lambda action, places=places: places.get(action.dest, -1))
    for flag, (name, value) in SHORTHANDS.items():
        group = next(one for one in groups.values() if any(action.dest == name for action in one._group_actions))
        text = f"Short for --{name.replace('_', '-')} {value}."
        group.add_argument(flag, action="store_const", dest=name, const=value, help=text)
    _mark_required(parser)
    parser.add_without_effect(ACCEPTED)
    parser.refuse_values()
    return parser


def _mark_required(parser: Parser) -> None:
    """Append to the help of each required flag that it, or one of several flags, is required."""
    actions = {action.dest: action for action in parser._actions}
    for names in REQUIRED:
        some = [actions[name] for name in names.split()]
        *others, last = [action.option_strings[0] for action in some]
        text = f"One of {', '.join(others)} and {last} is required." if others else "Required."
        for action in some:
            action.help = f"{action.help} {text}"


def parse_args(argv: Sequence[str], machine: Machine) -> Parsed:
    """Parse and check a command line on a machine with `machine.world_size` processes.

    Raises:
        ValueError: the flags contradict each other; the error names the flag, the value and the remedy.
        SystemExit: argparse's own errors (unknown flag, not a number) and `--help`.
    """
    parser = build_parser()
    argv = parser.expanded(argv)
    argv = [*yaml_flags(parser, argv), *argv]
    args = parser.parse_args(argv)
    given = given_fields(parser, argv)
    if args.use_checkpoint_args:
        if args.load is None:
            raise ValueError("--use-checkpoint-args: also give --load")
        saved = saved_flags.read_newest(Path(args.load), args.ckpt_step)
        # Where a field has several flags, its shorthands come last
        actions = {action.dest: action for action in reversed(parser._actions)}
        taken = (saved.keys() & actions.keys()) - given
        vars(args).update({name: saved_flags.as_flag(actions[name], saved[name]) for name in taken})
    _check_finite(parser, args)
    values = vars(args)
    values |= data_in_files(values)
    layout, notices = check(values, given, machine)
    try:
        return Parsed(_run_config(values, layout), without_effect(given) + notices, _as_written(parser, values))
    except (AssertionError, ImportError, RuntimeError) as error:
        raise ValueError(f"megatron-core refuses this combination of flags: {error}") from error


def given_fields(parser: Parser, argv: Sequence[str]) -> set[str]:
    """Return the fields whose flags are on a command line, which `parser` accepts."""
    unset = object()
    blank = argparse.Namespace(**{action.dest: unset for action in parser._actions})
    return {name for name, value in vars(parser.parse_args(argv, blank)).items() if value is not unset}


def yaml_flags(parser: Parser, argv: Sequence[str]) -> list[str]:
    """Return the flags in the file of `--yaml-cfg`, after parsing them separately so that an error names the file.

    Raises:
        ValueError: the file is not a mapping of flags to values.
        SystemExit: argparse's own errors about a value in the file.
    """
    path = parser.parse_args(argv).yaml_cfg
    if path is None:
        return []
    flags = read_flags(path, parser)
    parser.source = f"{path}: "
    try:
        _check_finite(parser, parser.parse_args(flags))
    finally:
        parser.source = ""
    return flags


def _check_finite(parser: Parser, args: argparse.Namespace) -> None:
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            parser.error(f"argument {action.option_strings[0]}: {value} is not a finite number")


def _as_written(parser: Parser, values: Mapping[str, Any]) -> dict[str, str]:
    flags: dict[str, argparse.Action] = {}
    for action in parser._actions:
        # A flag without an effect has its own name as its destination, not that of a field
        if action.dest in values and not action.dest.startswith("--") and action.dest != "yaml_cfg":
            flags.setdefault(action.dest, action)
    return {
        action.option_strings[0]: _given(values[dest] == action.const)
        if action.nargs == 0
        else in_words(values[dest]) or "not given"
        for dest, action in flags.items()
    }


def _given(given: bool) -> str:
    return "given" if given else "not given"


def without_effect(given: Collection[str]) -> list[str]:
    """Return a notice for each of the given flags that is accepted without effect."""
    reasons = {entry.partition(" ")[0]: reason for entry, reason in ACCEPTED.items()}
    return [f"{flag}: {reason}" for flag, reason in reasons.items() if flag in given]


def _megatron_fields() -> list[dataclasses.Field]:
    return [field for cls in MEGATRON_CLASSES for field in dataclasses.fields(cls)]


def _is_without_effect(field: dataclasses.Field) -> bool:
    """Return whether the flag of one of megatron-core's fields is refused, or accepted without effect."""
    names = MEGATRON_FLAGS.get(field.name, {}).get("arg_names") or flag_names(field)
    accepted = {entry.partition(" ")[0] for entry in ACCEPTED}
    return any(refusal(name) or name in accepted for name in names)


def _run_config(values: Mapping[str, Any], layout: Layout) -> ours.RunConfig:
    """Build the configuration from checked flags."""
    dtype = torch.bfloat16 if values["bf16"] else torch.float16 if values["fp16"] else torch.float32
    return ours.RunConfig(
        transformer=_transformer_config(values, layout, dtype),
        optimizer=build(
            OptimizerConfig,
            values,
            params_dtype=dtype,
            # megatron-core saves only the 16 bits that main parameters have in addition to the weights, as float32
            # numbers: no other optimizer can resume from them, and FusedAdam refuses to load them
            store_param_remainders=False,
            **{name: PRECISIONS[values[name]] for name in OPTIMIZER_PRECISIONS},
        ),
        ddp=build(
            DistributedDataParallelConfig,
            values,
            grad_reduce_in_fp32=values["grad_reduce_in_fp32"] or (values["bf16"] and not values["grad_reduce_in_bf16"]),
            align_param_gather=layout.align_param_gather,
        ),
        balance=build(ours.BalanceConfig, values),
        comm=build(ours.CommConfig, values),
        model=build(ours.ModelConfig, values, max_position_embeddings=layout.max_position_embeddings),
        tokenizer=build(ours.TokenizerConfig, values, tokenizer_type=layout.tokenizer_type),
        data=build(ours.DataConfig, values, split=layout.split),
        train=build(ours.TrainConfig, values, global_batch_size=layout.global_batch_size),
        checkpoint=build(ours.CheckpointConfig, values),
        scheduler=build(ours.SchedulerConfig, values),
        log=build(log_config.LogConfig, values),
        profiling=build(log_config.ProfilingConfig, values),
        launch=build(ours.LaunchConfig, values, distributed_backend=layout.backend),
    )


def _transformer_config(values: Mapping[str, Any], layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    activations = {"swiglu": F.silu, "quick_geglu": quick_gelu, "squared_relu": squared_relu}
    activation = next((activations[name] for name in activations if values[name]), F.gelu)
    latent = values["multi_latent_attention"]
    return build(
        MLATransformerConfig if latent else TransformerConfig,
        values,
        **({"rope_type": values["rope_type"] or "yarn"} if latent else {}),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gated_linear_unit=values["swiglu"] or values["quick_geglu"],
        activation_func=activation,
        num_query_groups=values["num_query_groups"] if values["group_query_attention"] else None,
        ffn_hidden_size=layout.ffn_hidden_size,
        moe_ffn_hidden_size=layout.moe_ffn_hidden_size,
        moe_token_dispatcher_type=layout.moe_token_dispatcher_type,
        moe_shared_expert_overlap=layout.moe_shared_expert_overlap,
        sequence_parallel=layout.sequence_parallel,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_size,
        transformer_impl=layout.transformer_impl,
        moe_router_load_balancing_type=_single(values["moe_router_load_balancing_type"]),
        moe_aux_loss_coeff=_single(values["moe_aux_loss_coeff"]),
        cp_comm_type=values["cp_comm_type"][0],
        batch_p2p_comm=not layout.overlap_p2p_comm,
        cuda_graph_scope=[],
        # gloo may still read an output while the schedule frees it; NCCL orders the two by streams
        deallocate_pipeline_outputs=layout.backend == "nccl",
        **{name: getattr(layout, name) for name in layout.FUSIONS},
    )


def _single(value: Any) -> Any:
    """Return the element of a list of one: megatron-core takes any list to mean several auxiliary losses."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _window(text: str) -> tuple[int, int]:
    """Parse `--window-size`: `128,0` or `(128,0)`."""
    try:
        left, right = (int(part) for part in text.strip("()[] ").split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: give two integers such as 128,0") from error
    return left, right
