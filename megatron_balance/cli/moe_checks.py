"""Checks of the flags for mixtures of experts and for balancing. Called by checks.py and app/integrate.py."""

import math
from pathlib import Path

from megatron_balance.cli.command_line import CommandLine
from megatron_balance.comm.codecs import load_codec
from megatron_balance.comm.registry import ALL_TO_ALLS, find_all_to_all
from megatron_balance.config.flags import flag_of
from megatron_balance.config.run_config import CommConfig
from megatron_balance.flow.chunks.choice import find_degrees
from megatron_balance.flow.chunks.order import find_order
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies import load_policy, option_fields, policy_options, registered
from megatron_balance.profile.cluster_profile import RANGES

NOT_BALANCED = ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8", "use_te_activation_func")
"""Fields that only megatron-core's MoE layer reads. Versions after 0.16.1 lack some of them."""

IDLE_IN_BALANCED = {
    "moe_use_legacy_grouped_gemm": "it has grouped products of its own",
    "use_fused_weighted_squared_relu": "its experts compute the activation themselves",
    "moe_shared_expert_overlap": "shared experts run while the host waits for the numbers of rows; --moe-comm-chunks "
    "auto hides the exchange of tokens",
}
"""Fields that only make megatron-core's MoE layer faster -> the balanced layer's equivalent."""


def check_moe(line: CommandLine) -> None:
    """Check the flags of MoE layers and balancing; set the experts' inner width and the token dispatcher."""
    experts = line.num_moe_experts
    if experts is None:
        for name in ("expert_model_parallel_size", "balance_policy"):
            if getattr(line, name) not in (1, "none"):
                raise ValueError(f"{line[name]}: needs --num-experts")
        idle = sorted(flag_of(name) for name in line.given if name.startswith("moe_"))
        line.notices += [f"{flag} has no effect without --num-experts" for flag in idle]
        return
    if experts < 1 or experts % line.expert_model_parallel_size:
        raise ValueError(f"{line['num_moe_experts']}: must be a multiple of {line['expert_model_parallel_size']}")
    if not 1 <= line.moe_router_topk <= experts:
        raise ValueError(f"{line['moe_router_topk']}: choose 1 to {line['num_moe_experts']}")
    if line.moe_expert_capacity_factor == 0:
        raise ValueError(f"{line['moe_expert_capacity_factor']}: would drop every token; give more, or leave it out")
    if line.moe_pad_expert_input_to_capacity and line.moe_expert_capacity_factor is None:
        raise ValueError("--moe-pad-expert-input-to-capacity: also give --moe-expert-capacity-factor")
    if line.moe_token_dispatcher_type == "flex" and not line.machine.cuda:
        raise ValueError("--moe-token-dispatcher-type flex: needs CUDA; use alltoall")
    if line.moe_shared_expert_intermediate_size is not None and line.add_bias_linear:
        remedy = "megatron-core's shared experts have no biases; also give --disable-bias-linear"
        raise ValueError(f"{line['moe_shared_expert_intermediate_size']}: {remedy}")
    if line.moe_layer_impl == "balanced":
        line.refuse(NOT_BALANCED, "not available with --moe-layer-impl balanced; leave it out")
        idle = {name: instead for name, instead in IDLE_IN_BALANCED.items() if line.get(name)}
        line.notices += [f"{flag_of(name)} has no effect with --moe-layer-impl balanced: {idle[name]}" for name in idle]
        # megatron-core accepts recomputation of moe_act only together with this flag
        if "moe_grouped_gemm" in line.given and "moe_act" not in (line.recompute_modules or ()):
            reason = "the balanced MoE layer always computes in one grouped GEMM"
            line.notices.append(f"--moe-grouped-gemm has no effect: {reason}")
    elif line.moe_expert_gemm != "default":
        raise ValueError(f"{line['moe_expert_gemm']}: needs --moe-layer-impl balanced")
    if line.moe_flex_rows == "bound":
        _check_rows_bound(line)
    _check_schedule(line)
    if line.balance_policy != "none":
        _check_policy(line)
    _check_given_choices(line)
    kinds, coefficients = (
        value if isinstance(value, list) else [value]
        for value in (line.moe_router_load_balancing_type, line.moe_aux_loss_coeff)
    )
    if len(coefficients) != len(kinds):
        one_each = f"give one number for each kind of {line['moe_router_load_balancing_type']}"
        raise ValueError(f"{line['moe_aux_loss_coeff']}: {one_each}")
    _check_quantiles(line)
    if line.moe_router_num_groups:
        _check_groups(line)
    if line.moe_router_enable_expert_bias and line.moe_router_score_function == "softmax":
        for name in ("moe_router_fusion", "moe_router_num_groups"):
            if getattr(line, name):
                remedy = "use --moe-router-score-function sigmoid, or leave one of them out"
                raise ValueError(f"{line[name]}: not with --moe-router-enable-expert-bias and softmax scores; {remedy}")
    if line.moe_ffn_hidden_size is None:
        line.notices.append("--moe-ffn-hidden-size not given: the experts use --ffn-hidden-size")
        line.moe_ffn_hidden_size = line.ffn_hidden_size
    line.moe_token_dispatcher_type = _token_dispatcher(line)


