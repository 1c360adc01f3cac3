"""A checkpoint restores the requested parts of a run's state, bit for bit, and no others."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
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


class Recorder:
    """Keeps the calls of its methods, by name."""

    def __init__(self, calls: list[tuple], name: str) -> None:
        self.calls = calls
        self.name = name

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *arguments, **named: self.calls.append((self.name, method, *arguments, *named.values()))


def restored(
    monkeypatch: pytest.MonkeyPatch, parts: set[str], weights_only: bool, no_load_optim: bool = False
) -> tuple[Any, list[tuple]]:
    """Return a run with two model chunks after `restore`, and the calls of its members."""
    calls: list[tuple] = []
    monkeypatch.setattr(run_state, "set_random_states", lambda states: calls.append(("rng", states)))
    monkeypatch.setattr(run_state, "unwrap_model", lambda model: model)
    monkeypatch.setattr(run_state, "_load_optimizer", lambda optimizer, *state: calls.append(("optimizer", *state)))
    monkeypatch.setattr(run_state, "_grad_scalers", lambda optimizer: [Recorder(calls, "scaler")])
    run = SimpleNamespace(
        config=SimpleNamespace(checkpoint=SimpleNamespace(no_load_optim=no_load_optim)),
        model=[Recorder(calls, "chunk 0"), Recorder(calls, "chunk 1")],
        optimizer=Recorder(calls, "optimizer"),
        scheduler=Recorder(calls, "scheduler"),
        chunks=Recorder(calls, "chunks"),
        progress=SimpleNamespace(iteration=0, consumed_samples=0, consumed_valid_samples=0),
    )
    loaded = {
        "model0": "weights 0",
        "model1": "weights 1",
        "optimizer": "moments",
        "optimizer_step": 19,
        "grad_scaler": "scale",
        "chunks": "choices",
        "rng_state": "generators",
        "opt_param_scheduler": "rates",
        "iteration": 23,
        "consumed_samples": 29,
        "consumed_valid_samples": 31,
    }
    run_state.restore(run, loaded, frozenset(parts), weights_only)
    return run, calls


WEIGHTS = [("chunk 0", "load_state_dict", "weights 0", True), ("chunk 1", "load_state_dict", "weights 1", True)]
TOLD = {
    "optimizer": [("optimizer", "moments", 19), ("scaler", "load_state_dict", "scale")],
    "chunks": [("chunks", "restore", "choices")],
    "rng": [("rng", "generators")],
}
SCHEDULE = ("scheduler", "load_state_dict", "rates")


@pytest.mark.parametrize("left_out", [None, *TOLD])
def test_a_run_gets_the_parts_that_are_asked_for(monkeypatch, left_out: str | None) -> None:
    parts = {"optimizer", "chunks", "rng", "balancer"} - {left_out}
    run, calls = restored(monkeypatch, parts, weights_only=False)
    told = [call for part, calls_of in TOLD.items() if part != left_out for call in calls_of]
    # Main parameters are copied from the weights if they are not loaded
    instead = [("optimizer", "reload_model_params")] if left_out == "optimizer" else []
    assert calls == [*WEIGHTS, *instead, *told, SCHEDULE]
    assert vars(run.progress) == {"iteration": 23, "consumed_samples": 29, "consumed_valid_samples": 31}


def test_without_the_optimizer_the_schedule_begins_anew(monkeypatch) -> None:
    run, calls = restored(monkeypatch, {"rng"}, weights_only=False, no_load_optim=True)
    assert calls == [*WEIGHTS, ("optimizer", "reload_model_params"), *TOLD["rng"]]
    assert run.progress.iteration == 23


def test_a_run_with_others_weights_begins_anew(monkeypatch) -> None:
    run, calls = restored(monkeypatch, set(), weights_only=True)
    assert calls == [*WEIGHTS, ("optimizer", "reload_model_params")]
    assert set(vars(run.progress).values()) == {0}
