"""Command line -> RunConfig.

Megatron's flags come by reflection from megatron-core's config dataclasses, the rest from ours (config.py). Parsing and
checking need no process group: every rank does both before it joins the job, so a mistake stops all of them.
"""

import argparse
import ast
import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance import config as ours
from megatron_balance.checks import NOT_YET, REFUSED, UNSUPPORTED_FIELDS, Layout, Machine, check
from megatron_balance.flags import add_flags, build, flag_names

FREQUENCY_LIMIT = 100_000
"""Longest list that a --moe-layer-freq expression may build."""

INTERNAL_FIELDS = {
    *("params_dtype", "pipeline_dtype", "autocast_dtype", "enable_autocast", "variable_seq_lengths"),
    *("virtual_pipeline_model_parallel_size", "gated_linear_unit", "activation_func", "bias_activation_fusion"),
    *("num_microbatches_with_partial_activation_checkpoints", "batch_p2p_comm", "batch_p2p_sync"),
    *("deallocate_pipeline_outputs", "hetereogenous_dist_checkpoint", "heterogeneous_block_specs"),
    *("pipeline_model_parallel_layout", "cp_comm_type", "use_te_rng_tracker", "tp_comm_atomic_ag", "tp_comm_atomic_rs"),
    *(
        "moe_token_dropping",
        "memory_efficient_layer_norm",
        "fused_single_qkv_rope",
        "disable_parameter_transpose_cache",
    ),
    *("tp_only_amax_red", "activation_func_fp8_input_store", "quant_recipe", "moe_router_topk_limited_devices"),
    *("store_param_remainders", "decoupled_weight_decay", "preserve_fp32_weights", "use_custom_fsdp", "nccl_ub"),
    *("use_inference_optimized_layers", "average_in_collective", "timers", "muon_split_qkv", "softmax_scale"),
    *("async_tensor_model_parallel_allreduce", "moe_extended_tp", "config_logger_dir", "barrier_with_L1_time"),
    *("use_cpu_initialization",),
}
"""Fields of megatron-core's dataclasses that no flag sets: derived below, or megatron-core's own business."""

MEGATRON_FLAGS: dict[str, dict[str, Any]] = {
    "num_moe_experts": {"arg_names": ["--num-experts"]},
    "window_size": {"type": lambda text: _window(text), "nargs": None},
    "moe_layer_freq": {"type": lambda text: parse_layer_frequency(text), "default": 1},
    "moe_router_load_balancing_type": {
        "nargs": "+",
        "choices": ["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"],
        "default": "aux_loss",
    },
    "moe_aux_loss_coeff": {"type": float, "nargs": "+", "default": 0.0},
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
    "optimizer": {"choices": ["adam", "sgd"]},
    "grad_reduce_in_fp32": {"arg_names": ["--accumulate-allreduce-grads-in-fp32"]},
    "bucket_size": {"arg_names": ["--ddp-bucket-size"]},
    "check_for_nan_in_grad": {
        "arg_names": ["--no-check-for-nan-in-loss-and-grad"],
        "action": "store_false",
        "default": True,
    },
    "align_param_gather": {"arg_names": ["--no-align-param-gather"], "action": "store_false", "default": True},
    "average_in_collective": {"arg_names": ["--ddp-average-in-collective"]},
    "pad_buckets_for_high_nccl_busbw": {"arg_names": ["--ddp-pad-buckets-for-high-nccl-busbw"]},
    "reduce_scatter_with_fp32_accumulation": {"arg_names": ["--ddp-reduce-scatter-with-fp32-accumulation"]},
}
"""Upstream's spelling and default where they differ from the field's."""

GROUPS = (
    ("model", ours.ModelConfig),
    ("training", ours.TrainConfig),
    ("checkpointing", ours.CheckpointConfig),
    ("learning rate and weight decay", ours.SchedulerConfig),
    ("data", ours.DataConfig),
    ("tokenizer", ours.TokenizerConfig),
    ("logging", ours.LogConfig),
    ("processes", ours.LaunchConfig),
    ("expert balancing (megatron_balance)", ours.BalanceConfig),
    ("expert communication (megatron_balance)", ours.CommConfig),
    ("transformer (megatron-core)", TransformerConfig),
    ("optimizer (megatron-core)", OptimizerConfig),
    ("data parallelism (megatron-core)", DistributedDataParallelConfig),
)


class Parsed(NamedTuple):
    """A checked command line."""

    config: ours.RunConfig
    notices: list[str]
    """What was decided for the user, one sentence each, to be logged once."""


