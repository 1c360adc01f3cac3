"""Checks of the flags for mixtures of experts and for balancing. Called by checks.py."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from megatron_balance.comm.codecs import load_codec
from megatron_balance.comm.registry import ALL_TO_ALLS, find_all_to_all
from megatron_balance.config.flags import flag_of
from megatron_balance.config.run_config import CommConfig
from megatron_balance.flow.chunks.choice import find_degrees
from megatron_balance.flow.chunks.order import find_order
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies import load_policy, option_fields, policy_options
from megatron_balance.profile.profile_file import RANGES

NOT_BALANCED = (*("moe_router_padding_for_quantization", "moe_router_padding_for_fp8", "use_te_activation_func"),)
"""Fields that only megatron-core's MoE layer reads; versions after 0.16.1 lack some of them."""

IDLE_IN_BALANCED = {
    "moe_use_legacy_grouped_gemm": "it has grouped products of its own",
    "use_fused_weighted_squared_relu": "its experts compute the activation themselves",
    "moe_shared_expert_overlap": "shared experts run while the host waits for the numbers of rows; --moe-comm-chunks "
    "auto hides the exchange of tokens",
}
"""Fields of megatron-core's MoE layer that only make it faster, and what the balanced layer does instead."""


def check_moe(
    values: Mapping[str, Any],
    given: Collection[str],
    *,
    expert_tp: int,
    ffn_hidden_size: int,
    cuda: bool,
    notices: list[str],
) -> int | None:
    """Check the MoE flags and return the experts' inner width.

    Args:
        values: every flag's value by field name.
        given: fields whose flags the user wrote.
        expert_tp: expert-tensor-parallel size.
        ffn_hidden_size: inner width of dense layers, and of experts by default.
        cuda: whether there is a CUDA device.
        notices: list that sentences for the log are appended to.

    Raises:
        ValueError: the error names the flag, its value and the remedy.
    """
    experts = values["num_moe_experts"]
    parallel = values["expert_model_parallel_size"]
    if experts is None:
        _no_experts(values, given, notices)
        return values["moe_ffn_hidden_size"]
    if experts < 1 or experts % parallel:
        raise ValueError(f"--num-experts {experts}: must be a multiple of --expert-model-parallel-size {parallel}")
    if not 1 <= values["moe_router_topk"] <= experts:
        raise ValueError(f"--moe-router-topk {values['moe_router_topk']}: choose 1 to --num-experts {experts}")
    if values["moe_pad_expert_input_to_capacity"] and values["moe_expert_capacity_factor"] is None:
        raise ValueError("--moe-pad-expert-input-to-capacity: also give --moe-expert-capacity-factor")
    if values["moe_token_dispatcher_type"] == "flex" and not cuda:
        raise ValueError("--moe-token-dispatcher-type flex: needs CUDA; use alltoall")
    shared = values["moe_shared_expert_intermediate_size"]
    if shared is not None and values["add_bias_linear"]:
        raise ValueError(
            f"--moe-shared-expert-intermediate-size {shared}: megatron-core's shared experts have no biases; also give "
            "--disable-bias-linear"
        )
    if values["moe_layer_impl"] == "balanced":
        _balanced_layer(values, given, notices)
    elif values["moe_expert_gemm"] != "default":
        raise ValueError(f"--moe-expert-gemm {values['moe_expert_gemm']}: needs --moe-layer-impl balanced")
    if values["moe_flex_rows"] == "bound":
        _rows_bound(values, expert_tp)
    _schedule(values, given, expert_tp=expert_tp, ffn_hidden_size=ffn_hidden_size, notices=notices)
    if values["balance_policy"] != "none":
        _policy(values, given)
    if values["moe_router_force_workload"] != "none":
        _forced_workload(values)
    if values["moe_router_num_groups"] and values["moe_router_group_score_topk"] is not None:
        _group_scores(values)
    if values["moe_ffn_hidden_size"] is None:
        notices.append("--moe-ffn-hidden-size not given: the experts use --ffn-hidden-size")
        return ffn_hidden_size
    return values["moe_ffn_hidden_size"]


