"""tools/bench/policy_time.py: different workloads, whole periods, and the table of measurements.

Shape suffixes: D expert-parallel ranks, E logical experts.
"""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import policy_table
import policy_time
from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.cost.model import balance_ratio
from megatron_balance.planning.policies import registered
from megatron_balance.workloads.synthetic import WORKLOADS, load_matrix

Sample = policy_table.Sample
NONE = policy_table.NONE
CEILING = policy_table.CEILING
RANKS = 4
EXPERTS = 16
TOPK = 2

times = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6)


def configured(flags: str) -> dict:
    machine = Machine(world_size=RANKS, cuda=False, transformer_engine=False, apex=False)
    line = f"{policy_time.COMMON} --moe-router-force-workload hot_rank --expert-model-parallel-size {RANKS} {flags}"
    config = parse_args(line.split(), machine)[0]
    return vars(config.transformer) | vars(config.balance) | vars(config.model)


def samples(seconds: list[float], **sums: float) -> list:
    return [Sample(one, **sums) for one in seconds]


def job(policy: float, none: float = 2.0, ceiling: float = 1.0, **sums: float) -> dict:
    """Return one iteration of each variant."""
    return {NONE: samples([none]), CEILING: samples([ceiling]), "a policy": samples([policy], **sums)}


@functools.cache
def load(workload: str, step: int) -> np.ndarray:
    """Return a load matrix [D, E] of the benched size."""
    return load_matrix(workload, RANKS, EXPERTS, TOPK, 256, seed=1235, step=step)


def ranks_load(workload: str, step: int) -> np.ndarray:
    """Return the tokens [D] that each rank's experts receive."""
    return load(workload, step).sum(0).reshape(RANKS, -1).sum(1)


def test_the_benched_size_tells_workloads_apart() -> None:
    found = configured("")
    assert (found["num_moe_experts"], found["moe_router_topk"], found["seq_length"]) == (EXPERTS, TOPK, 256)
    phases = {
        workload: [ranks_load(workload, step) for step in range(policy_time.whole_periods(workload, 1))]
        for workload in WORKLOADS
    }
    for one, other in itertools.combinations(phases, 2):
        assert not np.array_equal(phases[one], phases[other]), (one, other)
    uneven = {workload: max(map(balance_ratio, loads)) for workload, loads in phases.items()}
    assert uneven.pop("balanced") == 1 and min(uneven.values()) > 1.1


@given(st.integers(1, 20), st.integers(1, 40))
def test_every_phase_has_its_share_wherever_measuring_starts(wanted: int, start: int) -> None:
    for workload in WORKLOADS:
        assert wanted <= policy_time.whole_periods(workload, wanted) < wanted + 10
    assert policy_time.whole_periods("hot_rank", wanted) == wanted
    measured = policy_time.whole_periods("burst", wanted)
    bursts = [balance_ratio(ranks_load("burst", step)) > 1.3 for step in range(start, start + measured)]
    assert sum(bursts) * 4 == measured
    measured = policy_time.whole_periods("rotating_hotspot", wanted)
    hottest = [
        set(np.argsort(load("rotating_hotspot", step).sum(0))[-2:]) for step in range(start - 1, start + measured)
    ]
    assert sum(before != after for before, after in itertools.pairwise(hottest)) * 10 == measured


@pytest.mark.parametrize(
    "name", [name for name, flags in policy_time.VARIANTS.items() if flags.split()[0] in registered()]
)
def test_a_variant_has_its_policy_alone(name: str) -> None:
    variants = policy_time.variants_of([name], "--balance-guest-slots 3")
    assert list(variants) == [NONE, CEILING, name]
    none, ceiling, own = (configured(variant.flags) for variant in variants.values())
    assert (none["balance_policy"], ceiling["balance_policy"]) == ("none", "none")
    changed = {key for key in none if none[key] != ceiling[key] and not callable(none[key])}
    assert changed == {"moe_router_force_workload"} and ceiling["moe_router_force_workload"] == "balanced"
    assert own["balance_policy"] == policy_time.VARIANTS[name].split()[0] and own["balance_guest_slots"] == 3


