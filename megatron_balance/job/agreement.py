"""All ranks of a job compare what they have in common before anything is built, through the job's key-value store.

    every rank     joins, under its number, and gets the digest of rank 0's facts
    if it differs  it gets rank 0's facts, and leaves its own where they are others
    every rank     counts itself; the last one decides, and all await the decision

A rank makes four requests, so that thousands of ranks may do it. Whoever finds something else wrong (a rank that is
there twice, another number of processes, a rank that does not come, a mistake of its own) decides instead.
"""

import datetime
import hashlib
import itertools
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron_balance.messages import cleaned

Facts = Mapping[str, str]
"""What a rank has in common with all others, by the name under which a user knows it, most telling first."""

Others = Mapping[int, Mapping[str, str | None]]
"""By rank: facts that are not rank 0's; None: a fact that only rank 0 has."""

AGREED = "agreed"

DECLINED = "declined"
"""Published in place of the digest of rank 0's facts if rank 0 cannot start."""

CONSEQUENCE = "setting "
"""Begins the names of facts that follow from others: they are told if nothing else differs."""

MAX_NAMES, MAX_VALUES, MAX_RUNS, MAX_HOSTS = 8, 4, 8, 8
"""Facts, values of a fact, runs of ranks, and hosts that a sentence lists."""

MAX_CHARACTERS = 60
"""Of a value."""

MISSING_SECONDS = 30.0
"""Time to find out who is missing."""

FAREWELL_SECONDS = 3.0
"""Time for others to hear of the decision before the store ends with the rank that holds it."""

DECLINE_SECONDS = 10.0
"""How long a rank that cannot start looks for the store. If it holds the store itself, it also waits this long for the
others to read its decision, because they may still be importing."""


@dataclass(frozen=True)
class Member:
    """A rank that joins."""

    rank: int
    world_size: int
    holds_store: bool = False


def agree(store: dist.Store, me: Member, facts: Facts, timeout_minutes: float, where: str) -> None:
    """Return once all ranks have joined with the same facts; every rank calls it.

    Args:
        store: nobody but this job's ranks uses it.
        timeout_minutes: after which ranks that have not come are missing.
        where: the store's address, for messages.

    Raises:
        ValueError: ranks differ, are missing or there twice, or the store is gone; all that are there raise the same.
    """
    deadline = time.monotonic() + timeout_minutes * 60
    try:
        try:
            outcome = _compare(store, me, facts, deadline)
        except dist.DistStoreError:
            store.set_timeout(datetime.timedelta(seconds=MISSING_SECONDS))
            outcome = _decide(store, _missing(store, me.world_size, timeout_minutes, where))
        if outcome != AGREED:
            _wait_until_read(store, me, FAREWELL_SECONDS)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise ValueError(
            f"{where} (MASTER_ADDR, MASTER_PORT): the key-value store is gone ({cleaned(error, 80)}); look at what "
            "rank 0 and the launcher say"
        ) from error
    if outcome != AGREED:
        raise ValueError(outcome)


def decline(store: dist.Store, me: Member, problem: str) -> None:
    """Called instead of `agree` by a rank that cannot start: `agree` raises its problem on all other ranks.

    Args:
        problem: the reason, in one line.

    Raises:
        torch.distributed.DistError: the store is gone.
    """
    store.set_timeout(datetime.timedelta(seconds=DECLINE_SECONDS))
    _decide(store, f"rank {me.rank} on {cleaned(socket.gethostname(), 80)} cannot start: {problem}")
    if me.rank == 0:
        store.set("digest", DECLINED)
    _wait_until_read(store, me, DECLINE_SECONDS)


def _compare(store: dist.Store, me: Member, facts: Facts, deadline: float) -> str:
    """Join, compare, await the decision. DistStoreError: not within the time."""
    name = _process_name()
    first = store.compare_set(f"member/{me.rank}", "", name).decode()
    if first != name:
        return _decide(store, _twice(me.rank, first, name))
    if me.rank == 0:
        store.set("facts", json.dumps(dict(facts)))
        store.set("digest", f"{me.world_size} {_digest(facts)}")
    reference = _await(store, "digest", deadline)
    if reference == DECLINED:
        return _await(store, "outcome", deadline)
    world_size, digest = reference.split()
    if int(world_size) != me.world_size:
        return _decide(
            store,
            f"WORLD_SIZE={me.world_size} on rank {me.rank}, but {world_size} on rank 0; start all processes of a "
            "job by the same launcher",
        )
    if digest != _digest(facts):
        theirs = json.loads(_await(store, "facts", deadline))
        store.set(f"differs/{me.rank}", json.dumps(_differing_facts(facts, theirs)))
        store.append("differing", f"{me.rank} ")
    if store.add("compared", 1) == me.world_size:
        return _decide(store, _conclusion(store, me.world_size, deadline))
    return _await(store, "outcome", deadline)


