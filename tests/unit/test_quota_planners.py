"""The benches' references of other planners: known plans, properties of all plans, and published figures."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pareto_plans
import quota_planners
from quota_planners import BOUNDED, PLANNERS, fewest_copies, floor_of, guests_of, limit_of

TWO = np.array([0, 0, 1, 1])
"""Owners of four experts on two ranks."""


def plan(name: str, tokens: list[int], owner_E: np.ndarray, slots: int, **options: float) -> list[list[int]]:
    """Return the quotas [E, D] of a planner."""
    ranks = int(owner_E.max()) + 1
    return PLANNERS[name](np.array(tokens), owner_E, ranks, slots, **options).tolist()


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Draw tokens [E], owners [E], the number of ranks and the number of slots."""
    ranks = draw(st.integers(1, 5))
    home = draw(st.integers(1, 3))
    slots = draw(st.integers(0, 3))
    size = ranks * home
    tokens = draw(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 10_000)), min_size=size, max_size=size))
    owners = draw(st.permutations(np.repeat(np.arange(ranks), home).tolist()))
    return np.array(tokens), np.array(owners), ranks, slots


class TestKnownPlans:
    @pytest.mark.parametrize(
        ("tokens", "ranks", "target", "limit"),
        [
            (400, 4, 1.01, 101),
            (399, 4, 1.01, 100),  # 100.7475
            (402, 4, 1.0, 101),  # the mean is 100.5
            (402, 4, 1.001, 101),
            (1000, 1, 1.001, 1001),  # 1000.9999999999999 in floating point
            (0, 2, 1.5, 0),
        ],
    )
    def test_a_limit_is_the_target_rounded_down_but_at_least_the_mean(
        self, tokens: int, ranks: int, target: float, limit: int
    ) -> None:
        assert limit_of(tokens, ranks, target) == limit

    @pytest.mark.parametrize("name", ["ultraep", "interleaved", "with_alias"])
    def test_the_largest_expert_gives_what_the_target_demands(self, name: str) -> None:
        # The mean is 100, so rank 0 keeps 101 of 140 tokens
        assert plan(name, [90, 50, 40, 20], TWO, 1) == [[51, 39], [50, 0], [0, 40], [0, 20]]
        assert plan(name, [90, 50, 40, 20], TWO, 1, target=1.2) == [[70, 20], [50, 0], [0, 40], [0, 20]]

    def test_moonep_is_exact_and_the_first_ranks_have_the_rest(self) -> None:
        assert plan("moonep", [91, 50, 40, 20], TWO, 1) == [[51, 40], [50, 0], [0, 40], [0, 20]]

    def test_moonep_closes_a_gap_with_several_experts_of_one_donor(self) -> None:
        assert plan("moonep", [30, 30, 0, 0], TWO, 2) == [[0, 30], [30, 0], [0, 0], [0, 0]]
        assert plan("moonep", [20, 20, 20, 0, 0, 0], np.repeat([0, 1], 3), 2)[:3] == [[0, 20], [10, 10], [20, 0]]

    def test_moonep_closes_what_it_can_if_slots_do_not_suffice(self) -> None:
        assert plan("moonep", [20, 20, 20, 0, 0, 0], np.repeat([0, 1], 3), 1)[:3] == [[0, 20], [20, 0], [20, 0]]

    def test_moonep_lets_a_donor_receive_later(self) -> None:
        # Rank 0 closes the gap of rank 2 first, and then has one itself, which rank 1 closes
        assert plan("moonep", [50, 40, 0], np.arange(3), 1) == [[20, 0, 30], [10, 30, 0], [0, 0, 0]]

    def test_llep_lets_the_largest_expert_leave_in_pieces(self) -> None:
        # The capacity is 30: the owner keeps none of the largest expert, because the small ones are still to come
        owner_E = np.array([0, 0, 1, 1, 2, 2])
        quotas = plan("llep", [40, 30, 10, 0, 5, 5], owner_E, 1)
        assert quotas == [[0, 20, 20], [30, 0, 0], [0, 10, 0], [0, 0, 0], [0, 0, 5], [0, 0, 5]]

    def test_llep_keeps_what_no_slot_takes(self) -> None:
        assert plan("llep", [40, 20, 0, 0], TWO, 0) == [[40, 0], [20, 0], [0, 0], [0, 0]]

    def test_eplb_splits_replicas_equally(self) -> None:
        # The largest expert has a replica on each rank, the next one has two, and the last slot is that of rank 0
        assert plan("eplb", [80, 9, 8], np.arange(3), 1) == [[27, 27, 26], [4, 5, 0], [0, 0, 8]]

    def test_eplb_puts_replicas_on_the_least_loaded_rank_and_drops_the_last(self) -> None:
        # Three replicas each, but two ranks have the last slots for three guests, and one of them owns the expert
        quotas = plan("eplb", [60, 50, 8, 0], np.arange(4), 1)
        assert quotas == [[20, 0, 20, 20], [25, 25, 0, 0], [0, 0, 8, 0], [0, 0, 0, 0]]

    def test_ultraep_bisects_where_the_first_targets_do_not_fit(self) -> None:
        # One slot takes 10 of ten equally hot experts
        tokens = [10] * 10 + [0] * 10
        owner_E = np.repeat([0, 1], 10)
        for name in ("ultraep", "interleaved", "moonep", "llep"):
            loads = np.sum(plan(name, tokens, owner_E, 1), axis=0).tolist()
            assert loads == [90, 10]


