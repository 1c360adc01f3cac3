"""Comparison of the ranks' facts before anything is built: each rank's result and number of requests."""

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.job import agreement
from megatron_balance.job.agreement import (
    MAX_LISTED,
    Facts,
    Member,
    _differing_facts,
    agree,
    decline,
    difference,
    in_words,
)

FACTS = {"--seed": "1234", "--lr": "0.001", "setting train.seed": "1234"}


class Counting:
    """A store that counts requests."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.requests = store, Counter()

    def __getattr__(self, name: str) -> Callable:
        if name != "set_timeout":
            self.requests[name] += 1
        return getattr(self.store, name)


class Meeting:
    """Ranks that agree, each in a thread with its own connection; a rank with a problem (a string) declines."""

    def __init__(self, members: Sequence[tuple[Member, Facts | str]], minutes: float = 2) -> None:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.heard: list[str] = [""] * len(members)
        self.stores = [Counting(dist.PrefixStore("test", server.clone())) for _ in members]
        threads = [
            threading.Thread(target=self._agree, args=(index, *member, minutes)) for index, member in enumerate(members)
        ]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(150)
        self.seconds = time.monotonic() - start

    def _agree(self, index: int, me: Member, facts: Facts | str, minutes: float) -> None:
        if isinstance(facts, str):
            decline(self.stores[index], me, facts)
            self.heard[index] = "declined"
            return
        try:
            agree(self.stores[index], me, facts, timeout_minutes=minutes, where="somewhere:1")
            self.heard[index] = "agreed"
        except ValueError as error:
            self.heard[index] = str(error)


def members(*facts: Facts | str) -> list[tuple[Member, Facts | str]]:
    return [(Member(rank, len(facts), rank == 0), own) for rank, own in enumerate(facts)]


def test_a_rank_makes_four_requests_however_many_there_are() -> None:
    meeting = Meeting(members(*[FACTS] * 12))
    assert meeting.heard == ["agreed"] * 12
    counts = sorted(sum(store.requests.values()) for store in meeting.stores)
    # The last rank decides
    assert counts[:11] == [4] * 11 and counts[11] <= 6


def test_all_ranks_hear_the_same_of_a_difference() -> None:
    meeting = Meeting(members(FACTS, FACTS, FACTS | {"--seed": "7", "setting train.seed": "7"}, FACTS, FACTS))
    assert set(meeting.heard) == {
        "the ranks of this job differ: --seed is 1234 on ranks 0-1, 3-4, but 7 on rank 2; start all with the same "
        "flags, packages, program and files (docs/running.md says what may differ)"
    }


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_cannot_start_tells_all_others(rank: int) -> None:
    meeting = Meeting(members(*(FACTS if other != rank else "its file is not here" for other in range(4))))
    assert meeting.seconds < 60 and meeting.heard.pop(rank) == "declined"
    assert set(meeting.heard) == {f"rank {rank} on {socket.gethostname()} cannot start: its file is not here"}


def test_two_processes_of_one_rank() -> None:
    wrong = [(Member(0, 3, True), FACTS), (Member(1, 3), FACTS), (Member(1, 3), FACTS)]
    heard = Meeting(wrong).heard
    assert len(set(heard)) == 1
    assert re.match(r"RANK=1: two processes have this rank, process \d+ of \S+ on \S+ and process \d+ of ", heard[0])


def test_two_sizes_of_the_job() -> None:
    heard = Meeting([(Member(0, 2, True), FACTS), (Member(1, 3), FACTS)]).heard
    assert heard[0] == heard[1] and re.match(r"WORLD_SIZE=. on rank ., but . on rank .; start all processes", heard[0])


@pytest.mark.parametrize("absent", [1, 0])
def test_missing_ranks_are_named(absent: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(agreement, "FAREWELL_SECONDS", 0.3)
    monkeypatch.setattr(agreement, "NOTICE_SECONDS", 0.3)
    start = time.monotonic()
    missing = agreement._missing
    there = [(Member(rank, 4, rank == 0), FACTS) for rank in range(4) if rank not in (absent, 3)]

    def once_all_are_there(store: dist.Store, *args: object) -> str:
        while not store.check([f"member/{member.rank}" for member, _ in there]):
            time.sleep(0.01)
        return missing(store, *args)

    monkeypatch.setattr(agreement, "_missing", once_all_are_there)
    heard = Meeting(there, minutes=0.01).heard
    assert time.monotonic() - start < 60
    assert len(set(heard)) == 1
    assert heard[0].startswith(
        f"ranks {absent}, 3 of 4 have not joined at somewhere:1 within 0.01 minutes (--distributed-timeout-minutes); "
        f"{'ranks 1-2' if absent == 0 else 'ranks 0, 2'} came from "
    )
    notice = "waiting for other ranks: ranks 1, 3 of 4 have not joined at somewhere:1 after 0.3 seconds; ranks 0, 2"
    assert capsys.readouterr().err.startswith(notice if absent else "")


class Broken:
    """A store whose server has ended."""

    def set_timeout(self, timeout: timedelta) -> None: ...

    def compare_set(self, *_: str) -> bytes:
        raise dist.DistNetworkError("Broken pipe")


def test_a_store_that_is_gone() -> None:
    with pytest.raises(ValueError, match=r"^here:1 \(MASTER_ADDR, MASTER_PORT\): the key-value store is gone \(Broken"):
        agree(Broken(), Member(1, 2), FACTS, timeout_minutes=0.01, where="here:1")


facts_of_a_rank = st.dictionaries(
    st.sampled_from([f"--flag-{number}" for number in range(6)]), st.sampled_from("abc"), min_size=1
)


@given(st.lists(facts_of_a_rank, min_size=2, max_size=9).filter(lambda every: any(own != every[0] for own in every)))
def test_every_difference_is_told_with_its_values_and_ranks(every: list[dict[str, str]]) -> None:
    reference = every[0]
    others = {rank: own for rank, facts in enumerate(every) if (own := _differing_facts(facts, reference))}
    # As received through the store
    told = difference(reference, {rank: json.loads(json.dumps(own)) for rank, own in others.items()}, len(every))
    assert told.startswith("the ranks of this job differ: ")
    clauses = told.removeprefix("the ranks of this job differ: ").split("; ")[:-1]
    found = {}
    for clause in clauses:
        name, _, values = clause.partition(" is ")
        found[name] = dict(value.split(" on ", 1) for value in re.split(r", (?:but )?(?=\w+ on rank)", values))
    expected: dict[str, Mapping[str, str]] = {}
    for name in {name for facts in every for name in facts}:
        values = [facts.get(name, "absent") for facts in every]
        if len(set(values)) > 1:
            ranks = {value: [rank for rank, other in enumerate(values) if other == value] for value in values}
            expected[name] = {value: in_words(own) for value, own in ranks.items()}
    assert found == expected


@given(st.sets(st.integers(0, 40), min_size=1, max_size=12))
def test_in_words_are_those_ranks(ranks: set[int]) -> None:
    words = in_words(sorted(ranks))
    if " ... " in words:
        first, second, last = map(int, re.findall(r"\d+", words))
        assert ranks == {*range(first, last + 1, second - first)}
        return
    if " more" in words:
        assert words.count(", ") == MAX_LISTED
        return
    runs = [run.split("-") for run in words.removeprefix("ranks ").removeprefix("rank ").split(", ")]
    assert {rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1)} == ranks


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([5], "rank 5"),
        (range(8), "ranks 0-7"),
        (range(0, 64, 8), "ranks 0, 8 ... 56"),
        (range(0, 32, 8), "ranks 0, 8, 16, 24"),
        ([0, 1, 4, 5], "ranks 0-1, 4-5"),
    ],
)
def test_in_words(ranks: Sequence[int], words: str) -> None:
    assert in_words(ranks) == words


def test_a_sentence_stays_short_whatever_differs() -> None:
    reference = {f"--flag-{number}": "x" for number in range(100)}
    others = {rank: dict.fromkeys(reference, f"{rank}\n\x1b[31m" + "y" * 1000) for rank in range(1, 500, 2)}
    told = difference(reference, others, 500)
    assert f"and {100 - MAX_LISTED} more" in told and f"and {250 - MAX_LISTED} more" in told
    assert len(told) < 1000 * MAX_LISTED and told.isprintable()


def test_what_follows_from_others_is_told_alone_only() -> None:
    told = difference(FACTS, {1: {"--seed": "7", "setting train.seed": "7"}}, 2)
    assert "setting" not in told
    told = difference(FACTS, {1: {"setting train.seed": "7"}}, 2)
    assert "setting train.seed is 1234 on rank 0, but 7 on rank 1" in told
