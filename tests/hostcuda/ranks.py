"""Gloo ranks whose tensors are on the device in host memory: `DeviceRanks(4).run(task)` as in tests/harness.py.

A machine is defined by its packages: a choice of the stand-ins in `packages/`.
"""

import os
import sys
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from unittest import mock

from tests.harness import Ranks
from tests.hostcuda.library import library
from tests.hostcuda.packages import roots

USUAL = "deep_ep"
"""The machine of most tests. Only flags that ask for DeepEP use it, so one server forks the ranks of runs with and
without them."""


class DeviceRanks(Ranks):
    """Ranks forked from a separate server, which has loaded the device before torch."""

    def __init__(self, world_size: int, machine: str = USUAL) -> None:
        """`machine`: one of `packages.MACHINES`."""
        super().__init__(world_size)
        self.machine = machine

    def _start_process(self, process: BaseProcess) -> None:
        start(process, self.machine)


def start(process: BaseProcess, machine: str = USUAL) -> None:
    """Start a process of the context `forkserver` on the device of this machine."""
    if machine not in _SERVERS:
        _SERVERS[machine] = forkserver.ForkServer()
        _SERVERS[machine].set_forkserver_preload(["tests.hostcuda.preload"])
    # The server finds modules through PYTHONPATH when it starts; a forked process, through this process's sys.path
    path = [*roots(machine), *sys.path]
    with (
        mock.patch.dict(os.environ, LD_PRELOAD=str(library()), PYTHONPATH=os.pathsep.join(path)),
        mock.patch.object(sys, "path", path),
        mock.patch.object(forkserver, "connect_to_new_process", _SERVERS[machine].connect_to_new_process),
    ):
        process.start()


_SERVERS: dict[str, forkserver.ForkServer] = {}
"""Machine -> the server that forks its processes; a server starts with its first process."""
