"""Checks of flags against the machine: its backend, packages, kernels and profilers."""

import math

from megatron_balance.cli.command_line import CommandLine
from megatron_balance.config.flags import flag_of, in_words
from megatron_balance.device.machine import EXPECTED_MODULES, KERNELS

ACTIVATIONS = ("swiglu", "squared_relu", "quick_geglu")
"""Activations other than GELU."""

KEEP_DOCUMENTS_APART = ("reset_attention_mask", "dataloader_inter_document_masking", "sft")

INSTALL = "in the checkout: pip install --no-build-isolation -e '.[gpu]'"

NEEDS_ENGINE = f"needs Transformer Engine on CUDA ({INSTALL})"


def choose_backend(line: CommandLine) -> None:
    """Replace a default backend or implementation of layers that the machine lacks; refuse one that was asked for."""
    if line.distributed_backend == "nccl" and not line.machine.cuda:
        if "distributed_backend" in line.given:
            raise ValueError("--distributed-backend nccl: needs CUDA; use --distributed-backend gloo")
        line.distributed_backend = "gloo"
        line.notices.append("no CUDA here: --distributed-backend gloo")
    if line.average_in_collective and line.distributed_backend == "gloo":
        raise ValueError("--ddp-average-in-collective: gloo cannot average; leave it out")
    if line.transformer_impl == "transformer_engine" and not line.has_engine:
        if "transformer_impl" in line.given:
            raise ValueError(f"--transformer-impl transformer_engine: {NEEDS_ENGINE}; use local")
        line.transformer_impl = "local"
        line.notices.append("no Transformer Engine here: --transformer-impl local")


def check_packages(line: CommandLine) -> None:
    """Refuse packages that megatron-core cannot use, and flags that need a missing package."""
    machine = line.machine
    absent = not line.has_engine
    if machine.cuda and machine.unfit:
        raise ValueError(f"{machine.unfit}; install one of those ({INSTALL}) or uninstall it")
    unbuilt = sorted(machine.unbuilt.intersection(EXPECTED_MODULES))
    if machine.cuda and unbuilt and (line.transformer_impl == "local" or absent):
        absent = f"apex has no {' and no '.join(unbuilt)}, which megatron-core would use"
        raise ValueError(f"{absent}: build it with APEX_CPP_EXT=1 APEX_CUDA_EXT=1, or uninstall it")
    if line.transformer_impl == "local" and (line.bf16 or line.fp16):
        line.refuse(["fp32_residual_connection"], f"{NEEDS_ENGINE}; leave it out")
    if absent:
        line.refuse(("moe_router_fusion", "moe_permute_fusion"), f"{NEEDS_ENGINE}; leave it out")
    selective = (line.recompute_granularity == "selective" and line.recompute_modules) or ()
    # megatron-core's recomputation of these modules imports Transformer Engine to ask whether FP8 is in use
    again = ("layernorm", "moe_act") if line.moe_layer_impl == "megatron" else ("layernorm",)
    if not machine.transformer_engine and (named := [module for module in again if module in selective]):
        raise ValueError(f"--recompute-modules {' '.join(named)}: needs transformer-engine ({INSTALL}); leave it out")
    check_expert_gemm(line)
    if line.cross_entropy_loss_fusion and line.cross_entropy_fusion_impl == "te" and absent:
        raise ValueError(f"--cross-entropy-fusion-impl te: {NEEDS_ENGINE}; use native")


def check_expert_gemm(line: CommandLine) -> None:
    """Refuse `--moe-expert-gemm te` without Transformer Engine."""
    if line.moe_expert_gemm == "te" and not line.has_engine:
        raise ValueError(f"--moe-expert-gemm te: {NEEDS_ENGINE}; use default")


def note_connections(line: CommandLine) -> None:
    """Add a notice if all kernels share one queue, in which exchanges and transfers delay computation."""
    hidden = []
    if line.balance_policy != "none" and line.balance_overlap == "blockwise":
        hidden.append("--balance-overlap blockwise")
    if line.moe_comm_chunks != "1":
        hidden.append(line["moe_comm_chunks"])
    if line.overlap_moe_expert_parallel_comm:
        hidden.append("--overlap-moe-expert-parallel-comm")
    if not (line.machine.cuda and line.machine.connections == "1" and line.num_moe_experts and hidden):
        return
    tensor = line["tensor_model_parallel_size"]
    kept = f", unless what {tensor} overlaps with it matters more" if line.tensor_model_parallel_size > 1 else ""
    effect = f"{' and '.join(hidden)} can hide little, because waiting messages hold up the experts behind them"
    line.notices.append(f"CUDA_DEVICE_MAX_CONNECTIONS=1: {effect}; unset it{kept}")


