"""Checks of flags against each other and the machine, before anything starts.

Every error is a ValueError that names the flag, its value and the remedy.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from megatron_balance.checkpoint import saved_flags
from megatron_balance.cli.attention_checks import across_heads, latent_attention
from megatron_balance.cli.machine_checks import (
    ACTIVATIONS,
    backends,
    connections,
    context_parallelism,
    fusions,
)
from megatron_balance.cli.moe_checks import check_moe, token_dispatcher
from megatron_balance.cli.pipeline_checks import prediction, virtual_pipeline_size
from megatron_balance.cli.upstream_flags import NO_EFFECT_WITHOUT
from megatron_balance.cli.watch_checks import watching
from megatron_balance.config.flags import flag_of
from megatron_balance.config.run_config import BalanceConfig
from megatron_balance.device.machine import Machine

DEFAULT_SPLIT = "969,30,1"

REQUIRED = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr", "tokenizer_type"),
    *("train_iters train_samples", "data_path train_data_path mock_data"),
)
"""Fields without a default; where an entry has several names, one of them is enough."""

AT_LEAST_ONE = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "make_vocab_size_divisible_by"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "mtp_num_layers"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "micro_batch_size", "global_batch_size"),
    *("train_iters", "train_samples", "eval_interval", "log_interval", "tensorboard_log_interval"),
    "log_memory_interval",
    *("save_interval", "keep_last", "save_retain_interval", "exit_interval", "exit_duration_in_mins"),
    *("max_consecutive_bad_iterations", "balance_interval", "moe_comm_refit_interval"),
)

AT_LEAST_ZERO = (
    *("seed", "lr", "min_lr", "weight_decay", "lr_warmup_iters", "lr_warmup_samples", "eval_iters", "num_workers"),
    *("hidden_dropout", "attention_dropout", "adam_beta1", "adam_beta2"),
)

AT_MOST = {
    **dict.fromkeys(("num_layers", "mtp_num_layers"), 4096),
    "num_moe_experts": 1 << 16,
    **dict.fromkeys(("hidden_size", "num_attention_heads", "kv_channels"), 1 << 20),
    **dict.fromkeys(("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 1 << 24),
    "vocab_size": 1 << 28,
    **dict.fromkeys(("seq_length", "max_position_embeddings"), 1 << 30),
    **dict.fromkeys(("micro_batch_size", "global_batch_size"), 1 << 24),
    "train_iters": 10**9,
    "train_samples": 10**12,
    "seed": 2**32 - 1,  # NumPy's limit
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "adam_beta1", "adam_beta2"), 1),
}
"""Most are far above every published model: a larger value is a mistake, and setting it up would take hours."""

MOST_MICROBATCHES = 1 << 16

NO_EFFECT_WITHOUT_POLICY = tuple(
    field.name
    for field in fields(BalanceConfig)
    if field.name.startswith("balance_") and field.name != "balance_policy"
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Settings that follow from the flags and the machine."""

    FUSIONS: ClassVar[tuple[str, ...]] = (
        *("bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "apply_rope_fusion"),
        *("persist_layer_norm", "gradient_accumulation_fusion", "moe_permute_fusion", "overlap_p2p_comm"),
    )

    backend: str
    transformer_impl: str
    global_batch_size: int
    max_position_embeddings: int
    ffn_hidden_size: int
    moe_ffn_hidden_size: int | None
    moe_token_dispatcher_type: str
    moe_shared_expert_overlap: bool
    sequence_parallel: bool
    expert_tensor_parallel_size: int
    virtual_pipeline_size: int | None
    split: str | None
    tokenizer_type: str
    bias_activation_fusion: bool
    masked_softmax_fusion: bool
    bias_dropout_fusion: bool
    apply_rope_fusion: bool
    persist_layer_norm: bool
    gradient_accumulation_fusion: bool
    moe_permute_fusion: bool
    overlap_p2p_comm: bool
    align_param_gather: bool


def check(values: Mapping[str, Any], given: Collection[str], machine: Machine) -> tuple[Layout, list[str]]:
    """Check the flags against each other and the machine.

    Args:
        values: every flag's value by field name.
        given: fields whose flags the user wrote.
        machine: processes and libraries.

    Returns:
        The derived layout, and notices for the log, one sentence each.

    Raises:
        ValueError: the error names the flag, its value and the remedy.
    """
    notices: list[str] = []
    if values["dry_run"]:
        machine = machine.imagined(values["distributed_backend"])
    values = {**values, "tokenizer_type": _tokenizer_type(values, notices)}
    _required(values)
    values = {**values, "sequence_parallel": _sequence_parallel(values, notices)}
    _available(values, given, notices)
    backend, impl = backends(values, given, machine, notices)
    connections(values, machine, notices)
    watching(values, machine, notices)
    context_parallelism(values, machine, impl)
    data_parallel = _data_parallel_size(values, machine.world_size)
    _model_shape(values)
    virtual = virtual_pipeline_size(values)
    if values["mtp_num_layers"]:
        prediction(values, virtual or 1)
    expert_tp = values["expert_tensor_parallel_size"] or values["tensor_model_parallel_size"]
    ffn = _ffn_hidden_size(values)
    moe_ffn = check_moe(values, given, expert_tp=expert_tp, ffn_hidden_size=ffn, cuda=machine.cuda, notices=notices)
    return Layout(
        backend=backend,
        transformer_impl=impl,
        global_batch_size=_global_batch_size(values, data_parallel, virtual),
        max_position_embeddings=_positions(values),
        ffn_hidden_size=ffn,
        moe_ffn_hidden_size=moe_ffn,
        moe_token_dispatcher_type=token_dispatcher(values, given, backend=backend, cuda=machine.cuda, notices=notices),
        moe_shared_expert_overlap=values["moe_shared_expert_overlap"] and values["moe_layer_impl"] == "megatron",
        sequence_parallel=values["sequence_parallel"],
        expert_tensor_parallel_size=expert_tp,
        virtual_pipeline_size=virtual,
        split=_data(values, notices),
        tokenizer_type=values["tokenizer_type"],
        **fusions(values, machine, impl, notices),
        overlap_p2p_comm=virtual is not None and values["overlap_p2p_comm"],
        # Only the interleaved schedule starts gathers; without it, each bucket starts the next bucket's gather
        align_param_gather=virtual is not None and values["align_param_gather"],
    ), notices


def _required(values: Mapping[str, Any]) -> None:
    absent = {name for name, value in values.items() if value is None or value is False}
    missing = [" or ".join(map(flag_of, names.split())) for names in REQUIRED if absent.issuperset(names.split())]
    if missing:
        hint = "; for --mock-data: NullTokenizer with --vocab-size" if "tokenizer_type" in absent else ""
        raise ValueError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} required{hint}")
    if not absent & {"train_iters", "train_samples"}:
        raise ValueError("--train-iters, --train-samples: give only one of them")
    if values["train_samples"] is not None and values["rampup_batch_size"] is None and values["lr_decay_iters"]:
        raise ValueError("--lr-decay-iters: with --train-samples use --lr-decay-samples")
    at_least_one(values, AT_LEAST_ONE)
    for name in AT_LEAST_ZERO:
        if values[name] is not None and values[name] < 0:
            raise ValueError(f"{flag_of(name)} {values[name]}: give at least 0")
    for name, most in AT_MOST.items():
        if values[name] is not None and values[name] > most:
            raise ValueError(f"{saved_flags.flag_of(name)} {values[name]}: give at most {most}")
    if values["distributed_timeout_minutes"] <= 0:
        raise ValueError(f"--distributed-timeout-minutes {values['distributed_timeout_minutes']}: give more than 0")


