"""Routes in few batches: every part reaches every guest once, from a rank that has it, and no rank sends much."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.relays import ROUTES, hops, plan_hops
from megatron_balance.placement.transfers import EMPTY_PLAN
from tests.unit.placements import placements, random_placement

many = st.builds(random_placement, st.just(18), st.sampled_from([6, 9]), st.just(3), st.integers(0, 2**32 - 1))
routes = st.sampled_from(ROUTES)


@settings(max_examples=200, deadline=None)
@given(placements() | many, st.integers(1, 6), st.integers(1, 5), routes)
def test_every_piece_reaches_every_guest_once(placement: Placement, node_size: int, chunks: int, route: str) -> None:
    plan = plan_hops(hops(placement, node_size, route), chunks)
    number = Counter(message.chunks for messages in plan.rounds for message in messages)
    holders = {(expert, placement.owner(expert)): set() for expert in range(placement.num_experts)}
    had: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    reached = Counter()
    by_expert = defaultdict(set)
    for messages in plan.rounds:
        assert messages
        for expert, source, _, chunk, _ in messages:
            assert (expert, source) in holders or chunk in had[expert, source], "a rank has what it sends"
        for expert, _, target, chunk, pieces in messages:
            had[expert, target].add(chunk)
            reached[expert, target, chunk] += 1
            by_expert[expert].add(pieces)
            assert 0 <= chunk < pieces
    slots = [(expert, rank) for rank, row in enumerate(placement.guests) for expert in row if expert != EMPTY]
    assert all(len(pieces) == 1 for pieces in by_expert.values())
    expected = [(expert, rank, chunk) for expert, rank in slots for chunk in range(max(by_expert[expert]))]
    assert reached == Counter(expected)
    assert plan.experts_sent == pytest.approx(len(slots)) and bool(number) == bool(slots)
    assert plan == plan_hops(hops(Placement.parse(str(placement)), node_size, route), chunks)


@settings(max_examples=100, deadline=None)
@given(placements() | many, st.integers(1, 6), st.integers(1, 4))
def test_rounds_and_what_ranks_send(placement: Placement, node_size: int, chunks: int) -> None:
    guests = Counter(expert for row in placement.guests for expert in row if expert != EMPTY)
    owned = Counter(placement.owner(expert) for expert in guests)
    kept = Counter()
    for rank, row in enumerate(placement.guests):
        kept[rank] = sum(expert != EMPTY for expert in row)
    for route, stages in zip(ROUTES, (1, 2, 3), strict=True):
        plan = plan_hops(hops(placement, node_size, route), chunks)
        assert len(plan.rounds) <= (chunks + stages - 1 if guests else 0)
        if route == "exchanged":
            sent: Counter[int] = Counter()
            for messages in plan.rounds:
                for message in messages:
                    sent[message.source] += 1 / message.chunks
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
    placement: Placement, node_size: int, chunks: int, route: str
) -> None:
    gone = set()
    for messages in reversed(plan_hops(hops(placement, node_size, route), chunks).rounds):
        sent = {(message.expert, message.target, message.chunk) for message in messages}
        assert len(sent) == len(messages) and not sent & gone
        assert not any((message.expert, message.source, message.chunk) in gone | sent for message in messages)
        gone |= sent


def test_sixteen_guests_in_two_batches() -> None:
    placement = Placement.identity(17, 17, 1).with_hosts((0, rank) for rank in range(1, 17))
    found = hops(placement, 8, "exchanged")
    assert np.bincount(found.stage_M).tolist() == [16, 16 * 15]
    assert np.bincount(found.source_M, 1 / found.parts_M).tolist() == pytest.approx([1] + [15 / 16] * 16)
    assert plan_hops(hops(Placement.identity(4, 2, 1), 2, "direct"), 3) == EMPTY_PLAN
