"""The estimate of few batches: what it says in words, for numbers and arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.batches import MOST_PIECES
from megatron_balance.cost.few_batches import LEAST_ALPHA, few_batches, few_batches_each

NUMBERS = st.lists(st.floats(0, 100), min_size=14, max_size=14).map(lambda row: np.array(row).reshape(2, 7))


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), max_size=5),
    NUMBERS,
    st.sampled_from([0.5, 1.0, 7.0]),
    st.integers(1, 2),
)
def test_estimates_are_those_of_their_description(
    pairs: list[tuple[float, float]], numbers_27: np.ndarray, far: float, least_rounds: int
) -> None:
    found = few_batches_each(*np.array(pairs).reshape(-1, 2).T, numbers_27, far, least_rounds)
    for index, (busy, extra) in enumerate(pairs):
        # Links between nodes, if the busiest rank's time has room for an expert there
        is_far = far > 1 and busy >= far * (1 - 1e-9)
        expected = []
        for near_alpha, near_beta, far_alpha, far_beta, size, messages, start in numbers_27.tolist():
            alpha = [near_alpha, far_alpha][is_far] + messages * extra
            last = size * (far_beta if extra >= far else near_beta * min(extra, 1))
            pieces = float(np.clip(round((last / max(alpha, LEAST_ALPHA)) ** 0.5), 1, MOST_PIECES))
            batches = (pieces if extra else 1) + (extra > 0 or least_rounds > 1)
            sending = busy * size * (far_beta / far if is_far else near_beta)
            expected.append(start + alpha * batches + sending + last / pieces if busy else 0.0)
        assert [part[index] for part in found] == pytest.approx(expected)
        assert few_batches(busy, extra, numbers_27, far, least_rounds) == tuple(part[index] for part in found)
