"""Tokens in chunks: gradients do not change in any order of tasks, and the layer executes exactly that order."""

import functools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_balance.comm.alltoall import Exchange, P2PAllToAll
from megatron_balance.flow.chunks import pipeline
from megatron_balance.flow.chunks.order import Chunking, ChunkStep, ChunkTask, Order, text
from megatron_balance.flow.chunks.pipeline import ChunkTasks, execute
from megatron_balance.flow.experts import ExpertGradients
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.job.layout import build_groups, destroy_groups
from tests.distributed import runs
from tests.distributed.layers import (
    ACTIVATIONS,
    EXPERTS,
    HIDDEN,
    all_on_all,
    build_layer,
    check_against_oracle,
    host_on,
    in_chunks,
    moe_config,
    own_gradients,
    random_order,
)
from tests.distributed.runs import deviation


@pytest.mark.parametrize(
    ("world_size", "tokens"),
    [
        *((2, "uneven"), (4, "empty")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "uneven"), (8, "uneven"), (8, "empty"))),
    ],
)
def test_chunks_equal_the_oracle(ranks, world_size: int, tokens: str) -> None:
    for chunks, activation in ((2, "gelu"), (5, "swiglu-no-bias")):
        host = functools.partial(in_chunks, chunks, world_size, own_gradients)
        ranks(world_size).run(check_against_oracle, ACTIVATIONS[activation], tokens, host)


@pytest.mark.parametrize("split", ["local_first", "proportional"])
def test_chunks_of_experts_with_many_hosts(ranks, split: str) -> None:
    host = functools.partial(in_chunks, 3, 7, functools.partial(host_on, str(all_on_all(4)), split, ""))
    ranks(4).run(check_against_oracle, ACTIVATIONS["gelu"], "uneven", host, P2PAllToAll)


class Watched(ChunkTasks):
    """Logs every task: when exchanges start, and when the host waits for them."""

    def __init__(self, tasks: ChunkTasks, log: list[ChunkStep]) -> None:
        self.tasks = tasks
        self.log = log
        self.spans = tasks.spans
        self.waits = tasks.waits
        self.begin = tasks.begin

    def watched(self, exchange: Exchange, waited: ChunkStep) -> Exchange:
        return Exchange(lambda: (self.log.append(waited), exchange.wait())[1])

    def send(self, chunk: int, rows: torch.Tensor) -> Exchange:
        self.log.append(ChunkStep(ChunkTask.C1, chunk))
        return self.watched(self.tasks.send(chunk, rows), ChunkStep(ChunkTask.D1, chunk))

    def compute(self, chunk: int, rows: torch.Tensor) -> torch.Tensor:
        self.log.append(ChunkStep(ChunkTask.E, chunk))
        return self.tasks.compute(chunk, rows)

    def send_back(self, chunk: int, rows: torch.Tensor) -> Exchange:
        self.log.append(ChunkStep(ChunkTask.C2, chunk))
        return self.watched(self.tasks.send_back(chunk, rows), ChunkStep(ChunkTask.D2, chunk))

    def finish(self) -> None:
        self.tasks.finish()


