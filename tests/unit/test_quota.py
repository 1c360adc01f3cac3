"""The quota policy: guests take their quotas exactly, few of them level the ranks, and each saves what it costs."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel, Overlap, owners
from megatron_balance.flow.plan import DispatchPlan
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.fit import BUSIEST, FILLING, PARTS, WHOLE
from megatron_balance.planning.plans import NOBODY, Way, level_all, make_layer
from megatron_balance.planning.policies import load_policy, quota
from megatron_balance.planning.policies.quota import EVEN, GuestPlan, Quota, search
from megatron_balance.planning.replacing import replace_guests
from megatron_balance.planning.search import TARGETS, Found, fastest_plan
from megatron_balance.profile.cluster_profile import Fit, Throughput, from_links
from tests.unit.placements import UNSHRUNK, loads, placements


def cost_model(num_ranks: int, node_size: int, *, near: float = 0.0, far: float = 0.0, **options: Any) -> CostModel:
    """Return a model in which a token is computed in 3 s, and a guest costs `near` or `far` seconds each way."""
    none = Fit(0.0, 0.0, 0.0, 0.0)
    profile = from_links(
        num_ranks,
        node_size,
        Fit(0.0, near, 0.0, 0.0),
        Fit(0.0, far, 0.0, 0.0),
        shared=none if num_ranks == node_size else Fit(0.0, far, 0.0, 0.0),
        forward=Throughput(1.0, 0.0, 0.0, 0.0),
        backward=Throughput(2.0, 0.0, 0.0, 0.0),
    )
    return CostModel(profile, token_bytes=0, param_bytes=1, grad_bytes=1, split="proportional", **options)


def tokens_of(placement: Placement, counts_DE: np.ndarray) -> list[int]:
    """Return the tokens that each rank computes."""
    plan = DispatchPlan(torch.from_numpy(counts_DE), placement, "proportional")
    return plan.splits_DW.sum(0).tolist()


def skewed(num_ranks: int, num_experts: int, seed: int, exponent: float = 0.7) -> np.ndarray:
    """Return loads with Zipf's law, in random order."""
    generator = np.random.default_rng(seed)
    shares = generator.permutation(np.arange(1, num_experts + 1) ** -exponent)
    return np.stack([generator.multinomial(4096, shares / shares.sum()) for _ in range(num_ranks)])


def test_a_guest_takes_what_its_owner_has_too_much() -> None:
    counts_DE = np.array([[60, 0, 5, 15], [60, 20, 5, 15]])
    # Rank 0 has 140 tokens and rank 1 has 40: with costless links, both compute 90, up to 1%
    planned = Quota().plan(counts_DE, Placement.identity(4, 2, 1), cost_model(2, 2))
    assert str(planned) == "0:70 1 + . | 2 3 + 0:50"
    assert tokens_of(planned, counts_DE) == [90, 90]
    # Each way, the guest takes as long as a token takes forward and backward; then it must save that much
    costly = cost_model(2, 2, near=3 * 30)
    assert Quota().plan(counts_DE, Placement.identity(4, 2, 1), costly).is_identity


def test_hidden_guests_must_save_what_they_slow_down() -> None:
    counts_DE = np.array([[60, 0, 5, 15], [60, 20, 5, 15]])
    # A guest saves 50 tokens of 3 s, and sends for 100 s each way, which are hidden
    for slowed, keeps in ((0.7, True), (0.8, False)):
        cost = cost_model(2, 2, near=100.0, overlap=Overlap(1e3, 1e3, slowed=slowed))
        assert Quota().plan(counts_DE, Placement.identity(4, 2, 1), cost).is_identity != keeps


@pytest.mark.parametrize(("ranks", "slots"), [(8, 2), (16, 2), (32, 1), (64, 1), (64, 2)])
def test_ranks_are_even_if_guests_are_free(ranks: int, slots: int) -> None:
    for seed in range(3):
        counts_DE = skewed(ranks, 256, seed)
        planned = Quota().plan(counts_DE, Placement.identity(256, ranks, slots), cost_model(ranks, ranks))
        tokens_D = tokens_of(planned, counts_DE)
        assert sum(tokens_D) == counts_DE.sum()
        # As Walker's alias method, which has one guest for each receiver and each further expert that fills it
        assert max(tokens_D) <= np.ceil(1.001 * np.mean(tokens_D)), (seed, max(tokens_D) / np.mean(tokens_D))
        assert planned.added_hosts <= 1.2 * ranks


