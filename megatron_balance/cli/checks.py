"""Checks of flags against each other, before anything starts, and the settings that follow from them.

Every error is a ValueError that names the flag, its value and the remedy.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_balance.cli import machine_checks
from megatron_balance.cli.command_line import CommandLine
from megatron_balance.cli.moe_checks import check_moe, check_paired_passes
from megatron_balance.cli.optimizer_checks import check_optimizer
from megatron_balance.cli.upstream_flags import ACCEPTED, NO_EFFECT_WITHOUT
from megatron_balance.config.flags import flag_of
from megatron_balance.config.run_config import BalanceConfig
from megatron_balance.device.machine import Machine
from megatron_balance.files.reading import MIB, read_object, read_text

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
    *("ffn_hidden_size", "moe_ffn_hidden_size", "kv_channels", "vocab_size", "padded_vocab_size"),
    *("max_position_embeddings", "moe_router_group_topk", "lr_decay_iters", "lr_decay_samples"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "num_dataset_builder_threads"),
    *("train_iters", "train_samples", "eval_interval", "log_interval", "tensorboard_log_interval"),
    *("log_memory_interval", "bucket_size"),
    *("save_interval", "keep_last", "save_retain_interval", "exit_interval", "exit_duration_in_mins"),
    *("max_consecutive_bad_iterations", "balance_interval", "balance_guest_ring", "moe_comm_refit_interval"),
)

AT_LEAST_ZERO = (
    *("seed", "lr", "min_lr", "weight_decay", "lr_warmup_iters", "lr_warmup_samples", "eval_iters", "num_workers"),
    *("hidden_dropout", "attention_dropout", "adam_beta1", "adam_beta2", "adam_eps", "init_method_std"),
    *("embedding_init_method_std", "layernorm_epsilon", "lr_warmup_fraction", "lr_warmup_init", "decoupled_lr"),
    *("decoupled_min_lr", "loss_scale", "mid_level_dataset_surplus", "clip_grad", "moe_z_loss_coeff"),
)

MORE_THAN_ZERO = ("distributed_timeout_minutes", "moe_input_jitter_eps", "rotary_base", "activation_func_clamp_value")

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
"""Most limits are far above any published model: a larger value is a mistake that would take hours to set up."""

MOST_MICROBATCHES = 1 << 16

VIRTUAL_STAGES = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")

UNEVEN_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")

OTHER_LAYOUTS = (
    *VIRTUAL_STAGES,
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *UNEVEN_STAGES,
)
"""Fields that divide the layers among pipeline stages; alternatives to `--pipeline-model-parallel-layout`."""

NOT_WITH_SFT = (
    *("mock_data", "reset_attention_mask", "reset_position_ids", "dataloader_inter_document_masking", "eod_mask_loss"),
    *("dataloader_fast_cache_load", "dataloader_defer_npy_index_mmap"),
)
"""Fields of data in other formats, and of documents that end with a token."""

MOST_BYTES = 16 * MIB
"""Maximum size of a file that names data sets."""

NO_EFFECT_WITHOUT_POLICY = tuple(
    field.name for field in fields(BalanceConfig) if re.match(r"balance_(?!policy$)", field.name)
)


def check(values: Mapping[str, Any], given: Collection[str], machine: Machine) -> CommandLine:
    """Check the flags against each other and the machine; return their values, derived settings and notices.

    This is the whole order of checks: each step refuses flags or completes `line`, and relies on the steps before it.
    `values` are those of every flag by field name; the user wrote the flags of the fields in `given`. ValueError: the
    error names the flag, its value and the remedy.
    """
    if values["dry_run"]:
        machine = machine.imagined(values["distributed_backend"])
    line = CommandLine(values, given, machine)
    without_effect = {entry.partition(" ")[0]: reason for entry, reason in ACCEPTED.items()}
    line.notices += [f"{flag}: {reason}" for flag, reason in without_effect.items() if flag in given]
    if line.tokenizer_type is None and line.vocab_file and line.merge_file:
        line.tokenizer_type = "GPT2BPETokenizer"
        line.notices.append("--vocab-file and --merge-file without --tokenizer-type: using GPT2BPETokenizer")
    _check_required(line)
    if line.sequence_parallel and line.tensor_model_parallel_size == 1:
        line.sequence_parallel = False
        line.notices.append("--sequence-parallel is off: it has no effect with --tensor-model-parallel-size 1")
    refuse_idle_balancing(line)
    _check_conditions(line)
    machine_checks.choose_backend(line)
    machine_checks.check_packages(line)
    machine_checks.note_connections(line)
    machine_checks.check_context_parallelism(line)
    machine_checks.check_watching(line)
    machine_checks.choose_fusions(line)
    data_parallel = _data_parallel_size(line)
    _check_model(line)
    line.expert_tensor_parallel_size = line.expert_tp
    check_optimizer(line)
    virtual = _virtual_pipeline_size(line)
    paired = line.overlap_moe_expert_parallel_comm and line.expert_model_parallel_size > 1
    if paired and virtual is None and line.pipeline_model_parallel_size > 1:
        # The interleaved schedule begins with enough forward passes for pairs, also if a stage has one chunk
        virtual = 1
    if line.mtp_num_layers:
        _check_prediction(line, virtual or 1)
    if not line.ffn_hidden_size:
        # SwiGLU has a third matrix, so this smaller width gives as many weights
        line.ffn_hidden_size = int(line.hidden_size * 8 / 3 / 64) * 64 if line.swiglu else 4 * line.hidden_size
    check_moe(line)
    line.global_batch_size = _global_batch_size(line, data_parallel, virtual)
    line.max_position_embeddings = line.max_position_embeddings or line.seq_length
    if line.seq_length > line.max_position_embeddings:
        positions = line["max_position_embeddings"]
        raise ValueError(f"{positions}: must be at least {line['seq_length']}")
    line.moe_shared_expert_overlap = line.moe_shared_expert_overlap and line.moe_layer_impl == "megatron"
    _check_data(line)
    line.virtual_pipeline_model_parallel_size = virtual
    line.overlap_p2p_comm = virtual is not None and line.overlap_p2p_comm
    # Only the interleaved schedule of several chunks starts gathers; else, each bucket starts the next bucket's gather
    line.align_param_gather = (virtual or 1) > 1 and line.align_param_gather
    if line.overlap_moe_expert_parallel_comm:
        check_paired_passes(line)
    return line


def _check_required(line: CommandLine) -> None:
    absent = {name for name, value in vars(line).items() if value is None or value is False}
    missing = [" or ".join(map(flag_of, names.split())) for names in REQUIRED if absent.issuperset(names.split())]
    if missing:
        hint = "; for --mock-data: NullTokenizer with --vocab-size" if "tokenizer_type" in absent else ""
        raise ValueError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} required{hint}")
    if not absent & {"train_iters", "train_samples"}:
        raise ValueError("--train-iters, --train-samples: give only one of them")
    if line.train_samples is not None and line.rampup_batch_size is None and line.lr_decay_iters:
        raise ValueError("--lr-decay-iters: with --train-samples use --lr-decay-samples")
    at_least(line, 1, AT_LEAST_ONE)
    at_least(line, 0, AT_LEAST_ZERO)
    for name, most in AT_MOST.items():
        value = getattr(line, name)
        if value is not None and value > most:
            raise ValueError(f"{line[name]}: give at most {most}")
    for name in MORE_THAN_ZERO:
        value = getattr(line, name)
        if value is not None and value <= 0:
            raise ValueError(f"{line[name]}: give more than 0")


def at_least(line: CommandLine, least: int, names: Collection[str]) -> None:
    """Refuse values of these fields that are less than `least`."""
    for name in names:
        value = getattr(line, name)
        if value is not None and value < least:
            raise ValueError(f"{line[name]}: give at least {least}")


def refuse_idle_balancing(line: CommandLine) -> None:
    """Refuse flags of balancing that have no effect."""
    chunks = line.moe_comm_chunks != "1"
    decides = chunks or "auto" in (line.moe_comm_alltoall, line.moe_parallel_schedule)
    read = {"balance_profile": decides, "balance_explain": chunks}
    if line.balance_policy == "none":
        idle = (name for name in NO_EFFECT_WITHOUT_POLICY if not read.get(name))
        line.refuse_idle(idle, "--balance-policy none")


def _check_conditions(line: CommandLine) -> None:
    """Note flags that have no effect because of other flags."""
    for condition, idle in NO_EFFECT_WITHOUT.items():
        names, _, value = condition.partition(" ")
        needed = names.split("|")
        values = value.split("|")
        if any(getattr(line, name) in values if value else getattr(line, name) for name in needed):
            continue
        missing = f"{' or '.join(map(flag_of, needed))} {' or '.join(values)}".rstrip()
        line.notices += [
            f"{flag_of(name)} has no effect without {missing}" for name in idle.split() if name in line.given
        ]
    if "--no-position-embedding" in line.given and line.position_embedding_type not in ("rope", "yarn"):
        raise ValueError(
            f"--no-position-embedding: not with {line['position_embedding_type']}; leave it out, or use rope"
        )


def _data_parallel_size(line: CommandLine) -> int:
    size = line.machine.world_size
    tensor = line.tensor_model_parallel_size
    stages = line.pipeline_model_parallel_size
    context = line.context_parallel_size
    must = f"must divide the number of processes ({size}); change them or the number of processes"
    if size % (tensor * stages * context):
        raise ValueError(f"{_attention_ranks(line)} x {line['pipeline_model_parallel_size']}: {must}")
    experts = line.expert_model_parallel_size * line.expert_tp
    expert_ranks = f"{line['expert_model_parallel_size']} x --expert-tensor-parallel-size {line.expert_tp}"
    if size % (experts * stages):
        raise ValueError(f"{expert_ranks} x {line['pipeline_model_parallel_size']}: {must}")
    if line.use_tp_pp_dp_mapping and stages > 1 and experts != tensor * context:
        must = f"with {line['pipeline_model_parallel_size']}, {expert_ranks} must be {_attention_ranks(line)}"
        raise ValueError(f"--use-tp-pp-dp-mapping: {must}; or leave it out")
    return size // (tensor * stages * context)


def _attention_ranks(line: CommandLine) -> str:
    return f"{line['tensor_model_parallel_size']} x {line['context_parallel_size']}"


def _check_model(line: CommandLine) -> None:
    heads = line.num_attention_heads
    tensor = line.tensor_model_parallel_size
    context = line.context_parallel_size
    if line.hidden_size % heads and line.kv_channels is None:
        raise ValueError(f"{line['hidden_size']}: must be a multiple of {line['num_attention_heads']}")
    groups = line.num_query_groups if line.group_query_attention else None
    if groups is not None and (groups < 1 or heads % groups):
        raise ValueError(f"{line['num_query_groups']}: must divide {line['num_attention_heads']}")
    if heads % tensor:
        raise ValueError(f"{line['num_attention_heads']}: must be a multiple of {line['tensor_model_parallel_size']}")
    if context > 1 and line.seq_length % (2 * context):
        raise ValueError(f"{line['seq_length']}: must be a multiple of 2 x {line['context_parallel_size']}")
    if line.sequence_parallel and line.seq_length % (tensor * context):
        ranks = _attention_ranks(line)
        raise ValueError(f"{line['seq_length']}: with --sequence-parallel it must be a multiple of {ranks}")
    for name in ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq"):
        layers = getattr(line, name)
        if isinstance(layers, list) and len(layers) != line.num_layers:
            raise ValueError(f"{flag_of(name)}: the list has {len(layers)} entries for {line['num_layers']}")
    if line.qk_layernorm_across_heads:
        for name in ("qk_layernorm", "qk_l2_norm"):
            if getattr(line, name):
                raise ValueError(f"--qk-layernorm-across-heads and {line[name]}: choose one norm")
        if line.normalization != "RMSNorm":
            raise ValueError(f"{line['normalization']}: --qk-layernorm-across-heads needs --normalization RMSNorm")
        if groups and groups % tensor:
            must = f"must be a multiple of {line['tensor_model_parallel_size']}"
            raise ValueError(f"{line['num_query_groups']}: with --qk-layernorm-across-heads it {must}")
    if line.multi_latent_attention:
        _check_latent_attention(line)
    elif line.position_embedding_type == "yarn":
        _check_yarn(line)
    if line.rope_type == "yarn" and not line.multi_latent_attention:
        remedy = "use --position-embedding-type yarn, or leave it out"
        raise ValueError(f"--rope-type yarn: belongs to --multi-latent-attention; {remedy}")
    activations = [flag_of(name) for name in machine_checks.ACTIVATIONS if getattr(line, name)]
    if len(activations) > 1:
        raise ValueError(f"{' and '.join(activations)}: choose one activation")
    if line.grad_reduce_in_bf16 and (not line.bf16 or line.grad_reduce_in_fp32):
        raise ValueError("--grad-reduce-in-bf16: needs --bf16, and not --accumulate-allreduce-grads-in-fp32")
    if line.bf16 and line.fp16:
        raise ValueError("--bf16 and --fp16: choose one precision")
    if line.recompute_granularity == "full" and not (line.recompute_method and line.recompute_num_layers):
        raise ValueError("--recompute-granularity full: also give --recompute-method uniform --recompute-num-layers 1")
    if line.optimizer == "sgd" and line.use_distributed_optimizer:
        raise ValueError("--optimizer sgd: megatron-core's distributed optimizer has only Adam; leave one of them out")
    if line.overlap_param_gather and not (line.use_distributed_optimizer and line.overlap_grad_reduce):
        raise ValueError("--overlap-param-gather: also give --use-distributed-optimizer --overlap-grad-reduce")


def _check_yarn(line: CommandLine) -> None:
    """Check the flags of `--position-embedding-type yarn`; set the betas to the paper's values if they are not given
    (YaRN, section 3.2)."""
    for name in ("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings"):
        if getattr(line, name) is None:
            raise ValueError(f"--position-embedding-type yarn: also give {flag_of(name)}")
        at_least(line, 1, [name])
    # megatron-core would ignore the first three, and fail in the first pass with the last one
    for name, plain in {
        "rotary_percent": 1,
        "use_rope_scaling": False,
        "rotary_seq_len_interpolation_factor": None,
        "rotary_interleaved": False,
    }.items():
        if getattr(line, name) != plain:
            raise ValueError(f"{line[name]}: not with --position-embedding-type yarn; leave it out, or use rope")
    for name, usual in {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}.items():
        if getattr(line, name) is None:
            setattr(line, name, usual)
        if getattr(line, name) <= 0:
            raise ValueError(f"{line[name]}: give more than 0")


def _check_latent_attention(line: CommandLine) -> None:
    tensor = line.tensor_model_parallel_size
    if line.position_embedding_type != "rope":
        raise ValueError(f"{line['position_embedding_type']}: with --multi-latent-attention, use rope")
    # Without sequence parallelism, all ranks have the whole gradient of the queries' norm, but megatron-core sums it
    if tensor > 1 and not line.sequence_parallel:
        raise ValueError(f"{line['tensor_model_parallel_size']}: --multi-latent-attention needs --sequence-parallel")
    # Without Transformer Engine, tensor parallelism also splits these projections
    widths = {
        "--q-lora-rank": line.q_lora_rank or 0,
        "--kv-lora-rank plus --qk-pos-emb-head-dim": line.kv_lora_rank + line.qk_pos_emb_head_dim,
    }
    for name, width in widths.items():
        if width % tensor:
            raise ValueError(f"{name} {width}: must be a multiple of {line['tensor_model_parallel_size']}")
    names = ("qk_layernorm_across_heads", "qk_l2_norm", "group_query_attention", "window_size")
    line.refuse(names, "does not go with --multi-latent-attention; leave it out")


def _virtual_pipeline_size(line: CommandLine) -> int | None:
    """Return the number of model chunks per pipeline stage; None without the interleaved schedule."""
    if line.pipeline_model_parallel_layout is not None:
        return _layout_chunks(line)
    stages = line.pipeline_model_parallel_size
    ends = line.account_for_embedding_in_pipeline_split + line.account_for_loss_in_pipeline_split
    layers = line.num_layers + ends
    uneven = [name for name in UNEVEN_STAGES if getattr(line, name)]
    if sum(getattr(line, name) for name in uneven) > layers:
        given = " and ".join(line[name] for name in uneven)
        raise ValueError(f"{given}: more than --num-layers {layers}; give fewer")
    if layers % stages and not uneven:
        raise ValueError(f"--num-layers {layers}: must be a multiple of {line['pipeline_model_parallel_size']}")
    wanted = [name for name in VIRTUAL_STAGES if getattr(line, name) is not None]
    if not wanted:
        return None
    if len(wanted) > 1:
        raise ValueError(f"{' and '.join(map(flag_of, wanted))}: give one of them")
    (name,) = wanted
    value = getattr(line, name)
    if stages == 1:
        raise ValueError(f"{line[name]}: needs --pipeline-model-parallel-size above 1")
    _refuse_batched_messages(line)
    held = layers // stages
    if value < 1 or uneven or held % value:
        raise ValueError(f"{line[name]}: must divide the {held} layers of a stage")
    return value if name == "num_virtual_stages_per_pipeline_rank" else held // value


def _refuse_batched_messages(line: CommandLine) -> None:
    # In a batch, two messages between the same two ranks could not be told apart
    if line.pipeline_model_parallel_size == 2 and not line.overlap_p2p_comm:
        raise ValueError("--no-overlap-p2p-communication: the interleaved schedule then needs more than 2 stages")


def _layout_chunks(line: CommandLine) -> int | None:
    """Check `--pipeline-model-parallel-layout` and return the number of model chunks per stage; None for one."""
    text = line.pipeline_model_parallel_layout
    stages = line.pipeline_model_parallel_size
    flag = line["pipeline_model_parallel_layout"]
    line.refuse(OTHER_LAYOUTS, f"not with {flag}; leave one of them out")
    # megatron-core expands repetitions, however many
    if re.search(r"\d{5}", text):
        raise ValueError(f"{flag[:200]}: repeats a part more often than any model has layers; give smaller numbers")
    try:
        layout = PipelineParallelLayerLayout.from_str(text, stages)
        layout.validate_layer_layout(line.num_layers, line.mtp_num_layers)
    except (AssertionError, IndexError) as error:
        parts = "E, a t for each of --num-layers, an m for each of --mtp-num-layers, and L"
        raise ValueError(f"{flag}: {error}; describe {stages} stages, or a multiple, with {parts}") from error
    if line.mtp_num_layers and LayerType.mtp not in layout.layout[-1][-1]:
        raise ValueError(f"{flag}: puts multi-token prediction before the last stage; write m before L")
    chunks = layout.virtual_pipeline_model_parallel_size
    if chunks == 1:
        return None
    if stages == 1:
        raise ValueError(f"{flag}: describes {chunks} stages, but --pipeline-model-parallel-size is 1; raise it")
    _refuse_batched_messages(line)
    return chunks


def _check_prediction(line: CommandLine, virtual: int) -> None:
    """Check the requirements of multi-token prediction; `virtual` is the number of model chunks per pipeline stage."""
    if line.position_embedding_type == "learned_absolute":
        raise ValueError(f"{line['position_embedding_type']}: with {line['mtp_num_layers']}, use rope or none")
    if line.recompute_granularity == "full" and (line.recompute_method, line.recompute_num_layers) != ("uniform", 1):
        given = f"{line['recompute_method']} {line['recompute_num_layers']}"
        raise ValueError(f"{given}: with {line['mtp_num_layers']} use uniform and 1")
    ends = line.account_for_embedding_in_pipeline_split + line.account_for_loss_in_pipeline_split
    chunks = line.pipeline_model_parallel_size * virtual
    if line.account_for_loss_in_pipeline_split and line.num_layers + ends == chunks:
        missing = f"the last pipeline stage would have no layer, which {line['mtp_num_layers']} copies"
        raise ValueError(f"--account-for-loss-in-pipeline-split: {missing}; leave it out")


def _global_batch_size(line: CommandLine, data_parallel: int, virtual: int | None) -> int:
    step = line.micro_batch_size * data_parallel
    total = line.global_batch_size or step
    microbatches = total // step
    if total % step:
        factors = f"{line['micro_batch_size']} x data-parallel size {data_parallel}"
        raise ValueError(f"{line['global_batch_size']}: must be a multiple of {step}, which is {factors}")
    if microbatches > MOST_MICROBATCHES:
        most = MOST_MICROBATCHES * step
        raise ValueError(f"{line['global_batch_size']}: give at most {most}, or a larger --micro-batch-size")
    if virtual and microbatches % line.pipeline_model_parallel_size:
        reason = "--overlap-moe-expert-parallel-comm" if virtual == 1 else "the interleaved schedule"
        must = f"must be a multiple of {line['pipeline_model_parallel_size']} with {reason}"
        raise ValueError(f"--global-batch-size {total}: its number of microbatches, {microbatches}, {must}")
    return total


def _check_data(line: CommandLine) -> None:
    """Check the sources of samples, and set the default of `--split` for a single blend."""
    per_split = any((line.train_data_path, line.valid_data_path, line.test_data_path))
    if bool(line.data_path) + per_split + line.mock_data != 1:
        raise ValueError("give one of --data-path, --train-data-path (with --valid-/--test-data-path) and --mock-data")
    if per_split and line.split:
        raise ValueError("--split: goes with --data-path; leave it out with --train-data-path")
    if line.data_cache_path is None:
        line.refuse(("dataloader_fast_cache_load", "dataloader_defer_npy_index_mmap"), "also give --data-cache-path")
    if line.data_path and line.dataloader_fast_cache_load:
        raise ValueError("--dataloader-fast-cache-load: not with --data-path; use --train-data-path")
    if line.data_path and line.split is None:
        line.split = DEFAULT_SPLIT
        line.notices.append(f"--data-path without --split: using {DEFAULT_SPLIT}")
    if line.sft:
        _check_conversations(line)
    if line.dataloader_inter_document_masking:
        _check_documents_of_files(line)


def _check_conversations(line: CommandLine) -> None:
    """Check the requirements of `--sft`."""
    line.refuse(NOT_WITH_SFT, "does not go with --sft, which reads JSON lines; leave one of them out")
    if line.tokenizer_type != "HuggingFaceTokenizer":
        remedy = "use HuggingFaceTokenizer and a model with a chat template"
        raise ValueError(f"{line['tokenizer_type']}: with --sft, {remedy}")


def _check_documents_of_files(line: CommandLine) -> None:
    """Check the requirements of `--dataloader-inter-document-masking`."""
    flag = "--dataloader-inter-document-masking"
    if line.reset_attention_mask:
        where = "at the ends of documents in the files, and at end-of-document tokens"
        raise ValueError(f"{flag} and --reset-attention-mask: divide samples {where}; choose one")
    if not hasattr(GPTDatasetConfig, "inter_document_masking"):
        absent = "the installed megatron-core does not have it"
        raise ValueError(f"{flag}: {absent}; use --reset-attention-mask, or install a version that has it")


def data_in_files(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return data flags' values, by field, from files of data flags; ValueError if a file or a combination is wrong."""
    blend = values["data_args_path"]
    per_split = values["per_split_data_args_path"]
    found: dict[str, list[str]] = {}
    if blend is not None:
        found["data_path"] = read_text(blend, MOST_BYTES, "--data-args-path").split()
        if not found["data_path"]:
            raise ValueError(f"--data-args-path {blend}: names no data; write the words of --data-path into it")
    if per_split is not None:
        blends = read_object(per_split, MOST_BYTES, "--per-split-data-args-path")
        for split in ("train", "valid", "test"):
            words = blends.get(split, [])
            words = words.split() if isinstance(words, str) else words
            if not isinstance(words, list) or not all(isinstance(word, str | int | float) for word in words):
                said = f"{split} is {json.dumps(words)[:80]}; give a list, or a text of words"
                raise ValueError(f"--per-split-data-args-path {per_split}: {said}")
            found[f"{split}_data_path"] = [str(word) for word in words]
        if not found["train_data_path"]:
            raise ValueError(f"--per-split-data-args-path {per_split}: has no data under the key train")
    for name in found:
        if values[name]:
            source = "--data-args-path" if name == "data_path" else "--per-split-data-args-path"
            raise ValueError(f"{source} and {flag_of(name)}: give one of them")
    return found
