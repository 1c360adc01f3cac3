"""How well balancing works, in the numbers of the training log line and of TensorBoard.

Shape suffix: D expert-parallel ranks.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.placement.cost_model import balance_gain, balance_ratio

PERCENTILES = (50, 90)
"""Over layers, in TensorBoard."""

LARGEST_GAIN = 1000.0
"""What stands for an infinite RB: no plot shows infinity."""


class LayerReport(NamedTuple):
    """One MoE layer in one iteration."""

    ratio_before: float
    """Heaviest rank's tokens over the mean (FlexMoE Eq. 6), had experts been laid out in order and computed by
    their owners; 1 is even."""

    ratio_after: float
    """The same as it was computed."""

    rb: float
    """Pro-Prophet's RB, the ratio of standard deviations before and after; at most LARGEST_GAIN."""

    hosts_added: float
    """(expert, rank) pairs where a rank computed an expert that it does not own."""

    trans_bytes: float
    agg_bytes: float
    """What Trans and Agg moved, over all links."""

    plan_seconds: float
    plan_wait_seconds: float
    trans_wait_seconds: float
    agg_wait_seconds: float
    """How long computation waited for Plan, Trans and Agg: what of them was not hidden."""

    predicted_seconds: float
    """The cost model's time of the layer."""

    measured_seconds: float
    prediction_error: float
    """Share of tokens that were predicted on the wrong expert or source, `predictor.prediction_error`."""

    experts_moved: float = 0.0
    """Experts that changed their owner after the iteration."""

    transfer_bytes: float = 0.0
    """What they moved with their optimizer state, over all links."""


def evenness(before_D: np.ndarray, after_D: np.ndarray) -> tuple[float, float, float]:
    """`ratio_before`, `ratio_after` and `rb` of tokens per rank before and after balancing."""
    gain = min(balance_gain(before_D, after_D), LARGEST_GAIN)
    return balance_ratio(before_D), balance_ratio(after_D), gain


def mean_over_ranks(own: Mapping[int, LayerReport], num_layers: int) -> dict[int, LayerReport]:
    """Each layer's report, averaged over the ranks that have one; every rank of the job calls it.

    Args:
        own: this rank's reports by layer number, 1 to `num_layers`; empty for a rank that has nothing to add.
    """
    table = torch.zeros(num_layers + 1, len(LayerReport._fields) + 1, dtype=torch.float64)
    for layer, report in own.items():
        table[layer] = torch.tensor([*report, 1.0], dtype=torch.float64)
    table = table.to(torch.cuda.current_device())
    dist.all_reduce(table)
    return {
        layer: LayerReport(*(value / ranks for value in values))
        for layer, (*values, ranks) in enumerate(table.tolist())
        if ranks
    }


def log_fields(iterations: Sequence[Mapping[int, LayerReport]]) -> str:
    """The log line's fields about balance, ending in a bar: means over iterations of layer -> report.

    Load ratios are means over layers; hosts, experts moved, planning time, waits and bytes are sums over layers.
    """

    def averaged(name: str) -> float:
        return statistics.fmean(
            statistics.fmean(getattr(report, name) for report in layers.values()) for layers in iterations
        )

    def summed(*names: str) -> float:
        return statistics.fmean(
            sum(getattr(report, name) for report in layers.values() for name in names) for layers in iterations
        )

    waited = "/".join(f"{summed(f'{name}_wait_seconds') * 1e3:.1f}" for name in ("plan", "trans", "agg"))
    return (
        f" max/mean load: {averaged('ratio_before'):.2f} -> {averaged('ratio_after'):.2f} |"
        f" hosts added: {_count(summed('hosts_added'))} | experts moved: {_count(summed('experts_moved'))} |"
        f" plan (ms): {summed('plan_seconds') * 1e3:.1f} |"
        f" trans+agg (MB): {summed('trans_bytes', 'agg_bytes') / 1e6:.1f} |"
        f" waited for plan/trans/agg (ms): {waited} |"
    )


def tensorboard_scalars(reports: Mapping[int, LayerReport]) -> dict[str, float]:
    """One iteration's numbers under Megatron's names: `moe/{name}_layer_{i}`, and `moe/{name}_p50` over layers.

    There, the first layer of the model is number 0.
    """
    scalars = {}
    for name in LayerReport._fields:
        values = {layer: getattr(report, name) for layer, report in reports.items()}
        scalars |= {f"moe/{name}_layer_{layer - 1}": float(value) for layer, value in values.items()}
        for percent in PERCENTILES:
            scalars[f"moe/{name}_p{percent}"] = float(np.percentile(list(values.values()), percent))
    return scalars


def _count(mean: float) -> str:
    """A mean of counts: whole if it is, else with a decimal, or a digit where that would read as none at all."""
    if mean == int(mean):
        return str(int(mean))
    return f"{mean:.1f}" if mean >= 0.05 else f"{mean:.1g}"
