"""The quota policy: few guests, and exact numbers of tokens for each of them, chosen by the seconds that they save.

M counts experts with guests; K counts guests, or numbers of moves, from none to all of a fit.

Arrays `guests_K3` are int64: a guest's expert, its rank, and the tokens of all microbatches that it takes over from the
expert's owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_balance.cost.candidates import GUEST_LOOPS, PlannedGuests, guest_loads, guest_times
from megatron_balance.cost.core import COMPUTED
from megatron_balance.cost.loads import by_microbatch, owner_loads
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.fit import BUSIEST, FILLING, PARTS, Fitted, cheapest, leveled, sending_times
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
"""Number of ranks up to which more ways to find guests are tried where experts may save messages."""

MANY_RANKS = 64
"""Number of ranks beyond which plans aim at less even loads, because the first copies level most of them."""

SHARES = (0.6,)
"""Parts of a fit's moves that are tried, because the first guest on another node costs much, and others no more."""

RUNGS = 8
"""Number of fits with rising targets before receivers are filled."""

LOCALIZED = (1 / 6, 1 / 3, 1 / 2, 1.0)
"""Parts of all guest slots that are tried for guests that compute their node's tokens of an expert."""

ROUNDS = 2
"""Number of times that each of several microbatches is leveled, given the guests for the others."""


