"""Every feature, and every compatible pair of features, trains on the device as on a CPU, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import features
from tests.hostcuda.runs import SAME_KERNELS, watched, without_fused_adam

ITERATIONS = 2

PRECISIONS = {"bf16": "--bf16", "float32": ""}

NEED_ENGINE = {"context parallelism"}
"""Features that need Transformer Engine, which rounds differently: test_program.py trains them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Find the features and pairs, which takes seconds, only when they are trained."""
    if "alone_or_paired" in metafunc.fixturenames:
        found: list[tuple[str, ...]] = []
        if metafunc.config.getoption("--slow"):
            found = [*((name,) for name in features.FEATURES), *features.together()]
        found = [names for names in found if NEED_ENGINE.isdisjoint(names)]
        metafunc.parametrize("alone_or_paired", found, ids="-".join)


@pytest.fixture
def check(device_ranks, curve_of, profiles: dict[int, Path]) -> Callable[..., None]:
    """`check(features, precision)`: a run with these features causes no complaint and computes what a CPU computes.

    Further arguments are further flags.
    """

    def of(names: tuple[str, ...], precision: str, *more: str) -> None:
        flags = " ".join([features.flags_of(*names), *more, SAME_KERNELS, PRECISIONS[precision]])
        world_size = features.world_size(*names)
        balanced = "--balance-policy" in flags
        if balanced:
            flags += f" --balance-profile {profiles[2]}"
        outcomes = device_ranks(world_size).run(watched, flags, ITERATIONS)
        for outcome in outcomes:
            assert not outcome.complaints, "\n".join(outcome.complaints[:5])
            assert (outcome.acted > 0) == balanced
        assert outcomes[0].curve == curve_of(flags, ITERATIONS, world_size, without_fused_adam)

    return of


TOGETHER_AT_ONCE = (
    ("sequence parallelism", "expert shards", "all-to-all", "codec", "chunks", "blockwise overlap", "paired passes"),
    (
        *("interleaved pipeline", "blockwise overlap", "distributed optimizer", "capacity", "layer recomputation"),
        *("chunks", "paired passes", "exact plans"),
    ),
    ("exact plans", "blockwise overlap", "full recomputation", "paired passes"),
    ("two time scales", "blockwise overlap", "distributed optimizer", "paired passes"),
    ("s1", "ownership", "distributed optimizer"),
    ("s2", "exact plans", "full recomputation"),
    ("allgather", "policy"),
    ("megatron's layer",),
)
"""Every feature with code that no other feature executes, in few runs; the first two are trained without `--slow`."""


@pytest.mark.parametrize(
    "names",
    [*TOGETHER_AT_ONCE[:2], *(pytest.param(names, marks=pytest.mark.slow) for names in TOGETHER_AT_ONCE[2:])],
    ids="-".join,
)
def test_features_at_once(check, names: tuple[str, ...]) -> None:
    """Two layers, or one for each virtual stage, are enough for one to overlap with its neighbor."""
    few = "" if "interleaved pipeline" in names else "--num-layers 2"
    check(names, "bf16", few)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_feature_and_pair(check, alone_or_paired: tuple[str, ...], precision: str) -> None:
    check(alone_or_paired, precision)
