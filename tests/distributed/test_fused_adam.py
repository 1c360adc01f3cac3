"""Runs with a stand-in for Transformer Engine's FusedAdam resume exactly."""

import pytest

from tests import fused_adam
from tests.distributed.checkpoints import straight_against_resumed
from tests.variants import variants

ITERATIONS = 4

OF_ITS_OWN = "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer"
"""FusedAdam holds main parameters and moments."""

FLAGS = {
    "whole": "--bf16",
    "distributed": "--bf16 --use-distributed-optimizer",
    "precision-aware": OF_ITS_OWN,
    "precision-aware bf16": f"{OF_ITS_OWN} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16",
}


def resumed(flags: str, directory: str) -> list[str]:
    with fused_adam.installed():
        return straight_against_resumed(f"--num-layers 1 {flags}", directory, ITERATIONS)


@pytest.mark.parametrize("flags", variants(FLAGS, quick=("whole", "precision-aware bf16")))
def test_a_resumed_run_is_the_straight_run(ranks, tmp_path, flags: str):
    assert ranks(2).run(resumed, flags, str(tmp_path)) == [[]] * 2
