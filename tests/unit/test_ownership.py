"""Which guests become owners, and what has to be sent for that."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.comm.ownership import Extent, Place, plan_messages
from megatron_balance.placement.cost_model import CostModel, Overlap
from megatron_balance.placement.ownership import lasting, moves, settle
from megatron_balance.placement.placement import Placement
from megatron_balance.profile.cluster_profile import builtin
from tests.unit.placements import loads, placements

MIB = 2**20


def cost_model(num_ranks: int, state_bytes: float = 3 * MIB) -> CostModel:
    return CostModel(builtin(num_ranks, 2, 64, 64), 128, MIB, MIB, state_bytes=state_bytes)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Placement, np.ndarray, dict[tuple[int, int], int]]:
    placement = draw(placements())
    counts_DE = draw(loads(placement, 10**4)).numpy()
    held = {guest: draw(st.integers(0, 50)) for guest in lasting({}, placement)}
    return placement, counts_DE, held


@settings(deadline=None)
@given(cases())
def test_what_is_settled_pays(case: tuple[Placement, np.ndarray, dict]) -> None:
    placement, counts_DE, held = case
    cost = cost_model(placement.num_ranks)
    after, settlement = settle(placement, counts_DE, held, cost)
    assert (after, settlement) == settle(placement, counts_DE, held, cost)
    changed = moves(placement, after)
    assert bool(changed) == bool(settlement.exchanges) == (after.home != placement.home)
    if not changed:
        assert after == placement
        return
    saved = cost.layer_seconds(counts_DE, placement) - cost.layer_seconds(counts_DE, after)
    seconds = cost.transfer_seconds((move.source, move.target) for move in changed)
    lifetime = min(held[exchange.experts[0], exchange.ranks[1]] for exchange in settlement.exchanges)
    assert settlement.saved_seconds == pytest.approx(saved)
    assert (settlement.transfer_seconds, settlement.lifetime) == (pytest.approx(seconds), lifetime)
    assert lifetime * saved > seconds
    assert after.added_hosts < placement.added_hosts
    # Slots stay as they are wherever owners do
    assert {expert for move in changed for expert in [move.expert]} <= {
        expert for exchange in settlement.exchanges for expert in exchange.experts
    }


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
    """Expert 0, of rank 0, is computed by rank 1, which has an expert without tokens."""
    placement = Placement.identity(4, 2, 1).rehost([(1,), (0,), (1,), (1,)])
    counts_DE = np.array([[90, 90, 80, 0], [90, 90, 80, 0]])
    return settle(placement, counts_DE, {(0, 1): iterations}, cost)


def test_lending_goes_on_until_it_has_cost_as_much_as_a_transfer() -> None:
    cost = cost_model(2)
    line = cost.profile.link("p2p")
    lending = cost.trans_seconds(1, 1) + cost.agg_seconds(1, 1)
    transfer = line.alpha + line.beta * cost.state_bytes
    enough = int(transfer / lending) + 1
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
    """Each rank lends to the next: no single exchange saves anything, because the slowest link decides."""
    placement = Placement.identity(4, 4, 1).rehost([(1,), (2,), (3,), (0,)])
    after, settlement = settle(placement, np.full((4, 4), 10), dict.fromkeys(lasting({}, placement), 9), cost_model(4))
    assert str(after) == "3 + . | 0 + . | 1 + . | 2 + ." and len(settlement.exchanges) == 3


def test_iterations_of_guests_that_stay_are_counted() -> None:
    first = Placement.identity(4, 2, 2).rehost([(1,), (0,), (1,), (0,)])
    second = Placement.identity(4, 2, 2).rehost([(1,), (1,), (1,), (1,)])
    held = lasting(lasting({}, first), first)
    assert held == {(0, 1): 2, (3, 0): 2}
    assert lasting(held, second) == {(0, 1): 3, (1, 1): 1}


@st.composite
def shardings(draw: st.DrawFn) -> tuple[list[Place], list[list[Extent]], int, int]:
    """Ranks whose replicas keep a whole tensor each, and one between them, in pieces of any size."""
    num_ranks, replicas, slots, size = draw(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 9))
    )
    total = slots * size
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=replicas - 1, max_size=replicas - 1)))
    shards = list(zip([0, *cuts], [*cuts, total], strict=True))
    order = draw(st.permutations([(rank, replica) for rank in range(num_ranks) for replica in range(replicas)]))
    places = [Place(*pair) for pair in order]
    extents = [[Extent(size, (0, total), 2), Extent(size, shards[place.replica], 4)] for place in places]
    return places, extents, num_ranks, slots


@given(shardings(), st.data())
def test_every_rank_gets_what_it_is_to_keep(case: tuple, data: st.DataObject) -> None:
    places, extents, num_ranks, slots = case
    order = data.draw(st.permutations(range(num_ranks * slots)))
    before = Placement.identity(num_ranks * slots, num_ranks)
    home = tuple(tuple(order[rank * slots : (rank + 1) * slots]) for rank in range(num_ranks))
    after = _owned(before, home)

    def contents(placement: Placement) -> list[list[torch.Tensor]]:
        """What every rank keeps: each element names its expert and its place in the slot."""
        kept = []
        for place, fields in zip(places, extents, strict=True):
            whole = [
                torch.tensor(
                    [100 * expert + element for expert in placement.home[place.rank] for element in range(size)]
                )
                for size, *_ in fields
            ]
            kept.append([tensor[slice(*field.kept)] for tensor, field in zip(whole, fields, strict=True)])
        return kept

    old, result, sent = contents(before), contents(before), 0
    for message in plan_messages(moves(before, after), places, extents):
        source, target = extents[message.source][message.field], extents[message.target][message.field]
        start, stop = (element - source.kept[0] for element in message.taken)
        put = message.put - target.kept[0]
        assert 0 <= start < stop and put >= 0
        result[message.target][message.field][put : put + stop - start] = old[message.source][message.field][start:stop]
        assert message.num_bytes == (stop - start) * source.itemsize
        sent += message.num_bytes
    for found, wanted in zip(result, contents(after), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    replicas = len(places) // num_ranks
    size = extents[0][0].slot_size
    assert sent == len(moves(before, after)) * size * (2 * replicas + 4), "nothing is sent twice"


def _owned(placement: Placement, home: tuple[tuple[int, ...], ...]) -> Placement:
    owners = [next(rank for rank, row in enumerate(home) if expert in row) for expert in range(placement.num_experts)]
    return placement.rehost([(owner,) for owner in owners], owners, home)
