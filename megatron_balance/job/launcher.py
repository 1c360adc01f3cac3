"""A rank ends when its launcher does: torchrun's agent, if it is killed, leaves behind ranks that nobody ends.

Other launchers (srun, mpirun) end their processes themselves, and what was started by hand is meant to go on.

Agents die in the first second, too: nothing is imported here that takes time.
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
"""Seconds between two looks at the launcher."""

MESSAGE_SECONDS = 3
"""After which this process ends though what it prints into takes nothing more."""

AGENT_VARIABLES = ("TORCHELASTIC_RUN_ID", "RANK", "MASTER_PORT")
"""Variables that torchrun's agent sets for what it starts, and which no agent has with the same values."""

PR_SET_PDEATHSIG = 1

SIGNAL = getattr(signal, "SIGSTKFLT", None)
"""What the kernel sends when the parent ends: a signal that nothing else uses. Its number, 16, are seconds."""


@dataclass(frozen=True)
class Launcher:
    """torchrun's agent on this node."""

    process: int

    started: str
    """Its start, as the kernel has it: tells it from a later process with its number."""

    child: int
    """What it has started: this process, or a script around it."""

    def has_ended(self) -> bool:
        """Whether it is gone, perhaps but for its exit status: the kernel then gives its children another parent."""
        return _parent(self.child) != self.process


def find() -> Launcher | None:
    """torchrun's agent above this process; None: it was started by something else."""
    if any(name not in os.environ for name in AGENT_VARIABLES):
        return None
    child, process = os.getpid(), os.getppid()
    while process > 1 and _has_our_variables(process) and (parent := _parent(process)):
        child, process = process, parent
    return Launcher(process, _field(process, 22), child)


def follow() -> None:
    """From now on, end this process once its launcher, if it is torchrun's agent, has ended."""
    launcher = find()
    if launcher is not None:
        threading.Thread(target=_watch, args=(launcher,), daemon=True).start()
        _ask_the_kernel()


def _watch(launcher: Launcher) -> None:
    while not launcher.has_ended():
        time.sleep(PERIOD)
    # The default action of SIGALRM is to end the process
    signal.alarm(MESSAGE_SECONDS)
    sentence = f"the launcher (process {launcher.process}) has ended; this rank ({os.environ['RANK']}) ends, too\n"
    with contextlib.suppress(OSError):
        os.write(2, sentence.encode())
    os._exit(EXIT_STATUS)


def _ask_the_kernel() -> None:
    """Have the kernel end this process, too, some seconds after its parent.

    The thread above has to wait for the interpreter's lock, which indexing a dataset may hold for minutes. So the
    signal's handler is a function of the C library: `alarm(16)`, because a handler is called with the signal's number.
    The thread has these 16 seconds to say why this process ends.
    """
    if SIGNAL is None:  # another system than Linux
        return
    with contextlib.suppress(AttributeError, OSError):  # another C library
        library = ctypes.CDLL(None)
        library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        library.signal(int(SIGNAL), ctypes.cast(library.alarm, ctypes.c_void_p))
        library.prctl(PR_SET_PDEATHSIG, int(SIGNAL), 0, 0, 0)


def _has_our_variables(process: int) -> bool:
    """Whether a process was started with the variables that the agent set for this one."""
    try:
        theirs = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return all(f"{name}={os.environ[name]}".encode() in theirs for name in AGENT_VARIABLES)


def _parent(process: int) -> int:
    """The number of its parent; 0: there is none, or no such process."""
    return os.getppid() if process == os.getpid() else int(_field(process, 4) or 0)


def _field(process: int, number: int) -> str:
    """A field of /proc/PROCESS/stat, numbered as proc(5) does from the third on; empty: no such process."""
    try:
        # The second one, the name in parentheses, may hold anything
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[number - 3]
    except (OSError, IndexError):
        return ""
