"""What the loop logs, although it waits for the device only once in an iteration."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_balance.observe.balance import SPORADIC
from megatron_balance.training import optimizer_step
from megatron_balance.training.loop import train
from megatron_balance.training.progress import Progress, StepReport
from tests.distributed import runs

EP2 = "--expert-model-parallel-size 2 --train-iters 7"
POLICY = "--balance-policy top2 --balance-profile builtin --moe-router-force-workload rotating_hotspot"


class Said:
    """Stand-in for the run's log."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepReport, int]] = []
        """The reports, and the iteration after which each came."""

    def message(self, *_: object) -> None: ...

    evaluation = message

    def step(self, report: StepReport, progress: Progress) -> None:
        self.steps.append((report, progress.iteration))


def logged(flags: str, base: str = runs.BASE) -> list[tuple[StepReport, int]]:
    said: Any = Said()
    train(runs.build(flags, base), said)
    return said.steps


LOGGED = f"{EP2} {POLICY} --log-interval 3"


@pytest.fixture(scope="module")
def whole(ranks) -> list[list[StepReport]]:
    """The reports of a run that asks for all of them."""
    return ranks(2).run(runs.train, LOGGED, 7)


@pytest.mark.parametrize("more", ["", "--tensorboard-dir unused --tensorboard-log-interval 2"])
def test_every_iteration_is_logged_once_and_in_time(ranks, whole, more: str) -> None:
    outcomes = ranks(2).run(logged, f"{LOGGED} {more}")
    for steps, every in zip(outcomes, whole, strict=True):
        reports = [report for report, _ in steps]
        assert [report.iteration for report in reports] == [1, 2, 3, 4, 5, 6, 7]
        assert [after for _, after in steps] == [3, 3, 3, 6, 6, 6, 7]
        for report, other in zip(reports, every, strict=True):
            assert (report.losses, report.grad_norm, report.skipped) == (other.losses, other.grad_norm, other.skipped)
            assert report.seconds > 0
        known = [report.iteration for report in reports if report.balance]
        assert known == ([2, 3, 4, 6] if more else [3, 6])
        since = 0
        for iteration in known:
            for layer, report in reports[iteration - 1].balance.items():
                assert report.ratio_after == every[iteration - 1].balance[layer].ratio_after
                between = [other.balance[layer].hosts_added for other in every[since:iteration]]
                assert "hosts_added" in SPORADIC and report.hosts_added == pytest.approx(sum(between) / len(between))
            since = iteration


def test_no_stage_evaluates_without_validation_data(ranks, tmp_path: Path) -> None:
    """The inner stage reads no data, and so has to be told which sets there are."""
    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=np.uint16)
    for _ in range(50):
        builder.add_document(np.arange(100), [100])
    builder.finalize(str(tmp_path / "data.idx"))
    flags = "--num-layers 3 --pipeline-model-parallel-size 3 --train-iters 2 --eval-interval 1 --eval-iters 1"
    base = runs.BASE.replace("--mock-data", f"--data-path {tmp_path / 'data'} --split 100,0,0")
    # On an inner stage, megatron-core enters the barriers of data sets in another function
    outcomes = ranks(3).run(logged, flags, base, in_one_order=False)
    assert [len(steps) for steps in outcomes] == [2] * 3


def upstreams(flags: str, iterations: int) -> runs.Curve:
    """Train with megatron-core's own step, which computes the norm itself."""
    scaled = {
        "scales_losses": lambda optimizer: True,
        "_prepare_scaled_gradients": lambda whole: type(whole).prepare_grads(whole),
    }
    with mock.patch.multiple(optimizer_step, **scaled):
        run = runs.build(flags)
        run.optimizer.get_loss_scale = lambda: 1.0
        return runs.curve_of([runs.train_step(run) for _ in range(iterations)])


@pytest.mark.parametrize(
    "flags",
    [
        "--expert-model-parallel-size 2 --clip-grad 0.1",
        "--expert-model-parallel-size 2 --clip-grad 0.1 --use-distributed-optimizer --bf16",
        "--pipeline-model-parallel-size 2 --clip-grad 0 --bf16",
    ],
    ids=["norms of two groups", "one norm", "no clipping"],
)
def test_the_step_is_megatron_cores(ranks, flags: str) -> None:
    assert ranks(2).run(runs.train_curve, flags, 3) == ranks(2).run(upstreams, flags, 3)
