"""What placements make ranks compute and exchange: by microbatch, and in groups of microbatches."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.candidates import add_guests
from megatron_balance.cost.core import FAR_OUT, NEAR_OUT
from megatron_balance.cost.loads import MOST_GROUPS, condensed, loads_of, owner_loads
from megatron_balance.cost.model import CostModel, balance_ratio, owners
from megatron_balance.observe.balance import evenness
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS
from megatron_balance.planning.manager import Manager
from megatron_balance.planning.predictor import METHODS, Predictor
from megatron_balance.profile.cluster_profile import Fit, Throughput, from_links
from tests.unit.placements import loads as any_loads
from tests.unit.placements import placements, rank_seconds
from tests.unit.slow_splits import slow_traffic


def cost_model(num_ranks: int, node_size: int, **options: Any) -> CostModel:
    """Return a model with latencies, links of two kinds, and shared adapters."""
    profile = from_links(
        num_ranks,
        node_size,
        Fit(1.0, 0.5, 0.0, 0.0),
        Fit(3.0, 2.0, 0.0, 0.0),
        shared=Fit(3.0, 3.0, 0.0, 0.0),
        forward=Throughput(1.0, 0.25, 0.0, 0.0),
        backward=Throughput(2.0, 0.5, 0.0, 0.0),
        rates=tuple(np.linspace(0.5, 1.5, num_ranks).tolist()),
    )
    return CostModel(profile, token_bytes=4, param_bytes=6, grad_bytes=12, **options)


@settings(max_examples=60, deadline=None)
@given(st.data(), placements(), st.integers(1, 6), st.integers(1, 3), st.sampled_from(sorted(SPLITS)))
def test_loads_are_sums_of_traffic(
    data: st.DataObject, placement: Placement, node_size: int, microbatches: int, split: str
) -> None:
    cost = cost_model(placement.num_ranks, node_size, split=split, microbatches=microbatches)
    counts_BDE = np.stack([data.draw(any_loads(placement, 10**4)).numpy() for _ in range(microbatches)])
    loads_FBD = cost.loads(counts_BDE, placement)
    traffic_BDD = np.stack([slow_traffic(split, counts_DE, placement, node_size) for counts_DE in counts_BDE])
    # Whole tokens differ by less than one for each expert
    assert cost.traffic(counts_BDE, placement).sum(1) == pytest.approx(traffic_BDD.sum(1), abs=placement.num_experts)
    expected = cost.network.crossing(traffic_BDD)
    assert loads_FBD[0] == pytest.approx(traffic_BDD.sum(-2), abs=1e-6)
    assert loads_FBD[NEAR_OUT:FAR_OUT] == pytest.approx(expected.near_2XD, abs=1e-6)
    assert loads_FBD[FAR_OUT:] == pytest.approx(expected.far_2XD, abs=1e-6)
    exchanging_B = cost.exchange.scale * cost.network.byte_seconds(expected.scaled(cost.token_bytes))
    slow = exchanging_B.sum(), (traffic_BDD.sum(-2) / cost.rate_D).max(-1).sum()
    assert [float(value) for value in cost.work_of(loads_FBD)] == pytest.approx(slow, abs=1e-6)
    assert cost.work(counts_BDE, placement) == pytest.approx(slow, abs=1e-6)
    home = placement.rehost([(owner,) for owner in placement.owners])
    owned_FBD = owner_loads(cost.network, counts_BDE.transpose(2, 0, 1), owners(placement))
    assert cost.loads(counts_BDE, home) == pytest.approx(owned_FBD, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.data(), placements(with_quotas=False), st.integers(1, 6), st.integers(1, 2))
def test_guests_add_to_the_owners_loads(
    data: st.DataObject, drawn: Placement, node_size: int, microbatches: int
) -> None:
    """As `loads_of`, which counts all experts."""
    home = drawn.rehost([(owner,) for owner in drawn.owners], drawn.owners)
    cost = cost_model(home.num_ranks, node_size, split="proportional")
    counts_EBD = np.stack([data.draw(any_loads(home, 10**4)).numpy() for _ in range(microbatches)]).transpose(2, 0, 1)
    counts_EBD = np.ascontiguousarray(counts_EBD, np.float64)
    owner_E = owners(home)
    guest_ED = owner_E[:, None] != np.arange(home.num_ranks)
    drawn_ED = data.draw(st.lists(st.integers(0, 3), min_size=guest_ED.size, max_size=guest_ED.size))
    shares_ED = np.array(drawn_ED).reshape(guest_ED.shape) * guest_ED
    whole = 3 * home.num_ranks
    expert_M, rank_M = shares_ED.nonzero()
    guests = expert_M, rank_M, shares_ED[expert_M, rank_M] / whole
    alone_FBD = owner_loads(cost.network, counts_EBD, owner_E)
    found_FBD = alone_FBD.copy()
    given = counts_EBD, counts_EBD.sum(2), owner_E, *guests, cost.network.node_size
    add_guests(found_FBD, 1.0, *given)
    shares_ED[np.arange(len(shares_ED)), owner_E] = whole - shares_ED.sum(1)
    assert found_FBD == pytest.approx(loads_of(cost.network, "proportional", counts_EBD, shares_ED, owner_E), abs=1e-6)
    add_guests(found_FBD, -1.0, *given)
    assert found_FBD == pytest.approx(alone_FBD, abs=1e-6)


@settings(deadline=None)
@given(st.data(), placements(), st.integers(1, 6))
def test_the_slowest_rank_bounds_the_layer(data: st.DataObject, placement: Placement, node_size: int) -> None:
    """Different ranks may compute and exchange longest; a rank's own time is that of its tokens."""
    cost = cost_model(placement.num_ranks, node_size)
    counts_BDE = data.draw(any_loads(placement, 100)).numpy()[None]
    loads_FBD = cost.loads(counts_BDE, placement)
    seconds_BD = rank_seconds(cost, loads_FBD)
    computed, *exchanged = loads_FBD
    rank = data.draw(st.integers(0, placement.num_ranks - 1))
    near, far = (max(pair[0][0, rank], pair[1][0, rank]) for pair in (exchanged[:2], exchanged[2:]))
    busy = 4 * 4 * cost.exchange.scale * max(0.5 * near, 2.0 * far)
    assert seconds_BD[0, rank] == pytest.approx(busy + 3 * computed[0, rank] / cost.rate_D[rank])
    bare = cost.layer_time(counts_BDE, placement)._replace(trans=0, agg=0)
    latencies = 4 * cost.exchange.latency + 0.75
    assert seconds_BD.max() <= (bare.total - latencies) * (1 + 1e-9) + 1e-9


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.integers(1, MOST_GROUPS))
def test_groups_keep_the_sums_and_what_busiest_ranks_have(
    seed: int, microbatches: int, ranks: int, home: int, most: int
) -> None:
    generator = np.random.default_rng(seed)
    counts_BDE = generator.integers(0, 50, (microbatches, ranks, ranks * home))
    owner_E = generator.permutation(np.repeat(np.arange(ranks), home))
    found = condensed(counts_BDE, owner_E, most)
    assert len(found) <= min(most, microbatches) and np.array_equal(found.sum(0), counts_BDE.sum(0))
    before, after = (counts.sum(1) @ (owner_E[:, None] == np.arange(ranks)) for counts in (counts_BDE, found))
    if len(set(before.argmax(1))) <= most:
        assert after.max(1).sum() == before.max(1).sum()
    else:
        assert after.max(1).sum() <= before.max(1).sum()