def _check_groups(line: CommandLine) -> None:
    """Check group-limited routing. megatron-core scores a group by its topk / group-topk best experts, rounded down."""
    flag = line["moe_router_group_score_topk"]
    groups = line.moe_router_num_groups
    size = line.num_moe_experts // groups
    chosen = line.moe_router_group_topk
    if chosen is not None and line.moe_router_topk > chosen * size:
        room = f"the {chosen * size} experts in {chosen} of {groups} groups ({line['moe_router_group_topk']})"
        raise ValueError(f"{line['moe_router_topk']}: more than {room}; choose fewer experts, or more groups")
    if line.moe_router_group_score_topk is None:
        if chosen is not None and line.moe_router_topk < chosen:
            reason = f"more than {line['moe_router_topk']}, so no expert would score the groups"
            remedy = "choose fewer groups, or give --moe-router-group-score-topk 1"
            raise ValueError(f"{line['moe_router_group_topk']}: {reason}; {remedy}")
        return
    if not 1 <= line.moe_router_group_score_topk <= size:
        raise ValueError(f"{flag}: choose 1 to {size}, the number of experts of each of {groups} groups")
    if line.moe_router_fusion:
        raise ValueError(f"--moe-router-fusion: not with {flag}; leave out one of them")


def _check_given_choices(line: CommandLine) -> None:
    """Check the flags that choose experts in place of the router."""
    workload = line.moe_router_force_workload != "none"
    if line.moe_routing_replay_path is not None:
        if workload:
            reason = "both choose the experts"
            raise ValueError(
                f"{line['moe_router_force_workload']}: not with {line['moe_routing_replay_path']}, because {reason}; "
                "leave one of them out"
            )
        trace = line.get("moe_routing_trace_path")
        if trace is not None and Path(trace).resolve() == Path(line.moe_routing_replay_path).resolve():
            reason = f"not with {line['moe_routing_replay_path']}, because the trace would replace the one it reads"
            raise ValueError(f"{line['moe_routing_trace_path']}: {reason}; choose another directory")
    elif not workload:
        return
    flag = line["moe_router_force_workload" if workload else "moe_routing_replay_path"]
    line.refuse(("moe_router_force_load_balancing", "moe_router_fusion"), f"not with {flag}; leave out one of them")
    # The value is a string or a list
    for kind in ("sinkhorn", "quantile_balancing"):
        if kind in line.moe_router_load_balancing_type:
            raise ValueError(f"--moe-router-load-balancing-type {kind}: not with {flag}; use aux_loss or none")


