"""The bench's planners of other systems: known plans, and properties of all plans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quota_planners import PLANNERS, Draft

TWO = np.array([0, 0, 1, 1])
"""Owners of four experts on two ranks."""


def plan(name: str, tokens: list[int], owner_E: np.ndarray, slots: int) -> list[list[int]] | None:
    """Return a planner's tokens [E, D] of experts on ranks."""
    ranks = int(owner_E.max()) + 1
    quotas_ED = PLANNERS[name](lambda: Draft(np.array(tokens), owner_E, ranks, slots))
    return None if quotas_ED is None else quotas_ED.tolist()


@pytest.mark.parametrize("name", ["ultraep", "interleaved"])
def test_the_largest_expert_gives_what_the_target_demands(name: str) -> None:
    # The mean is 100, so rank 0 keeps 101 of 140 tokens
    assert plan(name, [90, 50, 40, 20], TWO, 1) == [[51, 39], [50, 0], [0, 40], [0, 20]]
    # One slot takes 10 of ten equal experts
    loads = np.sum(plan(name, [10] * 10 + [0] * 10, np.repeat([0, 1], 10), 1), axis=0).tolist()
    assert loads == [90, 10]


def test_alias_is_exact() -> None:
    assert plan("alias", [91, 50, 40, 20], TWO, 1) == [[51, 40], [50, 0], [0, 40], [0, 20]]
    # A gap takes two experts of one donor
    assert plan("alias", [30, 30, 20, 0, 0, 0], np.repeat([0, 1], 3), 2) == [
        [0, 30],
        [20, 10],
        *[[20, 0], [0, 0]],
        *[[0, 0]] * 2,
    ]
    assert plan("alias", [30, 30, 20, 0, 0, 0], np.repeat([0, 1], 3), 1) is None
    # Rank 0 closes the gap of rank 2, and then has one itself, which rank 1 closes
    assert plan("alias", [50, 40, 0], np.arange(3), 1) == [[20, 0, 30], [10, 30, 0], [0, 0, 0]]


@given(st.data(), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3))
def test_plans_keep_tokens_and_slots(data: st.DataObject, ranks: int, homes: int, slots: int) -> None:
    size = ranks * homes
    tokens = data.draw(st.lists(st.integers(1, 1000), min_size=size, max_size=size))
    owner_E = np.array(data.draw(st.permutations(np.repeat(np.arange(ranks), homes).tolist())))
    most = np.bincount(owner_E, tokens).max()
    for name in PLANNERS:
        quotas = plan(name, tokens, owner_E, slots)
        if quotas is None:
            assert name == "alias"
            continue
        quotas_ED = np.array(quotas)
        guests_ED = (quotas_ED > 0) & (owner_E[:, None] != np.arange(ranks))
        assert (quotas_ED >= 0).all() and quotas_ED.sum(1).tolist() == tokens
        assert guests_ED.sum(0).max() <= slots and quotas_ED.sum(0).max() <= max(most, -(-sum(tokens) // ranks))