def _no_experts(values: Mapping[str, Any], given: Collection[str], notices: list[str]) -> None:
    """Check that no flag needs experts, and note those that have no effect without them."""
    if (parallel := values["expert_model_parallel_size"]) > 1:
        raise ValueError(f"--expert-model-parallel-size {parallel}: needs --num-experts")
    if values["balance_policy"] != "none":
        raise ValueError(f"--balance-policy {values['balance_policy']}: needs --num-experts")
    idle = sorted(flag_of(name) for name in given if name.startswith("moe_"))
    notices.extend(f"{flag} has no effect without --num-experts" for flag in idle)


def _balanced_layer(values: Mapping[str, Any], given: Collection[str], notices: list[str]) -> None:
    """Check that no flag asks for a feature that `--moe-layer-impl balanced` lacks."""
    for name in NOT_BALANCED:
        if values.get(name):
            raise ValueError(f"{flag_of(name)}: not available with --moe-layer-impl balanced; leave it out")
    for name, instead in IDLE_IN_BALANCED.items():
        if values.get(name):
            notices.append(f"{flag_of(name)} has no effect with --moe-layer-impl balanced: {instead}")
    # megatron-core accepts the recomputation of moe_act only together with this flag
    if "moe_grouped_gemm" in given and "moe_act" not in (values["recompute_modules"] or ()):
        notices.append("--moe-grouped-gemm has no effect: the balanced MoE layer always computes in one grouped GEMM")


def _rows_bound(values: Mapping[str, Any], expert_tp: int) -> None:
    """Check what `--moe-flex-rows bound` requires; flow/layer.py checks the device and the widths."""
    flag = "--moe-flex-rows bound"
    wanted = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    for name, value in wanted.items():
        if values[name] != value:
            raise ValueError(f"{flag}: needs {flag_of(name)} {value}, not {values[name]}; or use counted")
    needs = {
        "--moe-layer-impl balanced": values["moe_layer_impl"] == "balanced",
        "--disable-bias-linear": not values["add_bias_linear"],
        "--moe-expert-gemm default": values["moe_expert_gemm"] == "default",
        "--expert-tensor-parallel-size 1": expert_tp == 1,
        "--expert-model-parallel-size above 1": values["expert_model_parallel_size"] > 1,
    }
    for missing in (need for need, met in needs.items() if not met):
        raise ValueError(f"{flag}: needs {missing}; or use counted")
    for name in ("moe_expert_rank_capacity_factor", "moe_hybridep_pad_uneven_dispatch_inputs"):
        if values.get(name):
            raise ValueError(f"{flag_of(name)}: not with {flag}, which makes room for every row; leave it out")


