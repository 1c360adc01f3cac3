"""Synthetic routing: the experts that each token chooses, as a function of workload, seed, step and token index.

The same tokens choose the same experts however they are split over ranks.
"""

import numpy as np

from megatron_balance.workloads import imbalance

HOT_SHARE = 0.5
"""Fraction of all choices that go to hot experts."""

ROTATION = 10
"""Steps after which rotating_hotspot moves to other experts."""

BURST = (8, 2)
"""Period of bursts in steps, and the number of burst steps at its end."""

WORKLOADS = {
    "balanced": "experts in turn, so that loads differ by at most one token",
    "hot_experts": "hot are neighboring experts, a sixteenth of all; each gets twice as many tokens as the next",
    "hot_rank": "hot is an aligned sixteenth of the experts, in equal parts, which is on few ranks",
    "spread_hot_experts": "hot is every eighth expert, so that many ranks have one",
    "ragged_sources": "hot_experts for the first quarter of the tokens, which few source ranks hold; even for the rest",
    "zero_load": "no tokens for the upper half of the experts, and thus for whole ranks, as far as topk allows",
    "rotating_hotspot": "like hot_rank, but with other hot experts after every ROTATION steps",
    "burst": "even, with short bursts of hot_experts",
}

NAMES = (*WORKLOADS, *imbalance.WORKLOADS)
"""All workloads: ours, and those of Megatron-LM's benchmark."""


def workload_choices(
    workload: str, *, num_experts: int, topk: int, tokens: range | np.ndarray, total_tokens: int, seed: int, step: int
) -> np.ndarray:
    """Return the experts that tokens choose, [T, K] int64, K different experts for each token.

    Args:
        workload: a name in NAMES.
        tokens: indices of the tokens among all `total_tokens` of the step. W0 to W7 draw all rows up to the last one,
            so ask for many at once.

    Raises:
        ValueError: there is no such workload, or there are more choices than experts.
    """
    if workload not in NAMES:
        raise ValueError(f"--moe-router-force-workload {workload}: choose from {', '.join(NAMES)}")
    if not 1 <= topk <= num_experts:
        raise ValueError(f"--moe-router-topk {topk}: must be between 1 and --num-experts {num_experts}")
    index_T = np.asarray(tokens, dtype=np.int64)
    if workload in imbalance.WORKLOADS:
        return imbalance.choices(
            workload,
            num_experts=num_experts,
            topk=topk,
            index_T=index_T,
            total_tokens=total_tokens,
            seed=seed,
            step=step,
        )

    def draw(workload: str) -> np.ndarray:
        return _draw(_weights(workload, num_experts, topk, seed, step), topk, index_T, seed * 1_000_003 + step)

    if workload == "balanced":
        start = _random_expert(step, seed, num_experts)
        return (start + index_T[:, None] * topk + np.arange(topk)) % num_experts
    if workload == "ragged_sources":
        return np.where((index_T * 4 < total_tokens)[:, None], draw("hot_experts"), draw("even"))
    if workload == "burst":
        period, length = BURST
        return draw("hot_experts" if step % period >= period - length else "even")
    return draw(workload)


def load_matrix(
    workload: str, num_ranks: int, num_experts: int, topk: int, tokens_per_rank: int, seed: int, step: int
) -> np.ndarray:
    """Return the tokens of each source rank for each expert, [D, E] int64, if each rank has consecutive tokens."""
    total = num_ranks * tokens_per_rank
    choices_TK = workload_choices(
        workload, num_experts=num_experts, topk=topk, tokens=range(total), total_tokens=total, seed=seed, step=step
    )
    source_T = np.arange(total) // tokens_per_rank
    places_TK = source_T[:, None] * num_experts + choices_TK
    return np.bincount(places_TK.ravel(), minlength=num_ranks * num_experts).reshape(num_ranks, num_experts)


def _weights(workload: str, num_experts: int, topk: int, seed: int, step: int) -> np.ndarray:
    """Return the relative probability of each expert, [E]; the hot experts together have HOT_SHARE."""
    if workload == "even":
        return np.ones(num_experts)
    if workload == "zero_load":
        return np.ones(max(topk, (num_experts + 1) // 2))
    start = _random_expert(0, seed, num_experts)
    size = max(topk, num_experts // 16)
    shares = np.ones(size)
    if workload == "spread_hot_experts":
        hot = np.arange(start % 8, num_experts, 8)
        shares = np.ones(len(hot))
    elif workload == "hot_experts":
        hot = start + np.arange(size)
        shares = 0.5 ** np.arange(size)
    elif workload == "hot_rank":
        hot = start // size * size + np.arange(size)
    else:
        hot = start + step // ROTATION * size + np.arange(size)
    if len(hot) >= num_experts:
        return np.ones(num_experts)
    weights_E = np.full(num_experts, (1 - HOT_SHARE) / (num_experts - len(hot)))
    weights_E[hot % num_experts] = HOT_SHARE * shares / shares.sum()
    return weights_E


def _random_expert(index: int, seed: int, num_experts: int) -> int:
    return int(_hash(np.array([index]), seed)[0] % np.uint64(num_experts))


def _draw(weights_E: np.ndarray, topk: int, index_T: np.ndarray, seed: int) -> np.ndarray:
    """Draw K different experts for each token without replacement, by weight, [T, K]."""
    # Integers: with rounding errors, an expert could be drawn twice
    shares_E = np.maximum(1, np.round(weights_E / weights_E.sum() * 2**40)).astype(np.int64)
    ends_E = shares_E.cumsum()
    salts_K = _hash(np.arange(topk, dtype=np.int64), 1)
    random_TK = (_hash(_hash(index_T, seed)[:, None] ^ salts_K, 0) >> np.uint64(1)).astype(np.int64)
    chosen_TK = np.empty((len(index_T), topk), dtype=np.int64)
    for choice in range(topk):
        before_TK = np.sort(chosen_TK[:, :choice], axis=1)
        # A point on the concatenated shares of the experts not drawn yet
        point_T = random_TK[:, choice] % (ends_E[-1] - shares_E[before_TK].sum(1))
        for gone_T in before_TK.T:
            point_T += np.where(point_T >= ends_E[gone_T] - shares_E[gone_T], shares_E[gone_T], 0)
        chosen_TK[:, choice] = np.searchsorted(ends_E, point_T, side="right")
    return chosen_TK


def _hash(values: np.ndarray, salt: int) -> np.ndarray:
    """Return SplitMix64 of each value: random bits that depend only on the arguments."""
    mixed = values.astype(np.uint64) + np.uint64((salt * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
