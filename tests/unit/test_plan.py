"""DispatchPlan: tokens arrive at the rank and in the slot for which they were sent, and none is lost."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.flow.plan import DispatchPlan, largest_remainder, make_dispatch_plan
from megatron_balance.placement.placement import Placement
from tests.unit.placements import loads, placements

SPLITS = ["local_first", "proportional"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Placement, str]:
    """Draw arguments of make_dispatch_plan."""
    placement = draw(placements())
    return draw(loads(placement)), placement, draw(st.sampled_from(SPLITS))


plans = cases().map(lambda case: make_dispatch_plan(*case))


def apportion(amount: int, weights: list[int]) -> list[int]:
    """Apportion by Hamilton's method with exact fractions; ties go to the first."""
    quotas = [Fraction(amount * weight, max(sum(weights), 1)) for weight in weights]
    shares = [int(quota) for quota in quotas]
    remainders = sorted(range(len(weights)), key=lambda k: (shares[k] - quotas[k], k))
    for k in remainders[: amount - sum(shares)]:
        shares[k] += 1
    return shares


def reference(counts: list[list[int]], placement: Placement, split: str) -> list[list[int]]:
    """Compute tokens_DP token by token for each expert, as the docstrings and the papers define it."""
    sources = range(placement.num_ranks)
    tokens = [[0] * placement.num_physical for _ in sources]
    for expert, hosts in enumerate(placement.hosts):
        own = [counts[source][expert] for source in sources]
        if split == "local_first":
            for source in sources:
                host = source if source in hosts else placement.primary[expert]
                tokens[source][placement.physical(host, expert)] += own[source]
            continue
        capacity = apportion(sum(own), [hosts.count(rank) for rank in sources])
        local = [min(capacity[rank], own[rank]) for rank in sources]
        available = [capacity[rank] - local[rank] for rank in sources]
        for source in sources:
            sent = apportion(own[source] - local[source], available)
            available = [left - taken for left, taken in zip(available, sent, strict=True)]
            sent[source] += local[source]
            for rank in set(hosts):
                tokens[source][placement.physical(rank, expert)] += sent[rank]
    return tokens


def check_against_reference(case: tuple[torch.Tensor, Placement, str]) -> None:
    counts_DE, placement, split = case
    plan = make_dispatch_plan(counts_DE, placement, split)
    assert plan.tokens_DP.tolist() == reference(counts_DE.tolist(), placement, split)
    for expert, physicals in enumerate(placement.physicals):
        assert torch.equal(plan.tokens_DP[:, list(physicals)].sum(1), counts_DE[:, expert])
    unused = [index for index, expert in enumerate(placement.expert_of_physical) if expert < 0]
    assert not plan.tokens_DP[:, unused].any()
    assert (plan.tokens_DP >= 0).all()


@settings(max_examples=300)
@given(cases())
def test_equals_the_reference(case: tuple[torch.Tensor, Placement, str]) -> None:
    check_against_reference(case)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(cases())
def test_equals_the_reference_at_length(case: tuple[torch.Tensor, Placement, str]) -> None:
    check_against_reference(case)


@given(placements(), st.data())
def test_proportional_is_flexmoe_algorithm_3(placement: Placement, data: st.DataObject) -> None:
    """Every vExpert computes its capacity: local tokens first, then others by availability, up to rounding."""
    counts_DE = data.draw(loads(placement))
    tokens_DP = make_dispatch_plan(counts_DE, placement, "proportional").tokens_DP
    for expert, hosts in enumerate(placement.hosts):
        own = counts_DE[:, expert].tolist()
        capacity = [Fraction(sum(own) * hosts.count(rank), len(hosts)) for rank in range(placement.num_ranks)]
        local = [min(capacity[rank], own[rank]) for rank in range(placement.num_ranks)]
        available = [capacity[rank] - local[rank] for rank in range(placement.num_ranks)]
        for rank in set(hosts):
            sent = tokens_DP[:, placement.physical(rank, expert)].tolist()
            assert abs(sum(sent) - capacity[rank]) < 1
            assert abs(sent[rank] - local[rank]) < 1
            for source in range(placement.num_ranks):
                if source != rank and own[source] > local[source]:
                    quota = (own[source] - local[source]) * available[rank] / sum(available)
                    assert abs(sent[source] - quota) <= placement.num_ranks


