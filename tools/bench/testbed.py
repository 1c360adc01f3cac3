"""A rate-limited emulated network on one machine: nodes are network namespaces, connected by a bridge.

    python tools/bench/testbed.py --nodes 2 --ranks-per-node 2 --link-mbit 400 [--bus-mbit 1600] -- SCRIPT [ARG ...]

runs a script on all ranks with the environment that torchrun would set, prints the output of the last rank, and exits
with the highest exit code of all ranks. Ranks of one node share a namespace and communicate over its loopback, which is
fast unless limited by --bus-mbit. This needs root, `ip`, and `tc` with tbf; exit code 2 means that one is missing.
"""

import argparse
import contextlib
import datetime
import itertools
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from namespaces import (
    TestbedUnavailable,
    abandoned,
    address,
    build,
    end_processes,
    enter,
    existing_namespaces,
    remove,
    require_tools,
    setup_commands,
)

FIRST_PORT = 29500

GRACE_SECONDS = 10.0
"""Seconds that other ranks may continue after a rank has failed."""


class RankFailure(RuntimeError):
    """A rank raised, died or did not finish in time; the message contains its traceback and its last output."""


class Ended(NamedTuple):
    """Exit codes and output of the ranks of a command."""

    codes: list[int | None]
    """Exit codes by rank; negative for a signal; None if stopped by us after another's failure or the time limit."""
    output: list[str]
    """Standard output and error by rank."""

    @property
    def worst_code(self) -> int:
        """Highest exit code as in a shell, 128 and more for signals; 1 if every rank had to be stopped."""
        codes = [128 - code if code < 0 else code for code in self.codes if code is not None]
        return max(codes, default=1)


