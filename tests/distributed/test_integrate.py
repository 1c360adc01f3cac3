"""Our MoE layer and its balancing inside other programs: a custom training loop, and Megatron-LM's."""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance import Balancing, add_balance_args, attach, balanced_layer_spec
from megatron_balance.device.attention import ContextParallelAttention
from megatron_balance.job.layout import build_groups
from tests.distributed import upstream
from tests.distributed.runs import Curve, Hosts, deviation
from tests.variants import variants

DOCS = Path(__file__).parents[2] / "docs"

TOLERANCE = 1e-6
"""Relative, in float32, for every loss and gradient norm."""

ITERATIONS = 4
MICROBATCHES = 2

POLICY = "--balance-policy top2"

RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

needs_megatron_lm = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None, reason="this megatron-core has no megatron.training"
)


def own_loop(
    flags: str,
    late: Literal["", "own", "around"] = "",
    context: int = 1,
    predictions: int | None = None,
    recomputes: bool = False,
    balancing_loss: str = "aux_loss",
) -> tuple[Curve, Hosts]:
    """Run a user's program on megatron-core with our three calls and our flags.

    Args:
        late: whether the program sets its own function that finalizes gradients after `attach`, or one around ours.
        context: context-parallel size; a rank's samples then are its parts of sequences.
        predictions: layers for multi-token prediction.
        recomputes: whether the program recomputes layers, and computes passes without a backward pass between others.
        balancing_loss: the routers' auxiliary loss; one other than the default has a large coefficient.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq-length", type=int, default=16)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    args = add_balance_args(parser).parse_args(flags.split())
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type=balancing_loss,
        moe_aux_loss_coeff=1e-2 if balancing_loss == "aux_loss" else 1e5,
        expert_model_parallel_size=dist.get_world_size(),
        context_parallel_size=context,
        mtp_num_layers=predictions,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="local",
        **(RECOMPUTED if recomputes else {}),
    )
    balancing = Balancing(args, config)
    build_groups(config, seed=1)
    spec = balanced_layer_spec(get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False), balancing)
    if context > 1:
        spec.submodules.self_attention.submodules.core_attention = ContextParallelAttention
    gpt = GPTModel(
        config,
        spec,
        vocab_size=128,
        max_sequence_length=args.seq_length * context,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if predictions else None,
    )
    for buffer in gpt.buffers():
        # As megatron-core's Float16Module does
        buffer.data = buffer.data.bfloat16()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3), [model], use_gloo_process_groups=False
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    attach([model], balancing, microbatches=lambda: MICROBATCHES)
    assert balancing.is_off or all(buffer.dtype == torch.float32 for buffer in gpt.buffers())
    # A single tensor-parallel rank counts all parameters in the norm
    assert balancing.is_off or all(parameter.tensor_model_parallel for parameter in gpt.parameters())
    if late:
        inner: Any = finalize_model_grads if late == "own" else config.finalize_model_grads_func
        config.finalize_model_grads_func = lambda *args, **kwargs: inner(*args, **kwargs)
    return train(args, model, optimizer, balancing, step_after_others if recomputes else upstream.forward_step)


def step_after_others(data_iterator: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """Compute a microbatch in ways that no backward pass follows, then as a step of megatron-core's schedules."""
    batch = next(data_iterator)
    mode = model.training
    for training, gradients in ((True, False), (False, False), (False, True)):
        model.train(training)
        with torch.set_grad_enabled(gradients):
            upstream.forward_step(iter([batch]), model)
    model.train(mode)
    return upstream.forward_step(iter([batch]), model)


