"""Placement: its invariants, its printed form and the slots that guests get."""

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.placement.placement import Placement
from tests.unit.placements import physicals_of, placements

BY_HAND = Placement(
    num_experts=4,
    home=((0, 1), (2, 3)),
    guests=((3, -1), (-1, 1)),
    hosts=((0,), (0, 0, 1), (1,), (0,)),
    primary=(0, 1, 1, 0),
)


@given(placements())
def test_tables_are_those_of_one_host_after_another(placement: Placement) -> None:
    rows = []
    experts_P = [-1] * placement.num_physical
    for expert, ranks in enumerate(placement.hosts):
        quotas = placement.quotas[expert] if placement.quotas else ()
        for index, rank in enumerate(sorted({*ranks})):
            share = quotas[index] if quotas else ranks.count(rank)
            rows.append((expert, rank, share, placement.physical(rank, expert)))
            experts_P[rows[-1][-1]] = expert
    tables = placement.tables
    found = tables.expert_N, tables.hosting.host_N, tables.hosting.share_N, tables.physical_N
    assert [*zip(*(array.tolist() for array in found), strict=True)] == rows
    assert tables.expert_P.tolist() == experts_P
    ends = [sum(row[0] < expert for row in rows) for expert in range(placement.num_experts + 1)]
    assert tables.first_E.tolist() == ends
    assert {(*cell,): int(tables.shares_ED[cell]) for cell in zip(*tables.shares_ED.nonzero(), strict=True)} == {
        row[:2]: row[2] for row in rows
    }


@given(placements())
def test_a_pickle_has_nothing_that_follows_from_the_fields(placement: Placement) -> None:
    before = pickle.dumps(dataclasses.replace(placement))
    _ = placement.trimmed.tables.physicals_EK
    assert pickle.loads(before) == placement and len(pickle.dumps(placement)) == len(before)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 3))
