"""FlexMoE: its modifications are valid, pay off, and stop when nothing can be gained."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.config.flags import field_docs
from megatron_balance.config.run_config import BalanceConfig
from megatron_balance.cost.model import CostModel, Overlap, balance_ratio
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.hosting import Hosting, LayerLoad
from megatron_balance.planning.policies import flexmoe, load_policy
from megatron_balance.planning.policies.flexmoe import METRICS, FlexMoE
from megatron_balance.planning.policies.interface import owners_host
from megatron_balance.workloads.synthetic import WORKLOADS, load_matrix
from tests.unit.commands import parse
from tests.unit.flexmoe_cases import cost_model, drawn_costs, layers, with_rates
from tests.unit.placements import UNSHRUNK, loads, placements

ROUNDING = 1 + 1e-6


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Placement, CostModel, FlexMoE]:
    """Draw `layers` and a policy."""
    threshold = draw(st.sampled_from([1.0, 1.1, 2.0]))
    metric = draw(st.sampled_from(sorted(METRICS)))
    return *draw(layers()), FlexMoE(threshold, metric, draw(st.sampled_from([None, 1, 4, 9])))


def searched(policy: FlexMoE, counts: np.ndarray, start: Placement, cost: CostModel) -> Placement:
    """Return the placement after all modifications."""
    _, _, last = policy.search(counts, start, cost)
    return start.rehost(last.hosts())


@settings(UNSHRUNK, max_examples=50)
@given(cases())
def test_modifications_are_valid_and_pay(case: tuple[np.ndarray, Placement, CostModel, FlexMoE]) -> None:
    counts_BDE, start, cost, policy = case
    limit = max(start.home_slots, policy.vexperts_per_rank or start.slots_per_rank)
    before = Counter(rank for ranks in start.hosts for rank in ranks)
    # Placement itself checks guest slots and hosts
    placement = searched(policy, counts_BDE, start, cost)
    assert placement == searched(policy, counts_BDE.copy(), start, cost)
    used = Counter(rank for ranks in placement.hosts for rank in ranks)
    assert all(used[rank] <= max(limit, before[rank]) for rank in used)
    planned = policy.plan(counts_BDE, start, cost)
    owned = owners_host(start)
    assert planned.hosts in {placement.hosts, start.hosts, owned.hosts}
    seconds = cost.layer_seconds(counts_BDE, planned)
    assert seconds <= min(cost.layer_seconds(counts_BDE, other) for other in (start, owned, placement)) * ROUNDING
    ratios = [METRICS[policy.metric](cost.traffic(counts_BDE, each).sum(1) / cost.rate_D) for each in (start, owned)]
    if max(ratios) < policy.threshold * (1 - 1e-9):
        # Only Shrinks and Migrates
        assert all(len(ranks) <= len(start.hosts[expert]) for expert, ranks in enumerate(placement.hosts))


@UNSHRUNK
@given(cases())
def test_the_same_load_leads_to_rest(case: tuple[np.ndarray, Placement, CostModel, FlexMoE]) -> None:
    counts_BDE, placement, cost, policy = case
    for _ in range(30):
        following = policy.plan(counts_BDE, placement, cost)
        if following is placement:
            return
        placement = following
    pytest.fail(f"still changing: {placement}")


@UNSHRUNK
@given(st.data(), placements())
def test_placements_with_quotas_in_use(data: st.DataObject, placement: Placement) -> None:
    """A run may continue with another policy: the plan has vExperts only, or is the placement in use."""
    counts_DE = data.draw(loads(placement, largest=100_000)).numpy()
    cost = data.draw(drawn_costs(placement.num_ranks, 1))
    planned = FlexMoE().plan(counts_DE, placement, cost)
    assert planned == placement or not planned.quotas
    assert cost.layer_seconds(counts_DE, planned) <= cost.layer_seconds(counts_DE, placement) * ROUNDING


def printed(counts: list[list[int]], current: str, **options: object) -> str:
    """Return the placement after all modifications, for small experts; `counts` are thousands of tokens."""
    placement = Placement.parse(current)
    cost = cost_model(placement.num_ranks, expert_bytes=1e5)
    return str(searched(FlexMoE(**options), 1000 * np.array(counts), placement, cost))


@pytest.mark.parametrize(
    ("counts", "current", "threshold", "expected"),
    [
        # Expand: the heavier of two experts goes to ranks with less load
        ([[9, 1, 1, 1, 1, 1]] * 3, "0 1 + . | 2 3 + . | 4 5 + .", 1.1, "0 1 + . | 2 3 + 0 | 4 5 + 0"),
        # Shrink: guests that cost more than they save leave, and so make room for expert 1
        ([[3, 10, 0]] * 3, "0 + 2 | 1 + . | 2 + 0", 1.3, "0 + . | 1 + . | 2 + 1"),
        # Migrate: an expert returns to its owner, and so do guests if the load is even
        ([[4, 1]] * 2, "0x0 + . | 1 + 0!", 2, "0 + . | 1 + ."),
        ([[3, 3]] * 2, "0x2 + . | 1 + 0", 1.1, "0 + . | 1 + ."),
        # An expert that only one rank computes needs one vExpert there
        ([[3, 3]] * 2, "0x3 + . | 1 + .", 1.1, "0 + . | 1 + ."),
        # Even below the threshold, guests are kept only if they pay off
        ([[9, 1, 0]] * 3, "0 + . . | 1 + 0 2 | 2 + . .", 3, "0 + . . | 1 + 0 . | 2 + . ."),
    ],
)
def test_small_plans(counts: list[list[int]], current: str, threshold: float, expected: str) -> None:
    assert printed(counts, current, threshold=threshold) == expected


def test_without_room_the_slowest_rank_leaves_its_share_to_others() -> None:
    # Of the experts' 30, 3 and 3 tokens, ranks have 10, 23 and 3 before and 15, 18 and 3 after
    current = "0 + . | 1 + 0x2 | 2 + ."
    assert printed([[10, 1, 1]] * 3, current, threshold=1.6, vexperts_per_rank=1) == "0 + . | 1 + 0 | 2 + ."


def test_a_rank_may_take_several_vexperts_of_an_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flexmoe, "leveled", lambda *_, **__: [])
    current = Placement.identity(2, 2, 1)
    counts_DE = np.array([[90_000, 30_000]] * 2)
    planned = FlexMoE(threshold=1.01).plan(counts_DE, current, cost_model(2, expert_bytes=1e5))
    # Two of three parts stay, so each rank has 120,000 tokens
    assert planned.hosts == ((0, 0, 1), (1,))


@pytest.mark.parametrize("hidden", [False, True])
def test_what_is_gained_has_to_exceed_trans_and_agg(hidden: bool) -> None:
    owners = Placement.identity(2, 2, 1)
    cost = cost_model(2)
    seen = set()
    shared = [owners.rehost([(*[0] * kept, 1), (1,)]) for kept in (1, 2)]
    if hidden:
        cost = replace(cost, overlap=Overlap(1.0, 1.0))
    for more in range(0, 20_000, 100):
        counts_DE = np.array([[10_000 + more, 10_000]] * 2)
        times = [cost.layer_time(counts_DE, placement) for placement in (owners, *shared)]
        gained = times[0].total - min(sum(time[:3]) for time in times[1:])
        paid = times[0].total > min(time.total for time in times[1:])
        acted = FlexMoE(threshold=1.0, budget=1).plan(counts_DE, owners, cost) != owners
        assert acted == paid
        seen.add((gained > 0, acted))
    assert seen == {(False, False), (True, True)} | ({(True, False)} if not hidden else set())


@pytest.mark.parametrize("policy", ["flexmoe", "pro_prophet"])
def test_hidden_guests_are_added_as_if_they_were_free(policy: str) -> None:
    """Trans and Agg of large experts do not pay, unless computation hides them."""
    counts_DE = load_matrix("hot_experts", 8, 32, 2, 4096, 0, 9)
    owners = Placement.identity(32, 8, 2)
    exposed = cost_model(8, expert_bytes=3e8)
    hidden = cost_model(8, expert_bytes=3e8, overlap=Overlap(1.0, 1.0))
    assert load_policy(policy).plan(counts_DE, owners, exposed) == owners
    planned = load_policy(policy).plan(counts_DE, owners, hidden)
    assert planned.added_hosts >= 4
    free = cost_model(8, expert_bytes=0.0, overlap=Overlap(1.0, 1.0))
    assert planned.hosts == load_policy(policy).plan(counts_DE, owners, free).hosts
    assert hidden.layer_seconds(counts_DE, planned) < 0.8 * hidden.layer_seconds(counts_DE, owners)


@pytest.mark.parametrize("policy", ["flexmoe", "pro_prophet", "demi"])
def test_a_slow_rank_computes_fewer_tokens(policy: str) -> None:
    counts_DE = np.full((4, 16), 4000)
    owners = Placement.identity(16, 4, 3)
    cost = cost_model(4, expert_bytes=1e5)
    assert load_policy(policy).plan(counts_DE, owners, cost).is_identity
    slow = with_rates(cost, [1.0, 0.5, 1.0, 1.0])
    planned = load_policy(policy).plan(counts_DE, owners, slow)
    (computed_D,) = slow.traffic(counts_DE, planned).sum(1)
    assert computed_D.argmin() == 1 and computed_D[1] < 0.8 * computed_D.mean()
    assert slow.layer_seconds(counts_DE, planned) < 0.8 * slow.layer_seconds(counts_DE, owners)


def relieved(counts: list[int], rates: Sequence[float] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of each rank before and after a step 2. Each of four ranks owns an expert."""
    cost = with_rates(cost_model(4, expert_bytes=0.0, overlap=Overlap(1.0, 1.0)), rates)
    state = Hosting.of(LayerLoad(1000 * np.array([counts] * 4), Placement.identity(4, 4, 1), cost))
    changes = flexmoe._relieve(state, 2)
    return state.work_BD[0], (flexmoe._after(state, changes) if changes else state).work_BD[0]


