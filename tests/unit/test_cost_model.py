"""The cost model compared with hand-computed values; every split conserves tokens."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel, Overlap, balance_gain, balance_ratio
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS, traffic_of
from megatron_balance.profile.cluster_profile import ClusterProfile, Fit, Throughput, from_links
from tests.unit.placements import loads as any_loads
from tests.unit.placements import placements as any_placements

COUNTS_DE = np.array([[2, 0, 1], [2, 1, 0], [1, 1, 1]])
"""Pro-Prophet's Fig. 6: 5, 2 and 2 inputs for three experts on three devices."""

NEAR = Fit(0.0, 0.5, 0.0, 0.0)
FAR = Fit(0.0, 2.0, 0.0, 0.0)
FORWARD = Throughput(1.0, 0.0, 0.0, 0.0)
BACKWARD = Throughput(2.0, 0.0, 0.0, 0.0)


def profile(node_size: int = 3, near: Fit = NEAR, far: Fit = FAR, num_ranks: int = 3) -> ClusterProfile:
    """Return a profile: 0.5 s per byte within a node, 2 s between nodes; 1 s per token forward, 2 s backward."""
    return from_links(num_ranks, node_size, near, far, shared=far, forward=FORWARD, backward=BACKWARD)


COST = CostModel(profile(), token_bytes=4, param_bytes=6, grad_bytes=12)
PLAIN = Placement.identity(3, 3, guest_slots=2)
GUEST = PLAIN.with_hosts([(0, 1)])


def with_latencies(exchange: float, forward: float = 0.0, backward: float = 0.0) -> CostModel:
    """Return COST with seconds of latency for an exchange, and for calls of the experts."""
    links = {**COST.profile.links, "all_to_all": {"ep": Fit(exchange, 0.5, 0.0, 0.0)}}
    return dataclasses.replace(
        COST,
        profile=dataclasses.replace(
            COST.profile,
            links=links,
            forward=FORWARD._replace(overhead=forward),
            backward=BACKWARD._replace(overhead=backward),
        ),
    )


def test_traffic_of_the_papers_example() -> None:
    assert traffic_of("local_first", COUNTS_DE, PLAIN, 3).tolist() == [[2, 0, 1], [2, 1, 0], [1, 1, 1]]
    assert traffic_of("local_first", COUNTS_DE, GUEST, 3).tolist() == [[2, 0, 1], [0, 3, 0], [1, 1, 1]]


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
    slowed = dataclasses.replace(hidden, overlap=Overlap(forward=0.0, backward=0.0, slowed=0.5))
    assert slowed.layer_time(COUNTS_DE, GUEST)[3:] == (1.5, 3)
    first = dataclasses.replace(heavy, overlap=Overlap(forward=1.0, backward=2.0, experts=False))
    assert first.layer_time(COUNTS_DE, GUEST)[3:] == (9, 18)


def test_microbatches_repeat_latencies_but_not_transfers() -> None:
    cost = with_latencies(1.0, forward=3.0, backward=5.0)
    # The busiest rank sends 2 tokens of 4 bytes, another rank computes 4 tokens; one expert moves
    assert cost.layer_time(COUNTS_DE, GUEST) == (4 * (1 + 4), 4 + 3, 8 + 5, 3, 6)
    four = dataclasses.replace(cost, microbatches=4)
    assert four.layer_time(COUNTS_DE, GUEST) == (4 * (4 + 4), 4 + 12, 8 + 20, 3, 6)


def test_each_microbatch_waits_for_its_own_busiest_rank() -> None:
    hot_BDE = np.array([[[4, 0, 0]] * 3, [[0, 4, 0]] * 3])
    two = dataclasses.replace(with_latencies(1.0), microbatches=2)
    # In each microbatch, one rank computes 12 tokens, of which it receives 8
    assert two.layer_time(hot_BDE, PLAIN) == (4 * (2 * 1 + 2 * 16), 24, 48, 0, 0)
    assert two.layer_time(hot_BDE.sum(0), PLAIN).forward == 12
    assert two.work(hot_BDE[:1], PLAIN) == two.work(hot_BDE[0], PLAIN)


