"""The fastest sending in compiled code: that of a reference that lays out all messages."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.sending import NOTHING, SendingModel
from megatron_balance.placement.placement import Placement
from megatron_balance.profile.cluster_profile import LEVELS, ROUNDS, Fit, Throughput, from_links
from tests.unit.placements import placements, random_placement
from tests.unit.slow_sending import routes

SPEED = Throughput(1.0, 0.0, 0.0, 0.0)


@st.composite
def sending_models(draw: st.DrawFn, ranks: int) -> SendingModel:
    """Draw links, launches, tensors and experts of all sizes."""
    number = st.sampled_from([0.0, 1e-6, 1e-3, 0.1])
    # Without latency, all numbers of pieces would be equally fast, up to rounding
    latency = st.sampled_from([1e-6, 1e-3, 0.1])
    lines = st.builds(Fit, latency, number, st.just(0.0), st.just(0.0))
    profile = from_links(
        ranks, draw(st.integers(1, ranks)), draw(lines), draw(lines), shared=draw(lines), forward=SPEED, backward=SPEED
    )
    half = {level: line._replace(beta=0.6 * line.beta) for level, line in profile.links["p2p"].items()}
    one_way = draw(st.sampled_from([profile.links["p2p"], half]))
    launches = {kind: {level: draw(lines) for level in LEVELS} for kind in ROUNDS}
    profile = dataclasses.replace(
        profile,
        links={**profile.links, "one_way": {level: one_way[level] for level in LEVELS}},
        launches=launches,
        starts=dict.fromkeys(ROUNDS, draw(number)),
        tensors=draw(st.integers(1, 3)),
    )
    sizes = st.sampled_from([1.0, 100.0, 1e6, 1e9])
    return SendingModel(profile, draw(sizes), draw(sizes), in_parts=draw(st.booleans()))


def check(model: SendingModel, placement: Placement) -> None:
    best = model.best(placement)
    if not placement.added_hosts:
        assert best == NOTHING
        return
    found = {sending.route: sending for sending in routes(model, placement)}
    assert best.trans == pytest.approx(min(sending.trans for sending in found.values()), rel=1e-9)
    # Rounding decides between numbers of pieces that are equally fast, and between such routes
    assert best.trans == pytest.approx(found[best.route].trans, rel=1e-9)
    if best.pieces == found[best.route].pieces:
        assert best.agg == pytest.approx(found[best.route].agg, rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.data(), placements())
def test_small_placements(data: st.DataObject, placement: Placement) -> None:
    model = data.draw(sending_models(placement.num_ranks))
    check(model, placement)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(0, 10**6), st.integers(6, 20), st.integers(1, 6))
def test_experts_with_many_guests(data: st.DataObject, seed: int, ranks: int, slots: int) -> None:
    model = data.draw(sending_models(ranks))
    placement = random_placement(ranks, ranks, min(slots, ranks - 1), seed)
    check(model, placement)
