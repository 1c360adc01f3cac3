"""Moves of tokens that level ranks: within rooms and slots, as a slow search makes them, and each prefix is a plan."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.core import SendingLine, SendingPrices, few_batches_each
from megatron_balance.device.compiled import packed
from megatron_balance.planning.fit import (
    BUSIEST,
    FILLING,
    LEAST_FIRST,
    ORDERS,
    PARTS,
    WHOLE,
    Fitted,
    Overload,
    cheapest,
    fit,
    sending_times,
)


class Move(NamedTuple):
    expert: int
    source: int
    target: int
    tokens: int


@st.composite
def cases(draw: st.DrawFn) -> dict:
    """Draw arguments of `fitted`."""
    ranks = draw(st.integers(1, 7))
    per_rank = draw(st.integers(1, 4))
    tokens = draw(st.lists(st.integers(0, 200), min_size=ranks * per_rank, max_size=ranks * per_rank))
    experts = [
        sorted((tokens[expert], expert) for expert in range(rank * per_rank, (rank + 1) * per_rank) if tokens[expert])
        for rank in range(ranks)
    ]
    staying = draw(st.lists(st.integers(0, 50), min_size=ranks, max_size=ranks))
    loads = [sum(size for size, _ in row) + more for row, more in zip(experts, staying, strict=True)]
    mean = -(-sum(loads) // ranks)
    return {
        "experts": experts,
        "loads": loads,
        "capacities": [mean + draw(st.integers(0, 20)) for _ in loads],
        "slots": draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)),
        "node_size": draw(st.integers(1, ranks)),
        "far": draw(st.sampled_from([1.0, 1.51, 8.0])),
        "reaches_far": draw(st.booleans()),
        "order": draw(st.sampled_from(ORDERS)),
    }


def fitted(*arguments: list, **options: Any) -> Fitted:
    """Return `fit` for pairs (tokens, expert), loads, capacities and slots of each rank."""
    return fit(overload(*arguments, **options), options.get("order", BUSIEST))


def overload(
    experts: list[list[tuple[int, int]]],
    loads: list[int],
    capacities: list[int],
    slots: list[int],
    *,
    node_size: int,
    far: float = 1.0,
    reaches_far: bool = True,
    order: int = BUSIEST,
) -> Overload:
    above_D = np.array(loads) - np.array(capacities)
    return Overload(*arrays(experts), above_D, np.array(slots), node_size, round(far * PARTS) if reaches_far else 0)


def moves_of(fitted: Fitted) -> list[Move]:
    return [Move(*fields) for fields in zip(*map(np.ndarray.tolist, fitted.moves), strict=True)]


def arrays(experts: list[list[tuple[int, int]]]) -> tuple[np.ndarray, ...]:
    """Return tokens [D, S] and experts [D, S]."""
    pairs_DS2 = np.zeros((len(experts), max(1, *map(len, experts)), 2), np.int64)
    for rank, row in enumerate(experts):
        # Any order of a rank's experts, and gaps between them
        pairs_DS2[rank, : -len(row) - 1 : -1] = np.array(row).reshape(-1, 2)
    return tuple(np.ascontiguousarray(part) for part in np.moveaxis(pairs_DS2, 2, 0))


def reference(
    experts: list[list[tuple[int, int]]],
    loads: list[int],
    capacities: list[int],
    slots: list[int],
    *,
    node_size: int,
    far: float,
    reaches_far: bool,
    order: int,
) -> tuple[list[Move], list[int]]:
    """Search all ranks before each move; also return the excess of the busiest rank."""
    left = [{expert: size for size, expert in row} for row in experts]
    loads = [*loads]
    slots = [*slots]
    ranks = range(len(loads))
    stuck = set[int]()
    moves = list[Move]()

    def excess(rank: int) -> int:
        return loads[rank] - capacities[rank]

    excesses = [max(map(excess, ranks))]
    source = -1
    while True:
        waiting = [rank for rank in ranks if excess(rank) > 0 and rank not in stuck]
        if not waiting:
            return moves, excesses
        if order == LEAST_FIRST:
            source = min(waiting, key=lambda rank: (excess(rank), rank))
        elif order != WHOLE or source not in waiting:
            source = max(waiting, key=lambda rank: (excess(rank), rank))
        size, expert = max(((size, expert) for expert, size in left[source].items()), default=(0, 0))
        wanted = size if order == FILLING else min(size, excess(source))
        able = [rank for rank in ranks if excess(rank) < 0 and slots[rank]]
        near = [rank for rank in able if rank // node_size == source // node_size]
        # Of the nodes, the one with the most room, the first of equals; of its ranks, the last of equals
        nodes = {rank // node_size for rank in able}
        most = {node: max(-excess(rank) for rank in able if rank // node_size == node) for node in nodes}
        chosen = source // node_size
        here = min(wanted, most.get(chosen, 0))
        if reaches_far and most and here < wanted:
            roomiest = min(node for node in nodes if most[node] == max(most.values()))
            if min(wanted, most[roomiest]) * PARTS > here * round(far * PARTS):
                chosen = roomiest
        near = [rank for rank in able if rank // node_size == chosen]
        if not wanted or not near:
            stuck.add(source)
            continue
        target = max(near, key=lambda rank: (-excess(rank), rank))
        if order in (LEAST_FIRST, WHOLE) and -excess(target) >= wanted:
            whole = [rank for rank in (near if chosen == source // node_size else able) if -excess(rank) >= wanted]
            target = min(whole, key=lambda rank: (-excess(rank), -(rank // node_size), rank))
        moved = min(wanted, -excess(target))
        moves.append(Move(expert, source, target, moved))
        left[source][expert] -= moved
        if not left[source][expert]:
            del left[source][expert]
        loads[source], loads[target], slots[target] = loads[source] - moved, loads[target] + moved, slots[target] - 1
        excesses.append(max(map(excess, ranks)))


@given(cases())
def test_fit_is_the_reference(case: dict) -> None:
    found, (moves, excesses) = fitted(**case), reference(**case)
    assert moves_of(found) == moves
    # Below capacity, only the sign counts
    assert found.excess.clip(0).tolist() == [max(0, excess) for excess in excesses]


@given(cases())
def test_moves_stay_within_what_ranks_have(case: dict) -> None:
    found = fitted(**case)
    left = {expert: size for row in case["experts"] for size, expert in row}
    loads = [*case["loads"]]
    guests = Counter()
    for index, (expert, source, target, tokens) in enumerate(moves_of(found)):
        assert tokens > 0 and source != target
        assert case["reaches_far"] or source // case["node_size"] == target // case["node_size"]
        left[expert] -= tokens
        loads[source] -= tokens
        loads[target] += tokens
        guests[target] += 1
        assert loads[target] <= case["capacities"][target]
        over = max(load - capacity for load, capacity in zip(loads, case["capacities"], strict=True))
        assert max(0, over) == max(0, found.excess[index + 1]) <= max(0, found.excess[index])
    assert min(left.values(), default=0) >= 0
    assert all(guests[rank] <= slots for rank, slots in enumerate(case["slots"]))
    assert found.fits == all(load <= capacity for load, capacity in zip(loads, case["capacities"], strict=True))


def level(sizes: list[list[int]], capacity: int, slots: int, **options: int) -> Fitted:
    """Fit experts of these sizes to equal ranks of one node."""
    numbers = iter(range(100))
    experts = [sorted((size, next(numbers)) for size in row) for row in sizes]
    ranks = len(sizes)
    return fitted(experts, [*map(sum, sizes)], [capacity] * ranks, [slots] * ranks, node_size=ranks, **options)


def test_the_busiest_rank_comes_first() -> None:
    found = level([[60, 40], [70, 10], [10, 10], [20, 20]], 60, 2)
    # Ranks 0 and 1 have 100 and 80 tokens, ranks 2 and 3 room for 40 and 20
    assert moves_of(found) == [Move(0, 0, 2, 40), Move(2, 1, 3, 20)]
    assert found.excess.tolist() == [40, 20, 0]


def test_filling_receivers_needs_fewer_slots() -> None:
    # With one slot, rank 3 takes the excess of one rank only, unless it is filled and that rank takes the other's
    sizes = [[50, 12], [40, 21], [50, 7], [10, 10]]
    assert [level(sizes, 51, 1, order=order).fits for order in (BUSIEST, FILLING)] == [False, True]


@pytest.mark.parametrize(("far", "target"), [(1.5, 2), (3.0, 1)])
def test_a_guest_on_another_node_has_to_take_more_for_its_cost(far: float, target: int) -> None:
    # Room for 10 tokens on the same node, for 20 on the other one
    found = fitted([[(40, 0)], [], [], []], [40, 10, 0, 20], [20] * 4, [1] * 4, node_size=2, far=far)
    assert found.moves.target_M[0] == target


@given(st.data(), st.integers(1, 9), st.integers(1, 4), st.sampled_from([1.0, 1.51, 8.0]))
def test_sending_times_grow_guest_by_guest(data: st.DataObject, ranks: int, node_size: int, far: float) -> None:
    owner_E = np.array(data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=6)))
    places = st.tuples(st.integers(0, len(owner_E) - 1), st.integers(0, ranks - 1))
    pairs = data.draw(st.lists(places, max_size=20, unique=True))
    expert_M, rank_M = np.array(pairs, np.int64).reshape(-1, 2).T.copy()
    busiest, extras = sending_times(expert_M, rank_M, owner_E, ranks, node_size, far)
    for number in range(len(pairs) + 1):
        times_D = [0.0] * ranks
        sent = dict[int, list[float]]()
        for expert, rank in pairs[:number]:
            owner = int(owner_E[expert])
            time = 1.0 if owner // node_size == rank // node_size else far
            times_D[rank] += time
            times_D[owner] += 0.0 if expert in sent else time
            sent.setdefault(expert, []).append(time)
        extra = max((sum(times) - max(times) for times in sent.values()), default=0.0)
        assert [busiest[number], extras[number]] == pytest.approx([max(times_D), extra])


@given(cases(), st.floats(0, 1), st.booleans(), st.integers(1, 3))
def test_the_cheapest_moves_are_those_that_are_sent_soonest(case: dict, part: float, free: bool, rounds: int) -> None:
    """Guests that are sent anyway are the first half of a fit's moves."""
    case, size = {**case, "reaches_far": True, "far": 4.0}, case["node_size"]
    first = fitted(**{**case, "order": BUSIEST}).moves
    given = first.first(len(first.expert_M) // 2)
    start = first.first(round(part * len(first.expert_M)))
    owner_E = np.zeros(1 + max((expert for row in case["experts"] for _, expert in row), default=0), np.int64)
    for rank, row in enumerate(case["experts"]):
        owner_E[[expert for _, expert in row]] = rank
    negligible = 10.0
    line = SendingLine(*([0.0] * 7 if free else [1.0, 2.0, 3.0, 8.0, 1.0, 0.5, 4.0]))
    prices = packed(SendingPrices(line, line, 4.0, rounds))
    best = start
    least = np.inf
    fits = [fitted(**{**case, "order": order}) for order in ORDERS]
    for moves in (start, *(each.moves for each in fits if each.fits)):
        expert_M = np.concatenate([given.expert_M, moves.expert_M])
        rank_M = np.concatenate([given.target_M, moves.target_M])
        busiest, extras = sending_times(expert_M, rank_M, owner_E, len(case["loads"]), size, 4.0)
        seconds = float(np.sum(few_batches_each(busiest[-1:], extras[-1:], prices)))
        fewer = len(moves.expert_M) < len(best.expert_M)
        if seconds < least - negligible or (fewer and seconds <= least + negligible):
            best = moves
            least = seconds
    found = cheapest(start, overload(**case), given.expert_M, given.target_M, owner_E, prices, negligible)
    assert [part_M.tolist() for part_M in found] == [part_M.tolist() for part_M in best]
