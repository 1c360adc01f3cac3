"""Every step order for tensor-parallel attention with sharded experts: gradients, training, overlap."""

import functools
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_balance.comm import alltoall, pipelined, sharded
from megatron_balance.comm.alltoall import AllToAll, FlatAllToAll, P2PAllToAll, post
from megatron_balance.flow.chunks.order import Chunking
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.flow.parallel_schedule import SCHEDULES, ParallelDispatch
from megatron_balance.job.groups import new_twin
from megatron_balance.job.layout import build_groups
from tests.distributed import runs
from tests.distributed.layers import (
    ACTIVATIONS,
    EXPERTS,
    HIDDEN,
    LAYOUTS,
    QUICK_LAYOUTS,
    Layout,
    build_layer,
    moe_config,
    random_order,
    relative,
    size_of,
)
from tests.distributed.runs import Curve, deviation
from tests.reference import ExpertWeights, mixture_of_experts
from tests.variants import variants

ITERATIONS = 3


def whole_experts(layer: BalancedMoELayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all experts' weights [E, O, I] as leaves, from the shards of all ranks."""
    experts = layer.experts
    parts = 2 if layer.config.gated_linear_unit else 1
    found = []
    for weight, axis, cuts in ((experts.linear_fc1.weight, 1, parts), (experts.linear_fc2.weight, 2, 1)):
        every = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
        dist.all_gather(every, weight.detach().contiguous())
        hosts = [every[first : first + experts.shards] for first in range(0, len(every), experts.shards)]
        # The gate and the linear part are sharded separately
        pieces = [[shard.chunk(cuts, axis)[part] for part in range(cuts) for shard in host] for host in hosts]
        found.append(torch.cat([torch.cat(host, axis) for host in pieces]).requires_grad_())
    return found[0], found[1]


def own_shard(layer: BalancedMoELayer, whole: torch.Tensor, axis: int, cuts: int) -> torch.Tensor:
    experts = layer.experts
    mine = whole[list(experts.home_experts)]
    return torch.cat([part.chunk(experts.shards, axis)[experts.shard] for part in mine.chunk(cuts, axis)], axis)


def scheduled_layer(
    layout: Layout,
    schedule: str,
    activation: str,
    sequence_parallel: bool,
    chunks: int,
    saa: bool,
    capacity_factor: float | None,
    wire: Callable[[dist.ProcessGroup], AllToAll] | None = None,
) -> BalancedMoELayer:
    """Build a layer that follows a schedule's steps in a given number of chunks; see `check_schedule`."""
    tensor, expert, shards = layout
    config = moe_config(
        moe_expert_capacity_factor=capacity_factor,
        moe_router_load_balancing_type="none" if capacity_factor else "aux_loss",
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=shards,
        sequence_parallel=sequence_parallel,
        **ACTIVATIONS[activation] | {"add_bias_linear": False},
    )
    groups = build_groups(config, seed=7)
    twin = new_twin(groups.tp) if saa else None
    path = ParallelDispatch(SCHEDULES[schedule], groups, sequence_parallel, twin)
    wire = wire or (FlatAllToAll if chunks == 1 else P2PAllToAll)
    layer = build_layer(config, groups, wire(path.exchange_group), path)
    if chunks > 1:
        chunking = Chunking(random_order(chunks, 1), random_order(chunks, 2))
        layer.dispatcher.chunks = lambda plan: chunking
    return layer


def check_schedule(
    layout: Layout,
    schedule: str,
    activation: str,
    sequence_parallel: bool,
    chunks: int,
    saa: bool = False,
    capacity_factor: float | None = None,
    noise: float = 0.0,
    wire: Callable[[dist.ProcessGroup], AllToAll] | None = None,
) -> None:
    """Check that a layer's output and gradients equal those of unsharded experts that compute each token once.

    A router drops tokens beyond an expert's capacity among its own input. With s1, this is each tensor-parallel rank's
    part of the tokens; with all other schedules, it is the rank's whole input. `noise` makes the copies of router
    logits differ.
    """
    tensor, _, shards = layout
    layer = scheduled_layer(layout, schedule, activation, sequence_parallel, chunks, saa, capacity_factor, wire)
    config = layer.config
    path = layer.parallel
    # Tokens differ by rank with sequence parallelism, and otherwise only by data-parallel rank
    replica = dist.get_rank() if sequence_parallel else dist.get_rank() // tensor
    copies = 1 if sequence_parallel else tensor
    generator = torch.Generator().manual_seed(1000 + replica)
    hidden = torch.randn(12, 1, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(12, 1, HIDDEN, dtype=torch.float64, generator=generator)

    if noise:
        perturb_copies(layer, hidden, noise)

    rows: list[torch.Tensor] = []
    layer.experts.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[1].sum()))
    output, _ = layer(hidden)
    (output * weight).sum().backward()
    router_grad = layer.router.weight.grad.clone()
    hidden_grad = hidden.grad.clone()
    if path.splits_tokens:
        dist.all_reduce(router_grad, group=path.groups.tp)

    layer.router.weight.grad = None
    hidden.grad = None
    first, second = whole_experts(layer)
    routed = [layer.router(part) for part in (hidden.chunk(tensor) if path.splits_tokens else [hidden])]
    probs, routing_map = (torch.cat(parts) for parts in zip(*routed, strict=True))
    assert (routing_map.sum() < 12 * config.moe_router_topk) == bool(capacity_factor)
    if noise:
        chosen_TK = F.linear(hidden.view(-1, HIDDEN), layer.router.weight).topk(config.moe_router_topk).indices
        assert torch.equal(routing_map, torch.zeros_like(routing_map).scatter(1, chosen_TK, True))
    expected = mixture_of_experts(
        hidden.view(-1, HIDDEN),
        probs,
        routing_map,
        ExpertWeights(first, second, None, None),
        config.activation_func,
        config.gated_linear_unit,
    )
    (expected * weight.view(-1, HIDDEN)).sum().backward()
    assert relative(output.view(-1, HIDDEN), expected) < 1e-12
    assert relative(hidden_grad, hidden.grad) < 1e-12
    assert relative(router_grad, layer.router.weight.grad) < 1e-12
    repeats = copies if schedule in ("megatron", "baseline") else 1
    check_rows(torch.stack(rows).sum() * copies, routing_map.sum() * shards * repeats)
    check_expert_gradients(layer, (first, second), copies)


