"""Only one run at a time may write to a `--save` directory: the run that holds the directory's lease.

    lease.000007    the newest lease: names its holder, which renews it every few seconds; or marked as released

No lease number is used twice. To take the directory, a process creates the file with the next number and then removes
older ones. The file system lets only one process create a file (`O_EXCL`, also on NFS and Lustre), so if two processes
find the same lease stale, only one gets the next number. The holder protects itself in the same way: before it changes
checkpoints it takes the next number, which fails if another process already has it.

Clocks of different hosts are never compared. Each renewal changes the holder's file. A waiting process watches the file
and measures on its own monotonic clock for how long it has not changed. On the holder's host, the waiting process
checks instead whether the holder still runs.

A lease cannot protect against a holder that is suspended for minutes between its check and the rename that follows.
"""

import contextlib
import dataclasses
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import psutil

from megatron_balance.checkpoint.manifest import utc_now
from megatron_balance.files.writing import writing
from megatron_balance.job.launcher import STARTED, STATE, process_field
from megatron_balance.messages import cleaned

NAME = re.compile(r"lease\.(\d{6,15})")
BYTES = 2048
"""Size of every lease file. It is fixed, so that a renewal overwrites in place and needs no free space."""

RENEW_SECONDS = 2.0
POLL_SECONDS = 0.5
STALE_SECONDS = 120.0
"""Time without a renewal after which a lease is stale. A rank may hold the interpreter's lock for a minute or two, for
example while it indexes a dataset."""

RESTART_SECONDS = 10.0
"""The same limit for a lease that an earlier attempt of this job holds."""


