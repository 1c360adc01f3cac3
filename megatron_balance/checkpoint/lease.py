"""One writer at a time: the lease that a run holds on its `--save` directory.

    lease.000007    the newest lease: who holds it, renewed every few seconds; or released, by whom

A lease has a number that is never used twice. Whoever wants the directory creates the file with the next number, which
the file system lets only one process do (`O_EXCL`, on NFS and Lustre as well), and then removes older ones. So of two
that find the same lease stale only one gets the next number. The holder makes sure in the same way that it still is
one: before it changes checkpoints it takes the next number itself, which fails if somebody else has it.

Nobody compares clocks of two hosts. A holder's file changes whenever it is renewed; whoever waits for it sees that, and
measures by its own monotonic clock for how long nothing has changed. On the holder's own host, the process tells.

What a lease cannot prevent: a holder that is stopped for minutes between this test and the rename that follows it.

Libraries: flufl.lock compares a host's clock with times of files; filelock's SoftFileLease measures as this does, but
tells neither which run holds it nor since when, and lets no restarted job follow itself on another host at once.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_balance.messages import cleaned

NAME = re.compile(r"lease\.(\d{6,15})")
BYTES = 2048
"""Of every lease: a renewal writes in place, and needs no room."""

RENEW_SECONDS = 2.0
POLL_SECONDS = 0.5
STALE_SECONDS = 120.0
"""Without a renewal. A rank may hold the interpreter's lock for a minute or two, while it indexes a dataset."""

RESTART_SECONDS = 10.0
"""The same for a lease of this very job, before its launcher has started it again."""


class LeaseLost(RuntimeError):
    """Another process has the directory, or the directory is gone."""


