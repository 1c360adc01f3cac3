"""A user's policy (`--balance-policy package.module:Class`) in a separate process.

Whatever the policy does there (exit, crash, loop, hold the interpreter's lock, exhaust memory), the rank continues. The
process starts from a clean command line: it has none of the rank's threads, sockets and device memory, and imports
neither the entry point nor torch. It ends with the rank.

The rank sends questions as pickles. An answer is JSON: a problem or null, and a text. The first text is the policy's
split, later ones are placements. The process runs this module.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.messages import cleaned, described
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.manager import PolicyFailure
from megatron_balance.planning.policies import load_policy, split_of
from megatron_balance.planning.policies.interface import Policy

_PR_SET_PDEATHSIG = 1

_LAST_SECONDS = 5.0
"""Seconds for a process to end after it has closed its pipe."""


class PolicyProcess(Policy):
    """A policy that plans in its own process. One thread may wait in `plan` while another one calls `stop`."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Start the process without waiting for it; see `ready`. `split` is the policy's once `ready` returns."""
        self.name = name
        self._is_ready = False
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-P", "-u", "-m", __name__, str(theirs.fileno()), str(os.getpid())]
        # sys.path may have changed since the program started
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": path},
        )
        theirs.close()
        weakref.finalize(self, _end, self._process, self._pipe)
        self._send((name, dict(options)))

    def ready(self, seconds: float) -> None:
        """Wait until the process has made the policy.

        Raises:
            ValueError: the policy cannot be made, has no `plan` or an unknown `split`, or was not made in time.
        """
        if self._is_ready:
            return
        flag = f"--balance-policy {self.name}"
        try:
            if not self._pipe.poll(seconds):
                raise PolicyFailure(f"was not imported and made within {seconds:.0f} s; see what it waits for")
            self.split = self._answer()
            self._is_ready = True
        except PolicyFailure as failure:
            self.stop()
            problem = str(failure)
            raise ValueError(problem if problem.startswith(flag) else f"{flag}: {problem}") from None

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`.

        Raises:
            PolicyFailure: the policy raised, returned no placement, or its process ended.
            ValueError: the placement that it returned is invalid.
        """
        self._send((counts, current, cost))
        return Placement.parse(self._answer())

    def stop(self) -> None:
        """End the process; a thread that waits in `plan` gets a PolicyFailure."""
        self._process.kill()

    def _send(self, question: object) -> None:
        with contextlib.suppress(OSError):  # reading the answer will report it
            self._pipe.send_bytes(pickle.dumps(question))

    def _answer(self) -> str:
        """Return the text of the next answer, or raise its problem as a PolicyFailure."""
        try:
            problem, text = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise PolicyFailure(self._ending(), final=True) from None
        if problem is not None:
            raise PolicyFailure(cleaned(problem))
        return text

    def _ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_LAST_SECONDS)
            if status < 0:
                return f"ended its process: {signal.strsignal(-status)} (signal {-status})"
            return f"ended its process: exit status {status}"
        self.stop()
        return "closed its connection"


def _end(process: subprocess.Popen, pipe: Connection) -> None:
    process.kill()
    process.wait()
    pipe.close()


def start_policy(name: str, **options: Any) -> Policy:
    """Return a policy by its name, or a PolicyProcess (perhaps not ready yet) for `package.module:Class`.

    Raises:
        ValueError: see `load_policy`.
    """
    return PolicyProcess(name, options) if ":" in name else load_policy(name, **options)


def serve(descriptor: int, parent: int) -> None:
    """Answer the questions of the rank, process `parent`, over the open socket `descriptor`."""
    _end_with(parent)
    # Ignore signals, because the rank handles the end of the job
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    pipe = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        name, options = pickle.loads(pipe.recv_bytes())
        try:
            policy = load_policy(name, **options)
            _reply(pipe, None, split_of(policy))
        except ValueError as error:
            # The error names the flag
            return _reply(pipe, cleaned(error, 400))
        except BaseException as error:  # report whatever the policy raises, SystemExit too
            return _reply(pipe, f"raised {described(error)}")
        while True:
            question = pipe.recv_bytes()
            try:
                planned = policy.plan(*pickle.loads(question))
                if isinstance(planned, Placement):
                    _reply(pipe, None, str(planned))
                else:
                    _reply(pipe, f"returned no Placement: a {cleaned(type(planned).__qualname__)}")
            except BaseException as error:
                _reply(pipe, f"raised {described(error)}")


def _reply(pipe: Connection, problem: str | None, text: str = "") -> None:
    pipe.send_bytes(json.dumps((problem, text)).encode())


def _end_with(parent: int) -> None:
    """Have the kernel end this process with its parent, even while a policy loops."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
    # Do not wait for threads that the policy has started
    sys.stdout.flush()
    os._exit(0)
