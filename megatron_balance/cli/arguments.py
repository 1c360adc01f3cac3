"""Command line -> RunConfig.

Megatron's flags are derived by reflection from megatron-core's config dataclasses, the other flags from ours (config/).
Parsing and checking need no process group: every rank does both before it joins the job, so a mistake stops all ranks.
"""

import argparse
import ast
import dataclasses
import functools
import itertools
import math
import operator
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_balance.checkpoint import saved_flags
from megatron_balance.cli.checks import REQUIRED, check, data_in_files
from megatron_balance.cli.command_line import CommandLine
from megatron_balance.cli.flag_groups import DIVIDED, GROUPS, field_help
from megatron_balance.cli.parser import HelpFormatter, Parser
from megatron_balance.cli.upstream_flags import ACCEPTED
from megatron_balance.cli.yaml_file import read_flags
from megatron_balance.config.flags import add_flag, add_flags, build, flag_of, in_words
from megatron_balance.config.run_config import ModelConfig, RunConfig
from megatron_balance.device.machine import Machine

_OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul}


def _layers(text: str) -> int | list[int]:
    """Parse an integer N, or a list expression of zeros and ones such as `([0]*1+[1]*23)`."""
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: give an integer or a list like ([0]*1+[1]*23)") from error
    if value >= 1 if isinstance(value, int) else value and all(entry in (0, 1) for entry in value):
        return value
    raise argparse.ArgumentTypeError(f"{text[:80]!r}: give a positive integer or a list of zeros and ones")


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not allowed")


def _window(text: str) -> tuple[int, int]:
    """Parse `--window-size`: `128,0` or `(128,0)`."""
    try:
        left, right = (int(part) for part in text.strip("()[] ").split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: give two integers such as 128,0") from error
    return left, right


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}

OPTIMIZER_PRECISIONS = {
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp_avg_sq_dtype": ("fp32", "fp16", "bf16", "fp8"),
}
"""Precisions of the state of the precision-aware optimizer."""

TURNED_OFF = (
    *("masked_softmax_fusion", "bias_dropout_fusion", "apply_rope_fusion", "persist_layer_norm"),
    *("gradient_accumulation_fusion", "overlap_p2p_comm", "check_for_nan_in_grad", "align_param_gather"),
    "barrier_with_L1_time",
)
"""Fields that are on unless upstream's flag turns them off, whatever megatron-core's default is."""

QUANTILES = ["quantile_balancing"] * hasattr(TransformerConfig, "moe_router_quantile_balancing_ema")
"""The kind of load balancing that megatron-core has since 0.19."""

MEGATRON_FLAGS: dict[str, dict[str, Any]] = {
    "window_size": {"type": _window, "nargs": None, "metavar": "LEFT,RIGHT"},
    "moe_layer_freq": {"type": _layers, "default": 1, "metavar": "LAYERS"},
    "moe_router_load_balancing_type": {
        "nargs": "+",
        "choices": ["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", *QUANTILES, "none"],
        "default": "aux_loss",
    },
    "cp_comm_type": {"nargs": "+", "choices": ["p2p", "all_gather", "a2a", "a2a+p2p"], "default": ["p2p"]},
    "no_rope_freq": {"type": _layers, "metavar": "LAYERS"},
    "window_attn_skip_freq": {"type": _layers, "metavar": "LAYERS"},
    "moe_aux_loss_coeff": {"type": float, "nargs": "+", "default": 0.0},
    "pipeline_model_parallel_layout": {"type": str, "metavar": "LAYOUT"},
    "attention_softmax_in_fp32": {"action": "store_true", "default": False},
    **{name: {"action": "store_false", "default": True} for name in TURNED_OFF},
    "min_lr": {"default": 0.0},
    "q_lora_rank": {"default": None},
    "kv_lora_rank": {"default": 32},
    "rotary_scaling_factor": {"default": 1.0},
    "rope_type": {"choices": ["rope", "yarn"], "default": None},
    "optimizer": {"choices": ["adam", "sgd", "muon"]},
    "muon_momentum": {"default": 0.9},
    "muon_scale_mode": {"choices": ["spectral", "unit_rms_norm", "shape_scaling"]},
    "muon_fp32_matmul_prec": {"choices": ["low", "medium", "high"]},
    "muon_tp_mode": {"choices": ["blockwise", "duplicated", "distributed"]},
    **{name: {"choices": list(choices), "default": "fp32"} for name, choices in OPTIMIZER_PRECISIONS.items()},
}
"""Types and defaults of upstream's flags that differ from the field's."""

