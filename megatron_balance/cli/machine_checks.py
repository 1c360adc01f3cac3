"""Checks of flags against the machine: its backend, its packages and their kernels. Called by checks.py."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from megatron_balance.config.flags import flag_of
from megatron_balance.device.machine import EXPECTED_MODULES, KERNELS, Machine

ACTIVATIONS = ("swiglu", "squared_relu", "quick_geglu")
"""Activations other than GELU."""

INSTALL = "in the checkout: pip install --no-build-isolation -e '.[gpu]'"


def backends(
    values: Mapping[str, Any], given: Collection[str], machine: Machine, notices: list[str]
) -> tuple[str, str]:
    """Return the collective backend and the transformer implementation, with fallbacks for upstream's defaults.

    Raises:
        ValueError: a requested feature or an installed package does not work here; the error names the remedy.
    """
    backend = values["distributed_backend"]
    impl = values["transformer_impl"]
    if backend == "nccl" and not machine.cuda:
        if "distributed_backend" in given:
            raise ValueError("--distributed-backend nccl: needs CUDA; use --distributed-backend gloo")
        backend = "gloo"
        notices.append("no CUDA here: --distributed-backend gloo")
    if values["average_in_collective"] and backend == "gloo":
        raise ValueError("--ddp-average-in-collective: gloo cannot average; leave it out")
    if impl == "transformer_engine" and not (machine.cuda and machine.transformer_engine):
        if "transformer_impl" in given:
            raise ValueError(
                "--transformer-impl transformer_engine: needs CUDA and the package transformer-engine "
                f"({INSTALL}); use --transformer-impl local"
            )
        impl = "local"
        notices.append("no Transformer Engine here: --transformer-impl local")
    _packages(values, machine, impl)
    return backend, impl


def context_parallelism(values: Mapping[str, Any], machine: Machine, impl: str) -> None:
    """Raise ValueError for a context parallelism that this machine's attention does not compute."""
    context = values["context_parallel_size"]
    (kind, *others) = values["cp_comm_type"]
    flag = f"--context-parallel-size {context}"
    if {*others} - {kind}:
        # megatron-core 0.16 gives each layer the entry of the layer after it
        words = " ".join([kind, *others])
        raise ValueError(
            f"--cp-comm-type {words}: entries that differ between layers are not supported; give one for all"
        )
    sizes = values["hierarchical_context_parallel_sizes"] or []
    written = " ".join(map(str, sizes))
    if sizes and kind != "a2a+p2p":
        raise ValueError(f"--hierarchical-context-parallel-sizes {written}: belongs to --cp-comm-type a2a+p2p")
    if context == 1:
        return
    if machine.cuda and impl == "local":
        raise ValueError(
            f"{flag}: on CUDA, only Transformer Engine's attention has context parallelism; use --transformer-impl "
            f"transformer_engine ({INSTALL}), or leave it out"
        )
    if kind == "a2a+p2p" and len(sizes) != 2:
        raise ValueError("--cp-comm-type a2a+p2p: also give --hierarchical-context-parallel-sizes A2A P2P")
    if sizes and math.prod(sizes) != context:
        raise ValueError(f"--hierarchical-context-parallel-sizes {written}: their product must be {flag}")
    tensor = values["tensor_model_parallel_size"]
    heads = values["num_attention_heads"]
    groups = values["num_query_groups"] if values["group_query_attention"] else heads
    sharing = {"a2a": context, "a2a+p2p": sizes[0] if sizes else 1}.get(kind, 1)
    for name, count in (("num_attention_heads", heads), ("num_query_groups", groups)):
        if count % (tensor * sharing) and sharing > 1:
            exchanging = flag if kind == "a2a" else f"{sharing} (--hierarchical-context-parallel-sizes)"
            raise ValueError(
                f"{flag_of(name)} {count}: with --cp-comm-type {kind} it must be a multiple of "
                f"--tensor-model-parallel-size {tensor} x {exchanging}; or use --cp-comm-type p2p"
            )
    if kind == "a2a" and impl == "local" and values["softmax_type"] != "vanilla":
        raise ValueError(
            f"--softmax-type {values['softmax_type']}: with --cp-comm-type a2a it needs Transformer Engine; use p2p"
        )


