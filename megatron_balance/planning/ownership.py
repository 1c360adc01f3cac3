"""Guest or Transfer: decides which experts change their owner.

A guest costs Trans and Agg in every iteration. A Transfer moves the expert's parameters and optimizer state to another
rank, which costs messages once. Every home slot holds an expert, so owners are exchanged in pairs.

A Transfer is proposed in two cases: for a guest that stays on its rank; and for two experts computed by their owners if
the layer is faster when each owner computes the other's expert (DEMI's migration). It happens at break-even, when it
would have saved its cost since it was first proposed. So for any future load, guests and Transfers together cost at
most twice as much as the better of the two (ski rental).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.model import CostModel, LayerTime, owners
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.planning.hosting import Hosting, LayerLoad
from megatron_balance.planning.policies.interface import owners_host

BUDGET = 12
"""Maximum number of placements that one plan times, which bounds planning time at any size."""

EXAMINED = 4
"""Maximum number of placements timed for one exchange that makes a guest an owner."""

MOST_SWAPS = 8
"""Maximum number of exchanges between owners that one plan proposes."""

HEAVY, LIGHT, PARTNERS = 4, 4, 4
"""Numbers of a heavy rank's experts, of light ranks, and of each light rank's experts, to seek exchanges among."""

LEAST_GAIN = 1e-3
"""Share of the layer's time that an exchange between owners must save, because loads change in every iteration."""

Guest = tuple[int, int]
"""(expert, rank)."""

Home = tuple[tuple[int, ...], ...]
"""The experts in each rank's home slots."""


class OwnerChange(NamedTuple):
    """An expert that moves to another home slot."""

    expert: int
    source: int
    source_slot: int
    target: int
    target_slot: int


class Swap(NamedTuple):
    """An exchange of owners between two experts."""

    experts: tuple[int, int]
    """The expert that moves to `ranks[1]` (a guest there, if any), and the expert whose home slot it takes."""
    ranks: tuple[int, int]
    """The owners of both before the exchange."""


@dataclass(frozen=True)
class Settlement:
    """Exchanges in order, with savings and costs. Without exchanges, owners stay."""

    exchanges: tuple[Swap, ...] = ()
    saved_seconds: float = 0.0
    """Seconds of the layer saved in one iteration with the current load."""
    lifetime: int = 0
    """Number of iterations for which the load is expected to stay the same."""
    transfer_seconds: float = 0.0
    """Seconds that the exchanges take."""

    @property
    def gain(self) -> float:
        """Seconds saved over the lifetime, minus the seconds of the exchanges."""
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


def owner_changes(before: Home, after: Home) -> tuple[OwnerChange, ...]:
    """Return the experts whose home slot differs, ascending."""
    differing = [rank for rank, rows in enumerate(zip(before, after, strict=True)) if rows[0] != rows[1]]
    places = [
        {expert: (rank, slot) for rank in differing for slot, expert in enumerate(home[rank])}
        for home in (before, after)
    ]
    changed = sorted(expert for expert, place in places[0].items() if place != places[1][expert])
    return tuple(OwnerChange(expert, *places[0][expert], *places[1][expert]) for expert in changed)


def lasting(held: Mapping[Guest, int], placement: Placement) -> dict[Guest, int]:
    """Return how many iterations each guest of the placement has been on its rank, after one more iteration."""
    guests = [(expert, rank) for rank, row in enumerate(placement.guests) for expert in row if expert != EMPTY]
    return {guest: held.get(guest, 0) + 1 for guest in guests}


def settle(
    placement: Placement,
    counts_BDE: np.ndarray,
    held: Mapping[Guest, int],
    cost: CostModel,
    ages: Mapping[int, int] = MappingProxyType({}),
) -> tuple[Placement, Settlement, frozenset[int]]:
    """Exchange owners where the cost model predicts a gain over the expected lifetime. Return the placement afterwards,
    the exchanges, and the experts that would change their owner if the load never changed again.

    A guest is expected to stay as long as it has stayed so far. Other exchanges are expected to pay for as many
    iterations as they have been proposed. Several exchanges may be needed before any seconds are saved, because the
    slowest rank or link decides. Exchanges between owners are sought both in addition to the guests and instead of
    them, because the policy may add guests again later.

    Args:
        counts_BDE: [B, D, E] the loads that the placement is for.
        held: number of iterations that each guest has been on its rank.
        ages: number of iterations for which experts have been `wanted` before.
    """
    time = cost.layer_time(counts_BDE, placement)
    guests, settled = _own_guests(placement, counts_BDE, held, cost, time)
    best = guests
    reached = settled
    wanted = frozenset[int]()
    limit = cost.layer_seconds(counts_BDE, settled) if guests.exchanges else time.total
    starts = [settled]
    # Guests that slow the layer down are the policy's responsibility, and no reason for a Transfer
    if not settled.is_identity and cost.layer_seconds(counts_BDE, alone := owners_host(settled)) >= limit:
        starts.append(alone)
    for start in starts:
        chain: list[Swap] = []
        fewest = limit
        for exchange, seconds in _swaps(start, counts_BDE, cost, limit):
            chain.append(exchange)
            if seconds < fewest * (1 - LEAST_GAIN):
                fewest = seconds
                wanted = wanted | {swap.experts[0] for swap in chain}
            lifetimes = [ages.get(swap.experts[0], 0) + 1 for swap in chain]
            lifetime = min([*lifetimes, guests.lifetime] if guests.exchanges else lifetimes)
            saved = time.total - seconds
            if seconds >= limit * (1 - LEAST_GAIN) or lifetime * saved <= best.gain:
                continue
            changes = owner_changes(placement.home, home_of(start, chain))
            transfer = cost.transfer_seconds((change.source, change.target) for change in changes)
            proposal = Settlement((*guests.exchanges, *chain), saved, lifetime, transfer)
            if changes and proposal.gain > best.gain:
                best = proposal
                reached = exchanged(start, chain)
    return reached, best, wanted