def alternating(microbatches: int = 6) -> np.ndarray:
    """Return loads in which even microbatches choose expert 0 and odd ones expert 3, of 4 experts on 2 ranks."""
    counts_BDE = np.full((microbatches, 2, 4), 10)
    counts_BDE[::2, :, 0] = counts_BDE[1::2, :, 3] = 70
    return counts_BDE


@pytest.mark.parametrize("method", METHODS)
def test_experts_that_are_hot_in_turn_stay_so_in_plans(method: str) -> None:
    """In the iteration, both ranks have equally many tokens; in each microbatch, one has 160 of 200."""
    seen = []

    class Policy:
        def plan(self, counts_BDE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
            seen.append(cost.layer_time(counts_BDE, current))
            return current.with_hosts([(0, 1), (3, 0)])

    plain = Placement.identity(4, 2, 1)
    counts_BDE = alternating()
    cost = cost_model(2, 2)
    manager = Manager(Policy(), cost, Predictor(method), plain)
    for _ in range(3):
        manager.observe(counts_BDE)
    expected_BDE = manager.expected_BDE
    assert expected_BDE is not None and len(expected_BDE) == 2
    tokens_BD = cost.traffic(expected_BDE, plain).sum(1)
    assert balance_ratio(tokens_BD) == evenness(tokens_BD, tokens_BD)[0] == 1.6
    decision = manager.question(expected_BDE, 6).answer()
    assert decision.placement is not None
    even = cost_model(2, 2, microbatches=6)
    assert seen[0] == pytest.approx(even.layer_time(counts_BDE, plain))
    assert seen[0].total > even.layer_seconds(counts_BDE.sum(0), plain)
    # With both experts on both ranks, each microbatch is even
    after = even.layer_time(expected_BDE, decision.placement)
    assert after.forward < seen[0].forward
    assert balance_ratio(cost.traffic(expected_BDE, decision.placement).sum(1)) == 1
