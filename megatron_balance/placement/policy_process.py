"""A policy from elsewhere (`--balance-policy package.module:Class`), in a process of its own.

Whatever it does there (leave the interpreter, crash, loop, hold the interpreter's lock, take all memory), the rank goes
on. The process is started from a clean command line: it has none of the rank's threads, sockets and device memory, and
imports neither the entry point nor torch. It ends with the rank.

The rank sends questions as pickles, and reads answers as pickles of numbers, texts and tuples of them only.
"""

import contextlib
import dataclasses
import io
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

from megatron_balance.messages import cleaned, described
from megatron_balance.placement.cost_model import CostModel
from megatron_balance.placement.manager import PolicyFailure
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.policies import load_policy
from megatron_balance.placement.policies.interface import Policy
from megatron_balance.placement.splits import SPLITS

SERVER = "megatron_balance.placement.policy_server"

MOST_BYTES = 2**24
"""Of an answer; a placement of 256 experts on 64 ranks has 5,000."""

MOST_DEATHS = 3
"""A process that ends so many times in a row is not started again."""

_FIELDS = [field.name for field in dataclasses.fields(Placement)]

_LAST_SECONDS = 5.0
"""For a process that has closed its pipe to end."""


class PolicyProcess(Policy):
    """A Policy whose plans are made elsewhere; any thread may wait in `plan` while another one calls `stop`."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        """Start the process; it gets ready while the caller does something else."""
        self.name, self._arguments = name, dict(options)
        self._deaths, self._stopped, self._greeted = 0, False, False
        self._process, self._pipe = self._start()

    def ready(self, seconds: float) -> None:
        """Wait until the policy has been made.

        Raises:
            ValueError: it cannot be made, has no `plan` or an unknown `split`, or was not made in time.
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

    def plan(self, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """As in Policy.

        Raises:
            PolicyFailure: the policy raised, returned no placement, or its process ended.
            ValueError: what it returned is no valid placement.
        """
        try:
            if self._process.poll() is not None:
                self._process, self._pipe = self._start()
                self._greet()
            self._pipe.send_bytes(pickle.dumps((counts_DE, current, cost)))
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
        """End the process; whoever waits in `plan` gets a PolicyFailure."""
        self._stopped = True
        self._process.kill()

    def _start(self) -> tuple[subprocess.Popen, Connection]:
        if self._stopped:
            raise EOFError
        ours, theirs = Pipe()
        command = [sys.executable, "-P", "-u", "-m", SERVER, str(theirs.fileno()), str(os.getpid())]
        # The path of a program may have grown since its start
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
        with contextlib.suppress(OSError):  # who waits for the answer learns of it
            ours.send_bytes(pickle.dumps((self.name, self._arguments)))
        return process, ours

    def _greet(self) -> None:
        values = self._answer()
        if len(values) != 1 or values[0] not in SPLITS:
            raise OSError("it does not begin as it should")
        (self.split,) = values
        self._greeted = True

    def _answer(self) -> tuple:
        """The next answer.

        Raises:
            PolicyFailure: it tells of a problem.
            EOFError, OSError: there is none, or what came is no answer.
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
        """End what is left of the process; returns what happened to it."""
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
    """Reads numbers, texts and tuples: nothing in an answer is imported or called."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"asks for {module}.{name}")


def _end(process: subprocess.Popen, pipe: Connection) -> None:
    process.kill()
    process.wait()
    pipe.close()


def start_policy(name: str, **options: Any) -> Policy:
    """A policy by its name here, or by `package.module:Class`, then a PolicyProcess, which may not be ready yet.

    Raises:
        ValueError: as `load_policy`.
    """
    return PolicyProcess(name, options) if ":" in name else load_policy(name, **options)
