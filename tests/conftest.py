"""Fixtures shared by all tests."""

import argparse
import gc
import importlib.metadata
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from megatron_balance.device import cpu
from tests.harness import Ranks

EMERGING = Path(__file__).parent / "packages/emerging"

ON_ANY_DEVICE = {"test_experts.py", "test_one_gpu.py", "test_rows.py"}
"""Files whose tests use a CUDA device if there is one."""

# Until all tests are imported, there is nothing to collect: see `pytest_collection_finish`
gc.disable()

# No deadlines, because another worker may use the cores while an example is timed
settings.register_profile("quick", deadline=None, max_examples=40)
settings.register_profile("slow", deadline=None)
settings.load_profile("quick")

# A shell starts background jobs with SIGINT ignored, and ranks would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--slow", action="store_true", help="also run the long campaigns")
    # Here and not in a later hook, because conftest.py of some folders imports megatron.core
    hide_devices(pluginmanager.get_plugin("pytestconfig").known_args_namespace)
    offer_optimizers()
    cpu.install()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow"):
        settings.load_profile("slow")


def offer_optimizers() -> None:
    """Let this process, and those that tests start, import our stand-in for the package that Muon needs, unless the
    package is installed. Its version is the one that the installed megatron-core can use."""
    if importlib.util.find_spec("emerging_optimizers") is None:
        older = importlib.metadata.version("megatron-core").startswith("0.16.")
        folders = [str(EMERGING), str(EMERGING / ("v0.1.0" if older else "v0.2.0"))]
        sys.path += folders
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *folders])


def hide_devices(given: argparse.Namespace) -> None:
    """Hide CUDA devices, also from processes that tests start, unless all tests of this session are meant for them."""
    files = {Path(argument.partition("::")[0]).name for argument in given.file_or_dir}
    if given.markexpr != "gpu" and not (files and files <= ON_ANY_DEVICE):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="a long campaign; run with --slow"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; run with -m gpu"))
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if workers is not None:
        items[:] = in_parts(items, int(workers))


def in_parts(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in an order in which few workers repeat what tests share.

    With `--dist worksteal`, each worker starts with an equal part of the list, and an idle worker takes the end of
    another's part. So each part ends with unit tests, which share little. All tests on the simulated device are in one
    part, because each of its machines has a server that takes seconds to start.
    """
    shared: dict[str, list[pytest.Item]] = {"hostcuda": []}
    units: list[pytest.Item] = []
    for item in items:
        folder = item.path.parent.name
        group = units if folder == "unit" else shared.setdefault(folder if folder in shared else item.path.name, [])
        group.append(item)
    ordered: list[pytest.Item] = []
    files = list(shared.values())
    for worker in range(workers):
        ordered += [item for group in files[worker::workers] for item in group]
        missing = len(items) * (worker + 1) // workers - len(ordered)
        ordered += units[: max(missing, 0)]
        units = units[max(missing, 0) :]
    return ordered + units


def pytest_collection_finish() -> None:
    """Exempt all modules and tests from garbage collections, which would scan them again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def alone() -> Iterator[None]:
    """Initialize torch.distributed with this process as the only rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)`: a group of n gloo ranks, shared by the whole session."""
    pools: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        return pools.setdefault(world_size, Ranks(world_size))

    yield of
    for pool in pools.values():
        pool.stop()
