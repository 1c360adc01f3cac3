"""observe/balance.py: the exact fields of the log line, and TensorBoard's names."""

import math

import numpy as np
import pytest

from megatron_balance.cost.calibration import Factors
from megatron_balance.observe.balance import (
    LARGEST_GAIN,
    LayerReport,
    calibration_field,
    evenness,
    log_fields,
    tensorboard_scalars,
)


def report(**changes: float) -> LayerReport:
    ratios = dict.fromkeys(("ratio_before", "ratio_after", "ratio_planned", "rb"), 1.0)
    uncertified = {"certified": math.nan}
    return LayerReport(**(dict.fromkeys(LayerReport._fields, 0.0) | ratios | uncertified | changes))


def test_log_fields_are_means_over_iterations() -> None:
    line = log_fields(
        [
            {1: report(ratio_before=3.0, hosts_added=2, experts_moved=4, agg_bytes=3e6), 2: report(plan_seconds=0.006)},
            {
                1: report(ratio_after=2.0, trans_bytes=2e6, plan_wait_seconds=2e-4, trans_wait_seconds=2e-3),
                2: report(hosts_added=1, agg_wait_seconds=4e-3, trans_wait_seconds=3e-3),
            },
        ]
    )
    assert line == (
        " max/mean load: 1.50 -> 1.25 | planned: 1.00 | hosts added: 1.5 | experts moved: 2 | plan (ms): 3.0 |"
        " trans+agg (MB): 2.5 | waited for plan/trans/agg (ms): 0.1/2.5/2.0 |"
    )


def test_certified_passes_appear_with_their_flag_only() -> None:
    line = log_fields([{1: report(certified=1.0), 2: report(certified=0.5)}, {1: report(certified=1.0)}])
    assert " planned: 1.00 | certified: 87.5% | hosts added: 0 |" in line
    tags = tensorboard_scalars({1: report(certified=0.25), 2: report(certified=0.75)}, Factors())
    assert (tags["moe/certified_layer_0"], tags["moe/certified_p50"]) == (0.25, 0.5)
    assert "certified" not in log_fields([{1: report()}]) + str(tensorboard_scalars({1: report()}, Factors()))


@pytest.mark.parametrize(("iterations", "shown"), [(1, "1"), (10, "0.1"), (100, "0.01"), (300, "0.003")])
def test_balancing_that_acted_seldom_is_not_none(iterations: int, shown: str) -> None:
    line = log_fields([{1: report(hosts_added=1)}] + [{1: report()}] * (iterations - 1))
    assert f"| hosts added: {shown} | experts moved: 0 |" in line


def test_calibration_field() -> None:
    line = calibration_field(Factors(exchange=1284.5, experts=0.98765, trans=2e-5))
    assert line == " measured/predicted exchange/experts/trans/agg: 1.28e+03/0.988/2e-05/1 |"


def test_evenness() -> None:
    assert evenness(np.array([[4, 0, 2, 2]]), np.array([[3, 1, 2, 2]])) == (2.0, 1.5, pytest.approx(2.0))
    assert evenness(np.array([[4, 0]]), np.array([[2, 2]])) == (2.0, 1.0, LARGEST_GAIN)
    assert evenness(np.array([[10**6, 0]]), np.array([[10**6 // 2 + 1, 10**6 // 2 - 1]]))[2] == LARGEST_GAIN
    assert evenness(np.zeros((1, 2)), np.zeros((1, 2))) == (1.0, 1.0, 1.0)
    # Each microbatch waits for its own heaviest rank, even if ranks have equally many tokens in the iteration
    assert evenness(np.array([[4, 0], [0, 4]]), np.array([[2, 2], [1, 3]])) == (2.0, 1.25, 0.0)


def test_tensorboard_scalars() -> None:
    reports = {2 * layer: report(ratio_after=1 + layer, hosts_added=layer % 2) for layer in range(1, 12)}
    factors = Factors(1.5, 2.5, 3.5, 4.5)
    scalars = tensorboard_scalars(reports, factors)
    found = [scalars.pop(f"moe/calibration_{name}") for name in ("exchange", "experts", "trans", "agg")]
    assert found == [1.5, 2.5, 3.5, 4.5]
    names = [f"moe/{name}" for name in LayerReport._fields if name != "certified"]
    suffixes = [f"_layer_{layer - 1}" for layer in reports] + ["_p50", "_p75", "_p90", "_p95"]
    assert scalars.keys() == {f"{name}{suffix}" for name in names for suffix in suffixes}
    assert scalars["moe/ratio_after_layer_3"] == 3.0
    assert (scalars["moe/ratio_after_p50"], scalars["moe/ratio_after_p90"]) == (7.0, 11.0)
    assert scalars["moe/hosts_added_p50"] == 1.0
    assert all(type(value) is float and math.isfinite(value) for value in scalars.values())
