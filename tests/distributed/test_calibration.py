"""`--balance-calibrate`: what a run measures decides, on all ranks alike, and can be repeated bit for bit."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from megatron_balance.cost.calibration import Factors
from megatron_balance.observe.calibration_log import NAME, CalibrationLog, Job, read_record
from megatron_balance.training.loop import train_step
from tests.distributed import jobs
from tests.distributed.checkpoints import patient
from tests.distributed.runs import BASE, build

RANKS = 2
LAYERS = 2
ITERATIONS = 4
JOB = Job(RANKS, LAYERS)
FLAGS = "--expert-model-parallel-size 2 --balance-policy pro_prophet --moe-router-force-workload hot_experts"
MEASURED = f"{FLAGS} --balance-calibrate on --balance-log-dir unused"


class Trained(NamedTuple):
    """What one rank did in each iteration."""

    curve: list[tuple[float, float]]
    factors: list[Factors]
    placements: list[list[str]]
    hosts: list[float]
    decided_by: list[Factors]
    """The factors in the cost model of plans."""


def trained(flags: str, record: Path | None = None, first: int = 1, save: bool = False, deaf: bool = False) -> Trained:
    """Train on this rank.

    Args:
        record: a directory for the record of its factors.
        first: the first iteration; above 1, the run resumes from its checkpoint.
        save: train half as long, and save a checkpoint at the end.
        deaf: measure nothing.
    """
    run = build(flags)
    found = Trained([], [], [], [], [])
    balancer = run.balancer
    assert balancer is not None
    if deaf:
        balancer.calibrate = lambda reports, used: None
    if first > 1:
        patient(run).load()
    log = CalibrationLog(record, JOB, first) if record is not None and dist.get_rank() == 0 else None
    for _ in range(ITERATIONS if not save else ITERATIONS // 2):
        report = train_step(run)
        if log is not None:
            log.add(report.iteration, report.calibration)
            log.flush()
        found.curve.append((report.losses["lm loss"], report.grad_norm))
        found.factors.append(report.calibration)
        found.hosts.append(sum(layer.hosts_added for layer in report.balance.values()))
        found.placements.append([str(state.placement) for state in balancer.layers.values()])
        found.decided_by.extend({state.manager.factors for state in balancer.layers.values()})
    if save:
        patient(run).save()
    return found


@pytest.fixture(scope="module")
def measured(ranks, tmp_path_factory) -> tuple[list[Trained], Path]:
    """What both ranks did with `on`, and the record."""
    directory = tmp_path_factory.mktemp("record")
    return ranks(RANKS).run(trained, MEASURED, directory), directory / NAME


def test_all_ranks_are_calibrated_alike_by_what_they_measure(measured) -> None:
    first, second = measured[0]
    assert first == second
    assert first.factors[0] == Factors()
    assert all(factors.experts != 1 != factors.exchange for factors in first.factors[1:])
    assert first.decided_by == first.factors


def test_a_replay_repeats_losses_placements_and_factors(ranks, measured) -> None:
    results, path = measured
    assert ranks(RANKS).run(trained, f"{FLAGS} --balance-calibrate {path}") == results


def test_recorded_factors_decide(ranks, tmp_path: Path) -> None:
    """Copies are too dear until the third iteration, and cheap from then on."""
    log = CalibrationLog(tmp_path, JOB, 1)
    for iteration in range(1, ITERATIONS + 1):
        log.add(iteration, Factors(trans=1e6) if iteration < 3 else Factors(experts=1e6, trans=1e-6, agg=1e-6))
    log.flush(last=True)
    for result in ranks(RANKS).run(trained, f"{FLAGS} --balance-calibrate {tmp_path / NAME}"):
        assert result.hosts[:3] == [0, 0, 0] and min(result.hosts[3:]) > 0


def test_by_default_measurements_change_reports_only(ranks) -> None:
    as_usual, deaf = (ranks(RANKS).run(trained, FLAGS, None, 1, False, deaf)[0] for deaf in (False, True))
    assert set(as_usual.decided_by) == {Factors()}
    assert (as_usual.curve, as_usual.placements) == (deaf.curve, deaf.placements)
    assert as_usual.factors[-1] != Factors() == deaf.factors[-1]


def test_a_resumed_run_continues_with_its_factors(ranks, tmp_path: Path) -> None:
    """Together, both halves are repeated by a run without a break."""
    flags = f"{MEASURED} --save {tmp_path} --load {tmp_path}"
    saved = tmp_path / "record"
    half = ITERATIONS // 2
    before = ranks(RANKS).run(trained, flags, saved, 1, True)
    after = ranks(RANKS).run(trained, flags, saved, half + 1, True)
    assert after[0].factors[0] != Factors()
    assert {type(ratio) for ratio in after[0].factors[0]} == {float}
    straight = ranks(RANKS).run(trained, f"{FLAGS} --balance-calibrate {saved / NAME}")
    for rank in range(RANKS):
        assert before[rank].curve + after[rank].curve == straight[rank].curve
        assert before[rank].placements + after[rank].placements == straight[rank].placements
        assert before[rank].factors + after[rank].factors == straight[rank].factors


@pytest.mark.slow
def test_the_program_writes_and_replays_a_record(tmp_path: Path) -> None:
    flags = f"{BASE} {FLAGS} --train-iters 4 --log-interval 1 --distributed-timeout-minutes 10"
    directory = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
    texts = [
        jobs.Job(RANKS, f"{flags} {more}", tmp_path / "log").wait().text
        for more in (
            f"--balance-calibrate on --balance-log-dir {tmp_path} {directory} --exit-interval 2",
            f"--balance-calibrate on --balance-log-dir {tmp_path} {directory}",
            f"--balance-calibrate {tmp_path / NAME}",
        )
    ]
    record = read_record(str(tmp_path / NAME), JOB)
    assert (record.first, record.last) == (1, 4)

    def losses(text: str) -> list[str]:
        lines = [line for line in text.splitlines() if " iteration " in line and "lm loss: " in line]
        return [line.split("lm loss: ")[1].split(" |")[0] for line in lines]

    assert losses(texts[2]) == losses(texts[0])[:2] + losses(texts[1])[-2:]
