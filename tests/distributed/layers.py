"""A float64 MoE layer over all ranks, and its comparison with the single-process oracle."""

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.comm.alltoall import AllToAll, FlatAllToAll
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.comm.trans_agg import TransAgg
from megatron_balance.config.run_config import BalanceConfig
from megatron_balance.device.host_memory import HostReader
from megatron_balance.flow.chunks.order import COMPUTING, Chunking, ChunkStep, Order, check
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.flow.parallel_schedule import SCHEDULES, ParallelDispatch
from megatron_balance.job.layout import build_groups
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SplitName
from megatron_balance.placement.trans_plan import ROUTES, hops, plan_hops
from tests.reference import ExpertWeights, mixture_of_experts

HIDDEN = 12
INNER = 20
EXPERTS = 8


def moe_config(**changes: object) -> TransformerConfig:
    """Return the configuration of a tiny float64 MoE layer over all ranks."""
    settings = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": INNER,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": dist.get_world_size(),
        "params_dtype": torch.float64,
        "moe_router_dtype": "fp64",
        "transformer_impl": "local",
    }
    return TransformerConfig(**(settings | changes))


def build_layer(
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    all_to_all: AllToAll | None = None,
    path: ParallelDispatch | None = None,
    submodules: MoESubmodules | None = None,
) -> BalancedMoELayer:
    """Build the layer alone, with initial weights large enough to matter."""
    experts = ModuleSpec(module=GroupedExperts)
    submodules = dataclasses.replace(submodules, experts=experts) if submodules else MoESubmodules(experts=experts)
    wire = all_to_all or FlatAllToAll(groups.ep)
    exchange = TokenExchange(wire, wire, wire)
    path = path or ParallelDispatch(SCHEDULES["megatron"], groups, sequence_parallel=True)
    layer = BalancedMoELayer(
        config, submodules, 1, parallel=path, balance=BalanceConfig(), exchange=exchange, reader=HostReader()
    )
    layer.set_layer_number(1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in layer.experts.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    layer.router.weight.data.normal_(std=2.0, generator=torch.Generator().manual_seed(99))
    # megatron-core's own gating refuses a rank without tokens
    layer.router.gating = lambda tokens: F.linear(tokens, layer.router.weight)
    return layer


def gathered(layer: BalancedMoELayer) -> list[torch.Tensor]:
    """Return all experts' parameters [E, ...] as leaves: fc1 weight, fc1 bias, fc2 weight, fc2 bias."""
    whole = []
    for parameter in layer.experts.parameters():
        parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, parameter.detach().contiguous())
        whole.append(torch.cat(parts).requires_grad_())
    return whole


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max().clamp(min=1e-30)).item()


Collect = Callable[[], list[torch.Tensor]]
"""Returns, after a backward pass, the gradient of each of the experts' parameters."""


def own_gradients(layer: BalancedMoELayer) -> Collect:
    """Leave every expert to its owner."""
    return lambda: [parameter.grad for parameter in layer.experts.parameters()]


