"""DEMI's schedules: every constraint holds and is checked, text can be parsed, blocking tasks come first."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.planning.demi.listing import Pace, finishes, list_schedule
from megatron_balance.planning.demi.problem import Problem
from megatron_balance.planning.demi.schedule import MiniTask, MiniTaskKind, MiniTaskSchedule
from tests.unit.demi_check import check, parse
from tests.unit.demi_problems import even_problem, problems


@settings(max_examples=100)
@given(problems(), st.integers(0, 2**32 - 1))
def test_schedules_keep_to_every_constraint(problem: Problem, seed: int) -> None:
    generator = np.random.default_rng(seed)
    workers = problem.num_workers
    experts = problem.num_experts
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
        assert parse(str(schedule)) == schedule
        assert finishes(problem, hosts_E[None], pace)[0] == pytest.approx(finish, rel=1e-9)
    longest = math.ceil(finish_B.min())
    assert (finishes(problem, hosts_BE, pace, longest) == np.where(finish_B > longest, np.inf, finish_B)).all()


@settings(max_examples=60)
@given(problems(), st.integers(0, 2**32 - 1))
def test_parts_of_experts_have_mini_tasks_of_their_own(whole: Problem, seed: int) -> None:
    generator = np.random.default_rng(seed)
    parts_E = generator.integers(1, whole.num_workers + 1, whole.num_experts)
    hosts = [generator.permutation(whole.num_workers)[:parts] for parts in parts_E]
    problem = whole.divided(parts_E)
    hosts_P = np.concatenate(hosts)
    schedule = list_schedule(problem, hosts_P, Pace.eager(problem))
    assert schedule.hosts == tuple(tuple(row.tolist()) for row in hosts)
    assert parse(str(schedule)) == schedule
    broken = check(problem, schedule)
    assert all(text.startswith(("(3a)", "(3b)", "guests")) for text in broken)
    assert bool(broken) != problem.fits(hosts_P[None])[0]
    assert [*map(str, schedule.mini_tasks)] == [*dict.fromkeys(map(str, schedule.mini_tasks))]
    for index, mini_task in enumerate(schedule.mini_tasks):
        less = [*schedule.mini_tasks[:index], *schedule.mini_tasks[index + 1 :]]
        amounts = [*schedule.amounts[:index], *schedule.amounts[index + 1 :]]
        if sum(schedule.amounts[index]) > 1e-6:
            without = MiniTaskSchedule(schedule.hosts, tuple(less), tuple(amounts))
            assert any(
                text.startswith(f"(4) with (2{'abcd'[[*MiniTaskKind].index(mini_task.task)]})")
                for text in check(problem, without)
            )
    one_more = MiniTaskSchedule((*schedule.hosts, (0,)), schedule.mini_tasks, schedule.amounts)
    assert check(problem, one_more)[0].startswith("(1)")


class _Task:
    """A mini-task of the slow reference."""

    def __init__(self, name: MiniTask, size: float, resource: tuple[int, ...], pace: float, last: bool = False) -> None:
        self.name = name
        self.size = size
        self.resource = resource
        self.left = size
        self.last = last
        self.priority = size * pace
        self.amounts = []

    @property
    def done(self) -> float:
        return self.size - self.left

    def rank(self, weight: float) -> tuple[int, float]:
        """Return the sort key in the queue of the resource."""
        begun = self.name.task is MiniTaskKind.TRANS and self.left < self.size
        return 0 if begun else 2 if self.last else 1, self.priority - weight * self.left


def reference_schedule(problem: Problem, hosts_E: np.ndarray, pace: Pace) -> dict[MiniTask, list[float]]:
    """Return the amounts of `list_schedule`, by a loop over mini-tasks in each slot."""
    tasks = {}

    def add(size: float, kind: MiniTaskKind, expert: int, source: int, target: int, *, pace: float) -> None:
        name = MiniTask(expert, kind, source, target)
        computes = kind is MiniTaskKind.COMPUTE
        last = kind is MiniTaskKind.COMBINE or (computes and source == target)
        if size and (computes or source != target):
            tasks[name] = _Task(name, size, (target,) if computes else (source, target), pace, last)

    for expert, host in enumerate(hosts_E.tolist()):
        owner = int(problem.owner_E[expert])
        add(problem.size_E[expert], MiniTaskKind.TRANS, expert, owner, host, pace=pace.trans_ED[expert, host])
        for source, size in enumerate(problem.tokens_DE[:, expert]):
            way = expert, source, host
            add(size, MiniTaskKind.DISPATCH, *way, pace=pace.dispatch_EDD[way])
            add(size, MiniTaskKind.COMPUTE, *way, pace=pace.compute_EDD[way])
            add(size, MiniTaskKind.COMBINE, expert, host, source, pace=pace.combine_EDD[way])
    slot = 0
    while any(task.left for task in tasks.values()):
        _fill(problem, tasks, problem.weight(slot))
        slot += 1
    return {name: task.amounts for name, task in tasks.items()}


def _fill(problem: Problem, tasks: dict[MiniTask, _Task], weight: float) -> None:
    available = {}
    free = {}
    for name, task in tasks.items():
        expert, kind, source, target = name
        waits_for = {
            MiniTaskKind.COMPUTE: MiniTask(expert, MiniTaskKind.DISPATCH, source, target),
            MiniTaskKind.COMBINE: MiniTask(expert, MiniTaskKind.COMPUTE, target, source),
        }.get(kind)
        ready = tasks[waits_for].done if waits_for in tasks else task.size
        moving = tasks.get(MiniTask(expert, MiniTaskKind.TRANS, int(problem.owner_E[expert]), target))
        blocked = kind is MiniTaskKind.COMPUTE and moving is not None and moving.left
        available[name] = 0.0 if blocked else ready - task.done
        free[task.resource] = problem.compute_D[target] if len(task.resource) == 1 else problem.link_DD[source, target]
    for task in sorted(tasks.values(), key=lambda task: task.rank(weight)):
        amount = min(available[task.name], free[task.resource])
        amount = task.left if task.left - amount <= 1e-9 * task.size else amount
        free[task.resource] = max(0.0, free[task.resource] - amount)
        task.left -= amount
        task.priority -= weight * amount
        task.amounts.append(amount)


def resources(problem: Problem) -> Iterator[tuple[Callable[[MiniTask], bool], float]]:
    """Yield each worker and link as the condition for its mini-tasks, with its capacity."""
    for target, room in enumerate(problem.compute_D.tolist()):
        yield lambda task, target=target: task.task is MiniTaskKind.COMPUTE and task.target == target, room
    for (source, target), room in np.ndenumerate(problem.link_DD):
        if source != target:
            yield (
                lambda task, ends=(source, target): task.task is not MiniTaskKind.COMPUTE and task[2:] == ends,
                float(room),
            )


@settings(max_examples=60)
@given(problems(), st.integers(0, 2**32 - 1))
def test_schedules_against_a_loop_over_mini_tasks(problem: Problem, seed: int) -> None:
    generator = np.random.default_rng(seed)
    workers = problem.num_workers
    experts = problem.num_experts
    hosts_E = generator.integers(0, workers, experts)
    way = (experts, workers, workers)
    pace = Pace(*(generator.uniform(1, 20, shape) for shape in (way, way[:2], way, way)))
    schedule = list_schedule(problem, hosts_E, pace)
    expected = reference_schedule(problem, hosts_E, pace)
    assert set(schedule.mini_tasks) == set(expected)
    for mini_task, amounts in zip(schedule.mini_tasks, schedule.amounts, strict=True):
        np.testing.assert_allclose(amounts, expected[mini_task], rtol=1e-6, atol=1e-6)
    last = [
        sum(row[-1] for row, mini_task in zip(schedule.amounts, schedule.mini_tasks, strict=True) if on(mini_task))
        / room
        for on, room in resources(problem)
    ]
    finish = finishes(problem, hosts_E[None], pace)[0]
    assert finish == pytest.approx(schedule.makespan - 1 + max(last) if expected else 0.0)


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
    broken = check(migrated_problem(), parse(MIGRATED.replace(old, new, 1)))
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
    (broken,) = check(migrated_problem(**changes), parse(MIGRATED))
    assert broken.startswith(f"{equation}: worker 0 has")


def test_schedules_as_text() -> None:
    schedule = parse(MIGRATED)
    assert str(schedule) == MIGRATED
    assert schedule.makespan == 4
    assert schedule.mini_tasks[1] == MiniTask(1, MiniTaskKind.TRANS, 1, 0)
    assert schedule.amounts[5] == (0.0, 0.0, 1.0, 1.0)


def amounts_of(problem: Problem, hosts: list[int]) -> dict[str, tuple[float, ...]]:
    """Return the amounts of each mini-task in each slot."""
    schedule = list_schedule(problem, np.array(hosts), Pace.eager(problem))
    return dict(zip(map(str, schedule.mini_tasks), schedule.amounts, strict=True))


def test_a_migration_that_has_begun_is_finished_first() -> None:
    # In the second slot, line 10 alone would prefer expert 1, which has more left to send
    problem = even_problem([[0, 0], [1, 1]], [0, 0], size_E=[3, 4], link_DD=[[2, 2], [2, 2]])
    amounts = amounts_of(problem, [1, 1])
    assert amounts["E0 TRANS 0>1"][:4] == (2.0, 1.0, 0.0, 0.0)
    assert amounts["E1 TRANS 0>1"][:4] == (0.0, 1.0, 2.0, 1.0)


def test_what_nothing_waits_for_is_done_last() -> None:
    # Worker 0 has its own tokens from the start, but computes the other worker's as they arrive
    problem = even_problem([[3], [3]], [0])
    amounts = amounts_of(problem, [0])
    assert amounts["E0 COMPUTE 1>0"] == (0.0, 1.0, 1.0, 1.0, 0.0, 0.0)
    assert amounts["E0 COMPUTE 0>0"] == (1.0, 0.0, 0.0, 0.0, 1.0, 1.0)


def test_nothing_that_others_wait_for_waits_for_a_way_back() -> None:
    # From the third slot on, ten tokens could go back to worker 1, but others are still to be computed there
    problem = even_problem([[0, 6], [10, 0]], [0, 1], link_DD=[[1, 1], [10, 1]], compute_D=[10, 10])
    amounts = amounts_of(problem, [0, 1])
    assert amounts["E1 DISPATCH 0>1"][:6] == (1.0,) * 6
    assert amounts["E0 COMBINE 0>1"] == (0.0,) * 6 + (1.0,) * 10
