"""Which experts change owners, and the messages that this requires."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.comm.ownership_transfer import (
    ALIGNMENT,
    Extent,
    Message,
    Place,
    _Round,
    plan_messages,
    plan_rounds,
)
from megatron_balance.cost.model import CostModel, Overlap
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS
from megatron_balance.planning.manager import Manager
from megatron_balance.planning.ownership import MOST_SWAPS, Move, Swap, _swaps, exchanged, lasting, moves, settle
from megatron_balance.planning.policies import load_policy
from megatron_balance.planning.predictor import Predictor
from megatron_balance.profile.cluster import Ranks, profile_of, read
from megatron_balance.profile.cluster_profile import builtin
from tests.unit.ownership_cases import Case, draw_case, equal
from tests.unit.placements import UNSHRUNK, loads, placements

MIB = 2**20


def cost_model(num_ranks: int, state_bytes: float = 3 * MIB, **options: object) -> CostModel:
    return CostModel(
        builtin(num_ranks, 2, 64, 64),
        token_bytes=128,
        param_bytes=MIB,
        grad_bytes=MIB,
        state_bytes=state_bytes,
        **options,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Placement, np.ndarray, dict[tuple[int, int], int], dict[int, int], CostModel]:
    """Draw a placement, its load in one or two microbatches, how long guests stayed and experts were wanted."""
    placement = draw(placements())
    counts_BDE = np.stack([draw(loads(placement, 10**4)).numpy() for _ in range(draw(st.integers(1, 2)))])
    held = {guest: draw(st.integers(0, 50)) for guest in lasting({}, placement)}
    ages = {expert: draw(st.integers(0, 50)) for expert in range(placement.num_experts)}
    split, state_bytes = draw(st.sampled_from(sorted(SPLITS))), draw(st.sampled_from([0.0, 3.0 * MIB]))
    cost = cost_model(placement.num_ranks, state_bytes, split=split, microbatches=len(counts_BDE))
    return placement, counts_BDE, held, ages, cost


@UNSHRUNK
@given(cases())
def test_what_is_settled_pays(case: tuple[Placement, np.ndarray, dict, dict, CostModel]) -> None:
    placement, counts_BDE, held, ages, cost = case
    settled = settle(placement, counts_BDE, held, cost, ages)
    assert settled == settle(placement, counts_BDE.copy(), dict(held), cost, dict(ages))
    after, settlement, wanted = settled
    changed = moves(placement, after)
    assert bool(changed) == bool(settlement.exchanges) == (after.home != placement.home)
    assert sorted(expert for row in after.home for expert in row) == list(range(placement.num_experts))
    assert {len(row) for row in after.home} == {placement.home_slots}
    if not changed:
        assert after == placement
        return
    saved = cost.layer_seconds(counts_BDE, placement) - cost.layer_seconds(counts_BDE, after)
    seconds = cost.transfer_seconds((move.source, move.target) for move in changed)
    lifetimes = [
        held.get((exchange.experts[0], exchange.ranks[1]), 0) or ages[exchange.experts[0]] + 1
        for exchange in settlement.exchanges
    ]
    assert settlement.saved_seconds == pytest.approx(saved)
    assert settlement.transfer_seconds == pytest.approx(seconds)
    assert settlement.lifetime <= max(lifetimes)
    assert settlement.lifetime * saved > seconds
    # Slots change only where owners change
    experts = {expert for exchange in settlement.exchanges for expert in exchange.experts}
    assert {move.expert for move in changed} <= experts
    assert wanted or after.added_hosts < placement.added_hosts


@UNSHRUNK
@given(cases())
def test_exchanges_between_owners_count_as_the_model_does(case: tuple) -> None:
    placement, counts_BDE, _, _, cost = case
    chain: list[Swap] = []
    for exchange, seconds in _swaps(placement, counts_BDE, cost):
        chain.append(exchange)
        reached = exchanged(placement, chain)
        assert seconds == pytest.approx(cost.layer_seconds(counts_BDE, reached))
        assert all(
            reached.owner(expert) == rank for expert, rank in zip(exchange.experts, exchange.ranks[::-1], strict=True)
        )
    assert len(chain) <= MOST_SWAPS


@UNSHRUNK
@given(placements(), st.data())
def test_moves_are_the_difference(placement: Placement, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(placement.num_experts)))
    slots = placement.home_slots
    home = tuple(tuple(order[rank * slots : (rank + 1) * slots]) for rank in range(placement.num_ranks))
    owners = [next(rank for rank, row in enumerate(home) if expert in row) for expert in range(len(order))]
    after = replace(
        Placement.identity(len(order), placement.num_ranks),
        home=home,
        hosts=tuple((owner,) for owner in owners),
        primary=tuple(owners),
    )
    slot_of = {(rank, slot): expert for rank, row in enumerate(placement.home) for slot, expert in enumerate(row)}
    for move in moves(placement, after):
        assert slot_of[move.source, move.source_slot] == move.expert
    changed = {(move.target, move.target_slot): move.expert for move in moves(placement, after)}
    assert slot_of | changed == {(rank, slot): e for rank, row in enumerate(home) for slot, e in enumerate(row)}


def lent(iterations: int, cost: CostModel) -> tuple:
    """Settle a placement in which rank 0 lends expert 0 to rank 1, which has an expert without tokens."""
    placement = Placement.identity(4, 2, 1).rehost([(1,), (0,), (1,), (1,)])
    counts_BDE = np.array([[[90, 90, 80, 0], [90, 90, 80, 0]]])
    return settle(placement, counts_BDE, {(0, 1): iterations}, cost)[:2]


def test_lending_goes_on_until_it_has_cost_as_much_as_a_transfer() -> None:
    cost = cost_model(2, state_bytes=30 * MIB)
    line = cost.profile.link("p2p")
    lending = cost.transport.trans_seconds(1, 1) + cost.transport.agg_seconds(1, 1)
    transfer = line.alpha + line.beta * cost.state_bytes
    enough = int(transfer / lending) + 1
    assert enough > 5
    assert lent(enough - 1, cost)[0].home == ((0, 1), (2, 3))
    after, settlement = lent(enough, cost)
    assert str(after) == "3 1 + . | 2 0 + ."
    assert str(settlement) == (
        f"experts exchange owners: 0 (rank 0) and 3 (rank 1); saves {lending * 1e3:.3g} ms in each of {enough} "
        f"expected iterations for {transfer * 1e3:.3g} ms"
    )


def test_lends_that_cost_nothing_stay() -> None:
    hidden = replace(cost_model(2), overlap=Overlap(1.0, 1.0))
    assert lent(1000, hidden)[0].home == ((0, 1), (2, 3))


def test_a_ring_is_settled_as_a_whole() -> None:
    """Each rank lends to the next; no single exchange saves time, because the slowest link decides."""
    placement = Placement.identity(4, 4, 1).rehost([(1,), (2,), (3,), (0,)])
    held = dict.fromkeys(lasting({}, placement), 9)
    after, settlement, _ = settle(placement, np.full((1, 4, 4), 10), held, cost_model(4))
    assert str(after) == "3 + . | 0 + . | 1 + . | 2 + ." and len(settlement.exchanges) == 3


MIXTRAL = 4096, 14336
"""Hidden size, and inner width of an expert with gated activation."""


def mixtral(policy: str, **options: object) -> Manager:
    """Return the manager of a layer with Mixtral's shape: 16 experts on 8 H100 GPUs of a node."""
    hidden, ffn = MIXTRAL
    weights = 3 * hidden * ffn
    cost = CostModel(
        profile_of(
            read(Path(__file__).parents[2] / "configs/clusters/h100.yaml"), Ranks(8, 8, 8), hidden, ffn * 3 // 2
        ),
        token_bytes=2 * hidden,
        param_bytes=2 * weights,
        grad_bytes=4 * weights,
        state_bytes=14 * weights,
        split=load_policy(policy).split,
    )
    owners = Placement.identity(16, 8, 1)
    return Manager(load_policy(policy), cost, Predictor(), owners, transfers=True, **options)