def _schedule(
    values: Mapping[str, Any], given: Collection[str], *, expert_tp: int, ffn_hidden_size: int, notices: list[str]
) -> None:
    """Check what the parallel schedules require (flow/parallel_schedule.py); same arguments as `check_moe`."""
    schedule = values["moe_parallel_schedule"]
    tensor = values["tensor_model_parallel_size"]
    flag = f"--moe-parallel-schedule {schedule}"
    same_tokens = tensor > 1 and not values["sequence_parallel"]
    if values["moe_layer_impl"] != "balanced":
        if schedule != "megatron":
            raise ValueError(f"{flag}: needs --moe-layer-impl balanced")
        if same_tokens:
            raise ValueError(
                f"--tensor-model-parallel-size {tensor}: with --moe-layer-impl megatron also give --sequence-parallel"
            )
        if values["expert_model_parallel_size"] == 1 and expert_tp != tensor:
            raise ValueError(
                f"--expert-tensor-parallel-size {expert_tp}: without expert parallelism, megatron-core's layer trains "
                "each tensor-parallel rank's experts on that rank's tokens alone; use --moe-layer-impl balanced, or "
                f"--expert-tensor-parallel-size {tensor}"
            )
        return
    if expert_tp > 1:
        sharded = f"--expert-tensor-parallel-size {expert_tp}"
        inner = values["moe_ffn_hidden_size"] or ffn_hidden_size
        if values["add_bias_linear"]:
            raise ValueError(
                f"{sharded} (default: the tensor-parallel size): also give --disable-bias-linear, because each shard "
                "would add the experts' second bias; or use --expert-tensor-parallel-size 1"
            )
        if inner % expert_tp:
            raise ValueError(f"{sharded}: must divide the experts' inner width, --moe-ffn-hidden-size {inner}")
    if schedule == "s2" and values["sequence_parallel"]:
        raise ValueError(
            f"--sequence-parallel: not with {flag}, which routes all tokens on every tensor-parallel rank; use "
            "--moe-parallel-schedule s1, or leave out --sequence-parallel"
        )
    every = values["expert_model_parallel_size"] * expert_tp
    if schedule == "s2" and every % tensor:
        raise ValueError(
            f"{flag}: --tensor-model-parallel-size {tensor} must divide --expert-model-parallel-size "
            f"{values['expert_model_parallel_size']} x --expert-tensor-parallel-size {expert_tp}; change them, or use "
            "--moe-parallel-schedule s1"
        )
    context = values["context_parallel_size"]
    if schedule in ("s1", "auto") and same_tokens and values["seq_length"] % (tensor * context):
        parallel = f"--tensor-model-parallel-size {tensor}"
        parallel += f" x --context-parallel-size {context}" if context > 1 else ""
        raise ValueError(f"--seq-length {values['seq_length']}: with {flag} it must be a multiple of {parallel}")
    if "moe_parallel_saa" in given and schedule not in ("s2", "auto"):
        raise ValueError(f"--no-moe-parallel-saa: has no effect with {flag}; leave it out")
    if schedule in ("megatron", "baseline") and same_tokens:
        notices.append(
            f"{flag} without --sequence-parallel: experts compute every token {tensor} times; use "
            "--moe-parallel-schedule s1, or --sequence-parallel"
        )


def _policy(values: Mapping[str, Any], given: Collection[str]) -> None:
    """Check the flags that every placement policy needs, then what the policy itself needs."""
    policy = values["balance_policy"]
    parallel = values["expert_model_parallel_size"]
    # A user's policy is constructed only in its own process
    made = None if ":" in policy else load_policy(policy, **policy_options(policy, values))
    flag = f"--balance-policy {policy}"
    if values["moe_layer_impl"] != "balanced":
        raise ValueError(f"{flag}: needs --moe-layer-impl balanced")
    if parallel == 1:
        raise ValueError(f"{flag}: needs --expert-model-parallel-size above 1; use --balance-policy none")
    if values["moe_pad_expert_input_to_capacity"]:
        raise ValueError(
            f"--moe-pad-expert-input-to-capacity: not with {flag}, because every copy of an expert would be padded to "
            "the capacity of all; leave it out (--moe-expert-capacity-factor drops the same tokens without it)"
        )
    slots = values["balance_guest_slots"]
    others = values["num_moe_experts"] * (parallel - 1) // parallel
    if slots < 1 or (slots > others and "balance_guest_slots" in given):
        raise ValueError(
            f"--balance-guest-slots {slots}: {flag} needs 1 to {others}, the number of experts that a rank does not "
            "own; or use --balance-policy none"
        )
    read = () if made is None else made.options.values()
    for name in sorted(option_fields().intersection(given).difference(read)):
        raise ValueError(f"{flag_of(name)}: has no effect with {flag}; leave it out")
    _capacities(values["balance_capacities"], parallel)
    if made is not None and made.sets_quotas and values["balance_token_split"] == "local_first":
        raise ValueError(
            f"--balance-token-split local_first: not with {flag}, which decides how many tokens each host computes; "
            "leave it out"
        )
    if made is not None:
        made.check(Placement.identity(values["num_moe_experts"], parallel, slots))
    if (values["balance_overlap"], values["balance_load"]) == ("blockwise", "exact"):
        raise ValueError(
            "--balance-load exact: not with --balance-overlap blockwise, which sends weights before tokens are routed; "
            "use --balance-load predicted"
        )
    if values["balance_ownership"] == "transfer":
        _transfer(values)
    if values["balance_calibrate"] == "on" and values["balance_log_dir"] is None:
        raise ValueError(
            "--balance-calibrate on: measured times decide where experts are, so only a record of them can repeat the "
            "run; also give --balance-log-dir"
        )


