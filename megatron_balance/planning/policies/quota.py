"""The quota policy: few guests, and exact numbers of tokens for each of them, chosen by the seconds that they save.

M counts experts with guests; K counts numbers of moves, from none to all of a fit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.loads import COMPUTED, Lent, by_microbatch, guest_loads, guest_times, owner_loads
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.cost.network import Network
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.fit import Fitted, Move, fit
from megatron_balance.planning.policies.interface import Policy, owners_host

EVEN = 1.01
"""Tokens of the busiest rank over the mean that a first fit aims at."""

NEGLIGIBLE = 0.0005
"""Share of a layer's seconds that guests must save, because the cost model omits part of their cost."""

HIDDEN = 0.2
"""Share of hidden Trans and Agg that counts, because they slow down the computation that hides them."""

UNSURE = 0.15
"""Share by which the seconds of a plan may be underestimated before its messages are laid out."""

FEW_RANKS = 32
"""Number of ranks up to which there is time for more ways to find guests."""

MANY_RANKS = 64
"""Number of ranks beyond which plans aim at less even loads, because the first copies level most of them."""

SHARES = (0.6,)
"""Parts of a fit's moves that are tried, because the first guest on another node costs much, and others no more."""

RUNGS = 3
"""Number of fits with rising targets before receivers are filled."""

LOCALIZED = (1 / 6, 1 / 3, 1 / 2, 1.0)
"""Parts of all guest slots that are tried for guests that compute their node's tokens of an expert."""

ROUNDS = 2
"""Number of times that each of several microbatches is leveled, given the guests for the others."""

Guests = Mapping[tuple[int, int], int]
"""Tokens of all microbatches that each (expert, rank) takes over from the expert's owner."""