class _Refuse(argparse.Action):
    """A flag of Megatron's that would be misunderstood: it ends the run with the reason."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        parser.error(f"{option}: {self.metavar}")


def build_parser() -> argparse.ArgumentParser:
    """All flags, grouped as `--help` shows them."""
    parser = argparse.ArgumentParser(
        usage="pretrain_gpt_moe.py [flags]  (--help shows them)",
        description="Train a GPT with mixture-of-experts layers on megatron-core.",
        allow_abbrev=False,
    )
    unsupported = [field for field in _megatron_fields() if _unsupported_reason(field.name)]
    skip = INTERNAL_FIELDS | {field.name for field in unsupported}
    for title, cls in GROUPS:
        add_flags(parser.add_argument_group(title), cls, skip=skip, metadata=MEGATRON_FLAGS)
    refused = {flag: _unsupported_reason(field.name) for field in unsupported for flag in flag_names(field)}
    for flag, reason in (refused | REFUSED | NOT_YET).items():
        _add_refused(parser, flag, reason)
    return parser


def parse_args(argv: Sequence[str], machine: Machine) -> Parsed:
    """Parse and check a command line on a machine with `machine.world_size` processes.

    Raises:
        ValueError: flags contradict each other; names the flag, the value and the remedy.
        SystemExit: argparse's own errors (unknown flag, not a number) and `--help`.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    unset = object()
    blank = argparse.Namespace(**dict.fromkeys(vars(args), unset))
    given = {name for name, value in vars(parser.parse_args(argv, blank)).items() if value is not unset}
    values = vars(args)
    layout, notices = check(values, given, machine)
    try:
        return Parsed(_run_config(values, layout), notices)
    except AssertionError as error:
        raise ValueError(f"megatron-core refuses this combination of flags: {error}") from error


def _add_refused(parser: argparse.ArgumentParser, flag: str, reason: str) -> None:
    parser.add_argument(flag, action=_Refuse, nargs="*", dest=argparse.SUPPRESS, metavar=reason, help=argparse.SUPPRESS)


def _megatron_fields() -> list[dataclasses.Field]:
    classes = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    return [field for cls in classes for field in dataclasses.fields(cls) if field.name not in INTERNAL_FIELDS]


def _unsupported_reason(name: str) -> str:
    return next((reason for prefix, reason in UNSUPPORTED_FIELDS.items() if name.startswith(prefix)), "")


def _run_config(values: Mapping[str, Any], layout: Layout) -> ours.RunConfig:
    """Checked flags -> the configuration objects that the rest of the program is built from."""
    dtype = torch.bfloat16 if values["bf16"] else torch.float16 if values["fp16"] else torch.float32
    return ours.RunConfig(
        transformer=_transformer_config(values, layout, dtype),
        optimizer=build(OptimizerConfig, values, params_dtype=dtype),
        ddp=build(
            DistributedDataParallelConfig,
            values,
            grad_reduce_in_fp32=values["grad_reduce_in_fp32"] or values["bf16"],
        ),
        balance=build(ours.BalanceConfig, values),
        comm=build(ours.CommConfig, values),
        model=build(ours.ModelConfig, values, max_position_embeddings=layout.max_position_embeddings),
        tokenizer=build(ours.TokenizerConfig, values),
        data=build(ours.DataConfig, values, split=layout.split),
        train=build(ours.TrainConfig, values, global_batch_size=layout.global_batch_size),
        checkpoint=build(ours.CheckpointConfig, values),
        scheduler=build(ours.SchedulerConfig, values),
        log=build(ours.LogConfig, values),
        launch=build(ours.LaunchConfig, values, distributed_backend=layout.backend),
    )


def _transformer_config(values: Mapping[str, Any], layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    activation = F.silu if values["swiglu"] else squared_relu if values["squared_relu"] else F.gelu
    return build(
        TransformerConfig,
        values,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gated_linear_unit=values["swiglu"],
        activation_func=activation,
        num_query_groups=values["num_query_groups"] if values["group_query_attention"] else None,
        ffn_hidden_size=layout.ffn_hidden_size,
        moe_ffn_hidden_size=layout.moe_ffn_hidden_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_size,
        transformer_impl=layout.transformer_impl,
        moe_router_load_balancing_type=_single(values["moe_router_load_balancing_type"]),
        moe_aux_loss_coeff=_single(values["moe_aux_loss_coeff"]),
        batch_p2p_comm=not layout.overlap_p2p_comm,
        cuda_graph_scope=[],
        # gloo still reads an output that the schedule frees; NCCL orders the two by streams
        deallocate_pipeline_outputs=layout.backend == "nccl",
        **{name: getattr(layout, name) for name in layout.FUSIONS},
    )


def _single(value: Any) -> Any:
    """A list of one as its element: megatron-core takes a list to mean several auxiliary losses."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _window(text: str) -> tuple[int, int]:
    """`--window-size`: `128,0` or `(128,0)`."""
    try:
        left, right = (int(part) for part in text.strip("() ").split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: give two integers such as 128,0") from error
    return left, right


_OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul}


def parse_layer_frequency(text: str) -> int | list[int]:
    """`--moe-layer-freq`: an integer N, or a list expression such as `([0]*1+[1]*23)` of zeros and ones.

    Only integers, lists, `+` and `*` are understood; nothing is evaluated as Python.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: give an integer or a list like ([0]*1+[1]*23)") from error
    if isinstance(value, int) and value >= 1:
        return value
    if isinstance(value, list) and value and all(entry in (0, 1) for entry in value):
        return value
    raise argparse.ArgumentTypeError(f"{text[:80]!r}: give a positive integer or a list of zeros and ones")


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_entry(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        size = max(_length(left) + _length(right), _length(left) * _scale(right), _length(right) * _scale(left))
        if size > FREQUENCY_LIMIT or _scale(left) * _scale(right) > FREQUENCY_LIMIT:
            raise ValueError("too long")
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("not allowed")


def _entry(node: ast.expr) -> int:
    value = _evaluate(node)
    if isinstance(value, list):
        raise ValueError("a list in a list")
    return value


def _length(value: int | list) -> int:
    return len(value) if isinstance(value, list) else 0


def _scale(value: int | list) -> int:
    return abs(value) if isinstance(value, int) else 1
