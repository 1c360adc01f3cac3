"""Fixtures of tests on the device in host memory, which are skipped where nothing can build it."""

from collections.abc import Sequence

import pytest

from tests.distributed.conftest import curve_of, profiles  # noqa: F401
from tests.hostcuda.library import compiler
from tests.hostcuda.ranks import DeviceRanks


@pytest.fixture(scope="session")
def device_ranks():
    """`device_ranks(n, packages)`: n ranks on a machine with these packages, shared by the whole session."""
    if compiler() is None:
        pytest.skip("needs a C++ compiler to build tests/hostcuda/device.cpp")
    pools: dict[tuple[int, tuple[str, ...]], DeviceRanks] = {}

    def of(world_size: int, packages: Sequence[str] = ()) -> DeviceRanks:
        key = world_size, tuple(packages)
        return pools.setdefault(key, DeviceRanks(*key))

    yield of
    for pool in pools.values():
        pool.stop()