@dataclass(frozen=True)
class Owner:
    """A process that holds a lease."""

    run: str
    host: str
    process: int
    since: str
    """When it took the lease, for people."""

    job: str | None = None
    """The launcher's name of the job, and how often it has started it again."""

    attempt: int = 0
    machine: str = ""
    """Where process numbers mean the same: a boot of a kernel, and a namespace."""

    started: int = 0
    """When the process started, in the kernel's ticks since boot."""

    @classmethod
    def here(cls, run: str, job: str | None = None, attempt: int = 0) -> "Owner":
        """This process."""
        number = os.getpid()
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        state = _process_state(number)
        return cls(run, socket.gethostname(), number, now, job, attempt, _machine(), state[1] if state else 0)

    def __str__(self) -> str:
        return (
            f"run {cleaned(self.run)}, process {self.process} on host {cleaned(self.host)}, since {cleaned(self.since)}"
        )

    def follows(self, other: "Owner") -> bool:
        """Whether a launcher has started this process again in place of `other`."""
        return self.job is not None and self.job == other.job and self.attempt > other.attempt

    def sees_running(self, other: "Owner") -> bool | None:
        """Whether `other` is alive; None: from here nobody can tell."""
        if not self.machine or self.machine != other.machine:
            return None
        try:
            os.kill(other.process, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            return None
        state = _process_state(other.process)
        return None if state is None else state[0] not in "ZX" and state[1] == other.started


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _process_state(number: int) -> tuple[str, int] | None:
    """State and start of a process, by /proc; None if it does not say."""
    try:
        # The second field, in brackets, may hold anything
        fields = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class Record:
    """The content of a lease."""

    owner: Owner
    token: str
    renewals: int
    released: bool = False

    def render(self) -> bytes:
        content = json.dumps(dataclasses.asdict(self), indent=1).encode()
        assert len(content) < BYTES, content
        return content.ljust(BYTES - 1) + b"\n"

    @classmethod
    def parse(cls, raw: bytes) -> "Record | None":
        """None for anything else than `render` makes, half of it included."""
        try:
            content: dict[str, Any] = json.loads(raw)
            owner, token, renewals = content["owner"], content["token"], content["renewals"]
            for name in ("process", "attempt", "started"):
                owner[name] = max(0, int(owner[name]))
            return cls(Owner(**owner), str(token), int(renewals), content["released"] is True)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


class Lease:
    """The lease of one directory; `attempt` until it is held.

    Args:
        root: the directory.
        owner: this process.
        named: the directory as messages call it, with its flag.
        clock: seconds, monotonic.
    """

    def __init__(self, root: Path, owner: Owner, named: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.root, self.owner, self.named, self._clock = root, owner, named, clock
        self.generation: int | None = None
        """Of the lease that is held."""

        self._token, self._renewals = secrets.token_hex(8), 0
        self._seen: tuple[int, bytes, float] | None = None
        self._changing = threading.Lock()
        self._ending = threading.Event()

    def attempt(self) -> bool:
        """Take the lease if it is free; False: look again in POLL_SECONDS.

        Raises:
            ValueError: somebody else holds it; says who.
            OSError: the directory cannot be written.
        """
        generation = max(self._generations(), default=0)
        return (generation == 0 or self._is_free(generation)) and self._take(generation + 1)

    def acquire(self, say: Callable[[str], object]) -> None:
        """`attempt` until it is held, at most a little longer than STALE_SECONDS; `say` once whom it waits for."""
        told = False
        while not self.attempt():
            if not told and (whom := self.waiting_for()):
                say(whom)
                told = True
            time.sleep(POLL_SECONDS)

    def waiting_for(self) -> str:
        """Whom `attempt` waits for, for people; empty: nobody yet."""
        record = self._seen and Record.parse(self._seen[1])
        if not record:
            return ""
        limit = self._limit(record.owner)
        return f"{self.named}: waiting at most {limit:.0f} s to see whether {record.owner} still renews its lease"

    def _limit(self, other: Owner) -> float:
        return RESTART_SECONDS if self.owner.follows(other) else STALE_SECONDS

    def _is_free(self, generation: int) -> bool:
        raw = self._read(generation)
        if raw is None:
            return False
        other, limit, now = Record.parse(raw), STALE_SECONDS, self._clock()
        if other is not None:
            alive = self.owner.sees_running(other.owner)
            same = (self.owner.machine, self.owner.process) == (other.owner.machine, other.owner.process)
            if other.released or alive is False or (alive and same):
                return True
            if alive or (self._seen is not None and self._seen[:2] != (generation, raw)):
                raise ValueError(
                    f"{self.named}: another run saves there ({other.owner}); give this one another directory, or wait "
                    "until that one has ended"
                )
            limit = self._limit(other.owner)
        if self._seen is None or self._seen[:2] != (generation, raw):
            self._seen = generation, raw, now
        return now - self._seen[2] >= limit

    def _take(self, generation: int) -> bool:
        """Create the next lease and remove older ones; False: somebody else was faster."""
        if not self._create(generation):
            return False
        found = self._generations()
        if max(found) != generation:
            # Others had this number too, and it was removed since
            self._remove(generation)
            return False
        self.generation = generation
        for older in found:
            if older < generation:
                self._remove(older)
        return True

    def keep(self) -> None:
        """Renew the lease from now on, in a thread."""
        threading.Thread(target=self._renew_always, name=f"lease of {self.root}", daemon=True).start()

    def _renew_always(self) -> None:
        while not self._ending.wait(RENEW_SECONDS):
            # What keeps it from being written now may pass; `check` says whether the lease was lost meanwhile
            with contextlib.suppress(OSError):
                if not self.renew():
                    return

    def renew(self) -> bool:
        """Show that the holder is alive; False: there is no such lease any more."""
        with self._changing:
            self._renewals += 1
            return self._write()

    def name(self, run: str) -> None:
        """Call the run otherwise from now on."""
        self.owner = dataclasses.replace(self.owner, run=run)

    def check(self) -> None:
        """Make sure that the directory is still this process's, before it is changed.

        Raises:
            LeaseLost: it is not; says whose it is.
            OSError: the directory cannot be written.
        """
        with self._changing:
            held = self.generation
            assert held is not None
            try:
                if not self._is_mine(held) or not self._take(held + 1):
                    raise LeaseLost(self._lost())
            except FileNotFoundError:
                raise LeaseLost(self._lost()) from None

    def _lost(self) -> str:
        newest = max(self._generations(), default=0)
        raw = self._read(newest)
        other = Record.parse(raw) if raw else None
        if other is None or other.token == self._token:
            return (
                f"{self.named}: this run's lease is gone from there: the directory was removed or replaced, or another "
                "file system is mounted"
            )
        return (
            f"{self.named}: another run saves there ({other.owner}); this one had not renewed its lease for so long "
            "that it was taken for dead"
        )

    def release(self) -> None:
        """Let others have the directory at once, unless it was lost."""
        self._ending.set()
        with self._changing, contextlib.suppress(OSError):
            if self.generation is not None:
                self._write(released=True)
        self.generation = None

    def _write(self, released: bool = False) -> bool:
        """Write this process's lease anew; False: it has none any more."""
        if self.generation is None:
            return False
        try:
            with open(self._path(self.generation), "r+b", buffering=0) as file:
                # The same number may be another's, if the directory was removed
                found = Record.parse(file.read(BYTES))
                if found is None or found.token != self._token:
                    return False
                file.seek(0)
                file.write(Record(self.owner, self._token, self._renewals, released).render())
        except FileNotFoundError:
            return False
        return True

    def _is_mine(self, generation: int) -> bool:
        record = Record.parse(self._read(generation) or b"")
        return record is not None and record.token == self._token

    def _path(self, generation: int) -> Path:
        return self.root / f"lease.{generation:06d}"

    def _generations(self) -> list[int]:
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        return [int(match[1]) for match in map(NAME.fullmatch, names) if match]

    def _read(self, generation: int) -> bytes | None:
        try:
            with open(self._path(generation), "rb") as file:
                return file.read(BYTES)
        except FileNotFoundError:
            return None

    def _create(self, generation: int) -> bool:
        path, created = self._path(generation), False
        try:
            with open(path, "xb") as file:
                created = True
                file.write(Record(self.owner, self._token, self._renewals).render())
        except FileExistsError:
            return False
        except OSError as error:
            if created:
                self._remove(generation)
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and generation > 1:
                return self._inherit(generation)
            raise OSError(error.errno, error.strerror, str(path)) from error
        return True

    def _inherit(self, generation: int) -> bool:
        """Create a lease out of the one before, which is given up: a full disk can only be cleaned up by a holder."""
        try:
            os.link(self._path(generation - 1), self._path(generation))
        except FileExistsError:
            return False
        with open(self._path(generation), "r+b", buffering=0) as file:
            file.write(Record(self.owner, self._token, self._renewals).render())
        return True

    def _remove(self, generation: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(generation))