def test_no_rank_of_a_step_may_become_as_slow_as_the_slowest_was() -> None:
    before_D, after_D = relieved([9, 9, 1, 1])
    # Another rank, which the step leaves as slow as it was, does not stop it
    assert after_D.max() == before_D.max() and after_D.sum() < before_D.sum()
    assert (after_D != before_D).sum() >= 2
    before_D, after_D = relieved([9, 1, 1, 1], [1.0, 0.2, 0.2, 0.2])
    assert (before_D == after_D).all()


def test_each_microbatch_waits_for_its_own_slowest_rank() -> None:
    """Two microbatches that are uneven in opposite ways, and together even."""
    counts_BDE = 1000 * np.array([[[9, 1, 1, 1]] * 4, [[1, 9, 9, 9]] * 4])
    owners = Placement.identity(4, 4, 2)
    cost = cost_model(4, expert_bytes=1e5, microbatches=2)
    planned = FlexMoE().plan(counts_BDE, owners, cost)
    assert cost.layer_seconds(counts_BDE, planned) < 0.9 * cost.layer_seconds(counts_BDE, owners)
    even = Placement.identity(4, 4, 2)
    assert FlexMoE().plan(np.full((2, 4, 4), 5000), even, cost) is even


def test_two_experts_change_places() -> None:
    # Experts 0 and 3 have a guest on each other's node, and most tokens on their owner's; slots are full
    current = Placement.parse("0 + . | 1 + 3 | 2 + 0 | 3 + .")
    counts_DE = 1000 * np.array([[8, 0, 0, 3], [8, 0, 0, 3], [3, 0, 0, 8], [3, 0, 0, 8]])
    cost = cost_model(4, node_size=2, expert_bytes=1e5)
    assert str(searched(FlexMoE(threshold=9), counts_DE, current, cost)) == "0 + . | 1 + 0 | 2 + 3 | 3 + ."


