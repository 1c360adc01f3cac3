"""Multi-token prediction: runs of our layer against megatron-core's, with a policy, on other layouts."""

import pytest

from tests.distributed import runs
from tests.distributed.runs import deviation

MTP = "--mtp-num-layers 2 --position-embedding-type rope --disable-bias-linear --swiglu --global-batch-size 8"
LAYOUTS = {
    "EP2": (2, f"{MTP} --expert-model-parallel-size 2"),
    "EP2xPP2": (4, f"{MTP} --expert-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "EP2xCP2": (4, f"{MTP} --expert-model-parallel-size 2 --context-parallel-size 2"),
    "EP2xTP2": (
        4,
        f"{MTP} --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 1",
    ),
}
QUICK = ("EP2", "EP2xPP2")
ITERATIONS = 3


def names_and_losses(flags: str) -> list[dict[str, float]]:
    return [report.losses for report in runs.train(flags, ITERATIONS)]


parametrized = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)


@parametrized
def test_runs_follow_megatrons_layer(ranks, name: str) -> None:
    world_size, flags = LAYOUTS[name]
    ours, theirs = (
        ranks(world_size).run(names_and_losses, f"{flags} --moe-layer-impl {layer}")[-1]
        for layer in ("balanced", "megatron")
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert {"lm loss", "mtp_1 loss", "mtp_2 loss", "load_balancing_loss"} <= mine.keys() == other.keys()
        assert all(abs(mine[key] - other[key]) <= 1e-6 * other[key] for key in mine)


@parametrized
def test_policies_act_on_predicting_layers_and_change_nothing(ranks, curve_of, profiles, name: str) -> None:
    world_size, flags = LAYOUTS[name]
    hot = f"{flags} --moe-router-force-workload hot_experts"
    policy = f"--balance-policy quota --balance-overlap blockwise --balance-profile {profiles[2]}"
    outcomes = ranks(world_size).run(hosts_by_layer, f"{hot} {policy}")
    curve, hosts = outcomes[-1]
    assert {1, 2, 3, 4} == hosts.keys() and all(hosts[layer] > 0 for layer in (3, 4)), hosts
    assert deviation(curve, curve_of(f"{hot} --moe-layer-impl megatron", ITERATIONS, world_size)) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("per_token", ["", "--calculate-per-token-loss"])
def test_parts_of_sequences_follow_whole_ones(curve_of, per_token: str) -> None:
    world_size, flags = LAYOUTS["EP2xCP2"]
    flags += f" {per_token}"
    alone = flags.replace("--context-parallel-size", "--eval-iters")
    assert deviation(*(curve_of(one, ITERATIONS, world_size) for one in (flags, alone))) <= 1e-6


def hosts_by_layer(flags: str) -> tuple[runs.Curve, dict[int, float]]:
    """Return the curve of a run, and by layer the hosts that its policy added."""
    reports = runs.train(flags, ITERATIONS)
    layers = {number for report in reports for number in report.balance}
    return runs.curve_of(reports), {
        number: sum(report.balance[number].hosts_added for report in reports) for number in layers
    }
