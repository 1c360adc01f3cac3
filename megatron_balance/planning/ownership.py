"""Lend or Transfer: which experts change their owner.

A guest costs Trans and Agg in every iteration (a lend). Moving the expert's parameters and optimizer state to another
rank costs messages once (a Transfer). Every home slot holds an expert, so owners are exchanged in pairs.

A Transfer is proposed for a guest that stays on its rank, and for two experts that their owners compute, where the
layer is faster if each computes the other's (DEMI's migration). It happens at break-even: once it would have saved the
seconds that it costs, since it was first proposed. For any later load, both together cost at most twice as much as the
better of the two (ski rental).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.loads import expert_loads
from megatron_balance.cost.model import CostModel, LayerTime, owners
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.splits import vexperts

BUDGET = 100
"""Number of placements that one plan may time, which bounds planning time at any size."""

MOST_SWAPS = 16
"""Maximum number of exchanges between owners that one plan proposes."""

HEAVY, LIGHT, PARTNERS = 4, 4, 4
"""Number of a heavy rank's experts, of light ranks, and of each light rank's experts that an exchange is sought for."""

LEAST_GAIN = 1e-3
"""Share of the layer's time that an exchange between owners must save, because loads change in every iteration."""

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


class Settled(NamedTuple):
    """The result of `settle`."""

    placement: Placement
    settlement: Settlement
    """The exchanges that happen now."""

    wanted: frozenset[int]
    """Experts that would change their owner if the load stayed for ever."""


def settle(
    placement: Placement,
    counts_BDE: np.ndarray,
    held: Mapping[Guest, int],
    cost: CostModel,
    ages: Mapping[int, int] = MappingProxyType({}),
) -> Settled:
    """Return the placement with owners exchanged where the cost model predicts a gain over the expected lifetime.

    A guest is expected to stay as long as it has already stayed, and another exchange to pay as long as it has been
    proposed. Several exchanges may be needed before any seconds are saved, because the slowest rank or link decides.

    Args:
        counts_BDE: [B, D, E] the loads that the placement is for.
        held: number of iterations that each guest has been on its rank.
        ages: number of iterations for which experts have been `wanted`.
    """
    time = cost.layer_time(counts_BDE, placement)
    best, settled = _own_guests(placement, counts_BDE, held, cost, time)
    wanted, chain, reached = frozenset[int](), (), settled
    limit = cost.layer_seconds(counts_BDE, settled) if best.exchanges else time.total
    guests = best
    for exchange, seconds in _swaps(settled, counts_BDE, cost):
        chain, reached = (*chain, exchange), exchanged(reached, exchange)
        lifetimes = [ages.get(swap.experts[0], 0) for swap in chain] + [guests.lifetime] * bool(guests.exchanges)
        proposal = Settlement(
            (*guests.exchanges, *chain),
            time.total - seconds,
            min(lifetimes),
            cost.transfer_seconds((move.source, move.target) for move in moves(placement, reached)),
        )
        if seconds < limit * (1 - LEAST_GAIN):
            limit, wanted = seconds, frozenset(swap.experts[0] for swap in chain)
        if proposal.gain > best.gain:
            best, settled = proposal, reached
    return Settled(settled, best, wanted)


def exchanged(placement: Placement, exchange: Swap) -> Placement:
    """Return the placement in which two experts, hosted by their owners alone, have exchanged them."""
    (expert, other), (source, target) = exchange.experts, exchange.ranks
    swap = {expert: other, other: expert}
    home = tuple(tuple(swap.get(each, each) for each in row) for row in placement.home)
    hosts, primary = [*placement.hosts], [*placement.primary]
    for each, rank in ((expert, target), (other, source)):
        hosts[each], primary[each] = (rank,), rank
    return placement.rehost(hosts, primary, home)


