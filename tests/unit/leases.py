"""Owners, clocks and leases for tests of leases."""

import os
from pathlib import Path

from megatron_balance.checkpoint.lease import Lease, Owner


class Clock:
    """A clock that tests advance explicitly."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def elsewhere(name: str, job: str | None = None, attempt: int = 0) -> Owner:
    """Return an owner that runs on its own host."""
    return Owner(
        f"run-{name}",
        host=f"host-{name}",
        process=77,
        since="some time ago",
        job=job,
        attempt=attempt,
        machine=f"machine {name}",
        started=1,
    )


def wanted(root: Path, owner: Owner, clock: Clock | None = None) -> Lease:
    return Lease(root, owner, f"--save {root}", clock or Clock())


def held(root: Path, name: str = "a") -> Lease:
    holder = wanted(root, elsewhere(name))
    assert holder.attempt()
    return holder


def left(root: Path) -> list[str]:
    return sorted(os.listdir(root))