def _capacities(capacities: tuple[float, ...] | None, num_ranks: int) -> None:
    flag = f"--balance-capacities {' '.join(map(str, capacities or ()))}"
    low, high, _ = RANGES["rate"]
    mean = sum(capacities) / len(capacities) if capacities else 1.0
    if not all(math.isfinite(capacity) and low <= capacity / mean <= high for capacity in capacities or () if mean):
        raise ValueError(f"{flag}: give numbers above 0, {low:g} to {high:g} times their mean")
    if capacities is not None and len(capacities) != num_ranks:
        raise ValueError(f"{flag}: give one number per expert-parallel rank, {num_ranks} in all")


def _transfer(values: Mapping[str, Any]) -> None:
    """Check what ownership transfer requires."""
    flag = "--balance-ownership transfer"
    if values["balance_load"] == "exact":
        raise ValueError(
            f"--balance-load exact: not with {flag}, which moves experts before tokens are routed; use "
            "--balance-load predicted"
        )
    expert_tp = values["expert_tensor_parallel_size"] or values["tensor_model_parallel_size"]
    if expert_tp > 1:
        raise ValueError(
            f"--expert-tensor-parallel-size {expert_tp} (default: the tensor-parallel size): not with {flag}, which "
            "moves whole experts; use 1, or leave out one of them"
        )
    if values["tensor_model_parallel_size"] > 1 and values["add_bias_linear"]:
        raise ValueError(
            f"--tensor-model-parallel-size {values['tensor_model_parallel_size']}: with {flag} also give "
            "--disable-bias-linear: transfers of biases are not tested under tensor parallelism"
        )
    if values["use_precision_aware_optimizer"]:
        raise ValueError(
            f"--use-precision-aware-optimizer: not with {flag}, which moves main parameters and moments in float32; "
            "leave one of them out"
        )


def token_dispatcher(
    values: Mapping[str, Any], given: Collection[str], *, backend: str, cuda: bool, notices: list[str]
) -> str:
    """Return the type of the token dispatcher: the flag's, or `alltoall` if other flags choose how tokens travel.

    Call it after `check_moe`; arguments and errors are the same, and `backend` is the collective backend.
    """
    wanted = values["moe_token_dispatcher_type"]
    ways = "moe_comm_alltoall", "moe_comm_codec", "moe_comm_chunks", "moe_parallel_schedule"
    chosen = [name for name in ways if values[name] != getattr(CommConfig, name)]
    if values["num_moe_experts"] is None:
        return wanted
    expert_tp = values["expert_tensor_parallel_size"] or values["tensor_model_parallel_size"]
    uneven = values["moe_layer_impl"] == "megatron" and not values["moe_pad_expert_input_to_capacity"]
    if expert_tp > 1 and uneven and backend == "gloo" and wanted == "alltoall":
        raise ValueError(
            f"--expert-tensor-parallel-size {expert_tp} (default: the tensor-parallel size): with --moe-layer-impl "
            "megatron it gathers rows, and gloo needs the same number from each rank; use --moe-layer-impl balanced, "
            "or --moe-pad-expert-input-to-capacity"
        )
    if "moe_comm_codec_directions" in given and "moe_comm_codec" not in chosen:
        raise ValueError("--moe-comm-codec-directions: has no effect with --moe-comm-codec none; leave it out")
    _chunks(values, given)
    if not chosen:
        return wanted
    _all_to_all(values["moe_comm_alltoall"], backend == "gloo" and cuda)
    _codec(values, cuda)
    flags = " ".join(f"{flag_of(name)} {values[name]}" for name in chosen)
    if values["moe_layer_impl"] != "balanced":
        raise ValueError(f"{flags}: needs --moe-layer-impl balanced")
    if wanted != "alltoall" and "moe_token_dispatcher_type" in given:
        raise ValueError(f"--moe-token-dispatcher-type {wanted}: not with {flags}; use alltoall")
    if values["expert_model_parallel_size"] == 1:
        notices.append(f"{flags} has no effect with --expert-model-parallel-size 1")
    if wanted != "alltoall":
        notices.append(f"{flags}: --moe-token-dispatcher-type alltoall")
    return "alltoall"


