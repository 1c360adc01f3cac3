"""The numbers about parameters, gradients and layers that flags ask for, on several ranks."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_balance.training import optimizer_step
from megatron_balance.training.loop import queue_step
from megatron_balance.training.progress import Reports, StepReport
from tests.distributed import runs

ASKED = "--log-params-norm --log-num-zeros-in-grad --moe-per-layer-logging"


def watched(flags: str, iterations: int) -> tuple[list[StepReport], float, float]:
    """Return the reports, and the norm of all parameters and the number of zeros by their definitions."""
    run = runs.build(flags)
    reports = []
    zeros: list[float] = []
    ours: Any = optimizer_step.step

    def step(optimizer: Any, squares: Any, given: Any) -> Any:
        zeros.append(optimizer.count_zeros())
        return ours(optimizer, squares, given)

    optimizer_step.step = step
    try:
        for _ in range(iterations):
            unfinished = Reports(run.balancer, run.config.transformer.num_layers)
            unfinished.add(queue_step(run))
            reports += unfinished.wait()
    finally:
        optimizer_step.step = ours
    return reports, _norm(run), zeros[-1]


def _norm(run: Any) -> float:
    """Return the norm of the weights of two expert-parallel ranks, or of two pipeline stages."""
    own = torch.zeros(2, dtype=torch.float64)
    copied = run.groups.pp.size() == 1
    for chunk in run.model:
        for weight in chunk.parameters():
            # The output layer's copy of the embedding on the last stage counts once
            if weight.requires_grad and not getattr(weight, "shared", False):
                own[int(copied and getattr(weight, "allreduce", True))] += weight.detach().double().square().sum()
    dist.all_reduce(own)
    return math.sqrt(own[0] + own[1] / 2)


@pytest.mark.parametrize(
    "flags",
    [
        "--expert-model-parallel-size 2",
        "--expert-model-parallel-size 2 --use-distributed-optimizer --bf16 --balance-policy top2",
        "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights",
    ],
    ids=["experts", "sharded", "stages"],
)
def test_norm_zeros_and_layers(ranks, flags: str) -> None:
    for reports, norm, zeros in ranks(2).run(watched, f"{flags} {ASKED}", 2):
        last = reports[-1]
        assert last.params_norm == pytest.approx(norm, rel=1e-3 if "bf16" in flags else 1e-6)
        assert last.num_zeros == zeros
        assert reports[0].params_norm != last.params_norm
        for name in ("load_balancing_loss", "z_loss"):
            layers = last.layer_losses[name]
            assert len(layers) == 2 and min(layers) > 0
            assert sum(layers) / 2 == pytest.approx(last.losses[name])


def test_nobody_computes_what_nobody_reads(ranks) -> None:
    for queued in ranks(2).run(_unread, f"--expert-model-parallel-size 2 --balance-policy top2 {ASKED}"):
        assert queued == (None, None, {}, True)


def _unread(flags: str) -> tuple:
    queued = queue_step(runs.build(flags), read=False)
    report = queued.report
    return report.num_zeros, queued.squared_params, report.layer_losses, queued.balance is None
