"""Exchanges of context-parallel ranks in simulations: hand-computed bytes, what hides them, and which teams wait."""

import dataclasses
from pathlib import Path

import pytest

import simulate
from megatron_balance.app.simulation import simulated_job
from megatron_balance.simulate.context import ContextExchange, ContextGroups
from megatron_balance.simulate.engine import Engine
from megatron_balance.simulate.job import Simulation
from megatron_balance.simulate.programs import LayerWork
from megatron_balance.timeline.actions import chunk_start
from tests.unit.simulated import Log, direction, layers_of, program, stage_of, team, work
from tests.unit.test_simulation import FLAGS as BLOCKWISE
from tests.unit.test_simulation import ROOT

FLAGS = BLOCKWISE.replace("--balance-overlap blockwise", "")

NEAR = 150e9
FAR = 25e9
"""Bytes per second of the links of `simulated.team`."""

KEYS_VALUES = 1e9
QUERIES_OUTPUTS = 4e9


def seconds_of(ranks: int, tensor: int, kind: str) -> list[float]:
    """Return the seconds of the bytes in a forward and a backward pass of one group of ranks on nodes of four."""
    network, _ = team(ranks, 4)
    groups = ContextGroups(network, tensor, ranks // tensor, kind)
    return [float(one.seconds.max()) for one in groups.exchanges(KEYS_VALUES, QUERIES_OUTPUTS)]


def test_a_ring_passes_on_keys_and_values() -> None:
    # In a backward pass, their gradients travel, too
    assert seconds_of(4, 1, "p2p") == pytest.approx([3 * 1e9 / NEAR, 6 * 1e9 / NEAR])
    # Groups of two neighbors in pairs of tensor-parallel ranks
    assert seconds_of(4, 2, "p2p") == pytest.approx([1e9 / NEAR, 2e9 / NEAR])


def test_rings_between_nodes_share_adapters() -> None:
    # Two tensor-parallel ranks of each node send to the next node, and each of them has an adapter
    assert seconds_of(8, 2, "p2p") == pytest.approx([3 * 1e9 / FAR, 6 * 1e9 / FAR])
    # Four of them share two adapters
    assert seconds_of(8, 4, "p2p") == pytest.approx([2 * 1e9 / FAR, 4 * 1e9 / FAR])


def test_all_keys_and_values_are_gathered() -> None:
    assert seconds_of(4, 1, "all_gather") == pytest.approx([3 * 1e9 / NEAR, 6 * 1e9 / NEAR])


def test_heads_are_exchanged_for_tokens() -> None:
    sent = 3 / 4 * (KEYS_VALUES + QUERIES_OUTPUTS)
    assert seconds_of(4, 1, "a2a") == pytest.approx([sent / NEAR] * 2)
    # Half of it leaves the node, where two adapters carry the bytes of four ranks
    assert seconds_of(8, 1, "a2a") == pytest.approx([1 / 2 * (KEYS_VALUES + QUERIES_OUTPUTS) * 2 / FAR] * 2)


@pytest.mark.parametrize("seconds", [0.25, 3.0])
def test_attention_hides_an_exchange_and_waits_for_the_rest(seconds: float) -> None:
    stage = stage_of(0, 1, 2, balanced=False)
    blocks = [(block, index) for block in (chunk_start(0), *stage.blocks[0][:-1]) for index in (0, 1)]
    context = {key: ContextExchange([work(0.0, {1: seconds})], 0.5) for key in blocks}
    plain, changed = (
        Engine([(2, program(one, layers_of(one, 2), 0, 2))], 2, Log()).run()
        for one in (stage, dataclasses.replace(stage, context=context))
    )
    assert changed == pytest.approx(plain + 2 * len(blocks) * max(0.0, seconds - 0.5))


def test_teams_of_a_context_parallel_group_wait_for_each_other() -> None:
    stage = stage_of(0, 1, 2, balanced=False, teams=2)
    context = {(block, 0): ContextExchange([work(0.0, {2: 0.1})], 0.5) for block in stage.others}
    teams = []
    for number in range(2):
        usual = direction(True, resource=number)
        slow = usual._replace(experts_CR=4 * usual.experts_CR)
        # In each team, one microbatch of one layer is slow, but not the same one
        forward = {1: [usual, usual], 2: [usual, usual]}
        forward[1 + number][1 - number] = slow
        backward = [direction(False, resource=number)] * 2
        teams.append({layer: LayerWork(forward_B=forward[layer], backward_B=backward) for layer in (1, 2)})
    apart, together = (
        Engine([(2, program(one, layers, number, 2)) for number, layers in enumerate(teams)], 3, Log()).run()
        for one in (stage, dataclasses.replace(stage, context=context, context_teams=2))
    )
    # The other team has begun its attention when it waits, so it is ahead by what hides the exchange
    assert together == pytest.approx(apart + 9.0 - (0.5 - 0.1))


def test_a_simulated_run_divides_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    flags = f"{FLAGS} --expert-model-parallel-size 4 --pipeline-model-parallel-size 1"
    short = "--seq-length 256 --global-batch-size 32"
    split = "--global-batch-size 4 --context-parallel-size 8"
    found = []
    for more in (short, split, f"{split} --cp-comm-type all_gather", f"{split} --cp-comm-type a2a"):
        config, target = simulate.configured([*flags.split(), *more.split()], Path("configs/clusters/h100.yaml"), 16)
        job, _ = simulated_job(config, target)
        found.append((job, Simulation(job, simulate.loads_of(config, "even", 0)).run(1).recorder))
    (_, first), *others = found
    for job, recorder in others:
        # Two teams of four ranks wait for the keys and values of the same sequence
        assert job.stages[0].stage.context_teams == 2 and job.stages[0].stage.teams == 4
        # A rank has as many tokens as with sequences of an eighth of the length, but they attend to more
        assert recorder.seconds["experts"] == pytest.approx(first.seconds["experts"])
        assert (recorder.seconds["other computation"] > first.seconds["other computation"]).all()
    assert not first.seconds["context"].any()
    ring, gathered, exchanged = (recorder.seconds["context"] for _, recorder in others)
    assert (gathered > ring).all() and (exchanged > 0).all()


def test_nodes_must_not_divide_groups_unevenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    flags = f"{FLAGS} --expert-model-parallel-size 4 --seq-length 3072 --context-parallel-size 3 --global-batch-size 96"
    config, target = simulate.configured(flags.split(), Path("configs/clusters/h100.yaml"), 48)
    with pytest.raises(ValueError, match="--context-parallel-size 3: nodes of 8 GPUs divide groups of 12 ranks uneven"):
        simulated_job(config, target)
