"""Seconds of batches of messages, as Trans and Agg send them.

A rank's batch takes a launch, a little for each message, and the time of its bytes on the rank's link or on its share
of the node's adapters. The thread that launches it takes its own time, and nothing is sent before. An expert is sent as
one message for each of its tensors; a cut inside a tensor makes two messages of it. All batches of a Trans or an Agg
together take some seconds more, to start.

In the shapes, F is the kind of link (within a node, between nodes), W the direction (sent, received), X a batch, and M
or R a message.
"""

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.network import Network
from megatron_balance.placement.relays import Hops
from megatron_balance.placement.transfers import TransferPlan
from megatron_balance.profile.cluster_profile import LEVELS, ClusterProfile, Fit

MOST_PIECES = 64
"""Maximum number of pieces of an expert: enough for a chain of 64 ranks; each piece costs a call."""

PIECES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MOST_PIECES)
"""Numbers of pieces to choose from for routes of few batches."""

MOST_STAGED = 512 * 2**20
"""Maximum bytes of gradients that a rank receives in one batch, because it keeps them next to its own."""


class Loads(NamedTuple):
    """What the ranks send and receive in batches."""

    amount_FWXD: np.ndarray
    """Experts."""
    number_FWXD: np.ndarray
    """Pieces of experts."""

    @classmethod
    def of(
        cls, network: Network, source_M: np.ndarray, target_M: np.ndarray, amount_M: np.ndarray, batch_M: np.ndarray
    ) -> "Loads":
        """Return the loads of pieces, each of which is in a batch."""
        batches = int(batch_M.max()) + 1
        ranks = network.num_ranks
        is_far_M = network.node_D[source_M] != network.node_D[target_M]
        place_M = (is_far_M * 2 * batches + batch_M) * ranks
        place_2M = np.concatenate([place_M + source_M, place_M + batches * ranks + target_M])
        shape = (2, 2, batches, ranks)
        size = 4 * batches * ranks
        amount = np.bincount(place_2M, np.concatenate([amount_M, amount_M]), size)
        return cls(amount.reshape(shape), np.bincount(place_2M, minlength=size).reshape(shape))


class Times(NamedTuple):
    """Seconds of batches, by what they wait for."""

    latency_XD: np.ndarray
    """Each rank's time to launch one message for each of its pieces, and that of empty messages."""
    tensor_XD: np.ndarray
    """Each rank's time to launch further messages, because experts have several tensors."""
    byte_FXD: np.ndarray
    """Each rank's time on links of its node, and on its share of the adapters."""
    node_WXN: np.ndarray
    """Time of all adapters of a node, for what is sent and for what is received."""

    @property
    def total_2X(self) -> np.ndarray:
        """[2, X] the latency and the time in proportion to experts, if all ranks begin and end batches together."""
        bytes_X = np.maximum(self.byte_FXD.max((0, -1)), self.node_WXN.max((0, -1)))
        return np.stack([self.latency_XD.max(-1), self.tensor_XD.max(-1) + bytes_X])