def test_guests_stay_on_their_node_where_links_between_nodes_are_slow() -> None:
    counts_DE = skewed(16, 64, 0, 1.0)
    slow, fast = (cost_model(16, 4, near=10.0, far=far) for far in (1e6, 10.0))
    near, anywhere = (Quota().plan(counts_DE, Placement.identity(64, 16, 2), cost) for cost in (slow, fast))
    for placement, leaves in ((near, False), (anywhere, True)):
        pairs = [(placement.owner(e), rank) for e, ranks in enumerate(placement.hosts) for rank in ranks]
        assert any(owner // 4 != rank // 4 for owner, rank in pairs) == leaves
    assert (
        max(tokens_of(anywhere, counts_DE))
        < max(tokens_of(near, counts_DE))
        < max(counts_DE.reshape(16, 16, 4).sum((0, 2)))
    )


def test_even_loads_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Quota()
    monkeypatch.setattr(quota, "fastest_plan", lambda *_: pytest.fail("searched"))
    counts_DE = np.full((4, 8), 1000)
    counts_DE[0, 0] += 60
    current = Placement.identity(8, 4, 2)
    assert policy.plan(counts_DE, current.with_hosts([(0, 1)]), cost_model(4, 4)) == current
    with pytest.raises(pytest.fail.Exception, match="searched"):
        policy.plan(counts_DE + 100 * np.eye(4, 8, dtype=np.int64)[:, ::-1], current, cost_model(4, 4))


def test_hidden_guests_are_not_free() -> None:
    """Two nodes with one rank each. Guests on both save nearly all messages, but loads are even without them."""
    counts_DE = np.array([[50, 50], [50, 50]])
    for expert_bytes, hosts in ((1, 2), (100, 1)):
        cost = cost_model(2, 1, near=1.0, far=40.0, overlap=Overlap(1e6, 1e6, slowed=0.05))
        cost = dataclasses.replace(cost, token_bytes=0.02, param_bytes=expert_bytes, grad_bytes=expert_bytes)
        planned = Quota().plan(counts_DE, Placement.identity(2, 2, 1), cost)
        assert [len(ranks) for ranks in planned.hosts] == [hosts, hosts]


def test_guests_take_more_tokens_where_slots_are_scarce() -> None:
    """Two nodes with two ranks, an expert and a slot each. No slot is left for the excess of rank 0."""
    counts_BDE = np.array([[[60, 10, 10, 10]] * 4])
    layer = make_layer(counts_BDE, np.arange(4), np.arange(4)[:, None], 1, 2)
    guest_DG = np.array([[NOBODY], [3], [0], [1]])
    taken_DG = np.array([[0], [10], [20], [10]])
    level_all(guest_DG, taken_DG, layer, Way(1, 1.0, FILLING, PARTS), np.arange(1), np.ones(4), 2)
    # The mean is 90, and rank 2 has its own 40
    assert guest_DG.tolist() == [[NOBODY], [3], [0], [1]]
    assert taken_DG.tolist() == [[0], [10], [50], [10]]


def test_slower_ranks_compute_less() -> None:
    counts_DE = skewed(4, 16, 1)
    cost = cost_model(4, 4)
    slow = dataclasses.replace(cost, profile=dataclasses.replace(cost.profile, rates=(0.5, 1.0, 1.0, 1.5)))
    tokens_D = np.array(tokens_of(Quota().plan(counts_DE, Placement.identity(16, 4, 3), slow), counts_DE))
    assert (tokens_D / slow.rate_D).max() <= EVEN * counts_DE.sum() / 4 < 1.1 * tokens_D[0] / slow.rate_D[0]


def test_experts_that_are_hot_in_turn_are_leveled_in_each_microbatch() -> None:
    """Over both microbatches, all ranks have equally many tokens."""
    counts_BDE = np.full((2, 2, 4), 10)
    counts_BDE[0, :, 0] = counts_BDE[1, :, 2] = 50
    cost = cost_model(2, 2, microbatches=2)
    planned = Quota().plan(counts_BDE, Placement.identity(4, 2, 2), cost)
    assert cost.layer_seconds(counts_BDE, Placement.identity(4, 2)) == 3 * (120 + 120)
    assert cost.layer_seconds(counts_BDE, planned) <= 3 * 2 * 80 * 1.02


def test_an_expert_that_leaves_its_owner_is_lent() -> None:
    counts_DE = np.array([[30, 50, 0, 0]] * 2)
    planned = Quota().plan(counts_DE, Placement.identity(4, 2, 2), cost_model(2, 2))
    assert tokens_of(planned, counts_DE) == [80, 80]
    counts_DE = np.array([[25, 25, 0, 0]] * 2)
    planned = Quota().plan(counts_DE, Placement.identity(4, 2, 2), cost_model(2, 2))
    assert str(planned) == "0 1x0 + . . | 2 3 + 1:50! ."


def test_guests_that_relieve_nobody_are_replaced() -> None:
    """Rank 0 has 400 of 520 tokens, and all guests are of other experts."""
    counts_DE = np.array([[100, 10, 10, 10]] * 4)
    current = Placement.identity(4, 4, 1)
    cost = cost_model(4, 4)
    homes = owners(current), np.array(current.home)
    layer = make_layer(counts_DE[None], *homes, 1, 4)
    guest_DG = np.array([[1], [2], [3], [1]])
    taken_DG = np.ones((4, 1), np.int64)
    sending = np.array(cost.degrees), cost.transport.messages_1
    # Python reads the fields of records by name only in such an array
    prices_1, *rates = cost.prices
    prices = prices_1.view(np.recarray)[0]
    seconds = replace_guests(layer, guest_DG, taken_DG, 100, *sending, prices, *rates)[0].layer
    placement = GuestPlan(layer, guest_DG, taken_DG, seconds).placement(current)
    assert seconds == pytest.approx(cost.layer_seconds(counts_DE, placement), rel=1e-9)
    assert max(tokens_of(placement, counts_DE)) < 200


def fastest_of(counts_DE: np.ndarray, slots: int, cost: CostModel, way_AN: np.ndarray, first: int, steps: int) -> Found:
    """Return the result of a search from some first ways."""
    ranks, experts = counts_DE.shape
    current = Placement.identity(experts, ranks, slots)
    layer = make_layer(counts_DE[None], owners(current), np.array(current.home), slots, cost.network.node_size)
    numbers = 1, np.array([PARTS]), steps, np.zeros(1, np.int64), np.array(cost.degrees), cost.transport.messages_1
    return fastest_plan(layer, way_AN, first, *numbers, *cost.prices)


@pytest.mark.parametrize(("tokens", "is_missed"), [((300, 200, 60, 40), True), ((300, 100, 100, 100), False)])
def test_the_next_target_is_tried_if_slots_are_lacking(tokens: tuple[int, ...], is_missed: bool) -> None:
    """With one slot a rank, two receivers cannot take over the excess of rank 0 and that of rank 1."""
    way_AN = np.array([[0, TARGETS.index(1.01), BUSIEST, 0]] * 2)
    fastest_of(np.array([tokens] * 4), 1, cost_model(4, 4), way_AN, 1, 0)
    assert TARGETS[way_AN[1, 1]] == (1.02 if is_missed else 1.005)


@pytest.mark.parametrize("seed", [4, 8])
def test_a_slower_plan_may_become_the_fastest_one(seed: int) -> None:
    counts_DE = skewed(8, 32, seed)
    cost = cost_model(8, 4, near=1e-3, far=4e-3)
    way_AN = np.array([[0, TARGETS.index(1.005), order, 0] for order in (BUSIEST, WHOLE)])
    found = {
        steps: [fastest_of(counts_DE, 1, cost, way_N[None].copy(), 1, steps).seconds for way_N in way_AN]
        for steps in (0, 10**4)
    }
    assert found[0][0] < found[0][1]
    assert found[10**4][0] > found[10**4][1]
    assert fastest_of(counts_DE, 1, cost, way_AN, 2, 10**4).seconds == found[10**4][1]


@UNSHRUNK
@given(st.data(), placements(), st.integers(1, 3), st.sampled_from([0.0, 1e3, 1e6]), st.sampled_from([1.0, 7.0]))
def test_plans_are_never_slower_than_owners_alone(
    data: st.DataObject, current: Placement, microbatches: int, near: float, far: float
) -> None:
    counts_BDE = np.stack([data.draw(loads(current, 10**5)).numpy() for _ in range(microbatches)])
    cost = cost_model(
        current.num_ranks,
        data.draw(st.integers(1, current.num_ranks)),
        near=near,
        far=near * far,
        microbatches=microbatches,
        degrees=data.draw(st.sampled_from([(1,), (1, 2, 4)])),
        overlap=data.draw(st.sampled_from([None, Overlap(1e3, 2e3, slowed=0.1)])),
        trans_each=data.draw(st.integers(0, 2)),
    )
    planned = load_policy("quota").plan(counts_BDE, current, cost)
    alone = current.rehost([(owner,) for owner in current.owners], current.owners)
    assert cost.layer_seconds(counts_BDE, planned) <= cost.layer_seconds(counts_BDE, alone) * (1 + 1e-9)
    assert (planned.home, planned.guest_slots) == (current.home, current.guest_slots)
    # The search counts the seconds of the model
    if current.guest_slots and current.num_ranks > 1:
        homes = owners(current), np.array(current.home)
        plan = search(counts_BDE, *homes, current.guest_slots, cost, is_quick=data.draw(st.booleans()))
        if plan is not None:
            seconds = cost.layer_seconds(counts_BDE, plan.placement(alone))
            assert plan.seconds == pytest.approx(seconds, rel=1e-9)
