"""Placement and DispatchPlan: what leaves one rank for another arrives there, in the slot it is meant for."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.flow.plan import DispatchPlan, make_plan
from megatron_balance.placement.placement import Placement

ranks_and_slots = st.tuples(st.integers(1, 6), st.integers(1, 5))


@st.composite
def plans(draw: st.DrawFn) -> DispatchPlan:
    """A plan for random loads, many of them zero."""
    ranks, slots = draw(ranks_and_slots)
    row = st.lists(st.one_of(st.just(0), st.integers(0, 10**9)), min_size=ranks * slots, max_size=ranks * slots)
    counts = torch.tensor(draw(st.lists(row, min_size=ranks, max_size=ranks)), dtype=torch.int64)
    return make_plan(counts, Placement.identity(ranks * slots, ranks))


@settings(deadline=None)
@given(ranks_and_slots)
def test_identity(size: tuple[int, int]) -> None:
    ranks, slots = size
    placement = Placement.identity(ranks * slots, ranks)
    assert placement.is_identity
    assert (placement.num_experts, placement.num_ranks) == (ranks * slots, ranks)
    assert (placement.num_physical, placement.slots_per_rank) == (ranks * slots, slots)
    assert all(expert // slots == index // slots for index, expert in enumerate(placement.expert_of_physical))


def test_placements_are_frozen_values() -> None:
    placement = Placement.identity(4, 2)
    assert placement == Placement.identity(4, 2) != Placement.identity(4, 4)
    assert hash(placement) == hash(Placement.identity(4, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        placement.num_ranks = 4


@pytest.mark.parametrize("hosted", [(1, 0, 2, 3), (0, 1, 2, 3, 0, 1), (0, 1, 2)])
def test_other_placements_are_not_the_identity(hosted: tuple[int, ...]) -> None:
    assert not Placement(4, 2, hosted).is_identity


def test_uneven_experts() -> None:
    with pytest.raises(ValueError, match=r"--num-experts 5: .*multiple of --expert-model-parallel-size 2"):
        Placement.identity(5, 2)


@settings(deadline=None)
@given(plans())
def test_what_is_sent_is_received(plan: DispatchPlan) -> None:
    ranks = range(plan.placement.num_ranks)
    sent = [plan.input_splits(rank) for rank in ranks]
    received = [plan.output_splits(rank) for rank in ranks]
    assert sent == [list(column) for column in zip(*received, strict=True)]


@settings(deadline=None)
@given(plans())
def test_every_token_is_sent_once(plan: DispatchPlan) -> None:
    for rank in range(plan.placement.num_ranks):
        assert sum(plan.input_splits(rank)) == int(plan.tokens_DP[rank].sum())


@settings(deadline=None)
@given(plans())
def test_slots_compute_what_is_received(plan: DispatchPlan) -> None:
    for rank in range(plan.placement.num_ranks):
        slots = plan.tokens_per_slot(rank)
        assert slots.shape == (plan.placement.slots_per_rank,)
        assert int(slots.sum()) == sum(plan.output_splits(rank))
        assert plan.received_DS(rank).shape == (plan.placement.num_ranks, plan.placement.slots_per_rank)


@settings(deadline=None)
@given(plans())
def test_slots_compute_their_experts(plan: DispatchPlan) -> None:
    """Under the identity, the slots of all ranks in a row are the experts."""
    per_slot = torch.cat([plan.tokens_per_slot(rank) for rank in range(plan.placement.num_ranks)])
    assert torch.equal(per_slot, plan.tokens_DP.sum(0))


def test_by_hand() -> None:
    plan = make_plan(torch.tensor([[1, 0, 2, 3], [0, 0, 4, 0]]), Placement.identity(4, 2))
    assert [plan.input_splits(rank) for rank in (0, 1)] == [[1, 5], [0, 4]]
    assert [plan.output_splits(rank) for rank in (0, 1)] == [[1, 0], [5, 4]]
    assert [plan.tokens_per_slot(rank).tolist() for rank in (0, 1)] == [[1, 0], [6, 3]]
    assert plan.received_DS(1).tolist() == [[2, 3], [4, 0]]


def test_splits_are_plain_integers() -> None:
    """Collectives refuse tensors as split sizes."""
    plan = make_plan(torch.ones(2, 4, dtype=torch.int64), Placement.identity(4, 2))
    assert all(type(size) is int for size in plan.input_splits(0) + plan.output_splits(0))


@pytest.mark.parametrize("shape", [(2, 3), (3, 4), (4,)])
def test_counts_of_another_layout(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        make_plan(torch.zeros(shape, dtype=torch.int64), Placement.identity(4, 2))
