"""A run with any two compatible choices of a layout follows the run without optional features."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from megatron_balance.training.loop import train_step
from megatron_balance.training.run import Run
from megatron_balance.workloads.forced_routing import ExpertChooser
from tests import features, layouts
from tests.distributed import runs
from tests.distributed.runs import Curve, deviation, plan_apart
from tests.layouts import QUICK, Layout
from tests.variants import variants

TOLERANCE = 1e-5
"""Relative, for every loss and gradient norm."""

ITERATIONS = 3


class Trained(NamedTuple):
    """What one rank observes in a run."""

    curve: Curve
    acted: list[float]
    """Hosts added and experts moved, in each iteration."""
    loads_differ: bool
    """Whether replicas of each layer had different loads, in every iteration."""
    placements_differ: bool
    """Whether replicas of some layer had different placements, in some iteration."""
    unequal: list[str]
    """Parameters that differ from another replica's, bit for bit."""


def trained(flags: str, iterations: int, mutate: Callable[[Run], None] | None = None) -> Trained:
    """Train a run on this rank and compare with its replicas; `mutate` changes the built run before it trains."""
    run = runs.build(flags)
    if mutate is not None:
        mutate(run)
    reports = []
    loads = []
    for _ in range(iterations):
        reports.append(train_step(run))
        known = {} if run.balancer is None else run.balancer.loads()
        loads.extend((counts_DE.tolist(), str(placement)) for counts_DE, placement in known.values())
    acted = [sum(layer.hosts_added + layer.experts_moved for layer in report.balance.values()) for report in reports]
    everyone: list[list] = [[]] * run.groups.expt_dp.size()
    dist.all_gather_object(everyone, loads, group=run.groups.expt_dp)
    columns = [list(zip(*of_replicas, strict=True)) for of_replicas in zip(*everyone, strict=True)]
    loads_differ = all(any(load != counts[0] for load in counts) for counts, _ in columns)
    placements_differ = any(len(set(placements)) > 1 for _, placements in columns)
    return Trained(runs.curve_of(reports), acted, loads_differ, placements_differ, unequal_replicas(run))


def shifted(choose: ExpertChooser, layers: int) -> ExpertChooser:
    """Return the choices of other layers."""
    return lambda tokens, *, layer, **sizes: choose(tokens, layer=layer + layers, **sizes)


def route_apart(run: Run) -> None:
    """Give each replica different hot experts."""
    for chunk in run.model:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.router_replay.choose = shifted(module.router_replay.choose, 100 * run.groups.expt_dp.rank())


def both_apart(run: Run) -> None:
    route_apart(run)
    plan_apart(run)


def unequal_replicas(run: Run) -> list[str]:
    """Return the names of parameters that differ on another data-parallel rank."""
    unequal = []
    for chunk in run.model:
        if run.config.ddp.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
        for name, parameter in chunk.named_parameters():
            group = run.groups.dp_cp if getattr(parameter, "allreduce", True) else run.groups.expt_dp
            others = [torch.empty_like(parameter) for _ in range(group.size())]
            dist.all_gather(others, parameter.detach(), group=group)
            if not all(torch.equal(other, parameter) for other in others):
                unequal.append(name)
    return unequal


