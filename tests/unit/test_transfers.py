"""Transfer plans: every guest gets its expert once, from a rank that has it, in few rounds."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.transfers import Message, _Transfers, doubling_rounds, fewest_rounds, plan_transfers
from tests.unit.placements import placements


def one_to_all(num_ranks: int, experts: int = 1) -> Placement:
    """The first experts, which rank 0 owns, on every other rank."""
    plain = Placement.identity(num_ranks * experts, num_ranks, experts)
    return plain.with_hosts((expert, rank) for expert in range(experts) for rank in range(1, num_ranks))


@settings(deadline=None, max_examples=300)
@given(placements())
def test_invariants(placement: Placement) -> None:
    plan = plan_transfers(placement)
    holders = {(expert, placement.owner(expert)) for expert in range(placement.num_experts)}
    for messages in plan.rounds:
        assert messages
        assert max(Counter(message.source for message in messages).values()) == 1
        assert max(Counter(message.target for message in messages).values()) == 1
        assert all((message.expert, message.source) in holders for message in messages)
        holders |= {(message.expert, message.target) for message in messages}
    reached = Counter((message.expert, message.target) for messages in plan.rounds for message in messages)
    slots = [(expert, rank) for rank, row in enumerate(placement.guests) for expert in row if expert != EMPTY]
    assert reached == Counter(slots)
    assert plan == plan_transfers(Placement.parse(str(placement)))


@settings(deadline=None, max_examples=300)
@given(placements())
def test_rounds_are_near_the_lower_bound(placement: Placement) -> None:
    rounds, fewest = len(plan_transfers(placement).rounds), fewest_rounds(placement)
    owners = Counter(placement.owner(expert) for row in placement.guests for expert in row if expert != EMPTY)
    assert fewest <= rounds <= fewest + 2
    assert max(owners.values(), default=0).bit_length() <= fewest


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8, 13, 64, 65])
def test_one_expert_to_all_doubles(num_ranks: int) -> None:
    rounds = math.ceil(math.log2(num_ranks))
    assert len(plan_transfers(one_to_all(num_ranks)).rounds) == fewest_rounds(one_to_all(num_ranks)) == rounds


def test_two_experts_to_all_take_a_round_more() -> None:
    # 126 messages, and 1 + 2 + ... + 32 = 63 in six rounds
    assert len(plan_transfers(one_to_all(64, experts=2)).rounds) == 7
    # Of different owners, they spread side by side
    sides = Placement.identity(64, 64, 2)
    spread = sides.with_hosts([(expert, rank) for expert in (0, 63) for rank in range(64) if rank != expert])
    assert len(plan_transfers(spread).rounds) == 6


def test_no_guests_no_rounds() -> None:
    for placement in (Placement.identity(4, 2, 2), Placement.identity(4, 2), Placement.identity(4, 1, 3)):
        assert plan_transfers(placement).rounds == () and fewest_rounds(placement) == 0


def test_a_lent_expert_is_sent_by_its_owner() -> None:
    lent = Placement.identity(2, 2, 1).rehost([[1], [1]])
    assert plan_transfers(lent).rounds == ((Message(expert=0, source=0, target=1),),)


def test_an_owner_starts_all_its_experts_before_it_helps() -> None:
    # Six experts of rank 0, one of them to six ranks: it needs a round for each, while guests relay the wide one
    home = Placement.identity(48, 8, 2)
    wide = [(0, rank) for rank in range(1, 7)]
    placement = home.with_hosts(wide + [(expert, expert) for expert in range(1, 6)])
    assert len(plan_transfers(placement).rounds) == 6


@pytest.mark.parametrize(
    "text", ["0 1 + 2 5 | 2 3 + . . | 4 5 + 2 3", "0 + . . | 1 + 2 . | 2 + 3 4 | 3 + 0 2 | 4 + 2 3"]
)
def test_a_receiver_is_served_through_an_exchange_of_senders(text: str) -> None:
    # Without exchanges the first takes three rounds; if a sender is given up for good once it could not be freed, so
    # does the second
    placement = Placement.parse(text)
    assert len(plan_transfers(placement).rounds) == fewest_rounds(placement) == 2


@settings(deadline=None, max_examples=300)
@given(placements(), st.integers(0, 3))
def test_no_round_could_carry_more_messages(placement: Placement, after: int) -> None:
    state = _Transfers(placement)
    for _ in range(after):
        state.advance()
    can_send = np.zeros((placement.num_ranks, placement.num_ranks), dtype=int)
    for rank, wanted in enumerate(state.wants):
        can_send[[source for expert in wanted for source in state.holders[expert]], rank] = 1
    most = (maximum_bipartite_matching(csr_matrix(can_send)) >= 0).sum()
    assert len(state.advance()) == most


@given(st.integers(0, 200), st.integers(1, 16), st.integers(0, 16))
def test_doubling_rounds(messages: int, senders: int, more: int) -> None:
    num_ranks = senders + more
    rounds = doubling_rounds(messages, senders, num_ranks)
    sent = [sum(min(senders * 2**index, num_ranks) for index in range(count)) for count in (rounds - 1, rounds)]
    assert sent[1] >= messages and (rounds == 0 or sent[0] < messages)
