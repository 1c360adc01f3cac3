"""cost/calibration.py and observe/calibration_log.py: factors, what they change, and their record."""

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.cost.calibration import LEAST, MOST, WINDOW, Calibration, Factors, calibrated
from megatron_balance.cost.loads import condensed
from megatron_balance.cost.model import CostModel, Overlap, owners
from megatron_balance.observe.balance import LayerReport, component_seconds
from megatron_balance.observe.calibration_log import NAME, CalibrationLog, Job, read_record
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.interface import owners_host
from megatron_balance.profile.cluster_profile import builtin
from megatron_balance.timeline.actions import Operation
from megatron_balance.timeline.layer_state import LayerState
from tests.unit.balancers import LAYERS, OWNERS, RANK, World, build, loads

RANKS = 4
EXPERTS = 8
NODE = 2
JOB = Job(ranks=4, layers=2)
FACTORS = Factors(exchange=7.0, experts=0.5, trans=3.0, agg=11.0)
PROFILE = builtin(RANKS, NODE, 64, 96)
PLAIN = CostModel(
    PROFILE, token_bytes=512, param_bytes=4e6, grad_bytes=8e6, state_bytes=3e7, coding=2e-9, microbatches=3
)
COUNTS_DE = np.random.default_rng(5).integers(10, 4000, (RANKS, EXPERTS))
PLACEMENT = owners_host(Placement.identity(EXPERTS, RANKS, 2), [(0, 1), (0, 2), (5, 0)])

# Estimate


def test_outliers_do_not_move_a_factor() -> None:
    noise = random.Random(3)
    calibration = Calibration()
    for iteration in range(40):
        slow = 50.0 if iteration % 5 == 4 else 1.0
        measured = [slow * noise.uniform(0.99, 1.01) * factor for factor in FACTORS]
        calibration = calibration.observe(measured, [1.0] * 4, Factors())
    assert calibration.factors == pytest.approx(FACTORS, rel=0.01)
    assert all(len(ratios) == WINDOW for ratios in calibration.ratios)


