"""--overlap-param-gather: while a bucket of parameters is in use, the next one is being gathered."""

import functools

import pytest

from megatron_balance.training.loop import train_step
from megatron_balance.training.run import Run
from tests.distributed import runs

# Large enough that no bucket ends between an attention's projections, which register in another order
GATHER = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
BLOCKWISE = "--expert-model-parallel-size 2 --balance-policy top2 --balance-overlap blockwise"

Events = list[tuple[str, int]]
"""`starts` and `uses` of buckets, by number."""


def in_order_of_use(run: Run) -> list[list]:
    """Return the bucket groups of dense parameters and those of experts, in the order of use in a forward pass."""
    return [chunk[::-1] for model in run.model for chunk in (model.bucket_groups, model.expert_parallel_bucket_groups)]


def gathers(flags: str) -> list[Events]:
    """Return the start of each bucket's gather and the bucket's first use in one iteration."""
    run = runs.build(flags)
    train_step(run)
    found: list[Events] = []
    for groups in in_order_of_use(run):
        found.append(events := [])
        for number, group in enumerate(groups):
            follow(group, number, events)
    train_step(run)
    return found


def follow(group, number: int, events: Events) -> None:
    start = group.start_param_sync
    finish = group.finish_param_sync

    @functools.wraps(start)
    def starts(*args, **kwargs) -> None:
        events.append(("starts", number))
        start(*args, **kwargs)

    @functools.wraps(finish)
    def uses(*args, **kwargs) -> None:
        if ("uses", number) not in events:
            events.append(("uses", number))
        finish(*args, **kwargs)

    group.start_param_sync = starts
    group.finish_param_sync = uses


@pytest.mark.parametrize(("world_size", "flags", "chains"), [(2, "", 1), (4, BLOCKWISE, 2)])
def test_the_next_bucket_is_gathered_while_one_is_in_use(ranks, world_size: int, flags: str, chains: int) -> None:
    """Every bucket except the first is already being gathered when its first layer needs it."""
    outcomes = ranks(world_size).run(gathers, f"{GATHER} {flags}")
    assert all(outcome == outcomes[0] for outcome in outcomes)
    several = [events for events in outcomes[0] if events]
    assert len(several) == chains
    for events in several:
        buckets = len(events) // 2
        assert buckets > 2
        ahead = [event for number in range(1, buckets) for event in (("starts", number), ("uses", number))]
        assert events == [("uses", 0), ("starts", 0), *ahead]
