"""Workloads W0 to W7 of Megatron-LM's benchmark of token imbalance, with the same experts for the same seed.

The benchmark draws the rows of a step in sequence from one torch generator on the CPU: a row is the beginning of a
random permutation of its candidates. Here, numpy draws the same numbers, because it has the same generator (the
Mersenne Twister), and many rows are permuted at once. Row t of a step is token t of the global batch, so the same
tokens choose the same experts however they are split over ranks.
"""

import hashlib
from collections.abc import Iterator

import numpy as np

WORKLOADS = {
    "W0": "W0_balanced",
    "W1": "W1_hot_expert_set",
    "W2": "W2_hot_rank",
    "W3": "W3_spread_hot_experts",
    "W4": "W4_source_ragged",
    "W5": "W5_zero_expert_rank",
    "W6": "W6_rotating_hotspot",
    "W7": "W7_burst",
}
"""Short name -> the benchmark's name, which is part of the random seed."""

PERIODS = {"W6": 3, "W7": 4}
"""Steps after which W6 moves its hot experts, and after which W7 repeats its burst."""

BLOCK_NUMBERS = 1 << 20
"""Number of random numbers drawn at once, which bounds memory."""


def choices(
    workload: str, *, num_experts: int, topk: int, index_T: np.ndarray, total_tokens: int, seed: int, step: int
) -> np.ndarray:
    """Return the experts of the rows `index_T` among the `total_tokens` rows of a step, [T, K] int64, ascending.

    W0 takes the experts in turn. In W1, W2, W3 and W6, three of four rows choose from a hot pool: the first quarter of
    the experts; in W3, every other expert; in W6, another quarter every three steps. W2 differs from W1 only in the
    seed. W4 is uniform. W5 uses the upper half of the experts. In every fourth step of W7, half of the rows choose from
    the first quarter; its other steps are uniform.
    """
    chosen_TK = np.empty((len(index_T), topk), dtype=np.int64)
    first = 0
    # The generator is sequential, so rows before the requested ones must be drawn, too
    rows = int(index_T.max(initial=-1)) + 1
    assert rows <= total_tokens
    for block_TK in _blocks(workload, num_experts, topk, rows, seed, step):
        inside = (first <= index_T) & (index_T < first + len(block_TK))
        chosen_TK[inside] = block_TK[index_T[inside] - first]
        first += len(block_TK)
    return chosen_TK


def _blocks(workload: str, num_experts: int, topk: int, tokens: int, seed: int, step: int) -> Iterator[np.ndarray]:
    """Yield the experts of rows 0 to `tokens`, block by block, [rows, K]."""
    digest = hashlib.sha256(f"{WORKLOADS[workload]}|{seed}|{step}".encode()).hexdigest()
    random = np.random.RandomState(int(digest[:8], 16))
    pool = _hot_pool(workload, num_experts, topk, step)
    everyone = np.arange(num_experts)
    size = max(1, BLOCK_NUMBERS // num_experts)
    for first in range(0, tokens, size):
        index_T = np.arange(first, min(first + size, tokens))
        if workload == "W0":
            yield (index_T[:, None] * topk + np.arange(topk)) % num_experts
            continue
        hot_T = _is_hot(workload, step, index_T)
        # A permutation of n candidates takes n - 1 numbers
        needed_T = np.where(hot_T, len(pool), num_experts) - 1
        ends_T = needed_T.cumsum()
        numbers = random.randint(0, 2**32, size=int(ends_T[-1]), dtype=np.uint32)
        chosen_TK = np.empty((len(index_T), topk), dtype=np.int64)
        for of, candidates in ((hot_T, pool), (~hot_T, everyone)):
            chosen_TK[of] = candidates[_permuted(numbers, (ends_T - needed_T)[of], len(candidates), topk)]
        chosen_TK.sort(axis=1)
        yield chosen_TK


def _permuted(numbers: np.ndarray, starts_T: np.ndarray, candidates: int, topk: int) -> np.ndarray:
    """Return the first K places of a random permutation for each row, [T, K], shuffled as by torch.randperm.

    `numbers` has the random numbers of all rows; `starts_T` are the indices of each row's first number.
    """
    order = np.tile(np.arange(candidates), (len(starts_T), 1))
    rows = np.arange(len(starts_T))
    for place in range(min(topk, candidates - 1)):
        other_T = place + (numbers[starts_T + place] % np.uint32(candidates - place)).astype(np.int64)
        order[rows, place], order[rows, other_T] = order[rows, other_T], order[rows, place]
    return order[:, :topk]


def _hot_pool(workload: str, num_experts: int, topk: int, step: int) -> np.ndarray:
    """Return the candidates of hot rows, at least K, in the order in which permutations index them."""
    hot = np.arange(max(topk, num_experts // 4))
    if workload == "W3":
        spread = np.unique(2 * np.arange(max(topk, num_experts // 2)) % num_experts)
        return spread if len(spread) >= topk else np.arange(num_experts)
    if workload == "W5":
        return np.arange(min(num_experts // 2, num_experts - topk), num_experts)
    return (hot + step // PERIODS["W6"] * len(hot)) % num_experts if workload == "W6" else hot


def _is_hot(workload: str, step: int, index_T: np.ndarray) -> np.ndarray:
    """Return whether rows choose from the hot pool, [T] bool."""
    if workload in ("W1", "W2", "W3", "W6"):
        return index_T % 4 != 0
    burst = workload == "W7" and step % PERIODS["W7"] == PERIODS["W7"] - 1
    return index_T % 2 == 0 if burst else np.full(len(index_T), workload == "W5")
