"""The cost model compared with hand-computed values; every split conserves tokens."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.model import (
    FANOUTS,
    LINKS,
    MOST_CHUNKS,
    CostModel,
    Overlap,
    balance_gain,
    balance_ratio,
)
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS, traffic_of
from megatron_balance.placement.transfers import plan_transfers
from megatron_balance.profile.cluster_profile import COLLECTIVES, GROUPS, Bandwidth, ClusterProfile, Fit, Throughput
from tests.unit.placements import placements as any_placements

COUNTS_DE = np.array([[2, 0, 1], [2, 1, 0], [1, 1, 1]])
"""Pro-Prophet's Fig. 6: 5, 2 and 2 inputs for three experts on three devices."""


def profile(num_ranks: int = 3, node_size: int = 3) -> ClusterProfile:
    """Return a profile: 0.5 s per byte in a node and group, 2 s across nodes; 1 s per token forward, 2 s backward."""
    near, far = Fit(0.0, 0.5, 0.0, 0.0), Fit(0.0, 2.0, 0.0, 0.0)
    links = {kind: dict(zip(GROUPS, (near, far, near), strict=True)) for kind in COLLECTIVES}
    forward, backward = Throughput(1.0, 0.0, 0.0, 0.0), Throughput(2.0, 0.0, 0.0, 0.0)
    return ClusterProfile(num_ranks=num_ranks, node_size=node_size, links=links, forward=forward, backward=backward)


COST = CostModel(profile(), token_bytes=4, param_bytes=6, grad_bytes=12)
PLAIN = Placement.identity(3, 3, guest_slots=2)
GUEST = PLAIN.with_hosts([(0, 1)])


@st.composite
def placements(draw: st.DrawFn) -> tuple[np.ndarray, Placement]:
    """Draw a load matrix and a placement with any number of guests on any ranks."""
    num_ranks, home, slots = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(0, 3))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    placement = Placement.identity(num_ranks * home, num_ranks, slots)
    additions = []
    for rank in range(num_ranks):
        strangers = [expert for expert in range(num_ranks * home) if expert // home != rank]
        chosen = generator.permutation(strangers)[: generator.integers(0, slots + 1)]
        additions += [(int(expert), rank) for expert in chosen]
    zeros = generator.integers(0, 2, (num_ranks, num_ranks * home))
    return generator.integers(0, 100, zeros.shape) * zeros, placement.with_hosts(additions)


def test_traffic_of_the_papers_example() -> None:
    assert traffic_of("local_first", COUNTS_DE, PLAIN).tolist() == [[2, 0, 1], [2, 1, 0], [1, 1, 1]]
    assert traffic_of("local_first", COUNTS_DE, GUEST).tolist() == [[2, 0, 1], [0, 3, 0], [1, 1, 1]]


def test_equations_1_to_6() -> None:
    # Tokens: computed 5, 2, 2; received 3, 1, 1; sent 1, 2, 2. One token takes 2 s on a link
    assert COST.layer_time(COUNTS_DE, PLAIN) == (4 * 3 * 2, 5, 10, 0, 0)
    # Tokens: computed 3, 4, 2; received 1, 1, 1; sent 1, 0, 2. Sending an expert takes 3 s, its gradients 6 s
    assert COST.layer_time(COUNTS_DE, GUEST) == (4 * 2 * 2, 4, 8, 3, 6)
    assert COST.layer_seconds(COUNTS_DE, GUEST) == 37


def test_equation_8_hides_transfers() -> None:
    hidden = dataclasses.replace(COST, overlap=Overlap(forward=0.0, backward=0.0))
    assert hidden.layer_time(COUNTS_DE, GUEST)[3:] == (0, 0)
    heavy = dataclasses.replace(hidden, param_bytes=20, grad_bytes=40, overlap=Overlap(forward=1.0, backward=2.0))
    # Of 10 s of Trans, 4 + 1 are hidden; of 20 s of Agg, 8 + 2
    assert heavy.layer_time(COUNTS_DE, GUEST)[3:] == (5, 10)


def test_latencies_count_per_exchange_and_per_expert_on_a_link() -> None:
    slow = {kind: dict.fromkeys(GROUPS, Fit(1.0, 0.0, 0.0, 0.0)) for kind in COLLECTIVES}
    cost = dataclasses.replace(COST, profile=dataclasses.replace(profile(), links=slow))
    two = PLAIN.with_hosts([(0, 1), (0, 2)])
    time = cost.layer_time(COUNTS_DE, two)
    assert (time.all_to_all, time.trans, time.agg) == (4, 2, 2)


def test_microbatches_repeat_latencies_but_not_transfers() -> None:
    slow = {kind: dict.fromkeys(GROUPS, Fit(1.0, 0.5, 0.0, 0.0)) for kind in COLLECTIVES}
    busy = dataclasses.replace(
        profile(), links=slow, forward=Throughput(1.0, 3.0, 0.0, 0.0), backward=Throughput(2.0, 5.0, 0.0, 0.0)
    )
    cost = dataclasses.replace(COST, profile=busy)
    # The busiest rank sends 2 tokens of 4 bytes, another rank computes 4 tokens; one expert moves
    assert cost.layer_time(COUNTS_DE, GUEST) == (4 * (1 + 4), 4 + 3, 8 + 5, 1 + 3, 1 + 6)
    four = dataclasses.replace(cost, microbatches=4)
    assert four.layer_time(COUNTS_DE, GUEST) == (4 * (4 + 4), 4 + 12, 8 + 20, 1 + 3, 1 + 6)


def test_transfers_hide_under_one_microbatch() -> None:
    heavy = dataclasses.replace(COST, param_bytes=20, grad_bytes=40, overlap=Overlap(1.0, 2.0), microbatches=4)
    # Of 10 s of Trans, 4 / 4 + 1 are hidden; of 20 s of Agg, 8 / 4 + 2
    assert heavy.layer_time(COUNTS_DE, GUEST)[3:] == (8, 16)


@pytest.mark.parametrize(
    ("additions", "relay", "direct", "average"),
    [
        ([], 0, 0, 0),
        ([(0, 1)], 1, 1, 1 / 4),
        ([(0, 1), (0, 2), (0, 3)], 2, 3, 3 / 4),
        ([(0, 3), (1, 3)], 2, 2, 2 / 4),
        ([(0, 1), (0, 2), (1, 2), (1, 3)], 2, 2, 1),
        ([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)], 3, 3, 5 / 4),
    ],
)
def test_rounds_of_whole_experts(additions: list, relay: float, direct: float, average: float) -> None:
    placement = Placement.identity(4, 4, 3).with_hosts(additions)
    # Bytes take no time, so pieces would only add latency
    line = with_p2p(Fit(1.0, 0.0, 0.0, 0.0))
    found = {
        links: CostModel(line, token_bytes=4, param_bytes=6, grad_bytes=12, links=links).sending(placement)
        for links in LINKS
    }
    values = {"relay": relay, "direct": direct, "average": pytest.approx(average)}
    assert {links: sending.rounds for links, sending in found.items()} == values
    assert {sending.chunks for sending in found.values()} == {1}
    assert CostModel(line, token_bytes=4, param_bytes=6, grad_bytes=12).links == "relay"


