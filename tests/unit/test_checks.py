"""Command lines: refusals and their messages, derived settings, and fallbacks."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from megatron_balance.cli.arguments import parse_args
from megatron_balance.device.machine import Machine
from tests.unit.commands import CPU, GPU, argv, checked_on, parse

BAD = [
    # flags; parts of the message: flag, value, remedy
    ("--train-samples 100", "--train-iters", "--train-samples", "only one"),
    ("--num-experts 1000000000", "--num-experts 1000000000", "at most 65536"),
    ("--num-layers 1000000000", "--num-layers 1000000000", "at most 4096"),
    ("--vocab-size 1000000000000", "--vocab-size 1000000000000", "at most"),
    ("--global-batch-size 16777216", "--global-batch-size 16777216", "microbatches", "at most"),
    ("--group-query-attention --num-query-groups 1000000", "--num-query-groups 1000000", "must divide"),
    ("--group-query-attention --num-query-groups 0", "--num-query-groups 0", "must divide"),
    ("--log-interval 0", "--log-interval 0", "at least 1"),
    ("--micro-batch-size 0", "--micro-batch-size 0", "at least 1"),
    ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0", "at least 1"),
    ("--pipeline-model-parallel-size -1", "--pipeline-model-parallel-size -1", "at least 1"),
    ("--expert-model-parallel-size 0", "--expert-model-parallel-size 0", "at least 1"),
    ("--expert-tensor-parallel-size 0", "--expert-tensor-parallel-size 0", "at least 1"),
    ("--num-attention-heads 0", "--num-attention-heads 0", "at least 1"),
    ("--global-batch-size 0", "--global-batch-size 0", "at least 1"),
    ("--eval-interval 0", "--eval-interval 0", "at least 1"),
    ("--context-parallel-size 3", "--context-parallel-size 3", "(8)", "change them"),
    ("--context-parallel-size 8 --seq-length 24", "--seq-length 24", "multiple of 2 x --context-parallel-size 8"),
    (
        "--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 20",
        *("--seq-length 20", "--tensor-model-parallel-size 4 x --context-parallel-size 2"),
    ),
    (
        "--context-parallel-size 8 --cp-comm-type a2a",
        *("--num-attention-heads 4", "a2a", "--context-parallel-size 8", "--cp-comm-type p2p"),
    ),
    (
        "--context-parallel-size 4 --cp-comm-type a2a --group-query-attention --num-query-groups 2",
        *("--num-query-groups 2", "a2a", "--context-parallel-size 4", "--cp-comm-type p2p"),
    ),
    (
        "--context-parallel-size 2 --cp-comm-type a2a --softmax-type learnable",
        *("--softmax-type learnable", "a2a", "Transformer Engine", "use p2p"),
    ),
    (
        "--context-parallel-size 4 --cp-comm-type a2a+p2p",
        *("--cp-comm-type a2a+p2p", "also give --hierarchical-context-parallel-sizes"),
    ),
    (
        "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 8 1",
        *("--num-attention-heads 4", "a2a+p2p", "x 8 (--hierarchical-context-parallel-sizes)", "--cp-comm-type p2p"),
    ),
    (
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4",
        *("--cp-comm-type a2a+p2p", "A2A P2P"),
    ),
    (
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
        *("--hierarchical-context-parallel-sizes 2 4", "--context-parallel-size 4"),
    ),
    (
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
        *("--hierarchical-context-parallel-sizes 2 2", "belongs to --cp-comm-type a2a+p2p"),
    ),
    ("--cp-comm-type p2p a2a", "--cp-comm-type p2p a2a", "give one for all"),
    (
        "--multi-latent-attention --position-embedding-type rope --tensor-model-parallel-size 2",
        *("--tensor-model-parallel-size 2", "--multi-latent-attention", "add --sequence-parallel"),
    ),
    (
        "--multi-latent-attention --position-embedding-type rope --tensor-model-parallel-size 2 --sequence-parallel "
        "--kv-lora-rank 31",
        *("--kv-lora-rank plus --qk-pos-emb-head-dim 95", "multiple of --tensor-model-parallel-size 2"),
    ),
    (
        "--multi-latent-attention --position-embedding-type rope --tensor-model-parallel-size 2 --sequence-parallel "
        "--q-lora-rank 31",
        *("--q-lora-rank 31", "multiple of --tensor-model-parallel-size 2"),
    ),
    ("--mtp-num-layers 1", "--position-embedding-type learned_absolute", "--mtp-num-layers 1", "use rope"),
    (
        "--mtp-num-layers 1 --position-embedding-type rope --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1",
        *("--recompute-method block", "--mtp-num-layers 1", "--recompute-method uniform --recompute-num-layers 1"),
    ),
    ("--distributed-backend nccl", "--distributed-backend nccl", "needs CUDA", "--distributed-backend gloo"),
    ("--transformer-impl transformer_engine", "--transformer-impl transformer_engine", "--transformer-impl local"),
    ("--ddp-average-in-collective", "--ddp-average-in-collective", "gloo", "leave it out"),
    (
        "--tensor-model-parallel-size 3",
        *("--tensor-model-parallel-size 3", "--pipeline-model-parallel-size 1", "(8)", "change them"),
    ),
    (
        "--expert-model-parallel-size 4 --expert-tensor-parallel-size 4",
        *("--expert-model-parallel-size 4", "(8)", "--expert-tensor-parallel-size 1"),
    ),
    ("--no-position-embedding", "--no-position-embedding", "--position-embedding-type rope", "leave it out"),
    (
        "--no-position-embedding --position-embedding-type none",
        *("--no-position-embedding", "not none", "leave it out"),
    ),
    ("--hidden-size 50", "--hidden-size 50", "multiple of --num-attention-heads 4"),
    (
        "--tensor-model-parallel-size 8 --sequence-parallel",
        *("--num-attention-heads 4", "multiple of --tensor-model-parallel-size 8"),
    ),
    (
        "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 30",
        *("--seq-length 30", "multiple of --tensor-model-parallel-size 4"),
    ),
    ("--swiglu --squared-relu", "--swiglu", "--squared-relu", "choose one"),
    ("--quick-geglu --squared-relu", "--squared-relu and --quick-geglu", "choose one"),
    ("--grad-reduce-in-bf16", "--grad-reduce-in-bf16", "needs --bf16"),
    ("--mock-data --dataloader-fast-cache-load", "--dataloader-fast-cache-load", "also give --data-cache-path"),
    (
        "--mock-data --dataloader-defer-npy-index-mmap",
        "--dataloader-defer-npy-index-mmap",
        "also give --data-cache-path",
    ),
    (
        "--data-path a --data-cache-path b --dataloader-fast-cache-load",
        *("--dataloader-fast-cache-load", "--data-path", "use --train-data-path"),
    ),
    ("--fp32-residual-connection --bf16", "--fp32-residual-connection", "needs Transformer Engine"),
    ("--exp-avg-dtype fp16", "megatron-core refuses", "exp_avg_dtype"),
    ("--bf16 --fp16", "--bf16", "--fp16", "choose one"),
    ("--recompute-granularity full", "--recompute-granularity full", "--recompute-method uniform"),
    ("--overlap-param-gather", "--overlap-param-gather", "--use-distributed-optimizer --overlap-grad-reduce"),
    ("--max-position-embeddings 16", "--max-position-embeddings 16", "at least --seq-length 32"),
    (
        "--num-layers 3 --pipeline-model-parallel-size 2",
        *("--num-layers 3", "multiple of --pipeline-model-parallel-size 2"),
    ),
    (
        "--num-layers-per-virtual-pipeline-stage 1",
        *("--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-size above 1"),
    ),
    (
        "--num-layers-per-virtual-pipeline-stage 1 --pipeline-model-parallel-size 2 --no-overlap-p2p-communication",
        *("--no-overlap-p2p-communication", "--pipeline-model-parallel-size above 2"),
    ),
    (
        "--num-layers-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 2",
        *("--num-layers-per-virtual-pipeline-stage 3", "divide the 2 layers"),
    ),
    (
        "--num-layers-per-virtual-pipeline-stage 0 --pipeline-model-parallel-size 2",
        *("--num-layers-per-virtual-pipeline-stage 0", "divide the 2 layers"),
    ),
    (
        "--num-virtual-stages-per-pipeline-rank 3 --pipeline-model-parallel-size 2",
        *("--num-virtual-stages-per-pipeline-rank 3", "divide the 2 layers"),
    ),
    (
        "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1",
        *("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage", "one of them"),
    ),
    ("--global-batch-size 24", "--global-batch-size 24", "--micro-batch-size 2", "size 8", "of 16"),
    (
        "--num-layers-per-virtual-pipeline-stage 1 --pipeline-model-parallel-size 2 --global-batch-size 24",
        *("--global-batch-size 24", "(3)", "multiple of --pipeline-model-parallel-size 2"),
    ),
    ("--mock-data --data-path a", "--data-path", "--train-data-path", "--mock-data", "one of"),
    ("--train-data-path a --split 1,0,0", "--split", "--data-path", "leave it out"),
    ("--moe-layer-freq [1]*3", "--moe-layer-freq", "3 entries", "--num-layers 4"),
]


@pytest.mark.parametrize(("flags", "said"), [(case[0], case[1:]) for case in BAD], ids=[case[0] for case in BAD])
def test_mistakes(flags: str, said: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        parse(flags)
    missing = [part for part in said if part not in str(error.value)]
    assert not missing, str(error.value)


@pytest.mark.parametrize(
    ("without", "flags", "said"),
    [
        ("--num-layers", "", ("--num-layers is required",)),
        ("--hidden-size", "", ("--hidden-size is required",)),
        ("--num-attention-heads", "", ("--num-attention-heads is required",)),
        ("--seq-length", "", ("--seq-length is required",)),
        ("--micro-batch-size", "", ("--micro-batch-size is required",)),
        ("--lr", "", ("--lr is required",)),
        ("--train-iters", "", ("--train-iters or --train-samples is required",)),
        ("--train-iters", "--train-samples 9 --lr-decay-iters 9", ("--lr-decay-iters", "use --lr-decay-samples")),
        ("--tokenizer-type", "", ("--tokenizer-type is required", "NullTokenizer with --vocab-size")),
        ("data", "", ("--data-path or --train-data-path or --mock-data is required",)),
        (
            "--num-layers --lr --train-iters --tokenizer-type data",
            "",
            (
                "--num-layers, --lr, --tokenizer-type, --train-iters or --train-samples, "
                "--data-path or --train-data-path or --mock-data are required",
            ),
        ),
    ],
)
def test_missing_flags(without: str, flags: str, said: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        parse_args(argv(flags, without), CPU)
    assert all(part in str(error.value) for part in said), str(error.value)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_good_command_line(world_size: int) -> None:
    config, notices, _ = parse(f"--expert-model-parallel-size {world_size} --moe-ffn-hidden-size 64", world_size)
    assert config.train.global_batch_size == 2 * world_size
    assert config.transformer.expert_model_parallel_size == world_size
    assert config.transformer.num_moe_experts == 8
    assert config.transformer.moe_ffn_hidden_size == 64
    assert config.launch.distributed_backend == "gloo"
    assert config.model.max_position_embeddings == 32
    assert len(notices) == 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", 16),
        ("--global-batch-size 48", 48),
        ("--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1", 8),
        ("--pipeline-model-parallel-size 4", 4),
        ("--expert-model-parallel-size 8", 16),
    ],
)
def test_global_batch_size(flags: str, expected: int) -> None:
    assert parse(flags).config.train.global_batch_size == expected


@pytest.mark.parametrize(
    ("flags", "dense", "experts"),
    [
        ("", 192, 192),
        ("--swiglu", 128, 128),
        ("--swiglu --hidden-size 64", 128, 128),
        ("--swiglu --hidden-size 1024", 2688, 2688),
        ("--ffn-hidden-size 80", 80, 80),
        ("--swiglu --ffn-hidden-size 80", 80, 80),
        ("--moe-ffn-hidden-size 32", 192, 32),
        ("--moe-ffn-hidden-size 32 --swiglu", 128, 32),
    ],
)
def test_inner_widths(flags: str, dense: int, experts: int) -> None:
    config, notices, _ = parse(flags)
    assert (config.transformer.ffn_hidden_size, config.transformer.moe_ffn_hidden_size) == (dense, experts)
    assert any("--moe-ffn-hidden-size" in notice for notice in notices) == ("--moe-ffn" not in flags)


@pytest.mark.parametrize(
    ("flags", "activation", "gated"),
    [
        *(("", F.gelu, False), ("--swiglu", F.silu, True), ("--squared-relu", squared_relu, False)),
        ("--quick-geglu", quick_gelu, True),
    ],
)
def test_activation(flags: str, activation: object, gated: bool) -> None:
    config = parse(flags).config.transformer
    assert (config.activation_func, config.gated_linear_unit) == (activation, gated)


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
        ("", 1),
        ("--moe-layer-impl megatron --tensor-model-parallel-size 2 --sequence-parallel --disable-bias-linear", 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1", 1),
    ],
)
def test_expert_tensor_parallel_size(flags: str, expected: int) -> None:
    assert parse(flags).config.transformer.expert_tensor_parallel_size == expected


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


def test_explicit_choices_on_a_gpu_stand() -> None:
    flags = "--distributed-backend gloo --transformer-impl local"
    line = checked_on(GPU, flags, ("distributed_backend", "transformer_impl"))
    assert (line.distributed_backend, line.transformer_impl) == ("gloo", "local")


FUSIONS = (
    *("bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "apply_rope_fusion"),
    *("persist_layer_norm", "gradient_accumulation_fusion", "moe_permute_fusion", "overlap_p2p_comm"),
)


def test_fusions_need_cuda() -> None:
    on_cpu, on_gpu = (checked_on(machine) for machine in (CPU, GPU))
    assert not any(getattr(on_cpu, name) for name in FUSIONS)
    assert on_gpu.masked_softmax_fusion and on_gpu.persist_layer_norm and on_gpu.gradient_accumulation_fusion
    switched_off = checked_on(GPU, "--no-masked-softmax-fusion --no-persist-layer-norm")
    assert not switched_off.masked_softmax_fusion and not switched_off.persist_layer_norm


@pytest.mark.parametrize(
    ("flags", "attribute", "expected"),
    [
        ("--moe-router-load-balancing-type sinkhorn", "moe_router_load_balancing_type", "sinkhorn"),
        ("--moe-aux-loss-coeff 1e-2", "moe_aux_loss_coeff", 1e-2),
        ("--num-query-groups 2", "num_query_groups", 4),
        ("--group-query-attention --num-query-groups 2", "num_query_groups", 2),
        ("--moe-layer-freq [0,1]*2", "moe_layer_freq", [0, 1, 0, 1]),
        ("--no-rope-freq [0,1]*2 --position-embedding-type rope", "no_rope_freq", [0, 1, 0, 1]),
        ("--window-attn-skip-freq 2", "window_attn_skip_freq", 2),
        ("--recompute-activations", "recompute_granularity", "selective"),
    ],
)
def test_transformer_values(flags: str, attribute: str, expected: object) -> None:
    assert getattr(parse(flags).config.transformer, attribute) == expected


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
    with pytest.raises(ValueError, match="--recompute-modules layernorm: needs the package transformer-engine"):
        parse("--recompute-granularity selective --recompute-modules layernorm")
    parse("--recompute-granularity selective --recompute-modules moe_act --moe-grouped-gemm")