def warm(rank: int, extra: int) -> np.ndarray:
    """Return [1, 8, 16]: a load in which both experts of a rank are rather hot."""
    counts_BDE = np.full((1, 8, 16), 512)
    counts_BDE[..., 2 * rank : 2 * rank + 2] += extra
    return counts_BDE


class Step(NamedTuple):
    """One iteration."""

    layer: float
    """Seconds of the layer."""
    transfer: float
    """Seconds of the Transfer before it."""
    exchanges: tuple[Swap, ...]


def train(manager: Manager, loads: Sequence[np.ndarray]) -> list[Step]:
    """Run iterations with these loads, planning after each."""
    steps, transfer, exchanges = [], 0.0, ()
    for counts_BDE in loads:
        steps.append(Step(manager.cost.layer_seconds(counts_BDE, manager.placement), transfer, exchanges))
        manager.observe(counts_BDE)
        assert manager.expected_BDE is not None
        decision, before = manager.decide(manager.expected_BDE, 1), manager.placement
        assert decision.placement is not None and decision.settlement is not None
        manager.adopt(decision)
        pairs = [(move.source, move.target) for move in moves(before, manager.placement)]
        transfer, exchanges = manager.cost.transfer_seconds(pairs), decision.settlement.exchanges
    return steps


POLICIES = ("demi", "pro_prophet", "flexmoe")


