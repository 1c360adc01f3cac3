"""Loads of simulated runs: whole choices, known popularity, and mistakes in --load."""

import numpy as np
import pytest

from published_runs import deviation, expected_max_mean
from simulated_loads import distribution, drawn_loads, even_loads, recorded


@pytest.mark.parametrize("text", ["zipf:0.7", "gamma:1", "hot_experts", "W3"])
def test_loads_have_all_choices_and_no_token_twice(text: str) -> None:
    loads = drawn_loads(distribution(text, 4, 16), topk=2, tokens=100)
    counts_BDE = loads(3, 1, 0, 5)
    assert counts_BDE.shape == (5, 4, 16)
    assert (counts_BDE.sum(2) == 200).all()
    assert counts_BDE.max() <= 100 and counts_BDE.min() >= 0
    assert (counts_BDE == loads(3, 1, 0, 5)).all()
    assert (counts_BDE != loads(3, 1, 1, 5)).any()


@pytest.mark.parametrize(("value", "ranks", "experts"), [(0.82, 8, 128), (0.24, 64, 256), (2.0, 4, 8), (1.0, 16, 16)])
def test_max_mean_of_gamma_loads(value: float, ranks: int, experts: int) -> None:
    popularity = distribution(f"gamma:{value}", 1, experts)
    drawn = np.array([ranks * popularity(0, layer).reshape(ranks, -1).sum(1).max() for layer in range(2000)])
    expected = expected_max_mean(value, ranks, experts)
    assert expected == pytest.approx(drawn.mean(), abs=4 * drawn.std() / len(drawn) ** 0.5)
    assert deviation(expected, ranks, experts) == pytest.approx(value)


def test_tokens_of_the_same_sequences_are_alike() -> None:
    def shares_of(spread: float, sharing: int) -> np.ndarray:
        loads = drawn_loads(distribution("zipf:0.5", 4, 8), topk=1, tokens=10**6, spread=spread, sharing=sharing)
        return loads(0, 1, 0, 400) / 10**6

    expected_E = distribution("zipf:0.5", 4, 8)(0, 1)[0]
    logs_BDE = np.log(shares_of(0.3, 2)) - np.log(expected_E)
    # Ranks that share sequences have the same popularity, up to the randomness of a million tokens
    assert np.abs(logs_BDE[:, ::2] - logs_BDE[:, 1::2]).max() < 0.05
    assert np.abs(logs_BDE[:, 0] - logs_BDE[:, 2]).mean() > 0.2
    # Differences between two experts have no common factor: their variance is that of two logarithms
    assert (logs_BDE[:, 0, 0] - logs_BDE[:, 0, 1]).std() == pytest.approx(0.3 * 2**0.5, rel=0.1)
    assert shares_of(0.0, 1).std(0).max() < 1e-3


def test_even_loads_differ_by_one_token() -> None:
    counts_BDE = even_loads(num_ranks=4, num_experts=6, topk=2, tokens=10)(0, 1, 0, 2)
    assert (counts_BDE.sum(2) == 20).all()
    assert np.ptp(counts_BDE) == 1
    assert np.ptp(counts_BDE.sum(1)) <= 1


def test_recorded_loads_keep_their_popularity() -> None:
    counts = {1: np.array([[[30, 10], [0, 40]]]), 2: np.array([[[1, 1], [1, 1]]])}
    same = recorded(counts, 2, 2)
    other = recorded(counts, 4, 2)
    assert same(7, 1) == pytest.approx(np.array([[0.75, 0.25], [0.0, 1.0]]), abs=1e-6)
    assert other(0, 1) == pytest.approx(np.tile([0.375, 0.625], (4, 1)), abs=1e-6)
    assert other(0, 4) == pytest.approx(0.5)
    late = recorded({1: np.array([[[1, 3]], [[3, 1]], [[1, 1]]])}, 1, 2, first=-2)
    assert [late(iteration, 1)[0, 0] for iteration in range(3)] == pytest.approx([0.75, 0.5, 0.25])
    with pytest.raises(ValueError, match="has 2 experts, and this one has 8"):
        recorded(counts, 2, 8)


@pytest.mark.parametrize("text", ["", "zipf", "zipf:much", "no:1", "hot_experts:2", "gamma:0", "gamma:nan", "gamma:11"])
def test_an_unknown_load_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="--load"):
        distribution(text, 4, 16)
