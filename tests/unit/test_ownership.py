"""Which guests become owners, and the messages that this requires."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.comm.ownership_transfer import (
    ALIGNMENT,
    Extent,
    Message,
    Place,
    _Round,
    plan_messages,
    plan_rounds,
)
from megatron_balance.cost.model import CostModel, Overlap
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.ownership import Move, lasting, moves, settle
from megatron_balance.profile.cluster_profile import builtin
from tests.unit.ownership_cases import Case, draw_case, equal
from tests.unit.placements import UNSHRUNK, loads, placements

MIB = 2**20


def cost_model(num_ranks: int, state_bytes: float = 3 * MIB) -> CostModel:
    return CostModel(
        builtin(num_ranks, 2, 64, 64), token_bytes=128, param_bytes=MIB, grad_bytes=MIB, state_bytes=state_bytes
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Placement, np.ndarray, dict[tuple[int, int], int]]:
    placement = draw(placements())
    counts_DE = draw(loads(placement, 10**4)).numpy()
    held = {guest: draw(st.integers(0, 50)) for guest in lasting({}, placement)}
    return placement, counts_DE, held


@UNSHRUNK
@given(cases())
def test_what_is_settled_pays(case: tuple[Placement, np.ndarray, dict]) -> None:
    placement, counts_DE, held = case
    cost = cost_model(placement.num_ranks)
    after, settlement = settle(placement, counts_DE, held, cost)
    assert (after, settlement) == settle(placement, counts_DE, held, cost)
    changed = moves(placement, after)
    assert bool(changed) == bool(settlement.exchanges) == (after.home != placement.home)
    if not changed:
        assert after == placement
        return
    saved = cost.layer_seconds(counts_DE, placement) - cost.layer_seconds(counts_DE, after)
    seconds = cost.transfer_seconds((move.source, move.target) for move in changed)
    lifetime = min(held[exchange.experts[0], exchange.ranks[1]] for exchange in settlement.exchanges)
    assert settlement.saved_seconds == pytest.approx(saved)
    assert (settlement.transfer_seconds, settlement.lifetime) == (pytest.approx(seconds), lifetime)
    assert lifetime * saved > seconds
    assert after.added_hosts < placement.added_hosts
    # Slots change only where owners change
    assert {expert for move in changed for expert in [move.expert]} <= {
        expert for exchange in settlement.exchanges for expert in exchange.experts
    }


@UNSHRUNK
@given(placements(), st.data())
def test_moves_are_the_difference(placement: Placement, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(placement.num_experts)))
    slots = placement.home_slots
    home = tuple(tuple(order[rank * slots : (rank + 1) * slots]) for rank in range(placement.num_ranks))
    owners = [next(rank for rank, row in enumerate(home) if expert in row) for expert in range(len(order))]
    after = replace(
        Placement.identity(len(order), placement.num_ranks),
        home=home,
        hosts=tuple((owner,) for owner in owners),
        primary=tuple(owners),
    )
    slot_of = {(rank, slot): expert for rank, row in enumerate(placement.home) for slot, expert in enumerate(row)}
    for move in moves(placement, after):
        assert slot_of[move.source, move.source_slot] == move.expert
    changed = {(move.target, move.target_slot): move.expert for move in moves(placement, after)}
    assert slot_of | changed == {(rank, slot): e for rank, row in enumerate(home) for slot, e in enumerate(row)}


def lent(iterations: int, cost: CostModel) -> tuple:
    """Settle a placement in which rank 0 lends expert 0 to rank 1, which has an expert without tokens."""
    placement = Placement.identity(4, 2, 1).rehost([(1,), (0,), (1,), (1,)])
    counts_DE = np.array([[90, 90, 80, 0], [90, 90, 80, 0]])
    return settle(placement, counts_DE, {(0, 1): iterations}, cost)


def test_lending_goes_on_until_it_has_cost_as_much_as_a_transfer() -> None:
    cost = cost_model(2)
    line = cost.profile.link("p2p")
    lending = cost.trans_seconds(1, 1) + cost.agg_seconds(1, 1)
    transfer = line.alpha + line.beta * cost.state_bytes
    enough = int(transfer / lending) + 1
    assert lent(enough - 1, cost)[0].home == ((0, 1), (2, 3))
    after, settlement = lent(enough, cost)
    assert str(after) == "3 1 + . | 2 0 + ."
    assert str(settlement) == (
        f"experts exchange owners: 0 (rank 0) and 3 (rank 1); saves {lending * 1e3:.3g} ms in each of {enough} "
        f"expected iterations for {transfer * 1e3:.3g} ms"
    )


def test_lends_that_cost_nothing_stay() -> None:
    hidden = replace(cost_model(2), overlap=Overlap(1.0, 1.0))
    assert lent(1000, hidden)[0].home == ((0, 1), (2, 3))


def test_a_ring_is_settled_as_a_whole() -> None:
    """Each rank lends to the next; no single exchange saves time, because the slowest link decides."""
    placement = Placement.identity(4, 4, 1).rehost([(1,), (2,), (3,), (0,)])
    after, settlement = settle(placement, np.full((4, 4), 10), dict.fromkeys(lasting({}, placement), 9), cost_model(4))
    assert str(after) == "3 + . | 0 + . | 1 + . | 2 + ." and len(settlement.exchanges) == 3


def test_iterations_of_guests_that_stay_are_counted() -> None:
    first = Placement.identity(4, 2, 2).rehost([(1,), (0,), (1,), (0,)])
    second = Placement.identity(4, 2, 2).rehost([(1,), (1,), (1,), (1,)])
    held = lasting(lasting({}, first), first)
    assert held == {(0, 1): 2, (3, 0): 2}
    assert lasting(held, second) == {(0, 1): 3, (1, 1): 1}


@st.composite
def transfers(draw: st.DrawFn) -> Case:
    return draw_case(lambda low, high: draw(st.integers(low, high)), draw(st.integers(1, 4)), draw(st.integers(1, 3)))


@given(transfers())
def test_rounds_move_everything_once(case: Case) -> None:
    """Execute the rounds on all ranks' tensors in one place, and compare with a permutation of the whole tensors."""
    ranks = range(len(case.places))
    own, extents = [case.kept_by(rank) for rank in ranks], case.extents
    messages = plan_messages(case.moves, case.places, extents)
    for part in plan_rounds(messages, case.staging_bytes):
        packed = [own[each.source][each.field].bytes_of(each.taken, each.size).clone() for each in part]
        for each, values in zip(part, packed, strict=True):
            own[each.target][each.field].bytes_of(each.put, each.size).copy_(values)
    assert all(equal(own[rank], case.kept_by(rank, moved=True)) for rank in ranks)
    wanted = [
        max(0, min(stop, (move.target_slot + 1) * slot_size) - max(start, move.target_slot * slot_size)) * itemsize
        for move in case.moves
        for rank in ranks
        for slot_size, (start, stop), itemsize in extents[rank]
        if case.places[rank].rank == move.target
    ]
    assert sum(each.num_bytes for each in messages) == sum(wanted), "nothing is sent twice"


