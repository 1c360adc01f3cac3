"""The harness itself: a failing rank fails the task, at once and by name."""

import time

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
        time.sleep(60)


def test_results_come_in_rank_order_and_failures_with_their_traceback() -> None:
    group = Ranks(2)
    try:
        assert group.run(rank_squared) == [0, 1]
        with pytest.raises(RankFailure, match=r"rank 1 of 2 failed(.|\n)*the reason"):
            group.run(fail_on_rank_one)
        assert group.run(rank_squared) == [0, 1]
        start = time.monotonic()
        with pytest.raises(RankFailure, match=r"ranks \[0\] did not finish"):
            group.run(wait_for_nobody, timeout=2)
        assert time.monotonic() - start < 20
    finally:
        group.stop()
