"""Routes in few batches: every part reaches every guest once, from a rank that has it, and no rank sends much."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.trans_plan import EMPTY_PLAN, ROUTES, ExpertPiece, TransPlan, hops, plan_hops
from tests.unit.placements import placements, random_placement

many = st.builds(random_placement, st.just(18), st.sampled_from([6, 9]), st.just(3), st.integers(0, 2**32 - 1))
routes = st.sampled_from(ROUTES)


@settings(max_examples=200, deadline=None)
@given(placements() | many, st.integers(1, 6), st.integers(1, 5), routes)
def test_every_piece_reaches_every_guest_once(placement: Placement, node_size: int, pieces: int, route: str) -> None:
    plan = plan_hops(hops(placement, node_size, route), pieces)
    holders = {(expert, placement.owner(expert)): set() for expert in range(placement.num_experts)}
    had: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    reached = Counter()
    by_expert = defaultdict(set)
    for messages in plan.rounds:
        assert messages
        for expert, source, _, piece, _ in messages:
            assert (expert, source) in holders or piece in had[expert, source], "a rank has what it sends"
        for expert, _, target, piece, number in messages:
            had[expert, target].add(piece)
            reached[expert, target, piece] += 1
            by_expert[expert].add(number)
            assert 0 <= piece < number
    slots = [(expert, rank) for rank, row in enumerate(placement.guests) for expert in row if expert != EMPTY]
    assert all(len(numbers) == 1 for numbers in by_expert.values())
    expected = [(expert, rank, piece) for expert, rank in slots for piece in range(max(by_expert[expert]))]
    assert reached == Counter(expected)
    assert plan.experts_sent == pytest.approx(len(slots)) and bool(len(plan)) == bool(slots)
    assert plan == plan_hops(hops(Placement.parse(str(placement)), node_size, route), pieces)


@settings(max_examples=100, deadline=None)
@given(placements() | many, st.integers(1, 6), st.integers(1, 4))
def test_rounds_and_what_ranks_send(placement: Placement, node_size: int, pieces: int) -> None:
    guests = Counter(expert for row in placement.guests for expert in row if expert != EMPTY)
    owned = Counter(placement.owner(expert) for expert in guests)
    kept = Counter()
    for rank, row in enumerate(placement.guests):
        kept[rank] = sum(expert != EMPTY for expert in row)
    for route, stages in zip(ROUTES, (1, 2, 3), strict=True):
        plan = plan_hops(hops(placement, node_size, route), pieces)
        assert len(plan.rounds) <= (pieces + stages - 1 if guests else 0)
        if route == "exchanged":
            sent: Counter[int] = Counter()
            for messages in plan.rounds:
                for message in messages:
                    sent[message.source] += 1 / message.pieces
            assert all(sent[rank] <= owned[rank] + kept[rank] + 1e-9 for rank in sent), "an expert is sent once"


@settings(max_examples=100, deadline=None)
@given(placements() | many, st.integers(1, 6))
def test_by_node_each_part_enters_a_node_once(placement: Placement, node_size: int) -> None:
    found = hops(placement, node_size, "by node")
    entered = Counter()
    for expert, source, target, part in zip(*(column.tolist() for column in found[1:5]), strict=True):
        if source // node_size != target // node_size:
            entered[expert, target // node_size, part] += 1
    assert not entered or max(entered.values()) == 1


@settings(max_examples=100, deadline=None)
@given(placements() | many, st.integers(1, 6), st.integers(1, 4), routes)
def test_backward_a_rank_has_all_sums_before_it_sends_its_own(
    placement: Placement, node_size: int, pieces: int, route: str
) -> None:
    gone = set()
    for messages in reversed(plan_hops(hops(placement, node_size, route), pieces).rounds):
        sent = {(message.expert, message.target, message.piece) for message in messages}
        assert len(sent) == len(messages) and not sent & gone
        assert not any((message.expert, message.source, message.piece) in gone | sent for message in messages)
        gone |= sent


def test_sixteen_guests_in_two_batches() -> None:
    placement = Placement.identity(17, 17, 1).with_hosts((0, rank) for rank in range(1, 17))
    found = hops(placement, 8, "exchanged")
    assert np.bincount(found.stage_M).tolist() == [16, 16 * 15]
    assert np.bincount(found.source_M, 1 / found.parts_M).tolist() == pytest.approx([1] + [15 / 16] * 16)
    assert plan_hops(hops(Placement.identity(4, 2, 1), 2, "direct"), 3) == EMPTY_PLAN


@given(placements(), st.integers(1, 4), routes, st.integers(0, 8))
def test_parts_of_a_plan(placement: Placement, pieces: int, route: str, rounds: int) -> None:
    plan = plan_hops(hops(placement, 2, route), pieces)
    assert TransPlan.of(plan.rounds) == plan and len(plan) == len(plan.rounds)
    assert plan.round_M.tolist() == [number for number, messages in enumerate(plan.rounds) for _ in messages]
    first, rest = plan.split(rounds)
    assert first.rounds + rest.rounds == plan.rounds and len(first) == min(rounds, len(plan))
    assert first.experts_sent + rest.experts_sent == pytest.approx(plan.experts_sent)


def test_a_lent_expert_is_sent_by_its_owner() -> None:
    lent = Placement.identity(2, 2, 1).rehost([[1], [1]])
    expected = ((ExpertPiece(0, 0, 1, 0, 2),), (ExpertPiece(0, 0, 1, 1, 2),))
    assert plan_hops(hops(lent, 2, "direct"), 2).rounds == expected


def test_parts_of_different_owners_enter_a_node_at_different_ranks() -> None:
    on_all = Placement.identity(8, 8, 7).rehost([range(8)] * 8)
    found = hops(on_all, 4, "by node")
    first = (found.stage_M == 0) & (found.part_M == 3)
    assert sorted(found.target_M[first].tolist()) == list(range(8))


def test_guests_follow_their_owner_in_cyclic_order_of_nodes() -> None:
    on_all = Placement.identity(4, 4, 3).rehost([range(4)] * 4)
    assert hops(on_all, 1, "direct").target_M.tolist() == [1, 2, 3, 2, 3, 0, 3, 0, 1, 0, 1, 2]