@dataclass(frozen=True)
class BatchModel:
    """Predicts the seconds of batches with the profile's lines of `trans` or `agg`."""

    profile: ClusterProfile
    network: Network
    kind: str
    size: float
    """Bytes of an expert."""

    @cached_property
    def lines(self) -> tuple[Fit, Fit]:
        """Lines of a batch of one message in each direction, within a node and between nodes."""
        near, far = (self.profile.link(self.kind, level) for level in LEVELS)
        return near, far

    @property
    def start(self) -> float:
        """Seconds beyond those of batches."""
        return self.profile.starts.get(self.kind, 0.0)

    def times(self, loads: Loads) -> Times:
        """Return the seconds of batches."""
        near, far = self.lines
        network = self.network
        amount_FXD = loads.amount_FWXD.max(1)
        share_XD = self._share(loads.amount_FWXD[0], amount_FXD[0])
        share_FXD = np.stack([share_XD, np.ones_like(share_XD)])
        alpha_F, beta_F = np.array([near[:2], far[:2]]).T
        launch_F, message_F = np.array([self.profile.launch(self.kind, level)[:2] for level in LEVELS]).T
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
        return Times(latency_XD, tensor_XD, byte_FXD, node_WXN * (far.beta / network.adapters))

    def _share(self, both_WXD: np.ndarray, amount_XD: np.ndarray) -> np.ndarray:
        """Return [X, D] the share of a full batch's time that a node's messages within it take.

        The lines hold for batches in which every rank sends and receives as much as its busiest one. Where the ranks of
        a node share its fabric, less takes less time (`Network.sharing`).
        """
        network = self.network
        if network.near.one_way >= 1:
            return np.ones_like(amount_XD)
        done_XN = np.maximum.reduceat(network.sharing(both_WXD.mean(0)), network.first_N, axis=-1)
        most_XN = np.maximum.reduceat(amount_XD, network.first_N, axis=-1)
        share_XN = np.divide(done_XN, most_XN, out=np.ones_like(done_XN), where=most_XN > 0)
        return np.clip(share_XN, network.near.one_way, 1.0)[..., network.node_D]

    def progress(self, plan: TransferPlan, *, backward: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds after which each round of a plan is complete, and [D] those after which each rank is.

        A rank begins its part of a round when it has completed its part of earlier rounds, and so has its peer. The
        adapters of a node carry the bytes of its ranks' messages in the order of rounds.

        Args:
            backward: whether the rounds run backward, and messages go from targets to sources.
        """
        network = self.network
        free_D, carried_WN = np.zeros(network.num_ranks), np.zeros((2, len(network.first_N)))
        """When each node's adapters have sent and received all bytes so far."""
        if not len(plan):
            return np.zeros(0), free_D
        messages_5M = plan.messages_5M
        round_M = plan.round_M
        if backward:
            order_M = np.argsort(-round_M, kind="stable")
            messages_5M = messages_5M[:, order_M]
            round_M = len(plan) - 1 - round_M[order_M]
        _, source_M, target_M, _, chunks_M = messages_5M
        ends_2M = np.stack([target_M, source_M] if backward else [source_M, target_M])
        number_X = np.bincount(round_M)
        times = self.times(Loads.of(network, ends_2M[0], ends_2M[1], 1 / chunks_M, round_M))
        is_far_M = network.node_D[ends_2M[0]] != network.node_D[ends_2M[1]]
        latency_M = (times.latency_XD + times.tensor_XD)[round_M, ends_2M].max(0)
        byte_M = times.byte_FXD[is_far_M * 1, round_M, ends_2M].max(0)
        finished = []
        for number, last in enumerate(number_X.cumsum().tolist()):
            some = slice(last - int(number_X[number]), last)
            ends_2R = ends_2M[:, some]
            far_R = is_far_M[some]
            start_R = np.maximum(free_D[ends_2R].max(0), self.start)
            end_R = start_R + byte_M[some]
            if far_R.any():
                node_2R = network.node_D[ends_2R[:, far_R]]
                carried_R = _carry(carried_WN, node_2R, start_R[far_R], times.node_WXN[:, number])
                end_R[far_R] = np.maximum(end_R[far_R], carried_R)
            end_R += latency_M[some]
            for rank_R in ends_2R:
                np.maximum.at(free_D, rank_R, end_R)
            finished.append(float(free_D.max()))
        return np.array(finished), free_D


def _carry(carried_WN: np.ndarray, node_2R: np.ndarray, start_R: np.ndarray, seconds_WN: np.ndarray) -> np.ndarray:
    """Add one round's messages to the adapters of their nodes, and return [R] when these have carried them."""
    for carried_N, node_R, seconds_N in zip(carried_WN, node_2R, seconds_WN, strict=True):
        first_N = np.full(len(carried_N), np.inf)
        np.minimum.at(first_N, node_R, start_R)
        carried_N[:] = np.where(first_N < np.inf, np.maximum(carried_N, first_N) + seconds_N, carried_N)
    return carried_WN[np.arange(2)[:, None], node_2R].max(0)


def fewest_pieces(models: tuple[BatchModel, BatchModel], found: Hops, least_rounds: int) -> tuple[int, float, float]:
    """Return the number of pieces with the fewest seconds of Trans, and these seconds and those of Agg.

    The seconds are upper bounds: those of ranks that begin and end every batch together.

    Args:
        models: of the batches of Trans and of Agg.
        found: at least one hop.
        least_rounds: minimum number of batches.
    """
    stages = int(found.stage_M.max()) + 1
    first_X, after_X, number_AX = _windows(stages)
    by_stage = Loads.of(models[0].network, found.source_M, found.target_M, 1 / found.parts_M, found.stage_M)
    sums = [np.insert(array_FWXD.cumsum(2), 0, 0, axis=2) for array_FWXD in by_stage]
    loads = Loads(*(sum_FWXD[:, :, after_X] - sum_FWXD[:, :, first_X] for sum_FWXD in sums))
    pieces_A = np.array(PIECES)
    staged_X = loads.amount_FWXD[:, 0].sum(0).max(-1) * models[1].size
    staged_A = (staged_X * (number_AX > 0)).max(1) / pieces_A
    fits_A = (pieces_A + stages - 1 >= least_rounds) & (staged_A <= max(MOST_STAGED, staged_A.min()))
    trans_A, agg_A = (
        model.start + number_AX @ latency_X + number_AX @ bytes_X / pieces_A
        for model, (latency_X, bytes_X) in ((model, model.times(loads).total_2X) for model in models)
    )
    best = int(np.where(fits_A, trans_A, np.inf).argmin())
    return PIECES[best], float(trans_A[best]), float(agg_A[best])


@functools.cache
def _windows(stages: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what `plan_hops` sends in one batch: of each piece, a stage, from a first one up to one before another.

    The last result is [A, X]: how often a batch with these stages occurs, for each number of pieces of PIECES.
    """
    windows = [(first, after) for first in range(stages) for after in range(first + 1, stages + 1)]
    number_AX = np.zeros((len(PIECES), len(windows)))
    for row, pieces in zip(number_AX, PIECES, strict=True):
        for batch in range(pieces + stages - 1):
            row[windows.index((max(0, batch - pieces + 1), min(batch, stages - 1) + 1))] += 1
    first_X, after_X = np.array(windows).T
    return first_X, after_X, number_AX
