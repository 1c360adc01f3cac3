"""Synthetic routing: the experts that each token chooses, as a function of workload, seed, step and token index.

The same tokens choose the same experts however they are split over ranks.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_balance.workloads import imbalance

HOT_SHARE = 0.5
"""Fraction of all choices that go to hot experts."""

ROTATION = 10
"""Number of steps after which rotating_hotspot moves to other experts."""

BURST = (8, 2)
"""Period of burst in steps, and the number of steps at its end that are bursts."""


class _Request(NamedTuple):
    """Arguments of a workload."""

    num_experts: int
    topk: int
    index_T: np.ndarray
    """Indices of the tokens among all tokens of the step, int64."""
    total_tokens: int
    seed: int
    step: int


def workload_choices(
    workload: str, *, num_experts: int, topk: int, tokens: range | np.ndarray, total_tokens: int, seed: int, step: int
) -> np.ndarray:
    """Return the experts that tokens choose, [T, K] int64, K different ones for each token.

    Args:
        workload: a name in NAMES.
        tokens: indices of the tokens among all `total_tokens` of the step. For W0 to W7, all rows before the last of
            them are drawn too, so ask for many at once.

    Raises:
        ValueError: there is no such workload, or there are more choices than experts.
    """
    if workload not in NAMES:
        raise ValueError(f"--moe-router-force-workload {workload}: choose from {', '.join(NAMES)}")
    if not 1 <= topk <= num_experts:
        raise ValueError(f"--moe-router-topk {topk}: must be between 1 and --num-experts {num_experts}")
    index_T = np.arange(tokens.start, tokens.stop, tokens.step) if isinstance(tokens, range) else tokens
    request = _Request(num_experts, topk, index_T.astype(np.int64), total_tokens, seed, step)
    if workload in imbalance.WORKLOADS:
        return imbalance.choices(workload, **request._asdict())
    return WORKLOADS[workload](request)


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


def _balanced(request: _Request) -> np.ndarray:
    """Choose experts in turn, so that loads differ by at most one token."""
    start = int(_hash(np.array([request.step]), request.seed)[0] % np.uint64(request.num_experts))
    return (start + request.index_T[:, None] * request.topk + np.arange(request.topk)) % request.num_experts


def _hot_experts(request: _Request) -> np.ndarray:
    """Give half of the choices to neighboring experts, a sixteenth of all; each gets twice as many as the next."""
    hot = _block(request, _start(request))
    return _draw(_weights(request.num_experts, hot, 0.5 ** np.arange(len(hot))), request)


def _hot_rank(request: _Request) -> np.ndarray:
    """Give half of the choices, in equal parts, to an aligned sixteenth of the experts, which are on few ranks."""
    size = max(request.topk, request.num_experts // 16)
    hot = _block(request, _start(request) // size * size)
    return _draw(_weights(request.num_experts, hot, np.ones(len(hot))), request)


def _spread_hot_experts(request: _Request) -> np.ndarray:
    """Make every eighth expert hot, so that many ranks have one."""
    hot = np.arange(_start(request) % 8, request.num_experts, 8)
    return _draw(_weights(request.num_experts, hot, np.ones(len(hot))), request)


def _ragged_sources(request: _Request) -> np.ndarray:
    """Route the first quarter of the tokens, which few source ranks hold, to hot experts, and the rest evenly."""
    hot_TK = _hot_experts(request)
    even_TK = _draw(np.ones(request.num_experts), request)
    return np.where((request.index_T * 4 < request.total_tokens)[:, None], hot_TK, even_TK)


def _zero_load(request: _Request) -> np.ndarray:
    """Give no tokens to the upper half of the experts, and thus to whole ranks, as far as topk allows."""
    return _draw(np.ones(max(request.topk, (request.num_experts + 1) // 2)), request)


def _rotating_hotspot(request: _Request) -> np.ndarray:
    """Like hot_rank, but with other hot experts after every ROTATION steps."""
    size = max(request.topk, request.num_experts // 16)
    hot = _block(request, _start(request) + request.step // ROTATION * size)
    return _draw(_weights(request.num_experts, hot, np.ones(len(hot))), request)


def _burst(request: _Request) -> np.ndarray:
    """Route evenly, with short bursts of hot_experts."""
    period, length = BURST
    if request.step % period >= period - length:
        return _hot_experts(request)
    return _draw(np.ones(request.num_experts), request)


WORKLOADS: dict[str, Callable[[_Request], np.ndarray]] = {
    "balanced": _balanced,
    "hot_experts": _hot_experts,
    "hot_rank": _hot_rank,
    "spread_hot_experts": _spread_hot_experts,
    "ragged_sources": _ragged_sources,
    "zero_load": _zero_load,
    "rotating_hotspot": _rotating_hotspot,
    "burst": _burst,
}

NAMES = (*WORKLOADS, *imbalance.WORKLOADS)
"""Every workload: ours, and those of Megatron-LM's benchmark."""


def _start(request: _Request) -> int:
    """Return the first hot expert, which depends only on the seed."""
    return int(_hash(np.array([0]), request.seed)[0] % np.uint64(request.num_experts))


def _block(request: _Request, start: int) -> np.ndarray:
    """Return neighboring experts: a sixteenth of all, but at least topk."""
    return (start + np.arange(max(request.topk, request.num_experts // 16))) % request.num_experts


def _weights(num_experts: int, hot: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return the probability of each expert, [E]; the hot ones together have HOT_SHARE."""
    if len(hot) >= num_experts:
        return np.ones(num_experts)
    weights_E = np.full(num_experts, (1 - HOT_SHARE) / (num_experts - len(hot)))
    weights_E[hot] = HOT_SHARE * shares / shares.sum()
    return weights_E


def _draw(weights: np.ndarray, request: _Request) -> np.ndarray:
    """Draw K different experts for each token without replacement, by weight, [T, K]."""
    topk = request.topk
    index_T = request.index_T
    # Integers, because with rounding errors an expert could be drawn twice
    shares_E = np.maximum(1, np.round(weights / weights.sum() * 2**40)).astype(np.int64)
    ends_E = shares_E.cumsum()
    salts_K = _hash(np.arange(topk, dtype=np.int64), 1)
    random_TK = (
        _hash(_hash(index_T, request.seed * 1_000_003 + request.step)[:, None] ^ salts_K, 0) >> np.uint64(1)
    ).astype(np.int64)
    chosen_TK = np.empty((len(index_T), topk), dtype=np.int64)
    for choice in range(topk):
        before_TK = np.sort(chosen_TK[:, :choice], axis=1)
        # A point on the line of all shares laid end to end, without the experts already drawn
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