class LeaseLost(RuntimeError):
    """Another process holds the directory, or the directory is gone."""


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
        own = cls(run, host=socket.gethostname(), process=os.getpid(), since=utc_now(), job=job, attempt=attempt)
        with contextlib.suppress(OSError, ValueError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            machine = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
            return dataclasses.replace(own, machine=machine, started=int(process_field(own.process, STARTED)))
        return own

    def __str__(self) -> str:
        run, host, since = map(cleaned, (self.run, self.host, self.since))
        return f"run {run}, process {self.process} on host {host}, since {since}"

    def sees_running(self, other: "Owner") -> bool | None:
        """Return whether `other` still runs; None if this process cannot find out."""
        if not self.machine or self.machine != other.machine:
            return None
        state = process_field(other.process, STATE)
        if not state:
            return None if psutil.pid_exists(other.process) else False
        return state not in "ZX" and process_field(other.process, STARTED) == str(other.started)


@dataclass(frozen=True)
class LeaseRecord:
    """The content of a lease's file."""

    owner: Owner
    token: str
    renewals: int
    released: bool = False

    @classmethod
    def parse(cls, raw: bytes) -> "LeaseRecord | None":
        """Return the record, or None if `raw` is not a complete one."""
        try:
            content = json.loads(raw)
            return cls(Owner(**content.pop("owner")), **content)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


class Lease:
    """The lease of one directory; call `attempt` until it returns True. `owner`: this process. `named`: the directory's
    name in messages, with its flag. `clock`: a monotonic clock, in seconds."""

    def __init__(self, root: Path, owner: Owner, named: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.owner = owner
        self.named = named
        self._clock = clock
        self.generation: int | None = None
        """Number of the lease that this process holds."""

        self._token = secrets.token_hex(8)
        self._renewals = 0
        self._seen: tuple[int, bytes, float] | None = None
        self._changing = threading.Lock()
        self._ending = threading.Event()

    def attempt(self) -> bool:
        """Take the lease if it is free, and return whether it was taken; if not, try again after POLL_SECONDS. Raise
        ValueError if another process holds it, and OSError if the directory cannot be written."""
        generation = max(self._generations(), default=0)
        return (generation == 0 or self._is_free(generation)) and self._take(generation + 1)

    def acquire(self, log: Callable[[str], object], attempt: Callable[[], bool] | None = None) -> None:
        """Call `attempt` until it succeeds, for little more than STALE_SECONDS. Log once which holder it waits for."""
        holder = None
        while not (attempt or self.attempt)():
            if holder is None and self._seen and (holder := LeaseRecord.parse(self._seen[1])):
                limit = self._limit(holder)
                log(f"{self.named}: waiting up to {limit:.0f} s to see whether {holder.owner} still renews its lease")
            time.sleep(POLL_SECONDS)

    def _limit(self, other: LeaseRecord | None) -> float:
        """Return after how long another's lease is stale: earlier if a launcher started this process to replace it."""
        own = self.owner
        replaces = other is not None and other.owner.job == own.job is not None and other.owner.attempt < own.attempt
        return RESTART_SECONDS if replaces else STALE_SECONDS

    def _is_free(self, generation: int) -> bool:
        raw = self._read(generation)
        if raw is None:
            return False
        other = LeaseRecord.parse(raw)
        now = self._clock()
        has_changed = self._seen is not None and self._seen[:2] != (generation, raw)
        if other is not None:
            alive = self.owner.sees_running(other.owner)
            same = (self.owner.machine, self.owner.process) == (other.owner.machine, other.owner.process)
            if other.released or alive is False or (alive and same):
                return True
            if alive or has_changed:
                raise ValueError(
                    f"{self.named}: another run saves there ({other.owner}); choose another directory, or wait until "
                    "that run has ended"
                )
        if self._seen is None or has_changed:
            self._seen = generation, raw, now
        return now - self._seen[2] >= self._limit(other)

    def _take(self, generation: int) -> bool:
        """Create the next lease and remove older ones. Return False if another process was faster."""
        if not self._create(generation):
            return False
        found = self._generations()
        if max(found) != generation:
            # Another process took this number earlier, and its lease has been removed since
            self._remove(generation)
            return False
        self.generation = generation
        for older in found:
            if older < generation:
                self._remove(older)
        return True

    def keep(self) -> None:
        """Start a thread that renews the lease."""

        def renew() -> None:
            while not self._ending.wait(RENEW_SECONDS):
                # The cause of a failed write may be temporary; `check` finds out whether the lease was lost
                with contextlib.suppress(OSError):
                    if not self.renew():
                        return

        threading.Thread(target=renew, name=f"lease of {self.root}", daemon=True).start()

    def renew(self, released: bool = False) -> bool:
        """Renew the lease, or mark it as released. Return False if this process no longer holds it."""
        with self._changing:
            self._renewals += 1
            if self.generation is None:
                return False
            path = self._path(self.generation)
            with contextlib.suppress(FileNotFoundError), open(path, "r+b", buffering=0) as file:
                # After the directory was removed, another process may hold the same number
                if self._is_mine(file.read(BYTES)):
                    file.seek(0)
                    file.write(self._rendered(released))
                    return True
            return False

    def check(self) -> None:
        """Check that this process still holds the directory, before every change to the checkpoints. Raise LeaseLost,
        which names the holder, if it does not, and OSError if the directory cannot be written."""
        with self._changing:
            held = self.generation
            assert held is not None
            # The directory may be gone
            with contextlib.suppress(FileNotFoundError):
                if self._is_mine(self._read(held)) and self._take(held + 1):
                    return
            other = LeaseRecord.parse(self._read(max(self._generations(), default=0)) or b"")
            if other is None or other.token == self._token:
                raise LeaseLost(
                    f"{self.named}: this run's lease is gone from there: the directory was removed or replaced, or "
                    "another file system is mounted"
                )
            raise LeaseLost(
                f"{self.named}: another run saves there ({other.owner}); it took the lease because this run had not "
                "renewed it for too long"
            )

    def release(self) -> None:
        """Release the lease, unless it was lost, so that others can take the directory at once."""
        self._ending.set()
        with contextlib.suppress(OSError):
            self.renew(released=True)
        self.generation = None

    def _rendered(self, released: bool = False) -> bytes:
        record = LeaseRecord(self.owner, self._token, self._renewals, released)
        return json.dumps(dataclasses.asdict(record), indent=1).encode().ljust(BYTES - 1) + b"\n"

    def _is_mine(self, raw: bytes | None) -> bool:
        found = LeaseRecord.parse(raw or b"")
        return found is not None and found.token == self._token

    def _path(self, generation: int) -> Path:
        return self.root / f"lease.{generation:06d}"

    def _generations(self) -> list[int]:
        names = os.listdir(self.root) if self.root.is_dir() else ()
        return [int(match[1]) for match in map(NAME.fullmatch, names) if match]

    def _read(self, generation: int) -> bytes | None:
        try:
            return self._path(generation).read_bytes()
        except FileNotFoundError:
            return None

    def _create(self, generation: int) -> bool:
        path = self._path(generation)
        try:
            with writing(path), open(path, "xb") as file:
                file.write(self._rendered())
        except FileExistsError:
            return False
        except OSError:
            # The disk may be full
            self._remove(generation)
            raise
        return True

    def _remove(self, generation: int) -> None:
        self._path(generation).unlink(missing_ok=True)