def _check_quantiles(line: CommandLine) -> None:
    """Check what megatron-core's router requires of quantile balancing."""
    kinds = line.moe_router_load_balancing_type
    flag = "--moe-router-load-balancing-type quantile_balancing"
    if "quantile_balancing" not in kinds:
        if "moe_router_quantile_balancing_ema" in line.given:
            line.notices.append(f"--moe-router-quantile-balancing-ema has no effect without {flag}")
        return
    conflicts = {
        "moe_router_load_balancing_type": isinstance(kinds, list) and len(kinds) > 1,
        "moe_aux_loss_coeff": line.moe_aux_loss_coeff not in (0.0, [0.0]),
        "moe_router_enable_expert_bias": line.moe_router_enable_expert_bias,
        "moe_router_fusion": line.moe_router_fusion,
        "moe_router_num_groups": bool(line.moe_router_num_groups),
    }
    for name in (name for name, conflict in conflicts.items() if conflict):
        raise ValueError(f"{line[name]}: not with {flag}, which balances the load alone; leave it out")
    if line.machine.cuda and line.distributed_backend == "gloo":
        raise ValueError(f"{flag}: gloo cannot average the biases of GPUs; use --distributed-backend nccl")
    choices = line.micro_batch_size * line.seq_length * line.moe_router_topk
    if choices % line.num_moe_experts:
        many = "--micro-batch-size x --seq-length x --moe-router-topk"
        raise ValueError(f"{flag}: {many} is {choices}, which must be a multiple of {line['num_moe_experts']}")


def check_paired_passes(line: CommandLine) -> None:
    """Check the requirements of `--overlap-moe-expert-parallel-comm`; switch it off if nothing is exchanged."""
    flag = "--overlap-moe-expert-parallel-comm"
    if line.num_moe_experts is None:
        raise ValueError(f"{flag}: needs --num-experts; or leave it out")
    if line.expert_model_parallel_size == 1:
        line.overlap_moe_expert_parallel_comm = False
    if line.balance_calibrate == "on" and line.overlap_moe_expert_parallel_comm:
        reason = "an exchange that another pass hides has no time of its own"
        raise ValueError(f"{line['balance_calibrate']}: not with {flag}, because {reason}; leave one of them out")


def _check_rows_bound(line: CommandLine) -> None:
    """Check the requirements of `--moe-flex-rows bound`; flow/layer.py checks the device and the widths."""
    dispatcher = line.moe_token_dispatcher_type
    backend = line.moe_flex_dispatcher_backend
    needs = {
        f"--moe-token-dispatcher-type flex, not {dispatcher}": dispatcher == "flex",
        f"--moe-flex-dispatcher-backend hybridep, not {backend}": backend == "hybridep",
        "--moe-layer-impl balanced": line.moe_layer_impl == "balanced",
        "--disable-bias-linear": not line.add_bias_linear,
        "--moe-expert-gemm default": line.moe_expert_gemm == "default",
        "--expert-tensor-parallel-size 1": line.expert_tp == 1,
        "--expert-model-parallel-size above 1": line.expert_model_parallel_size > 1,
    }
    for missing in (need for need, met in needs.items() if not met):
        raise ValueError(f"--moe-flex-rows bound: needs {missing}; or use counted")
    names = ("moe_expert_rank_capacity_factor", "moe_hybridep_pad_uneven_dispatch_inputs")
    line.refuse(names, "not with --moe-flex-rows bound, which has room for all; leave it out")


