"""The harness itself: a failing rank fails the task immediately, and the error names the rank."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailure, Ranks


def rank_squared() -> int:
    return dist.get_rank() ** 2


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("the reason")
    dist.all_reduce(torch.ones(1))


def wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def test_results_come_in_rank_order_and_failures_with_their_traceback() -> None:
    group = Ranks(2)
    try:
        assert group.run(rank_squared) == [0, 1]
        with pytest.raises(RankFailure, match=r"rank 1 of 2 failed(.|\n)*the reason"):
            group.run(fail_on_rank_one)
        assert group.run(rank_squared) == [0, 1]
        start = time.monotonic()
        with pytest.raises(RankFailure, match=r"ranks \[0\] did not finish"):
            group.run(wait_for_nobody, timeout=8)
        assert time.monotonic() - start < 60
    finally:
        group.stop()


def add_up(size: int = 8, group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(torch.ones(size), group=group)


def add_up_elsewhere() -> None:
    dist.all_reduce(torch.ones(8))


def exchanged_on_rank_one() -> None:
    """Swap two equal operations, which gloo does not notice."""
    order = [add_up, add_up_elsewhere]
    for step in reversed(order) if dist.get_rank() == 1 else order:
        step()


def circle_of_two_communicators() -> None:
    """Wait only after issuing both operations, so that gloo does not deadlock."""
    first, second = (dist.new_group([0, 1], group_desc=name) for name in ("FIRST_GROUP", "SECOND_GROUP"))
    order = [second, first] if dist.get_rank() == 1 else [first, second]
    for work in [dist.all_reduce(torch.ones(8), group=group, async_op=True) for group in order]:
        work.wait()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (exchanged_on_rank_one, r"operation 2: rank 0 all-reduces 8 .*\(add_up .*, rank 1 .*\(add_up_elsewhere "),
        (
            circle_of_two_communicators,
            r"(?s)before the first:\ngroup (first|second), .*\ngroup (first|second), ",
        ),
    ],
)
def test_a_difference_between_ranks_is_named(task: Callable[[], None], said: str) -> None:
    group = Ranks(2)
    try:
        with pytest.raises(RankFailure, match=said):
            group.run(task, timeout=8)
    finally:
        group.stop()
