"""Policies: valid, reproducible placements for any load, never slower than none if a model decides."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from megatron_balance.cost.model import CostModel, Overlap
from megatron_balance.observe.load_log import LoadLog
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.splits import SPLITS
from megatron_balance.planning.hosting import Hosting, LayerLoad
from megatron_balance.planning.leveling import Copies, fastest, leveled
from megatron_balance.planning.policies import load_policy, pro_prophet, registered
from megatron_balance.profile.cluster_profile import builtin
from megatron_balance.workloads.synthetic import WORKLOADS, load_matrix

MODEL_DRIVEN = ("none", "pro_prophet", "fastermoe", "flexmoe", "demi")

COPYING = ("none", "pro_prophet", "fastermoe", "top2", "top3")
"""Policies in which owners compute their experts and guests help; pro_prophet chooses from such placements."""


def cost_model(num_ranks: int, node_size: int = 4, **options: object) -> CostModel:
    return CostModel(
        builtin(num_ranks, node_size, 1024, 2048), token_bytes=2048, param_bytes=8e6, grad_bytes=8e6, **options
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Placement, CostModel]:
    """Draw a load, the placement in use (any homes, guests of an earlier plan) and a cost model."""
    num_ranks = draw(st.integers(1, 6))
    home = draw(st.integers(1, 4))
    slots = draw(st.integers(0, 3))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = (num_ranks, num_ranks * home)
    counts_DE = (generator.lognormal(0, 2, size) * draw(st.sampled_from([0, 10, 1000]))).astype(np.int64)
    counts_DE[:, generator.random(size[1]) < 0.3] = 0
    current = Placement.identity(size[1], num_ranks, slots)
    homes = generator.permutation(size[1]).reshape(num_ranks, home)
    owner = {expert: rank for rank, row in enumerate(homes.tolist()) for expert in row}
    owners = tuple(owner[expert] for expert in range(size[1]))
    moved = dataclasses.replace(
        current, home=tuple(map(tuple, homes.tolist())), hosts=tuple((rank,) for rank in owners), primary=owners
    )
    current = registered()["top2"]().plan(counts_DE, moved, cost_model(num_ranks)) if draw(st.booleans()) else moved
    overlap = draw(st.sampled_from([None, Overlap(1e-4, 2e-4)]))
    cost = cost_model(
        num_ranks, node_size=draw(st.integers(1, 4)), split=draw(st.sampled_from(sorted(SPLITS))), overlap=overlap
    )
    return counts_DE, current, cost


@settings(max_examples=200)
@given(st.sampled_from(sorted(registered())), cases())
def test_any_load_gets_a_valid_placement(name: str, case: tuple[np.ndarray, Placement, CostModel]) -> None:
    counts_DE, current, cost = case
    planned = load_policy(name).plan(counts_DE, current, cost)
    # Placement checks its own invariants, guest slots included
    assert (planned.home, planned.guest_slots) == (current.home, current.guest_slots)
    assert planned == load_policy(name).plan(counts_DE.copy(), current, cost)
    assert cost.traffic(counts_DE, planned).sum() == pytest.approx(counts_DE.sum())
    if name in MODEL_DRIVEN:
        plain = load_policy("none").plan(counts_DE, current, cost)
        assert cost.layer_seconds(counts_DE, planned) <= cost.layer_seconds(counts_DE, plain) * (1 + 1e-12)


def check(hosting: Hosting, counts: np.ndarray) -> None:
    """Compare a hosting with the cost model."""
    cost = hosting.layer.cost
    placement = placed(hosting)
    work = cost.work(counts, placement)
    assert [float(part) for part in cost.work_of(hosting.loads_FBD)] == pytest.approx(work, rel=1e-9, abs=1e-15)
    assert hosting.free_slots_D.tolist() == [row.count(EMPTY) for row in placement.guests]
    assert hosting.seconds_with(0.0, 0.0) == pytest.approx(float(cost.time_of(*work, 0.0, 0.0).total), rel=1e-9)


def placed(hosting: Hosting) -> Placement:
    return hosting.layer.placement.rehost(hosting.hosts(), hosting.primary_E.tolist())


def drawn_searches(alone: Hosting, generator: np.random.Generator) -> list[list[tuple[int, list[int], int]]]:
    """Return some moves of each of a few searches, within the guest slots: experts, guests and primaries."""
    searches = []
    for _ in range(int(generator.integers(0, 4))):
        free_D = alone.free_slots_D.copy()
        moves = list[tuple[int, list[int], int]]()
        for expert in generator.permutation(len(alone.primary_E))[: int(generator.integers(0, 5))].tolist():
            owner = int(alone.layer.owner_E[expert])
            able = [rank for rank in np.flatnonzero(free_D).tolist() if rank != owner]
            guests = generator.permutation(able)[: int(generator.integers(1, len(able) + 1)) if able else 0].tolist()
            free_D[guests] -= 1
            if guests:
                primary = guests[0] if len(guests) == 1 and generator.random() < 0.5 else owner
                moves.append((expert, guests, primary))
        searches.append(moves)
    return searches


def arrays(moves: Sequence[tuple[int, list[int], int]], num_ranks: int) -> Copies:
    guests = [np.isin(np.arange(num_ranks), guests) for _, guests, _ in moves]
    experts, primaries = (np.array([move[part] for move in moves], dtype=np.int64) for part in (0, 2))
    return Copies(experts, primaries, np.array(guests, dtype=bool).reshape(-1, num_ranks))


@given(cases(), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.1]))
def test_each_search_keeps_its_fastest_step(
    case: tuple[np.ndarray, Placement, CostModel], seed: int, min_gain: float
) -> None:
    """The reference makes the moves one by one."""
    counts_DE, current, cost = case
    plain = Hosting.alone(LayerLoad(counts_DE, current, cost))
    searches = drawn_searches(plain, np.random.default_rng(seed))
    kept = []
    for moves in searches:
        hosts = [[owner] for owner in current.owners]
        primaries = [*current.owners]
        extra = 0.0
        steps = list[tuple[float, list[int]]]()
        for number, (expert, guests, primary) in enumerate(moves, start=1):
            hosts[expert] = [*hosts[expert], *guests]
            primaries[expert] = primary
            placement = current.rehost(hosts, primaries)
            guests_ED = (placement.tables.shares_ED > 0) & ~plain.layer.owned_ED
            times_ED, extra_E = cost.transport.link_times(plain.layer.owner_E, guests_ED)
            extra = max(extra, float(extra_E.max()))
            sent = cost.transport.seconds_of(float(times_ED.sum(0).max()), extra)
            seconds = float(cost.time_of(*cost.work(counts_DE, placement), *sent).total)
            steps.append((seconds, [move[0] for move in moves[:number]]))
        if steps:
            least = min(steps)[0]
            kept.append(next(step for step in steps if step[0] <= least * (1 + min_gain) * (1 + 1e-12)))
    found = fastest(plain, [arrays(moves, current.num_ranks) for moves in searches], min_gain, number=2)
    for selection in found:
        check(selection, counts_DE)
    seconds = sorted({round(step[0], 15): step for step in kept}.values())
    assert [selection.seconds for selection in found[:1]] == pytest.approx([step[0] for step in seconds[:1]])
    if len(kept) == 1:
        assert found[0].guests_ED.any(1).nonzero()[0].tolist() == sorted(seconds[0][1])


def test_microbatches_are_leveled_together_and_by_the_heaviest() -> None:
    """In one microbatch rank 0 is heavy, in another rank 2; together all ranks are even."""
    counts_BDE = np.full((2, 4, 4), 100)
    counts_BDE[0, :, 0] = 190
    counts_BDE[0, :, 2] = 10
    counts_BDE[1, :, 2] = 190
    counts_BDE[1, :, 0] = 10
    current = Placement.identity(4, 4, 2)
    cost = cost_model(4, split="proportional", microbatches=2)
    free_D = np.full(4, 2)
    alone, added = (Hosting.alone(LayerLoad(counts, current, cost)) for counts in (counts_BDE, counts_BDE.sum(0)))
    experts = [copies.expert_M.tolist() for copies in leveled(alone, free_D, (1.02, 1.6))]
    assert {row[0] for row in experts} <= {0, 2} <= {expert for row in experts for expert in row}
    assert not [*leveled(added, free_D, (1.02, 1.6))]


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
@pytest.mark.parametrize("size", [(4, 16), (16, 64)])
def test_pro_prophet_is_about_as_fast_as_the_others(workload: str, size: tuple[int, int]) -> None:
    num_ranks, num_experts = size
    current = Placement.identity(num_experts, num_ranks, 2)
    cost = cost_model(num_ranks)
    counts_DE = load_matrix(workload, num_ranks, num_experts, 2, 4096, 0, 9)
    seconds = {
        name: cost.layer_seconds(counts_DE, load_policy(name).plan(counts_DE, current, cost)) for name in COPYING
    }
    assert seconds["pro_prophet"] <= min(seconds.values()) * 1.005


@pytest.mark.parametrize("size", [(4, 16), (16, 16), (16, 64)])
def test_balanced_load_is_left_alone(size: tuple[int, int]) -> None:
    num_ranks, num_experts = size
    current = Placement.identity(num_experts, num_ranks, 2)
    counts_DE = load_matrix("balanced", num_ranks, num_experts, 2, 1024, 0, 0)
    for name in MODEL_DRIVEN:
        planned = load_policy(name).plan(counts_DE, current, cost_model(num_ranks))
        assert planned.is_identity
        assert planned is current or name != "none"


@pytest.mark.parametrize("workload", ["hot_rank", "ragged_sources", "zero_load"])
@pytest.mark.parametrize("policy", ["pro_prophet", "flexmoe"])
def test_plans_for_many_ranks_pay(policy: str, workload: str) -> None:
    """Most of them are used without timing all messages."""
    current = Placement.identity(96, 48, 2)
    for expert_bytes in (0.0, 1e6, 3e7):
        cost = dataclasses.replace(
            cost_model(48, split="proportional"), param_bytes=expert_bytes, grad_bytes=expert_bytes
        )
        placement = current
        for seed in range(2):
            counts_DE = load_matrix(workload, 48, 96, 2, 4096, seed, 9)
            planned = load_policy(policy).plan(counts_DE, placement, cost)
            others = [current, placement] if policy == "flexmoe" else [current]
            least = min(cost.layer_seconds(counts_DE, other) for other in others)
            assert cost.layer_seconds(counts_DE, planned) <= least * (1 + 1e-9)
            placement = planned


@pytest.mark.parametrize("policy", ["pro_prophet", "flexmoe"])
def test_ranks_that_are_equally_slow_are_relieved_together(policy: str) -> None:
    current = Placement.identity(128, 32, 2)
    cost = cost_model(32, node_size=8, split="proportional")
    counts_DE = np.full((32, 128), 200)
    # Relieving only one rank gains nothing
    counts_DE[:, ::8] = 5000
    planned = load_policy(policy).plan(counts_DE, current, cost)
    assert all(len(planned.hosts[expert]) > 1 for expert in range(0, 128, 8))
    assert cost.layer_seconds(counts_DE, planned) < 0.8 * cost.layer_seconds(counts_DE, current)


def test_guests_go_where_the_tokens_are() -> None:
    # Rank 0 owns the hot expert, and rank 3 holds most of its tokens
    counts_DE = np.full((4, 8), 10)
    counts_DE[:, 0] = [5_000, 10, 10, 40_000]
    planned = load_policy("pro_prophet").plan(counts_DE, Placement.identity(8, 4, 1), cost_model(4))
    assert planned.hosts[0] == (0, 3) and planned.added_hosts == 1


def test_pro_prophet_decides_by_exact_times(monkeypatch: pytest.MonkeyPatch) -> None:
    counts_DE = np.full((4, 8), 10)
    cost = cost_model(4)
    current = Placement.identity(8, 4, 1)
    counts_DE[:, 0] = [5_000, 10, 10, 40_000]
    plain = Hosting.alone(LayerLoad(counts_DE, current, cost))
    assert load_policy("pro_prophet").plan(counts_DE, current, cost).added_hosts
    # Any guest counts as a gain, and only a useless one is found
    alone = plain.seconds
    monkeypatch.setattr(Hosting, "seconds", property(lambda each: 1e-9 if each.guests_ED.any() else alone))
    useless = fastest(plain, [arrays([(7, [0, 1, 2], 3)], 4)], 0.0, 1)
    assert placed(useless[0]).added_hosts == 3
    monkeypatch.setattr(pro_prophet, "fastest", lambda *_: useless)
    assert load_policy("pro_prophet").plan(counts_DE, current, cost).is_identity
    monkeypatch.setattr(pro_prophet, "fastest", lambda *_: [])
    assert load_policy("pro_prophet").plan(counts_DE, current, cost).is_identity


def test_top_k_copies_the_heaviest_to_all() -> None:
    counts_DE = np.array([[5, 1, 9, 0]] * 4)
    current = Placement.identity(4, 4, 2)
    assert load_policy("top2").plan(counts_DE, current, cost_model(4)).hosts == ((0, 1, 2, 3), (1,), (0, 1, 2, 3), (3,))
    top3 = load_policy("top3").plan(counts_DE, current, cost_model(4))
    # Experts 2 and 0 take both slots of ranks 1 and 3; ranks 0 and 2 each own one of them
    assert top3.hosts == ((0, 1, 2, 3), (0, 1, 2), (0, 1, 2, 3), (3,))


def test_fastermoe_stops_when_the_next_copy_does_not_pay() -> None:
    counts_DE = np.array([[60_000, 10, 10, 10]] * 4)
    planned = load_policy("fastermoe").plan(counts_DE, Placement.identity(4, 4, 3), cost_model(4))
    assert planned.hosts == ((0, 1, 2, 3), (1,), (2,), (3,))


def test_traces_are_read_by_layout(tmp_path: Path) -> None:
    wide = np.arange(40 * 8).reshape(40, 2, 4)
    narrow = np.ones((3, 1, 2), dtype=np.int64)
    for rank, layer, loads in ((0, 2, wide), (1, 1, narrow)):
        log = LoadLog(tmp_path, rank)
        for iteration, counts_DE in enumerate(loads, start=1):
            log.add(iteration, {layer: (counts_DE, Placement.identity(counts_DE.shape[1], counts_DE.shape[0]))})
        log.flush()
    traces = planner.read_traces(tmp_path)
    assert {layout: list(loads) for layout, loads in traces.items()} == {
        (2, 4): ["rank 0 layer 2"],
        (1, 2): ["rank 1 layer 1"],
    }
    matrices = traces[2, 4]["rank 0 layer 2"]
    assert (matrices[0] == wide[0]).all() and (matrices[-1] == wide[-1]).all() and len(matrices) < len(wide)
    assert len(traces[1, 2]["rank 1 layer 1"]) == 3


def test_policies_by_path() -> None:
    assert load_policy("pro_prophet", alpha=0.1).alpha == 0.1
    assert load_policy("megatron_balance.planning.policies.pro_prophet:ProProphet", alpha=0.2).alpha == 0.2
    for name, message in [
        ("best", "choose from demi, .*, none, pro_prophet, quota, top2"),
        ("no.module:Class", "cannot be imported"),
        ("datetime:date", "cannot be made with options"),
        ("fractions:Fraction", "has no method plan"),
    ]:
        with pytest.raises(ValueError, match=f"--balance-policy {name}: .*{message}"):
            load_policy(name)