def check_context_parallelism(line: CommandLine) -> None:
    """Refuse context parallelism that this machine's attention does not support."""
    context = line.context_parallel_size
    flag = line["context_parallel_size"]
    (kind, *others) = line.cp_comm_type
    if {*others} - {kind}:
        # megatron-core 0.16 gives each layer the entry of the layer after it
        raise ValueError(f"{line['cp_comm_type']}: entries that differ between layers are not supported; give one")
    sizes = line.hierarchical_context_parallel_sizes or []
    written = f"--hierarchical-context-parallel-sizes {in_words(sizes)}"
    if sizes and kind != "a2a+p2p":
        raise ValueError(f"{written}: belongs to --cp-comm-type a2a+p2p")
    if context == 1:
        return
    if line.machine.cuda and line.transformer_impl == "local":
        raise ValueError(
            f"{flag}: on CUDA, it needs --transformer-impl transformer_engine ({INSTALL}); or leave it out"
        )
    if kind == "a2a+p2p" and len(sizes) != 2:
        raise ValueError("--cp-comm-type a2a+p2p: also give --hierarchical-context-parallel-sizes A2A P2P")
    if sizes and math.prod(sizes) != context:
        raise ValueError(f"{written}: their product must be {flag}")
    apart = [name for name in KEEP_DOCUMENTS_APART if getattr(line, name)]
    if apart and line.transformer_impl == "transformer_engine":
        reason = "Transformer Engine splits each document among the ranks, which needs padding"
        raise ValueError(f"{flag_of(apart[0])}: not with {flag}, because {reason}; leave one of them out")
    tensor = line.tensor_model_parallel_size
    heads = line.num_attention_heads
    groups = line.num_query_groups if line.group_query_attention else heads
    sharing = {"a2a": context, "a2a+p2p": sizes[0] if sizes else 1}.get(kind, 1)
    for name, count in (("num_attention_heads", heads), ("num_query_groups", groups)):
        if count % (tensor * sharing) and sharing > 1:
            exchanging = flag if kind == "a2a" else f"{sharing} (--hierarchical-context-parallel-sizes)"
            must = f"must be a multiple of {line['tensor_model_parallel_size']} x {exchanging}"
            raise ValueError(f"{flag_of(name)} {count}: with --cp-comm-type {kind} it {must}; or use p2p")
    if kind == "a2a" and line.transformer_impl == "local" and line.softmax_type != "vanilla":
        raise ValueError(f"{line['softmax_type']}: with --cp-comm-type a2a it needs Transformer Engine; use p2p")


def choose_fusions(line: CommandLine) -> None:
    """Turn off fused kernels that the machine lacks or that do not suit the flags."""
    machine = line.machine
    # A dry run computes nothing, but megatron-core looks for the kernels when it builds a model
    real = machine.cuda and not line.dry_run
    # With Transformer Engine, only the output layer, which is megatron-core's own, uses one of apex's kernels
    local = line.transformer_impl == "local"
    wanted = [name for name in KERNELS if getattr(line, name) and (name != "masked_softmax_fusion" or local)]
    missing = [flag_of(name) for name in wanted if real and not machine.fuses(name)]
    if missing:
        line.notices.append(f"no kernels of apex here: {' '.join(missing)}")
    # The fused SwiGLU kernel supports neither a clamp nor an offset
    plain_gate = line.activation_func_clamp_value is None and not line.glu_linear_offset
    gated = line.swiglu and line.bias_swiglu_fusion and not line.add_bias_linear and plain_gate
    gelu = not any(getattr(line, name) for name in ACTIVATIONS)
    plain = gelu and line.bias_gelu_fusion and line.add_bias_linear and not line.num_moe_experts
    line.bias_activation_fusion = machine.cuda and (gated or plain)
    line.bias_dropout_fusion = machine.cuda and line.bias_dropout_fusion
    # The fused kernel knows neither latent attention nor YaRN's scale of queries and keys
    plain_rope = not line.multi_latent_attention and line.position_embedding_type != "yarn"
    line.apply_rope_fusion = real and machine.transformer_engine and line.apply_rope_fusion and plain_rope
    line.persist_layer_norm = real and (machine.apex or not local) and line.persist_layer_norm
    line.moe_permute_fusion = real and line.moe_permute_fusion
    for name in KERNELS:
        setattr(line, name, real and getattr(line, name) and machine.fuses(name))


def check_watching(line: CommandLine) -> None:
    """Check the flags of logs and profilers; add a notice for those without an effect on this machine."""
    machine = line.machine
    if line.profile:
        steps = f"{line['profile_step_start']} {line['profile_step_end']}"
        if not 0 <= line.profile_step_start < line.profile_step_end:
            raise ValueError(f"{steps}: give 0 or more, and a later end")
        if line.use_pytorch_profiler and line.tensorboard_dir is None:
            raise ValueError("--use-pytorch-profiler: also give --tensorboard-dir, where it writes traces")
        if not line.use_pytorch_profiler and not machine.cuda:
            raise ValueError("--profile: starts CUDA's profiler; on a CPU, also give --use-pytorch-profiler")
        absent = [rank for rank in line.profile_ranks if not 0 <= rank < machine.world_size]
        if absent:
            line.notices.append(f"--profile-ranks {in_words(absent)}: no such rank among {machine.world_size}")
    if line.record_memory_history and not machine.cuda:
        raise ValueError("--record-memory-history: records memory of a CUDA device; leave it out on a CPU")
    if line.log_device_memory_used and not machine.cuda:
        line.notices.append("--log-device-memory-used has no effect without CUDA")
    if line.log_memory_interval is not None and line.log_memory_interval % line.log_interval:
        raise ValueError(f"{line['log_memory_interval']}: must be a multiple of {line['log_interval']}")
    if line.manual_gc_interval < 0:
        raise ValueError(f"{line['manual_gc_interval']}: give 0 (never) or more")
    if not line.wandb_project:
        return
    if not machine.wandb:
        raise ValueError(f"{line['wandb_project']}: needs the package wandb; pip install wandb, or leave the flag out")
    if line.wandb_exp_name == "":
        raise ValueError("--wandb-exp-name: is empty; give the run a name, or leave the flag out")
    if not (line.wandb_save_dir or line.save):
        raise ValueError(f"{line['wandb_project']}: also give --wandb-save-dir or --save, for its local files")
