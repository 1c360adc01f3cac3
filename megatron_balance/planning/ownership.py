"""Lend or Transfer: which guests become owners.

A guest costs Trans and Agg in every iteration (a lend). Moving the expert's parameters and optimizer state to the
guest's rank costs messages once (a Transfer). Every home slot holds an expert, so owners are exchanged in pairs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import EMPTY, Placement

BUDGET = 100
"""Number of placements that one plan may time, which bounds planning time at any size."""

Guest = tuple[int, int]
"""(expert, rank)."""


class Move(NamedTuple):
    """An expert that moves to another home slot."""

    expert: int
    source: int
    source_slot: int
    target: int
    target_slot: int


class Swap(NamedTuple):
    """An exchange of owners between two experts."""

    experts: tuple[int, int]
    """The guest, which moves to the rank that computes it, and the expert whose home slot it takes."""

    ranks: tuple[int, int]
    """The owners of both before the exchange."""


@dataclass(frozen=True)
class Settlement:
    """Exchanges in order, and what they save and cost. Without exchanges, owners stay."""

    exchanges: tuple[Swap, ...] = ()

    saved_seconds: float = 0.0
    """Seconds of the layer that one iteration with the current load saves."""

    lifetime: int = 0
    """Number of iterations for which the load is expected to stay the same."""

    transfer_seconds: float = 0.0
    """Seconds that the exchanges take."""

    @property
    def gain(self) -> float:
        """Seconds saved over the lifetime, less those of the exchanges."""
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
    """Return the experts whose home slot differs, ascending."""
    places = [
        {expert: (rank, slot) for rank, row in enumerate(placement.home) for slot, expert in enumerate(row)}
        for placement in (before, after)
    ]
    changed = [expert for expert in range(before.num_experts) if places[0][expert] != places[1][expert]]
    return tuple(Move(expert, *places[0][expert], *places[1][expert]) for expert in changed)


def lasting(held: Mapping[Guest, int], placement: Placement) -> dict[Guest, int]:
    """Return the number of iterations that each guest of the placement has been on its rank, after one more."""
    guests = [(expert, rank) for rank, row in enumerate(placement.guests) for expert in row if expert != EMPTY]
    return {guest: held.get(guest, 0) + 1 for guest in guests}


def settle(
    placement: Placement, counts_DE: np.ndarray, held: Mapping[Guest, int], cost: CostModel
) -> tuple[Placement, Settlement]:
    """Return the placement with owners exchanged where the cost model predicts a gain, and the exchanges.

    A guest is expected to stay as long as it has already stayed, so a Transfer happens once lending has cost as much as
    the Transfer does. For any later load, both together cost at most twice as much as the better of the two (ski
    rental). Each exchange leaves fewer guests and takes no more seconds; because the slowest link decides, several
    exchanges may be needed before any seconds are saved.

    Args:
        counts_DE: [D, E] the load that the placement is for.
        held: number of iterations that each guest has been on its rank.
    """
    time = cost.layer_time(counts_DE, placement)
    best, settled, reached = Settlement(), placement, Settlement()
    start, seconds, budget = placement, time.total, BUDGET
    # No set of exchanges saves more than all of Trans and Agg, or costs less than one exchange
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
    """Yield exchanges that leave fewer guests: longest stay first, then home experts with the fewest tokens."""
    tokens_E = counts_DE.sum(0)
    guests = [guest for guest, iterations in held.items() if iterations and guest[0] in placement.guests[guest[1]]]
    for expert, target in sorted(guests, key=lambda guest: (-held[guest], guest)):
        for other in sorted(placement.home[target], key=lambda other: (tokens_E[other], other)):
            exchange = Swap((expert, other), (placement.owner(expert), target))
            for candidate in _exchanged(placement, exchange):
                if candidate.added_hosts < placement.added_hosts:
                    yield exchange, candidate


def _exchanged(placement: Placement, exchange: Swap) -> Iterator[Placement]:
    """Yield placements with the two experts' owners exchanged, where guest slots suffice.

    First, the expert that gave up its home slot is computed by its new owner, not the old one; then its hosts stay.
    """
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
