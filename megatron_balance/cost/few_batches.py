"""An estimate of Trans and Agg in few batches, as compiled loops, because searches need it for many placements."""

import math

import numpy as np

from megatron_balance.cost.batches import MOST_PIECES
from megatron_balance.device.compiled import compiled

LEAST_ALPHA = 1e-6
"""Minimum latency of a message in seconds for choosing pieces: a line through noisy times may have none."""

ROUNDING = 1e-9


@compiled("UniTuple(float64, 2)(float64, float64, float64[:,::1], float64, int64)")
def few_batches(
    busy: float, extra: float, numbers_27: np.ndarray, farther: float, least_rounds: int
) -> tuple[float, float]:
    """Return the seconds of Trans and Agg; `SendingModel.seconds_of` explains the first arguments.

    Args:
        numbers_27: of Trans and of Agg: alpha and beta within nodes, those between nodes, bytes, seconds to launch two
            messages, and seconds to start.
        farther: time of a piece between nodes, in pieces within a node.
        least_rounds: minimum number of batches.
    """
    found = np.zeros(2)
    is_far = busy >= farther * (1 - ROUNDING) and farther > 1
    for kind in range(2 if busy > 0 else 0):
        near_alpha, near_beta, far_alpha, far_beta, size, messages, start = numbers_27[kind]
        alpha = (far_alpha if is_far else near_alpha) + messages * extra
        last = size * (near_beta * min(extra, 1.0) if extra < farther else far_beta)
        pieces = min(max(np.rint(math.sqrt(last / max(alpha, LEAST_ALPHA))), 1.0), MOST_PIECES)
        more = 1.0 if extra > 0 or least_rounds > 1 else 0.0
        time = busy * (far_beta / farther if is_far else near_beta) * size
        found[kind] = start + alpha * ((pieces if extra > 0 else 1.0) + more) + time + last / pieces
    return found[0], found[1]


@compiled("UniTuple(float64[::1], 2)(float64[:], float64[:], float64[:,::1], float64, int64)")
def few_batches_each(
    busy_K: np.ndarray, extra_K: np.ndarray, numbers_27: np.ndarray, farther: float, least_rounds: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return [K] `few_batches` of each pair of numbers."""
    trans_K = np.zeros(len(busy_K))
    agg_K = np.zeros(len(busy_K))
    for index in range(len(busy_K)):
        trans_K[index], agg_K[index] = few_batches(busy_K[index], extra_K[index], numbers_27, farther, least_rounds)
    return trans_K, agg_K
