"""Synthetic routing: which experts each token chooses, from (workload, seed, step) and the token's global index alone.

The same tokens choose the same experts however they are split over ranks.
Shape suffixes: T tokens, E logical experts, K choices per token, D expert-parallel ranks.
"""

from collections.abc import Callable

import numpy as np

HOT_SHARE = 0.5
"""Share of all choices that aims at hot experts."""

ROTATION = 10
"""rotating_hotspot: steps that a hot spot stays."""

BURST = (8, 2)
"""burst: out of so many steps, so many at the end are bursts."""


def workload_choices(
    workload: str, num_experts: int, topk: int, tokens: range, total_tokens: int, seed: int, step: int
) -> np.ndarray:
    """The experts that tokens choose, [T, K] int64, K different ones for each token.

    Args:
        workload: a name in WORKLOADS.
        tokens: indices of the tokens among all `total_tokens` of the step.

    Raises:
        ValueError: no such workload, or more choices than experts.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"--moe-router-force-workload {workload}: choose from {', '.join(WORKLOADS)}")
    if not 1 <= topk <= num_experts:
        raise ValueError(f"--moe-router-topk {topk}: must be between 1 and --num-experts {num_experts}")
    index_T = np.arange(tokens.start, tokens.stop, tokens.step, dtype=np.int64)
    return WORKLOADS[workload](num_experts, topk, index_T, total_tokens, seed, step)


def load_matrix(
    workload: str, num_ranks: int, num_experts: int, topk: int, tokens_per_rank: int, seed: int, step: int
) -> np.ndarray:
    """[D, E] int64: tokens of each source rank for each expert, with consecutive tokens on each rank."""
    total = num_ranks * tokens_per_rank
    counts_DE = np.zeros((num_ranks, num_experts), dtype=np.int64)
    for rank in range(num_ranks):
        own = range(rank * tokens_per_rank, (rank + 1) * tokens_per_rank)
        choices_TK = workload_choices(workload, num_experts, topk, own, total, seed, step)
        counts_DE[rank] = np.bincount(choices_TK.ravel(), minlength=num_experts)
    return counts_DE


def _balanced(num_experts: int, topk: int, index_T: np.ndarray, total: int, seed: int, step: int) -> np.ndarray:
    """Experts take turns, so loads differ by one token at most."""
    start = int(_hash(np.array([step]), seed)[0] % np.uint64(num_experts))
    return (start + index_T[:, None] * topk + np.arange(topk)) % num_experts


def _hot_experts(num_experts: int, topk: int, index_T: np.ndarray, total: int, seed: int, step: int) -> np.ndarray:
    """A few neighbouring experts, one in sixteen, get half of the choices, each twice as many as the next."""
    hot = _block(num_experts, topk, _start(num_experts, seed))
    return _draw(_weights(num_experts, hot, 0.5 ** np.arange(len(hot))), topk, index_T, seed, step)


def _hot_rank(num_experts: int, topk: int, index_T: np.ndarray, total: int, seed: int, step: int) -> np.ndarray:
    """An aligned sixteenth of the experts, which lives on few ranks, gets half of the choices in equal parts."""
    size = max(topk, num_experts // 16)
    hot = _block(num_experts, topk, _start(num_experts, seed) // size * size)
    return _draw(_weights(num_experts, hot, np.ones(len(hot))), topk, index_T, seed, step)


def _spread_hot_experts(
    num_experts: int, topk: int, index_T: np.ndarray, total: int, seed: int, step: int
) -> np.ndarray:
    """Every eighth expert is hot: many ranks have one."""
    hot = np.arange(_start(num_experts, seed) % 8, num_experts, 8)
    return _draw(_weights(num_experts, hot, np.ones(len(hot))), topk, index_T, seed, step)


def _ragged_sources(num_experts: int, topk: int, index_T: np.ndarray, total: int, seed: int, step: int) -> np.ndarray:
    """A quarter of the sequence, hence few source ranks, routes to hot experts; the rest evenly."""
    hot_TK = _hot_experts(num_experts, topk, index_T, total, seed, step)
    even_TK = _draw(np.ones(num_experts), topk, index_T, seed, step)
    return np.where((index_T * 4 < total)[:, None], hot_TK, even_TK)


def _zero_load(num_experts: int, topk: int, index_T: np.ndarray, total: int, seed: int, step: int) -> np.ndarray:
    """The upper half of the experts, hence whole ranks, gets no tokens (as far as topk allows)."""
    return _draw(np.ones(max(topk, (num_experts + 1) // 2)), topk, index_T, seed, step)


def _rotating_hotspot(num_experts: int, topk: int, index_T: np.ndarray, total: int, seed: int, step: int) -> np.ndarray:
    """hot_rank whose hot experts move on every ROTATION steps."""
    size = max(topk, num_experts // 16)
    hot = _block(num_experts, topk, _start(num_experts, seed) + step // ROTATION * size)
    return _draw(_weights(num_experts, hot, np.ones(len(hot))), topk, index_T, seed, step)


def _burst(num_experts: int, topk: int, index_T: np.ndarray, total: int, seed: int, step: int) -> np.ndarray:
    """Even routing with short bursts of hot_experts."""
    period, length = BURST
    if step % period >= period - length:
        return _hot_experts(num_experts, topk, index_T, total, seed, step)
    return _draw(np.ones(num_experts), topk, index_T, seed, step)


Workload = Callable[[int, int, np.ndarray, int, int, int], np.ndarray]

WORKLOADS: dict[str, Workload] = {
    "balanced": _balanced,
    "hot_experts": _hot_experts,
    "hot_rank": _hot_rank,
    "spread_hot_experts": _spread_hot_experts,
    "ragged_sources": _ragged_sources,
    "zero_load": _zero_load,
    "rotating_hotspot": _rotating_hotspot,
    "burst": _burst,
}


def _start(num_experts: int, seed: int) -> int:
    """The first hot expert, which the seed alone decides."""
    return int(_hash(np.array([0]), seed)[0] % np.uint64(num_experts))


def _block(num_experts: int, topk: int, start: int) -> np.ndarray:
    """Neighbouring experts, one in sixteen and at least topk."""
    return (start + np.arange(max(topk, num_experts // 16))) % num_experts


def _weights(num_experts: int, hot: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """[E]: how likely each expert is; the hot ones share HOT_SHARE."""
    if len(hot) >= num_experts:
        return np.ones(num_experts)
    weights_E = np.full(num_experts, (1 - HOT_SHARE) / (num_experts - len(hot)))
    weights_E[hot] = HOT_SHARE * shares / shares.sum()
    return weights_E


def _draw(weights: np.ndarray, topk: int, index_T: np.ndarray, seed: int, step: int) -> np.ndarray:
    """[T, K]: K different experts per token, one after the other without replacement, by weight."""
    # Whole numbers: no rounding may let an expert be drawn twice
    shares_E = np.maximum(1, np.round(weights / weights.sum() * 2**40)).astype(np.int64)
    ends_E = shares_E.cumsum()
    salts_K = _hash(np.arange(topk, dtype=np.int64), 1)
    random_TK = (_hash(_hash(index_T, seed * 1_000_003 + step)[:, None] ^ salts_K, 0) >> np.uint64(1)).astype(np.int64)
    chosen_TK = np.empty((len(index_T), topk), dtype=np.int64)
    for choice in range(topk):
        before_TK = np.sort(chosen_TK[:, :choice], axis=1)
        # A point on the line of all shares laid end to end, without those drawn before
        point_T = random_TK[:, choice] % (ends_E[-1] - shares_E[before_TK].sum(1))
        for gone_T in before_TK.T:
            point_T += np.where(point_T >= ends_E[gone_T] - shares_E[gone_T], shares_E[gone_T], 0)
        chosen_TK[:, choice] = np.searchsorted(ends_E, point_T, side="right")
    return chosen_TK


def _hash(values: np.ndarray, salt: int) -> np.ndarray:
    """SplitMix64 of each value: random bits that depend on nothing but the numbers."""
    mixed = values.astype(np.uint64) + np.uint64((salt * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
