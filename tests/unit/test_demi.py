"""DEMI's programs and search: bounds from both sides, cases solved by hand, placements within all limits."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.demi import neighborhood
from megatron_balance.planning.demi.listing import Pace, finishes, list_schedule
from megatron_balance.planning.demi.neighborhood import neighbors, soft_maxima, times
from megatron_balance.planning.demi.problem import Problem
from megatron_balance.planning.demi.program import Program
from megatron_balance.planning.demi.search import (
    MOST_VARIABLES,
    best_pace,
    draw,
    relax_by_size,
    repair,
    round_shares,
    solve,
)
from megatron_balance.planning.policies.demi import Demi
from megatron_balance.profile.cluster import Ranks, load_profile
from megatron_balance.workloads.synthetic import load_matrix
from tests.unit.demi_check import check
from tests.unit.demi_problems import even_problem, instance, problems


def placements_of(problem: Problem) -> np.ndarray:
    """Return all placements within all limits, [B, E]."""
    workers = range(problem.num_workers)
    hosts_BE = np.array(list(itertools.product(workers, repeat=problem.num_experts)))
    return hosts_BE[problem.fits(hosts_BE)]


@pytest.mark.parametrize(
    ("problem", "objective"),
    [
        # Local tokens are computed at once; others are sent, computed and sent back in one slot each
        (even_problem([[0.5], [0.25]], [0], guests=0), 0.5 * 1 + 0.25 * (1 + 2 + 4)),
        # Half a token is computed per slot: remote tokens first, because sending them back later costs more
        (even_problem([[0.5], [0.5]], [0], guests=0, compute_D=[0.5, 1], slots=4), 0.5 * 1 + 0.5 * (1 + 2 + 4)),
        # A quarter of a token is computed per slot and sent back one slot later
        (even_problem([[0], [0.5]], [0], guests=0, compute_D=[0.25, 1]), 0.5 * 1 + 0.25 * (2 + 4) + 0.25 * (4 + 8)),
        # The way back is slow
        (
            even_problem([[0], [0.5]], [0], guests=0, link_DD=[[1, 0.25], [1, 1]], slots=4),
            0.5 * 1 + 0.5 * 2 + 0.25 * (4 + 8),
        ),
        # The link carries half of the tokens per slot
        (even_problem([[0], [0.5]], [0], guests=0, link_DD=np.full((2, 2), 0.25), slots=4), 0.25 * (7 + 14)),
        # No room at the owner: the expert migrates, and its tokens wait for it
        (even_problem([[0], [1]], [0], token_room_D=[0, 1]), 1 * 1 + 1 * 2),
        (even_problem([[0], [1]], [0], token_room_D=[0, 1], weights="linear"), 1 * 1 + 1 * 2),
        # Half of the expert arrives in the first slot; from then on, half of the tokens may be computed
        (
            even_problem([[0], [1]], [0], token_room_D=[0, 1], link_DD=np.full((2, 2), 0.5)),
            0.5 * (1 + 2) + 0.5 * (2 + 4),
        ),
        # The expert is cheaper where its tokens are: 1 to move it and 4 to wait, instead of 7 per token
        (even_problem([[0], [2]], [0], link_DD=np.full((2, 2), 2.0), compute_D=[2, 2]), 1 + 2 * 2),
    ],
)
def test_the_program_on_cases_solved_by_hand(problem: Problem, objective: float) -> None:
    relaxed = Program(problem).solve()
    assert relaxed is not None
    assert relaxed.objective == pytest.approx(objective)


@settings(max_examples=40)
@given(problems(most_workers=3, most_experts=4))
def test_the_program_is_a_bound_of_every_schedule(problem: Problem) -> None:
    relaxed = Program(problem).solve()
    hosts_BE = placements_of(problem)
    schedules = [list_schedule(problem, hosts_E, Pace.eager(problem)) for hosts_E in hosts_BE]
    costs = [
        np.sum(np.array(schedule.amounts) @ [problem.weight(slot) for slot in range(schedule.makespan)])
        for schedule in schedules
        if 0 < schedule.makespan <= problem.slots
    ]
    if relaxed is None:
        assert not costs
        return
    slack = 1e-6 * max(1.0, relaxed.objective)
    assert relaxed.objective <= min(costs, default=math.inf) + slack
    share_ED = relaxed.share_ED
    assert share_ED.min() >= 0
    np.testing.assert_allclose(share_ED.sum(1), 1)
    foreign_ED = problem.owner_E[:, None] != np.arange(problem.num_workers)
    assert problem.guests is None or ((share_ED * foreign_ED).sum(0) <= problem.guests + 1e-6).all()
    assert (problem.load_E @ share_ED <= problem.token_room_D * (1 + 1e-6) + 1e-6).all()
    assert (problem.size_E @ share_ED <= problem.expert_room_D * (1 + 1e-6) + 1e-6).all()


def test_the_paper_setting() -> None:
    counts_DE = load_matrix("hot_rank", 4, 16, 2, 4000, 0, 0)
    # The paper's setting 1: four workers of one V100 server, of which only rooms bound the experts
    ranks = Ranks(num_ranks=4, node_size=4, ranks_per_node=4)
    profile = load_profile(Path(__file__).parents[2] / "configs/clusters/demi.yaml", ranks, 500, 1000, 4)
    cost = CostModel(profile, token_bytes=2000, param_bytes=7.64e6, grad_bytes=7.64e6)
    problem = dataclasses.replace(Demi().problem(counts_DE, Placement.identity(16, 4, 16), cost), guests=None)
    assert problem.slots == 5 and problem.guests is None
    # Half of all tokens and half of all experts, and links of 100 Gb/s that a worker divides among three others
    assert problem.token_room_D.min() == pytest.approx(4 * 4000 * 2 * 2000 / 2)
    assert problem.expert_room_D == pytest.approx(problem.size_E.sum() / 2)
    seconds = problem.link_DD[0, 1] / (12.5e9 / 3)
    assert problem.compute_D == pytest.approx(seconds * 2000 * 14e12 / (1.5 * 4 * 500 * 1000))
    assert Program(problem).solve() is not None


@pytest.mark.parametrize("workers", [4, 16])
def test_the_program_is_omitted_for_large_sizes(workers: int) -> None:
    tokens = np.random.default_rng(0).uniform(0, 1, (workers, 64))
    owners = np.repeat(range(workers), 64 // workers).tolist()
    capacities = {"link_DD": np.full((workers, workers), 100.0), "compute_D": np.full(workers, 100.0)}
    problem = even_problem(tokens.tolist(), owners, slots=5, **capacities)
    assert (5 * workers * (64 + 3 * workers) <= MOST_VARIABLES) == (workers == 4)
    assert (relax_by_size(problem) is None) == (workers == 16)


def test_draws_follow_the_shares() -> None:
    share_ED = np.array([[0.5, 0.5, 0], [0, 0.2, 0.8], [1, 0, 0]])
    hosts_BE = draw(share_ED, 2000, seed=3)
    assert (hosts_BE == draw(share_ED, 2000, seed=3)).all() and (hosts_BE != draw(share_ED, 2000, seed=4)).any()
    drawn_ED = np.stack([np.bincount(column, minlength=3) / 2000 for column in hosts_BE.T])
    np.testing.assert_allclose(drawn_ED, share_ED, atol=0.04)
    assert (drawn_ED[share_ED == 0] == 0).all()


def test_experts_without_tokens_are_not_drawn() -> None:
    problem = even_problem([[1, 0], [1, 0]], [0, 0])
    hosts_BE = round_shares(problem, np.array([[0.1, 0.9], [0.1, 0.9]]))
    assert hosts_BE[0].tolist() == [1, 0]
    assert (hosts_BE[:, 1] == 0).all() and (hosts_BE[1:, 0] == 1).any()


@settings(max_examples=100)
@given(problems(), st.integers(0, 2**32 - 1))
def test_repair_makes_placements_fit(problem: Problem, seed: int) -> None:
    hosts_E = np.random.default_rng(seed).integers(0, problem.num_workers, problem.num_experts)
    repaired = repair(problem, hosts_E)
    if problem.fits(hosts_E[None])[0]:
        assert repaired is not None and (repaired == hosts_E).all()
    elif repaired is not None:
        assert problem.fits(repaired[None])[0]
    else:
        assert problem.num_workers > 1


@settings(max_examples=60)
@given(problems(), st.integers(0, 2**32 - 1))
def test_parts_are_experts_of_a_problem(whole: Problem, seed: int) -> None:
    parts_E = np.random.default_rng(seed).integers(1, 4, whole.num_experts)
    problem = whole.divided(parts_E)
    assert (problem.whole_E == np.repeat(np.arange(whole.num_experts), parts_E)).all()
    for expert, parts in enumerate(parts_E.tolist()):
        of_expert_P = problem.whole_E == expert
        expected_DP = np.repeat(whole.tokens_DE[:, [expert]] / parts, parts, axis=1)
        assert (problem.tokens_DE[:, of_expert_P] == expected_DP).all()
        assert (problem.owner_E[of_expert_P] == whole.owner_E[expert]).all()
        assert (problem.size_E[of_expert_P] == whole.size_E[expert]).all()
    found = solve(problem, None)
    assert problem.fits(found.hosts_BE).all() and problem.fits(problem.owner_E[None])[0]
    alone = whole.divided(np.ones_like(parts_E))
    assert (solve(alone, None).hosts_BE == solve(whole, None).hosts_BE).all()


def test_a_large_expert_is_shared() -> None:
    # A worker computes one token per slot
    problem = even_problem([[6, 0]] * 3, [0, 1], size_E=[0.25, 0.25], link_DD=np.full((3, 3), 4.0))
    finish = {parts: solve(problem.divided(np.array([parts, 1])), None).finish_B[0] for parts in (1, 2, 3)}
    assert finish[3] < 0.5 * finish[1] and finish[3] < finish[2] < finish[1]


def test_repair_moves_the_lightest_expert_to_the_least_loaded_worker() -> None:
    tokens = [[5, 3, 1, 2]] * 3
    problem = even_problem(tokens, [0, 0, 1, 2], token_room_D=[20, 33, 33])
    repaired = repair(problem, problem.owner_E)
    assert repaired is not None and repaired.tolist() == [0, 1, 1, 2]
    crowded = even_problem(tokens, [0, 0, 1, 2], token_room_D=[20, 3, 6])
    assert repair(crowded, crowded.owner_E) is None
    foreign = even_problem(tokens, [0, 0, 1, 2], guests=1)
    repaired = repair(foreign, np.array([1, 1, 1, 2]))
    assert repaired is not None and repaired.tolist() == [1, 0, 1, 2]
    with pytest.raises(ValueError, match="no placement was found"):
        solve(crowded, None)


@settings(max_examples=40)
@given(problems(), st.booleans())
def test_solutions_fit_and_are_no_longer_than_the_owners(problem: Problem, with_program: bool) -> None:
    relaxed = relax_by_size(problem) if with_program else None
    found = solve(problem, relaxed)
    again = solve(problem, relaxed)
    assert (found.hosts_BE == again.hosts_BE).all() and (found.finish_B == again.finish_B).all()
    assert problem.fits(found.hosts_BE).all()
    assert len(np.unique(found.hosts_BE, axis=0)) == len(found.hosts_BE)
    assert (np.diff(found.finish_B) >= 0).all()
    assert found.finish_B[0] <= best_pace(problem, problem.owner_E[None], relaxed)[1][0] * (1 + 1e-9)
    schedule = list_schedule(problem, found.hosts_BE[0], found.pace)
    assert schedule.makespan == math.ceil(found.finish_B[0]) and check(problem, schedule) == []


@settings(max_examples=60)
@given(problems(), st.integers(0, 2**32 - 1))
def test_busy_times_are_bounds(problem: Problem, seed: int) -> None:
    hosts_BE = np.random.default_rng(seed).integers(0, problem.num_workers, (3, problem.num_experts))
    finish_B = finishes(problem, hosts_BE, Pace.eager(problem))
    for hosts_E, finish in zip(hosts_BE, finish_B, strict=True):
        busy = times(problem, hosts_E)
        assert busy.longest <= finish * (1 + 1e-9) + 1e-9
        assert busy.longest <= busy.soft_maximum * (1 + 1e-9)


def test_busy_times_of_a_migration() -> None:
    problem = even_problem([[1, 2], [3, 4]], [0, 1], size_E=[5, 6], link_DD=[[1, 2], [4, 1]], compute_D=[1, 2])
    busy = times(problem, np.array([1, 1]))
    # Expert 0 migrates, so worker 1 computes everything
    assert busy.link_DD.tolist() == [[0, (1 + 2 + 5) / 2], [(1 + 2) / 4, 0]]
    assert busy.compute_D.tolist() == [0, 5]
    assert busy.expert_E.tolist() == [5 / 2 + 4 / 2, 0]
    assert busy.soft_maximum == pytest.approx((4**4 + 0.75**4 + 5**4 + 4.5**4) ** 0.25)


@pytest.mark.parametrize("most", [neighborhood.NEIGHBORS, 0])
@settings(max_examples=60)
@given(problem=problems(), seed=st.integers(0, 2**32 - 1))
def test_neighbors_are_the_moves_and_exchanges_that_fit(most: int, problem: Problem, seed: int) -> None:
    hosts_E = repair(problem, np.random.default_rng(seed).integers(0, problem.num_workers, problem.num_experts))
    assume(hosts_E is not None)
    assert hosts_E is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighborhood, "NEIGHBORS", most)
        steps = neighbors(problem, hosts_E)
    around_BE = steps.hosts(hosts_E)
    near = {tuple(other_E.tolist()) for other_E in placements_near(hosts_E, problem.num_workers)}
    found = {tuple(other_E.tolist()) for other_E in around_BE}
    assert found <= near and problem.fits(around_BE).all()
    if most:
        assert found == {other for other in near if problem.fits(np.array([other]))[0]}
    expected_B = [times(problem, other_E).soft_maximum for other_E in around_BE]
    np.testing.assert_allclose(soft_maxima(problem, hosts_E, steps), expected_B, rtol=1e-9)


def placements_near(hosts_E: np.ndarray, workers: int) -> Iterator[np.ndarray]:
    """Yield the placements with one expert moved or two experts of different workers exchanged."""
    for expert, host in itertools.product(range(len(hosts_E)), range(workers)):
        if host != hosts_E[expert]:
            moved_E = hosts_E.copy()
            moved_E[expert] = host
            yield moved_E
    for left, right in itertools.combinations(range(len(hosts_E)), 2):
        if hosts_E[left] != hosts_E[right]:
            exchanged_E = hosts_E.copy()
            exchanged_E[[left, right]] = hosts_E[[right, left]]
            yield exchanged_E


def test_large_problems_relieve_the_busiest_worker() -> None:
    tokens = np.random.default_rng(0).lognormal(0, 1, (16, 64)).tolist()
    problem = even_problem(tokens, np.repeat(range(16), 4).tolist(), guests=2)
    steps = neighbors(problem, problem.owner_E)
    busiest = problem.use(problem.owner_E[None])[0].argmax()
    assert (steps.source_A == busiest).all() and (steps.expert_A != steps.other_A).any()
    expected_B = [times(problem, other_E).soft_maximum for other_E in steps.hosts(problem.owner_E)]
    np.testing.assert_allclose(soft_maxima(problem, problem.owner_E, steps), expected_B, rtol=1e-9)


def test_solutions_are_close_to_the_shortest_schedule() -> None:
    ratios = []
    for seed in range(1000, 1025):
        problem = instance(seed)
        found = solve(problem, relax_by_size(problem))
        least = finishes(problem, placements_of(problem), Pace.eager(problem)).min()
        ratios.append(found.finish_B[0] / max(least, 1e-9))
    assert max(ratios) <= 1.5 and np.mean(ratios) <= 1.05


def test_faster_workers_and_links_and_smaller_experts_are_preferred() -> None:
    # Worker 0 owns two heavy experts and may keep one of them
    tokens = [[4, 4, 0, 0], [4, 4, 0, 0], [4, 4, 0, 0]]

    def lent(**changes: object) -> list[int]:
        problem = even_problem(tokens, [0, 0, 1, 2], slots=8, **{"link_DD": np.full((3, 3), 4.0)} | changes)
        return solve(problem, relax_by_size(problem)).hosts_BE[0][:2].tolist()

    slow = np.full((3, 3), 4.0)
    slow[0, 1] = slow[1, 0] = 0.5
    assert sorted(lent(compute_D=[2, 1, 3])) == [0, 2]
    assert sorted(lent(compute_D=[2, 3, 1])) == [0, 1]
    assert sorted(lent(compute_D=[2, 2, 2], link_DD=slow)) == [0, 2]
    for large in (0, 1):
        sizes = np.where(np.arange(4) == large, 30, 1)
        hosts = lent(compute_D=[2, 2, 2], size_E=sizes, expert_room_D=[40, 40, 40])
        assert hosts[large] == 0 and hosts[1 - large] in (1, 2)