def _check_schedule(line: CommandLine) -> None:
    """Check the requirements of the parallel schedules (flow/parallel_schedule.py)."""
    schedule = line.moe_parallel_schedule
    tensor = line.tensor_model_parallel_size
    expert_tp = line.expert_tp
    same_tokens = tensor > 1 and not line.sequence_parallel
    if line.moe_layer_impl != "balanced":
        return _check_megatrons_layer(line, same_tokens)
    if expert_tp > 1:
        sharded = f"--expert-tensor-parallel-size {expert_tp}"
        inner = line.moe_ffn_hidden_size or line.ffn_hidden_size
        if line.add_bias_linear:
            remedy = "also give --disable-bias-linear, because each shard would add the second bias; or use 1"
            raise ValueError(f"{sharded} (default: the tensor-parallel size): {remedy}")
        if inner % expert_tp:
            raise ValueError(f"{sharded}: must divide the experts' inner width, --moe-ffn-hidden-size {inner}")
    if schedule == "s2" and line.sequence_parallel:
        reason = "not with --moe-parallel-schedule s2, which routes all tokens on every tensor-parallel rank"
        raise ValueError(f"--sequence-parallel: {reason}; use s1, or leave it out")
    if schedule == "s2" and line.expert_model_parallel_size * expert_tp % tensor:
        ranks = f"{line['expert_model_parallel_size']} x --expert-tensor-parallel-size {expert_tp}"
        must = f"{line['tensor_model_parallel_size']} must divide {ranks}"
        raise ValueError(f"--moe-parallel-schedule s2: {must}; change them, or use s1")
    context = line.context_parallel_size
    if schedule in ("s1", "auto") and same_tokens and line.seq_length % (tensor * context):
        must = f"must be a multiple of {line['tensor_model_parallel_size']} x {line['context_parallel_size']}"
        raise ValueError(f"{line['seq_length']}: with {line['moe_parallel_schedule']} it {must}")
    if "moe_parallel_saa" in line.given and schedule not in ("s2", "auto"):
        raise ValueError(f"--no-moe-parallel-saa: has no effect with {line['moe_parallel_schedule']}; leave it out")
    if schedule in ("megatron", "baseline") and same_tokens:
        repeated = f"experts compute every token {tensor} times; use s1, or --sequence-parallel"
        line.notices.append(f"{line['moe_parallel_schedule']} without --sequence-parallel: {repeated}")


def _check_megatrons_layer(line: CommandLine, same_tokens: bool) -> None:
    if line.moe_parallel_schedule != "megatron":
        raise ValueError(f"{line['moe_parallel_schedule']}: needs --moe-layer-impl balanced")
    tensor = line.tensor_model_parallel_size
    if same_tokens:
        raise ValueError(f"{line['tensor_model_parallel_size']}: --moe-layer-impl megatron needs --sequence-parallel")
    if line.expert_model_parallel_size == 1 and line.expert_tp != tensor:
        size = f"--expert-tensor-parallel-size {line.expert_tp}"
        reason = "without expert parallelism, megatron-core's layer trains each rank's experts on its own tokens alone"
        raise ValueError(f"{size}: {reason}; use {tensor}, or --moe-layer-impl balanced")


def _check_policy(line: CommandLine) -> None:
    """Check the flags that every placement policy needs, then the policy's own requirements."""
    flag = line["balance_policy"]
    name = line.balance_policy
    parallel = line.expert_model_parallel_size
    # A user's policy is constructed only in its own process
    policy = None if ":" in name else load_policy(name, **policy_options(name, vars(line)))
    if line.moe_layer_impl != "balanced":
        raise ValueError(f"{flag}: needs --moe-layer-impl balanced")
    if parallel == 1:
        raise ValueError(f"{flag}: needs --expert-model-parallel-size above 1; use --balance-policy none")
    if line.moe_pad_expert_input_to_capacity:
        reason = f"not with {flag}, because every copy of an expert would be padded to the capacity of all copies"
        remedy = "leave it out (--moe-expert-capacity-factor drops the same tokens without it)"
        raise ValueError(f"--moe-pad-expert-input-to-capacity: {reason}; {remedy}")
    slots = line.balance_guest_slots
    others = line.num_moe_experts * (parallel - 1) // parallel
    if slots < 1 or (slots > others and "balance_guest_slots" in line.given):
        limit = f"{flag} needs 1 to {others}, the number of experts that a rank does not own"
        raise ValueError(f"--balance-guest-slots {slots}: {limit}; or use --balance-policy none")
    read = () if policy is None else policy.options.values()
    line.refuse_idle(sorted(option_fields().difference(read)), flag)
    if line.balance_capacities is not None:
        capacities = line.balance_capacities
        low, high, _ = RANGES["rates"]
        mean = sum(capacities) / len(capacities)
        if mean <= 0 or not all(math.isfinite(one) and low <= one / mean <= high for one in capacities):
            wanted = f"give numbers above 0, {low:g} to {high:g} times their mean"
            raise ValueError(f"{line['balance_capacities']}: {wanted}")
        if len(capacities) != parallel:
            wanted = f"give one number per expert-parallel rank, {parallel} in all"
            raise ValueError(f"{line['balance_capacities']}: {wanted}")
    if policy is not None:
        if policy.sets_quotas and line.balance_token_split == "local_first":
            raise ValueError(f"--balance-token-split local_first: not with {flag}, which sets quotas; leave it out")
        policy.check(Placement.identity(line.num_moe_experts, parallel, slots))
    _check_load(line)
    if line.balance_certify is not None:
        _check_certificate(line)
    if line.balance_ownership == "transfer":
        _check_transfer(line)
    if line.balance_calibrate == "on" and line.balance_log_dir is None:
        raise ValueError("--balance-calibrate on: also give --balance-log-dir, whose record can repeat the run")


