"""tools/bench/overlap_time.py: the emulated device, its profile for the planner, and checks that can fail."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlap_checks
import overlap_time
import slow_runs
from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.config.run_config import RunConfig
from megatron_balance.cost.model import CostModel, Overlap
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.pro_prophet import ProProphet
from megatron_balance.profile.cluster_profile import builtin
from megatron_balance.profile.profile_file import load
from megatron_balance.workloads.synthetic import load_matrix

Outcome = overlap_checks.Outcome
Sample = overlap_checks.Sample

widths = st.integers(1, 512)


def configured(flags: str = "") -> RunConfig:
    machine = Machine(world_size=4, cuda=False, transformer_engine=False, apex=False)
    line = f"{overlap_time.COMMON} --expert-model-parallel-size 4 {flags}"
    return parse_args(line.split(), machine)[0]


@given(widths, widths, widths, widths, widths)
def test_flops_are_those_of_every_matrix_product(hidden: int, query: int, kv: int, sequence: int, ffn: int) -> None:
    found, gated = (slow_runs.Flops.of(hidden, query, kv, sequence, ffn, gated) for gated in (False, True))
    products = [(hidden, query), (hidden, kv), (hidden, kv), (query, hidden)]
    projections = sum(2 * inputs * outputs for inputs, outputs in products)
    # Token i attends to itself and all tokens before it, once for scores and once for values
    core = sum(2 * 2 * query * (i + 1) for i in range(sequence)) / sequence
    assert found.attention == pytest.approx(projections + core - 2 * query)
    assert found.expert == 2 * (2 * hidden * ffn) and gated.expert == 3 * (2 * hidden * ffn)
    assert gated.attention == found.attention


@pytest.mark.parametrize(
    ("flags", "attention", "expert"),
    [
        ("", 4 * 2 * 256 * 256 + 2 * 512 * 256, 4 * 256 * 1024),
        ("--micro-batch-size 3 --swiglu", 4 * 2 * 256 * 256 + 2 * 512 * 256, 6 * 256 * 1024),
        (
            "--group-query-attention --num-query-groups 2 --kv-channels 32",
            2 * 256 * (128 + 2 * 64) + 2 * 128 * 256 + 2 * 512 * 128,
            4 * 256 * 1024,
        ),
    ],
)
def test_the_device_has_one_flop_rate(flags: str, attention: int, expert: int) -> None:
    config = configured(flags)
    device = slow_runs.device_of(config, gflops=2.0)
    tokens = config.train.micro_batch_size * 512
    assert device.expert_seconds_per_token == pytest.approx(expert / 2e9)
    assert device.attention_seconds == pytest.approx(tokens * attention / 2e9)
    # T_FNEC as a run estimates it
    assert device.attention_seconds == pytest.approx(tokens * attention / expert * device.expert_seconds_per_token)


def test_the_profile_is_that_of_the_device_and_the_links(tmp_path: Path) -> None:
    device = slow_runs.device_of(configured(), gflops=10.0)
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


def test_the_defaults_make_transfers_worth_hiding_and_possible_to_hide() -> None:
    device = slow_runs.device_of(configured(), gflops=10.0)
    profile = slow_runs.profile_of(device, nodes=2, node_size=2, link_mbit=400)
    cost = CostModel(profile, token_bytes=1024, param_bytes=2 << 20, grad_bytes=2 << 20)
    hiding = replace(cost, overlap=Overlap(device.attention_seconds, 2 * device.attention_seconds))
    owners = Placement.identity(8, 4, 3)
    trans = 0.0
    total = 0.0
    for layer in range(1, 5):
        counts_DE = load_matrix("hot_experts", 4, 8, 1, 512, seed=1234 + layer, step=0)
        planned = ProProphet().plan(counts_DE, owners, cost)
        time = cost.layer_time(counts_DE, planned)
        assert time.total < 0.9 * cost.layer_seconds(counts_DE, owners)
        trans = trans + time.trans
        total = total + time.total + 3 * device.attention_seconds
        hidden = hiding.layer_time(counts_DE, planned)
        assert hidden.trans == hidden.agg == 0
    low, high = overlap_checks.TRANS_SHARE
    assert low <= trans / total <= high


def test_variants_change_the_planner_or_the_schedule_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = CostModel(builtin(4, 2, 8, 8), token_bytes=1, param_bytes=1, grad_bytes=1, overlap=Overlap(1.0, 2.0))
    states = {number: SimpleNamespace(manager=SimpleNamespace(cost=cost)) for number in (1, 2)}
    run = SimpleNamespace(balancer=SimpleNamespace(layers=states, schedule=lambda microbatches: (microbatches,)))
    overlap_time.VARIANTS["planner+scheduler"].change(run)
    plain = replace(cost, overlap=None)
    times = [one.time_of(1.0, 2.0, 3.0, 4.0) for one in (plain, *(state.manager.cost for state in states.values()))]
    assert times[0] == times[1] == times[2] != cost.time_of(1.0, 2.0, 3.0, 4.0)
    assert run.balancer.schedule(3) == (3,)
    lower = SimpleNamespace(wait_at_once=lambda schedule: (*schedule, "at once"))
    monkeypatch.setitem(sys.modules, "megatron_balance.timeline.lower", lower)
    overlap_time.VARIANTS["full, waits at issue"].change(run)
    assert run.balancer.schedule(3) == (3, "at once")


def outcome(seconds: float, exposed: float, moved: float, estimated: float | None = None) -> Outcome:
    """Return iterations around these seconds; `exposed` and `moved` are sums of Trans and Agg."""
    middle = Sample(seconds, 0.01, exposed / 4, 3 * exposed / 4, moved / 2, moved / 2)
    around = [middle._replace(seconds=seconds * factor) for factor in (0.9, 1.0, 1.2)]
    return Outcome(around, attention_seconds=0.04, estimated_seconds=estimated)


GOOD = {
    "none": outcome(2.0, 0.0, 0.0),
    "planner": outcome(1.8, 0.8, 80e6),
    # Nine tenths are hidden, of 1.5 times the bytes
    "planner+scheduler": outcome(1.1, 0.12, 120e6),
    "full": outcome(1.3, 0.1, 80e6, estimated=0.041),
    "full, waits at issue": outcome(2.0, 0.8, 80e6, estimated=0.041),
}


def failed(jobs: Sequence[dict]) -> list[str]:
    return [check.text for check in overlap_checks.checks(jobs) if not check.passed]


def test_all_claims_are_checked() -> None:
    found = list(overlap_checks.checks([GOOD] * 3))
    assert len(found) == 6 and not failed([GOOD] * 3)
    assert (
        str(found[0]).startswith("PASS  planner+scheduler: hidden") and ": 90.0% (90.0%, 90.0%, 90.0%)" in found[0].text
    )
    assert ": 87.5% (87.5%, 87.5%, 87.5%), at least 80%" in found[2].text
    assert "full <= planner: iteration time 0.722" in found[3].text


@pytest.mark.parametrize(
    ("name", "bad", "claim"),
    [
        ("planner+scheduler", outcome(1.1, 0.12, 50e6), "planner+scheduler: hidden"),
        ("full, waits at issue", outcome(1.7, 0.8, 80e6), "full: iterations shorter"),
        ("full", outcome(1.3, 0.17, 80e6, 0.04), "full: hidden"),
        ("full", outcome(1.3, 0.0, 0.0, 0.04), "full: hidden"),
        ("planner", outcome(1.2, 0.8, 80e6), "full <= planner"),
        ("none", outcome(1.7, 0.0, 0.0), "planner <= none"),
        ("full", outcome(1.3, 0.08, 80e6, 0.05), "full: T_FNEC"),
        ("full", outcome(1.3, 0.08, 80e6), "full: T_FNEC"),
    ],
)
def test_each_claim_can_fail(name: str, bad: Outcome, claim: str) -> None:
    (text,) = failed([GOOD | {name: bad}] * 3)
    assert text.startswith(claim)


def test_a_reference_that_moves_nothing_proves_nothing() -> None:
    idle = GOOD | {"full, waits at issue": outcome(2.0, 0.0, 0.0)}
    for jobs in ([idle], [GOOD, GOOD, idle]):
        assert sum("hidden" in text for text in failed(jobs)) == 2


def test_only_variants_that_ran_are_judged() -> None:
    some = {name: GOOD[name] for name in ("none", "planner")}
    (check,) = overlap_checks.checks([some])
    assert check.passed and check.text.startswith("planner <= none")
    assert overlap_checks.lines([{"full": GOOD["full"]}])


def test_one_noisy_job_decides_nothing() -> None:
    noisy = GOOD | {"full": outcome(9.0, 0.8, 80e6, 0.04)}
    assert failed([GOOD, noisy, GOOD]) == []
    assert len(failed([noisy, noisy, GOOD])) == 3


def test_an_iteration_lasts_as_long_as_on_its_slowest_rank() -> None:
    own, other = ({"full": Outcome([Sample(a, 1.0), Sample(b, 2.0)], 0.1, 0.1)} for a, b in ((1.0, 5.0), (3.0, 4.0)))
    (joined,) = overlap_checks.slowest([own, other]).values()
    assert [(sample.seconds, sample.plan_wait_seconds) for sample in joined.samples] == [(3.0, 1.0), (5.0, 2.0)]


def test_an_iteration_is_summed_over_layers() -> None:
    layer = dict(zip(Sample._fields[1:], (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))
    report = SimpleNamespace(seconds=7.0, balance={1: SimpleNamespace(**layer), 3: SimpleNamespace(**layer)})
    assert Sample.of(report) == (7.0, 2.0, 4.0, 6.0, 8.0, 10.0)
    assert Sample.of(report).exposed_per_byte == pytest.approx(10 / 18)
    assert Sample.of(SimpleNamespace(seconds=7.0, balance={})) == Sample(7.0)


def test_the_table_shows_medians_and_the_share() -> None:
    slow = GOOD | {"planner": outcome(2.2, 0.8, 80e6)}
    head, none, planner, *_ = overlap_checks.lines([GOOD, slow, GOOD])
    assert "exposed ms: plan" in head
    assert none.split()[:4] == ["1.000", "(1.000,", "1.000,", "1.000)"] and none.endswith("  none")
    assert planner.split()[:5] == ["0.900", "(0.900,", "1.100,", "0.900)", "1800"]
    assert planner.split("|")[1].split() == ["10.0", "200.0", "600.0"] and planner.split("|")[2].split()[0] == "80.0"
    assert "10.0% (10.0%) of an iteration of full, waits at issue; 10%-30% as intended" in overlap_checks.trans_share(
        [GOOD]
    )
    assert "OUTSIDE" in overlap_checks.trans_share([GOOD | {"full, waits at issue": outcome(1.8, 0.2, 80e6)}])
