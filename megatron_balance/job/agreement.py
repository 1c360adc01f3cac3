"""Compare the settings of all ranks through the job's key-value store, before anything is built.

Each rank joins under its number, compares its facts with those of the first rank to arrive, writes those that differ,
and counts itself. The last rank decides, and all ranks wait for the decision. These are four requests per rank, so the
comparison scales to thousands of ranks. A rank that finds any other problem (a duplicate rank, another number of
processes, a missing rank, its own mistake) decides at once.
"""

import contextlib
import datetime
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_balance.messages import cleaned

Facts = Mapping[str, str]
"""Values that must be equal on all ranks, by the name that a user knows; the most informative first."""

Differing = Mapping[int, Mapping[str, str | None]]
"""Facts that differ from the reference, by rank; None: only the reference has the fact."""

AGREED = "agreed"

CONSEQUENCE = "setting "
"""Prefix of facts that follow from other facts. They are reported only if nothing else differs."""

MAX_LISTED = 8
"""Maximum number of facts, values of a fact, ranges of ranks, or hosts that a sentence lists."""

MAX_CHARACTERS = 60
"""Maximum number of characters of a value in a message."""

NOTICE_SECONDS = 20.0
"""Time after which rank 0 says which ranks it waits for."""

FAREWELL_SECONDS = 3.0
"""Time for other ranks to read the decision before the rank that holds the store ends."""

DECLINE_SECONDS = 10.0
"""Time to reach the store for a rank that cannot start, or that finds out which ranks are missing. If a rank that
cannot start holds the store, it also waits this long for others to read its decision: they may still import modules."""


@dataclass(frozen=True)
class Member:
    """A rank that joins the job."""

    rank: int
    world_size: int
    holds_store: bool = False


def agree(store: dist.Store, me: Member, facts: Facts, *, timeout_minutes: float, where: str) -> None:
    """Return once all ranks have joined with the same facts. Every rank calls it.

    Args:
        timeout_minutes: time after which a rank that has not joined counts as missing.
        where: the store's address, for messages.

    Raises:
        ValueError: ranks differ, are missing or exist twice, or the store is gone. All present ranks raise the same.
    """
    deadline = time.monotonic() + timeout_minutes * 60
    try:
        try:
            outcome = _compare(store, me, facts, where, deadline)
        except dist.DistStoreError:
            store.set_timeout(datetime.timedelta(seconds=DECLINE_SECONDS))
            limit = f"within {timeout_minutes:g} minutes (--distributed-timeout-minutes)"
            outcome = _decide(store, _missing(store, me.world_size, where, limit))
        if outcome != AGREED:
            _wait_until_read(store, me, FAREWELL_SECONDS)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise ValueError(
            f"{where} (MASTER_ADDR, MASTER_PORT): the key-value store is gone ({cleaned(error, 80)}); look at the "
            "output of rank 0 and of the launcher"
        ) from error
    if outcome != AGREED:
        raise ValueError(outcome)


def decline(store: dist.Store, me: Member, problem: str) -> None:
    """Report, instead of calling `agree`, that this rank cannot start; `agree` raises `problem` on all other ranks."""
    store.set_timeout(datetime.timedelta(seconds=DECLINE_SECONDS))
    _decide(store, f"rank {me.rank} on {cleaned(socket.gethostname(), 80)} cannot start: {problem}")
    _wait_until_read(store, me, DECLINE_SECONDS)


def _compare(store: dist.Store, me: Member, facts: Facts, where: str, deadline: float) -> str:
    """Join, compare and return the decision; raise DistStoreError if there is no decision in time."""
    started = datetime.datetime.now().strftime("%H:%M:%S.%f")
    name = f"process {os.getpid()} of {started} on {cleaned(socket.gethostname(), 80)}"
    first = store.compare_set(f"member/{me.rank}", "", name).decode()
    if first != name:
        return _decide(
            store,
            f"RANK={me.rank}: two processes have this rank, {first} and {name}; end the one that does not belong to "
            "the job, or give each process its own rank, as torchrun does",
        )
    own = json.dumps({"rank": me.rank, "world_size": me.world_size, "facts": dict(facts)})
    reference = json.loads(store.compare_set("reference", "", own))
    if reference["world_size"] != me.world_size:
        return _decide(
            store,
            f"WORLD_SIZE={me.world_size} on rank {me.rank}, but {reference['world_size']} on rank {reference['rank']}; "
            "start all processes of a job with the same launcher",
        )
    if differing := _differing_facts(facts, reference["facts"]):
        store.set(f"differs/{me.rank}", json.dumps(differing))
        store.append("differing", f"{me.rank} ")  # pyright: ignore[reportAttributeAccessIssue]
    if store.add("compared", 1) == me.world_size:
        return _decide(store, _conclusion(store, reference["facts"], me.world_size))
    if me.rank == 0 and time.monotonic() + NOTICE_SECONDS < deadline:
        store.set_timeout(datetime.timedelta(seconds=NOTICE_SECONDS))
        with contextlib.suppress(dist.DistStoreError):
            return store.get("outcome").decode()
        missing = _missing(store, me.world_size, where, f"after {NOTICE_SECONDS:g} seconds")
        print(f"waiting for other ranks: {missing}", file=sys.stderr, flush=True)
    store.set_timeout(datetime.timedelta(seconds=max(0.1, deadline - time.monotonic())))
    return store.get("outcome").decode()