def check_against_oracle(
    changes: dict,
    tokens: str,
    host: Callable[[BalancedMoELayer], Collect] = own_gradients,
    all_to_all: Callable[[dist.ProcessGroup], AllToAll] = FlatAllToAll,
) -> None:
    """Check that the output and every gradient of one forward and backward pass equal the oracle's to 1e-12.

    `host` prepares the layer, such as by placing its experts; `all_to_all` is made from the expert-parallel group.
    """
    config = moe_config(**changes)
    groups = build_groups(config, seed=7)
    layer = build_layer(config, groups, all_to_all(groups.ep))
    collect = host(layer)
    rank = dist.get_rank()
    world = dist.get_world_size()
    count = {"even": 16, "uneven": 1 + 7 * rank, "empty": 0 if rank == world - 1 else 9}[tokens]
    generator = torch.Generator().manual_seed(1000 + rank)
    hidden = torch.randn(count, 1, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(count, 1, HIDDEN, dtype=torch.float64, generator=generator)

    output, _ = layer(hidden)
    (output * weight).sum().backward()
    ours = collect()
    router_grad = layer.router.weight.grad.clone()
    hidden_grad = hidden.grad.clone()

    layer.router.weight.grad = None
    hidden.grad = None
    parameters = gathered(layer)
    names = [name for name, _ in layer.experts.named_parameters()]
    named = dict(zip(names, parameters, strict=True))
    weights = ExpertWeights(
        named["linear_fc1.weight"],
        named["linear_fc2.weight"],
        named.get("linear_fc1.bias"),
        named.get("linear_fc2.bias"),
    )
    probs, routing_map = layer.router(hidden)
    expected = mixture_of_experts(
        hidden.view(-1, HIDDEN), probs, routing_map, weights, config.activation_func, config.gated_linear_unit
    )
    (expected * weight.view(-1, HIDDEN)).sum().backward()

    if count:
        assert relative(output.view(-1, HIDDEN), expected) < 1e-12
        assert relative(hidden_grad, hidden.grad) < 1e-12
        assert relative(router_grad, layer.router.weight.grad) < 1e-12
    home = EXPERTS // world
    for mine, whole, name in zip(ours, parameters, names, strict=True):
        total = whole.grad if whole.grad is not None else torch.zeros_like(whole)
        dist.all_reduce(total)
        assert mine is not None, f"{name} got no gradient"
        assert relative(mine, total[rank * home : (rank + 1) * home]) < 1e-12, name


ACTIVATIONS = {
    "gelu": {"activation_func": F.gelu},
    "swiglu-no-bias": {"activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": False},
}


def random_order(chunks: int, seed: int) -> Order:
    """Return a random executable order."""
    generator = random.Random(seed)
    done = [0] * chunks
    steps = []
    while left := [chunk for chunk in range(chunks) if done[chunk] < len(COMPUTING)]:
        chunk = generator.choice(left)
        steps.append(ChunkStep(COMPUTING[done[chunk]], chunk))
        done[chunk] += 1
    assert not check(steps, chunks)
    return tuple(steps)


def in_chunks(chunks: int, seed: int, host: Callable[[BalancedMoELayer], Collect], layer: BalancedMoELayer) -> Collect:
    """Split the layer's tokens into chunks, with independent orders for the two passes."""
    chunking = Chunking(random_order(chunks, seed), random_order(chunks, seed + 1))
    layer.dispatcher.chunks = lambda plan: chunking
    return host(layer)


def host_on(placement_text: str, split: SplitName, mutation: str, layer: BalancedMoELayer) -> Collect:
    """Place the layer's experts, with one mistake if `mutation` names it. With "reused slots", which is none, the guest
    slots have other weights between the passes."""
    placement = Placement.parse(placement_text)
    generator = np.random.default_rng(list(placement_text.encode()))
    node_size, pieces, route = generator.integers(1, [placement.num_ranks + 1, 17, 4]).tolist()
    transfers = plan_hops(hops(placement, node_size, ROUTES[route - 1]), pieces)
    transfer = TransAgg(layer.ep_group)
    experts = layer.experts
    for parameter in experts.parameters():
        # As DDP does
        parameter.main_grad = torch.zeros_like(parameter)
    experts.allocate_guests(placement.guest_slots)
    layer.host = lambda load, training: placement.trimmed
    layer.split = split
    if mutation == "stale Trans":
        with torch.no_grad():
            transfer.trans(transfers, placement, experts)
            for parameter in experts.parameters():
                parameter += 1e-3
    else:
        transfer.trans(transfers, placement, experts)
    if mutation.startswith("reused slots"):

        def begin(name: str) -> None:
            if name == "combine":
                for slot in range(len(experts.home_experts), placement.slots_per_rank):
                    for weight in experts.weights_of(slot):
                        weight.data.fill_(float("nan"))
            elif name == "experts_backward" and mutation == "reused slots":
                transfer.trans(transfers, placement, experts)

        layer.begin = begin

    def collect() -> list[torch.Tensor]:
        for parameter in experts.parameters():
            parameter.main_grad += parameter.grad
        if mutation == "Agg twice":
            sent = [gradient.clone() for gradient in guest_gradients(layer)]
            transfer.agg(transfers, placement, experts)
            for gradient, again in zip(guest_gradients(layer), sent, strict=True):
                gradient.copy_(again)
        if mutation != "skip Agg":
            transfer.agg(transfers, placement, experts)
            assert not any(gradient.any() for gradient in guest_gradients(layer)), "Agg empties the slots"
        return [parameter.main_grad for parameter in experts.parameters()]

    return collect


def guest_gradients(layer: BalancedMoELayer) -> list[torch.Tensor]:
    projections = (*layer.experts.linear_fc1.guests, *layer.experts.linear_fc2.guests)
    guests = (tensor for projection in projections for tensor in (projection.weight, projection.bias))
    return [guest.main_grad for guest in guests if guest is not None]


def all_on_all(world_size: int) -> Placement:
    owners = Placement.identity(EXPERTS, world_size, EXPERTS - EXPERTS // world_size)
    return owners.rehost([range(world_size)] * EXPERTS)


Layout = tuple[int, int, int]

LAYOUTS = [(2, 2, 2), (1, 2, 2), (4, 2, 2), (2, 2, 1), (2, 1, 2), (2, 4, 2), (1, 4, 2)]
"""(N_MP, N_EP, N_ESP). The first three have as many tensor-parallel ranks as shards, fewer, and more."""

QUICK_LAYOUTS = [
    layout if layout in LAYOUTS[:3] else pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS
]


def size_of(layout: Layout) -> int:
    return max(layout[0], layout[1] * layout[2])
