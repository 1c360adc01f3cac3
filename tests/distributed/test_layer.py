"""BalancedMoELayer in float64 against the single-process oracle, and its parts against plain references."""

import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.build.run import parts
from megatron_balance.flow import dispatcher, rows
from megatron_balance.flow.chunks import pipeline
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.layer import BalancedMoELayer, PassLoad, remember
from megatron_balance.flow.plan import Choices
from megatron_balance.job.layout import build_groups, destroy_groups
from tests.distributed.layers import (
    ACTIVATIONS,
    EXPERTS,
    HIDDEN,
    build_layer,
    check_against_oracle,
    in_chunks,
    moe_config,
    relative,
)


@pytest.mark.parametrize(
    ("world_size", "tokens"),
    [
        *((1, "uneven"), (2, "even"), (2, "empty"), (4, "uneven"), (8, "empty")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, "even"), (4, "empty"), (8, "uneven"))),
    ],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_equals_the_oracle(ranks, world_size: int, tokens: str, activation: str) -> None:
    ranks(world_size).run(check_against_oracle, ACTIVATIONS[activation], tokens)


def test_equals_the_oracle_when_experts_starve(ranks) -> None:
    changes = ACTIVATIONS["gelu"] | {"moe_router_topk": 1, "moe_router_pre_softmax": True}
    ranks(8).run(check_against_oracle, changes, "uneven")


def check_against_megatron(changes: dict) -> None:
    """Check that a forward and backward pass of our layer and of megatron-core's agree to 1e-12 with equal weights."""
    config = moe_config(**AUXILIARY_LOSSES | changes)
    groups = build_groups(config, seed=7)
    _, submodules = parts(get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False))
    theirs = MoELayer(config, submodules=submodules, layer_number=1, pg_collection=groups)
    ours = build_layer(config, groups, submodules=submodules)
    # No rank is without tokens, so use the router's own gating, which has a bias
    del ours.router.gating
    copy_weights(ours, theirs)
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    hidden, weight = torch.randn(2, 12, 2, HIDDEN, dtype=torch.float64, generator=generator)
    results = []
    for layer in (ours, theirs):
        inputs = hidden.clone().requires_grad_()
        output, _ = layer(inputs)
        (output * weight).sum().backward()
        results.append([output, inputs.grad, *gradients(layer)])
    differences = [relative(one, other) for one, other in zip(*results, strict=True)]
    assert max(differences) < 1e-12, differences


def copy_weights(ours: BalancedMoELayer, theirs: MoELayer) -> None:
    """Give megatron-core's layer the weights of ours."""
    for name in ("router", "shared_experts"):
        if getattr(ours, name, None) is not None:
            getattr(theirs, name).load_state_dict(getattr(ours, name).state_dict())
    for index, expert in enumerate(theirs.experts.local_experts):
        for name, parameter in ours.experts.named_parameters():
            expert.get_parameter(name).data.copy_(parameter[index])


def gradients(layer: MoELayer) -> list[torch.Tensor]:
    """Return the gradients of all parameters of a layer, ours or megatron-core's, in one order."""
    if isinstance(layer, BalancedMoELayer):
        experts = [parameter.grad for parameter in layer.experts.parameters()]
    else:
        each = [dict(expert.named_parameters()) for expert in layer.experts.local_experts]
        experts = [torch.stack([one[name].grad for one in each]) for name in each[0]]
    shared = [] if getattr(layer, "shared_experts", None) is None else layer.shared_experts.parameters()
    return [*(parameter.grad for parameter in (*layer.router.parameters(), *shared)), *experts]


