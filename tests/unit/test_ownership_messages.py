"""The messages that bring experts to their new owners."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.comm.ownership_transfer import Extent, FieldMessage, Place, plan_messages, plan_rounds
from megatron_balance.planning.ownership import OwnerChange
from tests.unit.ownership_cases import Case, draw_case, equal


@st.composite
def transfers(draw: st.DrawFn) -> Case:
    return draw_case(lambda low, high: draw(st.integers(low, high)), draw(st.integers(1, 4)), draw(st.integers(1, 3)))


@given(transfers())
def test_rounds_move_everything_once(case: Case) -> None:
    """Execute the rounds on all ranks' tensors in one place, and compare with a permutation of the whole tensors."""
    ranks = range(len(case.places))
    own = [case.kept_by(rank) for rank in ranks]
    extents = case.extents
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


def staged(messages: list[FieldMessage]) -> Counter[int]:
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
    for part, following in pairwise(rounds):
        field = following[0].field
        offset = following[0].offset
        row = [each.cut(offset, offset + 1) for each in following if (each.field, each.offset) == (field, offset)]
        assert max((staged(part) + staged(row)).values()) > case.staging_bytes
    assert len(plan_rounds(messages, 10**6)) == bool(messages)


def test_a_window_is_as_wide_as_the_busiest_rank_allows() -> None:
    """Two experts exchange owners, and a third moves within rank 1, so rank 1 stages three values per element."""
    exchanged = (OwnerChange(0, 0, 0, 1, 0), OwnerChange(2, 1, 0, 1, 1), OwnerChange(3, 1, 1, 0, 0))
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
    exchanged = (OwnerChange(0, 0, 0, 0, 1), OwnerChange(1, 0, 1, 0, 0))
    nothing = (0, 0)
    everything = (0, 2)
    extents = [[Extent(1, nothing, 2), Extent(1, everything, 1)], [Extent(1, everything, 2), Extent(1, (2, 2), 1)]]
    rounds = plan_rounds(plan_messages(exchanged, [Place(0, 0), Place(0, 1)], extents), 2)
    assert [staged(part) for part in rounds] == [{1: 4}, {0: 2}]


def test_no_field_joins_an_offset_over_the_limit() -> None:
    """Rank 0 sends two bytes of the first field; the second field moves between two other ranks."""
    messages = [
        FieldMessage(source, target, field, 0, 1, 0, 0, 1)
        for source, target, field in ((0, 1, 0), (0, 2, 0), (3, 4, 1))
    ]
    assert [{each.field for each in part} for part in plan_rounds(messages, 1)] == [{0}, {1}]
