"""Whole jobs of the entry point, with a separate process for every rank, for tests where ranks die."""

import contextlib
import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.harness import PRELOAD, check_order
from tests.issue_order import OrderedCollectives

LOWEST_PORT = 10000
"""Well-known services use lower ports."""

PATIENCE = 120.0
"""Seconds that a rank which cannot start waits for the others to read why."""

Prepare = Callable[[int], None]
"""A function that every rank calls with its number before it trains."""


@dataclass(frozen=True)
class Ended:
    """How a job ended: exit codes (negative: the signal) and everything printed, by rank."""

    codes: list[int | None]
    output: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.output)


class Job:
    """A job of `world_size` ranks, started as by a launcher that only sets the environment."""

    def __init__(
        self,
        world_size: int,
        flags: str | Callable[[int], str],
        directory: Path,
        prepare: Prepare | None = None,
        start: Callable[[BaseProcess], None] = BaseProcess.start,
    ) -> None:
        """`flags` may differ by rank; `start` starts a rank, possibly on another device."""
        directory.mkdir(parents=True, exist_ok=True)
        self.logs = [directory / f"rank{rank}.txt" for rank in range(world_size)]
        for log in self.logs:
            log.unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        port = free_port()
        flags_of = (lambda _: flags) if isinstance(flags, str) else flags
        self.ranks: list[BaseProcess] = [
            context.Process(target=_rank, args=(rank, world_size, port, self.logs[rank], flags_of(rank), prepare))
            for rank in range(world_size)
        ]
        for process in self.ranks:
            start(process)

    def wait(self, seconds: float = 300.0, grace: float | None = None) -> Ended:
        """Wait for all ranks; `grace` seconds after the first failure, kill the others, as torchrun would."""
        deadline = time.monotonic() + seconds
        running = {process.sentinel: process for process in self.ranks}
        while running and time.monotonic() < deadline:
            for sentinel in multiprocessing.connection.wait(list(running), timeout=0.2):
                process = running.pop(sentinel)
                process.join()
                if process.exitcode and grace is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        codes = [process.exitcode for process in self.ranks]
        self.kill()
        if codes == [0] * len(codes):
            check_order("pretrain", [pickle.loads(_record_of(log).read_bytes()) for log in self.logs])
        return Ended(codes, [self.output(rank) for rank in range(len(self.ranks))])

    def await_iteration(self, iteration: int | None = None, seconds: float = 300.0) -> None:
        """Wait until the last rank, which prints, has logged this iteration (None: any iteration)."""
        last = len(self.ranks) - 1
        deadline = time.monotonic() + seconds
        while not re.search(rf"iteration +{iteration or '[0-9]+'}/", self.output(last)):
            assert time.monotonic() < deadline and self.ranks[last].is_alive(), self.output(last)
            time.sleep(0.1)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        os.kill(self.ranks[rank].pid, number)

    def output(self, rank: int) -> str:
        """Return everything that a rank has printed so far."""
        return self.logs[rank].read_text(errors="replace") if self.logs[rank].exists() else ""

    def kill(self) -> None:
        """End every rank at once."""
        for process in self.ranks:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()


def free_port() -> int:
    """Return a port on which nothing listens, and which the kernel gives to no other socket before a job listens there.

    The kernel gives ports of its own range to sockets that ask for none; jobs beside this one open many of those.
    """
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    while True:
        port = random.SystemRandom().randrange(LOWEST_PORT, int(first))
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def _rank(rank: int, world_size: int, port: int, log: Path, flags: str, prepare: Prepare | None) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in (numbers | {"MASTER_PORT": port}).items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    import torch

    from megatron_balance.app import launch
    from megatron_balance.job import agreement

    torch.set_num_threads(1)
    # Other ranks may still start on a busy machine. Nobody waits once all have read
    agreement.DECLINE_SECONDS = agreement.FAREWELL_SECONDS = PATIENCE
    if prepare is not None:
        prepare(rank)
    collectives = OrderedCollectives()
    try:
        with collectives.recorded():
            launch.pretrain(flags.split())
    finally:
        _record_of(log).write_bytes(pickle.dumps((collectives.record(), collectives.events)))
        sys.stdout.flush()
        sys.stderr.flush()


def _record_of(log: Path) -> Path:
    """Return the file where a rank stores its record of collectives."""
    return log.with_suffix(".collectives")


@dataclass(frozen=True)
class Death:
    """The point where a process of a job dies by SIGKILL: the `call`-th call of the function at `point` in `rank`'s
    `turn`-th save or Transfer.

    Each writer process counts its own calls; with `parent`, its rank dies instead of the writer. `staging_bytes` sets
    the staging memory of every rank's Transfers, so that each of them takes several rounds.
    """

    point: str
    call: int
    rank: int
    turn: int = 2
    parent: bool = False
    during: str = "save"
    staging_bytes: int | None = None

    def __call__(self, rank: int) -> None:
        """Prepare a rank for this death."""
        if self.staging_bytes is not None:
            transfer = importlib.import_module(TRANSFER).ExpertMover
            transfer.__init__ = functools.partialmethod(transfer.__init__, staging_bytes=self.staging_bytes)
        if rank != self.rank:
            return
        turn = 0
        calls = 0
        owner = os.getpid()
        whole, begin = found(WHOLE[self.during])
        holder, name = found(POINTS[self.point])
        start = getattr(whole, begin)
        original = getattr(holder, name)

        def counting(*args, **kwargs):
            nonlocal turn, calls
            turn = turn + 1
            calls = 0
            return start(*args, **kwargs)

        @functools.wraps(original)
        def dying(*args, **kwargs):
            nonlocal calls
            calls += 1
            if (turn, calls) == (self.turn, self.call):
                in_writer = os.getpid() != owner
                os.kill(owner if self.parent and in_writer else os.getpid(), signal.SIGKILL)
                time.sleep(1)
            return original(*args, **kwargs)

        setattr(whole, begin, counting)
        setattr(holder, name, dying)


CHECKPOINT = "megatron_balance.checkpoint"
TRANSFER = "megatron_balance.comm.ownership_transfer"

POINTS = {
    "serialize": f"{CHECKPOINT}.run_state:sharded_state",
    "plan": f"{CHECKPOINT}.writer:ShardStrategy.async_save",
    "start writer": f"{CHECKPOINT}.writer:_start",
    "write": f"{CHECKPOINT}.writer:_write",
    "write tensor": "megatron.core.dist_checkpointing.strategies.filesystem_async:_write_item",
    "digest": f"{CHECKPOINT}.manifest:digest",
    "fsync": "os:fsync",
    "manifest": f"{CHECKPOINT}.manifest:write",
    "rename": "os:rename",
    "tracker": "os:replace",
    "prune": "shutil:rmtree",
    "messages": f"{TRANSFER}:plan_messages",
    "rounds": f"{TRANSFER}:plan_rounds",
    "pack": f"{TRANSFER}:_pack",
    "exchange": f"{TRANSFER}:ExpertMover._exchange",
    "unpack": f"{TRANSFER}:_unpack",
    "own": "megatron_balance.flow.experts:GroupedExperts.own",
}
"""Points where a save or a Transfer may be interrupted: functions that it calls, in approximate order."""

WHOLE = {"save": f"{CHECKPOINT}.checkpoints:Checkpoints._start", "transfer": f"{TRANSFER}:ExpertMover.transfer"}
"""What `turn` counts, by `during`."""


def found(place: str) -> tuple[Any, str]:
    """Return the object that holds a function, written as `module:name` or `module:class.name`, and its name."""
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    return functools.reduce(getattr, outer, importlib.import_module(module)), name
