"""Seconds of a layer, given sums over its microbatches: functions of numbers in compiled loops, or of arrays."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_balance.device.compiled import compiled


class Line(NamedTuple):
    """Seconds of the experts' computation on a rank."""

    overhead: float
    per_token: float


class LayerLines(NamedTuple):
    """Numbers of a CostModel."""

    microbatches: int
    latency: float
    """Seconds of an exchange of empty messages."""
    forward: Line
    backward: Line
    trans_each: int
    """See `CostModel.trans_each`."""
    hidden_trans: float
    hidden_agg: float
    """Seconds of Trans and of Agg that other computation hides."""
    experts: float
    """Fraction of the experts' computation that hides Trans and Agg, too."""
    slowed: float
    """See `Overlap.slowed`."""


@compiled(None)
def computing(computed: Any, line: Line, microbatches: int) -> Any:
    """Return the seconds of Eq. 2 or 3 for the rank with the most tokens."""
    return microbatches * line.overhead + line.per_token * computed


@compiled(None)
def _charged(sent: Any, hiding: Any, slowed: float) -> Any:
    return np.maximum(0.0, sent - hiding) + slowed * np.minimum(sent, hiding)


@compiled(None)
def charged(computed: Any, trans: Any, agg: Any, lines: LayerLines) -> tuple[Any, Any]:
    """Return the seconds by which Trans and Agg lengthen the layer: those that no computation hides, and those by which
    the hidden ones slow it down. Arguments as in `layer_parts`."""
    if lines.trans_each:
        # The network carries the dispatch while it carries the forward pass's Trans
        again = (lines.trans_each - 1) * trans
        left = np.maximum(0.0, lines.hidden_trans - again)
        return trans + _charged(again, lines.hidden_trans, lines.slowed), _charged(agg, left, lines.slowed)
    forward = lines.experts * computing(computed, lines.forward, lines.microbatches)
    backward = lines.experts * computing(computed, lines.backward, lines.microbatches)
    return (
        _charged(trans, forward + lines.hidden_trans, lines.slowed),
        _charged(agg, backward + lines.hidden_agg, lines.slowed),
    )


@compiled(None)
def _unhidden(exchanging: Any, computed: Any, line: Line, degrees: Sequence[int], lines: LayerLines) -> Any:
    """Return the seconds of one direction's dispatch and combine that computation does not hide. The first chunk's
    dispatch and the last chunk's combine overlap with no computation."""
    seconds = computing(computed, line, lines.microbatches)
    best = np.inf
    for degree in degrees:
        calls = lines.microbatches * degree
        there_and_back = 2 * (calls * lines.latency + exchanging)
        longer = seconds + (calls - lines.microbatches) * line.overhead
        best = np.minimum(best, np.maximum(there_and_back, longer + there_and_back / degree) - seconds)
    return best


@compiled(None)
def layer_parts(
    exchanging: Any, computed: Any, trans: Any, agg: Any, degrees: Sequence[int], lines: LayerLines
) -> tuple[Any, Any, Any, Any, Any]:
    """Return the fields of a LayerTime.

    Args:
        exchanging: seconds of one of the layer's four exchanges beyond its latency (Eq. 1); all have the same rows.
        computed: tokens of the rank that computes longest, at the mean speed.
        trans, agg: seconds of Trans and Agg without overlap; of one Trans, if each microbatch has two.
        degrees: see `CostModel.degrees`.
    """
    all_to_all = 4 * (lines.microbatches * lines.latency + exchanging)
    if len(degrees) > 1 or degrees[0] > 1:
        all_to_all = _unhidden(exchanging, computed, lines.forward, degrees, lines)
        all_to_all = all_to_all + _unhidden(exchanging, computed, lines.backward, degrees, lines)
    forward = computing(computed, lines.forward, lines.microbatches)
    backward = computing(computed, lines.backward, lines.microbatches)
    trans, agg = charged(computed, trans, agg, lines)
    return all_to_all, forward, backward, trans, agg


@compiled(None)
def layer_seconds(
    exchanging: float, computed: float, trans: float, agg: float, degrees: np.ndarray, lines: LayerLines
) -> float:
    """Return the layer's seconds; arguments as in `layer_parts`."""
    all_to_all, forward, backward, trans, agg = layer_parts(exchanging, computed, trans, agg, degrees, lines)
    return all_to_all + forward + backward + trans + agg