def _check_load(line: CommandLine) -> None:
    inner = line.balance_inner_policy
    able = [name for name, policy in registered().items() if policy.adds_guests]
    if inner not in ("none", *able):
        raise ValueError(f"--balance-inner-policy {inner}: choose from none, {', '.join(able)}")
    if line.balance_load != "exact":
        if inner == "none":
            line.refuse_idle(["balance_guest_ring"], "--balance-load predicted")
        return
    if inner != "none":
        reason = f"not with {line['balance_inner_policy']}, which adds exact plans to predicted ones"
        raise ValueError(f"--balance-load exact: {reason}; leave one of them out")
    line.refuse_idle(("balance_interval", "balance_predictor"), "--balance-load exact")
    if ":" in line.balance_policy:
        reason = f"not with {line['balance_policy']}, whose plans the ranks compare once per iteration"
        raise ValueError(f"--balance-load exact: {reason}; use --balance-load predicted, or a policy of this package")


def _check_certificate(line: CommandLine) -> None:
    flag = line["balance_certify"]
    most = line.expert_model_parallel_size - 1
    if not 0 < line.balance_certify <= most:
        raise ValueError(f"{flag}: choose a number above 0, at most {most}, with which one rank may get all rows")
    if line.balance_load != "exact" and line.balance_inner_policy == "none":
        reason = "a plan for a predicted load proves nothing about the rows that arrive"
        raise ValueError(f"{flag}: {reason}; also give --balance-load exact or --balance-inner-policy quota")
    allocates = "allocates the memory for rows itself"
    conflicts = {}
    if "moe_token_dispatcher_type" in line.given and line.moe_token_dispatcher_type != "alltoall":
        conflicts["moe_token_dispatcher_type"] = f"{allocates}; use alltoall"
    if ":" in line.moe_comm_alltoall or line.moe_comm_alltoall == "dedup":
        conflicts["moe_comm_alltoall"] = f"{allocates}; use pipe"
    if line.moe_comm_chunks != "1":
        conflicts["moe_comm_chunks"] = "splits the rows whose number a plan bounds; use 1"
    for name, reason in conflicts.items():
        raise ValueError(f"{flag}: not with {line[name]}, which {reason}, or leave out --balance-certify")


def _check_transfer(line: CommandLine) -> None:
    flag = "--balance-ownership transfer"
    if line.balance_load == "exact":
        reason = f"not with {flag}, which moves experts before tokens are routed"
        raise ValueError(f"--balance-load exact: {reason}; use --balance-load predicted")
    if line.expert_tp > 1:
        size = f"--expert-tensor-parallel-size {line.expert_tp} (default: the tensor-parallel size)"
        raise ValueError(f"{size}: not with {flag}, which moves whole experts; use 1, or leave out one of them")
    if line.tensor_model_parallel_size > 1 and line.add_bias_linear:
        reason = "transfers of biases are not tested under tensor parallelism"
        raise ValueError(f"{line['tensor_model_parallel_size']}: {flag} needs --disable-bias-linear, because {reason}")
    if line.use_precision_aware_optimizer:
        raise ValueError(
            f"--use-precision-aware-optimizer: not with {flag}, which moves float32 state; leave one of them out"
        )