@pytest.mark.parametrize("policy", POLICIES)
def test_owners_exchange_experts_that_no_lend_is_worth(policy: str) -> None:
    """An exchange saves 0.9 ms in each iteration and costs 5.5 ms, and a lend costs 2.4 ms in each iteration."""
    manager = mixtral(policy)
    owners, cost = manager.placement, manager.cost
    steps = train(manager, [warm(0, 100)] * 30)
    transfer, saved = cost.transfer_seconds([(0, 1), (1, 0)]), steps[0].layer - steps[-1].layer
    assert (transfer, saved) == (pytest.approx(5.5e-3, rel=0.01), pytest.approx(0.9e-3, rel=0.01))
    (changed,) = [number for number, step in enumerate(steps) if step.exchanges]
    # Each of the first iterations proposed it
    assert changed == math.floor(transfer / saved) + 1
    assert steps[changed].transfer == pytest.approx(transfer)
    assert manager.placement.is_identity and len(moves(owners, manager.placement)) == 2
    # For any later load, at most twice as much as never to exchange or to do so at the first proposal
    for iterations in range(2, len(steps)):
        paid = sum(step.layer - steps[-1].layer + step.transfer for step in steps[1:iterations])
        assert paid <= 2 * min(transfer, (iterations - 1) * saved) * (1 + 1e-9)
    assert sum(step.layer + step.transfer for step in steps) < len(steps) * steps[0].layer


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exchange_takes_the_place_of_a_lend(policy: str) -> None:
    """A lend pays at once, but an exchange saves what the lend costs in each iteration."""
    manager = mixtral(policy)
    steps = train(manager, [warm(0, 300)] * 12)
    assert steps[0].layer > steps[1].layer > steps[-1].layer * 1.05
    (changed,) = [number for number, step in enumerate(steps) if step.exchanges]
    saved = steps[1].layer - steps[-1].layer
    assert (changed - 1) * saved < steps[changed].transfer < (changed + 1) * saved
    assert manager.placement.is_identity


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("period", [1, 3])
def test_a_load_that_changes_leaves_owners_alone(policy: str, period: int) -> None:
    manager = mixtral(policy)
    owners = manager.placement
    train(manager, [warm(iteration // period % 3, 100) for iteration in range(24)])
    assert manager.placement == owners


def test_experts_are_exchanged_for_local_tokens_alone() -> None:
    """All ranks compute equally many tokens, most of which come from the other expert's owner."""
    counts_BDE = np.array([[[100, 900], [900, 100]]])
    after, settlement, wanted = settle(Placement.identity(2, 2, 1), counts_BDE, {}, cost_model(2), {})
    assert after == Placement.identity(2, 2, 1) and not settlement.exchanges and wanted
    (expert,) = wanted
    after, settlement, _ = settle(after, counts_BDE, {}, cost_model(2), {expert: 10**5})
    assert str(after) == "1 + . | 0 + ."
    assert settlement.saved_seconds > 0


def test_a_restored_manager_exchanges_at_the_same_iteration() -> None:
    first = mixtral("pro_prophet")
    train(first, [warm(0, 100)] * 4)
    assert first.wanted == {0: 1}
    second = mixtral("pro_prophet")
    second.restore(json.loads(json.dumps(first.state())))
    assert second.wanted == first.wanted and second.state() == first.state()
    rest = [warm(0, 100)] * 6
    assert train(second, rest) == train(first, rest)
    assert second.placement == first.placement != mixtral("pro_prophet").placement


def test_iterations_of_guests_that_stay_are_counted() -> None:
    first = Placement.identity(4, 2, 2).rehost([(1,), (0,), (1,), (0,)])
    second = Placement.identity(4, 2, 2).rehost([(1,), (1,), (1,), (1,)])
    held = lasting(lasting({}, first), first)
    assert held == {(0, 1): 2, (3, 0): 2}
    assert lasting(held, second) == {(0, 1): 3, (1, 1): 1}


@st.composite
def transfers(draw: st.DrawFn) -> Case:
    return draw_case(lambda low, high: draw(st.integers(low, high)), draw(st.integers(1, 4)), draw(st.integers(1, 3)))


@given(transfers())
def test_rounds_move_everything_once(case: Case) -> None:
    """Execute the rounds on all ranks' tensors in one place, and compare with a permutation of the whole tensors."""
    ranks = range(len(case.places))
    own, extents = [case.kept_by(rank) for rank in ranks], case.extents
    messages = plan_messages(case.moves, case.places, extents)
    for part in plan_rounds(messages, case.staging_bytes):
        packed = [own[each.source][each.field].bytes_of(each.taken, each.size).clone() for each in part]
        for each, values in zip(part, packed, strict=True):
            own[each.target][each.field].bytes_of(each.put, each.size).copy_(values)
    assert all(equal(own[rank], case.kept_by(rank, moved=True)) for rank in ranks)
    wanted = [
        max(0, min(stop, (move.target_slot + 1) * slot_size) - max(start, move.target_slot * slot_size)) * itemsize
        for move in case.moves
        for rank in ranks
        for slot_size, (start, stop), itemsize in extents[rank]
        if case.places[rank].rank == move.target
    ]
    assert sum(each.num_bytes for each in messages) == sum(wanted), "nothing is sent twice"


def staged(messages: list[Message]) -> Counter[int]:
    """Return the bytes that each rank stages for these messages."""
    return sum((Counter(dict.fromkeys((each.source, each.target), each.num_bytes)) for each in messages), Counter())


@given(transfers())
def test_rounds_are_full_and_no_more(case: Case) -> None:
    messages = plan_messages(case.moves, case.places, case.extents)
    rounds = plan_rounds(messages, case.staging_bytes)
    for part in rounds:
        rows = {(each.field, each.offset) for each in part}
        smallest = len(rows) == 1 and all(each.size == 1 for each in part)
        assert smallest or max(staged(part).values()) <= case.staging_bytes
        parts = [_Round.of(part, rank) for rank in range(len(case.places))]
        starts = [parcel.start for one in parts for parcel in (*one.leaving, *one.arriving)]
        assert all(start % ALIGNMENT == 0 for start in starts)
    for part, following in pairwise(rounds):
        field, offset = following[0].field, following[0].offset
        row = [each.cut(offset, offset + 1) for each in following if (each.field, each.offset) == (field, offset)]
        assert max((staged(part) + staged(row)).values()) > case.staging_bytes
    assert len(plan_rounds(messages, 10**6)) == bool(messages)


def test_a_window_is_as_wide_as_the_busiest_rank_allows() -> None:
    """Two experts exchange owners, and a third moves within rank 1, so rank 1 stages three values per element."""
    exchanged = (Move(0, 0, 0, 1, 0), Move(2, 1, 0, 1, 1), Move(3, 1, 1, 0, 0))
    extents = [[Extent(5, (0, 10), 2), Extent(3, (0, 6), 4)]] * 2
    messages = plan_messages(exchanged, [Place(0, 0), Place(1, 0)], extents)

    def windows(staging_bytes: int) -> list[list[tuple[int, int, int]]]:
        rounds = plan_rounds(messages, staging_bytes)
        return [sorted({(each.field, each.offset, each.offset + each.size) for each in part}) for part in rounds]

    assert windows(66) == [[(0, 0, 5), (1, 0, 3)]]
    assert windows(65) == [[(0, 0, 5), (1, 0, 2)], [(1, 2, 3)]]
    assert windows(24) == [[(0, 0, 4)], [(0, 4, 5), (1, 0, 1)], [(1, 1, 3)]]
    assert windows(1) == [[(0, each, each + 1)] for each in range(5)] + [[(1, each, each + 1)] for each in range(3)]


def test_an_offset_over_the_limit_has_a_round_of_its_own() -> None:
    """Replica 1 keeps the whole first field and replica 0 the whole second, so the fields share no rank."""
    exchanged = (Move(0, 0, 0, 0, 1), Move(1, 0, 1, 0, 0))
    nothing, everything = (0, 0), (0, 2)
    extents = [[Extent(1, nothing, 2), Extent(1, everything, 1)], [Extent(1, everything, 2), Extent(1, (2, 2), 1)]]
    rounds = plan_rounds(plan_messages(exchanged, [Place(0, 0), Place(0, 1)], extents), 2)
    assert [staged(part) for part in rounds] == [{1: 4}, {0: 2}]
