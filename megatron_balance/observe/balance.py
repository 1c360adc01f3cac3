"""Measures of how well balancing works, for the training log line and TensorBoard."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.cost.calibration import Factors
from megatron_balance.cost.model import balance_gain, balance_ratio
from megatron_balance.device import host_memory

PERCENTILES = (50, 75, 90, 95)
"""Percentiles over layers in TensorBoard."""

LARGEST_GAIN = 1000.0
"""Upper limit of RB, because a plot cannot show infinity."""


class LayerReport(NamedTuple):
    """Balance, bytes and times of one MoE layer in one iteration.

    Fields in SPORADIC concern placements, which change now and then. Their values are means over this iteration and the
    preceding iterations without a report.
    """

    ratio_before: float
    """Heaviest rank's tokens over the mean (FlexMoE Eq. 6) if the initial owners computed all tokens; 1 is even."""
    ratio_after: float
    """The same ratio with the iteration's placement."""
    ratio_planned: float
    """The same ratio with the load that this placement was planned for."""
    rb: float
    """Pro-Prophet's RB: standard deviation before balancing over that after it; at most LARGEST_GAIN."""
    hosts_added: float
    """Number of (expert, rank) pairs in which the rank computes the expert without owning it."""
    trans_bytes: float
    agg_bytes: float
    """Bytes moved by Trans and by Agg, over all links."""
    plan_seconds: float
    plan_wait_seconds: float
    trans_wait_seconds: float
    agg_wait_seconds: float
    """Seconds for which computation waited for Plan, Trans and Agg, that is, their parts that were not overlapped."""
    predicted_seconds: float
    """Time of the layer by the cost model, calibrated with the preceding iterations."""
    measured_seconds: float
    """Time of the layer's exchanges and experts, and of its waits for Trans and Agg."""
    prediction_error: float
    """Fraction of tokens predicted for the wrong expert or source (`predictor.prediction_error`)."""
    certified: float = math.nan
    """Fraction of passes that `--balance-certify` gave memory of constant size; NaN without this flag."""
    expert_load_min: float = 1.0
    expert_load_max: float = 1.0
    expert_load_std: float = 0.0
    """Tokens of the layer's experts over their mean: minimum, maximum, and standard deviation."""
    experts_moved: float = 0.0
    """Number of experts that changed their owner after the iteration."""
    transfer_bytes: float = 0.0
    """Bytes moved with those experts, including optimizer state, over all links."""
    predicted_exchange_seconds: float = 0.0
    measured_exchange_seconds: float = 0.0
    """The layer's exchanges, minus the predicted time for which this rank waits in them for slower ranks."""
    predicted_experts_seconds: float = 0.0
    measured_experts_seconds: float = 0.0
    """Computation of a rank's own tokens."""
    predicted_trans_seconds: float = 0.0
    measured_trans_seconds: float = 0.0
    predicted_agg_seconds: float = 0.0
    measured_agg_seconds: float = 0.0
    """Trans and Agg, overlapped or not, until this rank's own part is complete."""


COLUMNS = len(LayerReport._fields) + 1
"""Columns of a table of reports: the fields, and the number of ranks."""

SPORADIC = (
    *("hosts_added", "trans_bytes", "agg_bytes", "experts_moved", "transfer_bytes"),
    *("plan_seconds", "plan_wait_seconds", "trans_wait_seconds", "agg_wait_seconds"),
)


def evenness(before_BD: np.ndarray, after_BD: np.ndarray) -> tuple[float, float, float]:
    """Return `ratio_before` and `ratio_after` (heaviest rank of each microbatch), and `rb` (whole iteration)."""
    gain = min(balance_gain(before_BD.sum(0), after_BD.sum(0)), LARGEST_GAIN)
    return balance_ratio(before_BD), balance_ratio(after_BD), gain


def spread(tokens_E: np.ndarray) -> tuple[float, float, float]:
    """Return `expert_load_min`, `expert_load_max` and `expert_load_std` of the tokens per expert."""
    mean = tokens_E.mean()
    if not mean:
        return 1.0, 1.0, 0.0
    return float(tokens_E.min() / mean), float(tokens_E.max() / mean), float(tokens_E.std() / mean)


