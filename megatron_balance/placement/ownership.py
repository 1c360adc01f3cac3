"""Lend or Transfer: which guests become owners.

An expert that is a guest costs Trans and Agg in every iteration (a lend); its owner could be another rank, which costs
the way of its parameters and optimizer state, once (a Transfer). Home slots are as many as experts, so that owners are
exchanged in pairs.

Shape suffixes: D expert-parallel ranks, E logical experts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_balance.placement.cost_model import CostModel
from megatron_balance.placement.placement import EMPTY, Placement

BUDGET = 100
"""Placements that one plan may time, which bounds how long planning takes at any size."""

Guest = tuple[int, int]
"""(expert, rank)."""


class Move(NamedTuple):
    """An expert that gets another home slot."""

    expert: int
    source: int
    source_slot: int
    target: int
    target_slot: int


class Swap(NamedTuple):
    """Two experts whose owners change places."""

    experts: tuple[int, int]
    """The guest that is to be owned where it is computed, and the expert that gives it its home slot."""

    ranks: tuple[int, int]
    """The owners of both, before."""


@dataclass(frozen=True)
class Settlement:
    """Exchanges, one after the other, and why; none: owners stay."""

    exchanges: tuple[Swap, ...] = ()

    saved_seconds: float = 0.0
    """Of the layer, in each iteration with the present load."""

    lifetime: int = 0
    """Iterations for which the load is expected to stay as it is."""

    transfer_seconds: float = 0.0

    @property
    def gain(self) -> float:
        """Seconds over the lifetime."""
        return self.lifetime * self.saved_seconds - self.transfer_seconds

    def __str__(self) -> str:
        pairs = ", ".join(
            f"{expert} (rank {source}) and {other} (rank {target})"
            for (expert, other), (source, target) in self.exchanges
        )
        return (
            f"experts exchange owners: {pairs}; saves {self.saved_seconds * 1e3:.3g} ms in each of {self.lifetime} "
            f"expected iterations for {self.transfer_seconds * 1e3:.3g} ms"
        )


def moves(before: Placement, after: Placement) -> tuple[Move, ...]:
    """The experts whose home slot differs, ascending."""
    places = [
        {expert: (rank, slot) for rank, row in enumerate(placement.home) for slot, expert in enumerate(row)}
        for placement in (before, after)
    ]
    changed = [expert for expert in range(before.num_experts) if places[0][expert] != places[1][expert]]
    return tuple(Move(expert, *places[0][expert], *places[1][expert]) for expert in changed)


def lasting(held: Mapping[Guest, int], placement: Placement) -> dict[Guest, int]:
    """For how many iterations each of the placement's guests has been there, after one more."""
    guests = [(expert, rank) for rank, row in enumerate(placement.guests) for expert in row if expert != EMPTY]
    return {guest: held.get(guest, 0) + 1 for guest in guests}


def settle(
    placement: Placement, counts_DE: np.ndarray, held: Mapping[Guest, int], cost: CostModel
) -> tuple[Placement, Settlement]:
    """The placement with owners exchanged, as far as that pays.

    A guest is expected to stay for as many iterations as it has been there. Then a Transfer comes when lending has
    cost as much as it: whatever the load does next, both together cost at most twice what the better of the two would
    have cost alone, had one known (ski rental). Each exchange leaves fewer guests and no more seconds; as the slowest
    link decides, several may be needed before any seconds are saved.

    Args:
        counts_DE: [D, E] the load that the placement is for.
        held: iterations for which guests have been where they are.
    """
    time = cost.layer_time(counts_DE, placement)
    best, settled, reached = Settlement(), placement, Settlement()
    start, seconds, budget = placement, time.total, BUDGET
    # No exchange saves more than all of Trans and Agg, or is cheaper than one
    if max(held.values(), default=0) * (time.trans + time.agg) <= cost.transfer_seconds([(0, 0)]):
        return settled, best
    while budget > 0:
        found: tuple[float, int, Swap, Placement] | None = None
        for exchange, candidate in _candidates(placement, counts_DE, held):
            if (budget := budget - 1) < 0:
                break
            key = cost.layer_seconds(counts_DE, candidate), candidate.added_hosts
            if key[0] <= seconds and (found is None or key < found[:2]):
                found = *key, exchange, candidate
        if found is None:
            break
        seconds, _, exchange, placement = found
        guest = exchange.experts[0], exchange.ranks[1]
        reached = Settlement(
            (*reached.exchanges, exchange),
            time.total - seconds,
            min(held[guest], reached.lifetime or held[guest]),
            cost.transfer_seconds((move.source, move.target) for move in moves(start, placement)),
        )
        if reached.gain > best.gain:
            best, settled = reached, placement
    return settled, best


def _candidates(
    placement: Placement, counts_DE: np.ndarray, held: Mapping[Guest, int]
) -> Iterator[tuple[Swap, Placement]]:
    """Exchanges that leave fewer guests: guests that have stayed longest first, with experts that have few tokens."""
    tokens_E = counts_DE.sum(0)
    guests = [guest for guest, iterations in held.items() if iterations and guest[0] in placement.guests[guest[1]]]
    for expert, target in sorted(guests, key=lambda guest: (-held[guest], guest)):
        for other in sorted(placement.home[target], key=lambda other: (tokens_E[other], other)):
            exchange = Swap((expert, other), (placement.owner(expert), target))
            for candidate in _exchanged(placement, exchange):
                if candidate.added_hosts < placement.added_hosts:
                    yield exchange, candidate


def _exchanged(placement: Placement, exchange: Swap) -> Iterator[Placement]:
    """The placement with the two experts' owners exchanged: who gave up its slot is computed by its owner as before,
    or else by those who computed it; nothing where guest slots do not suffice."""
    (expert, other), (source, target) = exchange.experts, exchange.ranks
    swap = {expert: other, other: expert}
    home = tuple(tuple(swap.get(each, each) for each in row) for row in placement.home)
    follows = [source if rank == target else rank for rank in placement.hosts[other]]
    for ranks in dict.fromkeys((tuple(sorted(follows)), placement.hosts[other])):
        hosts = [*placement.hosts]
        hosts[other] = ranks
        owners = {expert: target, other: source}
        wanted = [
            sum(rank in hosts[each] and owners.get(each, placement.owner(each)) != rank for each in range(len(hosts)))
            for rank in exchange.ranks
        ]
        if max(wanted) <= placement.guest_slots:
            primary = [*placement.primary]
            primary[other] = primary[other] if primary[other] in ranks else source
            yield placement.rehost(hosts, primary, home)
