"""State of a run in a checkpoint."""

import random
from types import SimpleNamespace

import numpy as np
import torch

from megatron_balance.checkpoint import run_state
from tests.unit.balancers import LAYERS, RANKS, Group, build, loads


def draws() -> list[float]:
    """Draw from every generator; an odd number of normal values leaves half a pair in numpy's."""
    return [random.random(), float(np.random.normal()), float(np.random.rand()), float(torch.rand(()))]


def test_random_number_generators_go_on_where_they_were() -> None:
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    first = draws()
    states = run_state.random_states()
    expected = [draws() for _ in range(3)]
    random.seed(6)
    np.random.seed(7)
    torch.manual_seed(8)
    run_state.set_random_states(states)
    assert [draws() for _ in range(3)] == expected
    assert first not in expected


def test_a_balancer_is_saved_once_for_the_ranks_with_one_placement(monkeypatch) -> None:
    monkeypatch.setattr(run_state, "dist", SimpleNamespace(get_process_group_ranks=lambda group: [7, 4, 5]))
    world = build(monkeypatch, predictor="ema", interval=2)
    for iteration in (1, 2, 3):
        world.iterate(iteration, loads(iteration))
    shards = []
    for rank in range(RANKS):
        world.balancer.deciders = Group(rank_=rank)  # pyright: ignore[reportAttributeAccessIssue]
        shards.append(run_state.balancer_state(SimpleNamespace(balancer=world.balancer))["balancer"])
    assert [(shard.unique_key, shard.replica_id) for shard in shards] == [
        ("balancer.4/shard_0_1", rank) for rank in range(RANKS)
    ]
    assert [shard.data is not None for shard in shards] == [True, False, False]
    shard = shards[0]
    other = build(monkeypatch, predictor="ema", interval=2)
    other.balancer.restore(shard.data)
    assert other.balancer.state() == world.balancer.state()
    manager = other.balancer.layers[LAYERS[-1]].manager
    assert manager.iterations == 3 and manager.held and manager.history.mean is not None