def check(
    ranks, curve_of, profiles: dict[int, Path], layout: Layout, mutate: Callable[[Run], None] = route_apart
) -> None:
    """Check that a run follows its reference, and that replicas stay equal although they plan for different loads."""
    flags = layouts.flags_of(layout)
    world_size = layouts.world_size(layout)
    balanced = layout["policy"] != "none"
    alone = layouts.size(layout, "replicas") == 1
    if balanced:
        flags += f" --balance-profile {profiles[layouts.size(layout, 'experts')]}"
    outcomes = ranks(world_size).run(trained, flags, ITERATIONS, mutate)
    curve, acted, *_ = outcomes[0]
    assert all(outcome[:2] == (curve, acted) for outcome in outcomes)
    assert not any(outcome.unequal for outcome in outcomes), outcomes
    if layouts.must_act(layout):
        assert (sum(hosts > 0 for hosts in acted) >= ITERATIONS / 2) == balanced, acted
    if any(acted) and not alone:
        assert all(outcome.loads_differ for outcome in outcomes)
        apart = layout["ownership"] == "lend" or layout["overlap"].startswith("two-scales")
        assert any(outcome.placements_differ for outcome in outcomes) == apart
    wanted = curve_of(layouts.reference(layout), ITERATIONS, world_size, route_apart)
    assert deviation(curve, wanted) <= TOLERANCE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Compute the covering array and the pairs, which takes seconds, only when they are trained."""
    is_slow = metafunc.config.getoption("--slow")
    if "layout" in metafunc.fixturenames:
        slow = layouts.array()[0][len(QUICK) :] if is_slow else []
        rows = variants(QUICK, layouts.FEWEST)
        rows += [pytest.param(layout, id=layouts.name_of(layout), marks=pytest.mark.slow) for layout in slow]
        metafunc.parametrize("layout", rows)
    if "pair" in metafunc.fixturenames:
        metafunc.parametrize("pair", features.together() if is_slow else [], ids="-".join)


def test_layouts_follow_the_plain_run(ranks, curve_of, profiles, layout: Layout) -> None:
    check(ranks, curve_of, profiles, layout)


def test_replicas_that_plan_differently(ranks, curve_of, profiles) -> None:
    """Each replica balances only every second layer, not the same ones; the order of all-gathers stays the same."""
    layout = layouts.layout_of(*layouts.REPLICAS, *layouts.GATHER, "top2", "blockwise")
    check(ranks, curve_of, profiles, layout, both_apart)


LONG = (
    "--num-layers 3 --hidden-size 128 --moe-ffn-hidden-size 1024 --seq-length 256 --micro-batch-size 1 "
    "--disable-bias-linear --swiglu --expert-model-parallel-size 2 --moe-router-force-workload rotating_hotspot"
)
MANY = 200
COMPARED = 20


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [None, plan_apart], ids=["alike", "apart"])
@pytest.mark.parametrize("policy", ["quota", "flexmoe", "demi"])
def test_many_iterations_without_a_stop(
    ranks, curve_of, profiles, policy: str, mutate: Callable[[Run], None] | None
) -> None:
    """Two replicas all-gather parameters in many buckets while Trans and Agg overlap with computation."""
    gather = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000"
    balanced = f"{gather} --balance-policy {policy} --balance-overlap blockwise --balance-profile {profiles[2]}"
    outcomes = ranks(4).run(trained, f"{LONG} {balanced}", MANY, mutate, timeout=550)
    curve, acted, *_ = outcomes[0]
    assert not any(outcome.unequal for outcome in outcomes)
    assert sum(hosts > 0 for hosts in acted) >= MANY / 2, acted
    assert any(outcome.placements_differ for outcome in outcomes)
    assert deviation(curve[:COMPARED], curve_of(LONG, COMPARED)) <= TOLERANCE


@pytest.mark.slow
def test_pairs_of_features_follow_the_plain_run(ranks, curve_of, profiles, tmp_path, pair: tuple[str, str]) -> None:
    flags = features.flags_of(*pair)
    world_size = features.world_size(*pair)
    balanced = "--balance-policy" in flags
    if balanced:
        profile = profiles[2]
        if "dedup" in pair:
            # Expert-parallel ranks are on different nodes
            profile = tmp_path / "profile.json"
            runs.fast_links(2, 1).save(profile)
        flags += f" --balance-profile {profile}"
    curve, hosts = ranks(world_size).run(runs.train_hosts, flags, ITERATIONS)[0]
    assert (sum(hosts) > 0) == balanced
    wanted = curve_of(features.reference(*pair), ITERATIONS, world_size)
    assert deviation(curve, wanted) <= (2e-2 if "codec" in pair else TOLERANCE)
