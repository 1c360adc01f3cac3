"""Orders of a layer's tasks: the scheduler compared with every feasible order, conversion to text, timelines."""

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.flow.chunks.order import (
    COMPUTING,
    ORDERS,
    ChunkStep,
    ChunkTask,
    ChunkTimes,
    Order,
    check,
    find_order,
    interleaved,
    makespan,
    parse,
    sequential,
    spans,
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


def least_makespan(times: tuple[ChunkTimes, ...]) -> float:
    """Return the least makespan of orders no slower than Eq. 12; states differ in the times when resources are free."""
    chunks = range(len(times))
    limit = makespan(theorem_1(times), times)
    states = {((0,) * len(times), 0.0, 0.0, (0.0,) * len(times))}
    for _ in range(len(times) * len(COMPUTING)):
        following = set()
        for done, computing, network, arrived in states:
            for chunk in chunks:
                if done[chunk] == len(COMPUTING):
                    continue
                task = COMPUTING[done[chunk]]
                after = list(arrived)
                end = max(computing, arrived[chunk]) + getattr(times[chunk], task.lower())
                busy = network
                if task in (ChunkTask.C1, ChunkTask.C2):
                    sent = times[chunk].a1 if task is ChunkTask.C1 else times[chunk].a2
                    after[chunk] = busy = max(network, end) + sent
                if max(end, busy) > limit * (1 + 1e-9):
                    continue
                count = (*done[:chunk], done[chunk] + 1, *done[chunk + 1 :])
                following.add((count, end, busy, tuple(after)))
        states = following
    return min(computing for _, computing, _, _ in states)


def random_times(generator: random.Random, chunks: int, equal: bool, symmetric: bool) -> tuple[ChunkTimes, ...]:
    def one() -> ChunkTimes:
        values = [generator.choice(SCALES) * generator.random() for _ in range(7)]
        if symmetric:
            values[4:] = [values[0], values[1], values[2]]
        return ChunkTimes(*values)

    first = one()
    return tuple(first if equal else one() for _ in range(chunks))


def test_every_order_of_two_chunks() -> None:
    orders = list(every_order(2))
    assert len(orders) == len(set(orders)) == 252
    assert not any(check(order, 2) for order in orders)


def test_no_order_of_two_chunks_beats_theorem_1_where_it_holds() -> None:
    generator = random.Random(0)
    orders = list(every_order(2))
    for _ in range(300):
        times = random_times(generator, 2, equal=True, symmetric=True)
        best = min(makespan(order, times) for order in orders)
        assert makespan(theorem_1(times), times) == pytest.approx(best, rel=1e-12)


@pytest.mark.slow
def test_no_order_of_three_chunks_beats_theorem_1_where_it_holds() -> None:
    generator = random.Random(1)
    for _ in range(20):
        times = random_times(generator, 3, equal=True, symmetric=True)
        assert makespan(theorem_1(times), times) == pytest.approx(least_makespan(times), rel=1e-12)


@given(
    st.lists(
        st.builds(ChunkTimes, *[st.floats(0, 10, allow_subnormal=False) for _ in range(7)]), min_size=1, max_size=6
    ).map(tuple)
)
@settings(max_examples=60)
def test_all_orders_can_be_executed_and_keep_to_what_they_depend_on(times: tuple[ChunkTimes, ...]) -> None:
    for scheduler in ORDERS.values():
        order = scheduler(times)
        assert not check(order, len(times))
        assert parse(text(order)) == order
        found = list(spans(order, times))
        ends = {(span.task, span.chunk): span.end for span in found}
        assert len(ends) == 7 * len(times)
        for chunk in range(len(times)):
            stages = [span for task in ChunkTask for span in found if (span.task, span.chunk) == (task, chunk)]
            assert all(one.end <= other.start for one, other in itertools.pairwise(stages))
        for resource in (COMPUTING, (ChunkTask.A1, ChunkTask.A2)):
            busy = sorted((span.start, span.end) for span in found if span.task in resource)
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(busy))
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
