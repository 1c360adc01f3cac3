"""BalancedMoELayer in float64 against the single-process oracle, and its parts against plain references."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.build.run import parts
from megatron_balance.comm.alltoall import AllToAll, FlatAllToAll
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.config.run_config import BalanceConfig
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.flow.parallel_schedule import SCHEDULES, ParallelDispatch
from megatron_balance.flow.reference import ExpertWeights, mixture_of_experts
from megatron_balance.job.layout import build_groups, destroy_groups

HIDDEN, INNER, EXPERTS = 12, 20, 8


def moe_config(**changes: object) -> TransformerConfig:
    """A tiny float64 mixture over all ranks."""
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
) -> BalancedMoELayer:
    """The layer alone, with initial weights large enough to matter."""
    submodules = MoESubmodules(experts=ModuleSpec(module=GroupedExperts))
    wire = all_to_all or FlatAllToAll(groups.ep)
    exchange = TokenExchange(wire, wire, wire)
    path = path or ParallelDispatch(SCHEDULES["megatron"], groups, sequence_parallel=True)
    layer = BalancedMoELayer(config, submodules, 1, parallel=path, balance=BalanceConfig(), exchange=exchange)
    layer.set_layer_number(1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in layer.experts.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    layer.router.weight.data.normal_(std=2.0, generator=torch.Generator().manual_seed(99))
    # megatron-core's own gating refuses a rank without tokens
    layer.router.gating = lambda tokens: F.linear(tokens, layer.router.weight)
    return layer


def gathered(layer: BalancedMoELayer) -> list[torch.Tensor]:
    """All experts' parameters [E, ...] as leaves, in the order fc1 weight, fc1 bias, fc2 weight, fc2 bias."""
    whole = []
    for parameter in layer.experts.parameters():
        parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, parameter.detach().contiguous())
        whole.append(torch.cat(parts).requires_grad_())
    return whole


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max().clamp(min=1e-30)).item()


Collect = Callable[[], list[torch.Tensor]]
"""After a backward pass: the gradient of each of the experts' parameters."""


def own_gradients(layer: BalancedMoELayer) -> Collect:
    """Every expert is computed by its owner only."""
    return lambda: [parameter.grad for parameter in layer.experts.parameters()]


def check_against_oracle(
    changes: dict,
    tokens: str,
    host: Callable[[BalancedMoELayer], Collect] = own_gradients,
    all_to_all: Callable[[dist.ProcessGroup], AllToAll] = FlatAllToAll,
) -> None:
    """Output and every gradient of one forward and backward pass equal the oracle's to 1e-12.

    `host` prepares the layer, such as by placing its experts; `all_to_all` is made from the expert-parallel group.
    """
    config = moe_config(**changes)
    groups = build_groups(config, seed=7)
    layer = build_layer(config, groups, all_to_all(groups.ep))
    collect = host(layer)
    rank, world = dist.get_rank(), dist.get_world_size()
    count = {"even": 16, "uneven": 1 + 7 * rank, "empty": 0 if rank == world - 1 else 9}[tokens]
    generator = torch.Generator().manual_seed(1000 + rank)
    hidden = torch.randn(count, 1, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(count, 1, HIDDEN, dtype=torch.float64, generator=generator)

    output, _ = layer(hidden)
    (output * weight).sum().backward()
    ours = collect()
    router_grad, hidden_grad = layer.router.weight.grad.clone(), hidden.grad.clone()

    layer.router.weight.grad, hidden.grad = None, None
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


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", ["even", "uneven", "empty"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_the_oracle(ranks, world_size: int, tokens: str, activation: str) -> None:
    if world_size == 1 and tokens == "empty":
        pytest.skip("one rank without tokens has nothing to compare")
    ranks(world_size).run(check_against_oracle, ACTIVATIONS[activation], tokens)


def test_equals_the_oracle_when_experts_starve(ranks) -> None:
    changes = ACTIVATIONS["gelu"] | {"moe_router_topk": 1, "moe_router_pre_softmax": True}
    ranks(8).run(check_against_oracle, changes, "uneven")


def initial_weights(gated: bool) -> list[torch.Tensor]:
    """This rank's experts as our module and megatron-core's initialise them, from the same seed."""
    config = moe_config(
        params_dtype=torch.float32,
        gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu,
        add_bias_linear=not gated,
    )
    local = EXPERTS // dist.get_world_size()
    ours = GroupedExperts(range(local), config, build_groups(config, seed=7))
    # Groups must not end while another rank still connects
    dist.barrier()
    destroy_groups()
    groups = build_groups(config, seed=7)
    _, submodules = parts(get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False))
    theirs: SequentialMLP = submodules.experts(local, config, pg_collection=groups)
    for name, parameter in ours.named_parameters():
        expected = torch.stack([expert.get_parameter(name) for expert in theirs.local_experts])
        assert torch.equal(parameter, expected), name
    marks = ("allreduce", "tensor_model_parallel", "partition_stride")
    for name, parameter in ours.named_parameters():
        other = theirs.local_experts[0].get_parameter(name)
        for mark in marks:
            assert getattr(parameter, mark, None) == getattr(other, mark, None), (name, mark)
    return list(ours.linear_fc1.weight.detach())


@pytest.mark.parametrize("gated", [False, True])
def test_initial_weights_are_megatrons_and_all_experts_differ(ranks, gated: bool) -> None:
    experts = [weight for weights in ranks(4).run(initial_weights, gated) for weight in weights]
    assert len(experts) == EXPERTS
    assert not any(torch.equal(a, b) for i, a in enumerate(experts) for b in experts[:i])


def experts_together_and_apart(activation: dict) -> None:
    """One grouped product for home and one for guest slots, as on CUDA, equals slot by slot, gradients included."""
    config = moe_config(params_dtype=torch.float32, expert_model_parallel_size=1, **activation)
    experts = GroupedExperts(range(EXPERTS - 2), config, build_groups(config, seed=7))
    for parameter in experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    # One guest slot more than is in use
    experts.allocate_guests(3)
    guests = [tensor for tensors in map(experts.weights_of, range(EXPERTS - 2, EXPERTS)) for tensor in tensors]
    tokens = torch.tensor([3, 0, 5, 1, 0, 8, 2, 4])
    generator = torch.Generator().manual_seed(3)
    for guest in guests:
        guest.normal_(generator=generator)
    rows = torch.randn(int(tokens.sum()), HIDDEN, generator=generator)
    probs = torch.rand(len(rows), generator=generator)
    results = []
    for by_slot in (True, False):
        inputs = rows.clone().requires_grad_(), probs.clone().requires_grad_()
        output = experts._all_slots(inputs[0], tokens, inputs[1], by_slot)
        experts.zero_grad()
        output.square().sum().backward()
        slots = [gradient for slot in range(EXPERTS - 2, EXPERTS + 1) for gradient in experts.gradients_of(slot)]
        assert any(gradient.any() for gradient in slots)
        gradients = [tensor.grad for tensor in (*inputs, *experts.parameters())]
        results.append([output, *gradients, *(gradient.clone() for gradient in slots)])
        for gradient in slots:
            gradient.zero_()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts_together_equal_experts_apart(ranks, activation: str) -> None:
    ranks(1).run(experts_together_and_apart, ACTIVATIONS[activation])
