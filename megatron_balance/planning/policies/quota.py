"""The quota policy: few guests with exact numbers of tokens, chosen by the seconds that they save."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.candidates import add_guests, guest_costs
from megatron_balance.cost.core import COMPUTED
from megatron_balance.cost.loads import by_microbatch, owner_loads
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.fit import (
    BUSIEST,
    FILLING,
    PARTS,
    Fitted,
    Overload,
    TokenMoves,
    cheapest,
    fit,
    sending_times,
)
from megatron_balance.planning.policies.interface import Policy, owners_host

EVEN = 1.01
"""Tokens of the busiest rank, over the mean, at which a first fit aims."""

NEGLIGIBLE = 0.0005
"""Share of a layer's seconds that guests must save, because the cost model omits part of their cost."""

HIDDEN = 0.2
"""Fraction of hidden Trans and Agg that is charged, because they slow down the computation that hides them."""

UNSURE = 0.15
"""Fraction by which a plan's seconds may be underestimated before its messages are laid out."""

FEW_RANKS = 32
"""Maximum number of ranks for which more ways to find guests are tried where experts may save messages."""

MANY_RANKS = 64
"""Number of ranks beyond which plans aim at less even loads, because the first copies level most ranks."""

SHARE = 0.6
"""Fraction of a fit's moves that is tried, because the first guest on another node is expensive, others free."""

RUNGS = 8
"""Number of fits with rising targets before receivers are filled."""

LOCALIZED = (1 / 6, 1 / 3, 1 / 2, 1.0)
"""Fractions of all guest slots that are tried for guests that compute their node's tokens of an expert."""

ROUNDS = 2
"""Number of times that each of several microbatches is leveled, given the guests for the others."""


class Quota(Policy):
    """Gives each guest the number of tokens that evens out the ranks, where that saves more than the guest costs.

    `fit` finds moves of tokens that level all ranks; each move relieves the busiest rank. The first moves, as many as
    are worth their Trans and Agg, leave the busiest rank some tokens. Further fits, in all orders, then use this number
    as the capacity of every rank, because they may need fewer guests or less time to send them. All this is done with
    guests on their owner's node only, and with guests anywhere.

    On few ranks, if experts are hidden or small, it is also done after localizing experts: those with most tokens from
    another node get guests there, which compute the node's tokens, so that the tokens stay on it. The cost model
    chooses among all these plans and no guests. With several microbatches, each is leveled in turn, given the guests
    for the others.
    """

    name = "quota"
    split = "proportional"
    sets_quotas = True
    must_pay = True

    def __init__(self) -> None:
        for loop in (add_guests, fit, sending_times, cheapest):
            loop.prepare()

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        alone = current if current.is_identity else owners_host(current)
        if not current.guest_slots or current.num_ranks == 1:
            return alone
        ways = _ways(counts, current.guest_slots, cost)
        if not any(way.localized for way in ways) and _is_even(counts, current, cost):
            return alone
        layer = _Layer(counts, current, cost)
        plans = [guests for way in ways if len((guests := layer.leveled(way)).expert_M)]
        if not plans:
            return alone
        alone_seconds, seconds, hidden = layer.timed(plans)
        limit = alone_seconds * (1 - NEGLIGIBLE)
        charged = seconds + HIDDEN * hidden
        for index in np.argsort(charged, kind="stable").tolist():
            if charged[index] >= limit:
                break
            planned = layer.placement(current, plans[index])
            if seconds[index] * (1 + UNSURE) < limit or cost.layer_seconds(counts, planned) < limit:
                return planned
        return alone


def _is_even(counts: np.ndarray, current: Placement, cost: CostModel) -> bool:
    """Return whether no fit would move any tokens."""
    tokens_BD = by_microbatch(counts).sum(1)[:, np.array(current.home)].sum(-1)
    mean_B = tokens_BD.sum(1) / cost.rate_D.sum()
    return bool(((tokens_BD / cost.rate_D).max(1) <= EVEN * mean_B).all())


class _Way(NamedTuple):
    """A way to find guests."""

    reaches_far: bool
    """Whether guests may be on other nodes than their owners'."""
    slots: int
    """Number of guests of a rank, if that suffices."""
    share: float | None = None
    """Fraction of a fit's moves that are made; None: those that a quick estimate finds worth their cost."""
    localized: float = 0.0
    """Fraction of all guest slots for guests that compute their node's tokens of an expert."""
    even: float = EVEN
    """Tokens of the busiest rank, over the mean, at which a first fit aims."""
    raised: float = 0.0
    """Fraction of the remaining excess by which the target rises after each fit; 0: the target stays, and receivers are
    filled instead."""
    prefers_near: bool = True
    """Whether a guest on another node must take over more tokens than one on the owner's node."""