@settings(UNSHRUNK, max_examples=50)
@given(cases())
def test_experts_change_places_with_others(case: tuple[np.ndarray, Placement, CostModel, FlexMoE]) -> None:
    counts_BDE, start, cost, policy = case
    for state in policy.search(counts_BDE, start, cost):
        expert_A, _, _, partner_A = flexmoe._with_partners(state, start.slots_per_rank, *flexmoe._migrations(state))
        assert not (expert_A == partner_A).any()


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_without_a_vexpert_to_spare_nothing_is_expanded(limit: int) -> None:
    counts_DE = load_matrix("hot_experts", 4, 16, 2, 4096, 0, 9)
    current = Placement.identity(16, 4, 2)
    assert FlexMoE(vexperts_per_rank=limit).plan(counts_DE, current, cost_model(4)) is current
    assert FlexMoE(vexperts_per_rank=5).plan(counts_DE, current, cost_model(4)).added_hosts


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
@pytest.mark.parametrize("threshold", [1.1, 1.4])
def test_it_acts_above_the_threshold_only(workload: str, threshold: float) -> None:
    counts_DE = load_matrix(workload, 4, 16, 2, 4096, 0, 9)
    current = Placement.identity(16, 4, 2)
    cost = cost_model(4)
    ratio = balance_ratio(cost.traffic(counts_DE, current).sum(1))
    planned = FlexMoE(threshold).plan(counts_DE, current, cost)
    if ratio <= threshold:
        assert planned is current
    else:
        # Here, every ratio of 1.2 or more is high enough for modifications to pay off
        assert ratio < 1.2 or balance_ratio(cost.traffic(counts_DE, planned).sum(1)) < ratio
    assert FlexMoE(math.inf).plan(counts_DE, current, cost) is current


