"""Gloo ranks whose tensors are on the device in host memory: `DeviceRanks(4).run(task)` as in tests/harness.py.

A machine is told by the packages it has: those of `packages/` that are named, which stand for the real ones.
"""

import os
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

from tests.harness import Ranks
from tests.hostcuda.library import library

PACKAGES = Path(__file__).parent / "packages"


class DeviceRanks(Ranks):
    """Ranks that are forked from a server of their own: one that has loaded the device before torch."""

    def __init__(self, world_size: int, packages: Sequence[str] = ()) -> None:
        super().__init__(world_size)
        self.packages = packages

    def _start_process(self, process: BaseProcess) -> None:
        start(process, self.packages)


def start(process: BaseProcess, packages: Sequence[str] = ()) -> None:
    """Start a process of the context `forkserver` on the device, with these packages."""
    server = _server(tuple(packages))
    environment = {"LD_PRELOAD": str(library()), "PYTHONPATH": _path(packages)}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
    ):
        process.start()


_SERVERS: dict[tuple[str, ...], forkserver.ForkServer] = {}


def _server(packages: tuple[str, ...]) -> forkserver.ForkServer:
    """The process that such ranks are forked from; it starts with the first of them."""
    if packages not in _SERVERS:
        _SERVERS[packages] = forkserver.ForkServer()
        _SERVERS[packages].set_forkserver_preload(["tests.hostcuda.preload"])
    return _SERVERS[packages]


def _path(packages: Sequence[str]) -> str:
    roots = [str(PACKAGES / package) for package in packages]
    return os.pathsep.join([*roots, str(PACKAGES.parents[2]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
