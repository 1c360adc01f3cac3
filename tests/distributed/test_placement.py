"""Contract 1 for placements: gradients do not depend on the host of an expert, in float64."""

import functools

import pytest
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_balance.flow.dispatcher import MegatronDispatcher
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SplitName
from tests.distributed.layers import ACTIVATIONS, EXPERTS, Collect, all_on_all, check_against_oracle, host_on
from tests.harness import RankFailure
from tests.unit.placements import random_placement

MUTATIONS = ("skip Agg", "Agg twice", "stale Trans", "reused slots, no second Trans")


def host_with(dispatcher: str, host: functools.partial, layer: BalancedMoELayer) -> Collect:
    """Prepare the layer as `host`, with one of megatron-core's own dispatchers."""
    layer.config.moe_token_dispatcher_type = dispatcher
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer.dispatcher = MegatronDispatcher(layer.config, layer.ep_group.rank(), layer.parallel.source, groups)
    return host(layer)


def check(
    ranks, placement: Placement, split: SplitName, tokens: str, changes: dict, mutation: str = "", dispatcher: str = ""
) -> None:
    host = functools.partial(host_on, str(placement), split, mutation)
    if dispatcher:
        host = functools.partial(host_with, dispatcher, host)
    ranks(placement.num_ranks).run(check_against_oracle, changes, tokens, host)


@pytest.mark.parametrize(
    ("world_size", "seed"),
    [
        # Three seeds have all numbers of guest slots, tokens and activations
        pytest.param(world_size, seed, marks=[pytest.mark.slow] if world_size == 8 or seed >= 3 else [])
        for world_size in (2, 4, 8)
        for seed in range(6)
    ],
)
@pytest.mark.parametrize("split", ["local_first", "proportional"])
def test_random_placements(ranks, world_size: int, split: SplitName, seed: int) -> None:
    placement = random_placement(EXPERTS, world_size, 1 + seed % 3, seed)
    assert placement.added_hosts
    activation = ACTIVATIONS[("gelu", "swiglu-no-bias")[seed % 2]]
    check(ranks, placement, split, ("even", "uneven", "empty")[seed % 3], activation)


@pytest.mark.parametrize("world_size", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("split", ["local_first", "proportional"])
def test_all_experts_on_all_ranks(ranks, world_size: int, split: SplitName) -> None:
    check(ranks, all_on_all(world_size), split, "uneven", ACTIVATIONS["gelu"])


def test_hosts_without_tokens(ranks) -> None:
    """One choice per token and few tokens: most hosts compute nothing."""
    changes = ACTIVATIONS["gelu"] | {"moe_router_topk": 1, "moe_router_pre_softmax": True}
    check(ranks, all_on_all(4), "proportional", "uneven", changes)


# megatron-core's allgather needs equal numbers of tokens on all ranks
@pytest.mark.parametrize(
    ("dispatcher", "tokens"), [("alltoall", "even"), ("alltoall", "uneven"), ("allgather", "even")]
)
def test_megatrons_dispatchers(ranks, dispatcher: str, tokens: str) -> None:
    check(ranks, random_placement(EXPERTS, 4, 2, 1), "local_first", tokens, ACTIVATIONS["gelu"], dispatcher=dispatcher)


@pytest.mark.parametrize("world_size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dispatcher", ["", "alltoall"])
def test_a_second_trans_serves_the_backward_pass(ranks, world_size: int, dispatcher: str) -> None:
    placement = random_placement(EXPERTS, world_size, 2, 5)
    check(ranks, placement, "proportional", "uneven", ACTIVATIONS["gelu"], "reused slots", dispatcher)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mistakes_are_noticed(ranks, mutation: str) -> None:
    with pytest.raises(RankFailure, match="relative"):
        check(ranks, random_placement(EXPERTS, 2, 2, 3), "local_first", "even", ACTIVATIONS["gelu"], mutation)
