"""Transfers of plain tensors: rounds through small staging are exact."""

import random

import pytest
import torch.distributed as dist

from megatron_balance.comm.ownership_transfer import ExpertMover, Moved, plan_messages
from tests.unit.ownership_cases import draw_case, equal

SECONDS = 120.0
"""Time limit of a task; a rank that waits for another one in vain would exceed it by far."""


def move_random_cases(replicas: int, count: int) -> list[Moved]:
    """Run `count` random Transfers and check them; return what each moved."""
    group = dist.group.WORLD
    generator = random.Random(replicas)
    outcomes = []
    rank = group.rank()
    for number in range(count):
        case = draw_case(generator.randint, group.size() // replicas, replicas)
        own = case.kept_by(rank)
        moved = ExpertMover(group, case.places[rank], case.staging_bytes).transfer(case.moves, own)
        assert equal(own, case.kept_by(rank, moved=True)), f"case {number}: {case}"
        messages = plan_messages(case.moves, case.places, case.extents)
        crossing = [message for message in messages if message.source != message.target]
        sent = sum(message.num_bytes for message in crossing if message.source == rank)
        assert moved == Moved(sent, sum(message.num_bytes for message in crossing))
        outcomes.append(moved)
    return outcomes


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_rounds_are_exact(ranks, world_size: int, replicas: int) -> None:
    outcomes = ranks(world_size).run(move_random_cases, replicas, 25, timeout=SECONDS)
    assert sum(moved.sent_bytes for rank in outcomes for moved in rank) == sum(each.total_bytes for each in outcomes[0])
    assert any(moved.total_bytes for moved in outcomes[0])


@pytest.mark.slow
def test_rounds_are_exact_on_eight_ranks(ranks) -> None:
    ranks(8).run(move_random_cases, 2, 25, timeout=SECONDS)
