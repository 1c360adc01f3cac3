"""Two runs with the same flags take the same steps, and so does a resumed run, no matter how fast ranks plan."""

import random
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch.distributed as dist

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.flexmoe import FlexMoE
from megatron_balance.training.run import Run
from tests.distributed.checkpoints import disturbed

LONGEST_DELAY = 0.2
"""Seconds; an iteration is shorter."""


@dataclass(frozen=True)
class Slow(FlexMoE):
    """FlexMoE that sometimes takes longer than an iteration."""

    generator: random.Random = field(default_factory=random.Random)

    def plan(self, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        if self.generator.random() < 0.4:
            time.sleep(self.generator.uniform(0, LONGEST_DELAY))
        return super().plan(counts_DE, current, cost)


def plan_slowly(seed: int, run: Run) -> None:
    """Slow down planning differently for every rank, layer and run."""
    assert run.balancer is not None
    for number, state in run.balancer.layers.items():
        generator = random.Random(10_000 * seed + 100 * number + dist.get_rank())
        state.manager.policy = Slow(**vars(state.manager.policy), generator=generator)


@pytest.mark.parametrize(
    ("ranks_in_all", "iterations", "save_at"),
    # Bursts are in iterations 6 and 7, 14 and 15, ...
    [(2, 9, 6), pytest.param(4, 50, 23, marks=pytest.mark.slow)],
)
def test_plans_that_take_long_change_no_step(
    ranks, profiles, tmp_path, ranks_in_all: int, iterations: int, save_at: int
) -> None:
    flags = (
        f"--expert-model-parallel-size {ranks_in_all} --balance-policy flexmoe --balance-overlap blockwise "
        f"--balance-profile {profiles[ranks_in_all]} --balance-threshold 1.02 --moe-router-force-workload burst "
        "--train-iters 50"
    )
    task = disturbed, flags, str(tmp_path), iterations, save_at, plan_slowly
    outcomes = ranks(ranks_in_all).run(*task, timeout=600.0)
    for first, repeated, resumed in outcomes:
        assert first.placements == outcomes[0][0].placements
        assert (repeated, resumed) == ([], [])
    changes = sum(before != after for before, after in zip(first.placements, first.placements[1:], strict=False))
    assert changes >= iterations / 2, f"placements hardly change: {first.placements}"