def _decide(store: dist.Store, outcome: str) -> str:
    """Make `outcome` the decision unless one exists; return the decision."""
    return store.compare_set("outcome", "", outcome).decode()


def _conclusion(store: dist.Store, reference: Facts, world_size: int) -> str:
    if not store.check(["differing"]):
        return AGREED
    ranks = [int(rank) for rank in store.get("differing").split()]
    others = {rank: json.loads(store.get(f"differs/{rank}")) for rank in ranks}
    return difference(reference, others, world_size)


def _missing(store: dist.Store, world_size: int, where: str, limit: str) -> str:
    members = {rank: key for rank in range(world_size) if store.check([key := f"member/{rank}"])}
    missing = [rank for rank in range(world_size) if rank not in members]
    if not missing:
        return (
            f"all ranks have joined at {where}, but not all have compared their settings {limit}; start the job again"
        )
    hosts = dict.fromkeys(store.get(key).decode().rpartition(" on ")[2] for key in members.values())
    return (
        f"{in_words(missing)} of {world_size} {'have' if len(missing) > 1 else 'has'} not joined at {where} {limit}; "
        f"{in_words([*members])} came from {listed([*hosts])}: look at the output of the missing ones, and check that "
        "all were started with this address"
    )


def _wait_until_read(store: dist.Store, me: Member, seconds: float) -> None:
    readers = store.add("readers", 1)
    deadline = time.monotonic() + seconds
    while me.holds_store and readers < me.world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        readers = store.add("readers", 0)


def _differing_facts(facts: Facts, reference: Facts) -> dict[str, str | None]:
    """Return the facts that differ from `reference`; None: only `reference` has the fact."""
    return {name: facts.get(name) for name in {**facts, **reference} if facts.get(name) != reference.get(name)}


def difference(reference: Facts, others: Differing, world_size: int) -> str:
    """Return a sentence with the facts that differ between ranks, and their values by rank.

    Args:
        reference: facts of one rank.
        others: differing facts of at least one rank; for all others, `reference` holds.
    """
    differing = {name for own in others.values() for name in own}
    # Most informative first, like the reference
    names = [*(name for name in reference if name in differing), *sorted(differing - reference.keys())]
    causes = [name for name in names if not name.startswith(CONSEQUENCE)] or names
    told = listed([_values(name, reference.get(name), others, world_size) for name in causes], "; ")
    return (
        f"the ranks of this job differ: {told}; start all with the same flags, packages, program and files "
        "(docs/running.md says what may differ)"
    )


def _values(name: str, reference: str | None, others: Differing, world_size: int) -> str:
    """Return a text such as `--seed is 1 on ranks 0-2, but 2 on rank 3`, with the most frequent value first."""
    ranks_of: dict[str | None, list[int]] = {}
    for rank in range(world_size):
        ranks_of.setdefault(others.get(rank, {}).get(name, reference), []).append(rank)
    ordered = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1][0]))
    told = [
        f"{'absent' if value is None else cleaned(value, MAX_CHARACTERS) or 'empty'} on {in_words(ranks)}"
        for value, ranks in ordered
    ]
    return f"{cleaned(name, 2 * MAX_CHARACTERS)} is {told[0]}, but {listed(told[1:])}"


def listed(parts: Sequence[str], separator: str = ", ") -> str:
    """Return at most MAX_LISTED parts as one text, and how many more there are."""
    more = [f"and {len(parts) - MAX_LISTED} more"] if len(parts) > MAX_LISTED else []
    return separator.join([*parts[:MAX_LISTED], *more])


def in_words(ranks: Sequence[int]) -> str:
    """Return ascending ranks as words, such as `rank 3`, `ranks 3, 7-15` or `ranks 0, 8 ... 56`."""
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    if len(ranks) > 4 and len(steps) == 1 and steps != {1}:
        return f"ranks {ranks[0]}, {ranks[1]} ... {ranks[-1]}"
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(['-'.join(map(str, bounds)) for bounds in ranges])}"
