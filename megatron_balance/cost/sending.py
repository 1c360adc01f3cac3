"""Seconds of Trans and Agg, and the routes and pieces with which they take the fewest.

Two families of routes compete. The routes of `placement/relays.py` take few batches, in which a rank sends and receives
several messages. Chains and trees take a batch for each piece and hop, in which a rank sends at most one message and
receives at most one. They pay where they save bytes: between nodes whose ranks share adapters.

A piece of b bytes takes alpha + beta * b seconds on a link within a node, and other such seconds between nodes: the
profile's lines of `trans` and `agg`. A batch takes no less than the thread that launches it (`cost/batches.py`). The
messages that an expert takes beyond one for each piece take their seconds in proportion to the bytes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_balance.cost.batches import MOST_PIECES, MOST_STAGED, BatchModel, fewest_pieces
from megatron_balance.cost.few_batches import LEAST_ALPHA, ROUNDING, few_batches, few_batches_each
from megatron_balance.cost.network import Network
from megatron_balance.placement.links import LOOPS, find_links, link_lines
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.relays import ROUTES, Hops, hops, plan_hops
from megatron_balance.placement.transfers import EMPTY_PLAN, TransferPlan, plan_transfers, schedule_links
from megatron_balance.profile.cluster_profile import LEVELS, ROUNDS, ClusterProfile, Fit

FANOUTS = {"chain": 1, "tree": 2, "doubling": 16}
"""Further routes, as `fanout` of `plan_transfers`: one that doubles reaches up to 2**16 ranks."""

LEAST_CHUNKS = 4
"""Minimum number of pieces along chains and trees of a large expert whose plan is executed in two parts."""

LEAST_ROUNDS = 2
"""Minimum number of rounds of such a plan along other routes."""

UNAVOIDABLE = 1.05
"""Time of the best routes over a lower bound for all routes, up to which no trees are tried."""

WORTHWHILE = 1.2
"""Time of few batches over that of chains or trees, up to which few batches are chosen. The latter is a lower bound,
and their many batches keep the thread busy that launches them."""

USUAL_CHUNKS = 8
"""Number of pieces for which a message between nodes is compared with one within a node."""


MOST_CHOICES = 8
"""Number of placements whose routes and pieces are kept, because a plan chooses them and a report reads them."""


class Sending(NamedTuple):
    """How a placement's experts reach their guests, and the seconds that it takes."""

    route: str
    """A name in ROUTES or FANOUTS."""
    chunks: int
    """Number of pieces, as in `plan_hops` or `plan_transfers`."""
    trans: float
    """Seconds; those of ROUTES are upper bounds."""
    agg: float


NOTHING = Sending(ROUTES[0], 1, 0.0, 0.0)