def _swaps(placement: Placement, counts_BDE: np.ndarray, cost: CostModel) -> Iterator[tuple[Swap, float]]:
    """Yield exchanges between owners, one after the other, and the seconds of the layer after each.

    Each exchange makes the rank that is slowest in a microbatch faster, and its partner no slower than it was.
    """
    counts_EBD = counts_BDE.transpose(2, 0, 1).astype(np.float64)
    vexperts_ED, primary_E = vexperts(placement), np.asarray(placement.primary)
    loads_FBD = expert_loads(cost.network, cost.split, counts_EBD, vexperts_ED, primary_E).sum(0)
    owner_E, sending, ranks = owners(placement), cost.sending(placement), np.arange(placement.num_ranks)
    tokens_E = counts_EBD.sum((1, 2))
    # Only experts that nobody but their owner computes
    free_E = (vexperts_ED > 0).sum(1) * vexperts_ED[np.arange(len(owner_E)), owner_E].astype(bool) == 1
    for _ in range(MOST_SWAPS):
        seconds_BD = cost.rank_seconds(loads_FBD)
        over_BD = seconds_BD - seconds_BD.mean(-1, keepdims=True)
        microbatch, heaviest = (int(place) for place in np.unravel_index(over_BD.argmax(), over_BD.shape))
        pairs_A2 = _pairs(owner_E, free_E, tokens_E, counts_EBD, heaviest, seconds_BD.sum(0))
        if not len(pairs_A2):
            return
        experts_X = np.concatenate([pairs_A2.T.ravel(), pairs_A2.T.ravel()])
        away_A = owner_E[pairs_A2[:, 1]]
        here_A = np.full_like(away_A, heaviest)
        host_X = np.concatenate([away_A, here_A, here_A, away_A])
        loads_4AFBD = expert_loads(
            cost.network, cost.split, counts_EBD[experts_X], (host_X[:, None] == ranks).astype(np.int64), host_X
        ).reshape(4, len(pairs_A2), *loads_FBD.shape)
        change_AFBD = loads_4AFBD[0] + loads_4AFBD[1] - loads_4AFBD[2] - loads_4AFBD[3]
        after_ABD = cost.rank_seconds(loads_FBD + change_AFBD)
        involved_AD = (ranks == heaviest) | (ranks == away_A[:, None])
        slower_A = (after_ABD[:, microbatch] * involved_AD).max(-1)
        index = int(np.where(involved_AD[:, None], after_ABD, 0.0).max(-1).sum(-1).argmin())
        if slower_A[index] >= seconds_BD[microbatch, heaviest] * (1 - LEAST_GAIN):
            return
        expert, other = (int(each) for each in pairs_A2[index])
        loads_FBD = loads_FBD + change_AFBD[index]
        swap = Swap((expert, other), (heaviest, int(owner_E[other])))
        owner_E[[expert, other]] = owner_E[[other, expert]]
        yield swap, float(cost.time_of(*cost.work_of(loads_FBD), sending.trans, sending.agg).total)


def _pairs(
    owner_E: np.ndarray,
    free_E: np.ndarray,
    tokens_E: np.ndarray,
    counts_EBD: np.ndarray,
    heaviest: int,
    seconds_D: np.ndarray,
) -> np.ndarray:
    """Return [A, 2]: experts of the heaviest rank, and experts of light ranks or of those with most of their tokens."""
    found: list[tuple[int, int]] = []
    own = (free_E & (owner_E == heaviest)).nonzero()[0]
    light = np.argsort(seconds_D, kind="stable")[:LIGHT].tolist()
    for expert in own[np.argsort(-tokens_E[own], kind="stable")][:HEAVY].tolist():
        for rank in dict.fromkeys([*light, int(counts_EBD[expert].sum(0).argmax())]):
            others = (free_E & (owner_E == rank)).nonzero()[0]
            if rank != heaviest:
                order = np.argsort(tokens_E[others], kind="stable")[:PARTNERS]
                found += [(expert, other) for other in others[order].tolist()]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _own_guests(
    placement: Placement, counts_BDE: np.ndarray, held: Mapping[Guest, int], cost: CostModel, time: LayerTime
) -> tuple[Settlement, Placement]:
    """Return the exchanges that make guests owners, and the placement after them.

    Each exchange leaves fewer guests and takes no more seconds.
    """
    best, settled, reached = Settlement(), placement, Settlement()
    start, seconds, budget = placement, time.total, BUDGET
    # No set of exchanges saves more than all of Trans and Agg, or costs less than one exchange
    if max(held.values(), default=0) * (time.trans + time.agg) <= cost.transfer_seconds([(0, 0)]):
        return best, settled
    while budget > 0:
        found: tuple[float, int, Swap, Placement] | None = None
        for exchange, candidate in _candidates(placement, counts_BDE, held):
            if (budget := budget - 1) < 0:
                break
            key = cost.layer_seconds(counts_BDE, candidate), candidate.added_hosts
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
    return best, settled


def _candidates(
    placement: Placement, counts_BDE: np.ndarray, held: Mapping[Guest, int]
) -> Iterator[tuple[Swap, Placement]]:
    """Yield exchanges that leave fewer guests: longest stay first, then home experts with the fewest tokens."""
    tokens_E = counts_BDE.sum((0, 1))
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