def orders_and_logs(chunks: int, seed: int) -> tuple[list[str], list[str], list[list[ChunkTask]]]:
    """Return the orders of both passes, how a layer executed them, and all tasks before its weight gradients."""
    config = moe_config(moe_router_topk=2)
    layer = build_layer(config, build_groups(config, seed=7))
    chunking = Chunking(random_order(chunks, seed), random_order(chunks, seed + 1))
    layer.dispatcher.chunks = lambda plan: chunking
    logs: list[list[ChunkStep]] = []
    before_weights: list[list[ChunkTask]] = []
    finish = ExpertGradients.finish

    def finishing(gradients: ExpertGradients) -> list[torch.Tensor | None]:
        before_weights.append([step.task for step in logs[-1]])
        return finish(gradients)

    def watched(
        order: Order,
        rows: dict[int, torch.Tensor],
        tasks: ChunkTasks,
        exchanges: dict[int, Exchange] | None = None,
    ) -> list[torch.Tensor]:
        log = []
        logs.append(log)
        tasks = Watched(tasks, log)
        for chunk, exchange in (exchanges or {}).items():
            assert exchanges is not None
            log.append(ChunkStep(ChunkTask.C1, chunk))
            exchanges[chunk] = tasks.watched(exchange, ChunkStep(ChunkTask.D1, chunk))
        return execute(order, rows, tasks, exchanges)

    generator = torch.Generator().manual_seed(dist.get_rank())
    hidden = torch.randn(13 + 3 * dist.get_rank(), 1, HIDDEN, dtype=torch.float64, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "execute", watched)
        patch.setattr(ExpertGradients, "finish", finishing)
        layer(hidden.requires_grad_())[0].sum().backward()
    return [text(chunking.forward), text(chunking.backward)], [text(tuple(log)) for log in logs], before_weights


@pytest.mark.parametrize("chunks", [1, 4])
def test_what_is_executed_is_the_schedule(ranks, chunks: int) -> None:
    for seed in range(2):
        for wanted, done, (tasks,) in ranks(4).run(orders_and_logs, chunks, seed):
            assert done == wanted
            # All input gradients are on their way, and the last is still waited for
            assert tasks.count(ChunkTask.C2) == chunks > tasks.count(ChunkTask.D2)
            assert tasks[-1] is ChunkTask.C2


def bf16_layer(dtype: torch.dtype, bias: bool) -> BalancedMoELayer:
    """Build a layer that computes in `dtype`; its weights fit bfloat16, and its routing is the same in every dtype."""
    destroy_groups()
    config = moe_config(params_dtype=dtype, hidden_size=32, moe_ffn_hidden_size=64, add_bias_linear=bias)
    layer = build_layer(config, build_groups(config, seed=7))
    router = layer.router.weight
    generator = torch.Generator().manual_seed(5)
    for parameter in (router, *layer.experts.parameters()):
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator).bfloat16())
    layer.router.gating = lambda tokens: F.linear(tokens.double(), router.double())
    return layer


def with_main_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Give parameters main gradients in float32 and megatron-core's hook, which `accumulate` stands for."""
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.times_ready = 0
        parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(accumulate)


def accumulate(parameter: torch.nn.Parameter) -> None:
    """Add the gradient to the main gradient unless that is done, as DDP's hook does."""
    if not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None
    parameter.times_ready += 1


def weight_gradients(dtype: torch.dtype, chunks: int, main_gradients: bool) -> list[torch.Tensor]:
    """Return the gradients of the experts' parameters over two microbatches."""
    layer = bf16_layer(dtype, bias=True)
    in_chunks(chunks, 3, own_gradients, layer)
    parameters = list(layer.experts.parameters())
    weights = [parameter.detach().clone() for parameter in parameters]
    if main_gradients:
        with_main_gradients(parameters)
    totals = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    for microbatch in range(2):
        generator = torch.Generator().manual_seed(microbatch)
        hidden, scale = torch.randn(2, 256, 1, 32, generator=generator).bfloat16().to(dtype)
        (layer(hidden.requires_grad_())[0] * scale).sum().backward()
        if main_gradients:
            assert all(parameter.times_ready == microbatch + 1 for parameter in parameters)
            continue
        for total, parameter in zip(totals, parameters, strict=True):
            total += parameter.grad
            parameter.grad = None
    assert all(torch.equal(weight, parameter) for weight, parameter in zip(weights, parameters, strict=True))
    return [parameter.main_grad for parameter in parameters] if main_gradients else totals