def train(
    args: argparse.Namespace, model: torch.nn.Module, optimizer: Any, balancing: Balancing, forward_step: Callable
) -> tuple[Curve, Hosts]:
    curve = []
    hosts = []
    tokens = upstream.Tokens(args.seq_length)

    def batches(iteration: int) -> Iterator[dict[str, torch.Tensor]]:
        for microbatch in range(MICROBATCHES):
            first = (iteration * MICROBATCHES + microbatch) * dist.get_world_size() + dist.get_rank()
            samples = [tokens[first * args.micro_batch_size + sample] for sample in range(args.micro_batch_size)]
            yield {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    forward_backward: Callable = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )
    for iteration in range(ITERATIONS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward(data_iterator=batches(iteration), forward_only=False)
        _, norm, _ = optimizer.step()
        loss = sum(report["lm loss"][0] for report in reports)
        dist.all_reduce(loss)
        curve.append((loss.item(), float(norm)))
        layers = balancing.balancer.report().values() if balancing.balancer is not None else ()
        hosts.append(sum(layer.hosts_added for layer in layers))
        model.eval()
        forward_backward(data_iterator=batches(iteration), forward_only=True)
        model.train()
    return curve, hosts


@pytest.fixture(scope="module")
def megatrons(ranks) -> tuple[Curve, Hosts]:
    """The program with megatron-core's own layer."""
    return ranks(2).run(own_loop, "--moe-layer-impl megatron")[0]


def check(plain: tuple[Curve, Hosts], balanced: tuple[Curve, Hosts]) -> None:
    """Check that the curves agree, and that balancing acted in every iteration but the first, which has no history."""
    assert deviation(balanced[0], plain[0]) <= TOLERANCE
    assert not any(plain[1])
    assert all(added > 0 for added in balanced[1][1:]), f"balancing hardly acted: {balanced[1]}"


@pytest.mark.parametrize(
    "settings",
    [(), *(pytest.param(one, marks=pytest.mark.slow) for one in (("", 1, 2), ("", 2, 1)))],
    ids=["plain", "multi-token prediction", "context parallelism too"],
)
def test_a_loop_of_ones_own_learns_the_same(ranks, megatrons, settings: tuple) -> None:
    plain = ranks(2).run(own_loop, "--moe-layer-impl megatron", *settings)[0] if settings else megatrons
    check(plain, ranks(2).run(own_loop, POLICY, *settings)[0])


@pytest.mark.parametrize(
    "flags",
    ["--balance-load exact", pytest.param("--balance-inner-policy quota", marks=pytest.mark.slow)],
)
def test_plans_of_each_microbatch_change_nothing(ranks, megatrons, flags: str) -> None:
    check(megatrons, ranks(2).run(own_loop, f"{POLICY} --balance-overlap blockwise {flags}")[0])


@pytest.mark.parametrize(
    "flags",
    [pytest.param("", marks=pytest.mark.slow), f"{POLICY} --balance-overlap blockwise --moe-comm-chunks 2"],
)
def test_passes_without_a_backward_pass_change_nothing(ranks, flags: str) -> None:
    expected, found = (ranks(2).run(own_loop, flags, "", 1, 1, recomputes)[0] for recomputes in (False, True))
    assert found == expected


@pytest.mark.slow
def test_the_loop_of_the_page_learns_the_same(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / "inside_your_loop.md").read_text(), re.DOTALL)
    (tmp_path / "loop.py").write_text(program)
    flags = ("--moe-layer-impl megatron", f"{POLICY} --balance-overlap blockwise")
    plain, balanced = (launched(tmp_path / "loop.py", one) for one in flags)
    losses = [sorted(re.findall(r"rank \d, iteration \d: \d.\d{6}", text)) for text in (plain, balanced)]
    assert len(losses[0]) == 20 and losses[0] == losses[1]
    assert re.search(r"balancing in iteration +5 .*hosts added: [1-9]", balanced)


def launched(program: Path, flags: str) -> str:
    """Return what two ranks print that torchrun starts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", program, *flags.split()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout


def test_routers_losses_are_those_of_their_definitions(ranks) -> None:
    """megatron-core divides this loss by the number of data-parallel ranks."""
    settings = ("", 1, None, False, "global_aux_loss")
    ((_, theirs), *_), ((_, ours), *_) = (
        ranks(2).run(own_loop, flags, *settings)[0][0] for flags in ("--moe-layer-impl megatron", POLICY)
    )
    assert ours == pytest.approx(2 * theirs, rel=1e-3)


def test_a_program_may_set_its_function_after_attach(ranks) -> None:
    around, own = (ranks(2).run(own_loop, POLICY, late)[0] for late in ("around", "own"))
    assert own == around and own[1][-1] > 0


EP2 = "--expert-model-parallel-size 2"
THEIRS = ("--moe-layer-impl megatron", f"{POLICY} --balance-overlap blockwise")
LAYOUTS = {
    "EP2": (2, EP2, THEIRS),
    "EP2xDP2-overlap": (4, f"{EP2} --use-distributed-optimizer --overlap-grad-reduce", THEIRS),
    "PP2xEP2": (4, f"{EP2} --pipeline-model-parallel-size 2", THEIRS),
    "PP2xEP2-interleaved": (
        4,
        f"{EP2} --pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
        THEIRS,
    ),
    "EP2xDP2-prediction": (
        4,
        f"{EP2} --mtp-num-layers 1 --position-embedding-type rope --overlap-grad-reduce --ddp-bucket-size 1000",
        THEIRS,
    ),
    # Both runs use our layer: megatron-core's needs sequence parallelism, which norms on a CPU lack
    "EP2xTP2": (
        4,
        f"{EP2} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
        ("", f"{POLICY} --moe-parallel-schedule s1"),
    ),
}


@needs_megatron_lm
@pytest.mark.parametrize(("world_size", "flags", "layers"), variants(LAYOUTS, quick=("EP2",)))
def test_megatron_lm_learns_the_same(ranks, world_size: int, flags: str, layers: tuple[str, str]) -> None:
    flags += f" --global-batch-size {4 * world_size}"
    plain, balanced = (
        # The last rank belongs to the last pipeline stage, which has the loss
        ranks(world_size).run(upstream.pretrain, f"{flags} {more}", ITERATIONS)[-1]
        for more in layers
    )
    check(plain, balanced)


@needs_megatron_lm
@pytest.mark.slow
def test_megatron_lm_resumes(ranks, tmp_path: Path) -> None:
    """Checkpoints contain no guests; a resumed run equals the uninterrupted one."""
    flags = f"--expert-model-parallel-size 2 --global-batch-size 8 {POLICY}"
    whole, _ = ranks(2).run(upstream.pretrain, f"{flags} --save {tmp_path} --save-interval 2", ITERATIONS)[0]
    rest, hosts = ranks(2).run(upstream.pretrain, f"{flags} --load {tmp_path} --ckpt-step 2", ITERATIONS)[0]
    assert len(rest) == 2
    assert deviation(rest, whole[2:]) <= TOLERANCE
    assert hosts[1] > 0
