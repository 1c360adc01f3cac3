"""Fixtures for tests on the device in host memory."""

import pytest
import torch

from tests.distributed.conftest import curve_of, profiles  # noqa: F401
from tests.hostcuda.library import compiler
from tests.hostcuda.ranks import USUAL, DeviceRanks


@pytest.fixture(scope="session")
def device() -> None:
    """Skip a test where the device cannot be built."""
    if torch.backends.cuda.is_built():
        pytest.skip("needs torch's build for CPUs: the other one has a CUDA device of its own")
    if compiler() is None:
        pytest.skip("needs a C++ compiler to build tests/hostcuda/device.cpp")


@pytest.fixture(scope="session")
def device_ranks(device: None):
    """`device_ranks(n, machine)`: n ranks on one of `packages.MACHINES`, shared by the whole session."""
    pools: dict[tuple[int, str], DeviceRanks] = {}

    def of(world_size: int, machine: str = USUAL) -> DeviceRanks:
        return pools.setdefault((world_size, machine), DeviceRanks(world_size, machine))

    yield of
    for pool in pools.values():
        pool.stop()