class Quota(Policy):
    """Gives each guest the number of tokens that evens out the ranks, where that saves more than the guest costs.

    `fit` finds moves of tokens that level all ranks, in an order in which each relieves the busiest one. The moves that
    are worth their Trans and Agg are the first ones. What they leave the busiest rank is the capacity of further fits,
    in all orders, whose guests may be fewer or take less time to send. This happens with guests on their owner's node
    only, and with guests anywhere.

    On few ranks, if experts are hidden or small, it also happens after the experts that other nodes have most tokens
    for get guests there, which compute their nodes' tokens, so that these do not leave them. The cost model decides
    between all these plans and no guests. With several microbatches, each is leveled in turn, given the guests for the
    others.
    """

    name = "quota"
    split = "proportional"
    sets_quotas = True
    must_pay = True

    def __init__(self) -> None:
        for loop in (*GUEST_LOOPS, leveled, sending_times, cheapest):
            loop.prepare()

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`."""
        alone = current if current.is_identity else owners_host(current)
        if not current.guest_slots or current.num_ranks == 1:
            return alone
        ways = _ways(counts, current.guest_slots, cost)
        if not any(way.localized for way in ways) and _is_even(counts, current, cost):
            return alone
        layer = _Layer.of(counts, current, cost)
        plans = [guests_K3 for way in ways if len(guests_K3 := layer.leveled(way))]
        if not plans:
            return alone
        (alone_seconds, *seconds), (_, *hidden) = layer.timed(plans)
        limit = alone_seconds * (1 - NEGLIGIBLE)
        least = [s + HIDDEN * h for s, h in zip(seconds, hidden, strict=True)]
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


def _ways(counts: np.ndarray, slots: int, cost: CostModel) -> list[_Way]:
    """Return the ways that are tried: fewer on more ranks, because they take longer."""
    near = _Way(not cost.network.has_both_levels, slots)
    ranks = cost.network.num_ranks
    if len(cost.network.first_N) == 1:
        return [near] if slots == 1 or ranks > FEW_RANKS else [near, _Way(True, 1)]
    if ranks > MANY_RANKS:
        return [near, _Way(True, 1, even=1.03), _Way(True, 1, 1.0, raised=0.3, prefers_near=False)]
    ways = [near, _Way(True, 1)]
    if ranks <= FEW_RANKS and _can_localize(counts, cost):
        ways += [_Way(True, 1, 1.0), _Way(True, slots), *(_Way(True, slots, share) for share in SHARES)]
        ways += [_Way(True, slots, localized=part) for part in LOCALIZED]
    return ways


def _can_localize(counts: np.ndarray, cost: CostModel) -> bool:
    """Return whether experts may be sent to save messages: they are hidden, or weigh less than their tokens.

    Tokens travel there and back, forward and backward.
    """
    experts_bytes = counts.shape[-1] * (cost.param_bytes + cost.grad_bytes)
    return cost.overlap is not None or 4 * cost.token_bytes * int(counts.sum()) > experts_bytes


def _together(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return [K, 3] guests, each once, with the tokens that it takes over in all parts."""
    parts = [guests_K3 for guests_K3 in parts if len(guests_K3)]
    if len(parts) < 2:
        return parts[0] if parts else np.zeros((0, 3), np.int64)
    all_K3 = np.concatenate(parts)
    _, first, guest_K = np.unique(all_K3[:, :2], axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    tokens = np.bincount(guest_K.ravel(), all_K3[:, 2]).astype(np.int64)
    return np.column_stack([all_K3[first[order], :2], tokens[order]])


class _Start(NamedTuple):
    """What a fit starts from."""

    tokens_DH: np.ndarray
    """Tokens of its experts that each rank may give away."""
    loads_D: np.ndarray
    """Tokens of each rank."""
    taken_D: np.ndarray
    """Number of guest slots that are taken."""
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
    total_E: np.ndarray
    """Tokens of each expert in all microbatches."""

    slots: int
    token_seconds: float
    """Seconds for which the busiest rank computes and exchanges a token."""

    @classmethod
    def of(cls, counts: np.ndarray, current: Placement, cost: CostModel) -> "_Layer":
        counts_BDE = by_microbatch(counts)
        network = cost.network
        profile = cost.profile
        counts_EBD = counts_BDE.transpose(2, 0, 1)
        owner_E = owners(current)
        tokens_BE = counts_BDE.sum(1)
        ranks = network.num_ranks
        size = network.node_size
        exchanging = max(network.near.beta * (size - 1), network.far.beta * (ranks - size)) / ranks
        return cls(
            cost=cost,
            counts_EBD=counts_EBD,
            owner_E=owner_E,
            home_DH=np.array(current.home),
            owned_FBD=owner_loads(network, counts_EBD, owner_E),
            tokens_BE=tokens_BE,
            total_E=tokens_BE.sum(0),
            slots=current.guest_slots,
            token_seconds=profile.forward.seconds_per_token
            + profile.backward.seconds_per_token
            + 4 * cost.token_bytes * cost.exchange.scale * exchanging,
        )

    @cached_property
    def _localized(self) -> tuple[np.ndarray, np.ndarray]:
        """[K, 3] guests of the experts that other nodes than their owner's have most tokens for; they compute these.

        The second array is [K], how many pairs of an expert and a node have more tokens than a guest's.
        """
        network = self.cost.network
        slots = [self.slots] * self.cost.network.num_ranks
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
        found_K4 = np.array(found, np.int64).reshape(-1, 4)
        return found_K4[:, :3], found_K4[:, 3]

    def leveled(self, way: _Way) -> np.ndarray:
        """Return [K, 3] the guests that level all ranks, or as far as they are worth their cost."""
        found = [np.zeros((0, 3), np.int64)] * (1 + len(self.tokens_BE))
        if way.localized:
            guests_K3, place_K = self._localized
            found[0] = guests_K3[place_K < int(way.localized * self.slots * self.cost.network.num_ranks)]
        tokens_BD = self.owned_FBD[COMPUTED]
        order_B = np.argsort(tokens_BD.mean(1) - tokens_BD.max(1), kind="stable").tolist()
        for index, microbatch in [*enumerate(order_B, start=1)] * (ROUNDS if len(order_B) > 1 else 1):
            others_K3 = _together([*found[:index], *found[index + 1 :]])
            tokens_E = self.tokens_BE[microbatch]
            guests_K3 = self._moves(tokens_E, others_K3, way)[:, [0, 2, 3]]
            # The same share of the expert's tokens in all microbatches, at most what the owner has left
            expert_K = guests_K3[:, 0]
            guests_K3[:, 2] = guests_K3[:, 2] * self.total_E[expert_K] // tokens_E[expert_K]
            found[index] = guests_K3[guests_K3[:, 2] > 0]
        return _together(found)

    def _moves(self, tokens_E: np.ndarray, guests_K3: np.ndarray, way: _Way) -> np.ndarray:
        """Return the moves of a microbatch's tokens that are worth their cost, given guests for other microbatches."""
        alone = len(self.tokens_BE) == 1 and not len(guests_K3)
        start = self._start if alone else self._started(tokens_E, guests_K3)
        busiest = way.even * start.mean
        if not way.reaches_far:
            # A node keeps its tokens
            first_N = self.cost.network.first_N
            loads_N, rate_N = (np.add.reduceat(part_D, first_N) for part_D in (start.loads_D, self.cost.rate_D))
            busiest = way.even * float((loads_N / rate_N).max())
        busiest, found, slots = self._fitted(start, way, busiest)
        number = round((way.share or 0) * len(found.moves_MF))
        if way.share is None:
            number = self._worthwhile(busiest, found, guests_K3)
        if not number:
            return found.moves_MF[:0]
        return self._cheapest(
            start, way, busiest + max(0, int(found.excess_N[number])), slots, found.moves_MF[:number], guests_K3
        )

    @cached_property
    def _start(self) -> "_Start":
        """The start of a fit of the only microbatch."""
        return self._started(self.tokens_BE[0], np.zeros((0, 3), np.int64))

    def _started(self, tokens_E: np.ndarray, guests_K3: np.ndarray) -> "_Start":
        ranks = self.cost.network.num_ranks
        left_E = tokens_E
        loads_D = np.bincount(self.owner_E, tokens_E, ranks)
        expert_K, rank_K, whole_K = guests_K3.T
        if len(guests_K3):
            product_K = whole_K * tokens_E[expert_K]
            total_K = self.total_E[expert_K]
            ends_K2 = np.stack([rank_K, self.owner_E[expert_K]], axis=1)
            np.add.at(loads_D, ends_K2, (product_K / total_K)[:, None] * (1, -1))
            left_E = tokens_E.copy()
            np.subtract.at(left_E, expert_K, -(-product_K // total_K))
            left_E = np.maximum(left_E, 0)
        loads_D = loads_D.astype(np.int64)
        mean = float(loads_D.sum() / self.cost.rate_D.sum())
        return _Start(left_E[self.home_DH], loads_D, np.bincount(rank_K, minlength=ranks), mean)

    def _fitted(self, start: "_Start", way: _Way, busiest: float) -> tuple[float, Fitted, int]:
        """Return a fit that leaves so many tokens on the busiest rank, or as few more as possible, and a rank's slots.

        The number of tokens is that of a rank of average speed, and rises as the way says.
        """
        for _ in range(RUNGS if way.raised else 1):
            found = busiest, self._fit(start, way, busiest, way.slots, BUSIEST), way.slots
            # Within a node, tokens more often lack room than slots
            if found[1].fits or not way.reaches_far:
                return found
            busiest += way.raised * int(found[1].excess_N[-1])
        filled = busiest, self._fit(start, way, busiest, way.slots, FILLING), way.slots
        if not filled[1].fits and way.slots < self.slots:
            filled = busiest, self._fit(start, way, busiest, self.slots, FILLING), self.slots
        return min(found, filled, key=lambda each: each[0] + max(0, int(each[1].excess_N[-1])))

    def _fit(self, start: "_Start", way: _Way, busiest: float, slots: int, order: int) -> Fitted:
        tokens_DS, *others = self._given(start, way, busiest, slots)
        return Fitted(*leveled(tokens_DS.copy(), *others, order))

    def _cheapest(
        self, start: "_Start", way: _Way, busiest: float, slots: int, moves_MF: np.ndarray, guests_K3: np.ndarray
    ) -> np.ndarray:
        """Return these moves, or others with the same number of tokens on the busiest rank that are cheaper."""
        pairs_K2 = np.ascontiguousarray(guests_K3[:, :2])
        negligible = NEGLIGIBLE * self.token_seconds * busiest
        given = self._given(start, way, busiest, slots)
        return cheapest(moves_MF, *given, pairs_K2, self.owner_E, self.cost.transport.prices_1, negligible)

    def _given(self, start: "_Start", way: _Way, busiest: float, slots: int) -> tuple[Any, ...]:
        """Return the first arguments of `leveled`."""
        rate_D = self.cost.rate_D
        network = self.cost.network
        capacities_D = np.maximum(np.ceil(start.mean * rate_D), np.floor(busiest * rate_D)).astype(np.int64)
        far = round((self.cost.transport.far if way.prefers_near else 1.0) * PARTS) if way.reaches_far else 0
        free_D = np.maximum(slots - start.taken_D, 0)
        return start.tokens_DH, self.home_DH, start.loads_D - capacities_D, free_D, network.node_size, far

    def _worthwhile(self, busiest: float, found: Fitted, guests_K3: np.ndarray) -> int:
        """Return how many of the first moves are worth their cost."""
        network = self.cost.network
        transport = self.cost.transport
        pairs_K2 = np.concatenate([guests_K3[:, :2], found.moves_MF[:, ::2]])
        sent_2K = sending_times(pairs_K2, self.owner_E, network.num_ranks, network.node_size, transport.far)
        sending = sum(self.cost.exposed(busiest, *transport.seconds_of(*sent_2K[:, len(guests_K3) :])))
        total_K = self.token_seconds * (busiest + np.maximum(found.excess_N, 0)) + sending
        return int((total_K <= total_K.min() * (1 + NEGLIGIBLE)).argmax())

    def timed(self, plans: Sequence[np.ndarray]) -> tuple[list[float], list[float]]:
        """Return the seconds of the layer, and those of Trans and Agg that are hidden, both as on the busiest rank.

        The first are those without guests; the others are those of the plans.
        """
        guests = self._guests(plans)
        far = self.cost.transport.far
        busy_A, extra_A = guest_times(self.cost.network, far, self.owner_E, guests, len(plans))
        sent_2A = np.array(self.cost.transport.seconds_of(np.append(0.0, busy_A), np.append(0.0, extra_A)))
        loads = self.counts_EBD, self.tokens_BE.T, self.owner_E
        added_AFBD = guest_loads(self.cost.network, *loads, guests, len(plans))
        loads_AFBD = np.concatenate([self.owned_FBD[None], self.owned_FBD + added_AFBD])
        time = self.cost.time_of(*self.cost.work_of(loads_AFBD), *sent_2A)
        return time.total.tolist(), (sent_2A.sum(0) - time.trans - time.agg).tolist()

    def _guests(self, plans: Sequence[np.ndarray]) -> PlannedGuests:
        expert_K, rank_K, tokens_K = np.concatenate(plans).T
        plan_K = np.repeat(np.arange(len(plans)), [*map(len, plans)])
        return PlannedGuests.of(plan_K, expert_K, rank_K, tokens_K / self.total_E[expert_K])

    def placement(self, current: Placement, guests_K3: np.ndarray) -> Placement:
        """Return the placement with these guests; the owner computes what they leave."""
        owned = current.owners
        hosts: list[tuple[int, ...]] = [*zip(owned, strict=True)]
        quotas = list[tuple[int, ...]]([()]) * len(owned)
        primary = [*owned]
        lent: dict[int, dict[int, int]] = {}
        for expert, rank, tokens in guests_K3.tolist():
            lent.setdefault(expert, {})[rank] = tokens
        for expert, taken in lent.items():
            if left := int(self.total_E[expert]) - sum(taken.values()):
                taken[owned[expert]] = left
            else:
                primary[expert] = min(taken)
            hosts[expert], quotas[expert] = (*taken,), (*taken.values(),)
        return current.rehost(hosts, primary, quotas=quotas)