class TestProperties:
    @given(problems())
    @settings(max_examples=150, deadline=None)
    def test_plans_keep_tokens_and_slots_and_are_not_worse_than_none(
        self, problem: tuple[np.ndarray, np.ndarray, int, int]
    ) -> None:
        tokens_E, owner_E, ranks, slots = problem
        most = np.bincount(owner_E, weights=tokens_E, minlength=ranks).max()
        for name, planner in PLANNERS.items():
            quotas_ED = planner(tokens_E.copy(), owner_E, ranks, slots)
            assert quotas_ED.dtype == np.int64 and (quotas_ED >= 0).all(), name
            np.testing.assert_array_equal(quotas_ED.sum(1), tokens_E, err_msg=name)
            assert guests_of(quotas_ED, owner_E).sum(0).max() <= slots, name
            assert floor_of(tokens_E, owner_E, ranks, slots) <= quotas_ED.sum(0).max(), name
            # EPLB fills its slots even if that makes the heaviest rank heavier
            assert name == "eplb" or quotas_ED.sum(0).max() <= most, name

    @given(problems(), st.sampled_from([1.0, 1.005, 1.05, 1.3, 2.0]))
    @settings(max_examples=150, deadline=None)
    def test_a_plan_within_a_target_has_at_least_the_fewest_copies(
        self, problem: tuple[np.ndarray, np.ndarray, int, int], target: float
    ) -> None:
        tokens_E, owner_E, ranks, slots = problem
        fewest = fewest_copies(tokens_E, owner_E, ranks, target)
        limit = limit_of(int(tokens_E.sum()), ranks, target)
        for name, planner in BOUNDED.items():
            quotas_ED = planner(tokens_E, owner_E, ranks, slots, target=target)
            if quotas_ED.sum(0).max() <= limit:
                assert guests_of(quotas_ED, owner_E).sum() >= fewest, name

    @given(problems())
    @settings(max_examples=100, deadline=None)
    def test_moonep_is_exact_with_as_many_slots_as_home_experts(
        self, problem: tuple[np.ndarray, np.ndarray, int, int]
    ) -> None:
        tokens_E, owner_E, ranks, _ = problem
        quotas_ED = quota_planners.moonep(tokens_E, owner_E, ranks, len(tokens_E) // ranks)
        assert quotas_ED.sum(0).max() == -(-tokens_E.sum() // ranks)
        for guests_E in guests_of(quotas_ED, owner_E).T:
            assert len({*owner_E[guests_E].tolist()}) <= 1


def every_plan(tokens_E: np.ndarray, owner_E: np.ndarray, ranks: int, slots: int) -> Iterator[tuple[int, int]]:
    """Yield the heaviest rank's tokens and the number of guests, for the best quotas with each choice of guests.

    Tokens that only the ranks of a set may compute are on one of these; by Hall's theorem nothing else binds.
    """
    choices = [
        [
            guests
            for size in range(slots + 1)
            for guests in itertools.combinations(np.flatnonzero(owner_E != rank), size)
        ]
        for rank in range(ranks)
    ]
    groups = [group for size in range(1, ranks + 1) for group in itertools.combinations(range(ranks), size)]
    outside_GD = np.array([[rank not in group for rank in range(ranks)] for group in groups])
    sizes_G = (~outside_GD).sum(1)
    for chosen in itertools.product(*choices):
        hosts_DE = owner_E == np.arange(ranks)[:, None]
        for rank, guests in enumerate(chosen):
            hosts_DE[rank, list(guests)] = True
        confined_G = ~(outside_GD.astype(int) @ hosts_DE).astype(bool) @ tokens_E
        yield int((-(-confined_G // sizes_G)).max()), sum(map(len, chosen))


class TestFloors:
    @pytest.mark.parametrize(
        ("ranks", "home", "slots"), [(2, 3, 1), (2, 4, 2), (3, 2, 1), (3, 2, 2), (4, 1, 1), (3, 3, 1)]
    )
    def test_floors_are_not_above_the_best_of_all_plans(self, ranks: int, home: int, slots: int) -> None:
        owner_E = np.repeat(np.arange(ranks), home)
        tight = []
        for seed in range(12):
            generator = np.random.default_rng(seed)
            tokens_E = generator.integers(0, 100, ranks * home) * np.where(owner_E == 0, 1 + seed % 6, 1)
            plans = list(every_plan(tokens_E, owner_E, ranks, slots))
            least = min(plans)[0]
            floor = floor_of(tokens_E, owner_E, ranks, slots)
            assert floor <= least
            tight.append(floor == least)
            for target in (1.0, 1.05, 1.3):
                limit = limit_of(int(tokens_E.sum()), ranks, target)
                if least <= limit:
                    fewest = min(copies for load, copies in plans if load <= limit)
                    assert fewest_copies(tokens_E, owner_E, ranks, target) <= fewest
        assert np.mean(tight) > 0.7

    @pytest.mark.parametrize(("slots", "kept"), [(1, 25), (2, 18), (4, 4)])
    def test_equally_hot_experts_of_one_rank_leave_one_per_slot(self, slots: int, kept: int) -> None:
        tokens_E = np.repeat([100, 1], [32, 224])
        owner_E = np.repeat(np.arange(8), 32)
        assert floor_of(tokens_E, owner_E, 8, slots) == max(100 * kept, -(-tokens_E.sum() // 8))

    @pytest.mark.parametrize(
        ("tokens", "ranks", "floor"),
        [
            # One guest of 10 tokens leaves rank 0; the only other slot is its own
            ([10] * 10 + [60] + [0] * 9, 2, 90),
            # Three ranks with 100 tokens need two guests each to have 90, but there are four slots
            ([5] * 60 + [60] + [0] * 19, 4, 95),
            # Two of them need one guest each
            ([5] * 20 + [10] * 10 + [0] * 10 + [10] * 10 + [0] * 10 + [60] + [0] * 19, 4, 90),
            # No rank is above the mean
            ([3] * 4, 2, 6),
            ([0] * 4, 2, 0),
        ],
    )
    def test_guests_of_heavy_ranks_need_slots(self, tokens: list[int], ranks: int, floor: int) -> None:
        owner_E = np.repeat(np.arange(ranks), len(tokens) // ranks)
        assert floor_of(np.array(tokens), owner_E, ranks, 1) == floor

    def test_all_excess_needs_receivers(self) -> None:
        assert fewest_copies(np.array([150, 90, 90, 90, 90, 90]), np.arange(6), 6, 1.0) == 5
        assert fewest_copies(np.array([150, 90, 90, 90, 90, 90]), np.arange(6), 6, 1.1) == 2
        assert fewest_copies(np.array([150, 90, 90, 90, 90, 90]), np.arange(6), 6, 1.5) == 0

    def test_the_solver_finds_the_best_of_all_plans(self) -> None:
        for seed in range(3):
            generator = np.random.default_rng(seed)
            load = pareto_plans.Load(generator.integers(0, 100, (3, 6)) * np.repeat([5, 1], [2, 4]))
            least = min(every_plan(load.tokens_E, load.owner_E, 3, 1))[0]
            ratio = pareto_plans.least_ratio(load, 1)
            assert ratio * load.counts_DE.sum() / 3 == pytest.approx(least, abs=1)


class TestScores:
    def test_a_placement_of_quotas_gives_each_rank_its_tokens(self) -> None:
        generator = np.random.default_rng(0)
        load = pareto_plans.Load(generator.integers(0, 100, (4, 8)) * np.repeat([1, 5, 1], [2, 2, 4]))
        cost = pareto_plans.model(pareto_plans.priced(4, 0.0), "proportional")
        for name, planner in PLANNERS.items():
            quotas_ED = planner(load.tokens_E, load.owner_E, 4, 2)
            placement = pareto_plans.placement_of(quotas_ED, load.placement(2))
            tokens_D = cost.traffic(load.counts_DE, placement).sum((0, 1))
            np.testing.assert_allclose(tokens_D, quotas_ED.sum(0), rtol=1e-12, err_msg=name)
            assert placement.added_hosts == guests_of(quotas_ED, load.owner_E).sum()

    def test_a_score_counts_guests_by_expert_owner_and_rank(self) -> None:
        # Rank 2 has a guest of each expert of the others, and rank 1 one of expert 0
        quotas_ED = np.array([[4, 3, 3], [5, 0, 5], [0, 9, 1], [0, 8, 2], [0, 0, 1], [0, 0, 0]])
        load = pareto_plans.Load(np.stack([quotas_ED.sum(1), *[0 * quotas_ED.sum(1)] * 2]))
        score = pareto_plans.reference(lambda *_: quotas_ED, load, 4)
        assert score._replace(milliseconds=0) == (20 * 3 / 41, 5, 2, 3, 4, 0)

    def test_policies_weigh_prices(self) -> None:
        load = next(pareto_plans.loads_of(8, 1))
        free, dear = (pareto_plans.policy("quota", load, 2, price) for price in (0.0, 10.0))
        assert free.ratio < 1.01 and free.copies
        assert dear[:-1] == pareto_plans.policy("none", load, 2)[:-1] and not dear.copies

    def test_loads_repeat_and_have_the_tokens_of_every_rank(self) -> None:
        once, again = (list(pareto_plans.loads_of(8, 2)) for _ in range(2))
        assert len(once) * len(pareto_plans.RANKS) == 96
        for load, same in zip(once, again, strict=True):
            np.testing.assert_array_equal(load.counts_DE, same.counts_DE)
            assert (load.counts_DE.sum(1) == pareto_plans.TOKENS * pareto_plans.TOPK).all()
        assert len({load.counts_DE.tobytes() for load in once}) == len(once)


@pytest.fixture(scope="module")
def loads() -> list[pareto_plans.Load]:
    return [load for ranks in pareto_plans.RANKS for load in pareto_plans.loads_of(ranks, 2)]


def means(name: str, loads: list[pareto_plans.Load], slots: int) -> tuple[float, float]:
    """Return a planner's mean max/mean and its mean number of copies."""
    scores = [pareto_plans.reference(PLANNERS[name], load, slots) for load in loads]
    return float(np.mean([score.ratio for score in scores])), float(np.mean([score.copies for score in scores]))


class TestFigures:
    def test_interleaving_is_more_even_than_donors_in_order(self, loads: list[pareto_plans.Load]) -> None:
        (ours, copies), (theirs, _) = (means(name, loads, 1) for name in ("interleaved", "ultraep"))
        assert ours == pytest.approx(1.024, abs=0.01) and theirs > ours + 0.01
        assert copies == pytest.approx(52, rel=0.1)

    def test_interleaving_needs_fewer_copies_than_donors_in_order(self, loads: list[pareto_plans.Load]) -> None:
        (ours, copies), (theirs, more) = (means(name, loads, 2) for name in ("interleaved", "ultraep"))
        assert ours == pytest.approx(1.01, abs=0.002) and theirs == pytest.approx(1.016, abs=0.005)
        assert copies == pytest.approx(56, rel=0.1) and more == pytest.approx(62, rel=0.1)

    @pytest.mark.parametrize("target", [1.005, 1.02])
    def test_quota_never_needs_more_copies_than_another_planner(
        self, loads: list[pareto_plans.Load], target: float
    ) -> None:
        copies = []
        for load in loads:
            ours = pareto_plans.reference(pareto_plans.fitted, load, 2, target=target)
            others = [pareto_plans.reference(planner, load, 2, target=target) for planner in BOUNDED.values()]
            assert ours.ratio <= target
            assert all(ours.copies <= other.copies for other in others if other.ratio <= target)
            copies.append(ours.copies)
        assert np.mean(copies) <= 0.9 * means("moonep", loads, 2)[1]

    def test_exact_plans_replace_those_of_higher_targets(self, loads: list[pareto_plans.Load]) -> None:
        for load in loads[::8]:
            ratio = pareto_plans.reference(quota_planners.with_alias, load, 1).ratio
            exact = pareto_plans.reference(quota_planners.moonep, load, pareto_plans.EXPERTS)
            assert ratio <= (
                1.01 if exact.received <= 1 else pareto_plans.reference(quota_planners.interleaved, load, 1).ratio
            )

    @pytest.mark.parametrize(("slots", "share"), [(1, 0.83), (2, 1.0)])
    def test_moonep_fits_the_slots_of_most_loads(
        self, loads: list[pareto_plans.Load], slots: int, share: float
    ) -> None:
        scores = [pareto_plans.reference(quota_planners.moonep, load, pareto_plans.EXPERTS) for load in loads]
        assert all(score.ratio == pytest.approx(1, abs=1e-4) for score in scores)
        assert np.mean([score.received <= slots for score in scores]) == pytest.approx(share, abs=0.1)