def _tokenizer_type(values: Mapping[str, Any], notices: list[str]) -> str | None:
    """Return the type of tokenizer; like upstream, GPT2BPETokenizer by default if its files are given."""
    if values["tokenizer_type"] is None and values["vocab_file"] and values["merge_file"]:
        notices.append("--vocab-file and --merge-file without --tokenizer-type: using GPT2BPETokenizer")
        return "GPT2BPETokenizer"
    return values["tokenizer_type"]


def at_least_one(values: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ValueError if any of these fields has a value below 1."""
    for name in names:
        if values[name] is not None and values[name] < 1:
            raise ValueError(f"{flag_of(name)} {values[name]}: give at least 1")


def _available(values: Mapping[str, Any], given: Collection[str], notices: list[str]) -> None:
    """Raise ValueError for balancing flags that have no effect; add a notice for other flags without effect."""
    refuse_idle(values, given)
    for name, condition in NO_EFFECT_WITHOUT.items():
        fields, _, value = condition.partition(" ")
        needed = fields.split("|")
        if name in given and not any(values[one] == value if value else values[one] for one in needed):
            alternatives = " or ".join(map(flag_of, needed))
            notices.append(f"{flag_of(name)} has no effect without {alternatives} {value}".rstrip())
    positions = values["position_embedding_type"]
    if "--no-position-embedding" in given and positions != "rope":
        raise ValueError(
            f"--no-position-embedding: goes with --position-embedding-type rope, not {positions}; leave it out, or use "
            "--position-embedding-type none for a model without positions"
        )


def refuse_idle(values: Mapping[str, Any], given: Collection[str]) -> None:
    """Raise ValueError for balancing flags that have no effect."""
    for name in NO_EFFECT_WITHOUT_POLICY:
        chunks = values["moe_comm_chunks"] != "1"
        decides = chunks or "auto" in (values["moe_comm_alltoall"], values["moe_parallel_schedule"])
        read = {"balance_profile": decides, "balance_explain": chunks}.get(name)
        if name in given and values["balance_policy"] == "none" and not read:
            raise ValueError(f"{flag_of(name)}: has no effect with --balance-policy none; leave it out")


def _sequence_parallel(values: Mapping[str, Any], notices: list[str]) -> bool:
    """Return whether sequence parallelism is on; like upstream, switch it off without tensor parallelism."""
    if values["sequence_parallel"] and values["tensor_model_parallel_size"] == 1:
        notices.append("--sequence-parallel is off: it has no effect with --tensor-model-parallel-size 1")
        return False
    return values["sequence_parallel"]


def _data_parallel_size(values: Mapping[str, Any], world_size: int) -> int:
    tensor = values["tensor_model_parallel_size"]
    pipeline = values["pipeline_model_parallel_size"]
    context = values["context_parallel_size"]
    if world_size % (tensor * pipeline * context):
        flags = f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline}"
        raise ValueError(
            f"{flags}{f' x --context-parallel-size {context}' if context > 1 else ''}: "
            f"must divide the number of processes ({world_size}); change them or the number of processes"
        )
    expert = values["expert_model_parallel_size"] * (values["expert_tensor_parallel_size"] or tensor)
    if world_size % (expert * pipeline):
        raise ValueError(
            f"--expert-model-parallel-size {values['expert_model_parallel_size']} x expert tensor parallelism "
            f"{values['expert_tensor_parallel_size'] or tensor} x --pipeline-model-parallel-size {pipeline}: must "
            f"divide the number of processes ({world_size}); lower one of them (--expert-tensor-parallel-size 1)"
        )
    if values["use_tp_pp_dp_mapping"] and pipeline > 1 and expert != tensor * context:
        raise ValueError(
            f"--use-tp-pp-dp-mapping: with --pipeline-model-parallel-size {pipeline}, experts and attention must have "
            f"as many replicas: --expert-model-parallel-size {values['expert_model_parallel_size']} x expert tensor "
            f"parallelism {values['expert_tensor_parallel_size'] or tensor} must be --tensor-model-parallel-size "
            f"{tensor} x --context-parallel-size {context}; or leave it out"
        )
    return world_size // (tensor * pipeline * context)


def _model_shape(values: Mapping[str, Any]) -> None:
    tensor = values["tensor_model_parallel_size"]
    heads = values["num_attention_heads"]
    hidden = values["hidden_size"]
    if hidden % heads and values["kv_channels"] is None:
        raise ValueError(f"--hidden-size {hidden}: must be a multiple of --num-attention-heads {heads}")
    groups = values["num_query_groups"] if values["group_query_attention"] else None
    if groups is not None and (groups < 1 or heads % groups):
        raise ValueError(f"--num-query-groups {groups}: must divide --num-attention-heads {heads}")
    if heads % tensor:
        raise ValueError(f"--num-attention-heads {heads}: must be a multiple of --tensor-model-parallel-size {tensor}")
    context = values["context_parallel_size"]
    if context > 1 and values["seq_length"] % (2 * context):
        raise ValueError(
            f"--seq-length {values['seq_length']}: must be a multiple of 2 x --context-parallel-size {context}"
        )
    if values["sequence_parallel"] and values["seq_length"] % (tensor * context):
        parallel = f"--tensor-model-parallel-size {tensor}"
        parallel += f" x --context-parallel-size {context}" if context > 1 else ""
        raise ValueError(
            f"--seq-length {values['seq_length']}: with --sequence-parallel it must be a multiple of {parallel}"
        )
    for name in ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq"):
        if isinstance(values[name], list) and len(values[name]) != values["num_layers"]:
            raise ValueError(
                f"{flag_of(name)}: the list has {len(values[name])} entries for --num-layers {values['num_layers']}"
            )
    if values["qk_layernorm_across_heads"]:
        across_heads(values)
    if values["multi_latent_attention"]:
        latent_attention(values)
    elif values["rope_type"] == "yarn":
        raise ValueError("--rope-type yarn: belongs to --multi-latent-attention; use --rope-type rope")
    activations = [name for name in ACTIVATIONS if values[name]]
    if len(activations) > 1:
        raise ValueError(f"{' and '.join(map(flag_of, activations))}: choose one activation")
    if values["grad_reduce_in_bf16"] and (not values["bf16"] or values["grad_reduce_in_fp32"]):
        raise ValueError("--grad-reduce-in-bf16: needs --bf16, and not --accumulate-allreduce-grads-in-fp32")
    if values["bf16"] and values["fp16"]:
        raise ValueError("--bf16 and --fp16: choose one precision")
    if values["recompute_granularity"] == "full" and not (
        values["recompute_method"] and values["recompute_num_layers"]
    ):
        raise ValueError("--recompute-granularity full: also give --recompute-method uniform --recompute-num-layers 1")
    if values["optimizer"] == "sgd" and values["use_distributed_optimizer"]:
        raise ValueError("--optimizer sgd: megatron-core's distributed optimizer has only Adam; leave one of them out")
    if values["overlap_param_gather"] and not (values["use_distributed_optimizer"] and values["overlap_grad_reduce"]):
        raise ValueError("--overlap-param-gather: also give --use-distributed-optimizer --overlap-grad-reduce")


def _positions(values: Mapping[str, Any]) -> int:
    sequence = values["seq_length"]
    positions = values["max_position_embeddings"] or values["seq_length"]
    if sequence > positions:
        raise ValueError(f"--max-position-embeddings {positions}: must be at least --seq-length {sequence}")
    return positions


def _ffn_hidden_size(values: Mapping[str, Any]) -> int:
    """Return the inner width; default: 4 x hidden, for SwiGLU with its third matrix 2/3 of that in multiples of 64."""
    if values["ffn_hidden_size"]:
        return values["ffn_hidden_size"]
    return int(values["hidden_size"] * 4 * 2 / 3 / 64) * 64 if values["swiglu"] else 4 * values["hidden_size"]


def _global_batch_size(values: Mapping[str, Any], data_parallel: int, virtual: int | None) -> int:
    step = values["micro_batch_size"] * data_parallel
    total = values["global_batch_size"] or step
    if total % step:
        raise ValueError(
            f"--global-batch-size {total}: must be a multiple of {step}, which is --micro-batch-size "
            f"{values['micro_batch_size']} times the data-parallel size {data_parallel}"
        )
    if total // step > MOST_MICROBATCHES:
        raise ValueError(
            f"--global-batch-size {total}: makes {total // step} microbatches of {step}; give at most "
            f"{MOST_MICROBATCHES * step}, or a larger --micro-batch-size"
        )
    stages = values["pipeline_model_parallel_size"]
    if virtual and total // step % stages:
        raise ValueError(
            f"--global-batch-size {total}: the interleaved schedule needs a number of microbatches ({total // step}) "
            f"that is a multiple of --pipeline-model-parallel-size {stages}"
        )
    return total


def _data(values: Mapping[str, Any], notices: list[str]) -> str | None:
    """Check the sources of samples; return `--split`, or its default for a single blend."""
    per_split = [values[f"{split}_data_path"] for split in ("train", "valid", "test")]
    sources = [bool(values["data_path"]), any(per_split), values["mock_data"]]
    if sum(sources) != 1:
        raise ValueError("give one of --data-path, --train-data-path (with --valid-/--test-data-path) and --mock-data")
    if any(per_split) and values["split"]:
        raise ValueError("--split: goes with --data-path; leave it out with --train-data-path")
    if values["data_cache_path"] is None:
        for name in ("dataloader_fast_cache_load", "dataloader_defer_npy_index_mmap"):
            if values[name]:
                raise ValueError(f"{flag_of(name)}: also give --data-cache-path")
    if values["data_path"] and values["dataloader_fast_cache_load"]:
        raise ValueError("--dataloader-fast-cache-load: not with --data-path; use --train-data-path")
    if values["data_path"] and values["split"] is None:
        notices.append(f"--data-path without --split: using {DEFAULT_SPLIT}")
        return DEFAULT_SPLIT
    return values["split"]
