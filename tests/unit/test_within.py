"""Plans for the exact load of a microbatch on top of a placement: who computes what, and how weights get there."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel, Overlap, balance_ratio
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import HostRules, sums_by_host, tokens_of
from megatron_balance.planning.policies import load_policy
from megatron_balance.planning.within import PassPlan, level_hosts, plan_within
from megatron_balance.profile.cluster_profile import Fit, Throughput, from_links
from tests.unit.placements import placements

SPEED = Throughput(1.0, 0.0, 0.0, 0.0)
NEAR = Fit(1.0, 1e-3, 0.0, 0.0)


def cost_of(ranks: int, node_size: int, far: float = 1.0, size: float = 1.0, again: int = 2) -> CostModel:
    """Return the cost model of a cluster that computes a token in a second, and sends an expert faster."""
    line = Fit(far, far * 1e-3, 0.0, 0.0)
    links = from_links(ranks, node_size, NEAR, line, shared=line, forward=SPEED, backward=SPEED)
    return CostModel(
        links,
        token_bytes=1e-3,
        param_bytes=size,
        grad_bytes=2 * size,
        split="proportional",
        overlap=Overlap(0.0, 1.0),
        trans_each=again,
    )


def planned(
    counts_DE: np.ndarray, outer: Placement, cost: CostModel, slots: int, split: str = "proportional"
) -> PassPlan:
    return plan_within(counts_DE, outer, policy=load_policy("quota"), split=split, slots=slots, cost=cost)


def computed(cost: CostModel, counts_DE: np.ndarray, placement: Placement) -> np.ndarray:
    return cost.traffic(counts_DE, placement)[0].sum(0)


def check(found: PassPlan, outer: Placement, slots: int) -> None:
    """Check that the placement of the iteration is still there, and that messages bring its new guests, once each."""
    placement, plan, problem = found
    assert problem is None
    assert placement.home == outer.home and placement.primary == outer.primary
    assert placement.guest_slots == outer.guest_slots + slots
    assert all(row[: outer.guest_slots] == old for row, old in zip(placement.guests, outer.guests, strict=True))
    new = {
        (expert, rank)
        for rank, row in enumerate(placement.guests)
        for expert in row[outer.guest_slots :]
        if expert >= 0
    }
    sent = [message for messages in plan.rounds for message in messages]
    assert sorted((message.expert, message.target) for message in sent) == sorted(new)
    for expert, hosts in enumerate(outer.hosts):
        # Every host keeps its slot, and so its weights
        assert {*hosts} <= {*placement.hosts[expert]}
    for message in sent:
        assert message.source in outer.hosts[message.expert] and message.pieces == 1


@settings(deadline=None, max_examples=60)
@given(
    placements(),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 10**6),
    st.sampled_from(["local_first", "proportional"]),
)
def test_plans_are_executable_and_no_slower(
    outer: Placement, node_size: int, slots: int, seed: int, split: str
) -> None:
    ranks = outer.num_ranks
    experts = outer.num_experts
    generator = np.random.default_rng(seed)
    counts_DE = generator.integers(0, 200, (ranks, experts)) * generator.integers(0, 3, experts)
    cost = cost_of(ranks, min(node_size, ranks))
    found = planned(counts_DE, outer, cost, slots, split)
    check(found, outer, slots)
    before_D = computed(dataclasses.replace(cost, split=split), counts_DE, outer)
    after_D = computed(cost, counts_DE, found.placement)
    assert after_D.sum() == before_D.sum() == counts_DE.sum()
    # Hosts without tokens keep one each
    assert after_D.max() <= before_D.max() + experts


def of_nodes(values_D: np.ndarray, node_size: int) -> np.ndarray:
    return np.add.reduceat(values_D, np.arange(0, len(values_D), node_size))


@settings(deadline=None, max_examples=60)
@given(placements(), st.integers(1, 4), st.integers(0, 10**6))
def test_nodes_are_leveled_by_tokens_of_other_nodes(outer: Placement, node_size: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    counts_DE = generator.integers(0, 200, (outer.num_ranks, outer.num_experts))
    rules = HostRules.of(outer, "proportional", node_size)
    before_N = tokens_of(counts_DE, outer, rules).sum(0)[outer.tables.physical_N]
    after_N = before_N.copy()
    level_hosts(after_N, counts_DE, rules, np.ones(outer.num_ranks))
    exact = rules._replace(share_N=after_N)
    assert (tokens_of(counts_DE, outer, exact).sum(0)[outer.tables.physical_N] == after_N).all()
    before_DD, after_DD = (sums_by_host(tokens_of(counts_DE, outer, one), outer.num_ranks) for one in (rules, exact))
    # The last node may have fewer ranks
    mean = -(-counts_DE.sum() // outer.num_ranks)
    before, after = (of_nodes(one_DD.sum(0) - mean, node_size).max() for one_DD in (before_DD, after_DD))
    assert after <= max(before, 0)
    node_D = np.arange(outer.num_ranks) // node_size
    is_far_DD = node_D[:, None] != node_D
    assert after_DD[is_far_DD].sum() <= before_DD[is_far_DD].sum()


@pytest.mark.parametrize(("sources", "leveled"), [((60, 60, 20, 20), [140, 140]), ((40, 40, 40, 40), [120, 160])])
def test_nodes_are_leveled_without_weights(sources: tuple[int, ...], leveled: list[int]) -> None:
    """Two nodes of two ranks host expert 0. Node 1 leaves tokens to node 0, but none of its own ranks' tokens."""
    outer = Placement.identity(4, 4, 1).with_hosts([(0, 2)])
    counts_DE = np.full((4, 4), 10)
    counts_DE[:, 0] = sources
    cost = cost_of(4, 2, size=1e9)
    found = planned(counts_DE, outer, cost, 1)
    check(found, outer, 1)
    assert not len(found.plan)
    tokens_D = [computed(cost, counts_DE, placement) for placement in (outer, found.placement)]
    assert [of_nodes(one_D, 2).tolist() for one_D in tokens_D] == [[120, 160], leveled]


