"""DEMI: chooses hosts so that the layer's mini-tasks finish soonest (its Algorithm 1).

In the paper, an expert has one host, so no plan is faster than the largest expert. Here, an expert with more tokens
than a rank's mean is first divided into equal parts, like FlexMoE's vExperts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from megatron_balance.cost.loads import by_microbatch
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.demi.listing import list_schedule
from megatron_balance.planning.demi.problem import FEWEST_SLOTS, WEIGHTS, Problem
from megatron_balance.planning.demi.schedule import MiniTaskSchedule
from megatron_balance.planning.demi.search import best_pace, relax_by_size, solve
from megatron_balance.planning.policies.interface import Policy, owners_host

MOST_SLOTS = 20
"""Maximum number of slots: with more, the weights 2^t differ too much for a linear program's tolerances."""

LEAST_SECONDS = 1e-15
"""Minimum seconds per byte of a link or rank, because a line through noisy times may be flat."""

CONFIRMED = 16
"""Number of placements that the cost model times; the shortest schedules come first."""

LARGEST_PARTS = (1.0, 0.5)
"""Maximum loads of experts' parts, over a rank's mean load; each value gives another problem."""

FINE = 1024
"""Maximum number of (rank, expert) pairs for which parts may be smaller than the first of LARGEST_PARTS."""

MIN_GAIN = 0.001
"""Share of the layer's time that lending must save, because the cost model omits part of its cost."""

MOVE_GAIN = 0.05
"""Share of the layer's time that a change of lent experts must save. Loads change a little in every iteration, and many
choices are about equally good. An expert that stays lent can become a Transfer."""