def exchanged(placement: Placement, exchanges: Sequence[Swap]) -> Placement:
    """Return the placement after exchanges between owners, of experts that only their owners compute."""
    hosts = [*placement.hosts]
    primary = [*placement.primary]
    quotas = [*placement.quotas]
    for experts, (source, target) in exchanges:
        for expert, rank in zip(experts, (target, source), strict=True):
            hosts[expert] = (rank,)
            primary[expert] = rank
            if quotas:
                quotas[expert] = ()
    return placement.rehost(hosts, primary, home_of(placement, exchanges), quotas)


def home_of(placement: Placement, exchanges: Iterable[Swap]) -> Home:
    """Return the experts in the home slots after exchanges."""
    home = [[*row] for row in placement.home]
    for (expert, other), (source, target) in exchanges:
        there = home[source].index(expert), home[target].index(other)
        home[source][there[0]] = other
        home[target][there[1]] = expert
    return tuple(map(tuple, home))


def _swaps(placement: Placement, counts_BDE: np.ndarray, cost: CostModel, limit: float) -> Iterator[tuple[Swap, float]]:
    """Yield exchanges between owners in sequence, each with the seconds of the layer after it. Each exchange makes the
    slowest rank of a microbatch faster, and leaves its partner faster than that rank was. Summed over microbatches, the
    slower of the two ranks also takes fewer seconds."""
    sending = cost.sending(placement)
    floor = cost.time_of(0.0, float(counts_BDE.sum() / cost.rate_D.sum()), sending.trans, sending.agg).total
    if floor >= limit * (1 - LEAST_GAIN):
        # Even perfectly even loads without exchanges of tokens would not be faster
        return
    # The hosting treats the current owners as fixed, so its seconds of Trans do not apply; use those of `sending`
    state = Hosting.of(LayerLoad(counts_BDE, placement, cost))
    owner_E = owners(placement)
    hosted = zip(placement.hosts, placement.owners, strict=True)
    is_free_E = np.array([ranks == (owner,) for ranks, owner in hosted])
    tokens_ED = state.layer.counts_EBD.sum(1)
    for _ in range(MOST_SWAPS):
        microbatch, heaviest = state.slowest()
        pairs = _pairs(owner_E, is_free_E, tokens_ED, heaviest, state.work_BD.sum(0))
        if not len(pairs):
            return
        ranks = owner_E[pairs]
        row_A = np.arange(len(pairs))[:, None]
        work_ABD = state.under(*_hosted(pairs, ranks[:, ::-1], placement.num_ranks)).work_ABD
        slower_AB = work_ABD[row_A, :, ranks].max(1)
        before_AB = state.work_BD[:, ranks].max(-1).T
        helps_A = slower_AB[:, microbatch] < state.work_BD[microbatch, heaviest] * (1 - LEAST_GAIN)
        helps_A &= slower_AB.sum(1) < before_AB.sum(1)
        if not helps_A.any():
            return
        best = int(np.where(helps_A, slower_AB.sum(1), np.inf).argmin())
        expert, other = pairs[best].tolist()
        source, target = ranks[best].tolist()
        experts, shares_AD, hosts = _hosted(pairs[[best]], ranks[[best], ::-1], placement.num_ranks)
        state = state.changed(experts[:, 0], shares_AD[:, 0], hosts[:, 0])
        owner_E[[expert, other]] = target, source
        yield Swap((expert, other), (source, target)), state.seconds_with(sending.trans, sending.agg)


