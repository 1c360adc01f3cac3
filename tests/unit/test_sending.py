"""Seconds of Trans and Agg: hand-computed, against a slow reference, and against lower bounds."""

import dataclasses
import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.batches import MOST_PIECES
from megatron_balance.cost.model import CostModel, Overlap
from megatron_balance.cost.sending import FANOUTS, WORTHWHILE, SendingModel
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.transfers import LinkLoads, Message, TransferPlan, plan_transfers, routes
from megatron_balance.profile.cluster_profile import ClusterProfile, Fit, Throughput, from_links
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


def chosen(latencies: float, num_ranks: int, in_parts: bool = False) -> tuple[int, int]:
    """Return fan-out and pieces for an expert on all ranks that takes `latencies` times a message's latency to send."""
    model = SendingModel(profile(num_ranks, 8, line(1.0, latencies / 100)), 100, 300, in_parts)
    return model.best(one_to_all(num_ranks))[:2]


def test_routes_and_pieces_follow_size_and_ranks() -> None:
    assert chosen(1000, 2) == (1, 1), "one link has nothing to gain"
    assert chosen(16, 4) == (1, round((2 * 16) ** 0.5)), "two links more to pass"
    assert chosen(1e6, 64) == (1, MOST_PIECES), "a chain for large experts"
    assert chosen(10, 64) == (2, round((6 / 2 * 10) ** 0.5)), "a tree for small ones on many ranks"
    assert chosen(0.1, 64) == (16, 1), "doubling where latency is all"


@pytest.mark.parametrize("alpha", [0.0, 1e-9])
def test_without_latency_pieces_are_bounded(alpha: float) -> None:
    model = SendingModel(profile(3, 3, line(alpha, 1e-9)), 8_000, 8_000, in_parts=False)
    # The expert takes 8 us, and the choice assumes another microsecond per piece
    assert model.best(one_to_all(3))[:2] == (1, 3)


@given(st.floats(0.1, 1e4), st.integers(2, 16))
def test_in_two_parts_a_large_expert_has_pieces_to_split_by(latencies: float, num_ranks: int) -> None:
    fanout, chunks = chosen(latencies, num_ranks)
    more = chosen(latencies, num_ranks, in_parts=True)
    assert more[1] >= min(4, max(1, int(latencies / 4)))
    assert more == (fanout, chunks) or chunks < 4
    # Over a single link, a piece still takes four times the latency
    assert chosen(latencies, 2, in_parts=True) == (1, min(4, max(1, int(latencies / 4))))


def test_a_transfer_takes_its_rounds() -> None:
    cost = CostModel(profile(3, 3, line(1.0, 0.25)), token_bytes=4, param_bytes=100, grad_bytes=300)
    placement = Placement.identity(3, 3, 2).with_hosts([(0, 1), (0, 2)])
    plan = cost.transfers(placement)
    # Five pieces over two links: 20 bytes each, and 60 bytes on the way back
    assert (plan.chunks, len(plan.rounds)) == (5, 6)
    assert cost.sending(placement) == (1, 5, 6 * (1 + 5), 6 * (1 + 15))
    assert cost.plan_seconds(plan) == (36, 96)
    time = cost.layer_time(np.zeros((3, 3)), placement)
    assert (time.trans, time.agg) == (36, 96)
    assert cost.plan_seconds(cost.transfers(Placement.identity(3, 3, 2))) == (0, 0)


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
    model, placement = dataclasses.replace(FOUR, profile=links), OWNERS.with_hosts(additions)
    assert model.far == 3 and model.network.adapters == adapters
    found = model.best(placement)
    assert (found.trans, found.agg) == (seconds, 2 * seconds)
    assert [ends[-1] for ends in model.progress(model.plan(placement))] == [seconds, 2 * seconds]


def test_messages_of_different_rounds_share_adapters() -> None:
    model = dataclasses.replace(FOUR, profile=profile(6, 3, line(0.0, 1.0), line(0.0, 3.0), adapters=1))
    plan = TransferPlan(((Message(0, 0, 3, 0), Message(1, 1, 2, 0)), (Message(1, 2, 4, 0),)), chunks=1)
    # From second 10 on, rank 2 sends to the node to which rank 0 sends for 30 s
    assert model.progress(plan)[0].tolist() == [30, 60]
    alone = dataclasses.replace(FOUR, profile=profile(6, 3, line(0.0, 1.0), line(0.0, 3.0), adapters=3))
    assert alone.progress(plan)[0].tolist() == [30, 40]


