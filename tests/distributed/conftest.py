"""Shared fixtures for tests of training runs: cluster profiles, and reference curves that are each trained once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_balance.training.run import Run
from tests.distributed import runs
from tests.distributed.runs import Curve

LONG = 20
"""Iterations over which an optimized run must follow the plain one."""


@pytest.fixture(scope="session")
def curve_of(ranks) -> Callable[..., Curve]:
    """`curve_of(flags, iterations, world_size, mutate)`: the curve of a run, taken from a known longer one if any."""
    known: dict[tuple, Curve] = {}

    def of(flags: str, iterations: int = 20, world_size: int = 4, mutate: Callable[[Run], None] | None = None) -> Curve:
        key = world_size, flags, mutate
        if len(known.get(key, ())) < iterations:
            curves = ranks(world_size).run(runs.train_curve, flags, iterations, mutate)
            assert all(curve == curves[0] for curve in curves)
            known[key] = curves[0]
        return known[key][:iterations]

    return of


@pytest.fixture(scope="session")
def length(pytestconfig: pytest.Config) -> Callable[[int], int]:
    """`length(few)`: iterations of a training run; with `--slow`, at least the number in contract 1 of exactness."""
    return lambda few: max(few, LONG) if pytestconfig.getoption("--slow") else few


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Expert-parallel size -> profile of a cluster with slow computation and fast links, so that every policy acts."""
    paths = {}
    for ranks in (2, 4):
        paths[ranks] = tmp_path_factory.mktemp("profiles") / f"{ranks}.json"
        runs.fast_links(ranks).save(paths[ranks])
    return paths