def _await(store: dist.Store, key: str, deadline: float) -> str:
    store.set_timeout(datetime.timedelta(seconds=max(0.1, deadline - time.monotonic())))
    return store.get(key).decode()


def _decide(store: dist.Store, outcome: str) -> str:
    """The decision: this one, unless there is one."""
    return store.compare_set("outcome", "", outcome).decode()


def _conclusion(store: dist.Store, world_size: int, deadline: float) -> str:
    if not store.check(["differing"]):
        return AGREED
    ranks = [int(rank) for rank in _await(store, "differing", deadline).split()]
    others = {rank: json.loads(_await(store, f"differs/{rank}", deadline)) for rank in ranks}
    return difference(json.loads(_await(store, "facts", deadline)), others, world_size)


def _missing(store: dist.Store, world_size: int, timeout_minutes: float, where: str) -> str:
    members = {rank: key for rank in range(world_size) if store.check([key := f"member/{rank}"])}
    missing = [rank for rank in range(world_size) if rank not in members]
    limit = f"within {timeout_minutes:g} minutes (--distributed-timeout-minutes)"
    if not missing:
        return (
            f"all ranks have joined at {where}, but not all have compared their settings {limit}; start the job again"
        )
    hosts = dict.fromkeys(store.get(key).decode().rpartition(" on ")[2] for key in members.values())
    named = [*itertools.islice(hosts, MAX_HOSTS), *(["..."] if len(hosts) > MAX_HOSTS else [])]
    return (
        f"{in_words(missing)} of {world_size} {'have' if len(missing) > 1 else 'has'} not joined at {where} {limit}; "
        f"{in_words([*members])} came from {', '.join(named)}: look at what the missing ones say, and whether all were "
        "started with this address"
    )


def _twice(rank: int, first: str, second: str) -> str:
    return (
        f"RANK={rank}: two processes have this rank, {first} and {second}; end the one that does not belong to the "
        "job, or give each process a rank of its own, as torchrun does"
    )


def _wait_until_read(store: dist.Store, me: Member, seconds: float) -> None:
    heard, deadline = store.add("heard", 1), time.monotonic() + seconds
    while me.holds_store and heard < me.world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        heard = store.add("heard", 0)


def _process_name() -> str:
    """This process, for people; no other one is called so."""
    started = datetime.datetime.now().strftime("%H:%M:%S.%f")
    return f"process {os.getpid()} of {started} on {cleaned(socket.gethostname(), 80)}"


def _digest(facts: Facts) -> str:
    return hashlib.blake2b(json.dumps(dict(facts), sort_keys=True).encode(), digest_size=16).hexdigest()


def _differing_facts(facts: Facts, reference: Facts) -> dict[str, str | None]:
    """Facts that are not the reference's; None: the reference has it alone."""
    return {name: facts.get(name) for name in {**facts, **reference} if facts.get(name) != reference.get(name)}


def difference(reference: Facts, others: Others, world_size: int) -> str:
    """In one sentence: which facts are not the same on all ranks, and what they are where.

    Args:
        reference: rank 0's facts.
        others: at least one rank with at least one fact that is not rank 0's; ranks that are not in it have the
            reference.
    """
    names = list(dict.fromkeys([*reference, *(name for own in others.values() for name in own)]))
    names = [name for name in names if any(name in own for own in others.values())]
    causes = [name for name in names if not name.startswith(CONSEQUENCE)] or names
    told = [_values(name, reference.get(name), others, world_size) for name in causes[:MAX_NAMES]]
    more = [f"and {len(causes) - MAX_NAMES} more"] if len(causes) > MAX_NAMES else []
    return (
        f"the ranks of this job differ: {'; '.join([*told, *more])}; start all with the same flags, packages, program "
        "and files (docs/running.md says what may differ)"
    )


def _values(name: str, reference: str | None, others: Others, world_size: int) -> str:
    """`--seed is 1 on ranks 0-2, but 2 on rank 3`, the value that most ranks have first."""
    ranks_of: dict[str | None, list[int]] = {}
    for rank in range(world_size):
        ranks_of.setdefault(others.get(rank, {}).get(name, reference), []).append(rank)
    ordered = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1][0]))
    told = [
        f"{'absent' if value is None else cleaned(value, MAX_CHARACTERS) or 'empty'} on {in_words(ranks)}"
        for value, ranks in ordered[:MAX_VALUES]
    ]
    more = f" and {len(ordered) - MAX_VALUES} more values on other ranks" if len(ordered) > MAX_VALUES else ""
    return f"{cleaned(name, 2 * MAX_CHARACTERS)} is {told[0]}, but {', '.join(told[1:])}{more}"


def in_words(ranks: Sequence[int]) -> str:
    """Ascending ranks, such as `rank 3` or `ranks 3, 7-15`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    words = ["-".join(map(str, run)) for run in runs]
    cut = words[:MAX_RUNS] + ([f"... ({len(ranks)} ranks)"] if len(words) > MAX_RUNS else [])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(cut)}"