def _all_to_all(name: str, gloo_on_cuda: bool) -> None:
    if name == "default":
        return
    find_all_to_all(name)
    if gloo_on_cuda and name in ALL_TO_ALLS and name != "flat":
        raise ValueError(
            f"--moe-comm-alltoall {name}: gloo sends no messages from GPUs; use --distributed-backend nccl"
        )


def _codec(values: Mapping[str, Any], cuda: bool) -> None:
    name = values["moe_comm_codec"]
    flag = f"--moe-comm-codec {name}"
    load_codec(name)
    if name == "zfp" and cuda:
        raise ValueError(f"{flag}: zfp works on the CPU only; use fp8 or int8")
    short = [flag_of(dtype) for dtype in ("bf16", "fp16") if values[dtype]]
    if short and name in ("bf16", "fp16"):
        raise ValueError(f"{flag}: saves nothing, rows have 16 bits with {short[0]}; use fp8, int8 or none")


def _chunks(values: Mapping[str, Any], given: Collection[str]) -> None:
    chunks = values["moe_comm_chunks"]
    order = values["moe_comm_order"]
    find_degrees(chunks)
    for name in ("moe_comm_order", "moe_comm_refit_interval"):
        if name in given and chunks == "1":
            raise ValueError(f"{flag_of(name)}: has no effect with --moe-comm-chunks 1; leave it out")
    if find_order(order) is None and chunks != "auto":
        flag = f"--moe-comm-order {order}"
        raise ValueError(f"--moe-comm-chunks {chunks}: with {flag} the schedule decides the number; use auto")


def _group_scores(values: Mapping[str, Any]) -> None:
    """Check what `--moe-router-group-score-topk` requires (flow/routers.py)."""
    best = values["moe_router_group_score_topk"]
    groups = values["moe_router_num_groups"]
    flag = f"--moe-router-group-score-topk {best}"
    if not 1 <= best <= (size := values["num_moe_experts"] // groups):
        raise ValueError(f"{flag}: choose 1 to {size}, the number of experts of each of {groups} groups")
    if values["moe_router_fusion"]:
        raise ValueError(f"--moe-router-fusion: not with {flag}; leave out one of them")


def _forced_workload(values: Mapping[str, Any]) -> None:
    """Check that no flag conflicts with `--moe-router-force-workload`."""
    flag = f"--moe-router-force-workload {values['moe_router_force_workload']}"
    for name in ("moe_router_force_load_balancing", "moe_router_fusion"):
        if values[name]:
            raise ValueError(f"{flag_of(name)}: not with {flag}; leave out one of them")
    balancing = values["moe_router_load_balancing_type"]
    if "sinkhorn" in ([balancing] if isinstance(balancing, str) else balancing):
        raise ValueError(f"--moe-router-load-balancing-type sinkhorn: not with {flag}; use aux_loss or none")
