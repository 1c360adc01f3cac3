"""Seconds of Trans and Agg: hand-computed, against a slow reference, and against lower bounds."""

import dataclasses
import itertools
import pickle
from collections import Counter
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.core import (
    LEAST_ALPHA,
    MOST_PIECES,
    SendingLine,
    SendingPrices,
    few_batches_each,
)
from megatron_balance.cost.model import CostModel, Overlap
from megatron_balance.cost.sending import MOST_STAGED, SendingModel
from megatron_balance.device.compiled import packed
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import EMPTY_PLAN, ROUTES, ExpertPiece, TransPlan, hops, plan_hops
from megatron_balance.profile.cluster_profile import LEVELS, ROUNDS, ClusterProfile, Fit, Throughput, from_links
from tests.unit.placements import placements, random_placement

SPEED = Throughput(1.0, 0.0, 0.0, 0.0)


def profile(num_ranks: int, node_size: int, near: Fit, far: Fit | None = None, adapters: float = 64) -> ClusterProfile:
    """Return a profile of links; `adapters` ranks of a node send to other nodes at full rate at the same time."""
    far = far or near
    shared = far._replace(beta=far.beta * max(1.0, node_size / adapters))
    return from_links(num_ranks, node_size, near, far, shared=shared, forward=SPEED, backward=SPEED)


def line(alpha: float, beta: float) -> Fit:
    return Fit(alpha, beta, 0.0, 0.0)


def one_to_all(num_ranks: int) -> Placement:
    return Placement.identity(num_ranks, num_ranks, 1).with_hosts((0, rank) for rank in range(1, num_ranks))


def chosen(latencies: float, num_ranks: int, in_parts: bool = False) -> tuple[str, int]:
    """Return route and pieces for an expert on all ranks that takes `latencies` times a message's latency to send."""
    model = SendingModel(profile(num_ranks, 8, line(1.0, latencies / 100)), 100, 300, in_parts)
    return model.best(one_to_all(num_ranks))[:2]


def test_routes_and_pieces_follow_size_and_ranks() -> None:
    assert chosen(1000, 2) == ("direct", 1), "one link has nothing to gain"
    assert chosen(0.5, 3) == ("direct", 1), "two messages are faster than a second batch"
    assert chosen(6, 4) == ("exchanged", 2), "guests share the work of sending"
    assert chosen(1000, 4)[1] > chosen(20, 4)[1] > 1, "pieces of large experts"


def test_where_ranks_share_an_adapter_an_expert_enters_a_node_once() -> None:
    links = profile(16, 4, line(1.0, 0.01), line(1.0, 1.0), adapters=1)
    placement = Placement.identity(16, 16, 1).with_hosts((0, rank) for rank in range(4, 16))
    found = SendingModel(links, 1e4, 1e4, in_parts=False).best(placement)
    assert found.route == "by node" and found.pieces > 1
    free = profile(16, 4, line(1.0, 0.01), line(1.0, 1.0), adapters=4)
    assert SendingModel(free, 1e4, 1e4, in_parts=False).best(placement).route in ("exchanged", "by node")


def test_launches_keep_batches_few() -> None:
    links = profile(8, 8, line(1.0, 0.25))
    slow = dataclasses.replace(links, launches=dict.fromkeys(ROUNDS, dict.fromkeys(LEVELS, line(50.0, 0.0))))
    models = [SendingModel(some, 400, 400, in_parts=False) for some in (links, slow)]
    quick, few = (len(model.plan(one_to_all(8)).rounds) for model in models)
    assert few == 2 < quick


@pytest.mark.parametrize("alpha", [0.0, 1e-9])
def test_without_latency_pieces_are_bounded(alpha: float) -> None:
    links = profile(3, 3, line(alpha, 1e-9))
    assert SendingModel(links, 8_000, 8_000, in_parts=False).best(one_to_all(3)).pieces <= MOST_PIECES


