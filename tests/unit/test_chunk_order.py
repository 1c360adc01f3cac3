"""Orders of a layer's tasks: the scheduler compared with every feasible order, conversion to text, timelines."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.flow.chunks.order import (
    COMPUTING,
    ORDERS,
    ChunkStep,
    ChunkTimes,
    Order,
    check,
    find_order,
    interleaved,
    makespan,
    parse,
    sequential,
    text,
    theorem_1,
)

SCALES = (0.1, 1.0, 4.0)


def every_order(chunks: int) -> Iterator[Order]:
    """Yield all interleavings of the chunks' compute tasks."""
    done = [0] * chunks
    steps = []

    def grow() -> Iterator[Order]:
        if len(steps) == chunks * len(COMPUTING):
            yield tuple(steps)
        for chunk in range(chunks):
            if done[chunk] < len(COMPUTING):
                steps.append(ChunkStep(COMPUTING[done[chunk]], chunk))
                done[chunk] += 1
                yield from grow()
                done[chunk] -= 1
                steps.pop()

    return grow()


def test_no_order_of_two_chunks_beats_theorem_1_where_it_holds() -> None:
    generator = random.Random(0)
    orders = list(every_order(2))
    assert len(set(orders)) == 252 and not any(check(order, 2) for order in orders)
    for _ in range(300):
        c, a, d, e = (generator.choice(SCALES) * generator.random() for _ in range(4))
        times = (ChunkTimes(c, a, d, e, c, a, d),) * 2
        best = min(makespan(order, times) for order in orders)
        assert makespan(theorem_1(times), times) == pytest.approx(best, rel=1e-12)


@given(
    st.lists(
        st.builds(ChunkTimes, *[st.floats(0, 10, allow_subnormal=False) for _ in range(7)]), min_size=1, max_size=6
    ).map(tuple)
)
@settings(max_examples=60)
def test_all_orders_can_be_executed(times: tuple[ChunkTimes, ...]) -> None:
    for scheduler in ORDERS.values():
        order = scheduler(times)
        assert not check(order, len(times))
        assert parse(text(order)) == order
    # Sums of the same times in another order may differ by rounding
    assert makespan(theorem_1(times), times) <= makespan(sequential(times), times) * (1 + 1e-12)


def test_makespans_by_hand() -> None:
    times = (ChunkTimes(1, 3, 1, 2, 1, 3, 1),) * 2
    assert makespan(sequential(times), times) == 24
    # C1.0 0-1, C1.1 1-2; A1.0 1-4, A1.1 4-7; D1.0 E.0 C2.0 4-8; A2.0 8-11; D1.1 E.1 C2.1 8-12; A2.1 12-15; D2.1 15-16
    assert makespan(theorem_1(times), times) == 16
    assert text(theorem_1(times)) == "C1.0 C1.1 D1.0 E.0 C2.0 D1.1 E.1 C2.1 D2.0 D2.1"
    assert text(interleaved(times)) == text(theorem_1(times))
    assert text(interleaved(times * 2)).startswith("C1.0 C1.1 D1.0 E.0 C2.0 C1.2 D1.1 E.1 C2.1 D2.0 C1.3")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("C1.0 D1.0 E.0 C2.0", "chunk 0 ends after 4 tasks"),
        ("C1.0 E.0 D1.0 C2.0 D2.0", "E.0: its chunk has done C1"),
        ("C1.1", "C1.1: there are 1 chunks"),
        ("C1.0 D1.0 E.0 C2.0 D2.0 D2.0", "D2.0: its chunk has done"),
    ],
)
def test_impossible_orders(line: str, problem: str) -> None:
    assert problem in check(parse(line), 1)[0]


@pytest.mark.parametrize("line", ["A1.0", "C1", "C1.x", "E.-1", "C1.0,D1.0"])
def test_text_that_is_no_order(line: str) -> None:
    with pytest.raises(ValueError, match="should be like"):
        parse(line)


def test_orders_by_name() -> None:
    assert find_order("optsche") is theorem_1
    assert find_order("megatron_balance.flow.chunks.order:sequential") is sequential
    for name in ("best", "megatron_balance.flow.chunks.order:COMPUTING", "nowhere:at_all"):
        with pytest.raises(ValueError, match="--moe-comm-order"):
            find_order(name)