def test_a_factor_follows_a_change_within_half_a_window() -> None:
    calibration = Calibration()
    for measured in [2.0] * 30 + [5.0] * (WINDOW // 2 + 1):
        calibration = calibration.observe([measured] * 4, [1.0] * 4, Factors())
    assert calibration.factors == Factors(5, 5, 5, 5)


def test_a_component_that_did_not_occur_keeps_its_factor() -> None:
    calibration = Calibration().observe([2.0, 3.0, 4.0, 5.0], [1.0, 1.0, 1.0, 0.0], Factors())
    assert calibration.factors == Factors(2, 3, 4, 1)
    for _ in range(2 * WINDOW):
        calibration = calibration.observe([9.0, 3.0, 0.0, 0.0], [3.0, 1.0, 0.0, 0.0], Factors())
    assert calibration.factors == Factors(3, 3, 4, 1)


def test_predictions_may_contain_the_factors_already() -> None:
    """Once calibrated predictions are right, factors stay."""
    calibration = Calibration().observe([2.0] * 4, [1.0] * 4, FACTORS)
    assert calibration.factors == pytest.approx([2 * factor for factor in FACTORS])


@pytest.mark.parametrize(("measured", "factor"), [(-1.0, LEAST), (0.0, LEAST), (1e300, MOST)])
def test_factors_are_bounded(measured: float, factor: float) -> None:
    assert Calibration().observe([measured] * 4, [1.0] * 4, Factors()).factors == Factors(*[factor] * 4)


def test_a_checkpoint_restores_the_estimate_exactly() -> None:
    calibration = Calibration()
    noise = random.Random(1)
    for _ in range(4):
        calibration = calibration.observe([noise.random() for _ in range(4)], [1.0, 1.0, 0.0, 1.0], Factors())
    plain = json.loads(json.dumps(calibration.to_plain()))
    assert Calibration.from_plain(plain) == calibration
    assert Calibration.from_plain(Calibration().to_plain()) == Calibration()


# Cost model


@pytest.mark.parametrize("component", Factors._fields)
def test_a_factor_multiplies_the_seconds_of_its_component_alone(component: str) -> None:
    factors = Factors(**{component: 6.0})
    scaled = {"exchange": ("all_to_all",), "experts": ("forward", "backward"), "trans": ("trans",), "agg": ("agg",)}
    before = PLAIN.layer_time(COUNTS_DE, PLACEMENT)
    after = calibrated(PLAIN, factors).layer_time(COUNTS_DE, PLACEMENT)
    assert min(before) > 0
    for name, old, new in zip(before._fields, before, after, strict=True):
        assert new == pytest.approx(old * (6.0 if name in scaled[component] else 1.0), rel=1e-12)


def test_moving_and_sending_experts_take_longer_too() -> None:
    cost = calibrated(PLAIN, FACTORS)
    plan = PLAIN.transport.plan(PLACEMENT)
    for factor, ends, longer in zip(
        FACTORS[2:], *(model.transport.progress(plan) for model in (PLAIN, cost)), strict=True
    ):
        assert longer == pytest.approx(factor * ends)
    pairs = [(0, 1), (3, 0)]
    assert cost.transfer_seconds(pairs) == pytest.approx(FACTORS.exchange * PLAIN.transfer_seconds(pairs))


def test_computation_that_hides_transfers_is_calibrated() -> None:
    hidden = dataclasses.replace(PLAIN, overlap=Overlap(forward=1e-5, backward=2e-5))
    cost = calibrated(hidden, Factors(*[6.0] * 4))
    before, after = (model.layer_time(COUNTS_DE, PLACEMENT) for model in (hidden, cost))
    assert tuple(after) == pytest.approx([6 * seconds for seconds in before], rel=1e-12)
    assert PLAIN.layer_time(COUNTS_DE, PLACEMENT).trans > before.trans > 0


def test_without_factors_the_model_is_the_same_object() -> None:
    assert calibrated(PLAIN, Factors()) is PLAIN


# Balancer


def timed(monkeypatch: pytest.MonkeyPatch, **more: object):
    """Return a balancer after an iteration in which each span of an operation took a second of its own length."""
    world = build(monkeypatch, overlap="none", **more)
    for iteration in (1, 2):
        world.iterate(iteration, loads(iteration))
    return world


def spans_of(state: LayerState) -> dict[Operation, int]:
    assert state.last is not None
    operations = [operation for operation, _ in state.last.spans]
    return {operation: operations.count(operation) for operation in set(operations)}


def test_spans_of_all_components_are_recorded(monkeypatch) -> None:
    world = timed(monkeypatch)
    for state in world.balancer.layers.values():
        expected = {Operation.A2A: 20, Operation.FEC: 5, Operation.BEC: 5}
        trans = {Operation.TRANS: 1, Operation.AGG: 1} if state.last.trans else {}
        assert spans_of(state) == expected | trans


def test_exchange_does_not_contain_the_wait_for_slower_ranks(monkeypatch) -> None:
    world = timed(monkeypatch)
    factors = Factors(experts=1e5)
    for state in world.balancer.layers.values():
        last = state.last
        lengths = {Operation.A2A: 30.0, Operation.FEC: 2.0, Operation.BEC: 3.0}
        spans = [(operation, (0.0, seconds)) for operation, seconds in lengths.items()]
        state.last = dataclasses.replace(last, spans=spans, waits=[])
        reports = [state.finished(rank, factors)() for rank in range(3)]
        cost = state.manager.cost_of(5, factors)
        slowest = cost.layer_time(condensed(last.counts_BDE, owners(OWNERS)), last.placements[-1])
        assert max(report.predicted_experts_seconds for report in reports) > 1
        for report in reports:
            waiting = slowest.forward + slowest.backward - report.predicted_experts_seconds
            assert waiting >= 0
            assert report.measured_exchange_seconds == pytest.approx(30 - waiting)
            assert (report.measured_experts_seconds, report.measured_seconds) == (5.0, 35.0)
        mean = np.mean([report.predicted_experts_seconds for report in reports])
        tokens = last.counts_BDE.sum()
        even = cost.forward_seconds(tokens / 3) + cost.backward_seconds(tokens / 3)
        assert mean == pytest.approx(even), "own tokens"


def measuring(reports: dict[int, LayerReport], factor: float) -> dict[int, LayerReport]:
    """Return reports that measured this multiple of each prediction."""
    return {
        layer: report._replace(
            **{
                f"measured_{name}_seconds": factor * getattr(report, f"predicted_{name}_seconds")
                for name in Factors._fields
            }
        )
        for layer, report in reports.items()
    }


def calibrate(world: World) -> None:
    """Calibrate by measurements that are four times as long as predicted."""
    world.balancer.calibrate(measuring(world.balancer.report(), 4.0), world.balancer.factors)


@pytest.mark.parametrize("calibrates", [False, True])
def test_only_decisions_that_may_be_calibrated_are(monkeypatch, calibrates: bool) -> None:
    world = timed(monkeypatch, calibrates=calibrates)
    balancer = world.balancer
    before = balancer.report()
    measured, predicted = component_seconds(measuring(before, 4.0))
    assert min(predicted) > 0 and measured == pytest.approx([4 * seconds for seconds in predicted])
    balancer.calibrate(measuring(before, 4.0), balancer.factors)
    assert balancer.report() == before, "an iteration is not calibrated by itself"
    world.iterate(3, loads(2))
    assert balancer.factors == pytest.approx(Factors(4, 4, 4, 4))
    for state in balancer.layers.values():
        cost = state.manager.question(state.last.counts_BDE, 5).cost
        plain = state.manager.cost.profile.forward.overhead
        assert cost.profile.forward.overhead == pytest.approx((4 if calibrates else 1) * plain)
        report, own = (state.finished(RANK, factors)() for factors in (balancer.factors, Factors()))
        assert report.predicted_seconds > 2 * own.predicted_seconds


def test_a_restored_balancer_has_the_same_factors(monkeypatch) -> None:
    worlds = [timed(monkeypatch, calibrates=True) for _ in range(2)]
    calibrate(worlds[0])
    state = json.loads(json.dumps(worlds[0].balancer.state()))
    worlds[1].balancer.restore(state)
    for world in worlds:
        world.iterate(3, loads(3))
    assert worlds[1].balancer.factors == worlds[0].balancer.factors != Factors()
    seconds = [{n: r.predicted_seconds for n, r in world.balancer.report().items()} for world in worlds]
    assert seconds[0] == seconds[1]


def test_a_record_decides_instead_of_measurements(monkeypatch, tmp_path: Path) -> None:
    path = recorded(tmp_path, [Factors(), FACTORS, Factors(trans=5.0)])
    world = timed(monkeypatch, calibrates=True, record=read_record(str(path), JOB))
    assert world.balancer.factors == FACTORS
    calibrate(world)
    for iteration in (3, 4):
        world.iterate(iteration, loads(iteration))
        assert world.balancer.factors == Factors(trans=5.0), "the last factors are kept"
        assert world.balancer.layers[LAYERS[0]].manager.factors == Factors(trans=5.0)


def test_calibration_changes_no_routes(monkeypatch, tmp_path: Path) -> None:
    """The order of sums depends on them, and a resumed run chooses them from its placement alone."""
    factors = Factors(trans=LEAST)
    world = timed(monkeypatch, calibrates=True, record=read_record(str(recorded(tmp_path, [factors])), JOB))
    for state in world.balancer.layers.values():
        assert state.placement.added_hosts
        assert state.rounds.plan == state.manager.cost.transport.plan(state.placement)
        question = state.manager.question(np.ones((5, 3, 12)), 5)
        assert question.transport is state.manager.cost.transport is not question.cost.transport


# Record


def recorded(directory: Path, factors: list[Factors], first: int = 1, job: Job = JOB) -> Path:
    log = CalibrationLog(directory, job, first)
    for iteration, found in enumerate(factors, first):
        log.add(iteration, found)
    log.flush(last=True)
    return directory / NAME


def test_a_record_is_read_back_exactly(tmp_path: Path) -> None:
    noise = random.Random(8)
    factors = [Factors(*(noise.uniform(1e-6, 1e6) for _ in range(4))) for _ in range(50)]
    record = read_record(str(recorded(tmp_path / "new", factors, first=7)), JOB)
    assert [record.at(iteration) for iteration in range(7, 57)] == factors
    assert (record.first, record.last) == (7, 56)
    record.check_start(7)
    with pytest.raises(ValueError, match="begins with iteration 7, but this run starts with iteration 1"):
        record.check_start(1)


def test_a_resumed_run_continues_its_record(tmp_path: Path) -> None:
    recorded(tmp_path, [Factors(exchange=float(number)) for number in range(1, 10)])
    path = recorded(tmp_path, [Factors(experts=2.0)], first=6)
    record = read_record(str(path), JOB)
    assert (record.first, record.last, record.at(5)) == (1, 6, Factors(exchange=5.0))
    assert record.at(6) == Factors(experts=2.0)


@pytest.mark.parametrize("left", [b"", b"{", b'{"ranks": 9, "layers": 2}\n', b"[1]\n"], ids=str)
def test_a_resumed_run_replaces_what_is_not_its_record(tmp_path: Path, left: bytes) -> None:
    (tmp_path / NAME).write_bytes(left + b'{"iteration": 5}\n' * bool(left))
    record = read_record(str(recorded(tmp_path, [FACTORS], first=6)), JOB)
    assert (record.first, record.factors) == (6, (FACTORS,))


HEADER = '{"ranks": 4, "layers": 2}\n'
LINE = '{"iteration": 1, "exchange": 1.0, "experts": 1.0, "trans": 1.0, "agg": 1.0}\n'


@pytest.mark.parametrize(
    "content",
    [
        "",
        HEADER,
        '{"ranks": 4}\n' + LINE,
        '{"ranks": true, "layers": 2}\n' + LINE,
        HEADER + LINE + LINE,
        HEADER + LINE[:-20],
        HEADER + LINE.replace("1.0, ", "NaN, ", 1),
        HEADER + LINE.replace("1.0, ", "0.0, ", 1),
        HEADER + LINE.replace("1.0, ", '"1", ', 1),
        HEADER + LINE.replace(": 1,", ": 1.5,"),
        HEADER + LINE.replace('"agg"', '"other"'),
        "[" * 100_000,
    ],
)
def test_damaged_records_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "calibration.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"--balance-calibrate {path}: ") as caught:
        read_record(str(path), JOB)
    assert len(str(caught.value)) < 600 + len(str(path))


@pytest.mark.parametrize("job", [Job(2, 2), Job(4, 3)])
def test_a_record_of_another_run_is_refused(tmp_path: Path, job: Job) -> None:
    path = recorded(tmp_path, [FACTORS], job=job)
    words = f"from a run with {job.ranks} ranks and {job.layers} MoE layers, but this run has 4 and 2; use"
    with pytest.raises(ValueError, match=words):
        read_record(str(path), JOB)
