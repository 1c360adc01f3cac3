"""tools/bench/iteration_time.py: its comparisons, the emulated device, and the table of measurements."""

import argparse
from pathlib import Path

import pytest

import comparisons
import iteration_time
import slow_runs
from iteration_time import Outcome, Sample
from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.config.run_config import RunConfig
from megatron_balance.cost.model import CostModel
from megatron_balance.profile.cluster_profile import load


def configured(line: str, ranks: int = 4) -> RunConfig:
    machine = Machine(world_size=ranks, cuda=False, transformer_engine=False, apex=False)
    return parse_args(line.split(), machine).config


RUNS = [
    (name, case)
    for name, comparison in comparisons.COMPARISONS.items()
    if comparison.common != comparisons.QUICKSTART
    for case in list(comparison.cases)[::5]
]


@pytest.mark.parametrize(("name", "case"), RUNS)
def test_every_comparison_has_different_runs_with_valid_flags(name: str, case: str) -> None:
    comparison = comparisons.COMPARISONS[name]
    cluster = comparison.cluster
    known = set()
    for variant in comparison.variants.values():
        line = f"{comparison.common} {cluster.flags} {comparison.cases[case]} {variant.flags}"
        config = configured(line.replace("--balance-profile auto", ""), cluster.world_size)
        paired = config.transformer.overlap_moe_expert_parallel_comm
        known.add(repr((config.comm, config.balance, config.model, paired, variant.change)))
    # `none again` shows the noise, and forced workloads may be even
    alike = {"policies-here": 1 + (case == "balanced")}.get(name, 0)
    assert len(known) == len(comparison.variants) - alike


def asked(*words: str, **options: object) -> tuple[comparisons.Comparison, list[slow_runs.Cluster]]:
    names = ("nodes", "ranks_per_node", "link_mbit", "bus_mbit", "gflops", "variants", "cases", "iterations", "warmup")
    args = argparse.Namespace(comparison=words[0], **dict.fromkeys(names), add=[], balance="")
    vars(args).update(options)
    return iteration_time.asked(args)


def test_options_change_a_comparison() -> None:
    comparison, clusters = asked(
        "policies",
        cases=["W6"],
        variants=["none", "quota", "own"],
        add=["own=--moe-comm-chunks 2"],
        balance="--balance-overlap blockwise",
        link_mbit=[100.0, 400.0],
        warmup=0,
    )
    assert comparison.cases == {"W6": "--moe-router-force-workload W6"} and comparison.warmup == 0
    none, quota, own = comparison.variants.values()
    assert (none.flags, own.flags) == ("", "--moe-comm-chunks 2") and quota.flags.endswith("blockwise")
    assert [cluster.link_mbit for cluster in clusters] == [100.0, 400.0]
    assert {cluster.gflops for cluster in clusters} == {2.5}
    with pytest.raises(KeyError, match="nothing"):
        asked("policies", cases=["nothing"])


@pytest.mark.parametrize(
    ("flags", "attention", "expert"),
    [
        ("", 4 * 2 * 256 * 256 + 2 * 512 * 256, 4 * 256 * 1024),
        ("--micro-batch-size 3 --swiglu", 4 * 2 * 256 * 256 + 2 * 512 * 256, 6 * 256 * 1024),
    ],
)
def test_the_device_has_one_flop_rate(flags: str, attention: int, expert: int) -> None:
    config = configured(f"{comparisons.OVERLAP.common} --expert-model-parallel-size 4 {flags}")
    device = slow_runs.device_of(config, gflops=2.0)
    tokens = config.train.micro_batch_size * 512
    assert device.expert_seconds_per_token == pytest.approx(expert / 2e9)
    assert device.attention_seconds == pytest.approx(tokens * attention / 2e9)


def test_the_profile_is_that_of_the_device_and_the_links(tmp_path: Path) -> None:
    config = configured(f"{comparisons.OVERLAP.common} --expert-model-parallel-size 4")
    device = slow_runs.device_of(config, gflops=10.0)
    profile = slow_runs.profile_of(device, nodes=2, node_size=2, link_mbit=400)
    profile.save(tmp_path / "profile.json")
    assert load(tmp_path / "profile.json", 4, 2) == profile
    cost = CostModel(profile, token_bytes=1024, param_bytes=2 << 20, grad_bytes=2 << 20)
    assert cost.forward_seconds(100.0) == pytest.approx(100 * device.expert_seconds_per_token)
    assert cost.backward_seconds(100.0) == pytest.approx(2 * cost.forward_seconds(100.0))
    # 2 MiB at 50 MB/s
    assert profile.link("p2p", "inter").beta * cost.param_bytes == pytest.approx(0.0419, rel=0.01)
    # Two ranks each send two of their three parts over the same link
    assert profile.link("all_to_all").beta == pytest.approx(4 / 3 * 8 / 400e6)


def job(*seconds: float, loss: float = 1.0, **more: float) -> dict[str, Outcome]:
    """Return iterations of a first variant, which takes 2 seconds, and of another one."""
    first = Outcome([Sample(2.0, 1.0, 0.5)] * len(seconds), 3_000_000, "")
    return {"none": first, "other": Outcome([Sample(one, loss, 0.5, **more) for one in seconds], 0, "2/4")}


def test_an_iteration_lasts_as_long_as_on_its_slowest_rank_and_waits_are_means() -> None:
    own = job(1.0, 5.0, plan_wait_seconds=1.0)
    combined = iteration_time.combined([own, job(3.0, 4.0, plan_wait_seconds=2.0)])
    assert [(one.seconds, one.plan_wait_seconds) for one in combined["other"].samples] == [(3.0, 1.5), (5.0, 1.5)]
    assert combined["none"].link_bytes == 3_000_000


def test_a_row_has_the_median_of_jobs_and_what_there_is() -> None:
    moved = {"trans_bytes": 1e6, "agg_bytes": 2e6, "trans_wait_seconds": 0.001, "exchange_wait_seconds": 1.0}
    none, other = iteration_time.rows("hot_rank", [job(1.0, 9.0, 1.0, **moved), job(3.0, 3.0, 3.0, **moved)])
    assert none == ["hot_rank", "none", "1.000 (1.000-1.000)", "2000", "3.0", "yes", "", "", "", "", "", ""]
    assert other[2:4] == ["1.000 (0.500-1.500)", "2000"]
    assert other[4:] == ["", "yes", "0.0 / 1.0 / 0.0", "", "3.0", "", "1000", "2/4"]
    assert iteration_time.rows("", [job(1.0, loss=2.0)])[1][5] == "no"


def test_loads_that_change_count_in_whole_periods() -> None:
    assert iteration_time.whole_periods("W7", 6) == 8 and iteration_time.whole_periods("hot_rank", 6) == 6
    (_, periodic), (_, steady) = (iteration_time.rows(case, [job(1.0, 1.0, 4.0)]) for case in ("burst", "hot_rank"))
    assert (periodic[3], steady[3]) == ("2000", "1000")
