"""Transfers of plain tensors: rounds through small staging are exact, and a failure on one rank changes nothing."""

import contextlib
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_balance.comm import ownership_transfer
from megatron_balance.comm.ownership_transfer import ExpertMover, Extent, Field, Moved, Place, plan_messages
from megatron_balance.planning.ownership import OwnerChange
from tests.unit.ownership_cases import Case, Tensors, draw_case, equal

SECONDS = 120.0
"""Time limit of a task; a rank that waits for another one in vain would exceed it by far."""


def start(case: Case, group: dist.ProcessGroup) -> tuple[ExpertMover, list[Field]]:
    rank = group.rank()
    return ExpertMover(group, case.places[rank], case.staging_bytes), case.kept_by(rank)


def move_random_cases(replicas: int, count: int) -> list[Moved | str]:
    """Run `count` random Transfers and check them; return what each moved."""
    group = dist.group.WORLD
    generator = random.Random(replicas)
    outcomes = []
    rank = group.rank()
    for number in range(count):
        case = draw_case(generator.randint, group.size() // replicas, replicas)
        transfer, own = start(case, group)
        moved = transfer.transfer(case.moves, lambda own=own: own)
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


def ring() -> Case:
    """Return a case where all experts of four ranks move, with odd sizes and sharded moments on every replica."""
    places = tuple(Place(rank, replica) for rank in range(2) for replica in range(2))
    moves = (
        OwnerChange(0, 0, 0, 1, 1),
        OwnerChange(1, 0, 1, 0, 0),
        OwnerChange(2, 1, 0, 0, 1),
        OwnerChange(3, 1, 1, 1, 0),
    )
    fields = (
        Tensors(torch.bfloat16, 7, ((0, 14),) * 4),
        Tensors(torch.float32, 7, ((0, 5), (5, 14)) * 2),
        Tensors(torch.uint8, 3, ((0, 6),) * 4),
    )
    return Case(places, 2, moves, fields, staging_bytes=40)


def raises(*_: object) -> None:
    raise MemoryError("no room for it")


FAILING_STEPS: dict[str, tuple[object, str, object, str]] = {
    "fields": (Case, "kept_by", raises, "MemoryError: no room for it"),
    "extents": (Extent, "of", raises, "MemoryError: no room for it"),
    "messages": (ownership_transfer, "plan_messages", raises, "MemoryError: no room for it"),
    "rounds": (ownership_transfer, "plan_rounds", raises, "MemoryError: no room for it"),
    "parcels": (ownership_transfer, "_parcels", raises, "MemoryError: no room for it"),
    "staging": (ownership_transfer._Round, "num_bytes", 2**60, "RuntimeError: "),
}
"""Steps that may fail on one rank, in the order of a Transfer: holder, name, replacement, reported error."""

WRONG_FIELDS: dict[str, dict[str, object]] = {
    "length": {"kept": (0, 13)},
    "strides": {"values": torch.zeros(28, dtype=torch.bfloat16)[::2]},
}
"""Changes that make a field inconsistent or unusable in messages."""


def fail_everywhere_once() -> dict[str, list[str]]:
    """Let each step fail once on each rank; check that it changes nothing and then succeeds; return the reasons."""
    group = dist.group.WORLD
    case = ring()
    transfer, _ = start(case, group)
    rank = group.rank()
    reasons = {}

    def attempt(step: str, failing: int) -> str:
        own = case.kept_by(rank)
        fields = own
        with contextlib.ExitStack() as stack:
            if failing == rank and step in FAILING_STEPS:
                stack.enter_context(mock.patch.object(*FAILING_STEPS[step][:3]))
            elif failing == rank:
                fields = [own[0]._replace(**WRONG_FIELDS[step]), *own[1:]]
            reason = transfer.transfer(case.moves, lambda: case.kept_by(rank) and fields)
        assert isinstance(reason, str) and equal(own, case.kept_by(rank)), (step, failing, reason)
        assert isinstance(transfer.transfer(case.moves, lambda: own), Moved)
        assert equal(own, case.kept_by(rank, moved=True))
        return reason

    for step in (*FAILING_STEPS, *WRONG_FIELDS):
        reasons[step] = [attempt(step, failing) for failing in range(group.size())]
    return reasons


def test_a_failure_on_any_rank_changes_nothing(ranks) -> None:
    outcomes = ranks(4).run(fail_everywhere_once, timeout=SECONDS)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    for step, reasons in outcomes[0].items():
        problem = FAILING_STEPS[step][3] if step in FAILING_STEPS else "AssertionError: "
        for rank, reason in enumerate(reasons):
            assert reason.startswith(f"on rank {rank}: {problem}"), (step, reason)


def test_the_example_needs_several_rounds() -> None:
    case = ring()
    assert (
        len(ownership_transfer.plan_rounds(plan_messages(case.moves, case.places, case.extents), case.staging_bytes))
        > 3
    )
