"""Command lines: derived settings and fallbacks. tests/mistakes.py has the refusals."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from megatron_balance.cli.arguments import parse_args
from megatron_balance.device.machine import Machine
from tests.unit.commands import CPU, GPU, argv, checked_on, parse

TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.mark.parametrize(
    ("flags", "dense", "experts"),
    [
        ("", 192, 192),
        ("--swiglu", 128, 128),
        ("--swiglu --hidden-size 1024", 2688, 2688),
        ("--swiglu --ffn-hidden-size 80", 80, 80),
        ("--moe-ffn-hidden-size 32 --swiglu", 128, 32),
    ],
)
def test_inner_widths(flags: str, dense: int, experts: int) -> None:
    config, notices, _ = parse(flags)
    assert (config.transformer.ffn_hidden_size, config.transformer.moe_ffn_hidden_size) == (dense, experts)
    assert any("--moe-ffn-hidden-size" in notice for notice in notices) == ("--moe-ffn" not in flags)


@pytest.mark.parametrize(
    ("flags", "dtype", "grads_in_fp32"),
    [
        ("", torch.float32, False),
        ("--bf16", torch.bfloat16, True),
        ("--bf16 --grad-reduce-in-bf16", torch.bfloat16, False),
        ("--fp16", torch.float16, False),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", torch.float16, True),
    ],
)
def test_precision(flags: str, dtype: torch.dtype, grads_in_fp32: bool) -> None:
    config = parse(flags).config
    assert {config.transformer.params_dtype, config.transformer.pipeline_dtype, config.optimizer.params_dtype} == {
        dtype
    }
    assert config.ddp.grad_reduce_in_fp32 == grads_in_fp32


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", None),
        ("--pipeline-model-parallel-size 2", None),
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --num-layers 12", 3),
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --num-layers 16", 2),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 16", 2),
        ("--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split --num-layers 3", None),
    ],
)
def test_virtual_pipeline_size(flags: str, expected: int | None) -> None:
    config = parse(f"{flags} --global-batch-size 32").config
    assert config.transformer.virtual_pipeline_model_parallel_size == expected
    # Only the interleaved schedule aligns gathers
    interleaved = expected is not None
    assert config.transformer.overlap_p2p_comm == config.ddp.align_param_gather == interleaved
    assert config.transformer.batch_p2p_comm != interleaved


def test_sequence_parallelism_is_off_without_tensor_parallelism() -> None:
    config, notices, _ = parse("--sequence-parallel --moe-ffn-hidden-size 64")
    assert not config.transformer.sequence_parallel
    assert "--sequence-parallel is off: it has no effect with --tensor-model-parallel-size 1" in notices
    flags = "--sequence-parallel --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
    config, notices, _ = parse(flags)
    assert config.transformer.sequence_parallel and not any("--sequence-parallel" in notice for notice in notices)


@pytest.mark.parametrize(
    ("flags", "expected"), [("--data-path a", "969,30,1"), ("--data-path a --split 8,1,1", "8,1,1"), ("", None)]
)
def test_split(flags: str, expected: str | None) -> None:
    config, notices, _ = parse(flags)
    assert config.data.split == expected
    assert any("--split" in notice and "969,30,1" in notice for notice in notices) == (expected == "969,30,1")


@pytest.mark.parametrize(
    ("machine", "backend", "impl", "noticed"),
    [
        (CPU, "gloo", "local", ["--distributed-backend gloo", "--transformer-impl local"]),
        (dataclasses.replace(GPU, transformer_engine=False), "nccl", "local", ["--transformer-impl local"]),
        (GPU, "nccl", "transformer_engine", []),
    ],
    ids=["cpu", "cuda", "cuda with transformer engine"],
)
def test_fallbacks_are_noticed(machine: Machine, backend: str, impl: str, noticed: list[str]) -> None:
    line = checked_on(machine, "--moe-ffn-hidden-size 64")
    assert (line.distributed_backend, line.transformer_impl) == (backend, impl)
    assert len(line.notices) == len(noticed)
    assert all(flag in notice for flag, notice in zip(noticed, line.notices, strict=True))


@pytest.mark.parametrize(
    ("flags", "attribute", "expected"),
    [
        ("", "activation_func", F.gelu),
        ("--swiglu", "activation_func", F.silu),
        ("--squared-relu", "activation_func", squared_relu),
        ("--quick-geglu", "activation_func", quick_gelu),
        ("--squared-relu", "gated_linear_unit", False),
        ("--quick-geglu", "gated_linear_unit", True),
        ("--moe-router-load-balancing-type sinkhorn", "moe_router_load_balancing_type", "sinkhorn"),
        ("--moe-aux-loss-coeff 1e-2", "moe_aux_loss_coeff", 1e-2),
        ("--num-query-groups 2", "num_query_groups", 4),
        ("--group-query-attention --num-query-groups 2", "num_query_groups", 2),
        ("--moe-layer-freq [0,1]*2", "moe_layer_freq", [0, 1, 0, 1]),
        ("--no-rope-freq [0,1]*2 --position-embedding-type rope", "no_rope_freq", [0, 1, 0, 1]),
        ("--window-attn-skip-freq 2", "window_attn_skip_freq", 2),
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("", "expert_tensor_parallel_size", 1),
        (f"{TENSOR} --moe-layer-impl megatron --disable-bias-linear", "expert_tensor_parallel_size", 2),
        (f"{TENSOR} --expert-tensor-parallel-size 1", "expert_tensor_parallel_size", 1),
        ("", "global_batch_size", 16),
        ("--global-batch-size 48", "global_batch_size", 48),
        (f"{TENSOR} --expert-tensor-parallel-size 1", "global_batch_size", 8),
        ("--pipeline-model-parallel-size 4", "global_batch_size", 4),
        ("--expert-model-parallel-size 8", "global_batch_size", 16),
    ],
)
def test_values(flags: str, attribute: str, expected: object) -> None:
    config = parse(flags).config
    assert getattr(config.train if attribute == "global_batch_size" else config.transformer, attribute) == expected


@pytest.mark.parametrize(
    ("flags", "without", "expected"),
    [
        ("--num-query-groups 2", "", ["--num-query-groups has no effect without --group-query-attention"]),
        ("--num-query-groups 2 --group-query-attention", "", []),
        ("--eval-iters 2 --exit-signal SIGINT", "", ["--eval-iters", "--exit-signal has no effect without"]),
        ("--rotary-base 9", "", ["--rotary-base has no effect without --position-embedding-type rope"]),
        ("--rotary-base 9 --position-embedding-type rope", "", []),
        ("--moe-grouped-gemm --moe-router-topk 2", "--num-experts", ["--moe-grouped-gemm", "--moe-router-topk"]),
    ],
)
def test_idle_flags_are_noticed(flags: str, without: str, expected: list[str]) -> None:
    idle = [notice for notice in parse_args(argv(flags, without), CPU).notices if "no effect" in notice]
    assert len(idle) == len(expected)
    assert all(part in notice for part, notice in zip(expected, idle, strict=True))


@pytest.mark.parametrize(("flags", "fused"), [("", True), ("--activation-func-clamp-value 7", False),
                                              ("--glu-linear-offset 1", False)])  # fmt: skip
def test_swiglu_is_not_fused_with_what_the_kernel_leaves_out(flags: str, fused: bool) -> None:
    machine = dataclasses.replace(GPU, transformer_engine=False, apex=False)
    transformer = parse_args(argv(f"--swiglu --disable-bias-linear {flags}"), machine).config.transformer
    assert transformer.bias_activation_fusion == fused


def test_gpt2s_tokenizer_is_the_default_for_its_files() -> None:
    config, notices, _ = parse_args(argv("--vocab-file v --merge-file m", "--tokenizer-type"), CPU)
    assert config.tokenizer.tokenizer_type == "GPT2BPETokenizer"
    assert any("using GPT2BPETokenizer" in notice for notice in notices)


def test_norms_are_recomputed_with_transformer_engine_only() -> None:
    with pytest.raises(ValueError, match="--recompute-modules layernorm: needs transformer-engine"):
        parse("--recompute-granularity selective --recompute-modules layernorm")
    parse("--recompute-granularity selective --recompute-modules moe_act --moe-grouped-gemm")