def with_p2p(line: Fit, num_ranks: int = 3, node_size: int = 3) -> ClusterProfile:
    plain = profile(num_ranks, node_size)
    return dataclasses.replace(plain, links={**plain.links, "p2p": dict.fromkeys(GROUPS, line)})


def one_to_all(num_ranks: int) -> Placement:
    return Placement.identity(num_ranks, num_ranks, 1).with_hosts((0, rank) for rank in range(1, num_ranks))


def chosen(latencies: float, num_ranks: int, **options: object) -> tuple[int, int]:
    """Return fan-out and pieces for an expert on all ranks that takes `latencies` times a message's latency to send."""
    cost = CostModel(
        with_p2p(Fit(1.0, latencies / 100, 0.0, 0.0), num_ranks, 8),
        token_bytes=4,
        param_bytes=100,
        grad_bytes=300,
        **options,
    )
    return cost.sending(one_to_all(num_ranks))[:2]


def test_routes_and_pieces_follow_size_and_ranks() -> None:
    assert chosen(1000, 2) == (1, 1), "one link has nothing to gain"
    assert chosen(16, 4) == (1, round((2 * 16) ** 0.5)), "two links more to pass"
    assert chosen(1e6, 64) == (1, MOST_CHUNKS), "a chain for large experts"
    assert chosen(10, 64) == (2, round((6 / 2 * 10) ** 0.5)), "a tree for small ones on many ranks"
    assert chosen(0.1, 64) == (16, 1), "doubling where latency is all"


@pytest.mark.parametrize("alpha", [0.0, 1e-9])
def test_without_latency_pieces_are_bounded(alpha: float) -> None:
    cost = CostModel(with_p2p(Fit(alpha, 1e-9, 0.0, 0.0)), token_bytes=4, param_bytes=8_000, grad_bytes=8_000)
    # The expert takes 8 us, and the choice assumes another microsecond per piece
    assert cost.sending(one_to_all(3))[:2] == (1, 3)


@settings(max_examples=200)
@given(any_placements(), st.integers(1, 6), st.floats(0, 1e4))
def test_no_choice_is_slower_than_any_other(placement: Placement, node_size: int, latencies: float) -> None:
    profile = with_p2p(Fit(1.0, latencies / 100, 0.0, 0.0), placement.num_ranks, node_size)
    cost = CostModel(profile, token_bytes=4, param_bytes=100, grad_bytes=300)
    fanout, chunks, rounds = cost.sending(placement)
    seconds = cost.trans_seconds(rounds, chunks)
    scheduled = plan_transfers(placement, node_size, chunks, fanout)
    assert cost.transfers(placement) == scheduled and rounds <= len(scheduled.rounds)
    for fanout, chunks in itertools.product(FANOUTS, (1, 2, 4, 16)):
        other = len(plan_transfers(placement, node_size, chunks, fanout).rounds)
        # The choice always considers one piece; among larger numbers, it is only close to the best
        assert seconds <= cost.trans_seconds(other, chunks) * (1.1 if chunks > 1 else 1 + 1e-9)


