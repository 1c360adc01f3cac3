"""Seconds of Trans and Agg as batches of messages, with the fastest routes and numbers of pieces.

The time of a rank's batch is the sum of a launch, a time per message, and the time of its bytes on the rank's link or
its share of the node's adapters. Sending begins after the launch. An expert takes one message per tensor, and a cut
within a tensor adds a message.

In the shapes, F is the kind of link (within a node, between nodes), W the direction (sent, received), X a batch, M a
message, and R a message of one round.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_balance.cost.core import (
    LEAST_ALPHA,
    SendingLine,
    SendingPrices,
    few_batches_each,
    link_times,
    take_turns,
)
from megatron_balance.cost.messages import MOST_STAGED, BatchLines, Messages, fastest_sending
from megatron_balance.cost.network import Network
from megatron_balance.device.compiled import packed
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import EMPTY_PLAN, ROUTES, TransPlan, hops, plan_hops
from megatron_balance.profile.cluster_profile import LEVELS, ROUNDS, ClusterProfile, Fit

LEAST_ROUNDS = 2
"""Minimum number of rounds for a large expert if its plan is executed in two parts."""

LARGE = 8
"""An expert is large if sending it takes at least this many message latencies."""

USUAL_PIECES = 8
"""Number of pieces for comparing a message between nodes with one within a node."""

MOST_CHOICES = 8
"""Number of placements whose routes and pieces are cached, because planning chooses them and reports read them."""


class BatchLoads(NamedTuple):
    """Amounts that the ranks send and receive in batches."""

    amount_FWXD: np.ndarray
    """Experts."""
    number_FWXD: np.ndarray
    """Pieces of experts."""

    @classmethod
    def of(
        cls, network: Network, source_M: np.ndarray, target_M: np.ndarray, amount_M: np.ndarray, batch_M: np.ndarray
    ) -> "BatchLoads":
        """Return the loads of pieces, given each piece's batch."""
        batches = int(batch_M.max()) + 1
        ranks = network.num_ranks
        is_far_M = network.node_D[source_M] != network.node_D[target_M]
        place_M = (is_far_M * 2 * batches + batch_M) * ranks
        place_2M = np.concatenate([place_M + source_M, place_M + batches * ranks + target_M])
        shape = (2, 2, batches, ranks)
        size = 4 * batches * ranks
        amount = np.bincount(place_2M, np.concatenate([amount_M, amount_M]), size)
        return cls(amount.reshape(shape), np.bincount(place_2M, minlength=size).reshape(shape))


class BatchTimes(NamedTuple):
    """Seconds of batches, by cause."""

    latency_XD: np.ndarray
    """Each rank's latency: that of an empty message, or launches of one message per piece, whichever is longer."""
    tensor_XD: np.ndarray
    """Each rank's time to launch the other messages of experts with several tensors."""
    byte_FXD: np.ndarray
    """Each rank's time on its link within the node, and on its share of the adapters."""
    node_WXN: np.ndarray
    """Time of all adapters of a node, for sending and for receiving."""


