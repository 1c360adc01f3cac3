"""FlexMoE: its vExperts add up; its modifications are valid, pay off, and stop when nothing can be gained."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel, balance_ratio
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.splits import SPLITS
from megatron_balance.planning.policies import load_policy
from megatron_balance.planning.policies.flexmoe import METRICS, FlexMoE, _migrate
from megatron_balance.planning.policies.interface import owners_host
from megatron_balance.planning.vexperts import Expand, Layer, Migrate, Modification, Shrink, VExperts, modify
from megatron_balance.profile.cluster_profile import builtin
from megatron_balance.workloads.synthetic import WORKLOADS, load_matrix
from tests.unit.commands import parse
from tests.unit.placements import UNSHRUNK, loads, placements

ROUNDING = 1 + 1e-6


def cost_model(num_ranks: int, node_size: int = 8, expert_bytes: float = 8e6, split: str = "proportional") -> CostModel:
    return CostModel(
        builtin(num_ranks, node_size, 1024, 2048),
        token_bytes=2048,
        param_bytes=expert_bytes,
        grad_bytes=expert_bytes,
        split=split,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Placement, CostModel, FlexMoE]:
    """Draw a placement in use, a load, a cost model with cheap or expensive moves, and a policy."""
    placement = draw(placements())
    counts_DE = draw(loads(placement, largest=100_000)).numpy()
    split = draw(st.sampled_from(["proportional", "proportional", "local_first"]))
    cost = cost_model(placement.num_ranks, draw(st.integers(1, 4)), draw(st.sampled_from([0.0, 1e5, 1e7])), split)
    threshold, metric = draw(st.sampled_from([1.0, 1.1, 2.0])), draw(st.sampled_from(sorted(METRICS)))
    return counts_DE, placement, cost, FlexMoE(threshold, metric, draw(st.sampled_from([None, 1, 4, 9])))


def adjustments(before: Placement, after: Placement, cost: CostModel) -> float:
    """Return the seconds until every rank has received its new guests."""
    seconds = [0.0] * before.num_ranks
    for rank, (kept, row) in enumerate(zip(before.guests, after.guests, strict=True)):
        new = [expert for expert in row if expert not in (EMPTY, *kept)]
        seconds[rank] = float(sum(cost.adjustment_seconds(before.owner(expert), rank) for expert in new))
    return max(seconds)


@UNSHRUNK
@given(cases())
def test_modifications_are_valid_and_pay(case: tuple[np.ndarray, Placement, CostModel, FlexMoE]) -> None:
    counts_DE, start, cost, policy = case
    limit = max(start.home_slots, policy.vexperts_per_rank or start.slots_per_rank)
    before = Counter(rank for ranks in start.hosts for rank in ranks)
    modifications = policy.modifications(counts_DE, start, cost)
    assert modifications == policy.modifications(counts_DE.copy(), start, cost)
    placement = start
    for modification in modifications:
        if isinstance(modification, Shrink):
            assert len(placement.hosts[modification.expert]) > 1
        # Placement itself checks guest slots and hosts
        placement = modify(placement, [modification])
    used = Counter(rank for ranks in placement.hosts for rank in ranks)
    assert all(used[rank] <= max(limit, before[rank]) for rank in used)
    planned = policy.plan(counts_DE, start, cost)
    assert planned.hosts == placement.hosts
    seconds = cost.flexmoe_seconds(counts_DE, planned) + adjustments(start, planned, cost)
    assert seconds <= cost.flexmoe_seconds(counts_DE, start) * ROUNDING
    assert seconds <= cost.flexmoe_seconds(counts_DE, owners_host(start)) * ROUNDING
    ratios = [METRICS[policy.metric](cost.traffic(counts_DE, each).sum(0)) for each in (start, owners_host(start))]
    if max(ratios) < policy.threshold * (1 - 1e-9):
        assert not any(isinstance(modification, Expand) for modification in modifications)


@UNSHRUNK
@given(cases())
def test_the_same_load_leads_to_rest(case: tuple[np.ndarray, Placement, CostModel, FlexMoE]) -> None:
    counts_DE, placement, cost, policy = case
    for _ in range(30):
        following = policy.plan(counts_DE, placement, cost)
        if following is placement:
            return
        placement = following
    pytest.fail(f"still changing: {policy.modifications(counts_DE, placement, cost)}")


def random_modification(start: Placement, generator: np.random.Generator) -> Modification:
    """Return any modification, whether there is room for it or not."""
    expert, partner = generator.permutation(np.append(np.arange(start.num_experts), EMPTY))[:2].tolist()
    source, target = generator.integers(0, start.num_ranks, 2).tolist()
    expert = max(expert, 0)
    choices = (Expand(expert, target), Shrink(expert, target), Migrate(expert, source, target, partner))
    return choices[generator.integers(3)]


@UNSHRUNK
@given(st.data(), st.integers(0, 2**32 - 1))
def test_vexperts_count_as_the_model_does(data: st.DataObject, seed: int) -> None:
    start, generator = data.draw(placements()), np.random.default_rng(seed)
    counts_DE = data.draw(loads(start, largest=100_000)).numpy()
    cost = cost_model(start.num_ranks, data.draw(st.integers(1, 4)), split=data.draw(st.sampled_from(sorted(SPLITS))))
    state, target = VExperts.of(Layer.of(counts_DE, start, cost, limit=100), start), start
    for modification in [random_modification(start, generator) for _ in range(20)]:
        try:
            target = modify(target, [modification])
        except ValueError:
            continue
        state = state.after([modification])
    # A primary host that left and came back is primary again
    target = start.rehost(target.hosts)
    assert state.seconds_D.max() == pytest.approx(cost.flexmoe_seconds(counts_DE, target))
    assert state.tokens_D == pytest.approx(cost.traffic(counts_DE, target).sum(0), abs=1e-6)
    assert state.seconds - state.seconds_D.max() == pytest.approx(adjustments(start, target, cost), rel=1e-3)
    used = Counter(rank for ranks in target.hosts for rank in ranks)
    assert state.free_vexperts_D.tolist() == [100 - used[rank] for rank in range(start.num_ranks)]
    assert state.free_slots_D.tolist() == [row.count(EMPTY) for row in target.guests]
    expert, rank = int(generator.integers(start.num_experts)), int(generator.integers(start.num_ranks))
    more_D = state.after([Expand(expert, rank)]).seconds_D - state.seconds_D
    assert state.changes(np.array([expert]), (np.array([rank]), 1))[0] == pytest.approx(more_D, abs=1e-9)


def printed(counts: list[list[int]], current: str, **options: object) -> list[str]:
    """Return the modifications of a placement given as text, for small experts; `counts` are thousands of tokens."""
    placement = Placement.parse(current)
    cost = cost_model(placement.num_ranks, expert_bytes=1e5)
    policy = FlexMoE(**options)
    return list(map(str, policy.modifications(1000 * np.array(counts), placement, cost)))


@pytest.mark.parametrize(
    ("counts", "current", "threshold", "expected"),
    [
        # The heavier of two experts goes to ranks with less load
        ([[9, 1, 1, 1, 1, 1]] * 3, "0 1 + . | 2 3 + . | 4 5 + .", 1.1, ["Expand 0@1", "Expand 0@2"]),
        # No slot is free for expert 1, so it takes a slot of expert 0; guests without tokens are dropped
        ([[3, 10, 0]] * 3, "0 + 2 | 1 + . | 2 + 0", 1.3, ["Shrink 0@2", "Expand 1@2", "Shrink 2@0"]),
        # A lent expert returns home, and so do guests if the load is even
        ([[4, 1]] * 2, "0x0 + . | 1 + 0!", 2, ["Migrate 0@1 <->@0"]),
        ([[3, 3]] * 2, "0x2 + . | 1 + 0", 1.1, ["Shrink 0@0", "Shrink 0@1"]),
        # An expert that only one rank computes needs one vExpert there
        ([[3, 3]] * 2, "0x3 + . | 1 + .", 1.1, ["Shrink 0@0", "Shrink 0@0"]),
        # Even below the threshold, guests are kept only if they pay off
        ([[9, 1, 0]] * 3, "0 + . . | 1 + 0 2 | 2 + . .", 3, ["Shrink 2@1"]),
    ],
)
def test_small_plans(counts: list[list[int]], current: str, threshold: float, expected: list[str]) -> None:
    assert printed(counts, current, threshold=threshold) == expected


def test_without_room_the_slowest_rank_leaves_its_share_to_others() -> None:
    # Of the experts' 30, 3 and 3 tokens, ranks have 10, 23 and 3 before and 15, 18 and 3 after
    current = "0 + . | 1 + 0x2 | 2 + ."
    assert printed([[10, 1, 1]] * 3, current, threshold=1.6, vexperts_per_rank=1) == ["Shrink 0@1"]


def migrated(counts: list[list[int]], current: str, limit: int, node_size: int) -> list[str]:
    placement = Placement.parse(current)
    layer = Layer.of(1000 * np.array(counts), placement, cost_model(placement.num_ranks, node_size), limit)
    return list(map(str, _migrate(VExperts.of(layer, placement))))


def test_migrate_makes_synchronization_cheaper() -> None:
    assert migrated([[4, 4]] * 2, "0x0 + 1! | 1x0 + 0!", limit=1, node_size=2) == ["Migrate 0@1 <-> 1@0"]
    assert migrated([[4, 4]] * 2, "0x0 + . | 1 + 0!", limit=2, node_size=2) == ["Migrate 0@1 <->@0"]
    assert migrated([[4, 4]] * 2, "0 + . | 1 + .", limit=2, node_size=2) == []
    # Rank 2 is on a different node from the owner and the tokens
    far, counts = "0 + . | 1 + . | 2 + 0 | 3 + .", [[8, 1, 1, 1], [8, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]
    assert migrated(counts, far, limit=2, node_size=2) == ["Migrate 0@2 <->@1"]
    assert migrated(counts, far, limit=2, node_size=4) == []
    # Rank 3 is the slowest anyway. Rank 1 would save more than the owner, but the expert would have to be sent
    counts = [[10, 1, 1, 12], [10, 1, 1, 12], [0, 1, 1, 12], [0, 1, 1, 12]]
    assert migrated(counts, far, limit=2, node_size=2) == ["Migrate 0@2 <->@0"]
    # Rank 1 would be the slowest, as the owner would have been in the first case
    counts = [[8, 9, 1, 1], [8, 9, 1, 1], [0, 9, 1, 1], [0, 9, 1, 1]]
    assert migrated(counts, far, limit=2, node_size=2) == ["Migrate 0@2 <->@0"]


def test_a_rank_may_take_several_vexperts_of_an_expert() -> None:
    current = Placement.identity(2, 2, 1)
    counts_DE = np.array([[90_000, 30_000]] * 2)
    planned = FlexMoE(threshold=1.01).plan(counts_DE, current, cost_model(2, expert_bytes=1e5))
    # Two of three parts stay, so each rank has 120,000 tokens
    assert planned.hosts == ((0, 0, 1), (1,))


def test_what_is_gained_has_to_exceed_the_adjustment() -> None:
    owners, cost, seen = Placement.identity(2, 2, 1), cost_model(2), set()
    copied = owners.with_hosts([(0, 1)])
    for more in range(0, 20_000, 100):
        counts_DE = np.array([[10_000 + more, 10_000]] * 2)
        gained = cost.flexmoe_seconds(counts_DE, owners) - cost.flexmoe_seconds(counts_DE, copied)
        acted = FlexMoE(threshold=1.0, budget=1).plan(counts_DE, owners, cost) != owners
        assert acted == (gained > cost.adjustment_seconds(0, 1))
        seen.add((gained > 0, acted))
    assert seen == {(False, False), (True, False), (True, True)}


def test_two_experts_change_places() -> None:
    # Experts 0 and 3 have a guest on each other's node, and most tokens on their owner's; slots are full
    current = Placement.parse("0 + . | 1 + 3 | 2 + 0 | 3 + .")
    counts_DE = 1000 * np.array([[8, 0, 0, 3], [8, 0, 0, 3], [3, 0, 0, 8], [3, 0, 0, 8]])
    cost = cost_model(4, node_size=2, expert_bytes=1e5)
    assert FlexMoE(threshold=9).modifications(counts_DE, current, cost) == (Migrate(0, 2, 1, 3),)


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_without_a_vexpert_to_spare_nothing_is_expanded(limit: int) -> None:
    counts_DE, current = load_matrix("hot_experts", 4, 16, 2, 4096, 0, 9), Placement.identity(16, 4, 2)
    assert FlexMoE(vexperts_per_rank=limit).plan(counts_DE, current, cost_model(4)) is current
    assert FlexMoE(vexperts_per_rank=5).plan(counts_DE, current, cost_model(4)).added_hosts


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
@pytest.mark.parametrize("threshold", [1.1, 1.4])
def test_it_acts_above_the_threshold_only(workload: str, threshold: float) -> None:
    counts_DE, current, cost = load_matrix(workload, 4, 16, 2, 4096, 0, 9), Placement.identity(16, 4, 2), cost_model(4)
    ratio = balance_ratio(cost.traffic(counts_DE, current).sum(0))
    planned = FlexMoE(threshold).plan(counts_DE, current, cost)
    if ratio <= threshold:
        assert planned is current
    else:
        # Here, every ratio of 1.2 or more is high enough for modifications to pay off
        assert ratio < 1.2 or balance_ratio(cost.traffic(counts_DE, planned).sum(0)) < ratio
    assert FlexMoE(math.inf).plan(counts_DE, current, cost) is current


def test_metrics_have_one_scale() -> None:
    even, uneven = np.array([5, 5, 5, 5]), np.array([8, 4, 4, 4])
    assert {name: metric(even) for name, metric in METRICS.items()} == {"max": 1.0, "variance": 1.0}
    assert {name: metric(uneven) for name, metric in METRICS.items()} == {"max": 1.6, "variance": 1.12}
    assert {name: metric(np.zeros(4)) for name, metric in METRICS.items()} == {"max": 1.0, "variance": 1.0}
    counts, current = [[8, 4, 4, 4]] * 4, "0 + . | 1 + . | 2 + . | 3 + ."
    assert printed(counts, current, metric="max", threshold=1.2)
    assert printed(counts, current, metric="variance", threshold=1.1)
    assert not printed(counts, current, metric="variance", threshold=1.2)


def test_it_goes_on_from_the_placement_in_use() -> None:
    policy, cost = FlexMoE(), cost_model(16)
    counts_DE = load_matrix("hot_experts", 16, 64, 2, 4096, 0, 9)
    hot = policy.plan(counts_DE, Placement.identity(64, 16, 2), cost)
    drifted_DE = counts_DE.copy()
    drifted_DE[:, 0] += 200
    assert hot.added_hosts >= 8
    # There is nothing to do, while a plan from scratch repeats all modifications
    assert policy.plan(drifted_DE, hot, cost) is hot
    assert len(policy.modifications(drifted_DE, Placement.identity(64, 16, 2), cost)) >= 8
    even_DE = load_matrix("balanced", 16, 64, 2, 4096, 0, 9)
    assert policy.plan(even_DE, hot, cost).is_identity


@pytest.mark.parametrize("size", [(16, 64), (64, 256)])
def test_several_slowest_ranks_are_relieved_together(size: tuple[int, int]) -> None:
    num_ranks, num_experts = size
    current, cost = Placement.identity(num_experts, num_ranks, 2), cost_model(num_ranks)
    counts_DE = np.full((num_ranks, num_experts), 200)
    # A quarter of the ranks have equally hot experts, so relieving only one rank gains nothing
    hot = range(0, num_experts, 4 * num_experts // num_ranks)
    counts_DE[:, hot] = 5000
    planned = FlexMoE().plan(counts_DE, current, cost)
    assert all(len(planned.hosts[expert]) > 1 for expert in hot)
    assert cost.flexmoe_seconds(counts_DE, planned) < 0.7 * cost.flexmoe_seconds(counts_DE, current)


def test_the_budget_bounds_the_steps() -> None:
    current, cost = Placement.identity(64, 16, 2), cost_model(16)
    counts_DE = load_matrix("hot_experts", 16, 64, 2, 4096, 0, 9)
    lengths = [len(FlexMoE(budget=budget).modifications(counts_DE, current, cost)) for budget in (0, 1, 3)]
    assert lengths[0] == 0 and all(0 < length <= 2 * budget for length, budget in zip(lengths[1:], (1, 3), strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.9}, "--balance-threshold 0.9: give at least 1"),
        ({"threshold": math.nan}, "--balance-threshold nan: give at least 1"),
        ({"metric": "mean"}, "--balance-metric mean: choose from max, variance"),
        ({"vexperts_per_rank": 0}, "--balance-vexperts-per-rank 0: give at least 1"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_policy("flexmoe", **options)


def test_vexperts_are_to_be_more_than_a_rank_owns() -> None:
    flags = "--expert-model-parallel-size 4 --balance-policy flexmoe --balance-vexperts-per-rank"
    assert parse(f"{flags} 3").config.balance.balance_vexperts_per_rank == 3
    with pytest.raises(ValueError, match=r"^--balance-vexperts-per-rank 2: give at least 3, .* 2 experts that a rank"):
        parse(f"{flags} 2")
