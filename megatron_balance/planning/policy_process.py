"""A user's policy (`--balance-policy package.module:Class`) in a separate process.

Whatever the policy does there (leave the interpreter, crash, loop, hold the interpreter's lock, take all memory), the
rank continues. The process starts from a clean command line: it has none of the rank's threads, sockets and device
memory, and imports neither the entry point nor torch. It ends with the rank.

The rank sends questions as pickles. It reads answers as pickles of numbers, strings and tuples only. An answer is a
problem or None, and a tuple: first the policy's split, later the fields of a Placement. The process runs this module.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import io
import operator
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.messages import cleaned, described
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS
from megatron_balance.planning.manager import PolicyFailure
from megatron_balance.planning.policies import load_policy, split_of
from megatron_balance.planning.policies.interface import Policy

MOST_BYTES = 2**24
"""Maximum number of bytes of an answer; a placement of 256 experts on 64 ranks has 5,000."""

MOST_DEATHS = 3
"""Number of deaths in a row after which the process is not started again."""

_FIELDS = [field.name for field in dataclasses.fields(Placement)]

_PR_SET_PDEATHSIG = 1

_LAST_SECONDS = 5.0
"""Seconds that a process has to end after it closed its pipe."""


class PolicyProcess(Policy):
    """A policy that plans in its own process. One thread may wait in `plan` while another one calls `stop`."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Start the process without waiting for it; see `ready`. `split` is the policy's once `ready` returns."""
        self.name, self._arguments = name, dict(options)
        self._deaths = 0
        self._stopped = False
        self._greeted = False
        self._process, self._pipe = self._start()

    def ready(self, seconds: float) -> None:
        """Wait until the process has made the policy.

        Raises:
            ValueError: the policy cannot be made, has no `plan` or an unknown `split`, or was not made in time.
        """
        if self._greeted:
            return
        flag = f"--balance-policy {self.name}"
        try:
            if not self._pipe.poll(seconds):
                raise ValueError(f"{flag}: was not imported and made within {seconds:.0f} s; see what it waits for")
            self._greet()
        except (PolicyFailure, EOFError, OSError) as error:
            problem = str(error) if isinstance(error, PolicyFailure) else self._end(error)
            self.stop()
            raise ValueError(problem if problem.startswith(flag) else f"{flag}: {problem}") from None
        except ValueError:
            self.stop()
            raise

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`.

        Raises:
            PolicyFailure: the policy raised, returned no placement, or its process ended.
            ValueError: the placement that it returned is invalid.
        """
        try:
            if self._process.poll() is not None:
                self._process, self._pipe = self._start()
                self._greet()
            self._pipe.send_bytes(pickle.dumps((counts, current, cost)))
            fields = self._answer()
        except (PolicyFailure, EOFError, OSError) as error:
            if self._greeted and isinstance(error, PolicyFailure):
                self._deaths = 0
                raise
            self._deaths += 1
            problem = str(error) if isinstance(error, PolicyFailure) else self._end(error)
            final = self._deaths >= MOST_DEATHS
            raise PolicyFailure(f"{problem} ({MOST_DEATHS} times in a row)" if final else problem, final) from None
        self._deaths = 0
        return Placement(**dict(zip(_FIELDS, fields, strict=True)))

    def stop(self) -> None:
        """End the process; a thread that waits in `plan` gets a PolicyFailure."""
        self._stopped = True
        self._process.kill()

    def _start(self) -> tuple[subprocess.Popen, Connection]:
        if self._stopped:
            raise EOFError
        ours, theirs = Pipe()
        command = [sys.executable, "-P", "-u", "-m", __name__, str(theirs.fileno()), str(os.getpid())]
        # sys.path may have changed since the program started
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": path},
        )
        theirs.close()
        weakref.finalize(self, _end, process, ours)
        if self._stopped:
            process.kill()
        self._greeted = False
        with contextlib.suppress(OSError):  # reading the answer will report it
            ours.send_bytes(pickle.dumps((self.name, self._arguments)))
        return process, ours

    def _greet(self) -> None:
        values = self._answer()
        if len(values) != 1 or values[0] not in SPLITS:
            raise OSError("it does not begin as it should")
        (self.split,) = values
        self._greeted = True

    def _answer(self) -> tuple:
        """Return the next answer.

        Raises:
            PolicyFailure: the answer reports a problem.
            EOFError, OSError: the connection ended, or the bytes received are not an answer.
        """
        received = self._pipe.recv_bytes(MOST_BYTES)
        try:
            problem, values = _Plain(io.BytesIO(received)).load()
            values = tuple(values)
        except Exception as error:
            raise OSError(f"its answer cannot be read ({described(error, 60)})") from None
        if problem is not None:
            raise PolicyFailure(cleaned(problem))
        return values

    def _end(self, error: Exception) -> str:
        """End the process if it still runs; return what happened to it."""
        if isinstance(error, EOFError | ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_SECONDS)
        status = self._process.poll()
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        if status is None:
            return f"broke its connection: {described(error)}"
        if status < 0:
            return f"ended its process: {signal.strsignal(-status)} (signal {-status})"
        return f"ended its process: exit status {status}"


class _Plain(pickle.Unpickler):
    """Reads numbers, strings and tuples; an answer can neither import nor call anything."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"asks for {module}.{name}")


def _end(process: subprocess.Popen, pipe: Connection) -> None:
    process.kill()
    process.wait()
    pipe.close()


def start_policy(name: str, **options: Any) -> Policy:
    """Return a policy by its name, or a PolicyProcess for `package.module:Class`, which may not be ready yet.

    Raises:
        ValueError: see `load_policy`.
    """
    return PolicyProcess(name, options) if ":" in name else load_policy(name, **options)


def serve(descriptor: int, parent: int) -> None:
    """Answer the questions of the rank, the process `parent`, over the socket that is open as `descriptor`."""
    _end_with(parent)
    # The rank handles the end of the job
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    pipe = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        name, options = pickle.loads(pipe.recv_bytes())
        try:
            policy = load_policy(name, **options)
            made = None, (split_of(policy),)
        except BaseException as error:  # report whatever the policy raises, SystemExit too
            pipe.send_bytes(pickle.dumps((_reported(error), ())))
            return
        pipe.send_bytes(pickle.dumps(made))
        while True:
            pipe.send_bytes(_answered(policy, pipe.recv_bytes()))


def _answered(policy: Policy, question: bytes) -> bytes:
    try:
        planned = policy.plan(*pickle.loads(question))
        if not isinstance(planned, Placement):
            return pickle.dumps((f"returned no Placement: a {cleaned(type(planned).__qualname__)}", ()))
        return pickle.dumps((None, tuple(_plain(getattr(planned, field)) for field in _FIELDS)))
    except BaseException as error:
        return pickle.dumps((f"raised {described(error)}", ()))


def _plain(value: object) -> object:
    """Return plain integers and tuples for objects that behave like them."""
    return tuple(map(_plain, value)) if isinstance(value, Iterable) else operator.index(value)  # pyright: ignore


def _reported(error: BaseException) -> str:
    # load_policy's own errors name the flag
    return cleaned(error, 400) if isinstance(error, ValueError) else f"raised {described(error)}"


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