SHORTHANDS = {
    "--recompute-activations": ("recompute_granularity", "selective"),
    "--use-rotary-position-embeddings": ("position_embedding_type", "rope"),
}
"""Upstream's switches that set the value of another flag."""


YARN = tuple(field.name for field in dataclasses.fields(ModelConfig) if field.name.startswith("yarn_"))
"""Fields of YaRN without latent attention."""


class Parsed(NamedTuple):
    """A checked command line."""

    config: RunConfig
    notices: list[str]
    """Decisions made for the user, one sentence each, to be logged once."""

    flags: dict[str, str]
    """Value of every flag that has an effect, given or default."""


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
    fields = {field.name: cls for cls in reversed(DIVIDED) for field in dataclasses.fields(cls)}
    for title, shown in GROUPS.items():
        group = parser.add_argument_group(title)
        if isinstance(shown, type):
            add_flags(group, shown, field_help(shown))
            continue
        for name in filter(fields.__contains__, shown):
            add_flag(group, fields[name], name, field_help(fields[name]).get(name, ""), MEGATRON_FLAGS.get(name, {}))
        for flag, (name, value) in SHORTHANDS.items():
            if name in shown:
                text = f"Short for {flag_of(name)} {value}."
                group.add_argument(flag, action="store_const", dest=name, const=value, help=text)
    for names in REQUIRED:
        *others, last = map(flag_of, names.split())
        text = f"One of {', '.join(others)} and {last} is required." if others else "Required."
        for action in parser._actions:
            if action.dest in names.split():
                action.help = f"{action.help} {text}"
    parser.add_without_effect(ACCEPTED)
    parser.refuse_values()
    return parser


def parse_args(argv: Sequence[str], machine: Machine) -> Parsed:
    """Parse and check a command line on a machine with `machine.world_size` processes.

    ValueError: the flags contradict each other. SystemExit: argparse's own errors, and `--help`.
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
        # Keep the first flag of each field; later ones are shorthands
        actions = {action.dest: action for action in reversed(parser._actions)}
        taken = (saved.keys() & actions.keys()) - given
        vars(args).update({name: saved_flags.as_flag(actions[name], saved[name]) for name in taken})
    _check_finite(parser, args)
    vars(args).update(data_in_files(vars(args)))
    line = check(vars(args), given, machine)
    try:
        config = _run_config(line)
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        fields = "|".join(name for name in vars(line) if "_" in name)
        reason = re.sub(rf"\b({fields})\b", lambda name: flag_of(name[0]), str(error))
        raise ValueError(f"megatron-core refuses this combination of flags: {reason}") from error
    _check_recomputed_layers(config.transformer)
    return Parsed(config, line.notices, _as_written(parser, vars(args)))


def given_fields(parser: Parser, argv: Sequence[str]) -> set[str]:
    """Return the fields whose flags are on a command line that `parser` accepts."""
    unset = object()
    blank = argparse.Namespace(**{action.dest: unset for action in parser._actions})
    return {name for name, value in vars(parser.parse_args(argv, blank)).items() if value is not unset}


def yaml_flags(parser: Parser, argv: Sequence[str]) -> list[str]:
    """Return the flags in the file of `--yaml-cfg`. They are parsed separately, so that an error names the file."""
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
    written: dict[str, str] = {}
    # Keep the first flag of each field; later ones are shorthands. A flag without an effect is its own destination
    for name, action in reversed({action.dest: action for action in reversed(parser._actions)}.items()):
        if name in values and name != "yaml_cfg" and not name.startswith("--"):
            value = values[name]
            text = ("given" if value == action.const else "") if action.nargs == 0 else in_words(value)
            written[action.option_strings[0]] = text or "not given"
    return written


def _run_config(line: CommandLine) -> RunConfig:
    values = vars(line)
    dtype = torch.bfloat16 if line.bf16 else torch.float16 if line.fp16 else torch.float32
    special: dict[str, Any] = {
        "transformer": _transformer_config(line, dtype),
        "optimizer": build(
            OptimizerConfig,
            values,
            params_dtype=dtype,
            # With remainders, megatron-core saves only the low 16 bits of main parameters, as float32 numbers. No other
            # optimizer can resume from them, and FusedAdam refuses to load them
            store_param_remainders=False,
            **{name: PRECISIONS[values[name]] for name in OPTIMIZER_PRECISIONS},
        ),
        "ddp": build(
            DistributedDataParallelConfig,
            values,
            grad_reduce_in_fp32=line.grad_reduce_in_fp32 or (line.bf16 and not line.grad_reduce_in_bf16),
        ),
    }
    return run_config(values, special)


def run_config(values: Mapping[str, Any], special: Mapping[str, Any]) -> RunConfig:
    """Construct a RunConfig from its `special` sections, and the others from `values` by the fields' names."""
    parts = typing.get_type_hints(RunConfig)
    return RunConfig(**{name: special.get(name) or build(cls, values) for name, cls in parts.items()})