@pytest.mark.parametrize(("one_way", "seconds"), [(1.0, 20), (0.5, 5 + 10), (0.75, 7.5 + 10)])
def test_fewer_messages_than_ranks_may_be_faster(one_way: float, seconds: float) -> None:
    links = profile(2, 2, line(0.0, 1.0), line(0.0, 1.0), 2)
    faster = {group: fit._replace(beta=one_way * fit.beta) for group, fit in links.links["p2p"].items()}
    model = dataclasses.replace(FOUR, profile=dataclasses.replace(links, links={**links.links, "one_way": faster}))
    plan = TransferPlan(((Message(0, 0, 1, 0),), (Message(1, 0, 1, 0), Message(2, 1, 0, 0))), chunks=1)
    assert model.progress(plan)[0][-1] == seconds


def reference(model: SendingModel, plan: TransferPlan, kind: str, size: float, backward: bool) -> list[Fraction]:
    """Return `SendingModel.progress` message by message, in exact numbers."""
    near, far = (model.profile.link(kind, level) for level in ("intra", "inter"))
    piece, node_size = Fraction(size) / plan.chunks, model.profile.node_size
    free: dict[int, Fraction] = {}
    carried: dict[tuple[str, int], Fraction] = {}
    ends = []
    for messages in plan.rounds[::-1] if backward else plan.rounds:
        pairs = [(message.target, message.source) if backward else message[1:3] for message in messages]
        starts = [max(free.get(rank, Fraction(0)) for rank in pair) for pair in pairs]
        far_pairs = [pair for pair in pairs if pair[0] // node_size != pair[1] // node_size]
        adapter_seconds = Fraction(far.beta) * piece / Fraction(model.network.adapters)
        for way, index in (("sends", 0), ("receives", 1)):
            for node in {pair[index] // node_size for pair in far_pairs}:
                using = [pair for pair in far_pairs if pair[index] // node_size == node]
                begin = min(starts[pairs.index(pair)] for pair in using)
                carried[way, node] = max(carried.get((way, node), Fraction(0)), begin) + len(using) * adapter_seconds
        for pair, start in zip(pairs, starts, strict=True):
            source, target = pair
            if pair in far_pairs:
                busy = max(carried["sends", source // node_size], carried["receives", target // node_size])
                end = Fraction(far.alpha) + max(start + Fraction(far.beta) * piece, busy)
            else:
                end = start + Fraction(near.alpha) + Fraction(near.beta) * piece
            free[source], free[target] = (max(free.get(rank, Fraction(0)), end) for rank in pair)
        ends.append(max(free.values()))
    return ends


sizes = st.integers(1, 6)

adapter_numbers = st.sampled_from([1.0, 1.5, 6.0])

crowded = st.builds(random_placement, st.just(18), st.sampled_from([6, 9]), st.just(3), st.integers(0, 2**32 - 1))
"""Placements in which many ranks of a node send to other nodes."""


@settings(max_examples=60, deadline=None)
@given(
    placements() | crowded, sizes, st.integers(1, 9), st.integers(1, 4), st.sampled_from([0.0, 2.0]), adapter_numbers
)
def test_progress_is_that_of_single_messages(
    placement: Placement, node_size: int, chunks: int, fanout: int, alpha: float, adapters: float
) -> None:
    links = profile(placement.num_ranks, node_size, line(alpha, 1.0), line(2 * alpha, 3.0), adapters)
    model = SendingModel(links, 40, 70, in_parts=False)
    plan = plan_transfers(placement, node_size, chunks, fanout, model.far)
    for found, kind, size, backward in zip(
        model.progress(plan), ("trans", "agg"), (40, 70), (False, True), strict=True
    ):
        expected = [float(end) for end in reference(model, plan, kind, size, backward)]
        assert found.tolist() == pytest.approx(expected)


@settings(max_examples=100, deadline=None)
@given(
    placements() | crowded,
    sizes,
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([0.5, 1.0, 4.0]),
    adapter_numbers,
)
def test_link_loads_are_a_lower_bound_of_progress(
    placement: Placement, node_size: int, chunks: int, fanout: int, far: float, adapters: float
) -> None:
    """Without latencies, links take far times as long for pieces of all sizes."""
    links = profile(placement.num_ranks, node_size, line(0.0, 1.0), line(0.0, far), adapters)
    model = SendingModel(links, 40, 70, in_parts=False)
    loads = LinkLoads(placement.num_ranks, node_size, model.network.adapters)
    for route in routes(placement, node_size, fanout, model.far).values():
        loads.add(route)
    least = max((busy * chunks + extra for busy, extra in loads.lines), default=0.0)
    plan = plan_transfers(placement, node_size, chunks, fanout, model.far)
    for ends, seconds in zip(
        model.progress(plan), (model.trans_seconds(least, chunks), model.agg_seconds(least, chunks)), strict=True
    ):
        assert seconds <= (ends[-1] if len(ends) else 0.0) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(placements(), sizes, st.floats(0, 1e4), st.sampled_from([1.0, 4.0]), st.floats(1, 6))
def test_no_choice_is_slower_than_any_other(
    placement: Placement, node_size: int, latencies: float, far: float, adapters: float
) -> None:
    near = line(1.0, latencies / 100)
    links = profile(placement.num_ranks, node_size, near, line(far * near.alpha, far * near.beta), adapters)
    model = SendingModel(links, 100, 300, in_parts=False)
    found = model.best(placement)
    assert model.plan(placement) == plan_transfers(placement, node_size, found.chunks, found.fanout, model.far)
    for fanout, chunks in itertools.product(FANOUTS, (1, 2, 4, 16)):
        loads = LinkLoads(placement.num_ranks, node_size, model.network.adapters)
        for route in routes(placement, node_size, fanout, model.far).values():
            loads.add(route)
        least = max((busy * chunks + extra for busy, extra in loads.lines), default=0.0)
        # The choice always considers one piece; among larger numbers, it is only close to the best
        close = WORTHWHILE * (1.1 if chunks > 1 else 1)
        assert found.trans <= model.trans_seconds(least, chunks) * close * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(placements(), sizes, st.sampled_from([0.5, 1.0, 4.0]), st.floats(1, 6))
def test_all_chains_at_once_are_single_chains(
    placement: Placement, node_size: int, far: float, adapters: float
) -> None:
    links = profile(placement.num_ranks, node_size, line(0.0, 1.0), line(0.0, far), adapters)
    model = SendingModel(links, 40, 70, in_parts=False)
    found = routes(placement, node_size, 1, model.far).values()
    if not found:
        return
    loads = LinkLoads(placement.num_ranks, node_size, model.network.adapters)
    for route in found:
        loads.add(route)
    lines, received = model.chains(placement)
    for chunks in (0, 1, 2, 16, 1000):
        assert (lines @ [chunks, 1]).max() == pytest.approx(max(busy * chunks + extra for busy, extra in loads.lines))
    into = np.zeros(placement.num_ranks)
    for link in itertools.chain.from_iterable(found):
        into[link.target] += link.time
    assert received == pytest.approx(into.max())


@settings(deadline=None)
@given(placements(), sizes, st.floats(0, 100))
def test_rounds_within_fit(placement: Placement, node_size: int, seconds: float) -> None:
    links = profile(placement.num_ranks, node_size, line(0.5, 0.25), line(1.0, 0.75), adapters=1)
    model = SendingModel(links, 40, 70, in_parts=True)
    plan = model.plan(placement)
    trans, agg = model.progress(plan)
    last, first = (model.rounds_within(plan, seconds, forward=forward) for forward in (True, False))
    rounds = len(plan.rounds)
    # Trans: the time from the end of the earlier rounds to its end; Agg: the end of these rounds
    taken = [trans[-1] - (trans[rounds - count - 1] if count < rounds else 0.0) for count in range(1, rounds + 1)]
    assert last == sum(value <= seconds for value in taken) and first == (agg <= seconds).sum()
    assert all(value > seconds for value in taken[last:]) and all(value <= seconds for value in taken[:last])
    assert model.rounds_within(plan, float("inf"), forward=True) == rounds


def test_two_parts_of_a_cost_model() -> None:
    cost = CostModel(profile(2, 2, line(1.0, 1.0)), token_bytes=4, param_bytes=100, grad_bytes=100)
    assert not cost.transport.in_parts
    assert dataclasses.replace(cost, overlap=Overlap(1.0, 1.0)).transport.in_parts