def _ways(counts: np.ndarray, slots: int, cost: CostModel) -> list[_Way]:
    """Return the ways to try: fewer on more ranks, because they take longer."""
    near = _Way(not cost.network.has_both_levels, slots)
    ranks = cost.network.num_ranks
    if len(cost.network.first_N) == 1:
        return [near] if slots == 1 or ranks > FEW_RANKS else [near, _Way(True, 1)]
    if ranks > MANY_RANKS:
        return [near, _Way(True, 1, even=1.03), _Way(True, 1, 1.0, raised=0.3, prefers_near=False)]
    ways = [near, _Way(True, 1)]
    if ranks <= FEW_RANKS and _can_localize(counts, cost):
        ways += [_Way(True, 1, 1.0), _Way(True, slots), _Way(True, slots, SHARE)]
        ways += [_Way(True, slots, localized=part) for part in LOCALIZED]
    return ways


def _can_localize(counts: np.ndarray, cost: CostModel) -> bool:
    """Return whether experts may be sent to save messages: they are hidden, or smaller than their tokens."""
    # Tokens travel to experts and back, forward and backward
    experts_bytes = counts.shape[-1] * (cost.param_bytes + cost.grad_bytes)
    return cost.overlap is not None or 4 * cost.token_bytes * int(counts.sum()) > experts_bytes


class _Guests(NamedTuple):
    """Guests of a plan, each once, int64."""

    expert_M: np.ndarray
    rank_M: np.ndarray
    tokens_M: np.ndarray
    """Tokens of all microbatches that the guest takes over from the expert's owner."""

    @classmethod
    def together(cls, parts: Iterable["_Guests"]) -> "_Guests":
        """Return the guests of all parts; the tokens of a guest in several parts are added up."""
        parts = [part for part in parts if len(part.expert_M)]
        if len(parts) < 2:
            return parts[0] if parts else NOBODY
        expert_M, rank_M, tokens_M = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        pair_M = expert_M * (1 + rank_M.max()) + rank_M
        _, first, guest_M = np.unique(pair_M, return_index=True, return_inverse=True)
        order = np.argsort(first)
        tokens = np.bincount(guest_M, tokens_M).astype(np.int64)
        return cls(expert_M[first[order]], rank_M[first[order]], tokens[order])


NOBODY = _Guests(*np.zeros((3, 0), np.int64))


class _Load(NamedTuple):
    """Tokens of a microbatch, given guests for other microbatches."""

    tokens_DS: np.ndarray
    """Tokens of its experts that each rank may give away."""
    loads_D: np.ndarray
    """Tokens of each rank."""
    taken_D: np.ndarray
    """Number of occupied guest slots."""
    mean: float
    """Tokens of a rank of average speed if all ranks were even."""


