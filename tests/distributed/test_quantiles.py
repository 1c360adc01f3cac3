"""Quantile balancing (`--moe-router-load-balancing-type quantile_balancing`), which megatron-core has since 0.19."""

from pathlib import Path

import pytest
import torch

from megatron_balance.cli.arguments import QUANTILES
from megatron_balance.flow.routers import routers_of
from megatron_balance.observe.routing import LoadRecorder
from megatron_balance.training.loop import train_step
from tests.distributed import runs
from tests.distributed.checkpoints import straight_against_resumed

pytestmark = pytest.mark.skipif(not QUANTILES, reason="this megatron-core does not have it")

KIND = "--moe-router-load-balancing-type"
PLAIN = "--global-batch-size 8 --moe-aux-loss-coeff 0 --disable-bias-linear --swiglu"
FLAGS = f"{PLAIN} {KIND} quantile_balancing"


def imbalance(flags: str) -> tuple[float, runs.Curve]:
    """Return the largest load of an expert over the mean, in the last of eight iterations, and the curve."""
    run = runs.build(flags)
    # Routers that prefer one expert
    for router in routers_of(run.model):
        router.weight.data[0] += router.weight.data[1:].mean(0) + 0.5
    recorder = LoadRecorder(run.model)
    reports = [train_step(run) for _ in range(8)]
    loads = recorder.gather(run.groups)
    return max(max(load) * len(load) / sum(load) for load in loads.values()), runs.curve_of(reports)


def test_it_balances_and_trains(ranks) -> None:
    (((ratio, curve)),) = ranks(1).run(imbalance, FLAGS)
    ((before, _),) = ranks(1).run(imbalance, f"{PLAIN} {KIND} none")
    assert ratio < 1.3 and before > 1.5
    assert curve[-1][0] < curve[0][0]


def check_alike(together: runs.Curve, alone: runs.Curve) -> None:
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_replicas_and_policies_change_nothing(ranks) -> None:
    # Replicas have the initial weights of one rank, expert-parallel ranks do not
    check_alike(ranks(2).run(imbalance, FLAGS)[0][1], ranks(1).run(imbalance, FLAGS)[0][1])
    flags = f"{FLAGS} --expert-model-parallel-size 2"
    balanced = f"{flags} --balance-policy top2 --balance-profile builtin"
    check_alike(ranks(2).run(imbalance, balanced)[0][1], ranks(2).run(imbalance, flags)[0][1])


def biases_of_a_skipped_step() -> bool:
    """Return whether an iteration with a fault leaves the biases as they were before."""
    run = runs.build(FLAGS)
    biases = [router.qb_beta for router in routers_of(run.model)]
    train_step(run)
    before = [bias.clone() for bias in biases]
    run.guard.evidence = lambda reports: torch.ones(1)
    train_step(run)
    return all(map(torch.equal, biases, before)) and all(bias.any() for bias in biases)


def test_a_fault_changes_no_bias(ranks) -> None:
    assert ranks(1).run(biases_of_a_skipped_step) == [True]


def test_a_resumed_run_is_the_straight_run(ranks, tmp_path: Path) -> None:
    flags = f"{FLAGS} --expert-model-parallel-size 2 --moe-router-quantile-balancing-ema 0.5"
    assert ranks(2).run(straight_against_resumed, flags, str(tmp_path), 4) == [[]] * 2