@given(times, st.integers(1, 4))
def test_equals_are_equal_and_the_ceiling_closes_the_gap(seconds: list[float], repeats: int) -> None:
    half = [one / 2 for one in seconds]
    jobs = [
        {NONE: samples(seconds), CEILING: samples(half), "equal": samples(seconds), "best": samples(half)}
    ] * repeats
    assert policy_table.ratio(jobs, "equal") == 1 and policy_table.ratio(jobs, "best") == pytest.approx(0.5)
    assert policy_table.closed(jobs, "equal") == 0 and policy_table.closed(jobs, "best") == pytest.approx(1)


def test_a_burst_counts_for_its_share_of_the_iterations() -> None:
    calm = [1.0] * 6
    burst = [2.0] * 2
    found = {NONE: samples(calm + burst), CEILING: samples([1.0] * 8), "a policy": samples([*calm, 1.5, 1.5])}
    assert policy_table.ratio([found], "a policy") == pytest.approx(9 / 10)
    assert policy_table.closed([found], "a policy") == pytest.approx(0.5)


def test_one_noisy_job_decides_nothing_but_is_shown() -> None:
    jobs = [job(1.5), job(9.0), job(1.5)]
    assert policy_table.ratio(jobs, "a policy") == pytest.approx(0.75)
    assert "0.750 (0.750-4.500), 50%" in policy_table.row("burst", jobs, ["a policy"])


def test_no_share_is_made_of_no_gap() -> None:
    assert policy_table.closed([job(1.5, ceiling=1.97)], "a policy") is None
    assert policy_table.closed([job(1.5, ceiling=2.5)], "a policy") is None
    assert policy_table.closed([job(2.5, ceiling=1.9)], "a policy") == pytest.approx(-5)


def test_the_table_is_markdown_that_says_what_was_measured() -> None:
    jobs = [job(1.5, trans_bytes=3e6, agg_bytes=1e6), job(1.6, trans_bytes=5e6, agg_bytes=1e6, experts_moved=3.0)]
    rows = [*policy_table.heads(["a policy"]), policy_table.row("hot_rank", jobs, ["a policy"])]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0] == ["workload", "none, ms", "even routing, ms", "a policy"]
    assert cells[1] == ["---"] * 4
    assert cells[2] == ["hot_rank", "2000", "1000", "0.775 (0.750-0.800), 45%, 5.0 MB, 1.5 moved"]
    assert "moved" not in policy_table.row("hot_rank", jobs[:1], ["a policy"])


def test_planning_is_a_share_of_its_own_iteration() -> None:
    jobs = [
        {"a policy": [Sample(1.0, plan_seconds=0.02), Sample(2.0, plan_seconds=0.08)]},
        {"a policy": [Sample(1.0, plan_seconds=0.0), Sample(1.0, plan_seconds=0.1)]},
    ]
    assert "| 4.0% (10.0%) " in policy_table.plan_row("burst", jobs, ["a policy"])
    assert len(policy_table.plan_heads(["a policy"])) == 2


def test_an_iteration_is_summed_over_layers_and_lasts_as_long_as_on_its_slowest_rank() -> None:
    layer = SimpleNamespace(plan_seconds=1.0, trans_bytes=2.0, agg_bytes=3.0, experts_moved=4.0)
    by_rank = [
        {"a policy": [Sample.of(SimpleNamespace(seconds=seconds, balance={1: layer, 3: layer}))]}
        for seconds in (5.0, 7.0, 6.0)
    ]
    assert policy_table.joined(by_rank) == {"a policy": [Sample(7.0, 2.0, 4.0, 6.0, 8.0)]}
    assert Sample.of(SimpleNamespace(seconds=7.0, balance={})) == Sample(7.0)