class Testbed:
    """`with Testbed(2, 4, link_mbit=400) as testbed: results = testbed.run(task, argument)`; takes 0.2 s to build.

    Leaving the `with`, also by SIGTERM or Ctrl-C, ends all processes inside and removes the namespaces. The next
    testbed removes the remains of an earlier one that was killed.

    Args:
        nodes: number of network namespaces.
        ranks_per_node: rank r is on node r // ranks_per_node.
        link_mbit: Mbit/s that a node can send, and receive at the same time; None: one node, which is this machine.
            Then neither root nor a tool is needed, and only `run` works.
        bus_mbit: Mbit/s that all ranks of a node together can send to each other; None: the loopback's rate.

    Raises:
        ValueError: a number is not positive.
        TestbedUnavailable: on entering, if namespaces or rate limits are not available.
    """

    __test__ = False

    def __init__(self, nodes: int, ranks_per_node: int, link_mbit: float | None, bus_mbit: float | None = None) -> None:
        names = ("--nodes", "--ranks-per-node", "--link-mbit", "--bus-mbit")
        for flag, value in zip(names, (nodes, ranks_per_node, link_mbit, bus_mbit), strict=True):
            if value is not None and value <= 0:
                raise ValueError(f"{flag} {value}: choose a number above 0")
        if link_mbit is None and nodes > 1:
            raise ValueError(f"--nodes {nodes}: also give --link-mbit")
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self.link_mbit = link_mbit
        self.bus_mbit = bus_mbit
        self.world_size = nodes * ranks_per_node
        # The process number distinguishes leftovers from namespaces in use
        self._prefix = f"testbed-{os.getpid()}-{secrets.token_hex(3)}-"
        self._ports = itertools.count(FIRST_PORT)
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Testbed":
        with contextlib.ExitStack() as stack:
            stack.enter_context(_terminate_raises())
            self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if self.link_mbit is not None:
                require_tools()
                remove(abandoned(existing_namespaces()))
                stack.callback(lambda: remove(self._own_namespaces()))
                build(setup_commands(self._prefix, self.nodes, self.link_mbit, self.bus_mbit))
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.ranks_per_node

    def run(self, task: Callable[..., Any], *args: Any, timeout: float = 180.0) -> list[Any]:
        """Call `task(*args)` on every rank in a new gloo group; return all results.

        Ranks are forked from multiprocessing's fork server, so preloaded modules need not be imported again. `task` is
        a module-level function, whose module must be on `sys.path`.

        Args:
            timeout: seconds for the whole task.

        Raises:
            RankFailure: a rank failed; the error is about the first one.
        """
        context = multiprocessing.get_context("forkserver")
        port = self._port()
        processes = []
        pipes = []
        try:
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                where = (self._namespace(rank), self._environment(rank, port), self._log(rank))
                process = context.Process(target=_serve, args=(*where, theirs, task, args, timeout))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return self._collect(task.__name__, pipes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            self._end_processes()

    def launch(self, command: Sequence[str], live: bool = False, timeout: float | None = None) -> Ended:
        """Run a command as every rank, with the environment that torchrun would give it.

        Args:
            live: whether the last rank prints to our standard output and error instead of `Ended.output`.
            timeout: seconds after which all ranks are stopped.
        """
        port = self._port()
        processes = []
        try:
            for rank in range(self.world_size):
                with open(self._log(rank), "wb") as log:
                    output = None if live and rank == self.world_size - 1 else log
                    inside = ["ip", "netns", "exec", f"{self._prefix}{self.node_of(rank)}", *command]
                    options = {"env": os.environ | self._environment(rank, port), "stdin": subprocess.DEVNULL}
                    processes.append(subprocess.Popen(inside, stdout=output, stderr=output, **options))
            codes = _wait(processes, timeout)
        finally:
            self._end_processes()
            for process in processes:
                process.kill()
                process.wait()
        return Ended(codes, [self.output(rank) for rank in range(self.world_size)])

    def output(self, rank: int) -> str:
        """Return the output of a rank in the latest `run` or `launch`."""
        return self._log(rank).read_text(errors="replace")

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": rank % self.ranks_per_node,
            "LOCAL_WORLD_SIZE": self.ranks_per_node,
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        addresses = {"MASTER_ADDR": "127.0.0.1"}
        if self.link_mbit is not None:
            addresses = {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": "eth0"}
        return addresses | {name: str(value) for name, value in numbers.items()}

    def _namespace(self, rank: int) -> str | None:
        return None if self.link_mbit is None else f"{self._prefix}{self.node_of(rank)}"

    def _port(self) -> int:
        """Return a port that nobody uses: any in a network of our own."""
        if self.link_mbit is not None:
            return next(self._ports)
        with socket.create_server(("127.0.0.1", 0)) as server:
            return server.getsockname()[1]

    def _log(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.txt"

    def _collect(self, name: str, pipes: list[Connection], timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        while len(results) < len(pipes):
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(len(pipes))) - results.keys())
                raise RankFailure(f"{name}: ranks {missing} did not finish in {timeout} s")
            for rank, pipe in enumerate(pipes):
                if pipe not in ready:
                    continue
                try:
                    error, results[rank] = pipe.recv()
                except EOFError:
                    error = "it died"
                if error is not None:
                    raise RankFailure(f"{name}: rank {rank} failed: {error}\n{self.output(rank)[-3000:]}")
        return [results[rank] for rank in range(len(pipes))]

    def _end_processes(self) -> None:
        for name in self._own_namespaces():
            end_processes(name)

    def _own_namespaces(self) -> list[str]:
        return [name for name in existing_namespaces() if name.startswith(self._prefix)]


def _wait(processes: list[subprocess.Popen], timeout: float | None) -> list[int | None]:
    """Return the exit codes; None for processes that still run at the time limit or after the grace period."""
    deadline = time.monotonic() + timeout if timeout is not None else float("inf")
    failed = False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            break
        if any(codes) and not failed:
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
    return [process.poll() for process in processes]


@contextlib.contextmanager
def _terminate_raises() -> Iterator[None]:
    """Let SIGTERM unwind the stack instead of ending the process immediately."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(
    namespace: str | None,
    environment: dict[str, str],
    log: Path,
    pipe: Connection,
    task: Callable[..., Any],
    args: tuple,
    timeout: float,
) -> None:
    """Run one rank of `Testbed.run`."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        if namespace is not None:
            enter(namespace)
        os.environ |= environment
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        # The parent's limit ends first, and names all ranks that have not finished
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout + 60))
        outcome = (None, task(*args))
    except BaseException:
        outcome = (traceback.format_exc(), None)
    sys.stdout.flush()
    pipe.send(outcome)
    # The first rank hosts the store, so it must run until all ranks are stopped
    with contextlib.suppress(EOFError):
        pipe.recv()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--link-mbit", type=float, required=True, help="Mbit/s of each node's link, in each direction")
    parser.add_argument("--bus-mbit", type=float, help="Mbit/s within each node")
    parser.add_argument("script", help="a Python script")
    # "*" would consume a second "--", which belongs to the script
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    try:
        with Testbed(args.nodes, args.ranks_per_node, args.link_mbit, args.bus_mbit) as testbed:
            ended = testbed.launch([sys.executable, args.script, *args.arguments], live=True)
    except ValueError as error:
        parser.error(str(error))
    except TestbedUnavailable as error:
        print(f"testbed.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    failed = {rank: code for rank, code in enumerate(ended.codes) if code}
    for rank in list(failed)[:1]:
        said = ended.output[rank][-3000:]
        print(f"testbed.py: exit codes by rank: {failed}; rank {rank} said:\n{said}", file=sys.stderr)
    return ended.worst_code


if __name__ == "__main__":
    sys.exit(main())
