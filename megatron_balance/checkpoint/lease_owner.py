"""The process that holds a lease, and how another process can find out whether it still runs."""

import os
import socket
import time
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from megatron_balance.messages import cleaned


@dataclass(frozen=True)
class Owner:
    """A process that holds a lease."""

    run: str
    _: KW_ONLY
    host: str
    process: int
    since: str
    """When the process took the lease, for people."""

    job: str | None = None
    """The launcher's name of the job."""

    attempt: int = 0
    """How often the launcher has restarted the job."""

    machine: str = ""
    """The scope in which process numbers are unique: a boot of a kernel, and a PID namespace."""

    started: int = 0
    """When the process started, in the kernel's ticks since boot."""

    @classmethod
    def here(cls, run: str, job: str | None = None, attempt: int = 0) -> "Owner":
        """Return this process as an owner."""
        process = os.getpid()
        state = process_state(process)
        return cls(
            run,
            host=socket.gethostname(),
            process=process,
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            job=job,
            attempt=attempt,
            machine=_machine(),
            started=state[1] if state else 0,
        )

    def __str__(self) -> str:
        return (
            f"run {cleaned(self.run)}, process {self.process} on host {cleaned(self.host)}, since {cleaned(self.since)}"
        )

    def follows(self, other: "Owner") -> bool:
        """Return whether a launcher has started this process to replace `other`."""
        return self.job is not None and self.job == other.job and self.attempt > other.attempt

    def sees_running(self, other: "Owner") -> bool | None:
        """Return whether `other` still runs; None if this process cannot find out."""
        if not self.machine or self.machine != other.machine:
            return None
        try:
            os.kill(other.process, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            return None
        state = process_state(other.process)
        return None if state is None else state[0] not in "ZX" and state[1] == other.started


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def process_state(number: int) -> tuple[str, int] | None:
    """Return the state and the start time of a process as in /proc; None if it cannot be read."""
    try:
        # The second field, in parentheses, may contain any character
        fields = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