@given(st.floats(0.1, 1e4), st.integers(2, 16))
def test_in_two_parts_a_large_expert_has_rounds_to_split(latencies: float, num_ranks: int) -> None:
    model = SendingModel(profile(num_ranks, 8, line(1.0, latencies / 100)), 100, 300, in_parts=True)
    rounds = len(model.plan(one_to_all(num_ranks)).rounds)
    assert rounds >= (2 if latencies >= 8 else 1)
    # Over a single link, a piece still takes four times the latency
    assert chosen(latencies, 2, in_parts=True) == ("direct", 2 if latencies >= 8 else 1)


def test_gradients_that_arrive_at_once_are_bounded() -> None:
    # Ten experts of 1 GB in one batch would take 10 GB of memory
    model = SendingModel(profile(11, 11, line(10.0, 1e-9)), 1e6, 1e9, in_parts=False)
    plan = model.plan(Placement.identity(110, 11, 1).with_hosts((index, index + 1) for index in range(10)))
    for messages in plan.rounds:
        arriving = Counter[int]()
        for message in messages:
            arriving[message.source] += 1e9 / message.pieces
        assert max(arriving.values()) <= MOST_STAGED


def test_trans_takes_its_rounds() -> None:
    cost = CostModel(profile(3, 3, line(1.0, 0.25)), token_bytes=4, param_bytes=100, grad_bytes=300)
    placement = Placement.identity(3, 3, 2).with_hosts([(0, 1), (0, 2)])
    plan = cost.transport.plan(placement)
    # Two parts for two guests. In three pieces, guests exchange one while they receive the next: 25 s for an expert,
    # 4 batches of 1 to 1.05 s for the owner's two messages or a guest's three
    assert (len(plan.rounds), {message.pieces for messages in plan.rounds for message in messages}) == (4, {6})
    first = (25 / 3, 1.0)
    middle = (25 / 3, 1.05)
    last = (25 / 6, 1.0)
    trans = sum(first) + 2 * sum(middle) + sum(last)
    assert cost.sending(placement)[:3] == ("exchanged", 3, pytest.approx(trans))
    seconds = [ends[-1] for ends in cost.transport.progress(plan)]
    assert seconds == pytest.approx([trans, trans + 2 * 25 * 7 / 6])
    assert cost.layer_time(np.zeros((3, 3)), placement)[3:] == pytest.approx(seconds)
    assert cost.transport.plan(Placement.identity(3, 3, 2)) == EMPTY_PLAN


FOUR = SendingModel(profile(4, 2, line(0.0, 1.0), line(0.0, 3.0)), 10, 20, in_parts=False)
OWNERS = Placement.identity(4, 4, 4)


@pytest.mark.parametrize(
    ("adapters", "additions", "seconds"),
    [
        (2, [(0, 1)], 10),
        (2, [(0, 2)], 30),
        # Two ranks of a node send to the other node: at the same time, or through one adapter
        (2, [(0, 2), (1, 3)], 30),
        (1, [(0, 2), (1, 3)], 60),
        (1, [(0, 2), (2, 1)], 30),
        # Two ranks receive from one, and one rank from two
        (2, [(0, 2), (1, 2)], 60),
        (1, [(0, 1), (2, 3)], 10),
    ],
)
def test_hops_between_nodes_take_longer_and_share_adapters(adapters: int, additions: list, seconds: float) -> None:
    links = profile(4, 2, line(0.0, 1.0), line(0.0, 3.0), adapters)
    model = dataclasses.replace(FOUR, profile=links)
    placement = OWNERS.with_hosts(additions)
    assert model.far == 3 and model.network.adapters == adapters
    found = model.best(placement)
    assert (found.trans, found.agg) == (seconds, 2 * seconds)
    assert [ends[-1] for ends in model.progress(model.plan(placement))] == [seconds, 2 * seconds]


