"""training/progress.py: when reports are complete, and what they contain."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_balance.cost.calibration import Factors
from megatron_balance.device.without_engine import l2_norm
from megatron_balance.observe.balance import SPORADIC, LayerReport
from megatron_balance.training import progress as module
from megatron_balance.training.progress import Queued, Reports, StepReport
from tests.unit.balancers import LAYERS, RANK, build, loads


def step_report(iteration: int) -> StepReport:
    return StepReport(
        iteration=iteration,
        losses={},
        grad_norm=None,
        learning_rate=None,
        loss_scale=1.0,
        global_batch_size=1,
        consumed_samples=iteration,
        skipped=False,
        calibration=Factors(trans=float(iteration)),
    )


class Machine:
    """Stand-in for the device, the job and the balancer; keeps a journal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal: list = []
        monkeypatch.setattr(module.clock, "seconds", self.seconds)
        monkeypatch.setattr(module, "sum_over_ranks", lambda own, layers: self.journal.append(("sums", own)) or own)
        monkeypatch.setattr(module, "means", lambda table: table)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.journal.append("waits"))
        balancer = SimpleNamespace(calibrate=lambda *args: self.journal.append(("calibrates", *args)))
        self.reports = Reports(balancer, 2)

    def seconds(self, start: float, end: float) -> float:
        self.journal.append(("reads", start))
        return end - start

    def queued(self, iteration: int, with_balance: bool = True) -> Queued:
        balance = (lambda: {1: iteration}) if with_balance else None
        return Queued(step_report(iteration), 10.0 * iteration, 10.0 * iteration + 1, balance, None)

    def complete(self, iteration: int, with_balance: bool = True) -> StepReport:
        return replace(step_report(iteration), seconds=1.0, balance={1: iteration} if with_balance else {})


def test_reports_are_complete_two_iterations_later_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    for iteration in range(1, 6):
        complete = machine.reports.add(machine.queued(iteration))
        assert complete == ([machine.complete(iteration - 2)] if iteration > 2 else [])
        # When an iteration is queued, the device has finished the one before, and no more
        read = [entry for entry in machine.journal if entry[0] == "reads"]
        assert read == [("reads", 10.0 * finished) for finished in range(1, iteration)]
    assert "waits" not in machine.journal


def test_waiting_completes_all_reports_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert machine.reports.add(machine.queued(1)) == []
    assert machine.reports.add(machine.queued(2)) == []
    assert machine.reports.wait() == [machine.complete(1), machine.complete(2)]
    assert machine.journal.count("waits") == 2 and machine.journal[-1][0] == "calibrates"
    assert machine.reports.wait() == []
    assert machine.reports.add(machine.queued(3, with_balance=False)) == []
    machine.journal.clear()
    assert machine.reports.wait() == [machine.complete(3, with_balance=False)]
    assert machine.journal == ["waits", ("reads", 30.0)]


def test_an_iteration_is_calibrated_with_its_own_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    for iteration in (1, 2, 3):
        machine.reports.add(machine.queued(iteration, with_balance=iteration != 2))
    machine.reports.wait()
    found = [entry[1:] for entry in machine.journal if entry[0] == "calibrates"]
    assert found == [({1: number}, Factors(trans=float(number))) for number in (1, 3)]


def test_what_happens_now_and_then_is_averaged_over_the_iterations_without_a_report(monkeypatch) -> None:
    often, seldom = (build(monkeypatch, interval=2) for _ in range(2))
    every: list[dict[int, LayerReport]] = []
    for iteration in range(1, 6):
        for world in (often, seldom):
            world.iterate(iteration, loads(iteration))
        every.append(often.balancer.report())
        if iteration not in (3, 5):
            continue
        since = every[:3] if iteration == 3 else every[3:]
        reported = seldom.balancer.report()
        for layer in LAYERS:
            for name in ("hosts_added", "trans_bytes", "agg_bytes"):
                mean = sum(getattr(report[layer], name) for report in since) / len(since)
                assert getattr(reported[layer], name) == pytest.approx(mean) and name in SPORADIC
            assert reported[layer].ratio_after == every[-1][layer].ratio_after
        assert seldom.balancer.report() == reported, "an iteration is reported as often as it is asked for"
    assert len({report[LAYERS[0]].hosts_added for report in every}) > 1


def test_a_report_is_about_its_iteration_even_if_it_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    world = build(monkeypatch)
    world.iterate(1, loads(1))
    now = world.balancer.report()
    later = world.balancer.finished()
    world.iterate(2, loads(2))
    assert later() == now != world.balancer.report()
    assert world.balancer.layers[LAYERS[0]].finished(RANK, Factors())().ratio_after != now[LAYERS[0]].ratio_after


def test_the_norm_of_all_gradients_is_megatron_cores() -> None:
    from megatron.core import utils

    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 5), (1,), (700, 30), (64,)]
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    expected, _ = utils.local_multi_tensor_l2_norm(0, None, [gradients], False)
    found, _ = l2_norm(0, torch.zeros(1), [gradients], False)
    assert torch.equal(found, expected) and found.shape == expected.shape == (1,)
    rough, _ = l2_norm(0, torch.zeros(1), [[gradient.bfloat16() for gradient in gradients]], False)
    assert rough.dtype == torch.float32 and rough.item() == pytest.approx(expected.item(), rel=1e-3)
    gradients[2][5, 5] = float("nan")
    assert l2_norm(0, torch.zeros(1), [gradients], False)[0].isnan()
