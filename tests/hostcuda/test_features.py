"""Every feature, and every pair of them that goes together, trains on the device as it does on a CPU: to the bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.training.run import Run
from tests import features
from tests.hostcuda.runs import Watched, watched

ITERATIONS = 2

FEWER_SAMPLES = "--global-batch-size 8"

SAME_KERNELS = "--no-bias-swiglu-fusion --no-bias-dropout-fusion"
"""What a CPU does not fuse, and megatron-core computes otherwise when it does."""

PRECISIONS = {"bf16": "--bf16", "float32": ""}

TOGETHER = [pair for pair in features.PAIRS if not features.alternatives(*pair) and features.refusal(*pair) is None]


def as_on_cuda(run: Run) -> None:
    """Experts compute together: slot by slot, products of half precision round otherwise."""
    for chunk in run.model:
        for module in chunk.modules():
            if isinstance(module, GroupedExperts):
                together = module._all_slots
                module._all_slots = lambda rows, tokens, probs, by_slot, *rest, together=together: together(
                    rows, tokens, probs, False, *rest
                )


@pytest.fixture
def check(device_ranks, curve_of, profiles: dict[int, Path]) -> Callable[..., list[Watched]]:
    """`check(features, precision)`: a run with them has nothing to complain about, and computes what a CPU does."""

    def of(names: tuple[str, ...], precision: str) -> list[Watched]:
        flags = " ".join([features.flags_of(*names), FEWER_SAMPLES, SAME_KERNELS, PRECISIONS[precision]])
        world_size = features.world_size(*names)
        balanced = "--balance-policy" in flags
        if balanced:
            flags += f" --balance-profile {profiles[2]}"
        outcomes = device_ranks(world_size).run(watched, flags, ITERATIONS)
        for outcome in outcomes:
            assert not outcome.complaints, "\n".join(outcome.complaints[:5])
            assert (outcome.acted > 0) == balanced
        assert outcomes[0].curve == curve_of(flags, ITERATIONS, world_size, as_on_cuda)
        return outcomes

    return of


PARTS = ("policy", "pipeline", "layer recomputation", "baseline")
"""Others have what they execute: blockwise overlap, the interleaved pipeline, full recomputation, megatron's layer."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in PARTS else []) for name in features.FEATURES],
)
def test_features(check, name: str) -> None:
    check((name,), "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("name", features.FEATURES)
def test_features_in_float32(check, name: str) -> None:
    check((name,), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("pair", TOGETHER, ids="-".join)
def test_pairs(check, pair: tuple[str, str], precision: str) -> None:
    check(pair, precision)