def test_metrics_have_one_scale() -> None:
    even = np.array([[5, 5, 5, 5]])
    uneven = np.array([[8, 4, 4, 4]])
    assert {name: metric(even) for name, metric in METRICS.items()} == {"max": 1.0, "variance": 1.0}
    assert {name: metric(np.zeros((1, 4))) for name, metric in METRICS.items()} == {"max": 1.0, "variance": 1.0}
    assert METRICS["max"](uneven) == pytest.approx(1.6)
    assert METRICS["variance"](uneven) == pytest.approx(1 + 0.6 / math.sqrt(3))
    assert np.std(uneven) / np.mean(uneven) == pytest.approx(0.6 / math.sqrt(3))
    assert (
        "variance: 1 plus the standard deviation of the ranks' loads over the mean."
        in field_docs(BalanceConfig)["balance_metric"]
    )


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
@pytest.mark.parametrize("excess", [0.4, 3.0])
def test_one_threshold_means_one_excess(num_ranks: int, excess: float) -> None:
    """If one of D ranks has all the excess, the metrics' excesses over 1 differ by the factor sqrt(D - 1) only."""
    tokens_BD = np.full((1, num_ranks), 1e4)
    tokens_BD[0, 0] *= 1 + excess
    largest, deviation = (METRICS[name](tokens_BD) - 1 for name in ("max", "variance"))
    assert deviation * math.sqrt(num_ranks - 1) == pytest.approx(largest)
    counts_DE = (tokens_BD / num_ranks).astype(np.int64).repeat(num_ranks, axis=0)
    owners = Placement.identity(num_ranks, num_ranks, 1)
    cost = cost_model(num_ranks, expert_bytes=0.0)
    computed_BD = cost.traffic(counts_DE, owners).sum(1)
    for name, metric in METRICS.items():
        ratio = metric(computed_BD)
        assert searched(FlexMoE(1 + (ratio - 1) * 1.001, name), counts_DE, owners, cost).is_identity
        assert not searched(FlexMoE(1 + (ratio - 1) * 0.999, name), counts_DE, owners, cost).is_identity