def test_messages_of_different_rounds_share_adapters() -> None:
    model = dataclasses.replace(FOUR, profile=profile(6, 3, line(0.0, 1.0), line(0.0, 3.0), adapters=1))
    plan = TransPlan.of(((ExpertPiece(0, 0, 3, 0), ExpertPiece(1, 1, 2, 0)), (ExpertPiece(1, 2, 4, 0),)))
    # From second 10 on, rank 2 sends to the node to which rank 0 sends for 30 s
    assert model.progress(plan)[0].tolist() == [30, 60]
    alone = dataclasses.replace(FOUR, profile=profile(6, 3, line(0.0, 1.0), line(0.0, 3.0), adapters=3))
    assert alone.progress(plan)[0].tolist() == [30, 40]


@pytest.mark.parametrize(("one_way", "seconds"), [(1.0, 20), (0.5, 5 + 10), (0.75, 7.5 + 10)])
def test_fewer_messages_than_ranks_may_be_faster(one_way: float, seconds: float) -> None:
    links = profile(2, 2, line(0.0, 1.0), line(0.0, 1.0), 2)
    faster = {group: fit._replace(beta=one_way * fit.beta) for group, fit in links.links["p2p"].items()}
    model = dataclasses.replace(FOUR, profile=dataclasses.replace(links, links={**links.links, "one_way": faster}))
    plan = TransPlan.of(((ExpertPiece(0, 0, 1, 0),), (ExpertPiece(1, 0, 1, 0), ExpertPiece(2, 1, 0, 0))))
    assert model.progress(plan)[0][-1] == seconds


def test_messages_of_one_batch_share_their_rank() -> None:
    model = dataclasses.replace(FOUR, profile=profile(4, 2, line(4.0, 1.0), line(8.0, 3.0)))
    # Rank 0 sends two messages within its node and one to the other
    plan = TransPlan.of(((ExpertPiece(0, 0, 1, 0), ExpertPiece(1, 0, 1, 0), ExpertPiece(0, 0, 2, 0)),))
    launch = 0.9 * 8 + 2 * 0.05 * 4 + 0.05 * 8
    assert model.progress(plan)[0].tolist() == pytest.approx([max(launch, 8) + 30])
    near = TransPlan.of((plan.rounds[0][:2],))
    assert model.progress(near)[0].tolist() == pytest.approx([max(0.9 * 4 + 2 * 0.05 * 4, 4) + 20])


