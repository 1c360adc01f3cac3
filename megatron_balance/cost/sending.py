"""Seconds of Trans and Agg, and the routes and pieces with which they take the fewest.

A piece of b bytes takes alpha + beta * b seconds on a link within a node, and other such seconds between nodes: the
profile's lines of `trans` and `agg`. A rank sends one piece at a time and receives one, and the ranks of a node share
its adapters.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_balance.cost.loads import Lent
from megatron_balance.cost.network import Network
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.transfers import LinkLoads, TransferPlan, plan_transfers, routes
from megatron_balance.profile.cluster_profile import LEVELS, ClusterProfile, Fit

FANOUTS = (1, 2, 16)
"""Fanouts to choose from: a chain, a tree with two sends per rank, and one that doubles up to 2**16 ranks."""

MOST_CHUNKS = 64
"""Maximum number of pieces of an expert: enough for a chain of 64 ranks; each piece costs a call."""

LEAST_CHUNKS = 4
"""Minimum number of pieces of a large expert whose plan is executed in two parts."""

LEAST_ALPHA = 1e-6
"""Minimum latency of a message in seconds for choosing pieces: a line through noisy times may have none."""

WORTHWHILE = 1.05
"""Time of chains over a lower bound for all routes, below which no trees are tried."""

ROUNDING = 1e-9
TINY = np.finfo(np.float64).tiny

USUAL_CHUNKS = 8
"""Number of pieces for which a message between nodes is compared with one within a node."""


class Sending(NamedTuple):
    """How a placement's experts reach their guests, and the seconds that it takes at least."""

    fanout: int
    chunks: int
    """As in `plan_transfers`."""
    trans: float
    agg: float