class Quota(Policy):
    """Gives each guest the number of tokens that evens out the ranks, where that saves more than the guest costs.

    `fit` finds moves of tokens that level all ranks, in an order in which each relieves the busiest one. The moves that
    are worth their Trans and Agg are the first ones. What they leave the busiest rank is the capacity of a second fit,
    which needs fewer guests. This happens with guests on their owner's node only, and with guests anywhere.

    On few ranks it also happens after the experts that other nodes have most tokens for get guests there, which compute
    their nodes' tokens, so that these do not leave them. The cost model decides between all these plans and no guests.
    With several microbatches, each is leveled in turn, given the guests for the others.
    """

    name = "quota"
    split = "proportional"
    sets_quotas = True
    must_pay = True

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`."""
        alone = current if current.is_identity else owners_host(current)
        if not current.guest_slots or current.num_ranks == 1:
            return alone
        ways = _ways(cost.network, current.guest_slots)
        if not any(way.localized for way in ways) and _is_even(counts, current, cost):
            return alone
        layer = _Layer.of(counts, current, cost)
        plans = [guests for way in ways if (guests := layer.leveled(way))]
        if not plans:
            return alone
        (alone_seconds, *seconds), (_, *hidden) = layer.timed(plans)
        limit, least = alone_seconds * (1 - NEGLIGIBLE), [s + HIDDEN * h for s, h in zip(seconds, hidden, strict=True)]
        for index in sorted(range(len(plans)), key=least.__getitem__):
            if least[index] >= limit:
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
    """Whether guests may be on other nodes than the owner's."""
    slots: int
    """Number of guests of a rank, if that suffices."""
    share: float | None = None
    """Part of a fit's moves that are made; None: those that are worth their cost by a quick estimate."""
    localized: float = 0.0
    """Part of all guest slots for guests that compute their node's tokens of an expert."""
    even: float = EVEN
    """Tokens of the busiest rank over the mean that a first fit aims at."""
    raised: float = 0.0
    """How fast the target rises while ranks remain above it, as a part of their excess; 0: it stays, and receivers are
    filled instead."""
    prefers_near: bool = True
    """Whether a guest on another node has to take over more tokens than one on the owner's node."""


def _ways(network: Network, slots: int) -> list[_Way]:
    """Return the ways that are tried: fewer on more ranks, because they take longer."""
    near, ranks = _Way(not network.has_both_levels, slots), network.num_ranks
    if len(network.first_N) == 1:
        return [near] if slots == 1 or ranks > FEW_RANKS else [near, _Way(True, 1)]
    if ranks > MANY_RANKS:
        return [near, _Way(True, 1, even=1.03), _Way(True, 1, 1.0, even=1.02, raised=1.0, prefers_near=False)]
    ways = [near, _Way(True, 1)]
    if ranks <= FEW_RANKS:
        ways += [_Way(True, 1, 1.0), _Way(True, slots), *(_Way(True, slots, share) for share in SHARES)]
        ways += [_Way(True, slots, localized=part) for part in LOCALIZED]
    return ways


def _together(parts: Iterable[Guests]) -> Guests:
    """Return the sum of the tokens that guests take over."""
    total: dict[tuple[int, int], int] = {}
    for guests in parts:
        for pair, tokens in guests.items():
            total[pair] = total.get(pair, 0) + tokens
    return total


class _Start(NamedTuple):
    """What a fit starts from."""

    experts: list[list[tuple[int, int]]]
    """[D] pairs (tokens, expert) that owners with more than their mean may give away, ascending."""
    loads_D: np.ndarray
    loads: list[int]
    """[D] tokens of each rank, twice."""
    taken: list[int]
    """[D] guest slots that are taken."""
    mean: float
    """Tokens of a rank of average speed if all were even."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Layer:
    """A layer's loads, and the seconds that guests save and take."""

    cost: CostModel
    counts_EBD: np.ndarray
    owner_E: np.ndarray
    home_DH: np.ndarray
    """Experts of each rank."""

    owned_FBD: np.ndarray
    """`owner_loads` of all experts."""

    tokens_BE: np.ndarray
    total_E: list[int]
    """Tokens of each expert in all microbatches."""

    slots: int
    token_seconds: float
    """Seconds for which the busiest rank computes and exchanges a token."""

    @classmethod
    def of(cls, counts: np.ndarray, current: Placement, cost: CostModel) -> "_Layer":
        counts_BDE, network, profile = by_microbatch(counts), cost.network, cost.profile
        counts_EBD, owner_E = counts_BDE.transpose(2, 0, 1), owners(current)
        tokens_BE = counts_BDE.sum(1)
        ranks, size = network.num_ranks, network.node_size
        exchanging = max(network.near.beta * (size - 1), network.far.beta * (ranks - size)) / ranks
        return cls(
            cost=cost,
            counts_EBD=counts_EBD,
            owner_E=owner_E,
            home_DH=np.array(current.home),
            owned_FBD=owner_loads(network, counts_EBD, owner_E),
            tokens_BE=tokens_BE,
            total_E=tokens_BE.sum(0).tolist(),
            slots=current.guest_slots,
            token_seconds=profile.forward.seconds_per_token
            + profile.backward.seconds_per_token
            + 4 * cost.token_bytes * cost.exchange.scale * exchanging,
        )

    def _localized(self, part: float) -> Guests:
        """Return guests of the experts that other nodes than their owner's have most tokens for; they compute these.

        Args:
            part: part of all guest slots that they may take.
        """
        network, slots = self.cost.network, [self.slots] * self.cost.network.num_ranks
        tokens_EN = np.add.reduceat(self.counts_EBD.sum(1), network.first_N, axis=1).astype(np.int64)
        tokens_EN[np.arange(len(tokens_EN)), network.node_D[self.owner_E]] = 0
        hottest = np.argsort(-tokens_EN, axis=None, kind="stable")[: int(part * sum(slots))]
        loads, guests = self.owned_FBD[COMPUTED].sum(0).tolist(), dict[tuple[int, int], int]()
        for expert, node in zip(*np.unravel_index(hottest, tokens_EN.shape), strict=True):
            tokens, first = int(tokens_EN[expert, node]), int(network.first_N[node])
            free = [rank for rank, left in enumerate(slots[first : first + network.node_size], first) if left]
            if tokens and free:
                rank = min(free, key=loads.__getitem__)
                guests[int(expert), rank] = tokens
                loads[rank], loads[self.owner_E[expert]] = loads[rank] + tokens, loads[self.owner_E[expert]] - tokens
                slots[rank] -= 1
        return guests

    def leveled(self, way: _Way) -> Guests:
        """Return the guests that level all ranks, or as far as they are worth their cost."""
        found: dict[int, Guests] = {-1: self._localized(way.localized) if way.localized else {}}
        tokens_BD = self.owned_FBD[COMPUTED]
        order_B = np.argsort(tokens_BD.mean(1) - tokens_BD.max(1), kind="stable").tolist()
        for microbatch in order_B * (ROUNDS if len(order_B) > 1 else 1):
            others = _together(guests for index, guests in found.items() if index != microbatch)
            tokens_E = self.tokens_BE[microbatch]
            moves = self._moves(tokens_E, others, way)
            # The same share of the expert's tokens in all microbatches, at most what the owner has left
            wholes = {
                (expert, target): tokens * self.total_E[expert] // int(tokens_E[expert])
                for expert, _, target, tokens in moves
            }
            found[microbatch] = {guest: whole for guest, whole in wholes.items() if whole}
        return _together(found.values())

    def _loads(self, tokens_E: np.ndarray, guests: Guests) -> np.ndarray:
        """Return [D] the tokens of each rank in a microbatch, rounded down."""
        loads_D = np.bincount(self.owner_E, tokens_E, self.cost.network.num_ranks)
        for (expert, rank), whole in guests.items():
            tokens = whole * int(tokens_E[expert]) / self.total_E[expert]
            loads_D[rank] += tokens
            loads_D[self.owner_E[expert]] -= tokens
        return loads_D.astype(np.int64)

    def _moves(self, tokens_E: np.ndarray, guests: Guests, way: _Way) -> list[Move]:
        """Return the moves of a microbatch's tokens that are worth their cost, given guests for other microbatches."""
        start = self._start if len(self.tokens_BE) == 1 and not guests else self._started(tokens_E, guests)
        busiest = way.even * start.mean
        if not way.reaches_far:
            # A node keeps its tokens
            first_N = self.cost.network.first_N
            loads_N, rate_N = (np.add.reduceat(part_D, first_N) for part_D in (start.loads_D, self.cost.rate_D))
            busiest = way.even * float((loads_N / rate_N).max())
        busiest, found, *kind = self._fitted(start, way, busiest)
        number = self._worthwhile(busiest, found, guests) if way.share is None else round(way.share * len(found.moves))
        if number and found.excess[number] > 0:
            again = self._fit(start, way, busiest + found.excess[number], *kind)
            if again.fits and len(again.moves) < number:
                return again.moves
        return found.moves[:number]

    @cached_property
    def _start(self) -> "_Start":
        """The start of a fit of the only microbatch."""
        return self._started(self.tokens_BE[0], {})

    def _started(self, tokens_E: np.ndarray, guests: Guests) -> "_Start":
        loads_D, taken, left_E = self._loads(tokens_E, guests), [0] * self.cost.network.num_ranks, tokens_E
        if guests:
            left_E = tokens_E.copy()
            for (expert, rank), whole in guests.items():
                taken[rank] += 1
                left_E[expert] -= -(-whole * int(tokens_E[expert]) // self.total_E[expert])
            left_E = np.maximum(left_E, 0)
        mean = float(loads_D.sum() / self.cost.rate_D.sum())
        # Pairs (tokens, expert) as single numbers, sorted for each owner that has too many tokens
        keys_DH = np.sort(left_E[self.home_DH] * len(left_E) + self.home_DH, axis=1).tolist()
        experts = [
            [divmod(key, len(left_E)) for key in row] if heavy else []
            for row, heavy in zip(keys_DH, (loads_D > mean * self.cost.rate_D).tolist(), strict=True)
        ]
        return _Start(experts, loads_D, loads_D.tolist(), taken, mean)

    def _fitted(self, start: "_Start", way: _Way, busiest: float) -> tuple[float, Fitted, int, bool]:
        """Return a fit that leaves so many tokens on the busiest rank, or as few more as possible; `_fit` has the rest.

        The number is that of a rank of average speed, and rises as the way says.
        """
        for _ in range(RUNGS if way.raised else 1):
            found = busiest, self._fit(start, way, busiest, way.slots, False), way.slots, False
            # Within a node, tokens more often lack room than slots
            if found[1].fits or not way.reaches_far:
                return found
            busiest += way.raised * found[1].excess[-1]
        filled = busiest, self._fit(start, way, busiest, way.slots, True), way.slots, True
        if not filled[1].fits and way.slots < self.slots:
            filled = busiest, self._fit(start, way, busiest, self.slots, True), self.slots, True
        return min(found, filled, key=lambda each: each[0] + max(0, each[1].excess[-1]))

    def _fit(self, start: "_Start", way: _Way, busiest: float, slots: int, fills: bool) -> Fitted:
        rate_D, free = self.cost.rate_D, [max(0, slots - taken) for taken in start.taken]
        return fit(
            start.experts,
            start.loads,
            np.maximum(np.ceil(start.mean * rate_D), np.floor(busiest * rate_D)).astype(np.int64).tolist(),
            free,
            node_size=self.cost.network.node_size,
            far=self.cost.transport.far if way.prefers_near else 1.0,
            reaches_far=way.reaches_far,
            fills=fills,
        )

    def _worthwhile(self, busiest: float, found: Fitted, guests: Guests) -> int:
        """Return how many of the first moves are worth their cost."""
        ranks, far, node_D = self.cost.network.num_ranks, self.cost.transport.far, self.cost.network.node_D.tolist()
        seconds_D, chains, owner_E = [0.0] * ranks, dict[int, tuple[float, float]](), self.owner_E
        busy, extra, sent = 0.0, 0.0, []
        added = [*guests, *((move.expert, move.target) for move in found.moves)]
        for expert, target in added:
            owner = int(owner_E[expert])
            time = 1.0 if node_D[owner] == node_D[target] else far
            total, longest = chains.get(expert, (0.0, 0.0))
            seconds_D[target] += time
            # The owner sends the expert once, and guests send it on
            seconds_D[owner] += 0.0 if total else time
            busy = max(busy, seconds_D[owner], seconds_D[target])
            chains[expert] = total + time, max(longest, time)
            extra = max(extra, total + time - chains[expert][1])
            sent.append((busy, extra))
        first = sent[len(guests) - 1] if guests else (0.0, 0.0)
        busy_K, extra_K = np.array([first, *sent[len(guests) :]]).T
        sending = sum(self.cost.exposed(busiest, *self.cost.transport.seconds_of(busy_K, extra_K)))
        total_K = self.token_seconds * (busiest + np.maximum(found.excess, 0)) + sending
        return int((total_K <= total_K.min() * (1 + NEGLIGIBLE)).argmax())

    def timed(self, plans: Sequence[Guests]) -> tuple[list[float], list[float]]:
        """Return the seconds of the layer, and those of Trans and Agg that are hidden, both as on the busiest rank.

        The first are those without guests; the others are those of the plans.
        """
        lent = self._lent(plans)
        busy_A, extra_A = guest_times(self.cost.network, self.cost.transport.far, lent, self.owner_E)
        sent_2A = np.array(self.cost.transport.seconds_of(np.append(0.0, busy_A), np.append(0.0, extra_A)))
        added_AFBD = guest_loads(self.cost.network, self.counts_EBD, self.tokens_BE.T, self.owner_E, lent)
        loads_AFBD = np.concatenate([self.owned_FBD[None], self.owned_FBD + added_AFBD])
        time = self.cost.time_of(*self.cost.work_of(loads_AFBD), *sent_2A)
        return time.total.tolist(), (sent_2A.sum(0) - time.trans - time.agg).tolist()

    def _lent(self, plans: Sequence[Guests]) -> Lent:
        sizes = [*map(len, plans)]
        pairs = chain.from_iterable(chain.from_iterable(plans))
        expert_K, rank_K = np.fromiter(pairs, np.int64, 2 * sum(sizes)).reshape(-1, 2).T
        tokens_K = np.fromiter(chain.from_iterable(guests.values() for guests in plans), np.float64, sum(sizes))
        plan_K = np.repeat(np.arange(len(plans)), sizes)
        return Lent(len(plans), plan_K, expert_K, rank_K, tokens_K / self.tokens_BE.sum(0)[expert_K])

    def placement(self, current: Placement, guests: Guests) -> Placement:
        """Return the placement with these guests; the owner computes what they leave."""
        owned = current.owners
        hosts: list[tuple[int, ...]] = [*zip(owned, strict=True)]
        quotas, primary = list[tuple[int, ...]]([()]) * len(owned), [*owned]
        lent: dict[int, dict[int, int]] = {}
        for (expert, rank), tokens in guests.items():
            lent.setdefault(expert, {})[rank] = tokens
        for expert, taken in lent.items():
            if left := self.total_E[expert] - sum(taken.values()):
                taken[owned[expert]] = left
            else:
                primary[expert] = min(taken)
            hosts[expert], quotas[expert] = (*taken,), (*taken.values(),)
        return current.rehost(hosts, primary, quotas=quotas)