class _Layer:
    """A layer's loads, and the seconds that guests save and take."""

    def __init__(self, counts: np.ndarray, current: Placement, cost: CostModel) -> None:
        counts_BDE = by_microbatch(counts)
        self.cost = cost
        self.counts_EBD = counts_BDE.transpose(2, 0, 1)
        self.owner_E = owners(current)
        self.home_DS = np.array(current.home)
        """Experts of each rank."""
        self.owned_FBD = owner_loads(cost.network, self.counts_EBD, self.owner_E)
        """`owner_loads` of all experts."""
        self.tokens_BE = counts_BDE.sum(1)
        self.total_E = self.tokens_BE.sum(0)
        """Tokens of each expert in all microbatches."""
        self.slots = current.guest_slots

    @cached_property
    def _token_seconds(self) -> float:
        """Seconds for which the busiest rank computes and exchanges a token."""
        network = self.cost.network
        ranks = network.num_ranks
        size = network.node_size
        exchanging = max(network.near.beta * (size - 1), network.far.beta * (ranks - size)) / ranks
        return self.cost.seconds_per_token + 4 * self.cost.token_bytes * self.cost.exchange.scale * exchanging

    @cached_property
    def _localized(self) -> tuple[_Guests, np.ndarray]:
        """Guests of the experts with most tokens from other nodes, and [M] their positions among all such pairs."""
        network = self.cost.network
        slots = [self.slots] * network.num_ranks
        tokens_EN = np.add.reduceat(self.counts_EBD.sum(1), network.first_N, axis=1).astype(np.int64)
        tokens_EN[np.arange(len(tokens_EN)), network.node_D[self.owner_E]] = 0
        hottest = np.argsort(-tokens_EN, axis=None, kind="stable")[: sum(slots)]
        loads = self.owned_FBD[COMPUTED].sum(0).tolist()
        owners = self.owner_E.tolist()
        found = list[tuple[int, ...]]()
        columns = *np.unravel_index(hottest, tokens_EN.shape), tokens_EN.ravel()[hottest]
        for place, (expert, node, tokens) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            first = node * network.node_size
            free = [rank for rank, left in enumerate(slots[first : first + network.node_size], first) if left]
            if tokens and free:
                rank = min(free, key=loads.__getitem__)
                found.append((expert, rank, tokens, place))
                loads[rank] += tokens
                loads[owners[expert]] -= tokens
                slots[rank] -= 1
        *guests, place_M = np.array(found, np.int64).reshape(-1, 4).T.copy()
        return _Guests(*guests), place_M

    def leveled(self, way: _Way) -> _Guests:
        """Return the guests that level all ranks as far as they are worth their cost."""
        # First the localizing guests, then those for each microbatch
        found = [NOBODY] * (1 + len(self.tokens_BE))
        if way.localized:
            guests, place_M = self._localized
            kept_M = place_M < int(way.localized * self.slots * self.cost.network.num_ranks)
            found[0] = _Guests(*(part_M[kept_M] for part_M in guests))
        tokens_BD = self.owned_FBD[COMPUTED]
        order_B = np.argsort(tokens_BD.mean(1) - tokens_BD.max(1), kind="stable").tolist()
        for index, microbatch in [*enumerate(order_B, start=1)] * (ROUNDS if len(order_B) > 1 else 1):
            others = _Guests.together([*found[:index], *found[index + 1 :]])
            tokens_E = self.tokens_BE[microbatch]
            moves = self._moves(tokens_E, others, way)
            # The same share of the expert's tokens in all microbatches, at most the tokens that the owner has left
            expert_M = moves.expert_M
            tokens_M = moves.tokens_M * self.total_E[expert_M] // tokens_E[expert_M]
            kept_M = tokens_M > 0
            found[index] = _Guests(expert_M[kept_M], moves.target_M[kept_M], tokens_M[kept_M])
        return _Guests.together(found)

    def _moves(self, tokens_E: np.ndarray, others: _Guests, way: _Way) -> TokenMoves:
        """Return the moves of a microbatch's tokens that are worth their cost, given guests for other microbatches."""
        load = self._left(tokens_E, others)
        busiest = way.even * load.mean
        if not way.reaches_far:
            # A node keeps its tokens
            first_N = self.cost.network.first_N
            loads_N, rate_N = (np.add.reduceat(part_D, first_N) for part_D in (load.loads_D, self.cost.rate_D))
            busiest = way.even * float((loads_N / rate_N).max())
        busiest, slots, found = self._fitted(load, way, busiest)
        if way.share is None:
            number = self._worthwhile(busiest, found, others)
        else:
            number = round(way.share * len(found.moves.expert_M))
        moves = found.moves.first(number)
        if not number:
            return moves
        busiest += max(0, int(found.excess[number]))
        return cheapest(
            moves,
            self._overload(load, way, busiest, slots),
            others.expert_M,
            others.rank_M,
            self.owner_E,
            self.cost.transport.prices_1,
            NEGLIGIBLE * self._token_seconds * busiest,
        )

    def _left(self, tokens_E: np.ndarray, others: _Guests) -> _Load:
        ranks = self.cost.network.num_ranks
        left_E = tokens_E.copy()
        loads_D = np.bincount(self.owner_E, tokens_E, ranks)
        expert_M, rank_M, whole_M = others
        if len(expert_M):
            product_M = whole_M * tokens_E[expert_M]
            total_M = self.total_E[expert_M]
            share_M = product_M / total_M
            # In the order of the guests, because sums of fractions depend on it
            ends = np.column_stack([rank_M, self.owner_E[expert_M]]).ravel()
            np.add.at(loads_D, ends, np.column_stack([share_M, -share_M]).ravel())
            np.subtract.at(left_E, expert_M, -(-product_M // total_M))
        loads_D = loads_D.astype(np.int64)
        mean = float(loads_D.sum() / self.cost.rate_D.sum())
        return _Load(left_E.clip(0)[self.home_DS], loads_D, np.bincount(rank_M, minlength=ranks), mean)

    def _fitted(self, load: _Load, way: _Way, busiest: float) -> tuple[float, int, Fitted]:
        """Return an average rank's capacity, a rank's slots, and a fit that leaves no rank above its capacity. If no
        fit succeeds, return the one that leaves the busiest rank the fewest tokens."""
        rungs = RUNGS if way.raised else 1
        while True:
            found = self._fit(load, way, busiest, way.slots, BUSIEST)
            # Within a node, a lack of room is more frequent than a lack of slots
            if found[2].fits or not way.reaches_far:
                return found
            busiest += way.raised * int(found[2].excess[-1])
            rungs -= 1
            if not rungs:
                break
        filled = self._fit(load, way, busiest, way.slots, FILLING)
        if not filled[2].fits and way.slots < self.slots:
            filled = self._fit(load, way, busiest, self.slots, FILLING)
        return min(found, filled, key=lambda each: each[0] + max(0, int(each[2].excess[-1])))

    def _fit(self, load: _Load, way: _Way, busiest: float, slots: int, order: int) -> tuple[float, int, Fitted]:
        return busiest, slots, fit(self._overload(load, way, busiest, slots), order)

    def _overload(self, load: _Load, way: _Way, busiest: float, slots: int) -> Overload:
        """Return the initial state of a fit, if an average rank may have `busiest` tokens and `slots` guests."""
        rate_D = self.cost.rate_D
        capacities_D = np.maximum(np.ceil(load.mean * rate_D), np.floor(busiest * rate_D)).astype(np.int64)
        far = round((self.cost.transport.far if way.prefers_near else 1.0) * PARTS) if way.reaches_far else 0
        return Overload(
            load.tokens_DS,
            self.home_DS,
            load.loads_D - capacities_D,
            np.maximum(slots - load.taken_D, 0),
            self.cost.network.node_size,
            far,
        )

    def _worthwhile(self, busiest: float, found: Fitted, others: _Guests) -> int:
        network = self.cost.network
        transport = self.cost.transport
        expert_M = np.concatenate([others.expert_M, found.moves.expert_M])
        rank_M = np.concatenate([others.rank_M, found.moves.target_M])
        times = sending_times(expert_M, rank_M, self.owner_E, network.num_ranks, network.node_size, transport.far)
        sent = transport.seconds_of(*(time[len(others.expert_M) :] for time in times))
        total = self._token_seconds * (busiest + found.excess.clip(0)) + sum(self.cost.exposed(busiest, *sent))
        return int((total <= total.min() * (1 + NEGLIGIBLE)).argmax())

    def timed(self, plans: Sequence[_Guests]) -> tuple[float, np.ndarray, np.ndarray]:
        """Return the layer's seconds without guests, [A] with each plan, and [A] of hidden Trans and Agg."""
        expert_M, rank_M, tokens_M = (np.concatenate(columns) for columns in zip(*plans, strict=True))
        plan_M = np.repeat(np.arange(len(plans)), [len(guests.expert_M) for guests in plans])
        planned = plan_M, expert_M, rank_M, tokens_M / self.total_E[expert_M]
        far = self.cost.transport.far
        loads = self.counts_EBD, self.tokens_BE.T, self.owner_E
        added_AFBD, busy_A, extra_A = guest_costs(self.cost.network, far, *loads, planned, len(plans))
        sent = self.cost.transport.seconds_of(np.append(0.0, busy_A), np.append(0.0, extra_A))
        loads_AFBD = np.concatenate([self.owned_FBD[None], self.owned_FBD + added_AFBD])
        time = self.cost.time_of(*self.cost.work_of(loads_AFBD), *sent)
        hidden = sum(sent) - time.trans - time.agg
        return float(time.total[0]), time.total[1:], hidden[1:]

    def placement(self, current: Placement, guests: _Guests) -> Placement:
        """Return the placement with these guests; owners compute the remaining tokens."""
        owned = current.owners
        hosts: list[tuple[int, ...]] = [*zip(owned, strict=True)]
        quotas = list[tuple[int, ...]]([()]) * len(owned)
        primary = [*owned]
        taken: dict[int, dict[int, int]] = {}
        for expert, rank, tokens in zip(*(column.tolist() for column in guests), strict=True):
            taken.setdefault(expert, {})[rank] = tokens
        for expert, quota_of in taken.items():
            if left := int(self.total_E[expert]) - sum(quota_of.values()):
                quota_of[owned[expert]] = left
            else:
                primary[expert] = min(quota_of)
            hosts[expert] = (*quota_of,)
            quotas[expert] = (*quota_of.values(),)
        return current.rehost(hosts, primary, quotas=quotas)
