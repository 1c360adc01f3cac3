"""Cross-flag checks: what the flags mean together, before anything starts.

Every error is a ValueError that names the flag, its value and the remedy.
"""

import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

DEFAULT_SPLIT = "969,30,1"

UNSUPPORTED_FIELDS = {
    **dict.fromkeys(("fp8", "fp4", "first_last_layers_bf16", "num_layers_at_"), "8- and 4-bit training: not supported"),
    **dict.fromkeys(
        ("cuda_graph", "enable_cuda_graph", "external_cuda_graph"),
        "CUDA graphs are not supported: the number of routed tokens changes from step to step",
    ),
    **dict.fromkeys(
        ("mamba", "use_mamba", "is_hybrid_model", "linear_", "dsa_", "experimental_attention", "heterogeneous"),
        "only GPT models with self-attention are supported",
    ),
    **dict.fromkeys(("multi_latent_attention", "mtp_"), "not supported yet"),
    **dict.fromkeys(("moe_per_layer_logging", "log_num_zeros_in_grad"), "not available yet"),
    **dict.fromkeys(
        ("inference", "flash_decode", "mlp_chunks_for_prefill", "symmetric_ar_type", "batch_invariant"),
        "this program trains; it does not serve",
    ),
    **dict.fromkeys(
        ("cpu_offloading", "fine_grained_activation", "offload_modules", "min_offloaded", "optimizer_cpu_offload",
         "optimizer_offload_fraction", "use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer", "pin_cpu_"),
        "offloading is not supported",
    ),
    **dict.fromkeys(("use_kitchen", "kitchen"), "the kitchen extension is not supported"),
    **dict.fromkeys(
        ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "ep_overlap_"),
        "megatron-core's batch-level overlap cuts its own MoE layer in stages and is not supported",
    ),
    **dict.fromkeys(("use_megatron_fsdp", "data_parallel_sharding", "fsdp_", "outer_dp"), "FSDP is not supported"),
    "muon_": "not supported; use --optimizer adam or sgd",
    **dict.fromkeys(("hybrid_context", "hierarchical_context", "max_seqlen_"), "context parallelism: not supported"),
    **dict.fromkeys(("moe_latent_size", "moe_enable_routing_replay"), "not supported by the balanced MoE layer"),
}  # fmt: skip
"""Fields of megatron-core's configs, by prefix, that are refused as flags, with the reason."""

REFUSED = {
    "--use-cpu-initialization": "gives every expert-parallel rank the same experts; leave it out",
    "--use-legacy-models": "removed upstream; leave it out",
    "--use-mcore-models": "this program is built on megatron-core; leave it out",
}
"""Upstream's flags that would do harm or mean nothing here."""

NOT_YET = {
    **dict.fromkeys(("--yaml-cfg", "--dry-run", "--moe-routing-trace-path"), "not available yet"),
    **dict.fromkeys(
        ("--wandb-project", "--wandb-exp-name", "--wandb-save-dir"), "not available yet; use --tensorboard-dir"
    ),
    **dict.fromkeys(("--moe-router-force-workload", "--moe-router-force-biased"), "not available yet"),
    **dict.fromkeys(
        ("--balance-alpha", "--balance-threshold", "--balance-metric", "--balance-vexperts-per-rank",
         "--balance-demi-slots", "--balance-demi-weights", "--balance-capacities"),
        "its policy is not available yet",
    ),
    **dict.fromkeys(
        ("--moe-comm-codec-directions", "--moe-comm-order", "--moe-comm-refit-interval", "--no-moe-parallel-saa"),
        "not available yet",
    ),
}  # fmt: skip
"""Flags of features that are still to come."""

ONLY_VALUE = {
    "balance_policy": ("none",),
    "balance_overlap": ("none",),
    "balance_ownership": ("fixed",),
    "balance_profile": ("builtin",),
    "moe_comm_alltoall": ("default", "flat"),
    "moe_comm_codec": ("none",),
    "moe_comm_chunks": ("1",),
    "moe_parallel_schedule": ("megatron",),
}
"""Our flags whose other values are still to come, and the values that work."""

AT_LEAST_ONE = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "make_vocab_size_divisible_by"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "micro_batch_size", "global_batch_size"),
    *("train_iters", "train_samples", "eval_interval", "log_interval", "tensorboard_log_interval"),
)

NO_EFFECT_WITHOUT_POLICY = (
    *("balance_guest_slots", "balance_interval", "balance_load", "balance_predictor", "balance_token_split"),
    *("balance_explain", "balance_log_dir", "balance_timeline"),
)


@dataclass(frozen=True)
class Machine:
    """What the flags are checked against."""

    world_size: int
    cuda: bool
    transformer_engine: bool
    apex: bool

    @classmethod
    def here(cls, world_size: int) -> "Machine":
        """This machine, with `world_size` processes in the job."""
        import torch

        found = [importlib.util.find_spec(name) is not None for name in ("transformer_engine", "apex")]
        return cls(world_size, torch.cuda.is_available(), found[0], found[1])


