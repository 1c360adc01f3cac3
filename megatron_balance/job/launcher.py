"""End this rank when its launcher ends: a torchrun agent that is killed leaves its ranks running.

Other launchers (srun, mpirun) end their processes themselves. A process that was started by hand should continue. An
agent may die within the first second, so this module imports nothing that takes time.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

EXIT_STATUS = 1
PERIOD = 0.5
"""Seconds between two checks of the launcher."""

MESSAGE_SECONDS = 3
"""Time after which this process ends even if its output blocks."""

AGENT_VARIABLES = ("TORCHELASTIC_RUN_ID", "RANK", "MASTER_PORT")
"""Variables that torchrun's agent sets for its processes; the agent's own values, if any, differ."""

PR_SET_PDEATHSIG = 1

STATE, PARENT, STARTED = 3, 4, 22
"""Numbers of fields in proc(5): the state's letter, the parent, and the start in the kernel's ticks since boot."""

SIGNAL = signal.SIGSTKFLT
"""Signal that the kernel sends when the parent ends. Nothing else uses it. `_ask_the_kernel` needs its number, 16."""


@dataclass(frozen=True)
class Launcher:
    """torchrun's agent on this node."""

    process: int

    started: str
    """Start time in the kernel's units; distinguishes the agent from a later process with the same number."""
    child: int
    """Number of the process that the agent started: this process, or a script that started this process."""


def find() -> Launcher | None:
    """Return the torchrun agent that started this process; None if another program started it."""
    if any(name not in os.environ for name in AGENT_VARIABLES):
        return None
    child = os.getpid()
    process = os.getppid()
    while process > 1 and _has_our_variables(process) and (parent := _parent(process)):
        child = process
        process = parent
    return Launcher(process, process_field(process, STARTED), child)


def follow() -> None:
    """Watch this process's torchrun agent, if any, in a thread, and end this process when the agent ends."""
    launcher = find()
    if launcher is not None:
        threading.Thread(target=_watch, args=(launcher,), daemon=True).start()
        _ask_the_kernel()


def _watch(launcher: Launcher) -> None:
    # When the agent ends, the kernel gives its child another parent
    while _parent(launcher.child) == launcher.process:
        time.sleep(PERIOD)
    # The default action of SIGALRM ends the process
    signal.alarm(MESSAGE_SECONDS)
    sentence = f"the launcher (process {launcher.process}) has ended; this rank ({os.environ['RANK']}) ends, too\n"
    with contextlib.suppress(OSError):
        os.write(2, sentence.encode())
    os._exit(EXIT_STATUS)


def _ask_the_kernel() -> None:
    """Ask the kernel to end this process 16 seconds after its parent, in case the watching thread cannot.

    The thread needs the interpreter's lock, which indexing a dataset may hold for minutes. So the signal's handler is a
    C library function. The kernel passes it the signal's number, which makes the call `alarm(16)`.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        library = ctypes.CDLL(None)
        library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        library.signal(int(SIGNAL), ctypes.cast(library.alarm, ctypes.c_void_p))
        library.prctl(PR_SET_PDEATHSIG, int(SIGNAL), 0, 0, 0)


def _has_our_variables(process: int) -> bool:
    """Return whether a process was started with the variables that the agent set for this one."""
    try:
        theirs = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return all(f"{name}={os.environ[name]}".encode() in theirs for name in AGENT_VARIABLES)


def _parent(process: int) -> int:
    """Return the number of a process's parent; 0 if there is no parent or no such process."""
    return os.getppid() if process == os.getpid() else int(process_field(process, PARENT) or 0)


def process_field(process: int, number: int) -> str:
    """Return a field of /proc/PROCESS/stat by its number, from 3; empty if it cannot be read."""
    try:
        # The second field, the program's name in parentheses, may contain any character
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[number - 3]
    except (OSError, IndexError):
        return ""