def _transformer_config(line: CommandLine, dtype: torch.dtype) -> TransformerConfig:
    activations = {"swiglu": F.silu, "quick_geglu": quick_gelu, "squared_relu": squared_relu}
    latent = line.multi_latent_attention
    config = build(
        MLATransformerConfig if latent else TransformerConfig,
        vars(line),
        **({"rope_type": line.rope_type or "yarn"} if latent else {}),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gated_linear_unit=line.swiglu or line.quick_geglu,
        activation_func=next((activations[name] for name in activations if getattr(line, name)), F.gelu),
        num_query_groups=line.num_query_groups if line.group_query_attention else None,
        moe_router_load_balancing_type=_single(line.moe_router_load_balancing_type),
        moe_aux_loss_coeff=_single(line.moe_aux_loss_coeff),
        cp_comm_type=line.cp_comm_type[0],
        batch_p2p_comm=not line.overlap_p2p_comm,
        cuda_graph_scope=[],
        # gloo may still read an output while the schedule frees it; NCCL orders the two by streams
        deallocate_pipeline_outputs=line.distributed_backend == "nccl",
        overlap_moe_expert_parallel_comm=False,
        moe_router_enable_expert_bias=False,
    )
    # megatron-core's checks are for its own implementations: its expert biases need sigmoid scores, and its paired
    # passes know neither float32 nor full recomputation
    config.moe_router_enable_expert_bias = line.moe_router_enable_expert_bias
    config.overlap_moe_expert_parallel_comm = line.overlap_moe_expert_parallel_comm
    if line.position_embedding_type == "yarn":
        # megatron-core reads attributes that are no fields; one of them alone makes it scale queries and keys
        for name in YARN:
            setattr(config, name, getattr(line, name))
    return config


def _check_recomputed_layers(config: TransformerConfig) -> None:
    """Check that units of recomputation divide each model chunk; megatron-core would look for layers after the last."""
    if config.recompute_granularity != "full" or config.recompute_method != "uniform":
        return
    assert config.recompute_num_layers is not None
    stages = range(config.pipeline_model_parallel_size)
    chunks = range(config.virtual_pipeline_model_parallel_size or 1)
    layout: Any = config.pipeline_model_parallel_layout
    for stage, chunk in itertools.product(stages, chunks):
        if layout is None:
            virtual = None if config.virtual_pipeline_model_parallel_size is None else chunk
            layers = get_num_layers_to_build(config, virtual, stage)
        else:
            layers = layout.layout[stage][chunk].count(LayerType.decoder)
        if layers % config.recompute_num_layers:
            must = (
                f"with --recompute-method uniform it must divide the layers of each stage or model chunk, here {layers}"
            )
            raise ValueError(f"--recompute-num-layers {config.recompute_num_layers}: {must}; use 1, or block")


def _single(value: Any) -> Any:
    """Unwrap a list of one: megatron-core takes any list to mean several auxiliary losses."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