def test_ranks_are_leveled() -> None:
    """The iteration's placement was for another load: rank 0 has twice the mean."""
    outer = Placement.identity(8, 4, 1).with_hosts([(7, 0)])
    counts_DE = np.full((4, 8), 10)
    counts_DE[:, :2] = 50
    cost = cost_of(4, 4)
    found = planned(counts_DE, outer, cost, 2)
    check(found, outer, 2)
    assert balance_ratio(computed(cost, counts_DE, outer)) > 1.7
    assert balance_ratio(computed(cost, counts_DE, found.placement)) <= 1.01


@pytest.mark.parametrize(("far", "crosses"), [(1.0, True), (1e6, False)])
def test_copies_cross_nodes_only_if_that_pays(far: float, crosses: bool) -> None:
    outer = Placement.identity(8, 4, 1)
    counts_DE = np.full((4, 8), 10)
    counts_DE[:, :4] = 50
    found = planned(counts_DE, outer, cost_of(4, 2, far), 2)
    sent = [message for messages in found.plan.rounds for message in messages]
    assert any(message.source // 2 != message.target // 2 for message in sent) == crosses


def test_nothing_is_sent_that_does_not_pay() -> None:
    outer = Placement.identity(8, 4, 1).with_hosts([(7, 0)])
    counts_DE = np.full((4, 8), 10)
    counts_DE[:, 0] = 30
    found = planned(counts_DE, outer, cost_of(4, 4, size=1e9), 1)
    check(found, outer, 1)
    assert not len(found.plan)
    assert found.placement.hosts == outer.hosts


@pytest.mark.parametrize(
    ("again", "overlap", "pays"), [(1, None, True), (2, None, False), (2, Overlap(0.0, 50.0), True)]
)
def test_a_second_trans_is_paid_for_unless_it_is_hidden(again: int, overlap: Overlap | None, pays: bool) -> None:
    """A guest saves 120 s of computation. A Trans takes 66 s, and the second one may be hidden; an Agg takes 1 s."""
    outer = Placement.identity(2, 2, 1)
    counts_DE = np.array([[60, 0], [60, 0]])
    cost = dataclasses.replace(cost_of(2, 2, size=65e3, again=again), overlap=overlap, grad_bytes=0.0)
    assert (len(planned(counts_DE, outer, cost, 1).plan) > 0) == pays
