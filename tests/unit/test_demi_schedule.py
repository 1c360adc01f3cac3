"""DEMI's schedules: every constraint holds and is checked, text can be parsed, blocking tasks come first."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.planning.demi.listing import Pace, finishes, list_schedule
from megatron_balance.planning.demi.problem import Problem
from megatron_balance.planning.demi.schedule import MiniTask, MiniTaskKind, MiniTaskSchedule, check
from tests.unit.demi_problems import even_problem, problems


@settings(max_examples=100)
@given(problems(), st.integers(0, 2**32 - 1))
def test_schedules_keep_to_every_constraint(problem: Problem, seed: int) -> None:
    generator = np.random.default_rng(seed)
    workers, experts = problem.num_workers, problem.num_experts
    hosts_BE = generator.integers(0, workers, (3, experts))
    shapes = [(experts, workers, workers), (experts, workers), (1, workers, workers), (experts, 1, 1)]
    pace = Pace(*(generator.uniform(1, 20, shape) for shape in shapes))
    finish_B = finishes(problem, hosts_BE, pace)
    for hosts_E, finish, fits in zip(hosts_BE, finish_B, problem.fits(hosts_BE), strict=True):
        schedule = list_schedule(problem, hosts_E, pace)
        broken = check(problem, schedule)
        assert all(text.startswith(("(3a)", "(3b)", "guests")) for text in broken)
        assert bool(broken) != fits
        assert schedule.makespan == math.ceil(finish)
        assert MiniTaskSchedule.parse(str(schedule)) == schedule
        assert finishes(problem, hosts_E[None], pace)[0] == pytest.approx(finish, rel=1e-9)


MIGRATED = """hosts 0 0
mini-task       | 0   | 1   | 2   | 3
E0 COMPUTE 0>0  | 2.0 |     |     |
E1 TRANS 1>0    | 2.0 |     |     |
E1 DISPATCH 1>0 | 1.0 | 1.0 |     |
E1 COMPUTE 1>0  |     | 1.0 | 1.0 |
E1 COMPUTE 0>0  |     |     | 1.0 |
E1 COMBINE 0>1  |     |     | 1.0 | 1.0
"""
"""Each worker has two tokens for its own expert, and worker 0 has one for expert 1. Worker 0 hosts both."""


def migrated_problem(**changes: object) -> Problem:
    given = {"link_DD": np.full((2, 2), 3.0), "compute_D": np.full(2, 2.0), "size_E": np.array([2.0, 2.0])}
    return even_problem([[2, 1], [0, 2]], [0, 1], **given | {"expert_room_D": np.full(2, 4.0)} | changes)


@pytest.mark.parametrize(
    ("old", "new", "equation"),
    [
        ("", "", None),
        ("hosts 0 0", "hosts 0 2", "(1)"),
        ("hosts 0 0", "hosts 0", "(1)"),
        ("hosts 0 0", "hosts 0 1", "(4) with (2a)"),
        ("E1 TRANS 1>0    | 2.0", "E1 TRANS 1>0    | 1.5", "(4) with (2b)"),
        ("E0 COMPUTE 0>0  | 2.0", "E0 COMPUTE 0>0  | 2.5", "(4) with (2c)"),
        ("E1 COMBINE 0>1  |     |     | 1.0 | 1.0", "E1 COMBINE 0>1  |     |     | 1.0 | 0.5", "(4) with (2d)"),
        ("E0 COMPUTE 0>0  | 2.0 |     |", "E0 COMPUTE 0>0  | 2.5 | -0.5 |", "(7b)"),
        ("E1 DISPATCH 1>0 | 1.0 | 1.0", "E1 DISPATCH 1>0 | 2.0 |    ", "(5a)"),
        ("E1 COMPUTE 1>0  |     | 1.0 | 1.0", "E1 COMPUTE 1>0  |     |     | 2.0", "(5b)"),
        ("E1 COMPUTE 1>0  |     | 1.0 | 1.0", "E1 COMPUTE 1>0  |     | 2.0 |    ", "(6a)"),
        ("E1 TRANS 1>0    | 2.0 |    ", "E1 TRANS 1>0    | 1.9 | 0.1", "(6b)"),
        ("E1 COMBINE 0>1  |     |     | 1.0 | 1.0", "E1 COMBINE 0>1  |     |     | 2.0 |    ", "(6c)"),
    ],
)
def test_check_names_what_is_broken(old: str, new: str, equation: str | None) -> None:
    assert old in MIGRATED
    broken = check(migrated_problem(), MiniTaskSchedule.parse(MIGRATED.replace(old, new, 1)))
    assert any(text.startswith(equation) for text in broken) if equation else broken == []


@pytest.mark.parametrize(
    ("changes", "equation"),
    [
        ({"token_room_D": [4.9, 5]}, "(3a)"),
        ({"expert_room_D": [3.9, 4]}, "(3b)"),
        ({"guests": 0}, "guests"),
    ],
)
def test_check_counts_rooms(changes: dict[str, object], equation: str) -> None:
    (broken,) = check(migrated_problem(**changes), MiniTaskSchedule.parse(MIGRATED))
    assert broken.startswith(f"{equation}: worker 0 has")


def test_schedules_as_text() -> None:
    schedule = MiniTaskSchedule.parse(MIGRATED)
    assert str(schedule) == MIGRATED
    assert schedule.makespan == 4
    assert schedule.mini_tasks[1] == MiniTask(1, MiniTaskKind.TRANS, 1, 0)
    assert schedule.amounts[5] == (0.0, 0.0, 1.0, 1.0)
    assert MiniTaskSchedule.parse("hosts 1\nmini-task\n") == MiniTaskSchedule((1,), (), ())
    for old, new in [
        ("hosts", "guests"),
        ("| 1 ", "| 4 "),
        ("E0 COMPUTE", "E0 REST"),
        ("E0 ", "expert 0 "),
        ("2.0", "two"),
        ("| 2.0 |     |     |", "| 2.0 |     |     |     |"),
    ]:
        with pytest.raises(ValueError, match=r"schedule|mini-task"):
            MiniTaskSchedule.parse(MIGRATED.replace(old, new, 1))


def test_transfers_come_in_the_order_in_which_they_are_complete() -> None:
    rows = [
        MiniTask(0, MiniTaskKind.TRANS, 0, 1),
        MiniTask(1, MiniTaskKind.TRANS, 0, 1),
        MiniTask(2, MiniTaskKind.TRANS, 0, 1),
    ]
    work = MiniTask(0, MiniTaskKind.COMPUTE, 0, 1)
    schedule = MiniTaskSchedule(
        (1, 1, 1), (*rows, work), ((1.0, 0.0, 1.0), (0.0, 1.0, 0.0), (0.0, 1.0, 1.0), (0.0, 0.0, 1.0))
    )
    assert schedule.transfers == (rows[1], rows[0], rows[2])


def test_a_migration_that_has_begun_is_finished_first() -> None:
    # In the second slot, line 10 alone would prefer expert 1, which has more left to send
    problem = even_problem([[0, 0], [1, 1]], [0, 0], size_E=[3, 4], link_DD=[[2, 2], [2, 2]])
    schedule = list_schedule(problem, np.array([1, 1]), Pace.eager(problem))
    amounts = dict(zip(map(str, schedule.mini_tasks), schedule.amounts, strict=True))
    assert amounts["E0 TRANS 0>1"][:4] == (2.0, 1.0, 0.0, 0.0)
    assert amounts["E1 TRANS 0>1"][:4] == (0.0, 1.0, 2.0, 1.0)


def test_what_nothing_waits_for_is_done_last() -> None:
    # Worker 0 has its own tokens from the start, but computes the other worker's as they arrive
    problem = even_problem([[3], [3]], [0])
    schedule = list_schedule(problem, np.array([0]), Pace.eager(problem))
    amounts = dict(zip(map(str, schedule.mini_tasks), schedule.amounts, strict=True))
    assert amounts["E0 COMPUTE 1>0"] == (0.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    assert amounts["E0 COMPUTE 0>0"] == (1.0, 0.0, 0.0, 0.0, 1.0, 1.0)


def test_nothing_that_others_wait_for_waits_for_a_way_back() -> None:
    # From the third slot on, ten tokens could go back to worker 1, but others are still to be computed there
    problem = even_problem([[0, 6], [10, 0]], [0, 1], link_DD=[[1, 1], [10, 1]], compute_D=[10, 10])
    schedule = list_schedule(problem, np.array([0, 1]), Pace.eager(problem))
    amounts = dict(zip(map(str, schedule.mini_tasks), schedule.amounts, strict=True))
    assert amounts["E1 DISPATCH 0>1"][:6] == (1.0,) * 6
    assert amounts["E0 COMBINE 0>1"] == (0.0,) * 6 + (1.0,) * 10