def test_proportional_spreads_few_tokens_of_many_sources() -> None:
    """If each source rounded its only token independently, all would send it to the same host."""
    placement = Placement.identity(8, 8, guest_slots=1).with_hosts([(0, 1), (0, 2), (0, 3)])
    counts_DE = torch.zeros(8, 8, dtype=torch.int64)
    counts_DE[4:, 0] = 1
    plan = make_dispatch_plan(counts_DE, placement, "proportional")
    assert [int(plan.tokens_per_slot(rank).sum()) for rank in range(8)] == [1, 1, 1, 1, 0, 0, 0, 0]


def test_proportional_by_hand() -> None:
    # Expert 0 has three vExperts: two on its owner, rank 0, and one on rank 2
    placement = Placement.identity(3, 3, guest_slots=1).with_hosts([(0, 0), (0, 2)])
    counts_DE = torch.tensor([[2, 5, 0], [7, 0, 0], [3, 0, 1]])
    # Of capacities 8 and 4, local tokens take 2 and 3; rank 1 splits its 7 tokens into 6 and 1
    plan = make_dispatch_plan(counts_DE, placement, "proportional")
    assert plan.tokens_DP.tolist() == [[2, 0, 5, 0, 0, 0], [6, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 3]]
    plan = make_dispatch_plan(counts_DE, placement, "local_first")
    assert plan.tokens_DP.tolist() == [[2, 0, 5, 0, 0, 0], [7, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 3]]


def test_a_lent_expert_is_computed_by_its_guest_only() -> None:
    placement = Placement.parse("0x0 + . | 1 + 0!")
    for split in SPLITS:
        plan = make_dispatch_plan(torch.tensor([[4, 1], [2, 3]]), placement, split)
        assert plan.tokens_DP.tolist() == [[0, 0, 1, 4], [0, 0, 3, 2]]


@pytest.mark.parametrize("split", SPLITS)
def test_identity_sends_what_is_counted(split: str) -> None:
    counts_DE = torch.arange(32).view(4, 8)
    assert torch.equal(make_dispatch_plan(counts_DE, Placement.identity(8, 4), split).tokens_DP, counts_DE)


@given(st.lists(st.integers(0, 2**15), min_size=1, max_size=9), st.data())
def test_largest_remainder(weights: list[int], data: st.DataObject) -> None:
    amount = data.draw(st.integers(0, 2**31)) if any(weights) else 0
    shares = largest_remainder(torch.tensor([amount]), torch.tensor([weights]))
    assert shares.tolist() == [apportion(amount, weights)]


@given(plans)
def test_what_is_received_is_what_was_sent(plan: DispatchPlan) -> None:
    for rank in range(plan.placement.num_ranks):
        assert torch.equal(plan.splits_DH[:, rank], plan.received_DS(rank).sum(1))


@given(plans)
def test_every_token_is_sent_once(plan: DispatchPlan) -> None:
    for rank in range(plan.placement.num_ranks):
        assert plan.splits_DH[rank].sum() == plan.tokens_DP[rank].sum()


@given(plans)
def test_slots_compute_what_is_received(plan: DispatchPlan) -> None:
    for rank in range(plan.placement.num_ranks):
        slots = plan.tokens_per_slot(rank)
        assert slots.shape == (plan.placement.slots_per_rank,)
        assert slots.sum() == plan.splits_DH[:, rank].sum()
        assert plan.received_DS(rank).shape == (plan.placement.num_ranks, plan.placement.slots_per_rank)


@given(plans)
def test_slots_of_all_ranks_in_a_row_are_the_physical_experts(plan: DispatchPlan) -> None:
    per_slot = torch.cat([plan.tokens_per_slot(rank) for rank in range(plan.placement.num_ranks)])
    assert torch.equal(per_slot, plan.tokens_DP.sum(0))


def test_identity_by_hand() -> None:
    plan = make_dispatch_plan(torch.tensor([[1, 0, 2, 3], [0, 0, 4, 0]]), Placement.identity(4, 2))
    assert plan.splits_DH.tolist() == [[1, 5], [0, 4]]
    assert [plan.tokens_per_slot(rank).tolist() for rank in (0, 1)] == [[1, 0], [6, 3]]
    assert plan.received_DS(1).tolist() == [[2, 3], [4, 0]]


@pytest.mark.parametrize("shape", [(2, 3), (3, 4), (4,)])
def test_counts_of_another_layout(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        make_dispatch_plan(torch.zeros(shape, dtype=torch.int64), Placement.identity(4, 2))


def test_an_unknown_split() -> None:
    with pytest.raises(AssertionError):
        make_dispatch_plan(torch.zeros(2, 4, dtype=torch.int64), Placement.identity(4, 2), "local-first")
