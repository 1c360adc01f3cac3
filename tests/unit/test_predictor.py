"""Predictors: expected loads, conservation of tokens, and state that survives a checkpoint."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.planning.predictor import METHODS, History, Predictor, prediction_error


def observed(predictor: Predictor, *counts: list[list[int]]) -> History:
    state = History()
    for matrix in counts:
        state = predictor.observe(state, np.array([matrix]))
    return state


@pytest.mark.parametrize(
    ("predictor", "expected"),
    [
        (Predictor("last"), [[2, 6]]),
        (Predictor("ema", decay=0.5), [[4, 4]]),
        (Predictor("linear"), [[0, 8]]),
    ],
)
def test_two_observations(predictor: Predictor, expected: list[list[int]]) -> None:
    state = observed(predictor, [[6, 2]], [[2, 6]])
    assert predictor.predict(state).tolist() == [expected]


def test_linear_uses_its_window_only() -> None:
    predictor = Predictor("linear", window=2)
    state = observed(predictor, [[0, 100]], [[40, 60]], [[50, 50]])
    assert len(state.recent) == 2
    assert predictor.predict(state).tolist() == [[[60, 40]]]


def test_the_largest_remainders_are_rounded_up() -> None:
    predictor = Predictor("ema", decay=0.5)
    state = observed(predictor, [[2, 1, 0]], [[1, 2, 0]])
    assert predictor.predict(state).tolist() == [[[2, 1, 0]]]


def test_a_rank_whose_load_would_become_negative_spreads_its_tokens_evenly() -> None:
    predictor = Predictor("linear", window=2)
    state = observed(predictor, [[40, 60]], [[0, 3]])
    assert predictor.predict(state).tolist() == [[[2, 1]]]


@pytest.mark.parametrize("method", METHODS)
def test_nothing_seen_and_another_shape(method: str) -> None:
    predictor = Predictor(method)
    assert predictor.predict(History()) is None
    state = observed(predictor, [[1, 2]], [[1, 2, 3]])
    assert predictor.predict(state).tolist() == [[[1, 2, 3]]]


@given(st.sampled_from(METHODS), st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_tokens_are_conserved_and_states_survive_json(method: str, seed: int, steps: int) -> None:
    generator = np.random.default_rng(seed)
    predictor = Predictor(method)
    state = History()
    for _ in range(steps):
        parts = int(generator.integers(1, 5))
        counts_BDE = generator.integers(0, 50, (parts, 3, 5)) * generator.integers(0, 2, (parts, 3, 1))
        state = predictor.observe(state, counts_BDE)
    predicted_BDE = predictor.predict(state)
    assert predicted_BDE.shape == counts_BDE.shape and (predicted_BDE >= 0).all()
    assert (predicted_BDE.sum((0, 2)) == counts_BDE.sum((0, 2))).all()
    copy = History.from_plain(json.loads(json.dumps(state.to_plain())))
    following = generator.integers(0, 50, (2, 3, 5))
    expected = predictor.predict(predictor.observe(state, following))
    assert (predictor.predict(predictor.observe(copy, following)) == expected).all()


@pytest.mark.parametrize("method", METHODS)
def test_microbatches_share_the_prediction_as_in_the_latest_iteration(method: str) -> None:
    predictor = Predictor(method)
    latest_BDE = np.array([[[9, 0, 1]], [[3, 8, 1]], [[0, 0, 2]]])
    assert predictor.predict(predictor.observe(History(), latest_BDE)).tolist() == latest_BDE.tolist()
    before = predictor.observe(History(), np.array([[[4, 16, 4]]]))
    predicted_BDE = predictor.predict(predictor.observe(before, latest_BDE))
    # The first microbatch has three quarters of expert 0's tokens, the second one all of expert 1's
    total_E = predicted_BDE.sum((0, 1))
    assert predicted_BDE[:, 0, 0] == pytest.approx(total_E[0] * np.array([3, 1, 0]) / 4, abs=1)
    assert predicted_BDE[:, 0, 1].tolist() == [0, total_E[1], 0]
    assert predicted_BDE[:, 0, 2] == pytest.approx(total_E[2] * np.array([1, 1, 2]) / 4, abs=1)


def test_methods_are_checked() -> None:
    with pytest.raises(ValueError, match="--balance-predictor best"):
        Predictor("best")


def test_error() -> None:
    actual = np.array([[[4, 0], [0, 4]]])
    assert prediction_error(actual, actual) == 0
    assert prediction_error(np.array([[[0, 4], [4, 0]]]), actual) == 1
    assert prediction_error(np.array([[[3, 1], [0, 4]]]), actual) == pytest.approx(1 / 8)
    # Microbatches are added up, however many there are on either side
    assert prediction_error(np.array([[[4, 0], [0, 0]], [[0, 0], [0, 4]]]), actual) == 0
    assert prediction_error(np.zeros((1, 1, 1)), np.zeros((1, 1, 1))) == 0