def _hosted(pairs: np.ndarray, hosts: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arguments of `Hosting.under` for alternatives in which two experts have one host each."""
    hosts_KA = np.ascontiguousarray(hosts.T)
    shares_KAD = (hosts_KA[..., None] == np.arange(num_ranks)).astype(np.int64)
    return np.ascontiguousarray(pairs.T), shares_KAD, hosts_KA


def _pairs(
    owner_E: np.ndarray, is_free_E: np.ndarray, tokens_ED: np.ndarray, heaviest: int, seconds_D: np.ndarray
) -> np.ndarray:
    """Return [A, 2]: experts of the heaviest rank, with experts of light ranks or of their tokens' main source."""
    tokens_E = tokens_ED.sum(1)
    found = []
    own = (is_free_E & (owner_E == heaviest)).nonzero()[0]
    light = np.argsort(seconds_D, kind="stable")[:LIGHT].tolist()
    for expert in own[np.argsort(-tokens_E[own], kind="stable")][:HEAVY].tolist():
        for rank in dict.fromkeys([*light, int(tokens_ED[expert].argmax())]):
            others = (is_free_E & (owner_E == rank)).nonzero()[0]
            if rank != heaviest:
                order = np.argsort(tokens_E[others], kind="stable")[:PARTNERS]
                found += [(expert, other) for other in others[order].tolist()]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _own_guests(
    placement: Placement, counts_BDE: np.ndarray, held: Mapping[Guest, int], cost: CostModel, time: LayerTime
) -> tuple[Settlement, Placement]:
    """Return exchanges that make guests owners with fewer guests and no more seconds, and the placement after them."""
    best = Settlement()
    settled = placement
    reached = Settlement()
    start = placement
    seconds = time.total
    budget = BUDGET
    # No exchanges save more than all of Trans and Agg, or cost less than one exchange
    least = cost.transfer_seconds([(0, 0)])
    held = {guest: stay for guest, stay in held.items() if stay * (time.trans + time.agg) > least}
    while held and budget > 0:
        found: tuple[float, int, Swap, Placement] | None = None
        for exchange, candidate in islice(_candidates(placement, counts_BDE, held, cost), min(EXAMINED, budget)):
            budget -= 1
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
            cost.transfer_seconds((move.source, move.target) for move in owner_changes(start.home, placement.home)),
        )
        if reached.gain > best.gain:
            best = reached
            settled = placement
    return best, settled


def _candidates(
    placement: Placement, counts_BDE: np.ndarray, held: Mapping[Guest, int], cost: CostModel
) -> Iterator[tuple[Swap, Placement]]:
    """Yield exchanges that leave fewer guests. Order: least time of the busiest rank in Trans, guests that stayed
    longest, home experts with the fewest tokens."""
    guests = sorted(guest for guest in held if guest[0] in placement.guests[guest[1]])
    if not guests:
        return
    expert_A, target_A = np.array(guests).T
    owner_E = owners(placement)
    hosts_ED = placement.tables.shares_ED > 0
    ranks = np.arange(placement.num_ranks)
    times_ED, _ = cost.transport.link_times(owner_E, hosts_ED & (owner_E[:, None] != ranks))
    after_AD, _ = cost.transport.link_times(target_A, hosts_ED[expert_A] & (target_A[:, None] != ranks))
    busiest_A = (times_ED.sum(0) - times_ED[expert_A] + after_AD).max(1)
    tokens_E = counts_BDE.sum((0, 1))
    for row in np.lexsort(([-held[guest] for guest in guests], busiest_A)).tolist():
        expert, target = guests[row]
        for other in sorted(placement.home[target], key=lambda other: (tokens_E[other], other)):
            exchange = Swap((expert, other), (placement.owner(expert), target))
            if candidate := _exchanged(placement, exchange):
                yield exchange, candidate


def _exchanged(placement: Placement, exchange: Swap) -> Placement | None:
    """Return the placement with two experts' owners exchanged; None unless it has fewer guests and they fit the slots.
    The expert that gives up its home slot is computed by its new owner instead of its old one."""
    (expert, other) = exchange.experts
    (source, target) = exchange.ranks
    before = placement.hosts[other]
    ranks = tuple(source if rank == target else rank for rank in before)
    # The guest becomes an owner; its old owner becomes a guest if it computes the expert
    more = len({*ranks} - {source}) - len({*before} - {target}) + (source in placement.hosts[expert]) - 1
    staying = len({*placement.guests[source]} - {expert, other, EMPTY})
    if more >= 0 or staying + (source in placement.hosts[expert]) > placement.guest_slots:
        return None
    hosts = [*placement.hosts]
    primary = [*placement.primary]
    hosts[other] = ranks
    primary[other] = primary[other] if primary[other] in ranks else source
    return placement.rehost(hosts, primary, home_of(placement, [exchange]), placement.quotas)