def deviations(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest relative deviation of a tensor."""
    pairs = zip(found, expected, strict=True)
    return max(float((one.double() - other).norm() / other.double().norm()) for one, other in pairs)


def errors_by_chunks(main_gradients: bool) -> tuple[list[float], list[float]]:
    """Return how bfloat16 gradients in 1, 8 and 16 chunks deviate from exact ones, and the latter from those in 1."""
    exact = weight_gradients(torch.float64, 1, False)
    one, *others = (weight_gradients(torch.bfloat16, chunks, main_gradients) for chunks in (1, 8, 16))
    return [deviations(found, exact) for found in (one, *others)], [deviations(found, one) for found in others]


def test_chunks_add_up_in_float32(ranks) -> None:
    """To float32 rounding, weight gradients do not depend on the number of chunks."""
    (((one, *_), others),) = ranks(1).run(errors_by_chunks, True)
    assert max(others) < 1e-6 < 1e-4 < one


def test_without_main_gradients_a_sum_is_rounded_once(ranks) -> None:
    (((one, *errors), _),) = ranks(1).run(errors_by_chunks, False)
    assert max(errors) < 1.02 * one


class WeightCopies(TorchDispatchMode):
    """Counts copies of tensors with a weight's shape."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.shapes = {weight.shape for weight in weights}
        self.found = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        result = operation(*args, **(kwargs or {}))
        self.found += name in ("clone", "copy_", "_to_copy", "cat", "slice_backward") and result.shape in self.shapes
        return result


def copies_of_gradients(chunks: int) -> int:
    """Count gradient copies in a backward pass of home and guest experts."""
    layer = bf16_layer(torch.bfloat16, bias=False)
    experts = layer.experts
    in_chunks(chunks, 3, functools.partial(host_on, str(all_on_all(2)), "local_first", ""), layer)
    hidden = torch.randn(64, 1, 32, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    parameters = list(experts.parameters())
    with_main_gradients(parameters)
    loss = layer(hidden.requires_grad_())[0].square().sum()
    counter = WeightCopies(parameters)
    with counter:
        loss.backward()
    assert all(parameter.main_grad.any() and parameter.times_ready == 1 for parameter in parameters)
    assert all(gradient.any() for gradient in experts.gradients_of(EXPERTS - 1))
    return counter.found


@pytest.mark.parametrize("chunks", [1, 3])
def test_no_gradient_of_a_weight_is_copied(ranks, chunks: int) -> None:
    assert ranks(2).run(copies_of_gradients, chunks) == [0, 0]


EP4 = "--expert-model-parallel-size 4"

RUNS = {
    "recompute-parts": f"{EP4} --recompute-granularity selective --recompute-modules moe_act shared_experts "
    "--moe-grouped-gemm --moe-shared-expert-intermediate-size 48 --disable-bias-linear",
    "codec": f"{EP4} --moe-comm-codec fp8 --moe-comm-codec-directions all",
}
SLOW = {
    "capacity": f"{EP4} --moe-expert-capacity-factor 1.0 --moe-apply-probs-on-input --moe-router-topk 1 "
    "--moe-router-pre-softmax",
    **{wire: f"{EP4} --moe-comm-alltoall {wire} --moe-comm-node-size 2" for wire in ("flat", "1dh", "2dh", "auto")},
}
"""Layouts and features to combine with chunks; test_layouts.py trains pairs of features."""

WAYS = ("--moe-comm-chunks 2", "--moe-comm-chunks 3 --moe-comm-order interleaved", "--moe-comm-chunks 4")


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_runs_in_chunks_follow_those_without(ranks, curve_of, length, name: str) -> None:
    iterations = length(3)
    flags = (RUNS | SLOW)[name]
    way = WAYS[[*RUNS, *SLOW].index(name) % len(WAYS)]
    plain = curve_of(flags, iterations)
    curves = ranks(4).run(runs.train_curve, f"{flags} {way}", iterations)
    assert all(curve == curves[0] for curve in curves)
    # A codec turns last-bit differences into quantization steps
    assert deviation(curves[0], plain) <= (1e-3 if name == "codec" else 1e-6)