def test_it_goes_on_from_the_placement_in_use() -> None:
    policy = FlexMoE()
    cost = cost_model(16)
    counts_DE = load_matrix("hot_experts", 16, 64, 2, 4096, 0, 9)
    hot = policy.plan(counts_DE, Placement.identity(64, 16, 2), cost)
    drifted_DE = counts_DE.copy()
    drifted_DE[:, 0] += 20
    assert hot.added_hosts >= 8
    # There is nothing to do, while a plan from scratch repeats all modifications
    assert policy.plan(drifted_DE, hot, cost) is hot
    assert policy.plan(drifted_DE, Placement.identity(64, 16, 2), cost).added_hosts >= 8
    even_DE = load_matrix("balanced", 16, 64, 2, 4096, 0, 9)
    assert policy.plan(even_DE, hot, cost).is_identity


def test_many_expands_at_once_have_to_be_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexMoE continues from the placement in use while it is nearly as fast as one from scratch."""
    current = Placement.identity(64, 16, 2)
    cost = cost_model(16)
    counts_DE = load_matrix("hot_experts", 16, 64, 2, 4096, 0, 9)
    policy = FlexMoE(budget=0, improvements=0)
    planned = policy.plan(counts_DE, current, cost)
    assert planned.added_hosts and cost.layer_seconds(counts_DE, planned) < cost.layer_seconds(counts_DE, current)
    assert policy.plan(counts_DE, planned, cost) is planned
    # One vExpert for each home slot leaves none to Expand with
    assert FlexMoE(budget=0, vexperts_per_rank=4).plan(counts_DE, current, cost) is current
    monkeypatch.setattr(flexmoe, "CHANGE", 1.0)
    assert policy.plan(counts_DE, current, cost) is current


def test_the_budget_bounds_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flexmoe, "leveled", lambda *_, **__: [])
    current = Placement.identity(64, 16, 2)
    cost = cost_model(16, expert_bytes=1e6)
    counts_DE = load_matrix("hot_experts", 16, 64, 2, 4096, 0, 9)
    for budget in (0, 1, 3):
        placement = searched(FlexMoE(budget=budget), counts_DE, current, cost)
        assert bool(budget) <= sum(len(ranks) > 1 for ranks in placement.hosts) <= budget


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


def migrated(counts: list[list[int]], current: str, limit: int, node_size: int) -> str:
    placement = Placement.parse(current)
    cost = cost_model(placement.num_ranks, node_size)
    state = Hosting.of(LayerLoad(1000 * np.array(counts), placement, cost))
    changes = flexmoe._migrate(state, limit)
    return str(placement.rehost(flexmoe._after(state, changes).hosts()) if changes else placement)


def test_migrate_makes_synchronization_cheaper() -> None:
    assert migrated([[4, 4]] * 2, "0x0 + 1! | 1x0 + 0!", limit=1, node_size=2) == "0 + . | 1 + ."
    assert migrated([[4, 4]] * 2, "0x0 + . | 1 + 0!", limit=2, node_size=2) == "0 + . | 1 + ."
    assert migrated([[4, 4]] * 2, "0 + . | 1 + .", limit=2, node_size=2) == "0 + . | 1 + ."
    # Rank 2 is on a different node from the owner and the tokens
    far = "0 + . | 1 + . | 2 + 0 | 3 + ."
    counts = [[8, 1, 1, 1], [8, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]
    assert migrated(counts, far, limit=2, node_size=2) == "0 + . | 1 + 0 | 2 + . | 3 + ."
    assert migrated(counts, far, limit=2, node_size=4) == far
    # Rank 3 is the slowest anyway. Rank 1 would save more than the owner, but the expert would have to be sent
    counts = [[10, 1, 1, 12], [10, 1, 1, 12], [0, 1, 1, 12], [0, 1, 1, 12]]
    assert migrated(counts, far, limit=2, node_size=2) == "0x2 + . | 1 + . | 2 + . | 3 + ."
    # Rank 1 would be the slowest, as the owner would have been in the first case
    counts = [[8, 9, 1, 1], [8, 9, 1, 1], [0, 9, 1, 1], [0, 9, 1, 1]]
    assert migrated(counts, far, limit=2, node_size=2) == "0x2 + . | 1 + . | 2 + . | 3 + ."
