"""Moves of tokens that level ranks: within rooms and slots, as a slow search makes them, and each prefix is a plan."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.planning.fit import (
    BUSIEST,
    FILLING,
    ORDERS,
    PARTS,
    WHOLE,
    Overload,
    TokenMoves,
    fit,
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


def fitted(*arguments: list, **options: Any) -> TokenMoves:
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


def moves_of(found: TokenMoves) -> list[Move]:
    return [Move(*fields) for fields in zip(*map(np.ndarray.tolist, found), strict=True)]


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
) -> list[Move]:
    """Search all ranks before each move."""
    left = [{expert: size for size, expert in row} for row in experts]
    loads = [*loads]
    slots = [*slots]
    ranks = range(len(loads))
    stuck = set[int]()
    moves = list[Move]()

    def excess(rank: int) -> int:
        return loads[rank] - capacities[rank]

    source = -1
    expert = -1
    while True:
        waiting = [rank for rank in ranks if excess(rank) > 0 and rank not in stuck]
        if not waiting:
            return moves
        stays = order == WHOLE and source in waiting
        source = source if stays else max(waiting, key=lambda rank: (excess(rank), rank))
        if not stays or expert not in left[source]:
            _, expert = max(((size, expert) for expert, size in left[source].items()), default=(0, 0))
        size = left[source].get(expert, 0)
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
        if order == WHOLE and -excess(target) >= wanted:
            whole = [rank for rank in (near if chosen == source // node_size else able) if -excess(rank) >= wanted]
            target = min(whole, key=lambda rank: (-excess(rank), -(rank // node_size), rank))
        moved = min(wanted, -excess(target))
        moves.append(Move(expert, source, target, moved))
        left[source][expert] -= moved
        if not left[source][expert]:
            del left[source][expert]
        loads[source], loads[target], slots[target] = loads[source] - moved, loads[target] + moved, slots[target] - 1


@given(cases())
def test_fit_is_the_reference(case: dict) -> None:
    assert moves_of(fitted(**case)) == reference(**case)


@given(cases())
def test_moves_stay_within_what_ranks_have(case: dict) -> None:
    found = fitted(**case)
    left = {expert: size for row in case["experts"] for size, expert in row}
    loads = [*case["loads"]]
    guests = Counter()
    for expert, source, target, tokens in moves_of(found):
        assert tokens > 0 and source != target
        assert case["reaches_far"] or source // case["node_size"] == target // case["node_size"]
        left[expert] -= tokens
        loads[source] -= tokens
        loads[target] += tokens
        guests[target] += 1
        assert loads[target] <= case["capacities"][target]
    assert min(left.values(), default=0) >= 0
    assert all(guests[rank] <= slots for rank, slots in enumerate(case["slots"]))


def level(sizes: list[list[int]], capacity: int, slots: int, **options: int) -> TokenMoves:
    """Fit experts of these sizes to equal ranks of one node."""
    numbers = iter(range(100))
    experts = [sorted((size, next(numbers)) for size in row) for row in sizes]
    ranks = len(sizes)
    return fitted(experts, [*map(sum, sizes)], [capacity] * ranks, [slots] * ranks, node_size=ranks, **options)


def test_the_busiest_rank_comes_first() -> None:
    found = level([[60, 40], [70, 10], [10, 10], [20, 20]], 60, 2)
    # Ranks 0 and 1 have 100 and 80 tokens, ranks 2 and 3 room for 40 and 20
    assert moves_of(found) == [Move(0, 0, 2, 40), Move(2, 1, 3, 20)]


def test_filling_receivers_needs_fewer_slots() -> None:
    # With one slot, rank 3 takes the excess of one rank only, unless it is filled and that rank takes the other's
    sizes = [[50, 12], [40, 21], [50, 7], [10, 10]]
    is_level = []
    for order in (BUSIEST, FILLING):
        loads = [*map(sum, sizes)]
        for move in moves_of(level(sizes, 51, 1, order=order)):
            loads[move.source] -= move.tokens
            loads[move.target] += move.tokens
        is_level.append(max(loads) <= 51)
    assert is_level == [False, True]


def test_a_whole_excess_is_of_few_experts() -> None:
    # Rank 0 has 60 tokens too many: 50 of expert 0, although expert 1 is larger after the first 30
    sizes = [[50, 40], [0], [0], [0]]
    moves = [moves_of(level(sizes, 30, 1, order=order)) for order in (BUSIEST, WHOLE)]
    assert moves == [
        [Move(0, 0, 3, 30), Move(1, 0, 2, 30)],
        [Move(0, 0, 3, 30), Move(0, 0, 1, 20), Move(1, 0, 2, 10)],
    ]


@pytest.mark.parametrize(("far", "target"), [(1.5, 2), (3.0, 1)])
def test_a_guest_on_another_node_has_to_take_more_for_its_cost(far: float, target: int) -> None:
    # Room for 10 tokens on the same node, for 20 on the other one
    found = fitted([[(40, 0)], [], [], []], [40, 10, 0, 20], [20] * 4, [1] * 4, node_size=2, far=far)
    assert found.target_M[0] == target