AUXILIARY_LOSSES = {"moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3}

AS_MEGATRONS = {
    "plain": (4, {}),
    "tensor-parallel": (
        4,
        ACTIVATIONS["swiglu-no-bias"]
        | {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
        | {"sequence_parallel": True},
    ),
    "allgather": (2, {"moe_token_dispatcher_type": "allgather"}),
    "shared-experts": (
        2,
        {"add_bias_linear": False, "moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True},
    ),
    "capacity-padded": (2, {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}),
    "recompute-moe": (2, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    "expert-bias": (
        2,
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 0.0},
    ),
    "squared-relu": (2, {"activation_func": squared_relu}),
    "one-expert-per-rank": (4, {"num_moe_experts": 4}),
}
"""Number of ranks, and changes to the configuration."""


@pytest.mark.parametrize(("world_size", "changes"), AS_MEGATRONS.values(), ids=AS_MEGATRONS)
def test_equals_megatrons_layer(ranks, world_size: int, changes: dict) -> None:
    ranks(world_size).run(check_against_megatron, changes)


def initial_weights(activation: str) -> list[torch.Tensor]:
    """Check that our module and megatron-core's initialize this rank's experts alike, and return their weights."""
    config = moe_config(params_dtype=torch.float32, **ACTIVATIONS[activation])
    local = EXPERTS // dist.get_world_size()
    ours = GroupedExperts(range(local), config, build_groups(config, seed=7))
    # Groups must not end while another rank is still connecting
    dist.barrier()
    destroy_groups()
    groups = build_groups(config, seed=7)
    _, submodules = parts(get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False))
    theirs: SequentialMLP = submodules.experts(local, config, pg_collection=groups)
    for name, parameter in ours.named_parameters():
        expected = torch.stack([expert.get_parameter(name) for expert in theirs.local_experts])
        assert torch.equal(parameter, expected), name
        assert parameter.allreduce == theirs.local_experts[0].get_parameter(name).allreduce
    return list(ours.linear_fc1.weight.detach())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_initial_weights_are_megatrons_and_all_experts_differ(ranks, activation: str) -> None:
    experts = [weight for weights in ranks(2).run(initial_weights, activation) for weight in weights]
    assert len(experts) == EXPERTS
    assert not any(torch.equal(a, b) for i, a in enumerate(experts) for b in experts[:i])


class OneLayer(torch.nn.Module):
    """A model chunk: the layer, recomputed or not."""

    def __init__(self, layer: BalancedMoELayer, recomputed: bool) -> None:
        super().__init__()
        self.layer = layer
        self.recomputed = recomputed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.recomputed:
            return self.layer(hidden)[0]
        return tensor_parallel.checkpoint(lambda hidden: self.layer(hidden)[0], False, hidden)


def aside(model: OneLayer, inputs: list[torch.Tensor]) -> None:
    """Compute passes without a backward pass: without gradients, in evaluation, and with a loss that is dropped."""
    with torch.no_grad():
        model(inputs[1])
    model.eval()
    model(inputs[1])
    model.train()
    model(inputs[0]).square().sum()


def passes(
    config: TransformerConfig, groups: ProcessGroupCollection, how: str, order: str
) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of two microbatches, whose forward passes come first, and how often loads are gathered.

    Args:
        how: "once", or what recomputes the layer: "checkpoint", or "moe" as in --recompute-modules.
        order: of the backward passes, such as "10"; "+" for that of the sum of both losses.
    """
    layer = build_layer(config, groups)
    layer.moe_layer_recompute = how == "moe"
    model = OneLayer(layer, how == "checkpoint")
    remember([model])
    count = layer._count
    gathered = []

    def counting(choices: Choices) -> PassLoad:
        gathered.append(choices)
        return count(choices)

    layer._count = counting
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    inputs = torch.randn(2, 12, 1, HIDDEN, dtype=torch.float64, generator=generator).unbind(0)
    inputs = [hidden.clone().requires_grad_() for hidden in inputs]
    aside(model, inputs)
    losses = []
    for hidden in inputs:
        losses.append(model(hidden).square().sum())
        aside(model, inputs)
    if order == "+":
        sum(losses).backward()
    else:
        for microbatch in map(int, order):
            losses[microbatch].backward()
            aside(model, inputs)
    layer.router.bias = None
    return [*(hidden.grad for hidden in inputs), *gradients(layer)], len(gathered)


def repeats(dispatcher: str) -> None:
    """Check that recomputation gathers no load again and changes no gradient, whatever the order of the passes."""
    config = moe_config(**ACTIVATIONS["gelu"], moe_token_dispatcher_type=dispatcher)
    groups = build_groups(config, seed=7)
    for order in ("01", "10", "+"):
        expected, count = passes(config, groups, "once", order)
        for how in ("checkpoint", "moe"):
            found, gathered = passes(config, groups, how, order)
            assert gathered == count, (how, order)
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), (how, order)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_recomputation_repeats_the_decisions_of_its_own_pass(ranks, dispatcher: str) -> None:
    ranks(2).run(repeats, dispatcher)


def moments(hosted: bool, chunks: int, recompute: bool) -> list[str]:
    """Run a forward and a backward pass; return when rows are copied and when the load is known."""
    recomputation = {"recompute_granularity": "selective", "recompute_modules": ["moe"]} if recompute else {}
    config = moe_config(**ACTIVATIONS["gelu"] | recomputation)
    layer = build_layer(config, build_groups(config, seed=7))
    seen: list[str] = []
    owners = layer.placement
    if hosted:
        layer.host = lambda counts_DE, training: owners
    if chunks > 1:
        in_chunks(chunks, 0, lambda layer: lambda: [], layer)
    decide = layer.dispatcher._decide
    copy = rows.gather_rows

    def gather_rows(tokens_TH: torch.Tensor, order: rows.RowOrder) -> torch.Tensor:
        # Gradients are copied like rows
        if sys._getframe(2).f_code.co_name != "backward":
            seen.append("rows")
        return copy(tokens_TH, order)

    with (
        mock.patch.object(layer.dispatcher, "_decide", lambda *known: (seen.append("load"), decide(*known))[1]),
        mock.patch.object(dispatcher, "gather_rows", gather_rows),
        mock.patch.object(pipeline, "gather_rows", gather_rows),
    ):
        output, _ = layer(torch.randn(12, 2, HIDDEN, dtype=torch.float64, requires_grad=True))
        output.sum().backward()
    return seen


@pytest.mark.parametrize(
    ("hosted", "chunks", "recompute", "expected"),
    [
        (False, 1, False, ["rows", "load"]),
        (False, 1, True, ["rows", "load", "rows"]),
        (True, 1, False, ["load", "rows"]),
        (False, 2, False, ["load", "rows"]),
    ],
)
def test_rows_do_not_wait_for_the_load_where_nothing_moves(
    ranks, hosted: bool, chunks: int, recompute: bool, expected: list[str]
) -> None:
    assert ranks(2).run(moments, hosted, chunks, recompute) == [expected] * 2
