"""Ranks that plan for each other train like ranks that plan everything themselves, bit for bit."""

from typing import Any

import pytest

from megatron_balance.planning.policies.pro_prophet import ProProphet
from megatron_balance.timeline.agreement import Compared, Shared
from megatron_balance.training.loop import train_step
from tests.distributed import runs
from tests.variants import variants

SHIFTING = "--moe-router-force-workload rotating_hotspot"
REPLICAS = "--expert-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
CASES = {
    "blockwise": f"--expert-model-parallel-size 4 {SHIFTING} --balance-policy pro_prophet --balance-overlap blockwise",
    "every second iteration": f"{REPLICAS} {SHIFTING} --balance-policy top2 --balance-interval 2",
    "pipeline": f"--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 {SHIFTING} --balance-policy flexmoe",
}
ITERATIONS = 3


def trained(flags: str, shared: bool) -> tuple[runs.Curve, list[dict[str, Any]]]:
    """Return what was learned, and the balancer's state after each iteration."""
    run = runs.build(flags)
    balancer = run.balancer
    assert balancer is not None and isinstance(balancer.agreement, Shared)
    if not shared:
        balancer.agreement = Compared(balancer.deciders)
    reports = []
    states = []
    for _ in range(ITERATIONS):
        reports.append(train_step(run))
        states.append(balancer.state()["layers"])
    return runs.curve_of(reports), states


@pytest.mark.parametrize("case", variants([*CASES], quick=("blockwise",)))
def test_shared_plans_change_nothing(ranks, profiles, case: str) -> None:
    flags = f"{CASES[case]} --balance-profile {profiles[2 if 'size 2' in CASES[case] else 4]}"
    shared, alone = (ranks(4).run(trained, flags, shared) for shared in (True, False))
    assert shared == alone
    placements = {state["placement"] for _, states in shared for layers in states for state in layers.values()}
    assert len(placements) > 1, "the policy acts"


def test_owners_that_change_are_agreed_on_alike(ranks, profiles) -> None:
    flags = "--expert-model-parallel-size 2 --moe-router-force-workload hot_rank --balance-policy pro_prophet "
    flags += f"--balance-ownership transfer --balance-profile {profiles[2]}"
    shared, alone = (ranks(4).run(trained, flags, shared) for shared in (True, False))
    assert shared == alone
    placements = [layer["placement"] for states in shared[0][1] for layer in states.values()]
    assert any(not placement.startswith("0 1 2 3 ") for placement in placements), placements


def planned(flags: str) -> int:
    """Return the number of plans that this rank makes in ITERATIONS iterations."""
    plan = ProProphet.plan
    made = []

    def counted(*args: Any) -> Any:
        made.append(args)
        return plan(*args)

    ProProphet.plan = counted
    try:
        runs.train(flags, ITERATIONS)
    finally:
        ProProphet.plan = plan
    return len(made)


def test_each_rank_plans_its_share(ranks, profiles) -> None:
    flags = f"{CASES['blockwise']} --balance-profile {profiles[4]} --num-layers 5"
    assert ranks(4).run(planned, flags) == [2 * ITERATIONS, *[ITERATIONS] * 3]