def sum_over_ranks(own: Mapping[int, LayerReport], num_layers: int) -> torch.Tensor:
    """Start to add up the reports of layers 1 to `num_layers`; every rank of the job calls this.

    Return the table for `means`. It is complete once the device has done all work queued by now.
    """
    rows = [[*own[layer], 1.0] if layer in own else [0.0] * COLUMNS for layer in range(num_layers + 1)]
    total = host_memory.to_current_device(rows, torch.float64)
    dist.all_reduce(total)
    return host_memory.to_host(total)


def means(table: torch.Tensor) -> dict[int, LayerReport]:
    """Return each layer's report, averaged over the ranks that have one."""
    return {
        layer: LayerReport(*(value / ranks for value in values))
        for layer, (*values, ranks) in enumerate(table.tolist())
        if ranks
    }


def mean_over_ranks(own: Mapping[int, LayerReport], num_layers: int) -> dict[int, LayerReport]:
    """Wait for the device and return all ranks' mean reports; every rank of the job calls this."""
    table = sum_over_ranks(own, num_layers)
    torch.cuda.synchronize()
    return means(table)


def component_seconds(reports: Mapping[int, LayerReport]) -> tuple[list[float], list[float]]:
    """Return the measured and the predicted seconds of each component of `Factors`, summed over layers."""
    measured, predicted = (
        [math.fsum(getattr(one, f"{kind}_{name}_seconds") for one in reports.values()) for name in Factors._fields]
        for kind in ("measured", "predicted")
    )
    return measured, predicted


def log_fields(iterations: Sequence[Mapping[int, LayerReport]], lengths: Sequence[float] | None = None) -> str:
    """Return the log line's fields about balance, ending in a bar, averaged over iterations of layer -> report.

    Load ratios are means over layers; hosts, experts moved, planning time, waits and bytes are sums over layers.
    `lengths` has the number of iterations in the mean of each report's SPORADIC fields; None: 1.
    """

    def averaged(name: str) -> float:
        return statistics.fmean(
            statistics.fmean(getattr(report, name) for report in layers.values()) for layers in iterations
        )

    def summed(*names: str) -> float:
        return statistics.fmean(
            [sum(getattr(report, name) for report in layers.values() for name in names) for layers in iterations],
            lengths,
        )

    certified = averaged("certified")
    proven = "" if math.isnan(certified) else f" certified: {certified:.1%} |"
    waited = "/".join(f"{summed(f'{name}_wait_seconds') * 1e3:.1f}" for name in ("plan", "trans", "agg"))
    return (
        f" max/mean load: {averaged('ratio_before'):.2f} -> {averaged('ratio_after'):.2f} |"
        f" planned: {averaged('ratio_planned'):.2f} |{proven}"
        f" hosts added: {_count(summed('hosts_added'))} | experts moved: {_count(summed('experts_moved'))} |"
        f" plan (ms): {summed('plan_seconds') * 1e3:.1f} |"
        f" trans+agg (MB): {summed('trans_bytes', 'agg_bytes') / 1e6:.1f} |"
        f" waited for plan/trans/agg (ms): {waited} |"
    )


def calibration_field(factors: Factors) -> str:
    """Return the log line's field about calibration, ending in a bar."""
    return f" measured/predicted {'/'.join(factors._fields)}: {'/'.join(f'{factor:.3g}' for factor in factors)} |"


def tensorboard_scalars(reports: Mapping[int, LayerReport], factors: Factors) -> dict[str, float]:
    """Return an iteration's scalars by Megatron's tags; in `moe/{name}_layer_{i}`, layers count from 0."""
    scalars = {f"moe/calibration_{name}": factor for name, factor in factors._asdict().items()}
    for name in LayerReport._fields:
        values = {layer: value for layer, report in reports.items() if not math.isnan(value := getattr(report, name))}
        if not values:
            continue
        scalars |= {f"moe/{name}_layer_{layer - 1}": float(value) for layer, value in values.items()}
        for percent in PERCENTILES:
            scalars[f"moe/{name}_p{percent}"] = float(np.percentile(list(values.values()), percent))
    return scalars


def _count(mean: float) -> str:
    """Format a mean of counts: without decimals if whole, otherwise with one decimal or one significant digit."""
    if mean == int(mean):
        return str(int(mean))
    return f"{mean:.1f}" if mean >= 0.05 else f"{mean:.1g}"