def check_rows(computed: torch.Tensor, expected: torch.Tensor) -> None:
    """Check the number of computed rows, summed over all ranks."""
    dist.all_reduce(computed)
    dist.all_reduce(expected)
    assert computed == expected


def check_expert_gradients(
    layer: BalancedMoELayer, whole_weights: tuple[torch.Tensor, torch.Tensor], copies: int
) -> None:
    """Check each shard's gradients against its part of the whole experts', summed over ranks, divided by `copies`."""
    linear = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
    gated = 2 if layer.config.gated_linear_unit else 1
    for own, whole, axis, cuts in zip(linear, whole_weights, (1, 2), (gated, 1), strict=True):
        total = whole.grad if whole.grad is not None else torch.zeros_like(whole)
        dist.all_reduce(total)
        assert relative(own.grad, own_shard(layer, total / copies, axis, cuts)) < 1e-12


def perturb_copies(layer: BalancedMoELayer, hidden: torch.Tensor, noise: float) -> None:
    """Make tensor-parallel ranks choose different experts for many equal tokens, as rounding does for a few."""
    group = layer.parallel.groups.tp
    exact = layer.router.gating
    shift = noise * torch.randn(12, 1, EXPERTS, generator=torch.Generator().manual_seed(group.rank()))
    layer.router.gating = lambda tokens: exact(tokens) + (shift if group.rank() else 0)
    own = layer.router.gating(hidden).argmax(-1)
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own, group=group)
    assert not any(torch.equal(other, every[0]) for other in every[1:])


