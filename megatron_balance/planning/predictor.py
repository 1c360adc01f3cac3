"""Predicts the next iteration's load matrix of one MoE layer from past iterations (Pro-Prophet Section II-B: locality).

B is the number of remembered iterations.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

METHODS = ("last", "ema", "linear")


@dataclass(frozen=True)
class Predictor:
    """A prediction method. Its History is a separate value, so that a checkpoint can hold it."""

    method: str = "last"
    """last: the latest load. ema: an exponential moving average. linear: a line fitted to the latest `window` loads."""
    decay: float = 0.75
    """ema: weight of the past; at least 0, less than 1."""
    window: int = 4
    """linear: number of loads that the line is fitted to; at least 2."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"--balance-predictor {self.method}: choose from {', '.join(METHODS)}")

    def observe(self, state: "History", counts_BDE: np.ndarray) -> "History":
        """Return the history after one more iteration. `counts_BDE` are the tokens of its microbatches, or of groups of
        them. A new number of ranks or experts starts a new history."""
        parts = np.array(counts_BDE, dtype=np.int64)
        latest = parts.sum(0)
        if state.latest is None or state.latest.shape != latest.shape:
            state = History()
        if self.method == "ema":
            mean = latest.astype(np.float64)
            if state.mean is not None:
                mean = self.decay * state.mean + (1 - self.decay) * mean
            return History((latest,), mean, parts)
        keep = self.window if self.method == "linear" else 1
        return History((*state.recent, latest)[-keep:], parts=parts)

    def predict(self, state: "History") -> np.ndarray | None:
        """Return [B, D, E] int64 expected tokens, or None before the first observation. Every source rank is expected
        to route as many tokens as in the latest iteration, with the same proportions between microbatches."""
        if state.latest is None:
            return None
        total_DE = state.latest.copy()
        if self.method == "ema" and state.mean is not None:
            total_DE = _with_row_sums(state.mean, total_DE.sum(1))
        if self.method == "linear" and len(state.recent) > 1:
            total_DE = _with_row_sums(np.maximum(_extrapolate(np.stack(state.recent)), 0), total_DE.sum(1))
        return _shared(total_DE, state.parts)


@dataclass(frozen=True, eq=False)
class History:
    """Past loads of one layer that a predictor needs; empty at first."""

    recent: tuple[np.ndarray, ...] = ()
    """[B] arrays of [D, E] int64, oldest first."""
    mean: np.ndarray | None = None
    """[D, E] float64 moving average."""
    parts: np.ndarray | None = None
    """[B, D, E] int64: the latest load by microbatch; their sum is the last of `recent`."""

    @property
    def latest(self) -> np.ndarray | None:
        return self.recent[-1] if self.recent else None

    def to_plain(self) -> dict[str, Any]:
        """Return lists and numbers for a checkpoint; `from_plain` restores the same history bit for bit."""
        return {
            "earlier": [counts_DE.tolist() for counts_DE in self.recent[:-1]],
            "mean": None if self.mean is None else self.mean.tolist(),
            "parts": None if self.parts is None else self.parts.tolist(),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "History":
        """Return the history that `to_plain` described."""
        if plain["parts"] is None:
            return cls()
        parts = np.array(plain["parts"], dtype=np.int64)
        earlier = (np.array(counts, dtype=np.int64) for counts in plain["earlier"])
        mean = None if plain["mean"] is None else np.array(plain["mean"], dtype=np.float64)
        return cls((*earlier, parts.sum(0)), mean, parts)


def prediction_error(predicted_BDE: np.ndarray, actual_BDE: np.ndarray) -> float:
    """Return the share of tokens predicted for the wrong expert or source: 0 is perfect, 1 is all wrong. It is half the
    sum of absolute differences, over the number of actual tokens (0 without tokens)."""
    tokens = int(np.sum(actual_BDE))
    wrong_DE = np.abs(np.sum(predicted_BDE, axis=0) - np.sum(actual_BDE, axis=0))
    return float(wrong_DE.sum()) / (2 * tokens) if tokens else 0.0


def _shared(total_DE: np.ndarray, parts_BDE: np.ndarray | None) -> np.ndarray:
    """Return [B, D, E] int64: parts that add up to the total, each cell in the proportions of `parts_BDE`."""
    if parts_BDE is None or len(parts_BDE) == 1:
        return total_DE[None]
    if np.array_equal(parts_BDE.sum(0), total_DE):
        return parts_BDE.copy()
    count = len(parts_BDE)
    even_BDE = np.broadcast_to(np.arange(1, count + 1)[:, None, None] / count, parts_BDE.shape)
    sum_DE = parts_BDE.sum(0)
    share_BDE = np.divide(parts_BDE.cumsum(0), sum_DE, out=even_BDE.copy(), where=sum_DE > 0)
    return np.diff(np.rint(share_BDE * total_DE).astype(np.int64), axis=0, prepend=0)


def _extrapolate(recent_BDE: np.ndarray) -> np.ndarray:
    """Return the value, one step after the last, of the least-squares line through B iterations."""
    size = len(recent_BDE)
    steps_B = np.arange(size) - (size - 1) / 2
    # The prediction is linear in the observations: one weight per iteration
    weights_B = 1 / size + steps_B * (steps_B[-1] + 1) / (steps_B**2).sum()
    return np.tensordot(weights_B, recent_BDE, axes=1)


def _with_row_sums(expected_DE: np.ndarray, sums_D: np.ndarray) -> np.ndarray:
    """Scale each row to its sum, rounded by largest remainder; ties go to the lower expert."""
    totals_D = expected_DE.sum(1)
    scale_D = np.divide(sums_D, totals_D, out=np.zeros_like(totals_D, dtype=np.float64), where=totals_D > 0)
    scaled_DE = expected_DE * scale_D[:, None]
    # Spread the sum of a row without expected tokens evenly
    scaled_DE[totals_D <= 0] = (sums_D[totals_D <= 0] / expected_DE.shape[1])[:, None]
    floor_DE = np.floor(scaled_DE).astype(np.int64)
    missing_D = sums_D - floor_DE.sum(1)
    order_DE = np.argsort(floor_DE - scaled_DE, axis=1, kind="stable")
    rank_DE = np.argsort(order_DE, axis=1, kind="stable")
    return floor_DE + (rank_DE < missing_D[:, None])
