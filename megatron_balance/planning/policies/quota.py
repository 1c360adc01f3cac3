"""The quota policy: few guests, and exact numbers of tokens for each of them, chosen by the seconds that they save.

M counts experts with guests; K counts numbers of moves, from none to all of a fit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.loads import COMPUTED, by_microbatch, expert_loads, owner_loads
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
"""Number of ranks up to which there is time for SHARES and LOCALIZED."""

SHARES = (0.6,)
"""Parts of a fit's moves that are tried, because the first guest on another node costs much, and others no more."""

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

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """See `Policy.plan`."""
        alone = current if current.is_identity else owners_host(current)
        if not current.guest_slots or current.num_ranks == 1:
            return alone
        layer = _Layer.of(counts, current, cost)
        limit = sum(layer.seconds({})) * (1 - NEGLIGIBLE)
        plans = [layer.leveled(way) for way in _ways(cost.network, current.guest_slots)]
        timed = [(*layer.seconds(guests), index) for index, guests in enumerate(plans) if guests]
        for seconds, hidden, index in sorted(timed, key=lambda plan: plan[0] + HIDDEN * plan[1]):
            if seconds + HIDDEN * hidden >= limit:
                break
            planned = layer.placement(current, plans[index])
            if seconds * (1 + UNSURE) < limit or cost.layer_seconds(counts, planned) < limit:
                return planned
        return alone


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


def _ways(network: Network, slots: int) -> list[_Way]:
    """Return the ways that are tried: two on many ranks, because more take too long."""
    ways = [_Way(True, 1, share=1.0), _Way(not network.has_both_levels, slots)]
    if len(network.first_N) > 1 and network.num_ranks <= FEW_RANKS:
        ways += [_Way(True, 1), _Way(True, slots), *(_Way(True, slots, share) for share in SHARES)]
        ways += [_Way(True, slots, localized=part) for part in LOCALIZED]
    return ways