def reference(model: SendingModel, plan: TransPlan, kind: str, size: float, backward: bool) -> list[Fraction]:
    """Return `SendingModel.progress` rank by rank, in exact numbers."""
    lines = [model.profile.link(kind, level) for level in LEVELS]
    launches = [model.profile.launches[kind][level] for level in LEVELS]
    node_size = model.profile.node_size
    first = model.profile.starts[kind]
    free: dict[int, Fraction] = {}
    carried: dict[tuple[int, int], Fraction] = {}
    ends = []
    for messages in plan.rounds[::-1] if backward else plan.rounds:
        pairs = [(message.target, message.source) if backward else message[1:3] for message in messages]
        sizes = [Fraction(size) / message.pieces for message in messages]
        is_far = [source // node_size != target // node_size for source, target in pairs]
        starts = [max(free.get(rank, Fraction(first)) for rank in pair) for pair in pairs]

        sent = list(zip(sizes, pairs, is_far, strict=True))

        def busy(rank: int, level: int, sent=sent) -> Fraction:
            ways = [[size for size, pair, far in sent if pair[way] == rank and far == level] for way in (0, 1)]
            return Fraction(lines[level].beta) * max(sum(way, Fraction(0)) for way in ways)

        def latency(rank: int, pairs=pairs, is_far=is_far, messages=messages) -> Fraction:
            levels = [f for p, f in zip(pairs, is_far, strict=True) if rank in p]
            alone = max(Fraction(lines[level].alpha) for level in levels)
            launch = max(Fraction(launches[level].alpha) for level in levels)
            each = sum(Fraction(launches[level].beta) for level in levels)
            cuts = sum(
                Fraction(launches[f].beta) * (model.profile.tensors - 1) / message.pieces
                for p, f, message in zip(pairs, is_far, messages, strict=True)
                if rank in p
            )
            return max(alone, launch + each) + cuts

        for way in (0, 1):
            for node in {pair[way] // node_size for pair, f in zip(pairs, is_far, strict=True) if f}:
                using = [i for i, pair in enumerate(pairs) if is_far[i] and pair[way] // node_size == node]
                seconds = Fraction(lines[1].beta) * sum(sizes[i] for i in using) / Fraction(model.network.adapters)
                begin = min(starts[i] for i in using)
                carried[way, node] = max(carried.get((way, node), Fraction(0)), begin) + seconds
        ended = []
        for pair, start, f in zip(pairs, starts, is_far, strict=True):
            end = start + max(busy(rank, f) for rank in pair)
            if f:
                end = max(end, *(carried[way, pair[way] // node_size] for way in (0, 1)))
            ended.append(end + max(map(latency, pair)))
        for pair, end in zip(pairs, ended, strict=True):
            for rank in pair:
                free[rank] = max(free.get(rank, Fraction(0)), end)
        ends.append(max(free.values()))
    return ends


sizes = st.integers(1, 6)

adapter_numbers = st.sampled_from([1.0, 1.5, 6.0])

crowded = st.builds(random_placement, st.just(18), st.sampled_from([6, 9]), st.just(3), st.integers(0, 2**32 - 1))
"""Placements in which many ranks of a node send to other nodes."""


@settings(max_examples=60, deadline=None)
@given(
    placements() | crowded,
    sizes,
    st.integers(1, 9),
    st.sampled_from(ROUTES),
    st.sampled_from([0.0, 2.0]),
    adapter_numbers,
    st.sampled_from([1, 4]),
)
def test_progress_is_that_of_single_messages(
    placement: Placement, node_size: int, pieces: int, route: str, alpha: float, adapters: float, tensors: int
) -> None:
    links = profile(placement.num_ranks, node_size, line(alpha, 1.0), line(2 * alpha, 3.0), adapters)
    links = dataclasses.replace(links, tensors=tensors, starts={"trans": 5.0 * (tensors - 1), "agg": 1.0})
    model = SendingModel(links, 40, 70, in_parts=False)
    plan = plan_hops(hops(placement, node_size, route), pieces)
    for found, kind, size, backward in zip(
        model.progress(plan), ("trans", "agg"), (40, 70), (False, True), strict=True
    ):
        expected = [float(end) for end in reference(model, plan, kind, size, backward)]
        assert found.tolist() == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(placements(), sizes, st.floats(0, 1e4), st.sampled_from([1.0, 4.0]), st.floats(1, 6), st.booleans())
def test_no_choice_is_slower_than_any_other(
    placement: Placement, node_size: int, latencies: float, far: float, adapters: float, in_parts: bool
) -> None:
    near = line(1.0, latencies / 100)
    links = profile(placement.num_ranks, node_size, near, line(far * near.alpha, far * near.beta), adapters)
    model = SendingModel(links, 100, 300, in_parts)
    found = model.best(placement)
    plan = model.plan(placement)
    if not placement.added_hosts:
        assert found.trans == found.agg == 0 and plan == EMPTY_PLAN
        return
    trans, agg = (ends[-1] for ends in model.progress(plan))
    for route, pieces in itertools.product(ROUTES, (1, 2, 4, 16)):
        other = plan_hops(hops(placement, node_size, route), pieces)
        if len(other.rounds) >= model.least_rounds:
            # The choice always considers one piece; among larger numbers, it is only close to the best
            assert found.trans <= 1.1 * barriers(model, other)
    # Ranks begin a batch when they and their peers can, and not when all can
    assert trans <= found.trans * (1 + 1e-9) and agg <= found.agg * (1 + 1e-9)
    assert found.trans == pytest.approx(barriers(model, plan))


@given(placements(), st.integers(1, 4), st.sampled_from([0.1, 100.0]), st.booleans())
def test_who_follows_another_rank_sends_the_same_messages(
    placement: Placement, node_size: int, latencies: float, in_parts: bool
) -> None:
    links = profile(placement.num_ranks, node_size, line(1.0, latencies / 100), line(2.0, latencies / 20))
    leader, follower = (SendingModel(links, 100, 300, in_parts) for _ in range(2))
    copied = pickle.loads(pickle.dumps(placement))
    follower.follow(copied, leader.best(placement))
    with mock.patch.object(SendingModel, "_fastest", side_effect=AssertionError("it searches again")):
        assert follower.plan(copied) == leader.plan(placement)
        assert follower.best(copied) == leader.best(placement)


def barriers(model: SendingModel, plan: TransPlan) -> float:
    """Return the seconds of Trans if all ranks begin and end every round together."""
    return sum(float(model.progress(TransPlan.of((messages,)))[0][-1]) for messages in plan.rounds)


@settings(deadline=None)
@given(placements(), sizes, st.floats(0, 100))
def test_rounds_within_fit(placement: Placement, node_size: int, seconds: float) -> None:
    links = profile(placement.num_ranks, node_size, line(0.5, 0.25), line(1.0, 0.75), adapters=1)
    model = SendingModel(links, 40, 70, in_parts=True)
    plan = model.plan(placement)
    trans, agg = model.progress(plan)
    last, first = model.rounds_beside(plan, (seconds, seconds))
    rounds = len(plan.rounds)
    # Trans: the time from the end of the earlier rounds to its end; Agg: the end of these rounds
    taken = [trans[-1] - (trans[rounds - count - 1] if count < rounds else 0.0) for count in range(1, rounds + 1)]
    assert last == sum(value <= seconds for value in taken) and first == (agg <= seconds).sum()
    assert all(value > seconds for value in taken[last:]) and all(value <= seconds for value in taken[:last])
    assert model.rounds_beside(plan, (float("inf"), 0.0)) == (rounds, 0)


def test_two_parts_of_a_cost_model() -> None:
    cost = CostModel(profile(2, 2, line(1.0, 1.0)), token_bytes=4, param_bytes=100, grad_bytes=100)
    assert not cost.transport.in_parts
    assert dataclasses.replace(cost, overlap=Overlap(1.0, 1.0)).transport.in_parts


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), max_size=5),
    st.lists(st.floats(0, 100), min_size=14, max_size=14),
    st.sampled_from([0.5, 1.0, 7.0]),
    st.integers(1, 2),
)
def test_estimates_of_few_batches_are_those_of_their_description(
    pairs: list[tuple[float, float]], numbers: list[float], far: float, least_rounds: int
) -> None:
    lines = SendingLine(*numbers[:7]), SendingLine(*numbers[7:])
    prices = packed(SendingPrices(*lines, far, least_rounds))
    found = few_batches_each(*np.array(pairs).reshape(-1, 2).T, prices)
    for index, (busy, extra) in enumerate(pairs):
        # Links between nodes, if the busiest rank's time has room for an expert there
        is_far = far > 1 and busy >= far * (1 - 1e-9)
        expected = []
        for near_alpha, near_beta, far_alpha, far_beta, size, messages, start in lines:
            alpha = [near_alpha, far_alpha][is_far] + messages * extra
            last = size * (far_beta if extra >= far else near_beta * min(extra, 1))
            pieces = float(np.clip(round((last / max(alpha, LEAST_ALPHA)) ** 0.5), 1, MOST_PIECES))
            batches = (pieces if extra else 1) + (extra > 0 or least_rounds > 1)
            sending = busy * size * (far_beta / far if is_far else near_beta)
            expected.append(start + alpha * batches + sending + last / pieces if busy else 0.0)
        assert [part[index] for part in found] == pytest.approx(expected)