def test_transfers_hide_under_one_microbatch() -> None:
    heavy = dataclasses.replace(COST, param_bytes=20, grad_bytes=40, overlap=Overlap(1.0, 2.0), microbatches=4)
    # Of 10 s of Trans, 4 / 4 + 1 are hidden; of 20 s of Agg, 8 / 4 + 2
    assert heavy.layer_time(COUNTS_DE, GUEST)[3:] == (8, 16)


def test_chunks_hide_exchanges_and_repeat_latencies() -> None:
    cost = dataclasses.replace(with_latencies(1.0, forward=0.25, backward=0.5), degrees=(1, 2))
    # An exchange takes 1 + 4 s, the experts 4.25 s and 8.5 s. In two chunks, both exchanges take 2 * (2 + 4) s. The
    # forward pass ends at max(12, 4.5 + 6), after 0.25 + 10 s in one piece; the backward pass at max(12, 9 + 6)
    assert cost.layer_time(COUNTS_DE, GUEST) == (12 - 4.25 + 15 - 8.5, 4.25, 8.5, 3, 6)
    # Two microbatches with half of the tokens each
    two = dataclasses.replace(cost, microbatches=2)
    halves = 2 * (4 + 4), 2 * 0.25 + 4, 2 * 0.5 + 8
    pipeline = max(halves[0], 4 * 0.25 + 4 + halves[0] / 2), max(halves[0], 4 * 0.5 + 8 + halves[0] / 2)
    whole = [2 * (2 + 4) + computing for computing in halves[1:]]
    expected = sum(min(pair) - computing for *pair, computing in zip(pipeline, whole, halves[1:], strict=True))
    assert two.layer_time(COUNTS_DE, GUEST)[:3] == (expected, *halves[1:])
    slow = dataclasses.replace(with_latencies(100.0), degrees=(1, 2, 4))
    assert slow.layer_time(COUNTS_DE, GUEST) == with_latencies(100.0).layer_time(COUNTS_DE, GUEST)


