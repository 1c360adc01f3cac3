"""The greedy search of `planning/leveling.py` in plain Python, on lists."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_balance.planning.leveling import ALL_NODES, NEAR, ROUNDING


class Move(NamedTuple):
    """An expert that gets guests."""

    expert: int
    guests: list[int]
    primary: int
    """The owner, or the only guest."""


class Ranks(NamedTuple):
    """What ranks can do."""

    rates: Sequence[float]
    free: Sequence[int]
    """Number of free guest slots."""
    nodes: Sequence[Sequence[int]]
    """The ranks of each node."""
    node_of: Sequence[int]
    """The node of each rank."""


def slow_level(
    ranks: Ranks,
    experts: Sequence[Sequence[tuple[float, int]]],
    loads: Sequence[float],
    busiest: float,
    *,
    reach: int,
    tokens: Sequence[Sequence[float]] = (),
) -> list[Move]:
    """Return moves in order, until no rank is above its limit or those that are have no other experts.

    Args:
        experts: [D] pairs (tokens, expert) of the experts that get guests if need be, ascending.
        loads: [D] tokens that each rank computes.
        busiest: tokens that a rank of rate 1 may compute.
        reach: ANYWHERE, ALL_NODES or NEAR.
        tokens: [E][D] tokens of each rank: a guest computes its own, as under `local_first`. Without them, all hosts
            compute equally many.
    """
    rates = ranks.rates
    waiting = [[*row] for row in experts]
    moves = list[Move]()
    rooms = [busiest * rate - load for rate, load in zip(rates, loads, strict=True)]
    free = [*ranks.free]
    while True:
        excess, owner = min((room / rates[rank], rank) for rank, room in enumerate(rooms))
        if excess >= 0:
            break
        size, expert = waiting[owner].pop() if waiting[owner] else (0.0, owner)
        if size <= 0:
            # The rank stays the heaviest
            break
        kept = size + rooms[owner]
        if kept * len(rooms) < size:
            # The owner's other experts alone exceed the limit: all of them are reduced alike
            kept = size * busiest / (busiest - excess)
        chosen = _candidates(ranks, rooms, free, owner, reach)
        if tokens:
            guests, primary, given = _local(*chosen, rooms, owner, size, kept, tokens[expert])
        else:
            guests, primary, given = _even(*chosen, rooms, owner, size, kept)
        for rank, amount in zip(guests, given, strict=True):
            free[rank] -= 1
            rooms[rank] -= amount
        rooms[owner] += sum(given)
        if guests:
            moves.append(Move(expert, guests, primary))
    return moves


def _candidates(
    ranks: Ranks, rooms: Sequence[float], free: Sequence[int], owner: int, reach: int
) -> tuple[list[int], int]:
    """Return the ranks that may take an expert, in order, and the least number that should."""
    home = ranks.node_of[owner]
    some = ranks.nodes[home] if reach == NEAR else range(len(free))
    # The owner's room is below 0
    able = [rank for rank in some if rooms[rank] > 0 and free[rank]]
    able.sort(key=rooms.__getitem__, reverse=True)
    if reach != ALL_NODES:
        return able, 1
    seen = {home}
    first = list[int]()
    others = list[int]()
    for rank in able:
        node = ranks.node_of[rank]
        (others if node in seen else first).append(rank)
        seen.add(node)
    return first + others, max(1, len(first))


Chosen = tuple[list[int], int, list[float]]
"""Guests, the primary, and the tokens that each guest computes."""


def _even(able: list[int], least: int, rooms: Sequence[float], owner: int, size: float, kept: float) -> Chosen:
    """Choose the fewest guests with room for equal shares, or those whose room is exceeded least.

    Args:
        kept: tokens that the owner may keep.
    """
    most = kept - size
    number = 0
    smallest = kept
    for count, rank in enumerate(able, start=1):
        smallest = min(smallest, rooms[rank])
        if smallest <= most:
            break
        slack = smallest - size / (count + 1)
        if count >= least and slack > most:
            most = slack
            number = count
            if slack >= -ROUNDING * size:
                break
    return able[:number], owner, [size / (number + 1)] * number


def _local(
    able: list[int],
    least: int,
    rooms: Sequence[float],
    owner: int,
    size: float,
    kept: float,
    tokens: Sequence[float],
) -> Chosen:
    """Choose the fewest guests that compute their own tokens, or one guest that computes all but the owner's.

    The former are the ranks with most of the expert's tokens.
    """
    given = list[float]()
    guests = list[int]()
    holders = [rank for rank in able if 0 < tokens[rank] <= rooms[rank]]
    left = size
    for rank in sorted(holders, key=tokens.__getitem__, reverse=True):
        if left <= kept + ROUNDING * size and len(guests) >= least:
            break
        guests.append(rank)
        given.append(tokens[rank])
        left -= tokens[rank]
    lent = size - tokens[owner]
    if able and left > kept + ROUNDING * size:
        lightest = max(able, key=rooms.__getitem__)
        if max(lent - rooms[lightest], size - lent - kept) < left - kept:
            return [lightest], lightest, [lent]
    return guests, owner, given
