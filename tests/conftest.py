"""Fixtures shared by all tests."""

import gc
import signal

import pytest
from hypothesis import settings

from megatron_balance.device import cpu
from tests.harness import Ranks

# Before any test module imports megatron.core
cpu.install()

# Another worker may use the cores while an example is timed
settings.register_profile("no deadlines", deadline=None)
settings.load_profile("no deadlines")

# A shell starts background jobs with SIGINT ignored, and ranks would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the long campaigns")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="a long campaign; run with --slow"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Exempt all modules and tests from garbage collections, which would scan them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)`: a group of n gloo ranks, shared by the whole session."""
    pools: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        return pools.setdefault(world_size, Ranks(world_size))

    yield of
    for pool in pools.values():
        pool.stop()