@given(
    st.floats(0, 100),
    st.floats(0, 100),
    st.sampled_from([0.0, 0.1, 10.0]),
    st.sampled_from([0.0, 0.1, 10.0]),
    st.lists(st.integers(2, 8), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_chunks_take_as_long_as_the_best_pipeline(
    exchanging: float, computed: float, latency: float, overhead: float, degrees: list[int], microbatches: int
) -> None:
    plain = dataclasses.replace(with_latencies(latency, overhead, 2 * overhead), microbatches=microbatches)
    chunked = dataclasses.replace(plain, degrees=(1, *degrees))
    total = chunked.time_of(exchanging, computed, 0.0, 0.0).total
    assert total <= plain.time_of(exchanging, computed, 0.0, 0.0).total * (1 + 1e-9) + 1e-9
    best = []
    for times in (1, 2):
        found = [
            pipeline(
                degree,
                latency + exchanging / microbatches / degree,
                times * (overhead + computed / microbatches / degree),
            )
            for degree in (1, *degrees)
        ]
        best.append(microbatches * min(found))
    assert total == pytest.approx(sum(best))


def pipeline(degree: int, exchange: float, computing: float) -> float:
    """Return when the last of `degree` chunks has been combined: one resource exchanges, another one computes."""
    arrived = [exchange * (chunk + 1) for chunk in range(degree)]
    link = arrived[-1]
    computed = 0.0
    done = []
    for at in arrived:
        computed = max(computed, at) + computing
        done.append(computed)
    for at in done:
        link = max(link, at) + exchange
    return link


def test_a_rank_of_half_speed_counts_twice() -> None:
    slow = dataclasses.replace(COST, profile=dataclasses.replace(COST.profile, rates=(1.5, 0.5, 1.0)))
    # Tokens computed 5, 2, 2: seconds at the mean rate are 10 / 3, 4 and 2
    assert slow.layer_time(COUNTS_DE, PLAIN) == (4 * 3 * 2, 4, 8, 0, 0)
    # Tokens computed 3, 4, 2
    assert slow.layer_time(COUNTS_DE, GUEST)[1:3] == (8, 16)


def test_codecs_count_their_bytes_and_their_seconds() -> None:
    coded = dataclasses.replace(COST, token_bytes=1, coding=0.25)
    # The busiest rank receives 3 tokens, which take 0.5 s each on the link and 0.25 s in the codec
    assert coded.layer_time(COUNTS_DE, PLAIN) == (4 * 3 * 0.75, 5, 10, 0, 0)
    assert dataclasses.replace(coded, coding=0.0).layer_time(COUNTS_DE, PLAIN).all_to_all == 4 * 3 * 0.5


def test_a_copy_within_a_node_takes_its_nodes_link_though_the_group_spans_nodes() -> None:
    cost = dataclasses.replace(COST, profile=profile(node_size=2, num_ranks=4))
    owners = Placement.identity(4, 4, 1)
    near, far = (cost.sending(owners.with_hosts([(0, rank)])) for rank in (1, 2))
    assert (near.trans, near.agg) == (6 * 0.5, 12 * 0.5)
    assert (far.trans, far.agg) == (6 * 2, 12 * 2)
    single = dataclasses.replace(COST, profile=profile(node_size=4, num_ranks=4))
    assert near == single.sending(owners.with_hosts([(0, 1)]))


def test_tokens_to_other_nodes_take_longer() -> None:
    cost = dataclasses.replace(COST, profile=profile(node_size=2))
    # Rank 2 sends two tokens to the other node. In the even exchange, it would send one byte in 2 s, not in 1 s
    assert cost.profile.link("all_to_all").beta == 1 and cost.work(COUNTS_DE, PLAIN)[0] == 2 * 4 * 2 / 2


@given(st.data(), st.sampled_from(sorted(SPLITS)), st.integers(1, 6))
def test_no_token_is_lost(data: st.DataObject, split: str, size: int) -> None:
    placement = data.draw(any_placements())
    counts_DE = data.draw(any_loads(placement, 100)).numpy()
    traffic_DD = traffic_of(split, counts_DE, placement, size)
    assert (traffic_DD >= -1e-9).all()
    assert traffic_DD.sum(1) == pytest.approx(counts_DE.sum(1))
    for expert in range(placement.num_experts):
        alone_DE = np.zeros_like(counts_DE)
        alone_DE[:, expert] = counts_DE[:, expert]
        away = np.delete(traffic_of(split, alone_DE, placement, size).sum(0), sorted(set(placement.hosts[expert])))
        assert away == pytest.approx(0)


def test_proportional_split_fills_what_hosts_have_left() -> None:
    placement = Placement.identity(2, 2, 1).with_hosts([(0, 1)])
    # Expert 0 has 8 tokens and two hosts for 4 each: rank 0 keeps 4 of its 6, rank 1 keeps its 2 and receives 2
    assert traffic_of("proportional", np.array([[6, 0], [2, 0]]), placement, 2).tolist() == [[4, 2], [0, 2]]


def test_metrics() -> None:
    assert balance_ratio(np.array([6, 2, 1])) == 2
    assert balance_ratio(np.zeros(3)) == 1
    assert balance_ratio(np.array([[4, 0], [0, 4]])) == 2
    assert balance_ratio(np.array([[4, 0], [2, 2]])) == 1.5
    assert balance_gain(np.array([0, 4]), np.array([1, 3])) == 2
    assert balance_gain(np.array([0, 4]), np.array([2, 2])) == float("inf")
    assert balance_gain(np.array([2, 2]), np.array([2, 2])) == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("split", "x", "--balance-token-split x"), ("microbatches", 0, "microbatches 0")],
)
def test_fields_are_checked(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(COST, **{field: value})