@dataclass(frozen=True)
class Demi(Policy):
    """Lends experts to the ranks where dispatch, expert transfer and computation together finish soonest.

    Execution overlaps less than a schedule of mini-tasks. So the plan is chosen by the cost model: the fastest among
    the placements with the shortest schedules (with and without parts of experts), the current placement, and owners
    alone. The current placement wins if it is nearly as fast.
    """

    name = "demi"
    options = MappingProxyType(
        {"slots": "balance_demi_slots", "weights": "balance_demi_weights", "hosts": "balance_demi_hosts"}
    )
    split = "proportional"
    orders_chunks = True

    slots: int = 5
    """T: number of time slots of the linear program."""
    weights: str = "pow2"
    """Weights omega_t of the slots: a name in WEIGHTS."""
    hosts: int = 16
    """Maximum number of parts of an expert; 1: as in the paper."""

    def __post_init__(self) -> None:
        if not FEWEST_SLOTS <= self.slots <= MOST_SLOTS:
            raise ValueError(
                f"--balance-demi-slots {self.slots}: give {FEWEST_SLOTS} to {MOST_SLOTS}; sending, computing and "
                "sending back take a slot each"
            )
        if self.weights not in WEIGHTS:
            raise ValueError(f"--balance-demi-weights {self.weights}: choose from {', '.join(WEIGHTS)}")
        if self.hosts < 1:
            raise ValueError(f"--balance-demi-hosts {self.hosts}: must be at least 1")

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        best = current if current.is_identity else owners_host(current)
        limit = most = cost.layer_seconds(counts, best) * (1 - MIN_GAIN)
        counts_DE = by_microbatch(counts).sum(0)
        for parts_E in self._divisions(counts_DE):
            if self._least_seconds(counts_DE, current, cost, parts_E) >= limit:
                continue
            problem = self.problem(counts_DE, current, cost).divided(parts_E)
            for hosts_E in solve(problem, relax_by_size(problem)).hosts_BE[:CONFIRMED]:
                planned = _hosted(current, problem.whole_E, hosts_E)
                if (seconds := cost.layer_seconds(counts, planned)) < limit:
                    best = planned
                    limit = seconds
        if current.is_identity or current.quotas or max(map(len, current.hosts)) > self.hosts:
            return best
        stay = cost.layer_seconds(counts, current)
        return current if stay < most and stay * (1 - MOVE_GAIN) < limit else best

    def schedule(self, tokens_DP: np.ndarray, placement: Placement, cost: CostModel) -> MiniTaskSchedule:
        """See `Policy.schedule`. An expert's hosts compute parts of it, each with its own mini-tasks."""
        tables = placement.tables
        tokens_DN = tokens_DP[:, tables.physical_N]
        part_of_N = tables.expert_N
        counts_DE = np.zeros((placement.num_ranks, placement.num_experts))
        np.add.at(counts_DE.T, part_of_N, tokens_DN.T)
        problem = self.problem(counts_DE, placement, cost).of_parts(tokens_DN * float(cost.token_bytes), part_of_N)
        hosts_N = tables.physical_N // placement.slots_per_rank
        pace, _ = best_pace(problem, hosts_N[None], relax_by_size(problem))
        return list_schedule(problem, hosts_N, pace)

    def problem(self, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> Problem:
        """Return DEMI's problem, in bytes, for half an iteration: the paper's forward pass, at both passes' mean speed.

        A link has its share of the ranks' bandwidth in an exchange among all ranks. An expert's size is the number of
        bytes that cross a slowest link during the exposed Trans and Agg of one expert (between nodes if there are
        several). Measured in bytes of a nearly free link, every expert would be huge. Room for tokens and for experts
        is half of the total, as in the paper, or more if a rank owns more or one expert needs more. A slot is long
        enough for the owners to finish within T slots, so the linear program always has a solution.
        """
        num_ranks = current.num_ranks
        tokens_DE = counts_DE * float(cost.token_bytes)
        owner_E = owners(current)
        network = cost.network
        share_D = cost.rate_D / cost.rate_D.mean()
        mean = float(counts_DE.sum() / cost.rate_D.sum())
        betas = np.where(network.is_near_DD, network.near.beta, network.far.beta * network.node_size / network.adapters)
        per_byte_DD = (betas * cost.exchange.scale).clip(LEAST_SECONDS) * max(1, num_ranks - 1)
        per_token = cost.seconds_per_token / 2
        compute_D = cost.rate_D / max(per_token / cost.token_bytes, LEAST_SECONDS)
        one = cost.transport.expert_seconds(far=True)
        size = float(sum(cost.charged(mean, *one))) / 2 / float(per_byte_DD.max())
        owned_DD = np.zeros((num_ranks, num_ranks))
        np.add.at(owned_DD, owner_E, tokens_DE.T)
        crossing_DD = owned_DD + owned_DD.T
        np.fill_diagonal(crossing_DD, 0.0)
        computed_D = owned_DD.sum(1)
        busiest = max(float((crossing_DD * per_byte_DD).max()), float((computed_D / compute_D).max()))
        # Any length is valid without tokens
        slot_seconds = (busiest or 1.0) / (self.slots - FEWEST_SLOTS + 1)
        room_D = np.maximum(tokens_DE.sum() / 2 * share_D, computed_D)
        return Problem(
            tokens_DE=tokens_DE,
            owner_E=owner_E,
            size_E=np.full(current.num_experts, size),
            link_DD=slot_seconds / per_byte_DD,
            compute_D=slot_seconds * compute_D,
            token_room_D=np.maximum(room_D, tokens_DE.sum(0).max()),
            expert_room_D=np.full(num_ranks, size * max(current.num_experts / 2, current.home_slots)),
            slots=self.slots,
            weights=self.weights,
            guests=current.guest_slots,
        )

    def _divisions(self, counts_DE: np.ndarray) -> Iterator[np.ndarray]:
        """Yield numbers of parts of each expert, at most `hosts`: by LARGEST_PARTS, then whole experts."""
        load_E = counts_DE.sum(0)
        number = len(counts_DE) / max(1, counts_DE.sum())
        largest = LARGEST_PARTS[: 1 if counts_DE.size > FINE else None]
        ways = [np.ceil(load_E * number / share).astype(np.int64).clip(1, self.hosts) for share in largest]
        yield from np.unique([np.ones_like(load_E), *ways], axis=0)[::-1]

    def _least_seconds(self, counts_DE: np.ndarray, current: Placement, cost: CostModel, parts_E: np.ndarray) -> float:
        """Return a lower bound for all placements with guests and these numbers of parts. It assumes even computation,
        unless a part is too large, and each part on one of the ranks with most of its expert's tokens."""
        if current.num_ranks == 1 or not current.guest_slots:
            return math.inf
        num_ranks = current.num_ranks
        tokens = float(counts_DE.sum())
        network = cost.network
        largest = float((counts_DE.sum(0) / parts_E).max()) / float(cost.rate_D.max())
        ranked_DE = np.sort(counts_DE, axis=0)[::-1]
        local = float(ranked_DE[np.arange(num_ranks)[:, None] < parts_E].sum())
        beta = min(network.near.beta, network.far.beta) * cost.exchange.scale
        exchanging = beta * cost.token_bytes * (tokens - local) / num_ranks
        one = cost.transport.expert_seconds(far=False)
        return float(cost.time_of(exchanging, max(tokens / float(cost.rate_D.sum()), largest), *one).total)


def _hosted(current: Placement, whole_P: np.ndarray, hosts_P: np.ndarray) -> Placement:
    """Return the placement in which parts of experts have these hosts; an owner that hosts is the primary host."""
    hosts: list[list[int]] = [[] for _ in range(current.num_experts)]
    for expert, rank in zip(whole_P.tolist(), hosts_P.tolist(), strict=True):
        hosts[expert].append(rank)
    pairs = zip(current.owners, hosts, strict=True)
    return current.rehost(hosts, [owner if owner in ranks else min(ranks) for owner, ranks in pairs])