@dataclass(frozen=True)
class BatchModel:
    """Predicts the seconds of batches from the profile's lines of `trans` or `agg`."""

    profile: ClusterProfile
    network: Network
    kind: str
    size: float
    """Bytes of an expert."""

    @property
    def start(self) -> float:
        """Seconds beyond those of batches."""
        return self.profile.starts[self.kind]

    @property
    def lines(self) -> BatchLines:
        """Numbers for compiled loops."""
        links = (self.profile.link(self.kind, level)[:2] for level in LEVELS)
        launches = (self.profile.launches[self.kind][level][:2] for level in LEVELS)
        numbers = [number for pair in zip(links, launches, strict=True) for line in pair for number in line]
        node_beta = self.profile.link(self.kind, LEVELS[1]).beta / self.network.adapters
        return BatchLines(*map(float, (*numbers, node_beta, self.size, self.profile.tensors - 1, self.start)))

    def times(self, loads: BatchLoads) -> BatchTimes:
        near, far = (self.profile.link(self.kind, level) for level in LEVELS)
        network = self.network
        amount_FXD = loads.amount_FWXD.max(1)
        share_XD = self._share(loads.amount_FWXD[0], amount_FXD[0])
        share_FXD = np.stack([share_XD, np.ones_like(share_XD)])
        alpha_F, beta_F = np.array([near[:2], far[:2]]).T
        launch_F, message_F = np.array([self.profile.launches[self.kind][level][:2] for level in LEVELS]).T
        alone_FXD, launch_FXD = (seconds_F[:, None, None] * share_FXD for seconds_F in (alpha_F, launch_F))
        message_FXD = message_F[:, None, None] * share_FXD
        operations_FXD = loads.number_FWXD.sum(1)
        latency_XD = np.maximum(
            (alone_FXD * (operations_FXD > 0)).max(0),
            (launch_FXD * (operations_FXD > 0)).max(0) + (message_FXD * operations_FXD).sum(0),
        )
        tensor_XD = (self.profile.tensors - 1) * (message_FXD * loads.amount_FWXD.sum(1)).sum(0)
        byte_FXD = amount_FXD * self.size * beta_F[:, None, None] * share_FXD
        node_WXN = np.add.reduceat(loads.amount_FWXD[1] * self.size, network.first_N, axis=-1)
        return BatchTimes(latency_XD, tensor_XD, byte_FXD, node_WXN * (far.beta / network.adapters))

    def _share(self, both_WXD: np.ndarray, amount_XD: np.ndarray) -> np.ndarray:
        """Return [X, D]: the time of a node's messages as a fraction of a full batch's time; see `core.take_turns`."""
        network = self.network
        one_way = network.near.one_way
        if one_way >= 1:
            return np.ones_like(amount_XD)
        done_XD = both_WXD.mean(0)
        take_turns(done_XD, network.node_size, one_way)
        done_XN, most_XN = (np.maximum.reduceat(part_XD, network.first_N, axis=-1) for part_XD in (done_XD, amount_XD))
        share_XN = np.divide(done_XN, most_XN, out=np.ones_like(done_XN), where=most_XN > 0)
        return np.clip(share_XN, one_way, 1.0)[..., network.node_D]

    def progress(self, plan: TransPlan, *, backward: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the completion time of each round of a plan, and [D] of each rank. A message starts when both of its
        ranks have completed their parts of earlier rounds. A node's adapters carry bytes in the order of rounds. If
        `backward`, rounds run backward, with messages from targets to sources."""
        network = self.network
        free_D = np.zeros(network.num_ranks)
        # Times when each node's adapters have sent and received all bytes so far
        carried_WN = np.zeros((2, len(network.first_N)))
        if not len(plan):
            return np.zeros(0), free_D
        _, source_M, target_M, _, pieces_M, round_M = plan.columns
        ends_WM = np.stack([source_M, target_M])
        if backward:
            order_M = np.argsort(-round_M, kind="stable")
            ends_WM = ends_WM[::-1, order_M]
            pieces_M = pieces_M[order_M]
            round_M = len(plan) - 1 - round_M[order_M]
        times = self.times(BatchLoads.of(network, ends_WM[0], ends_WM[1], 1 / pieces_M, round_M))
        is_far_M = network.node_D[ends_WM[0]] != network.node_D[ends_WM[1]]
        latency_M = (times.latency_XD + times.tensor_XD)[round_M, ends_WM].max(0)
        byte_M = times.byte_FXD[is_far_M * 1, round_M, ends_WM].max(0)
        finished = []
        lasts = np.bincount(round_M).cumsum().tolist()
        for number, (first, last) in enumerate(zip([0, *lasts], lasts, strict=False)):
            some = slice(first, last)
            ends_WR = ends_WM[:, some]
            far_R = is_far_M[some]
            start_R = np.maximum(free_D[ends_WR].max(0), self.start)
            end_R = start_R + byte_M[some]
            if far_R.any():
                node_WR = network.node_D[ends_WR[:, far_R]]
                carried_R = _carry(carried_WN, node_WR, start_R[far_R], times.node_WXN[:, number])
                end_R[far_R] = np.maximum(end_R[far_R], carried_R)
            end_R += latency_M[some]
            for rank_R in ends_WR:
                np.maximum.at(free_D, rank_R, end_R)
            finished.append(float(free_D.max()))
        return np.array(finished), free_D


def _carry(carried_WN: np.ndarray, node_WR: np.ndarray, start_R: np.ndarray, seconds_WN: np.ndarray) -> np.ndarray:
    """Add one round's messages to the adapters of their nodes; return [R] the messages' completion times there."""
    for carried_N, node_R, seconds_N in zip(carried_WN, node_WR, seconds_WN, strict=True):
        first_N = np.full(len(carried_N), np.inf)
        np.minimum.at(first_N, node_R, start_R)
        carried_N[:] = np.where(first_N < np.inf, np.maximum(carried_N, first_N) + seconds_N, carried_N)
    return carried_WN[np.arange(2)[:, None], node_WR].max(0)


class Sending(NamedTuple):
    """Route and pieces of a placement's experts, and the predicted seconds."""

    route: str
    """A name in ROUTES."""
    pieces: int
    """See `plan_hops`."""
    trans: float
    """Upper bound on the seconds."""
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

    @cached_property
    def network(self) -> Network:
        return Network.of(self.profile)

    @cached_property
    def far(self) -> float:
        """Time of a piece between nodes over one within a node; 1 if there is one node."""
        if self.profile.num_ranks <= self.profile.node_size:
            return 1.0
        near, far = (line.seconds(self.param_bytes / USUAL_PIECES) for line in self._lines[0])
        return far / near if near else 1.0

    @cached_property
    def _lines(self) -> list[list[Fit]]:
        """[Trans, Agg][within nodes, between nodes]: line of a piece, no faster than its launch."""
        return [[self._line(model, level) for level in LEVELS] for model in self.batches]

    def _line(self, model: BatchModel, level: str) -> Fit:
        """Return the line of a piece; beta includes the launches of messages beyond one per piece."""
        line = self.profile.link(model.kind, level)
        launch = self.profile.launches[model.kind][level]
        more = 2 * (self.profile.tensors - 1) * launch.beta / model.size if model.size else 0.0
        return line._replace(alpha=max(line.alpha, launch.seconds(1)), beta=line.beta + more)

    @cached_property
    def batches(self) -> tuple[BatchModel, BatchModel]:
        """Models of Trans and of Agg."""
        trans, agg = ROUNDS
        return (
            BatchModel(self.profile, self.network, trans, self.param_bytes),
            BatchModel(self.profile, self.network, agg, self.grad_bytes),
        )

    def best(self, placement: Placement) -> Sending:
        """Return the route and the pieces with the fastest Trans; ties go to fewer batches and pieces."""
        return self._chosen(placement)[0] if placement.added_hosts else NOTHING

    def plan(self, placement: Placement) -> TransPlan:
        """Return the messages of `best`."""
        if not placement.added_hosts:
            return EMPTY_PLAN
        sending, found = self._chosen(placement)
        if found is None:
            found = plan_hops(hops(placement, self.profile.node_size, sending.route), sending.pieces)
            self._keep(placement, sending, found)
        return found

    def follow(self, placement: Placement, sending: Sending) -> None:
        """Adopt the choice of another rank's `best` for a placement."""
        if placement.added_hosts and placement not in self._choice_of:
            self._keep(placement, sending, None)

    @cached_property
    def _choice_of(self) -> dict[Placement, tuple[Sending, TransPlan | None]]:
        """Cached choices for placements, with their messages if these were needed."""
        return {}

    def _chosen(self, placement: Placement) -> tuple[Sending, TransPlan | None]:
        """Return the choice for a placement with guests; several threads may call this."""
        choice = self._choice_of.get(placement)
        if choice is None:
            choice = self._fastest(placement), None
            self._keep(placement, *choice)
        return choice

    def _fastest(self, placement: Placement) -> Sending:
        _, expert_M, rank_M = placement.tables.guests
        order_M = np.lexsort((rank_M, expert_M))
        owner_E = np.array(placement.owners, np.int64)
        ends = expert_M[order_M], rank_M[order_M], owner_E
        trans, agg, stages, pieces = fastest_sending(*ends, placement.num_ranks, self.messages_1)
        return Sending(ROUTES[stages - 1], pieces, trans, agg)

    def _keep(self, placement: Placement, sending: Sending, found: TransPlan | None) -> None:
        if len(self._choice_of) >= MOST_CHOICES:
            self._choice_of.clear()
        self._choice_of[placement] = sending, found

    def seconds_of(self, busy: Any, extra: Any) -> tuple[Any, Any]:
        """Estimate the seconds of Trans and Agg, given the busiest rank's time and the `extra` time after it. Without
        extra time, owners send in one batch. Otherwise guests pass on their parts piece by piece: c pieces take c + 1
        batches, and the last piece is passed on alone. The unit is the time of an expert within a node. Arguments are
        numbers, or arrays of one shape."""
        busy_X, extra_X = (np.asarray(times, np.float64) for times in (busy, extra))
        trans_A, agg_A = few_batches_each(busy_X.ravel(), extra_X.ravel(), self.prices_1)
        # `[()]` turns arrays without axes back into numbers
        return trans_A.reshape(busy_X.shape)[()], agg_A.reshape(busy_X.shape)[()]

    @cached_property
    def messages_1(self) -> np.ndarray:
        """Packed Messages, for compiled loops."""
        trans, agg = (model.lines for model in self.batches)
        near = self.network.near
        return packed(Messages(trans, agg, self.network.node_size, float(near.one_way), self.least_rounds))

    @cached_property
    def prices_1(self) -> np.ndarray:
        return packed(self.prices)

    @cached_property
    def prices(self) -> SendingPrices:
        """Arguments of `few_batches`."""
        trans, agg = (
            SendingLine(
                *near[:2],
                *far[:2],
                float(model.size),
                2 * self.profile.launches[model.kind][LEVELS[0]].beta,
                float(model.start),
            )
            for (near, far), model in zip(self._lines, self.batches, strict=True)
        )
        return SendingPrices(trans, agg, float(self.far), self.least_rounds)

    @cached_property
    def least_rounds(self) -> int:
        """Minimum rounds: LEAST_ROUNDS for a large expert in two parts, or for one above MOST_STAGED."""
        near, far = (line.beta * self.param_bytes / max(line.alpha, LEAST_ALPHA) for line in self._lines[0])
        is_split = self.in_parts and max(near, far) >= LARGE
        return LEAST_ROUNDS if is_split or self.grad_bytes > MOST_STAGED else 1

    def expert_seconds(self, *, far: bool) -> tuple[float, float]:
        """Return the seconds of Trans and Agg of one expert; `far`: to another node, if there are several."""
        index = int(far and self.profile.num_ranks > self.profile.node_size)
        found = zip(self.batches, self._lines, strict=True)
        trans, agg = (model.start + lines[index].seconds(model.size) for model, lines in found)
        return trans, agg

    def link_times(self, owner_A: np.ndarray, guests_AD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `core.link_times` for guests [A, D] bool."""
        return link_times(np.ascontiguousarray(owner_A), guests_AD, self.network.node_size, float(self.far))

    def progress(self, plan: TransPlan) -> tuple[np.ndarray, np.ndarray]:
        """Return the completion times of rounds, of Trans and of Agg; Agg runs the rounds backward."""
        trans, agg = self.batches
        return trans.progress(plan, backward=False)[0], agg.progress(plan, backward=True)[0]

    def rank_seconds(self, plan: TransPlan) -> tuple[np.ndarray, np.ndarray]:
        """Return [D] the completion times of ranks, of Trans and of Agg."""
        trans, agg = self.batches
        return trans.progress(plan, backward=False)[1], agg.progress(plan, backward=True)[1]

    def rounds_beside(self, plan: TransPlan, seconds: tuple[float, float]) -> tuple[int, int]:
        """Return how many last rounds of Trans fit the forward seconds, and first rounds of Agg the backward ones."""
        if not len(plan):
            return 0, 0
        forward, backward = seconds
        trans_X, agg_X = self.progress(plan)
        last_X = trans_X[-1] - np.append(0.0, trans_X[:-1])
        return int((last_X <= forward).sum()), int((agg_X <= backward).sum())
