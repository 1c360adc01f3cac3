"""Differences between ranks' collectives: order, omissions, sizes, cycles. Equal orders pass."""

import pytest

from megatron_balance.job.collective_order import (
    BARRIER,
    Channel,
    RecordedOperation,
    Recording,
    differences,
    report,
    waits,
)
from tests.issue_order import Event, find_cycle

EXPERTS = "expert-data-parallel"


def operation(
    detail: str = "", sizes: tuple[int, ...] = (8,), verb: str = "all-gathers", time: float = 0.0
) -> RecordedOperation:
    return RecordedOperation(verb, sizes, "float32", detail, "start (buffer.py)", "begin (runtime.py:7)", time=time)


def exchange(sent: tuple[int, ...], received: tuple[int, ...]) -> RecordedOperation:
    return RecordedOperation("exchanges", (), "float32", "", "start (alltoall.py)", "", sent, received)


def record(
    *operations: RecordedOperation, ranks: tuple[int, ...] = (1, 3), first: int = 1, key: str = "7"
) -> Recording:
    numbered = [one._replace(number=number) for number, one in enumerate(operations, first)]
    return {key: Channel(EXPERTS, ranks, numbered)}


BUCKETS = [operation(f"bucket {number}", time=float(number)) for number in range(4)]


def test_orders_alike_pass() -> None:
    assert differences({1: record(*BUCKETS), 3: record(*BUCKETS)}) == []
    assert report({1: record(*BUCKETS), 3: record(*BUCKETS)}) is None
    # Ranks of other groups do not count, nor do operations that a ring buffer no longer has
    assert differences({1: record(*BUCKETS), 3: record(*BUCKETS[2:], first=3), 2: record(BUCKETS[1])}) == []


def test_exchanged_operations_are_named() -> None:
    exchanged = [BUCKETS[0], BUCKETS[2], BUCKETS[1], BUCKETS[3]]
    (text,) = differences({1: record(*BUCKETS), 3: record(*exchanged)})
    assert text == (
        "group expert-data-parallel, operation 2: "
        "rank 1 all-gathers 8 float32 bucket 1 (start (buffer.py) < begin (runtime.py:7)), "
        "rank 3 all-gathers 8 float32 bucket 2 (start (buffer.py) < begin (runtime.py:7))"
    )


@pytest.mark.parametrize(
    "other",
    [operation("bucket 1", sizes=(9,)), operation("bucket 1", sizes=(8, 8)), operation("bucket 1", verb="all-reduces")],
)
def test_other_sizes_or_verbs_are_named(other: RecordedOperation) -> None:
    (text,) = differences({1: record(*BUCKETS), 3: record(BUCKETS[0], other, *BUCKETS[2:])})
    assert text.startswith("group expert-data-parallel, operation 2: rank 1 all-gathers 8 ")


def test_an_operation_left_out_is_named() -> None:
    records = {1: record(*BUCKETS), 3: record(*BUCKETS[:3])}
    assert differences(records) == []
    (text,) = waits(records)
    assert "operation 4: rank 1 all-gathers 8 float32 bucket 3" in text and "rank 3 did not" in text
    assert "the latest of rank 3 in group expert-data-parallel is operation 3" in text
    assert report(records) == text
    # Left out in the middle: every later operation differs
    (text,) = differences({1: record(*BUCKETS), 3: record(BUCKETS[0], *BUCKETS[2:])})
    assert "operation 2" in text


def test_a_rank_that_never_came_is_named() -> None:
    (text,) = waits({1: record(*BUCKETS), 3: {}})
    assert "operation 1" in text and text.endswith("rank 3 has entered no operation yet")


def test_the_earliest_difference_comes_first() -> None:
    late, soon = (record(operation("x", time=time), key=key) for time, key in ((9.0, "1"), (2.0, "2")))
    others = record(operation("y", time=9.5), key="1") | record(operation("z", time=1.0), key="2")
    assert "bucket" not in (text := differences({1: {**late, **soon}, 3: others}))[0]
    assert len(text) == 2 and " z " in text[0] and " y " in text[1]


def test_what_one_sends_the_other_has_to_expect() -> None:
    fitting = {1: record(exchange((2, 5), (2, 0))), 3: record(exchange((0, 1), (5, 1)))}
    assert differences(fitting) == []
    (text,) = differences({1: fitting[1], 3: record(exchange((0, 1), (4, 1)))})
    assert "rank 1 exchanges 5 rows to rank 3, which expects 4" in text


def test_messages_agree_by_size_and_tag_alone() -> None:
    def message(verb: str, size: int, tag: int) -> Recording:
        one = RecordedOperation(verb, (size,), "float32", f"tag {tag}", f"{verb} (x.py)", "")
        return {"7:1->3": Channel("twin, 1 -> 3", (1, 3), [one], is_message=True)}

    assert differences({1: message("sends", 4, 0), 3: message("receives", 4, 0)}) == []
    assert len(differences({1: message("sends", 4, 0), 3: message("receives", 5, 0)})) == 1
    assert len(differences({1: message("sends", 4, 0), 3: message("receives", 4, 1)})) == 1


def test_barriers_of_one_file_agree() -> None:
    def wait(function: str, file: str = "builder.py") -> Recording:
        return record(RecordedOperation(BARRIER, (), "", caller=f"{function} ({file})"))

    assert differences({1: wait("build_generic_dataset"), 3: wait("build_none")}) == []
    assert len(differences({1: wait("build_generic_dataset"), 3: wait("build_none", "saver.py")})) == 1


def issued(*operations: tuple[str, int], thread: str = "main") -> list[Event]:
    return [Event(thread, channel, number) for channel, number in operations]


def test_circles() -> None:
    one = [("a", 1), ("b", 1)]
    other = [("b", 1), ("a", 1)]
    assert find_cycle({0: issued(*one), 1: issued(*one)}) == []
    assert set(find_cycle({0: issued(*one), 1: issued(*other)})) == {("a", 1), ("b", 1)}
    # Operations in different threads of one rank have no order
    assert find_cycle({0: issued(*one), 1: [*issued(("b", 1)), *issued(("a", 1), thread="side")]}) == []
    # Three ranks form a cycle, although no two of them do
    three = {0: issued(("a", 1), ("b", 1)), 1: issued(("b", 1), ("c", 1)), 2: issued(("c", 1), ("a", 1))}
    assert len(find_cycle(three)) == 3


def test_messages_are_posted_ahead() -> None:
    post = {rank: issued(*pair) for rank, pair in enumerate(([("in", 1), ("out", 1)], [("out", 1), ("in", 1)]))}
    assert find_cycle(post, messages=("in", "out")) == []
    waiting = {
        0: [Event("main", "in", 1), Event("main", "in", 1, is_wait=True), Event("main", "out", 1)],
        1: [Event("main", "out", 1), Event("main", "out", 1, is_wait=True), Event("main", "in", 1)],
    }
    assert len(find_cycle(waiting, messages=("in", "out"))) == 2
