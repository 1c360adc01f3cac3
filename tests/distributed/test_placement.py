"""Contract 1 for placements: whoever computes an expert, every gradient is what it was, in float64."""

import functools

import numpy as np
import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_balance.comm.trans_agg import ExpertTransfer
from megatron_balance.flow.dispatcher import MegatronDispatcher
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.flow.plan import Split
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.transfers import plan_transfers
from tests.distributed.test_layer import ACTIVATIONS, EXPERTS, Collect, check_against_oracle
from tests.harness import RankFailure
from tests.unit.placements import random_placement

MUTATIONS = ("skip Agg", "Agg twice", "stale Trans")


def host_on(placement_text: str, split: Split, mutation: str, layer: BalancedMoELayer) -> Collect:
    """Place the layer's experts, with one mistake if `mutation` names it."""
    placement = Placement.parse(placement_text)
    generator = np.random.default_rng(list(placement_text.encode()))
    node_size, chunks, fanout = generator.integers(1, [placement.num_ranks + 1, 17, 4]).tolist()
    transfers = plan_transfers(placement, node_size, chunks, fanout)
    transfer, experts = ExpertTransfer(layer.ep_group), layer.experts
    for parameter in experts.parameters():
        # As DDP does it
        parameter.main_grad = torch.zeros_like(parameter)
    experts.allocate_guests(placement.guest_slots)
    layer.host, layer.split = lambda counts_DE, training: placement.trimmed, split
    if mutation == "stale Trans":
        with torch.no_grad():
            transfer.trans(transfers, placement, experts)
            for parameter in experts.parameters():
                parameter += 1e-3
    else:
        transfer.trans(transfers, placement, experts)

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
    projections = (layer.experts.linear_fc1.guests, layer.experts.linear_fc2.guests)
    guests = (tensor for projection in projections for tensor in (projection.weight, projection.bias))
    return [guest.main_grad for guest in guests if guest is not None]


def host_with(dispatcher: str, host: functools.partial, layer: BalancedMoELayer) -> Collect:
    """Through one of megatron-core's own dispatchers."""
    layer.config.moe_token_dispatcher_type = dispatcher
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer.dispatcher = MegatronDispatcher(layer.config, layer.ep_group.rank(), groups)
    return host(layer)


def all_on_all(world_size: int) -> Placement:
    owners = Placement.identity(EXPERTS, world_size, EXPERTS - EXPERTS // world_size)
    return owners.rehost([range(world_size)] * EXPERTS)


def check(
    ranks, placement: Placement, split: Split, tokens: str, changes: dict, mutation: str = "", dispatcher: str = ""
) -> None:
    host = functools.partial(host_on, str(placement), split, mutation)
    if dispatcher:
        host = functools.partial(host_with, dispatcher, host)
    ranks(placement.num_ranks).run(check_against_oracle, changes, tokens, host)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("split", ["local_first", "proportional"])
@pytest.mark.parametrize("seed", range(6))
def test_random_placements(ranks, world_size: int, split: Split, seed: int) -> None:
    placement = random_placement(EXPERTS, world_size, 1 + seed % 3, seed)
    assert placement.added_hosts
    activation = ACTIVATIONS[("gelu", "swiglu-no-bias")[seed % 2]]
    check(ranks, placement, split, ("even", "uneven", "empty")[seed % 3], activation)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("split", ["local_first", "proportional"])
def test_all_experts_on_all_ranks(ranks, world_size: int, split: Split) -> None:
    check(ranks, all_on_all(world_size), split, "uneven", ACTIVATIONS["gelu"])


def test_hosts_without_tokens(ranks) -> None:
    """One choice per token and few tokens: most hosts compute nothing."""
    changes = ACTIVATIONS["gelu"] | {"moe_router_topk": 1, "moe_router_pre_softmax": True}
    check(ranks, all_on_all(4), "proportional", "uneven", changes)


# megatron-core's allgather needs equally many tokens on all ranks
@pytest.mark.parametrize(
    ("dispatcher", "tokens"), [("alltoall", "even"), ("alltoall", "uneven"), ("allgather", "even")]
)
def test_megatrons_dispatchers(ranks, dispatcher: str, tokens: str) -> None:
    check(ranks, random_placement(EXPERTS, 4, 2, 1), "local_first", tokens, ACTIVATIONS["gelu"], dispatcher=dispatcher)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mistakes_are_noticed(ranks, mutation: str) -> None:
    with pytest.raises(RankFailure, match="relative"):
        check(ranks, random_placement(EXPERTS, 2, 2, 3), "local_first", "even", ACTIVATIONS["gelu"], mutation)