def connections(values: Mapping[str, Any], machine: Machine, notices: list[str]) -> None:
    """Add a notice if all kernels go through one queue, in which exchanges and transfers hold up computation."""
    blockwise = values["balance_policy"] != "none" and values["balance_overlap"] == "blockwise"
    chunks = values["moe_comm_chunks"]
    hidden = ["--balance-overlap blockwise"] * blockwise + [f"--moe-comm-chunks {chunks}"] * (chunks != "1")
    if not (machine.cuda and machine.connections == "1" and values["num_moe_experts"] and hidden):
        return
    kept = ""
    tensor = values["tensor_model_parallel_size"]
    if tensor > 1:
        kept = f", unless what --tensor-model-parallel-size {tensor} overlaps with it matters more"
    notices.append(
        f"CUDA_DEVICE_MAX_CONNECTIONS=1: kernels run in the order of their launch, so {' and '.join(hidden)} can hide "
        f"little, because messages that wait hold up the experts behind them; unset it{kept}"
    )


def _packages(values: Mapping[str, Any], machine: Machine, impl: str) -> None:
    """Raise ValueError for packages that megatron-core cannot use, and for flags that need a missing package."""
    if machine.cuda and machine.unfit:
        raise ValueError(f"{machine.unfit}; install one of those ({INSTALL}) or uninstall it")
    unbuilt = sorted(machine.unbuilt.intersection(EXPECTED_MODULES))
    if machine.cuda and unbuilt and (impl == "local" or not machine.transformer_engine):
        raise ValueError(
            f"apex has no {' and no '.join(unbuilt)}, which megatron-core would use: build NVIDIA's apex with "
            "APEX_CPP_EXT=1 APEX_CUDA_EXT=1, or uninstall it"
        )
    absent = not (machine.cuda and machine.transformer_engine)
    needs_engine = {
        "fp32_residual_connection": impl == "local" and (values["bf16"] or values["fp16"]),
        "moe_router_fusion": absent,
        "moe_permute_fusion": absent,
    }
    for name, missing in needs_engine.items():
        if values[name] and missing:
            raise ValueError(f"{flag_of(name)}: needs Transformer Engine on CUDA ({INSTALL}); leave it out")
    selective = (values["recompute_granularity"] == "selective" and values["recompute_modules"]) or ()
    # megatron-core's recomputation of these modules asks Transformer Engine whether it uses 8-bit numbers
    again = ("layernorm", "moe_act") if values["moe_layer_impl"] == "megatron" else ("layernorm",)
    if not machine.transformer_engine and (named := [module for module in again if module in selective]):
        raise ValueError(
            f"--recompute-modules {' '.join(named)}: needs the package transformer-engine ({INSTALL}); leave it out of "
            "the modules"
        )
    expert_gemm(values, absent)
    if values["cross_entropy_loss_fusion"] and values["cross_entropy_fusion_impl"] == "te" and absent:
        raise ValueError(f"--cross-entropy-fusion-impl te: needs Transformer Engine on CUDA ({INSTALL}); use native")


def expert_gemm(values: Mapping[str, Any], absent: bool) -> None:
    """Raise ValueError if `--moe-expert-gemm` names a package that is `absent`."""
    if values["moe_expert_gemm"] == "te" and absent:
        raise ValueError(f"--moe-expert-gemm te: needs Transformer Engine on CUDA ({INSTALL}); use default")


def fusions(values: Mapping[str, Any], machine: Machine, impl: str, notices: list[str]) -> dict[str, bool]:
    """Return the layout's fields for fused kernels: whether each one is both requested and available."""
    # A dry run computes nothing, but megatron-core looks for the kernels when it builds the model
    engine = machine.transformer_engine
    real = machine.cuda and not values["dry_run"]
    # With Transformer Engine, only the output layer, which is megatron-core's, uses one of apex's kernels
    wanted = [name for name in KERNELS if values[name] and (name != "masked_softmax_fusion" or impl == "local")]
    missing = [f"--no-{name.replace('_', '-')}" for name in wanted if real and not machine.fuses(name)]
    if missing:
        notices.append(f"no kernels of apex here: {' '.join(missing)}")
    # The fused SwiGLU kernel supports neither a clamp nor an offset
    plain_gate = values["activation_func_clamp_value"] is None and not values["glu_linear_offset"]
    gated = values["swiglu"] and values["bias_swiglu_fusion"] and not values["add_bias_linear"] and plain_gate
    gelu = not any(values[name] for name in ACTIVATIONS)
    plain = gelu and values["bias_gelu_fusion"] and values["add_bias_linear"] and not values["num_moe_experts"]
    return {
        "bias_activation_fusion": machine.cuda and (gated or plain),
        "bias_dropout_fusion": machine.cuda and values["bias_dropout_fusion"],
        "apply_rope_fusion": real and engine and values["apply_rope_fusion"] and not values["multi_latent_attention"],
        "persist_layer_norm": real and (machine.apex or impl != "local") and values["persist_layer_norm"],
        "moe_permute_fusion": real and values["moe_permute_fusion"],
        **{name: real and values[name] and machine.fuses(name) for name in KERNELS},
    }
