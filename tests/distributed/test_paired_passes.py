"""`--overlap-moe-expert-parallel-comm` trains the same model, and its passes take turns where they wait."""

import pytest

from tests.distributed import runs
from tests.distributed.runs import deviation
from tests.variants import variants

PAIRED = "--overlap-moe-expert-parallel-comm"
TOLERANCE = 1e-5
EP2 = "--expert-model-parallel-size 2 --global-batch-size 16 --moe-router-force-workload hot_experts"

CASES = {
    "two ranks": (2, ""),
}


@pytest.mark.parametrize(("world_size", "flags"), variants(CASES, quick=("two ranks",)))
def test_losses_are_those_of_one_pass_after_the_other(ranks, curve_of, length, world_size: int, flags: str) -> None:
    iterations = length(4)
    plain = f"{EP2} {flags}"
    paired = curve_of(f"{plain} {PAIRED}", iterations, world_size)
    assert deviation(paired, curve_of(plain, iterations, world_size)) <= TOLERANCE
    # Sums have a fixed order
    assert ranks(world_size).run(runs.train_curve, f"{plain} {PAIRED}", iterations)[0] == paired
