"""Ranks that share one GPU: `GpuRanks(4).run(task)` as in tests/harness.py.

NCCL refuses two ranks of one host on one GPU, so each rank claims a host of its own (NCCL_HOSTID), and rows travel
through sockets of the loopback interface. Kernels, streams, communicators and their order are NCCL's own; times mean
nothing, because processes share a GPU by time slices. NVIDIA does not support this use (NVIDIA/nccl issue 418).
"""

import functools
import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from typing import Any

from tests.harness import RankFailure, Ranks

NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_DEBUG": "WARN",
}

START_SECONDS = 300.0


class GpuRanks(Ranks):
    """Ranks in new processes, since a process that has used CUDA cannot be forked."""

    # Each of NCCL's communicators has several threads
    max_threads = 1000

    def __init__(self, world_size: int, backend: str, environment: Mapping[str, str] | None = None) -> None:
        """
        Args:
            backend: `nccl`, or `gloo` without a GPU.
            environment: variables that CUDA and NCCL read when they start.
        """
        super().__init__(world_size)
        self.backend = backend
        self.environment = dict(environment or {})

    def _start(self) -> None:
        """Start the processes, whose imports take longer than many tasks, and wait until they can run one."""
        super()._start()
        for rank, question in enumerate(self._questions):
            question.send("record")
            try:
                ready = question.poll(START_SECONDS)
                question.recv() if ready else None
            except EOFError:
                ready = False
            if not ready:
                raise RankFailure(f"rank {rank} did not start")

    def _process(self, *args: Any) -> BaseProcess:
        target = functools.partial(_serve, self.backend, self.environment)
        return multiprocessing.get_context("spawn").Process(target=target, args=args)


def _serve(backend: str, environment: Mapping[str, str], rank: int, *args: Any) -> None:
    # Each rank compiles in its own process: the others compile at the same time
    own = {"NCCL_HOSTID": f"rank{rank}", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    os.environ.update(NCCL | own | environment)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    if backend == "gloo":
        # Before CUDA is asked for devices
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from tests import preload  # noqa: F401
    from tests.gpu import host_numbers
    from tests.harness import serve

    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    host_numbers.install()
    serve(rank, *args, backend=backend)
