"""Results that may vary from run to run on CUDA: none in our MoE layer, and in a step only the documented ones."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_balance.job.layout import build_groups, destroy_groups
from megatron_balance.training.loop import train_step
from tests.distributed import runs
from tests.distributed.layers import HIDDEN, all_on_all, build_layer, host_on, in_chunks, moe_config, own_gradients
from tests.operators import Operators

SWIGLU = {"activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": False}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
LAYERS = {
    "plain": ({}, 1, False),
    "chunks": (SWIGLU | SIGMOID, 3, False),
    "chunks and guests with a capacity": ({"moe_expert_capacity_factor": 1.0}, 2, True),
}
"""Name -> configuration, number of chunks, and whether every rank hosts every expert."""


def operators_of_layers() -> dict[str, tuple[list[str], list[str]]]:
    """Return the (all, nondeterministic) operators of a forward and a backward pass of each layer."""
    found = {}
    for name, (changes, chunks, guests) in LAYERS.items():
        config = moe_config(params_dtype=torch.float32, moe_router_dtype="fp32", **changes)
        layer = build_layer(config, build_groups(config, seed=7))
        host = functools.partial(host_on, str(all_on_all(2)), "proportional", "") if guests else own_gradients
        in_chunks(chunks, 5, host, layer)
        hidden = torch.randn(40 + dist.get_rank(), 1, HIDDEN, requires_grad=True)
        with Operators() as operators:
            layer(hidden)[0].square().sum().backward()
        found[name] = operators.all, operators.nondeterministic
        dist.barrier()
        destroy_groups()
    return found


def test_nothing_in_a_layer_varies_on_cuda(ranks) -> None:
    for found in ranks(2).run(operators_of_layers):
        for name, (operators, nondeterministic) in found.items():
            assert nondeterministic == [], name
            # The record covers both passes and the experts
            assert operators.count("aten._embedding_bag_forward_only.default") == 2, name
            assert any(operator.startswith("aten.mm") for operator in operators), name


def operators_of_step(flags: str) -> set[str]:
    run = runs.build(flags)
    with Operators() as operators:
        train_step(run)
    return {*operators.nondeterministic}


EP2 = "--expert-model-parallel-size 2"
ALL = (
    f"{EP2} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --disable-bias-linear --swiglu "
    "--moe-parallel-schedule s2 --moe-comm-chunks 3 --moe-comm-order interleaved --balance-policy top2 "
    "--balance-overlap blockwise --moe-router-force-workload hot_experts"
)


@pytest.mark.parametrize(
    ("flags", "varying"),
    [
        (EP2, {"aten.embedding_dense_backward.default"}),
        (f"{ALL} --position-embedding-type rope --deterministic-mode", set()),
    ],
    ids=["plain", "deterministic"],
)
def test_of_a_step_embeddings_alone_may_vary(ranks, flags: str, varying: set[str]) -> None:
    assert ranks(2).run(operators_of_step, flags) == [varying] * 2