@given(st.floats(0.1, 1e4), st.integers(2, 16))
def test_with_overlap_a_large_expert_has_pieces_to_split_by(latencies: float, num_ranks: int) -> None:
    fanout, chunks = chosen(latencies, num_ranks)
    more = chosen(latencies, num_ranks, overlap=Overlap(1.0, 1.0))
    assert more[1] >= min(4, max(1, int(latencies / 4)))
    assert more == (fanout, chunks) or chunks < 4
    # Over a single link, a piece still takes four times the latency
    assert chosen(latencies, 2, overlap=Overlap(1.0, 1.0)) == (1, min(4, max(1, int(latencies / 4))))


def test_a_transfer_takes_its_rounds() -> None:
    cost = CostModel(with_p2p(Fit(1.0, 0.25, 0.0, 0.0)), token_bytes=4, param_bytes=100, grad_bytes=300)
    plan = cost.transfers(PLAIN.with_hosts([(0, 1), (0, 2)]))
    # Five pieces over two links: 20 bytes each, and 60 bytes on the way back
    assert (plan.chunks, len(plan.rounds)) == (5, 6)
    assert (cost.trans_seconds(6, 5), cost.agg_seconds(6, 5)) == (6 * (1 + 5), 6 * (1 + 15))
    time = cost.layer_time(COUNTS_DE, PLAIN.with_hosts([(0, 1), (0, 2)]))
    assert (time.trans, time.agg) == (36, 96)


def test_flexmoe_equations() -> None:
    two_nodes = dataclasses.replace(COST, profile=dataclasses.replace(profile(node_size=2)))
    # Rank 0: 5 tokens * 3 s + 4 exchanges * 4 bytes * (2 tokens * 0.5 + 1 token * 2 s per byte)
    assert two_nodes.flexmoe_seconds(COUNTS_DE, PLAIN) == 15 + 16 * 3
    # A guest on rank 1 computes 4 tokens, 1 of them from the other node, and synchronizes 12 bytes at 0.5 s each
    assert two_nodes.flexmoe_seconds(COUNTS_DE, GUEST) == 12 + 16 * 2 + 6
    measured = dataclasses.replace(two_nodes.profile, all_reduce=(Bandwidth(2, 1, 1.0),))
    assert dataclasses.replace(two_nodes, profile=measured).flexmoe_seconds(COUNTS_DE, GUEST) == 12 + 16 * 2 + 12
    assert (two_nodes.adjustment_seconds(0, 0), two_nodes.adjustment_seconds(0, 1)) == (0, 3)
    assert two_nodes.adjustment_seconds(1, 2) == 12


def test_proportional_split_fills_what_hosts_have_left() -> None:
    placement = Placement.identity(2, 2, 1).with_hosts([(0, 1)])
    # Expert 0 has 8 tokens and two hosts for 4 each: rank 0 keeps 4 of its 6, rank 1 keeps its 2 and receives 2
    assert traffic_of("proportional", np.array([[6, 0], [2, 0]]), placement).tolist() == [[4, 2], [0, 2]]


@given(placements(), st.sampled_from(sorted(SPLITS)))
def test_no_token_is_lost(case: tuple[np.ndarray, Placement], split: str) -> None:
    counts_DE, placement = case
    traffic_DD = traffic_of(split, counts_DE, placement)
    assert (traffic_DD >= -1e-9).all()
    assert traffic_DD.sum(1) == pytest.approx(counts_DE.sum(1))
    for expert in range(placement.num_experts):
        alone_DE = np.zeros_like(counts_DE)
        alone_DE[:, expert] = counts_DE[:, expert]
        away = np.delete(traffic_of(split, alone_DE, placement).sum(0), sorted(set(placement.hosts[expert])))
        assert away == pytest.approx(0)


def test_metrics() -> None:
    assert balance_ratio(np.array([6, 2, 1])) == 2
    assert balance_ratio(np.zeros(3)) == 1
    assert balance_gain(np.array([0, 4]), np.array([1, 3])) == 2
    assert balance_gain(np.array([0, 4]), np.array([2, 2])) == float("inf")
    assert balance_gain(np.array([2, 2]), np.array([2, 2])) == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("split", "x", "--balance-token-split x"),
        ("links", "x", "links x: choose from relay"),
        ("microbatches", 0, "microbatches 0"),
    ],
)
def test_fields_are_checked(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(COST, **{field: value})