@pytest.mark.parametrize("saa", [True, False])
def test_s2_with_copies_that_would_choose_differently(ranks, saa: bool) -> None:
    """The first tensor-parallel rank chooses a token's experts, and every router gets the gradient."""
    ranks(2).run(check_schedule, (2, 2, 1), "s2", "swiglu-no-bias", False, 1, saa, None, 5.0)


@pytest.mark.parametrize("layout", QUICK_LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_schedules_equal_the_oracle(ranks, layout: Layout, schedule: str, chunks: int) -> None:
    ranks(size_of(layout)).run(check_schedule, layout, schedule, "swiglu-no-bias", False, chunks)


@pytest.mark.parametrize("layout", [(2, 2, 2), (4, 2, 2), pytest.param((2, 4, 2), marks=pytest.mark.slow)])
def test_simultaneous_exchanges_equal_the_oracle(ranks, layout: Layout) -> None:
    ranks(size_of(layout)).run(check_schedule, layout, "s2", "swiglu-no-bias", False, 3, True)


@pytest.mark.parametrize("schedule", ["megatron", "baseline", "s1"])
def test_sequence_parallel_layers_equal_the_oracle(ranks, schedule: str) -> None:
    ranks(4).run(check_schedule, (2, 2, 2), schedule, "gelu", True, 2)


@pytest.mark.parametrize("layout", [(2, 2, 2), pytest.param((4, 2, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_with_capacity_equal_the_oracle(ranks, layout: Layout, schedule: str) -> None:
    ranks(4).run(check_schedule, layout, schedule, "gelu", False, 2, schedule == "s2", 0.5)


def spans_of_results(schedule_saa: bool) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (start, end) of receiving the results of s2, and of passing them on."""
    config = moe_config(
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=2,
        add_bias_linear=False,
    )
    groups = build_groups(config, seed=7)
    twin = new_twin(groups.tp) if schedule_saa else None
    path = ParallelDispatch(SCHEDULES["s2"], groups, False, twin)
    layer = build_layer(config, groups, P2PAllToAll(path.exchange_group), path)
    times: dict[dist.ProcessGroup, list[float]] = {}

    def posting(group: dist.ProcessGroup, *args: object, **kwargs: object) -> list[object]:
        def wait(work: dist.Work) -> None:
            work.wait()
            times[group].append(time.monotonic())

        times.setdefault(group, []).append(time.monotonic())
        return [SimpleNamespace(wait=functools.partial(wait, work)) for work in post(group, *args, **kwargs)]

    hidden = torch.randn(64, 1, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        for module in (alltoall, pipelined, sharded):
            patch.setattr(module, "post", posting)
        # Keep only what follows the experts
        layer.experts.register_forward_hook(lambda *_: times.clear())
        layer(hidden)
    passed_on = times[twin or groups.tp]
    return (min(times[path.exchange_group]), max(times[path.exchange_group])), (min(passed_on), max(passed_on))


@pytest.mark.parametrize("saa", [True, False])
def test_simultaneous_exchanges_overlap_and_others_do_not(ranks, saa: bool) -> None:
    for (started, ended), (passed_first, passed_last) in ranks(4).run(spans_of_results, saa):
        assert started < passed_first and ended < passed_last
        assert (passed_first < ended) == saa


def flags_of(layout: Layout) -> str:
    """Return flags for at least 8 samples: two microbatches, or as many as a microbatch of all ranks has."""
    tensor, expert, shards = layout
    samples = max(8, 2 * size_of(layout) // tensor)
    return (
        f"--tensor-model-parallel-size {tensor} --expert-model-parallel-size {expert} "
        f"--expert-tensor-parallel-size {shards} --disable-bias-linear --swiglu --global-batch-size {samples}"
    )


FOLLOWING = [
    ((2, 2, 2), "auto"),
    *(pytest.param(layout, schedule, marks=pytest.mark.slow) for layout in LAYOUTS for schedule in SCHEDULES),
    *(pytest.param((2, 1, 1), schedule, marks=pytest.mark.slow) for schedule in ("megatron", "baseline", "s1")),
]


@pytest.mark.parametrize(("layout", "schedule"), FOLLOWING)
def test_training_follows_megatrons_schedule(curve_of, layout: Layout, schedule: str) -> None:
    wanted = sequence_parallel_curve(curve_of, layout, "")
    found = curve_of(f"{flags_of(layout)} --moe-parallel-schedule {schedule}", ITERATIONS, size_of(layout))
    assert deviation(found, wanted) <= 1e-5


def sequence_parallel_curve(curve_of: Callable[..., Curve], layout: Layout, flags: str) -> Curve:
    """Return the curve of megatron's schedule, with sequence parallelism so that no rank repeats another's work."""
    apart = "--sequence-parallel" if layout[0] > 1 else ""
    return curve_of(f"{flags_of(layout)} {apart} {flags}", ITERATIONS, size_of(layout))


HOT = "--moe-router-force-workload hot_experts"

FEATURES = {
    "placement": (f"{HOT} --balance-policy top2", HOT),
    "placement-blockwise": (f"{HOT} --balance-policy flexmoe --balance-overlap blockwise", HOT),
    "placement-chunks": (f"{HOT} --balance-policy demi --moe-comm-chunks auto --moe-comm-order demi", HOT),
    "chunks-pipe": ("--moe-comm-chunks 3 --moe-comm-order interleaved --moe-comm-alltoall pipe", ""),
    "chunks-auto": ("--moe-comm-chunks auto", ""),
    "2dh": ("--moe-comm-alltoall 2dh --moe-comm-node-size 2", ""),
    "without SAA": ("--no-moe-parallel-saa", ""),
    "sgd": ("--optimizer sgd --lr 1e-1",) * 2,
    "recompute-moe-shared-experts": (
        "--recompute-granularity selective --recompute-modules moe --moe-shared-expert-intermediate-size 48",
        "--moe-shared-expert-intermediate-size 48",
    ),
    "seq-aux-loss": ("--moe-router-load-balancing-type seq_aux_loss",) * 2,
    "global-aux-loss": ("--moe-router-load-balancing-type global_aux_loss",) * 2,
    "expert-bias": ("--moe-router-enable-expert-bias --moe-router-score-function sigmoid",) * 2,
    "accumulation": ("--global-batch-size 16 --overlap-grad-reduce", "--global-batch-size 16"),
}
"""Feature -> its flags, and those of the reference run. All use shards, in addition to test_layouts.py."""

FEATURES_OF_SCHEDULES = [
    case for case in itertools.product(FEATURES, SCHEDULES) if case[0] != "without SAA" or case[1] == "s2"
]
QUICK_FEATURES = {("placement-blockwise", "s2")}


@pytest.mark.parametrize(("feature", "schedule"), variants(FEATURES_OF_SCHEDULES, QUICK_FEATURES))
def test_schedules_with_every_feature(ranks, curve_of, profiles, feature: str, schedule: str) -> None:
    layout = (2, 2, 2)
    flags, plain = FEATURES[feature]
    profile = f"--balance-profile {profiles[2]}" if feature.startswith("placement") else ""
    command = f"{flags_of(layout)} {flags} {profile} --moe-parallel-schedule {schedule}"
    curve, hosts = ranks(4).run(runs.train_hosts, command, ITERATIONS)[0]
    wanted = sequence_parallel_curve(curve_of, layout, plain)
    assert deviation(curve, wanted) <= 1e-5
    assert (sum(hosts) > 0) == feature.startswith("placement")


@pytest.mark.slow
def test_megatrons_schedule_follows_megatron(curve_of) -> None:
    # megatron-core's own layer uses gloo's all-gather, which needs equal sizes
    flags = (
        f"{flags_of((2, 2, 2))} --sequence-parallel --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
    )
    assert deviation(curve_of(flags, ITERATIONS), curve_of(f"{flags} --moe-layer-impl megatron", ITERATIONS)) <= 1e-6