@dataclass(frozen=True)
class SendingModel:
    """Predicts Trans and Agg for experts of one size."""

    profile: ClusterProfile
    param_bytes: float
    grad_bytes: float
    in_parts: bool
    """Whether Trans and Agg are executed in two parts."""

    @staticmethod
    def prepare() -> None:
        """Compile what predictions need, so that none of them takes seconds for it."""
        for loop in (*LOOPS, schedule_links, few_batches, few_batches_each):
            loop.prepare()

    @cached_property
    def network(self) -> Network:
        return Network.of(self.profile)

    @cached_property
    def far(self) -> float:
        """Time of a piece between nodes, in pieces within a node; 1 if there is one node."""
        if self.profile.num_ranks <= self.profile.node_size:
            return 1.0
        near, far = (line.seconds(self.param_bytes / USUAL_CHUNKS) for line in self._lines[0])
        return far / near if near else 1.0

    @cached_property
    def _lines(self) -> tuple[tuple[Fit, Fit], tuple[Fit, Fit]]:
        """Lines of a piece of Trans and of Agg, within nodes and between nodes, no faster than its launch."""
        trans, agg = (tuple(self._line(kind, level, 2) for level in LEVELS) for kind in ROUNDS)
        return trans, agg  # pyright: ignore[reportReturnType]

    def _line(self, kind: str, level: str, ways: int) -> Fit:
        """Return the line of a rank that sends or receives experts, or does both (`ways` is 2)."""
        line = self.profile.link(kind, level)
        launch = self.profile.launch(kind, level)
        size = self.param_bytes if kind == ROUNDS[0] else self.grad_bytes
        more = ways * (self.profile.tensors - 1) * launch.beta / size if size else 0.0
        return line._replace(alpha=max(line.alpha, launch.seconds(1)), beta=line.beta + more)

    @cached_property
    def _batches(self) -> tuple[BatchModel, BatchModel]:
        """Models of the batches of Trans and of Agg."""
        sizes = self.param_bytes, self.grad_bytes
        trans, agg = (BatchModel(self.profile, self.network, *some) for some in zip(ROUNDS, sizes, strict=True))
        return trans, agg

    def best(self, placement: Placement) -> Sending:
        """Return the routes and pieces with the fewest seconds of Trans; ties go to fewer batches, then fewer pieces.

        Chains and trees are chosen only if they are WORTHWHILE.
        Trees are tried if all else takes much longer than what no routes avoid: each guest receives its experts, and
        the ranks that have an expert double at most.
        """
        return self._chosen(placement)[0] if placement.added_hosts else NOTHING

    def plan(self, placement: Placement) -> TransferPlan:
        """Return the messages of `best`."""
        if not placement.added_hosts:
            return EMPTY_PLAN
        sending, found = self._chosen(placement)
        if not isinstance(found, TransferPlan):
            found = self._messages(placement, sending, found)
            self._keep(placement, sending, found)
        return found

    def follow(self, placement: Placement, sending: Sending) -> None:
        """Let a placement's experts be sent as another rank's `best` has found."""
        if placement.added_hosts and placement not in self._choice_of:
            self._keep(placement, sending, None)

    @cached_property
    def _choice_of(self) -> dict[Placement, tuple[Sending, Hops | TransferPlan | None]]:
        """Results of `_choose` for the latest placements; None where they are another rank's."""
        return {}

    def _chosen(self, placement: Placement) -> tuple[Sending, Hops | TransferPlan | None]:
        """Return `_choose`; several threads may call this."""
        choice = self._choice_of.get(placement)
        if choice is None:
            choice = self._choose(placement)
            self._keep(placement, *choice)
        return choice

    def _keep(self, placement: Placement, sending: Sending, found: Hops | TransferPlan | None) -> None:
        if len(self._choice_of) >= MOST_CHOICES:
            self._choice_of.clear()
        self._choice_of[placement] = sending, found

    def _messages(self, placement: Placement, sending: Sending, found: Hops | None) -> TransferPlan:
        route = sending.route
        node_size = self.profile.node_size
        if route in FANOUTS:
            return plan_transfers(placement, node_size, sending.chunks, FANOUTS[route], self.far)
        return plan_hops(found or hops(placement, node_size, route), sending.chunks)

    def _choose(self, placement: Placement) -> tuple[Sending, Hops | TransferPlan]:
        """Return the best choice, and its hops or its plan; there is at least one guest.

        The seconds of chains and trees are lower bounds, so they are chosen only if their plan is faster, too.
        """
        choices = self._choices(placement)
        sending, found = self._best(choices)
        if found is not None:
            return sending, found
        plan = self._messages(placement, sending, None)
        trans, agg = (float(ends[-1]) for ends in self.progress(plan))
        few, few_hops = self._best([choice for choice in choices if choice[1] is not None])
        assert few_hops is not None
        return (sending._replace(trans=trans, agg=agg), plan) if trans < few.trans else (few, few_hops)

    def _choices(self, placement: Placement) -> list[tuple[Sending, Hops | None]]:
        """Return what `best` chooses from; routes of few batches come first, with their hops."""
        choices: list[tuple[Sending, Hops | None]] = [*self._in_batches(placement)]
        lines, received = self.chains(placement)
        choices.append((Sending("chain", *self.fewest_seconds(lines)), None))
        # Most experts have one host
        most = max((len({*ranks}) for ranks in placement.hosts if len(ranks) > 1), default=1)
        least = np.array([[received, 0.0], [1.0, np.log2(most) - 1]])
        if min(sending.trans for sending, _ in choices) > UNAVOIDABLE * self.fewest_seconds(least)[1]:
            for route in ("tree", "doubling"):
                lines, _ = self._routed(*placement.tables.guests_3M, route)
                choices.append((Sending(route, *self.fewest_seconds(lines)), None))
        return choices

    @staticmethod
    def _best(choices: Sequence[tuple[Sending, Hops | None]]) -> tuple[Sending, Hops | None]:
        return min(choices, key=lambda choice: choice[0].trans * (WORTHWHILE if choice[1] is None else 1))

    def _in_batches(self, placement: Placement) -> Iterator[tuple[Sending, Hops]]:
        """Yield the best choice of pieces for each route of few batches that differs from those before it."""
        stages = 0
        for route in ROUTES:
            found = hops(placement, self.profile.node_size, route)
            if int(found.stage_M.max()) + 1 > stages:
                stages = int(found.stage_M.max()) + 1
                yield Sending(route, *fewest_pieces(self._batches, found, self.least_rounds)), found

    def along_chains(self, owner_M: np.ndarray, expert_M: np.ndarray, rank_M: np.ndarray) -> Sending:
        """Return an estimate of `best` for guests in any order, at least one: owners, experts and ranks.

        The seconds are those of chains, or those of few batches if these are fewer.
        """
        lines, _ = self._routed(owner_M, expert_M, rank_M, "chain")
        chain = Sending("chain", *self.fewest_seconds(lines))
        trans, agg = self.seconds_of(*map(float, lines.max(0)))
        return chain if chain.trans <= trans else chain._replace(trans=trans, agg=agg)

    def chains(self, placement: Placement) -> tuple[np.ndarray, float]:
        """Return `link_lines` of all experts' chains, and the busiest rank's time of receiving; there are guests."""
        return self._routed(*placement.tables.guests_3M, "chain")

    def _routed(
        self, owner_M: np.ndarray, expert_M: np.ndarray, rank_M: np.ndarray, route: str
    ) -> tuple[np.ndarray, float]:
        """Return `link_lines` of guests in any order along a route of FANOUTS."""
        ranks = self.profile.num_ranks
        node_size = self.profile.node_size
        found = find_links(
            owner_M, expert_M, rank_M, num_ranks=ranks, node_size=node_size, fanout=FANOUTS[route], far=self.far
        )
        return link_lines(found, ranks, node_size, self.network.adapters)

    def fewest_seconds(self, lines: np.ndarray) -> tuple[int, float, float]:
        """Return the number of pieces with the fewest seconds of Trans, and these seconds and those of Agg.

        The seconds are lower bounds; ties go to fewer pieces.

        Args:
            lines: pairs as in `link_lines`, at least one.
        """
        busy_B, extra_B = lines.T.clip(0.0)
        chunks_A = np.unique([self.fewest_chunks, *self.best_chunks(busy_B, extra_B)])
        time_A = (np.multiply.outer(chunks_A, busy_B) + extra_B).max(1)
        trans_A = self.trans_seconds(time_A, chunks_A)
        best = trans_A.argmin()
        return int(chunks_A[best]), float(trans_A[best]), float(self.agg_seconds(time_A[best], chunks_A[best]))

    def seconds_of(self, busy: Any, extra: Any) -> tuple[Any, Any]:
        """Return the seconds of Trans and Agg in few batches, if the busiest rank sends for `busy` and `extra` follows.

        Where nothing follows, the owners send in one batch. Otherwise guests pass on their parts, piece by piece: c
        pieces take c + 1 batches, and the last piece is passed on alone. It is an estimate for many placements.

        The unit is an expert within a node; arguments are numbers, or arrays of one shape.
        """
        numbers = self.numbers_27, self.far, self.least_rounds
        if np.ndim(busy) == 0:
            return few_batches(float(busy), float(extra), *numbers)
        trans_K, agg_K = few_batches_each(np.ravel(busy), np.ravel(extra), *numbers)
        return trans_K.reshape(np.shape(busy)), agg_K.reshape(np.shape(busy))

    @cached_property
    def numbers_27(self) -> np.ndarray:
        """[2, 7] what `few_batches` takes, of Trans and of Agg."""
        sizes = self.param_bytes, self.grad_bytes
        launches = [2 * self.profile.launch(kind, LEVELS[0]).beta for kind in ROUNDS]
        rows = zip(self._lines, sizes, launches, self._starts, strict=True)
        return np.array([(*near[:2], *far[:2], *others) for (near, far), *others in rows])

    @cached_property
    def _starts(self) -> tuple[float, float]:
        """Seconds of Trans and of Agg beyond those of their batches."""
        trans, agg = (model.start for model in self._batches)
        return trans, agg

    def at_least(self) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """Return lower bounds for Trans and for Agg: seconds of a launch, and of an expert's bytes on a link.

        The links are a rank's within its node, and its own between nodes.
        """
        one_way = self.network.near.one_way
        lines = [[self._line(kind, level, 1) for level in LEVELS] for kind in ROUNDS]
        trans, agg = (
            (start + min(near.alpha * one_way, far.alpha), near.beta * one_way * size, far.beta * size)
            for (near, far), size, start in zip(lines, (self.param_bytes, self.grad_bytes), self._starts, strict=True)
        )
        return trans, agg

    def link_times(self, owner_A: np.ndarray, guests_AD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return [A, D] the time in which each rank receives an expert, or in which its owner sends it once.

        The second result is [A], the time that a piece spends on the other links of its chain. The unit is an expert
        within a node. An expert enters each node once, where `find_links` does.

        Args:
            guests_AD: bool, ranks that receive the expert.
        """
        network = self.network
        rows_A = np.arange(len(owner_A))
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

    def best_chunks(self, busy: float | np.ndarray, extra: np.ndarray) -> np.ndarray:
        """Return the best number of pieces where experts that take m `busy` cross a link and x `extra` follows.

        An expert of b bytes in c pieces takes (m * c + x) * (alpha + beta * b / c) seconds, which is least at
        c = sqrt(x * beta * b / (m * alpha)).
        """
        latencies = np.where(self._is_far(busy), self._latencies["inter"], self._latencies["intra"])
        chunks = np.rint(np.sqrt(extra / busy * latencies))
        return np.minimum(np.maximum(chunks, self.fewest_chunks), MOST_PIECES)

    @cached_property
    def fewest_chunks(self) -> int:
        """Minimum number of pieces: one that fits MOST_STAGED; in two parts up to LEAST_CHUNKS, if each piece takes at
        least four latencies to send.

        A plan is split between pieces.
        """
        fewest = min(MOST_PIECES, max(1, math.ceil(self.grad_bytes / MOST_STAGED)))
        return max(fewest, min(LEAST_CHUNKS, int(max(self._latencies.values()) / 4))) if self.in_parts else fewest

    @cached_property
    def least_rounds(self) -> int:
        """Minimum number of batches."""
        return min(self.fewest_chunks, LEAST_ROUNDS)

    @cached_property
    def _latencies(self) -> dict[str, float]:
        """Seconds to send the bytes of a whole expert, in latencies of a message, by kind of link."""
        lines = dict(zip(LEVELS, self._lines[0], strict=True))
        return {level: line.beta * self.param_bytes / max(line.alpha, LEAST_ALPHA) for level, line in lines.items()}

    def trans_seconds(self, time: Any, chunks: Any) -> Any:
        """Return the seconds of Eq. 4 for the time that `link_lines` counts, with experts in `chunks` pieces.

        The ratio of the two kinds of links depends on the size of pieces. Time that includes an expert between nodes is
        therefore counted in messages between nodes.

        Args:
            time, chunks: numbers, or arrays of one shape.
        """
        return self._starts[0] + self._seconds(self._lines[0], time, chunks, self.param_bytes)

    def agg_seconds(self, time: Any, chunks: Any) -> Any:
        """Return the seconds of Eq. 5, the reverse of Eq. 4."""
        return self._starts[1] + self._seconds(self._lines[1], time, chunks, self.grad_bytes)

    def _seconds(self, lines: tuple[Fit, Fit], time: Any, chunks: Any, num_bytes: float) -> Any:
        near, far = (line.seconds(num_bytes / chunks) for line in lines)
        return time * np.where(self._is_far(time / chunks), far / self.far, near)

    def _is_far(self, busy: Any) -> Any:
        """Return whether links that are busy for this time carry an expert between nodes."""
        return (busy >= self.far * (1 - ROUNDING)) & (self.far > 1)

    def progress(self, plan: TransferPlan) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds after which each round is complete, of Trans and of Agg; Agg runs the rounds backward."""
        (trans, _), (agg, _) = self._both(plan)
        return trans, agg

    def rank_seconds(self, plan: TransferPlan) -> tuple[np.ndarray, np.ndarray]:
        """Return [D] the seconds after which each rank has completed its part of Trans, and of Agg."""
        (_, trans_D), (_, agg_D) = self._both(plan)
        return trans_D, agg_D

    def _both(self, plan: TransferPlan) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        trans, agg = self._batches
        return trans.progress(plan, backward=False), agg.progress(plan, backward=True)

    def rounds_beside(self, plan: TransferPlan, seconds: tuple[float, float]) -> tuple[int, int]:
        """Return how many rounds of Trans, and of Agg, fit a computation of these forward and backward seconds."""
        forward, backward = seconds
        return self.rounds_within(plan, forward, forward=True), self.rounds_within(plan, backward, forward=False)

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