def test_identity(ranks: int, slots: int, guest_slots: int) -> None:
    placement = Placement.identity(ranks * slots, ranks, guest_slots)
    assert placement.is_identity
    assert placement.added_hosts == 0
    assert (placement.num_experts, placement.num_ranks) == (ranks * slots, ranks)
    assert (placement.home_slots, placement.guest_slots) == (slots, guest_slots)
    assert placement.slots_per_rank == slots + guest_slots
    assert placement.num_physical == ranks * (slots + guest_slots) == len(placement.tables.expert_P.tolist())
    assert [placement.owner(expert) for expert in range(ranks * slots)] == [e // slots for e in range(ranks * slots)]
    if not guest_slots:
        assert placement.tables.expert_P.tolist() == [*range(ranks * slots)]


def test_placements_are_frozen_values() -> None:
    placement = Placement.identity(4, 2)
    assert placement == Placement.identity(4, 2) != Placement.identity(4, 4)
    assert placement != Placement.identity(4, 2, guest_slots=1)
    assert hash(placement) == hash(Placement.identity(4, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        placement.num_experts = 4


def test_uneven_experts() -> None:
    with pytest.raises(ValueError, match=r"--num-experts 5: .*multiple of --expert-model-parallel-size 2"):
        Placement.identity(5, 2)


def test_by_hand() -> None:
    assert str(BY_HAND) == "0 1x2 + 3! . | 2 3x0 + . 1!"
    assert not BY_HAND.is_identity
    assert BY_HAND.added_hosts == 2
    assert BY_HAND.experts_of(1) == (2, 3)
    assert BY_HAND.tables.expert_P.tolist() == [0, 1, 3, -1, 2, -1, -1, 1]
    assert physicals_of(BY_HAND) == [[0], [1, 7], [4], [2]]
    # The owner keeps the weights of the expert that it lends
    assert BY_HAND.physical(1, 3) == 5
    with pytest.raises(ValueError):
        BY_HAND.physical(1, 0)


@given(placements())
def test_physical_experts_are_the_hosts(placement: Placement) -> None:
    experts = placement.tables.expert_P.tolist()
    hosted = {(index // placement.slots_per_rank, expert) for index, expert in enumerate(experts) if expert >= 0}
    assert hosted == {(rank, expert) for expert, ranks in enumerate(placement.hosts) for rank in ranks}
    assert placement.added_hosts == sum(placement.owner(expert) != rank for rank, expert in hosted)
    for rank, expert in hosted:
        index = placement.physical(rank, expert)
        slots = placement.home[rank] + placement.guests[rank]
        assert experts[index] == expert == slots[index - rank * placement.slots_per_rank]
        assert index in physicals_of(placement)[expert]
    assert all(list(indices) == sorted(indices) for indices in physicals_of(placement))
    assert sum(map(len, physicals_of(placement))) == len(hosted)


@given(placements())
def test_slots(placement: Placement) -> None:
    for rank in range(placement.num_ranks):
        kept = placement.home[rank] + placement.guests[rank]
        for expert in range(placement.num_experts):
            if expert in kept:
                assert kept[placement.slot(rank, expert)] == expert
                assert placement.physical(rank, expert) == rank * len(kept) + placement.slot(rank, expert)
                assert (placement.slot(rank, expert) < placement.home_slots) == (placement.owner(expert) == rank)
            else:
                with pytest.raises(ValueError):
                    placement.slot(rank, expert)


@given(placements())
def test_trimmed_keeps_all_but_slots_that_no_rank_uses(placement: Placement) -> None:
    trimmed = placement.trimmed
    used = [any(row[slot] >= 0 for row in placement.guests) for slot in range(placement.guest_slots)]
    assert trimmed.guest_slots == max((slot + 1 for slot, is_used in enumerate(used) if is_used), default=0)
    assert trimmed.trimmed == trimmed
    assert trimmed.guests == tuple(row[: trimmed.guest_slots] for row in placement.guests)
    assert dataclasses.replace(trimmed, guests=placement.guests) == placement
    for rank in range(placement.num_ranks):
        for expert in {*placement.home[rank], *placement.guests[rank]} - {-1}:
            assert trimmed.slot(rank, expert) == placement.slot(rank, expert)
    # The physical experts are the same, except for the stride between ranks
    stride = placement.slots_per_rank
    shorter = trimmed.slots_per_rank
    assert physicals_of(trimmed) == [
        [index // stride * shorter + index % stride for index in indices] for indices in physicals_of(placement)
    ]


@given(placements(), placements())
def test_printed_form(one: Placement, other: Placement) -> None:
    assert Placement.parse(str(one)) == one
    assert (str(one) == str(other)) == (one == other) == (one.digest() == other.digest())


def test_digest_is_the_same_in_every_run() -> None:
    assert BY_HAND.digest() == "e7777c90733622fb515c208f2022c0bd"


@pytest.mark.parametrize(
    "text",
    """

    0 1 2x
    0 1 | 2 x
    0 1 | 2
    0 0 | 1 2
    0 1 | 2 4
    0 1 + 5 | 2 3 + .
    0 +
    0 + . + .
    0x1
    0!
    0 + 1! | 1 + 0 1
    0 + 1! | 1! + .
    0 . | 1 2
    0 + . | 1 + 0x0
    0x0 + . | 1 + .
    0 + -1 | 1 + .""".splitlines(),
)
def test_texts_that_are_no_placement(text: str) -> None:
    with pytest.raises(ValueError):
        Placement.parse(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 5}, r"home .*: must hold each of 5 experts once"),
        ({"home": ((0, 1), (2, 2))}, r"home .*: must hold each of 4 experts once"),
        ({"home": ((0, 1, 2), (3,))}, r"home .*evenly over ranks"),
        ({"home": ()}, r"home .*: must hold each of 4"),
        ({"num_experts": 0, "home": ((), ())}, r"home .*: must hold each of 0"),
        ({"guests": ((3, -1),)}, r"guests .*: 2 ranks need equally many guest slots"),
        ({"guests": ((3, -1), (1,))}, r"guests .*: 2 ranks need equally many guest slots"),
        ({"guests": ((3, 4), (-1, 1))}, r"rank 0: its guest slots hold experts \[3, 4\], but it must host \[3\]"),
        ({"guests": ((3, -2), (-1, 1))}, r"rank 0: its guest slots hold experts \[-2, 3\], but it must host \[3\]"),
        ({"guests": ((3, -1), (1, 1))}, r"rank 1: its guest slots hold experts \[1, 1\], but it must host \[1\]"),
        ({"guests": ((3, 0), (-1, 1))}, r"rank 0: its guest slots hold experts \[0, 3\], but it must host \[3\]"),
        ({"guests": ((-1, -1), (-1, 1))}, r"rank 0: its guest slots hold experts \[\], but it must host \[3\]"),
        ({"hosts": ((0,), (0, 1), (1,))}, r"hosts of 3 experts, primaries of 4"),
        ({"primary": (0, 1, 1)}, r"hosts of 4 experts, primaries of 3"),
        ({"hosts": ((), (0, 1), (1,), (0,))}, r"expert 0: has no host"),
        ({"hosts": ((0,), (1, 0), (1,), (0,))}, r"expert 1: its hosts \(1, 0\) must ascend"),
        (
            {"hosts": ((0, 1), (0, 1), (1,), (0,))},
            r"rank 1: its guest slots hold experts \[1\], but it must host \[0, 1\]",
        ),
        ({"hosts": ((0, 2), (0, 1), (1,), (0,))}, r"expert 0: its host 2 is not one of 2 ranks"),
        ({"hosts": ((-1, 0), (0, 1), (1,), (0,))}, r"expert 0: its host -1 is not one of 2 ranks"),
        ({"primary": (0, 1, 0, 0)}, r"expert 2: its primary 0 is not one of its hosts \(1,\)"),
        ({"quotas": ((1,), (), ())}, r"quotas of 3 experts: give those of all 4, or none"),
        ({"quotas": ((1, 1), (), (), ())}, r"expert 0: its quotas \(1, 1\) must be one for each of its hosts \(0,\)"),
        ({"quotas": ((), (1, 2, 3), (), ())}, r"expert 1: its quotas .* must be one for each of its hosts \(0, 0, 1\)"),
        ({"quotas": ((0,), (), (), ())}, r"expert 0: its quotas \(0,\) must be at least 1, and 2147483647 at most"),
        ({"quotas": ((2**31,), (), (), ())}, r"expert 0: its quotas \(2147483648,\) must be at least 1, and"),
    ],
)
def test_what_is_no_placement(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BY_HAND, **changes)


@given(placements(), st.data())
def test_a_changed_field_is_found_or_harmless(placement: Placement, data: st.DataObject) -> None:
    """The compiled loop and the checks that name the problem agree: tables exist exactly without a problem."""
    name = data.draw(st.sampled_from(["guests", "hosts", "quotas", "primary"]))
    rows = [*getattr(placement, name)] or [()] * placement.num_experts
    index = data.draw(st.integers(0, len(rows) - 1))
    near = st.integers(-2, placement.num_experts)
    if name == "primary":
        rows[index] = data.draw(near)
    elif name == "guests":
        rows[index] = (*data.draw(st.lists(near, min_size=placement.guest_slots, max_size=placement.guest_slots)),)
    else:
        rows[index] = (*data.draw(st.lists(near | st.just(2**31) | st.just(2**70), max_size=4)),)
    try:
        changed = dataclasses.replace(placement, **{name: (*rows,)})
    except ValueError as error:
        assert str(error).startswith(("expert", "rank"))
    else:
        for expert, ranks in enumerate(changed.hosts):
            assert changed.primary[expert] in ranks
            for rank in ranks:
                assert changed.tables.expert_P[changed.physical(rank, expert)] == expert


def test_added_hosts_fill_free_slots_in_order() -> None:
    base = Placement.identity(6, 3, guest_slots=2)
    placement = base.with_hosts([(4, 0), (2, 0), (0, 2), (0, 0)])
    assert str(placement) == "0x2 1 + 2 4 | 2 3 + . . | 4 5 + 0 ."
    assert placement.hosts == ((0, 0, 2), (0,), (0, 1), (1,), (0, 2), (2,))
    assert placement.primary == base.primary
    assert base.with_hosts([]) == base
    assert Placement.with_hosts(base, [(0, 0), (0, 2), (2, 0), (4, 0)]) == placement


def test_guests_stay_in_their_slots() -> None:
    base = Placement.parse("0 1 + . 4 | 2 3 + . . | 4 5 + . .")
    assert str(base.with_hosts([(2, 0)])) == "0 1 + 2 4 | 2 3 + . . | 4 5 + . ."
    # Expert 4 leaves rank 0, and expert 5 takes its slot
    without = base.with_hosts([(2, 0)]).rehost([(0,), (0,), (1, 0), (1,), (2,), (2,)])
    assert str(without) == "0 1 + 2 . | 2 3 + . . | 4 5 + . ."
    assert str(without.with_hosts([(5, 0)])) == "0 1 + 2 5 | 2 3 + . . | 4 5 + . ."


@given(placements(), st.data())
def test_more_hosts_for_any_placement(base: Placement, data: st.DataObject) -> None:
    pairs = [(expert, rank) for expert in range(base.num_experts) for rank in range(base.num_ranks)]
    additions = data.draw(st.lists(st.sampled_from(pairs), max_size=6))
    kept = [{*home, *guests} for home, guests in zip(base.home, base.guests, strict=True)]
    new = {(expert, rank) for expert, rank in additions if expert not in kept[rank]}
    if any(sum(on == rank for _, on in new) > row.count(-1) for rank, row in enumerate(base.guests)):
        with pytest.raises(ValueError, match=r"rank \d+: no free guest slot of \d+ for experts"):
            base.with_hosts(additions)
        return
    placement = base.with_hosts(additions)
    assert placement == base.with_hosts(data.draw(st.permutations(additions)))
    assert (placement.home, placement.primary) == (base.home, base.primary)
    for before, after in zip(base.guests, placement.guests, strict=True):
        assert all(a == b for a, b in zip(after, before, strict=True) if b >= 0)
    for expert, ranks in enumerate(placement.hosts):
        assert list(ranks) == sorted([*base.hosts[expert], *(r for e, r in additions if e == expert)])


@given(placements())
def test_the_same_hosts_again(placement: Placement) -> None:
    assert placement.rehost(placement.hosts, placement.primary, quotas=placement.quotas) == placement
    alone = [(placement.owner(expert),) for expert in range(placement.num_experts)]
    assert placement.rehost(alone).is_identity
    assert placement.rehost(alone).primary == tuple(rank for (rank,) in alone)


def test_quotas() -> None:
    owners = Placement.identity(4, 2, guest_slots=1)
    placement = owners.rehost([(1, 0), (0,), (1,), (0,)], quotas=[(7, 5), (), (), (9,)])
    assert str(placement) == "0:5 1 + 3:9! | 2 3x0 + 0:7"
    assert placement == Placement.parse(str(placement)) != owners.rehost([(1, 0), (0,), (1,), (0,)])
    assert placement.quotas == ((5, 7), (), (), (9,))
    # Those of one rank are added up; without any, vExperts share evenly
    assert owners.rehost([(0, 1, 0), (0,), (1,), (1,)], quotas=[(1, 2, 3), (), (), ()]).quotas[0] == (4, 2)
    assert owners.rehost(owners.hosts, quotas=[()] * 4) == owners


def test_primary_of_a_lent_expert() -> None:
    base = Placement.identity(3, 3, guest_slots=1)
    lent = base.rehost([(2, 1), (1,), (2,)])
    assert str(lent) == "0x0 + . | 1 + 0! | 2 + 0"
    assert base.rehost([(2, 1), (1,), (2,)], primary=(2, 1, 2)).primary == (2, 1, 2)
    # A primary that remains a host stays primary; otherwise, the owner becomes primary
    assert lent.rehost([(0, 1), (1,), (2,)]).primary == (1, 1, 2)
    assert lent.rehost([(0, 2), (1,), (2,)]).primary == (0, 1, 2)


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([(0,), (1,), ()], "expert 2: has no host"),
        ([(0,), (1,), (2, 3)], "expert 2 on rank 3: there are 3 ranks"),
        ([(0,), (1,), (-1, 2)], "expert 2 on rank -1: there are 3 ranks"),
        ([(0,), (0, 1), (0, 2)], r"rank 0: no free guest slot of 1 for experts \[2\]"),
    ],
)
def test_hosts_that_cannot_be(hosts: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement.identity(3, 3, guest_slots=1).rehost(hosts)


@pytest.mark.parametrize("addition", [(3, 0), (-1, 0), (0, 3), (0, -1)])
def test_additions_that_cannot_be(addition: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"expert -?\d on rank -?\d: there are 3 (experts|ranks)"):
        Placement.identity(3, 3, guest_slots=1).with_hosts([addition])
