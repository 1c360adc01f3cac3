"""Synthetic workloads: valid choices, the same in any layout, and as unbalanced as their names say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.workloads.synthetic import NAMES, load_matrix, workload_choices

names = st.sampled_from(NAMES)


@given(names, st.integers(1, 40), st.data(), st.integers(0, 2**40), st.integers(0, 1000))
def test_every_token_has_topk_different_experts(
    name: str, num_experts: int, data: st.DataObject, seed: int, step: int
) -> None:
    topk = data.draw(st.integers(1, num_experts))
    choices_TK, again_TK = (
        workload_choices(
            name, num_experts=num_experts, topk=topk, tokens=range(20), total_tokens=20, seed=seed, step=step
        )
        for _ in range(2)
    )
    assert choices_TK.shape == (20, topk) and np.array_equal(choices_TK, again_TK)
    assert choices_TK.min() >= 0 and choices_TK.max() < num_experts
    assert all(len(set(row)) == topk for row in choices_TK.tolist())


@pytest.mark.parametrize("name", NAMES)
def test_layouts_see_the_same_tokens(name: str) -> None:
    common = {"num_experts": 16, "topk": 2, "total_tokens": 64, "seed": 3, "step": 9}
    whole = workload_choices(name, tokens=range(64), **common)
    parts = [workload_choices(name, tokens=range(start, start + 16), **common) for start in range(0, 64, 16)]
    assert (np.concatenate(parts) == whole).all()
    assert (load_matrix(name, 4, 16, 2, 16, 3, 9).sum(0) == load_matrix(name, 8, 16, 2, 8, 3, 9).sum(0)).all()
    assert (load_matrix(name, 4, 16, 2, 16, 3, 9).sum(1) == 32).all()


def shares(name: str, step: int = 0) -> np.ndarray:
    """Return the share of tokens of each of 32 experts, [E]."""
    counts_DE = load_matrix(name, 8, 32, 2, 512, seed=1, step=step)
    return counts_DE.sum(0) / counts_DE.sum()


def test_what_the_names_say() -> None:
    assert (load_matrix("balanced", 8, 32, 2, 512, 1, 0) == 32).all()
    assert np.sort(shares("hot_experts"))[-1] > 0.2
    hot = np.sort(np.argsort(shares("hot_rank"))[-2:])
    assert hot[1] - hot[0] == 1 and shares("hot_rank")[hot].min() > 0.15
    spread = np.sort(np.argsort(shares("spread_hot_experts"))[-4:])
    assert (np.diff(spread) == 8).all()
    assert (shares("zero_load")[16:] == 0).all() and shares("zero_load")[:16].min() > 0
    rows = load_matrix("ragged_sources", 8, 32, 2, 512, 1, 0).max(1)
    assert rows[:2].min() > 2 * rows[2:].max()
    assert shares("burst", 0).max() < 0.06 and shares("burst", 7).max() > 0.2
    assert set(np.argsort(shares("rotating_hotspot", 0))[-2:]) == set(np.argsort(shares("rotating_hotspot", 9))[-2:])
    assert set(np.argsort(shares("rotating_hotspot", 9))[-2:]).isdisjoint(
        np.argsort(shares("rotating_hotspot", 10))[-2:]
    )


@pytest.mark.parametrize(
    ("name", "topk", "message"),
    [("cold", 1, "--moe-router-force-workload cold"), ("balanced", 5, "--moe-router-topk 5")],
)
def test_mistakes(name: str, topk: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workload_choices(name, num_experts=4, topk=topk, tokens=range(4), total_tokens=4, seed=0, step=0)