@dataclass(frozen=True)
class SendingModel:
    """Predicts Trans and Agg for experts of one size."""

    profile: ClusterProfile
    param_bytes: float
    grad_bytes: float
    in_parts: bool
    """Whether Trans and Agg are executed in two parts."""

    @cached_property
    def network(self) -> Network:
        return Network.of(self.profile)

    @cached_property
    def far(self) -> float:
        """Time of a piece between nodes, in pieces within a node; 1 if there is one node."""
        if self.profile.num_ranks <= self.profile.node_size:
            return 1.0
        near, far = (self.profile.link("trans", level).seconds(self.param_bytes / USUAL_CHUNKS) for level in LEVELS)
        return far / near if near else 1.0

    def best(self, placement: Placement) -> Sending:
        """Return the routes and pieces with the fewest seconds of Trans; ties go to the chain, then to fewer pieces.

        Trees are tried if chains take much longer than what no routes avoid: each guest receives its experts, and the
        ranks that have an expert double at most.
        """
        if not placement.added_hosts:
            return Sending(1, 1, 0.0, 0.0)
        lines, received = self.chains(placement)
        choices, hosts = [Sending(1, *self.fewest_seconds(lines))], max(len({*ranks}) for ranks in placement.hosts)
        least = np.array([[received, 0.0], [1.0, np.log2(hosts) - 1]])
        if choices[0].trans > WORTHWHILE * self.fewest_seconds(least)[1]:
            for fanout in FANOUTS[1:]:
                loads = LinkLoads(self.profile.num_ranks, self.profile.node_size, self.network.adapters)
                for route in routes(placement, self.profile.node_size, fanout, self.far).values():
                    loads.add(route)
                choices.append(Sending(fanout, *self.fewest_seconds(np.array(loads.lines))))
        return min(choices, key=lambda choice: choice.trans)

    def along_chains(self, expert_M: np.ndarray, rank_M: np.ndarray, owner_M: np.ndarray) -> Sending:
        """Return the pieces with the fewest seconds if every expert travels along a chain; `best` is not slower.

        Args:
            expert_M, rank_M, owner_M: guests, at least one.
        """
        return Sending(1, *self.fewest_seconds(self.chain_lines(owner_M, expert_M, rank_M)[0]))

    def chains(self, placement: Placement) -> tuple[np.ndarray, float]:
        """Return the `LinkLoads.lines` of all experts' chains, in any order, and the busiest rank's time of receiving.

        It is `route_of` with `fanout` 1 and `LinkLoads` for all experts at once. There is at least one guest.
        """
        guests_DG = np.asarray(placement.guests)
        rank_M, slot_M = (guests_DG != EMPTY).nonzero()
        expert_M = guests_DG[rank_M, slot_M]
        return self.chain_lines(np.asarray(placement.owners)[expert_M], expert_M, rank_M)

    def chain_lines(self, owner_M: np.ndarray, expert_M: np.ndarray, rank_M: np.ndarray) -> tuple[np.ndarray, float]:
        """Return `chains` of guests in any order, at least one: their experts, the owners of these, and their ranks."""
        network, num_ranks, node_D = self.network, self.profile.num_ranks, self.network.node_D
        nodes = len(network.first_N)
        order_M = np.lexsort(
            ((rank_M - owner_M) % network.node_size, (node_D[rank_M] - node_D[owner_M]) % nodes, expert_M)
        )
        rank_M, expert_M, owner_M = rank_M[order_M], expert_M[order_M], owner_M[order_M]
        is_first_M = np.append(True, expert_M[1:] != expert_M[:-1])
        source_M = np.where(is_first_M, owner_M, np.roll(rank_M, 1))
        is_far_M = node_D[source_M] != node_D[rank_M]
        time_M = np.where(is_far_M, self.far, 1.0)
        chain_M = is_first_M.cumsum() - 1
        total_M = np.bincount(chain_M, time_M)[chain_M]
        start_M = (time_M.cumsum() - time_M)[is_first_M][chain_M]
        before_M = time_M.cumsum() - time_M - start_M
        ends = [(source_M, time_M, slice(None)), (rank_M + num_ranks, time_M, slice(None))]
        if network.adapters < network.node_size:
            shared_M = time_M[is_far_M] / network.adapters
            first = 2 * num_ranks
            ends += [(node_D[source_M[is_far_M]] + first, shared_M, is_far_M)]
            ends += [(node_D[rank_M[is_far_M]] + first + nodes, shared_M, is_far_M)]
        places, times = (np.concatenate([end[part] for end in ends]) for part in (0, 1))
        befores = np.concatenate([before_M[end[2]] for end in ends])
        afters = np.concatenate([(total_M - before_M - time_M)[end[2]] for end in ends])
        busy, before, after = np.bincount(places, times), *(np.full(places.max() + 1, np.inf) for _ in range(2))
        np.minimum.at(before, places, befores)
        np.minimum.at(after, places, afters)
        used = busy > 0
        alone = [(time, (total_M - time_M)[time_M == time].max()) for time in np.unique(time_M)]
        lines = np.concatenate([np.stack([busy, before + after], axis=1)[used], alone])
        return lines, float(busy[num_ranks : 2 * num_ranks].max())

    def plan(self, placement: Placement) -> TransferPlan:
        """Return the messages of `best`."""
        sending = self.best(placement)
        return plan_transfers(placement, self.profile.node_size, sending.chunks, sending.fanout, self.far)

    def fewest_seconds(self, lines: np.ndarray) -> tuple[int, float, float]:
        """Return the number of pieces with the fewest seconds of Trans, and these seconds and those of Agg.

        The seconds are lower bounds; ties go to fewer pieces.

        Args:
            lines: pairs as in `LinkLoads.lines`, at least one.
        """
        busy_B, extra_B = lines.T.clip(0.0)
        chunks_A = np.unique([self.fewest_chunks, *self.best_chunks(busy_B, extra_B)])
        time_A = (np.multiply.outer(chunks_A, busy_B) + extra_B).max(1)
        trans_A = self.trans_seconds(time_A, chunks_A)
        best = trans_A.argmin()
        return int(chunks_A[best]), float(trans_A[best]), float(self.agg_seconds(time_A[best], chunks_A[best]))

    def seconds_of(self, busy: Any, extra: Any) -> tuple[Any, Any]:
        """Return the seconds of Trans and Agg if the busiest rank sends for `busy` and `extra` follows.

        The unit is an expert within a node; arguments are numbers, or arrays of one shape.
        """
        if np.ndim(busy) == 0:
            return self._seconds_of_one(float(busy), float(extra))
        chunks = self.best_chunks(np.maximum(busy, TINY), extra)
        time = np.where(busy > 0, busy * chunks + extra, 0.0)
        return self.trans_seconds(time, chunks), self.agg_seconds(time, chunks)

    def _seconds_of_one(self, busy: float, extra: float) -> tuple[float, float]:
        """Return `seconds_of` numbers, in which numpy would take most of the time."""
        if busy <= 0:
            return 0.0, 0.0
        least = self.far * (1 - ROUNDING)
        latencies = self._latencies["inter" if self.far > 1 and busy >= least else "intra"]
        chunks = float(min(max(round(math.sqrt(extra / busy * latencies)), self.fewest_chunks), MOST_CHUNKS))
        time = busy * chunks + extra
        is_far = self.far > 1 and time / chunks >= least
        trans, agg = (
            time * (far.seconds(size / chunks) / self.far if is_far else near.seconds(size / chunks))
            for (near, far), size in zip(self._lines, (self.param_bytes, self.grad_bytes), strict=True)
        )
        return trans, agg

    @cached_property
    def _lines(self) -> tuple[tuple[Fit, Fit], ...]:
        """Lines within nodes and between nodes, of Trans and of Agg."""
        trans, agg = ([self.profile.link(kind, level) for level in LEVELS] for kind in ("trans", "agg"))
        return (trans[0], trans[1]), (agg[0], agg[1])

    def link_times(self, owner_A: np.ndarray, guests_AD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return [A, D] the time in which each rank receives an expert, or in which its owner sends it once.

        The second result is [A], the time that a piece spends on the other links of its chain. The unit is an expert
        within a node. An expert enters each node once, where `route_of` does.

        Args:
            guests_AD: bool, ranks that receive the expert.
        """
        network, rows_A = self.network, np.arange(len(owner_A))
        times_AD = guests_AD.astype(np.float64)
        if len(network.first_N) == 1:
            times_AD[rows_A, owner_A] += guests_AD.any(1)
            return times_AD, np.maximum(guests_AD.sum(1) - 1.0, 0.0)
        at_home_AD = network.is_near_DD[owner_A]
        place_AD = np.where(guests_AD, self._place_DD[owner_A], network.node_size)
        first_AN = np.minimum.reduceat(place_AD, network.first_N, axis=1)
        times_AD += (self.far - 1) * (guests_AD & ~at_home_AD & (place_AD == first_AN[:, network.node_D]))
        extra_A = np.maximum(times_AD.sum(1) - times_AD.max(1), 0.0)
        near_A = (guests_AD & at_home_AD).any(1)
        times_AD[rows_A, owner_A] += np.where(near_A, 1.0, self.far * guests_AD.any(1))
        return times_AD, extra_A

    @cached_property
    def _place_DD(self) -> np.ndarray:
        """[D, D]: for each owner, the order in which the ranks of a node receive its experts."""
        rank_D = np.arange(self.network.num_ranks)
        return (rank_D - rank_D[:, None]) % self.network.node_size

    def guest_times(self, lent: Lent, owner_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return [A] the arguments of `seconds_of` for A plans, from `link_times` of all their experts.

        They are the time of the busiest rank or adapter, and the longest time that a piece spends on other links.
        """
        network, num_ranks = self.network, self.profile.num_ranks
        size, nodes = network.node_size, len(network.first_N)
        place_K = (lent.rank_K - owner_E[lent.expert_K]) % size
        order_K = np.lexsort((place_K, network.node_D[lent.rank_K], lent.expert_K, lent.plan_K))
        plan_K, expert_K, rank_K = (part_K[order_K] for part_K in lent[1:4])
        node_K, chain_K = network.node_D[rank_K], plan_K * len(owner_E) + expert_K
        is_far_K = node_K != network.node_D[owner_E[expert_K]]
        begins_K = np.append(True, chain_K[1:] != chain_K[:-1])
        enters_K = is_far_K & (begins_K | np.append(True, node_K[1:] != node_K[:-1]))
        time_K, first_C = np.where(enters_K, self.far, 1.0), np.flatnonzero(begins_K)
        extra_C = np.add.reduceat(time_K, first_C) - np.maximum.reduceat(time_K, first_C)
        sends_C = np.where(np.logical_and.reduceat(is_far_K, first_C), self.far, 1.0)
        ends = np.append(plan_K * num_ranks + rank_K, plan_K[first_C] * num_ranks + owner_E[expert_K[first_C]])
        times = np.bincount(ends, np.append(time_K, sends_C), lent.plans * num_ranks)
        busy_A, extra_A = times.reshape(lent.plans, -1).max(1), np.zeros(lent.plans)
        np.maximum.at(extra_A, plan_K[first_C], extra_C)
        if network.adapters < size:
            entered_AN = np.bincount(plan_K * nodes + node_K, enters_K, lent.plans * nodes).reshape(lent.plans, -1)
            busy_A = np.maximum(busy_A, self.far * entered_AN.max(1) / network.adapters)
        return busy_A, extra_A

    def best_chunks(self, busy: float | np.ndarray, extra: np.ndarray) -> np.ndarray:
        """Return the best number of pieces where experts that take m `busy` cross a link and x `extra` follows.

        An expert of b bytes in c pieces takes (m * c + x) * (alpha + beta * b / c) seconds, which is least at
        c = sqrt(x * beta * b / (m * alpha)).
        """
        latencies = np.where(self._is_far(busy), self._latencies["inter"], self._latencies["intra"])
        chunks = np.rint(np.sqrt(extra / busy * latencies))
        return np.minimum(np.maximum(chunks, self.fewest_chunks), MOST_CHUNKS)

    @cached_property
    def fewest_chunks(self) -> int:
        """Minimum number of pieces: 1; in two parts up to LEAST_CHUNKS, if each takes at least four latencies to send.

        A plan is split between pieces.
        """
        return max(1, min(LEAST_CHUNKS, int(max(self._latencies.values()) / 4))) if self.in_parts else 1

    @cached_property
    def _latencies(self) -> dict[str, float]:
        """Seconds to send the bytes of a whole expert, in latencies of a message, by kind of link."""
        lines = {level: self.profile.link("trans", level) for level in LEVELS}
        return {level: line.beta * self.param_bytes / max(line.alpha, LEAST_ALPHA) for level, line in lines.items()}

    def trans_seconds(self, time: Any, chunks: Any) -> Any:
        """Return the seconds of Eq. 4 for the time that `LinkLoads` counts, with experts in `chunks` pieces.

        The ratio of the two kinds of links depends on the size of pieces. Time that includes an expert between nodes is
        therefore counted in messages between nodes.

        Args:
            time, chunks: numbers, or arrays of one shape.
        """
        return self._seconds(self._lines[0], time, chunks, self.param_bytes)

    def agg_seconds(self, time: Any, chunks: Any) -> Any:
        """Return the seconds of Eq. 5, the reverse of Eq. 4."""
        return self._seconds(self._lines[1], time, chunks, self.grad_bytes)

    def _seconds(self, lines: tuple[Fit, Fit], time: Any, chunks: Any, num_bytes: float) -> Any:
        near, far = (line.seconds(num_bytes / chunks) for line in lines)
        return time * np.where(self._is_far(time / chunks), far / self.far, near)

    def _is_far(self, busy: Any) -> Any:
        """Return whether links that are busy for this time carry an expert between nodes."""
        return (busy >= self.far * (1 - ROUNDING)) & (self.far > 1)

    def progress(self, plan: TransferPlan) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds after which each round is complete, of Trans and of Agg; Agg runs the rounds backward.

        A rank begins its part of a round when it has completed its part of earlier rounds, and so has its peer. The
        adapters of a node carry the bytes of its ranks' messages in the order of rounds. In a round with fewer messages
        than ranks, the fabric of a node may carry each of them faster.
        """
        (trans, _), (agg, _) = self._both(plan)
        return trans, agg

    def rank_seconds(self, plan: TransferPlan) -> tuple[np.ndarray, np.ndarray]:
        """Return [D] the seconds after which each rank has completed its part of Trans, and of Agg."""
        (_, trans_D), (_, agg_D) = self._both(plan)
        return trans_D, agg_D

    def _both(self, plan: TransferPlan) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        return (
            self._progress(plan, "trans", self.param_bytes / plan.chunks, backward=False),
            self._progress(plan, "agg", self.grad_bytes / plan.chunks, backward=True),
        )

    def rounds_within(self, plan: TransferPlan, seconds: float, *, forward: bool) -> int:
        """Return how many of a plan's last rounds (Trans), or first rounds in its order (Agg), take `seconds` at most.

        Args:
            forward: True for Trans, whose last rounds count; False for Agg, which begins with these rounds.
        """
        ends = self.progress(plan)[0 if forward else 1]
        if not len(ends):
            return 0
        taken = ends[-1] - np.append(0.0, ends[:-1])[::-1] if forward else ends
        return int((taken <= seconds).sum())

    def _progress(
        self, plan: TransferPlan, kind: str, piece_bytes: float, *, backward: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds after which each round is complete, and [D] those after which each rank is."""
        near, far = (self.profile.link(kind, level) for level in ("intra", "inter"))
        network, free_D, ends = self.network, np.zeros(self.profile.num_ranks), []
        carried_2N = np.zeros((2, len(network.first_N)))
        """When each node's adapters have sent and received all bytes so far."""
        for messages in reversed(plan.rounds) if backward else plan.rounds:
            pairs_M2 = np.array([message[1:3] for message in messages])
            source_M, target_M = pairs_M2.T[::-1] if backward else pairs_M2.T
            start_M = np.maximum(free_D[source_M], free_D[target_M])
            is_far_M = network.node_D[source_M] != network.node_D[target_M]
            end_M = start_M + near.seconds(piece_bytes) * self._busy(network.node_D[source_M], is_far_M)
            if is_far_M.any():
                ends_2M = network.node_D[np.stack([source_M, target_M])[:, is_far_M]]
                begun_M = start_M[is_far_M]
                carried_M = self._carry(carried_2N, ends_2M, begun_M, far.beta * piece_bytes / network.adapters)
                end_M[is_far_M] = far.alpha + np.maximum(begun_M + far.beta * piece_bytes, carried_M)
            np.maximum.at(free_D, source_M, end_M)
            np.maximum.at(free_D, target_M, end_M)
            ends.append(float(free_D.max()))
        return np.array(ends), free_D

    def _busy(self, node_M: np.ndarray, is_far_M: np.ndarray) -> np.ndarray:
        """Return [M] the share of a full round's time that messages within their nodes take.

        The lines hold for rounds in which every rank sends and receives. Where the ranks of a node share its fabric,
        fewer messages take less time, down to what the profile's `one_way` line shows.
        """
        number_N = np.bincount(node_M[~is_far_M], minlength=len(self.network.first_N))
        return np.maximum(number_N / self.network.node_size, self.network.near.one_way)[node_M].clip(0.0, 1.0)

    @staticmethod
    def _carry(carried_2N: np.ndarray, node_2M: np.ndarray, start_M: np.ndarray, seconds: float) -> np.ndarray:
        """Add one round's messages to the adapters of their nodes, and return [M] when these have carried them."""
        for carried_N, node_M in zip(carried_2N, node_2M, strict=True):
            first_N = np.full(len(carried_N), np.inf)
            np.minimum.at(first_N, node_M, start_M)
            number_N = np.bincount(node_M, minlength=len(carried_N))
            carried_N[:] = np.where(number_N, np.maximum(carried_N, first_N) + number_N * seconds, carried_N)
        return carried_2N[np.arange(2)[:, None], node_2M].max(0)