def _token_dispatcher(line: CommandLine) -> str:
    """Return the type of the token dispatcher: the flag's, or `alltoall` if other flags choose how tokens travel."""
    wanted = line.moe_token_dispatcher_type
    gloo = line.distributed_backend == "gloo"
    uneven = line.moe_layer_impl == "megatron" and not line.moe_pad_expert_input_to_capacity
    if line.expert_tp > 1 and uneven and gloo and wanted == "alltoall":
        size = f"--expert-tensor-parallel-size {line.expert_tp} (default: the tensor-parallel size)"
        reason = "megatron-core's layer gathers different numbers of rows from the ranks, which gloo cannot do"
        raise ValueError(f"{size}: {reason}; use --moe-layer-impl balanced, or --moe-pad-expert-input-to-capacity")
    ways = ("moe_comm_alltoall", "moe_comm_codec", "moe_comm_chunks", "moe_parallel_schedule")
    chosen = [name for name in ways if getattr(line, name) != getattr(CommConfig, name)]
    chosen += ["balance_certify"] * (line.balance_certify is not None)
    chosen += ["overlap_moe_expert_parallel_comm"] * (line.overlap_moe_expert_parallel_comm and wanted != "flex")
    if "moe_comm_codec" not in chosen:
        line.refuse_idle(["moe_comm_codec_directions"], "--moe-comm-codec none")
    chunks = line.moe_comm_chunks
    find_degrees(chunks)
    if chunks == "1":
        line.refuse_idle(("moe_comm_order", "moe_comm_refit_interval"), "--moe-comm-chunks 1")
    if find_order(line.moe_comm_order) is None and chunks != "auto":
        flag = line["moe_comm_order"]
        raise ValueError(f"--moe-comm-chunks {chunks}: with {flag} the schedule decides the number; use auto")
    if not chosen:
        return wanted
    _check_exchange(line, gloo)
    flags = " ".join(line[name] for name in chosen)
    if line.moe_layer_impl != "balanced":
        raise ValueError(f"{flags}: needs --moe-layer-impl balanced")
    if wanted != "alltoall" and "moe_token_dispatcher_type" in line.given:
        raise ValueError(f"--moe-token-dispatcher-type {wanted}: not with {flags}; use alltoall")
    if line.expert_model_parallel_size == 1:
        line.notices.append(f"{flags} has no effect with --expert-model-parallel-size 1")
    if wanted != "alltoall":
        line.notices.append(f"{flags}: --moe-token-dispatcher-type alltoall")
    return "alltoall"


def _check_dedup(line: CommandLine) -> None:
    flag = line["moe_comm_alltoall"]
    if find_order(line.moe_comm_order) is None:
        reason = f"not with {flag}, whose chunks are runs of whole tokens, while DEMI divides the rows of each expert"
        raise ValueError(f"{line['moe_comm_order']}: {reason}; use optsche, or another all-to-all")
    if line.moe_parallel_schedule == "s2" and line.tensor_model_parallel_size > 1:
        reason = f"not with {flag}, because s2 divides the rows of one token among tensor-parallel ranks"
        raise ValueError(f"--moe-parallel-schedule s2: {reason}; use s1, or another all-to-all")


def _check_exchange(line: CommandLine, gloo: bool) -> None:
    cuda = line.machine.cuda
    name = line.moe_comm_alltoall
    if name != "default":
        find_all_to_all(name)
        if gloo and cuda and name in ALL_TO_ALLS and name != "flat":
            raise ValueError(
                f"--moe-comm-alltoall {name}: gloo sends no messages from GPUs; use --distributed-backend nccl"
            )
    if name == "dedup":
        _check_dedup(line)
    codec = line.moe_comm_codec
    load_codec(codec)
    if codec == "zfp" and cuda:
        raise ValueError("--moe-comm-codec zfp: zfp works on the CPU only; use fp8 or int8")
    short = [flag_of(dtype) for dtype in ("bf16", "fp16") if getattr(line, dtype)]
    if short and codec in ("bf16", "fp16"):
        raise ValueError(
            f"--moe-comm-codec {codec}: saves nothing, rows have 16 bits with {short[0]}; use fp8, int8 or none"
        )