def _together(parts: Iterable[Guests]) -> Guests:
    """Return the sum of the tokens that guests take over."""
    total: dict[tuple[int, int], int] = {}
    for guests in parts:
        for pair, tokens in guests.items():
            total[pair] = total.get(pair, 0) + tokens
    return total


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
        counts_EBD, owner_E = counts_BDE.transpose(2, 0, 1).astype(np.float64), owners(current)
        ranks, size = network.num_ranks, network.node_size
        exchanging = max(network.near.beta * (size - 1), network.far.beta * (ranks - size)) / ranks
        return cls(
            cost=cost,
            counts_EBD=counts_EBD,
            owner_E=owner_E,
            home_DH=np.array(current.home),
            owned_FBD=owner_loads(network, counts_EBD, owner_E),
            tokens_BE=counts_BDE.sum(1),
            total_E=counts_BDE.sum((0, 1)).tolist(),
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
        network, rate_D = self.cost.network, self.cost.rate_D
        loads_D, taken_D, left_E = self._loads(tokens_E, guests), [0] * network.num_ranks, tokens_E.copy()
        for (expert, rank), whole in guests.items():
            taken_D[rank] += 1
            left_E[expert] -= -(-whole * int(tokens_E[expert]) // self.total_E[expert])
        # Pairs (tokens, expert) as single numbers, sorted for each owner
        keys_DH = np.sort(np.maximum(left_E, 0)[self.home_DH] * len(left_E) + self.home_DH, axis=1)
        experts = [[divmod(key, len(left_E)) for key in row] for row in keys_DH.tolist()]
        mean = float(loads_D.sum() / rate_D.sum())

        def fitted(busiest: float) -> Fitted:
            """Fit with so many tokens on the busiest rank, or on one of average speed."""
            capacity_D = np.maximum(np.ceil(mean * rate_D), np.floor(busiest * rate_D)).astype(np.int64)
            given = experts, loads_D.tolist(), capacity_D.tolist()
            reach = {"node_size": network.node_size, "far": self.cost.transport.far, "reaches_far": way.reaches_far}
            found: list[Fitted] = []
            for fills, slots in (False, way.slots), (True, way.slots), (True, self.slots):
                free = [max(0, slots - taken) for taken in taken_D]
                found.append(fit(*given, free, **reach, fills=fills))
                # Within a node, tokens more often lack room than slots
                if found[-1].fits or not way.reaches_far:
                    break
            return min(found, key=lambda fitted: max(0, fitted.excess[-1]))

        busiest = EVEN * mean
        if not way.reaches_far:
            # A node keeps its tokens
            loads_N, rate_N = (np.add.reduceat(part_D, network.first_N) for part_D in (loads_D, rate_D))
            busiest = EVEN * float((loads_N / rate_N).max())
        found = fitted(busiest)
        number = self._worthwhile(busiest, found, guests) if way.share is None else round(way.share * len(found.moves))
        if number and found.excess[number] > 0:
            again = fitted(busiest + found.excess[number])
            if again.fits and len(again.moves) < number:
                return again.moves
        return found.moves[:number]

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

    def seconds(self, guests: Guests) -> tuple[float, float]:
        """Return the seconds of the layer, and those of Trans and Agg that are hidden, both as on the busiest rank."""
        loads_FBD, sent = self.owned_FBD, (0.0, 0.0)
        if guests:
            network, transport, (shares_MD, expert_M) = self.cost.network, self.cost.transport, self._shares(guests)
            counts_MBD, owner_M = self.counts_EBD[expert_M], self.owner_E[expert_M]
            shared_FBD = expert_loads(network, "proportional", counts_MBD, shares_MD, owner_M).sum(0)
            loads_FBD = loads_FBD + shared_FBD - owner_loads(network, counts_MBD, owner_M)
            is_guest_MD = (shares_MD > 0) & (np.arange(network.num_ranks) != owner_M[:, None])
            times_MD, extra_M = transport.link_times(owner_M, is_guest_MD)
            busy = times_MD.sum(0).max()
            if network.adapters < network.node_size:
                enters_MN = np.logical_or.reduceat(is_guest_MD & ~network.is_near_DD[owner_M], network.first_N, axis=1)
                busy = max(busy, transport.far * enters_MN.sum(0).max() / network.adapters)
            sent = transport.seconds_of(busy, extra_M.max())
        time = self.cost.time_of(*self.cost.work_of(loads_FBD), *sent)
        return float(time.total), float(sum(sent) - time.trans - time.agg)

    def _shares(self, guests: Guests) -> tuple[np.ndarray, np.ndarray]:
        """Return [M, D] the tokens that each rank computes of experts with guests, and [M] these experts."""
        row_of: dict[int, int] = {}
        for expert, _ in guests:
            row_of.setdefault(expert, len(row_of))
        expert_M = np.array([*row_of], dtype=np.int64)
        shares_MD = np.zeros((len(row_of), self.cost.network.num_ranks), dtype=np.int64)
        for (expert, rank), tokens in guests.items():
            shares_MD[row_of[expert], rank] = tokens
        total_M = np.array(self.total_E)[expert_M]
        shares_MD[np.arange(len(expert_M)), self.owner_E[expert_M]] = total_M - shares_MD.sum(1)
        return shares_MD, expert_M

    def placement(self, current: Placement, guests: Guests) -> Placement:
        """Return the placement with these guests; the owner computes what they leave."""
        owned = [*self.owner_E.tolist()]
        hosts: list[list[int]] = [[owner] for owner in owned]
        quotas: list[list[int]] = [[] for _ in owned]
        for (expert, rank), tokens in guests.items():
            hosts[expert].append(rank)
            quotas[expert] = [*(quotas[expert] or [self.total_E[expert]]), tokens]
            quotas[expert][0] -= tokens
        for expert in {expert for expert, _ in guests}:
            if not quotas[expert][0]:
                del hosts[expert][0], quotas[expert][0]
        primary = [owner if owner in ranks else min(ranks) for owner, ranks in zip(owned, hosts, strict=True)]
        return current.rehost(hosts, primary, quotas=quotas)