def staged(messages: list[Message]) -> Counter[int]:
    """Return the bytes that each rank stages for these messages."""
    return sum((Counter(dict.fromkeys((each.source, each.target), each.num_bytes)) for each in messages), Counter())


@given(transfers())
def test_rounds_are_full_and_no_more(case: Case) -> None:
    messages = plan_messages(case.moves, case.places, case.extents)
    rounds = plan_rounds(messages, case.staging_bytes)
    for part in rounds:
        rows = {(each.field, each.offset) for each in part}
        smallest = len(rows) == 1 and all(each.size == 1 for each in part)
        assert smallest or max(staged(part).values()) <= case.staging_bytes
        parts = [_Round.of(part, rank) for rank in range(len(case.places))]
        starts = [parcel.start for one in parts for parcel in (*one.leaving, *one.arriving)]
        assert all(start % ALIGNMENT == 0 for start in starts)
    for part, following in pairwise(rounds):
        field, offset = following[0].field, following[0].offset
        row = [each.cut(offset, offset + 1) for each in following if (each.field, each.offset) == (field, offset)]
        assert max((staged(part) + staged(row)).values()) > case.staging_bytes
    assert len(plan_rounds(messages, 10**6)) == bool(messages)


def test_a_window_is_as_wide_as_the_busiest_rank_allows() -> None:
    """Two experts exchange owners, and a third moves within rank 1, so rank 1 stages three values per element."""
    exchanged = (Move(0, 0, 0, 1, 0), Move(2, 1, 0, 1, 1), Move(3, 1, 1, 0, 0))
    extents = [[Extent(5, (0, 10), 2), Extent(3, (0, 6), 4)]] * 2
    messages = plan_messages(exchanged, [Place(0, 0), Place(1, 0)], extents)

    def windows(staging_bytes: int) -> list[list[tuple[int, int, int]]]:
        rounds = plan_rounds(messages, staging_bytes)
        return [sorted({(each.field, each.offset, each.offset + each.size) for each in part}) for part in rounds]

    assert windows(66) == [[(0, 0, 5), (1, 0, 3)]]
    assert windows(65) == [[(0, 0, 5), (1, 0, 2)], [(1, 2, 3)]]
    assert windows(24) == [[(0, 0, 4)], [(0, 4, 5), (1, 0, 1)], [(1, 1, 3)]]
    assert windows(1) == [[(0, each, each + 1)] for each in range(5)] + [[(1, each, each + 1)] for each in range(3)]


def test_an_offset_over_the_limit_has_a_round_of_its_own() -> None:
    """Replica 1 keeps the whole first field and replica 0 the whole second, so the fields share no rank."""
    exchanged = (Move(0, 0, 0, 0, 1), Move(1, 0, 1, 0, 0))
    nothing, everything = (0, 0), (0, 2)
    extents = [[Extent(1, nothing, 2), Extent(1, everything, 1)], [Extent(1, everything, 2), Extent(1, (2, 2), 1)]]
    rounds = plan_rounds(plan_messages(exchanged, [Place(0, 0), Place(0, 1)], extents), 2)
    assert [staged(part) for part in rounds] == [{1: 4}, {0: 2}]