@dataclass(frozen=True)
class Layout:
    """What follows from the flags and the machine."""

    FUSIONS: ClassVar[tuple[str, ...]] = (
        *("bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "apply_rope_fusion"),
        *("persist_layer_norm", "gradient_accumulation_fusion", "overlap_p2p_comm"),
    )

    backend: str
    transformer_impl: str
    global_batch_size: int
    max_position_embeddings: int
    ffn_hidden_size: int
    moe_ffn_hidden_size: int | None
    expert_tensor_parallel_size: int
    virtual_pipeline_size: int | None
    split: str | None
    bias_activation_fusion: bool
    masked_softmax_fusion: bool
    bias_dropout_fusion: bool
    apply_rope_fusion: bool
    persist_layer_norm: bool
    gradient_accumulation_fusion: bool
    overlap_p2p_comm: bool


def check(values: Mapping[str, Any], given: Collection[str], machine: Machine) -> tuple[Layout, list[str]]:
    """Check the flags against each other and the machine.

    Args:
        values: every flag's value by field name.
        given: names of the flags that the user wrote.
        machine: processes and libraries.

    Returns:
        The derived layout and notices for the log, one sentence each.
    """
    notices: list[str] = []
    _required(values)
    _available(values, given)
    backend, impl = _backends(values, given, machine, notices)
    data_parallel = _data_parallel_size(values, machine.world_size)
    _model_shape(values)
    virtual = _virtual_pipeline_size(values)
    expert_tp = values["expert_tensor_parallel_size"] or values["tensor_model_parallel_size"]
    moe_ffn = _moe(values, given, expert_tp, machine, notices)
    fused = machine.cuda
    gated_fusion = values["swiglu"] and values["bias_swiglu_fusion"] and not values["add_bias_linear"]
    plain_fusion = not values["swiglu"] and values["bias_gelu_fusion"] and not values["num_moe_experts"]
    return Layout(
        backend=backend,
        transformer_impl=impl,
        global_batch_size=_global_batch_size(values, data_parallel),
        max_position_embeddings=_positions(values),
        ffn_hidden_size=_ffn_hidden_size(values),
        moe_ffn_hidden_size=moe_ffn,
        expert_tensor_parallel_size=expert_tp,
        virtual_pipeline_size=virtual,
        split=_data(values, notices),
        bias_activation_fusion=fused and (gated_fusion or plain_fusion),
        masked_softmax_fusion=fused and values["masked_softmax_fusion"],
        bias_dropout_fusion=fused and values["bias_dropout_fusion"],
        apply_rope_fusion=fused and impl == "transformer_engine" and values["apply_rope_fusion"],
        persist_layer_norm=fused and (machine.apex or impl == "transformer_engine") and values["persist_layer_norm"],
        gradient_accumulation_fusion=fused
        and (machine.apex or impl == "transformer_engine")
        and values["gradient_accumulation_fusion"],
        overlap_p2p_comm=virtual is not None and values["overlap_p2p_comm"],
    ), notices


def _required(values: Mapping[str, Any]) -> None:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr"):
        if values[name] is None:
            raise ValueError(f"--{name.replace('_', '-')} is required")
    if (values["train_iters"] is None) == (values["train_samples"] is None):
        raise ValueError("give --train-iters N or --train-samples N, and only one of them")
    if values["train_samples"] is not None and values["rampup_batch_size"] is None and values["lr_decay_iters"]:
        raise ValueError("--lr-decay-iters: with --train-samples use --lr-decay-samples")
    for name in AT_LEAST_ONE:
        if values[name] is not None and values[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} {values[name]}: give at least 1")


def _available(values: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuse features that are not there yet, and balancing flags that nothing would read."""
    for name, allowed in ONLY_VALUE.items():
        if values[name] not in allowed:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {values[name]}: not available yet; use {flag} {' or '.join(allowed)}")
    for name in NO_EFFECT_WITHOUT_POLICY:
        if name in given:
            raise ValueError(f"--{name.replace('_', '-')}: has no effect with --balance-policy none; leave it out")
    if values["context_parallel_size"] > 1:
        raise ValueError(f"--context-parallel-size {values['context_parallel_size']}: not supported yet; use 1")


def _backends(
    values: Mapping[str, Any], given: Collection[str], machine: Machine, notices: list[str]
) -> tuple[str, str]:
    """Collective backend and transformer implementation, with the CPU's fallbacks for upstream's defaults."""
    backend, impl = values["distributed_backend"], values["transformer_impl"]
    if backend == "nccl" and not machine.cuda:
        if "distributed_backend" in given:
            raise ValueError("--distributed-backend nccl: needs CUDA; use --distributed-backend gloo")
        backend = "gloo"
        notices.append("no CUDA here: --distributed-backend gloo")
    if impl == "transformer_engine" and not (machine.cuda and machine.transformer_engine):
        if "transformer_impl" in given:
            raise ValueError(
                "--transformer-impl transformer_engine: needs CUDA and the package transformer-engine "
                "(pip install megatron-balance[gpu]); use --transformer-impl local"
            )
        impl = "local"
        notices.append("no Transformer Engine here: --transformer-impl local")
    if impl == "inference_optimized":
        raise ValueError("--transformer-impl inference_optimized: this program trains; use local or transformer_engine")
    return backend, impl


def _data_parallel_size(values: Mapping[str, Any], world_size: int) -> int:
    tensor, pipeline = values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]
    if world_size % (tensor * pipeline):
        raise ValueError(
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline}: "
            f"must divide the number of processes ({world_size}); change them or start another number"
        )
    expert = values["expert_model_parallel_size"] * (values["expert_tensor_parallel_size"] or tensor)
    if world_size % (expert * pipeline):
        raise ValueError(
            f"--expert-model-parallel-size {values['expert_model_parallel_size']} x expert tensor parallelism "
            f"{values['expert_tensor_parallel_size'] or tensor} x --pipeline-model-parallel-size {pipeline}: must "
            f"divide the number of processes ({world_size}); lower one of them (--expert-tensor-parallel-size 1)"
        )
    if values["sequence_parallel"] and tensor == 1:
        raise ValueError("--sequence-parallel: needs --tensor-model-parallel-size above 1; leave it out")
    return world_size // (tensor * pipeline)


def _model_shape(values: Mapping[str, Any]) -> None:
    tensor = values["tensor_model_parallel_size"]
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    if hidden % heads and values["kv_channels"] is None:
        raise ValueError(f"--hidden-size {hidden}: must be a multiple of --num-attention-heads {heads}")
    if heads % tensor:
        raise ValueError(f"--num-attention-heads {heads}: must be a multiple of --tensor-model-parallel-size {tensor}")
    if values["sequence_parallel"] and values["seq_length"] % tensor:
        raise ValueError(
            f"--seq-length {values['seq_length']}: with --sequence-parallel it must be a multiple of "
            f"--tensor-model-parallel-size {tensor}"
        )
    if values["swiglu"] and values["squared_relu"]:
        raise ValueError("--swiglu and --squared-relu: choose one activation")
    if values["bf16"] and values["fp16"]:
        raise ValueError("--bf16 and --fp16: choose one precision")
    if values["recompute_granularity"] == "full" and not (
        values["recompute_method"] and values["recompute_num_layers"]
    ):
        raise ValueError("--recompute-granularity full: also give --recompute-method uniform --recompute-num-layers 1")
    if values["overlap_param_gather"] and not (values["use_distributed_optimizer"] and values["overlap_grad_reduce"]):
        raise ValueError("--overlap-param-gather: also give --use-distributed-optimizer --overlap-grad-reduce")


def _positions(values: Mapping[str, Any]) -> int:
    sequence, positions = values["seq_length"], values["max_position_embeddings"] or values["seq_length"]
    if sequence > positions:
        raise ValueError(f"--max-position-embeddings {positions}: must be at least --seq-length {sequence}")
    return positions


def _ffn_hidden_size(values: Mapping[str, Any]) -> int:
    """Default inner width: 4 x hidden, or two thirds of it in multiples of 64 for SwiGLU, which has three matrices."""
    if values["ffn_hidden_size"]:
        return values["ffn_hidden_size"]
    return int(values["hidden_size"] * 4 * 2 / 3 / 64) * 64 if values["swiglu"] else 4 * values["hidden_size"]


def _virtual_pipeline_size(values: Mapping[str, Any]) -> int | None:
    layers, stages = values["num_layers"], values["pipeline_model_parallel_size"]
    uneven = values["num_layers_in_first_pipeline_stage"] or values["num_layers_in_last_pipeline_stage"]
    if layers % stages and not uneven:
        raise ValueError(f"--num-layers {layers}: must be a multiple of --pipeline-model-parallel-size {stages}")
    per_chunk = values["num_layers_per_virtual_pipeline_stage"]
    if per_chunk is None:
        return None
    if stages == 1:
        raise ValueError("--num-layers-per-virtual-pipeline-stage: needs --pipeline-model-parallel-size above 1")
    if stages == 2 and not values["overlap_p2p_comm"]:
        # Batched, the two messages between the same two ranks would be taken for each other
        raise ValueError(
            "--no-overlap-p2p-communication: needs --pipeline-model-parallel-size above 2 with the interleaved schedule"
        )
    if per_chunk < 1 or uneven or layers // stages % per_chunk:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {per_chunk}: must divide the {layers // stages} layers of a stage"
        )
    return layers // stages // per_chunk


def _global_batch_size(values: Mapping[str, Any], data_parallel: int) -> int:
    step = values["micro_batch_size"] * data_parallel
    total = values["global_batch_size"] or step
    if total % step:
        raise ValueError(
            f"--global-batch-size {total}: must be a multiple of --micro-batch-size {values['micro_batch_size']} "
            f"times the data-parallel size {data_parallel}, that is of {step}"
        )
    stages = values["pipeline_model_parallel_size"]
    if values["num_layers_per_virtual_pipeline_stage"] and total // step % stages:
        raise ValueError(
            f"--global-batch-size {total}: the interleaved schedule needs a number of microbatches ({total // step}) "
            f"that is a multiple of --pipeline-model-parallel-size {stages}"
        )
    return total


def _data(values: Mapping[str, Any], notices: list[str]) -> str | None:
    """The split string of a single blend."""
    per_split = [values[f"{split}_data_path"] for split in ("train", "valid", "test")]
    sources = [bool(values["data_path"]), any(per_split), values["mock_data"]]
    if sum(sources) != 1:
        raise ValueError("give one of --data-path, --train-data-path (with --valid-/--test-data-path) and --mock-data")
    if any(per_split) and values["split"]:
        raise ValueError("--split: goes with --data-path; leave it out with --train-data-path")
    if values["tokenizer_type"] is None:
        raise ValueError("--tokenizer-type is required (for --mock-data: NullTokenizer with --vocab-size)")
    if values["data_path"] and values["split"] is None:
        notices.append(f"--data-path without --split: using {DEFAULT_SPLIT}")
        return DEFAULT_SPLIT
    return values["split"]


def _moe(
    values: Mapping[str, Any], given: Collection[str], expert_tp: int, machine: Machine, notices: list[str]
) -> int | None:
    """Checks of the MoE flags; returns the experts' inner width."""
    experts, parallel = values["num_moe_experts"], values["expert_model_parallel_size"]
    if experts is None:
        if parallel > 1:
            raise ValueError(f"--expert-model-parallel-size {parallel}: needs --num-experts")
        return values["moe_ffn_hidden_size"]
    if experts < 1 or experts % parallel:
        raise ValueError(f"--num-experts {experts}: must be a multiple of --expert-model-parallel-size {parallel}")
    if not 1 <= values["moe_router_topk"] <= experts:
        raise ValueError(f"--moe-router-topk {values['moe_router_topk']}: choose 1 to --num-experts {experts}")
    if isinstance(values["moe_layer_freq"], list) and len(values["moe_layer_freq"]) != values["num_layers"]:
        raise ValueError(
            f"--moe-layer-freq: the list has {len(values['moe_layer_freq'])} entries for --num-layers "
            f"{values['num_layers']}"
        )
    if values["tensor_model_parallel_size"] > 1 and not values["sequence_parallel"]:
        raise ValueError(
            f"--tensor-model-parallel-size {values['tensor_model_parallel_size']}: with --num-experts also give "
            "--sequence-parallel"
        )
    if values["moe_pad_expert_input_to_capacity"] and values["moe_expert_capacity_factor"] is None:
        raise ValueError("--moe-pad-expert-input-to-capacity: also give --moe-expert-capacity-factor")
    if values["moe_token_dispatcher_type"] == "flex" and not machine.cuda:
        raise ValueError("--moe-token-dispatcher-type flex: needs CUDA; use alltoall")
    if values["moe_layer_impl"] == "balanced":
        _balanced_layer(values, given, expert_tp, notices)
    if values["moe_ffn_hidden_size"] is None:
        notices.append("--moe-ffn-hidden-size not given: the experts use --ffn-hidden-size")
        return _ffn_hidden_size(values)
    return values["moe_ffn_hidden_size"]


def _balanced_layer(values: Mapping[str, Any], given: Collection[str], expert_tp: int, notices: list[str]) -> None:
    """What `--moe-layer-impl balanced` does not do."""
    if expert_tp > 1:
        raise ValueError(
            f"--expert-tensor-parallel-size {expert_tp} (default: the tensor-parallel size): the balanced MoE layer "
            "keeps experts whole; use --expert-tensor-parallel-size 1, or --moe-layer-impl megatron"
        )
    for name in ("moe_shared_expert_overlap", "moe_router_padding_for_quantization", "moe_router_padding_for_fp8"):
        if values[name]:
            raise ValueError(f"--{name.replace('_', '-')}: not available with --moe-layer-impl balanced; leave it out")
    if "moe_grouped_gemm" in given:
        notices.append("--moe-grouped-gemm has no effect: the balanced MoE layer always computes in one grouped GEMM")
