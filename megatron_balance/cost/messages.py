"""The fastest way to send a placement's guests, and the seconds of Trans and Agg, in a compiled loop.

The search of `quota` compares many plans and builds no placement for them. In shapes, M counts guests, S stages of a
route, and X batches of stages that overlap; F and W are as in `cost/sending.py`.
"""

from typing import NamedTuple

import numpy as np

from megatron_balance.cost.core import MOST_PIECES, take_turns
from megatron_balance.device.compiled import compiled

PIECES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MOST_PIECES)
"""Candidates for the number of pieces."""

MOST_STAGED = 512 * 2**20
"""Maximum bytes of gradients that a rank receives in one batch, because it stages them next to its own gradients."""

DIRECT = 0
FIRST = 1
EXCHANGED = 2
BETWEEN_NODES = 3
WITHIN_NODES = 4
STAGES = 5
"""Tables of messages: that of the route `direct`, the first stage of the other routes, and their later stages."""

DIRECT_S = np.array([DIRECT])
EXCHANGED_S = np.array([FIRST, EXCHANGED])
BY_NODE_S = np.array([FIRST, BETWEEN_NODES, WITHIN_NODES])
"""Tables of each route's stages: arrays, because numba would compile functions of tuples once for each length."""


class BatchLines(NamedTuple):
    """Numbers of a `BatchModel`."""

    near_alpha: float
    near_beta: float
    near_launch: float
    near_message: float
    far_alpha: float
    far_beta: float
    far_launch: float
    far_message: float
    """Within nodes (near) and between nodes (far): latency, seconds per byte, and launch and time of a message."""
    node_beta: float
    """Seconds per byte on all adapters of a node."""
    expert_bytes: float
    more_tensors: float
    """Messages of a piece beyond the first, if the expert is sent in one piece."""
    start: float


class Messages(NamedTuple):
    """Numbers of a `SendingModel`."""

    trans: BatchLines
    agg: BatchLines
    node_size: int
    one_way: float
    """See `Level.one_way`, within nodes."""
    least_rounds: int


@compiled(None)
def _add(
    amount_SFWD: np.ndarray,
    number_SFWD: np.ndarray,
    stage: int,
    way: int,
    rank: int,
    far: float,
    near: float,
    parts: int,
) -> None:
    """Add hops of `parts` parts of an expert that a rank sends (way 0) or receives (way 1)."""
    amount_SFWD[stage, 0, way, rank] += near / parts
    amount_SFWD[stage, 1, way, rank] += far / parts
    number_SFWD[stage, 0, way, rank] += near
    number_SFWD[stage, 1, way, rank] += far


@compiled(None)
def _add_expert(
    amount_SFWD: np.ndarray, number_SFWD: np.ndarray, rank_M: np.ndarray, begin_N: np.ndarray, owner: int, size: int
) -> None:
    """Add the messages of an expert's guests, which ascend, to each stage; see `placement/trans_plan.py`. The guests of
    a node begin at an entry of `begin_N`, and end at the next one."""
    guests = begin_N[-1] - begin_N[0]
    nodes = len(begin_N) - 1
    home = owner // size
    at_home = 0
    for n in range(nodes):
        is_home = rank_M[begin_N[n]] // size == home
        here = begin_N[n + 1] - begin_N[n]
        at_home += here if is_home else 0
        far = 0.0 if is_home else 1.0
        for m in range(begin_N[n], begin_N[n + 1]):
            rank = rank_M[m]
            _add(amount_SFWD, number_SFWD, DIRECT, 1, rank, far, 1.0 - far, 1)
            _add(amount_SFWD, number_SFWD, FIRST, 1, rank, far, 1.0 - far, guests)
            if guests == 1:
                continue
            for way in range(2):
                _add(amount_SFWD, number_SFWD, EXCHANGED, way, rank, guests - here, here - 1.0, guests)
            # Parts of other nodes enter a node at its guests in turn, in cyclic order after the owner
            place = 0
            for other in rank_M[begin_N[n] : begin_N[n + 1]]:
                place += (other - owner) % size < (rank - owner) % size
            entered = 0
            for k in range(nodes):
                if k != n and begin_N[k + 1] - begin_N[k] > place:
                    entered += (begin_N[k + 1] - begin_N[k] - place - 1) // here + 1
            _add(amount_SFWD, number_SFWD, BETWEEN_NODES, 0, rank, nodes - 1.0, here - 1.0, guests)
            _add(amount_SFWD, number_SFWD, BETWEEN_NODES, 1, rank, entered, here - 1.0, guests)
            within = entered * (here - 1.0)
            _add(amount_SFWD, number_SFWD, WITHIN_NODES, 0, rank, 0.0, within, guests)
            _add(amount_SFWD, number_SFWD, WITHIN_NODES, 1, rank, 0.0, guests - here - entered, guests)
    _add(amount_SFWD, number_SFWD, DIRECT, 0, owner, guests - at_home, at_home, 1)
    _add(amount_SFWD, number_SFWD, FIRST, 0, owner, guests - at_home, at_home, guests)


@compiled(None)
def _batch(
    amount_FWD: np.ndarray, number_FWD: np.ndarray, share_D: np.ndarray, nodes: int, size: int, lines: BatchLines
) -> tuple[float, float]:
    """Return one batch's latency, and its time in proportion to experts' sizes, if all ranks begin and end together."""
    latency = 0.0
    tensors = 0.0
    longest = 0.0
    ranks = len(share_D)
    for d in range(ranks):
        share = share_D[d]
        near_number = number_FWD[0, 0, d] + number_FWD[0, 1, d]
        far_number = number_FWD[1, 0, d] + number_FWD[1, 1, d]
        if not near_number and not far_number:
            continue
        near_alone = lines.near_alpha * share if near_number else 0.0
        near_launch = lines.near_launch * share if near_number else 0.0
        far_alone = lines.far_alpha if far_number else 0.0
        far_launch = lines.far_launch if far_number else 0.0
        launched = max(near_launch, far_launch)
        launched += lines.near_message * share * near_number + lines.far_message * far_number
        latency = max(latency, near_alone, far_alone, launched)
        near_both = amount_FWD[0, 0, d] + amount_FWD[0, 1, d]
        far_both = amount_FWD[1, 0, d] + amount_FWD[1, 1, d]
        more = lines.near_message * share * near_both + lines.far_message * far_both
        tensors = max(tensors, lines.more_tensors * more)
        near = max(amount_FWD[0, 0, d], amount_FWD[0, 1, d]) * lines.expert_bytes * lines.near_beta * share
        far = max(amount_FWD[1, 0, d], amount_FWD[1, 1, d]) * lines.expert_bytes * lines.far_beta
        longest = max(longest, near, far)
    for node in range(nodes):
        for way in range(2):
            total = amount_FWD[1, way, node * size : (node + 1) * size].sum()
            longest = max(longest, total * lines.expert_bytes * lines.node_beta)
    return latency, tensors + longest


@compiled(None)
def _shares(amount_FWD: np.ndarray, size: int, one_way: float) -> np.ndarray:
    """Return [D]: the time of a node's messages as a fraction of a full batch's time; see `BatchModel`."""
    ranks = amount_FWD.shape[2]
    share_D = np.ones(ranks)
    if one_way < 1:
        done_XD = np.empty((1, ranks))
        for d in range(ranks):
            done_XD[0, d] = (amount_FWD[0, 0, d] + amount_FWD[0, 1, d]) / 2
        take_turns(done_XD, size, one_way)
        for first in range(0, ranks, size):
            after = min(first + size, ranks)
            done = done_XD[0, first:after].max()
            most = 0.0
            for d in range(first, after):
                most = max(most, amount_FWD[0, 0, d], amount_FWD[0, 1, d])
            share_D[first:after] = min(max(done / most, one_way), 1.0) if most else 1.0
    return share_D


@compiled(None)
def _batches(
    amount_SFWD: np.ndarray, number_SFWD: np.ndarray, stages_S: np.ndarray, messages: Messages, lines: BatchLines
) -> np.ndarray:
    """Return [3, stages, stages + 1]: latency, time in proportion to experts' sizes, and the most amounts that a rank
    sends, of batches by their first stage and their number of stages."""
    ranks = amount_SFWD.shape[3]
    nodes = (ranks - 1) // messages.node_size + 1
    found = np.zeros((3, len(stages_S), len(stages_S) + 1))
    amount_FWD = np.empty(amount_SFWD.shape[1:])
    number_FWD = np.empty(amount_SFWD.shape[1:])
    for first in range(len(stages_S)):
        amount_FWD[:] = 0.0
        number_FWD[:] = 0.0
        for count in range(1, len(stages_S) - first + 1):
            amount_FWD += amount_SFWD[stages_S[first + count - 1]]
            number_FWD += number_SFWD[stages_S[first + count - 1]]
            share_D = _shares(amount_FWD, messages.node_size, messages.one_way)
            latency, rest = _batch(amount_FWD, number_FWD, share_D, nodes, messages.node_size, lines)
            found[0, first, count] = latency
            found[1, first, count] = rest
            for d in range(ranks):
                found[2, first, count] = max(found[2, first, count], amount_FWD[0, 0, d] + amount_FWD[1, 0, d])
    return found


@compiled(None)
def _least_seconds(amount_SFWD: np.ndarray, stages_S: np.ndarray, messages: Messages) -> float:
    """Return a lower bound of Trans: the time of all bytes on a rank's link if all stages overlap."""
    longest = 0.0
    for d in range(amount_SFWD.shape[3]):
        for way in range(2):
            near = 0.0
            far = 0.0
            for stage in stages_S:
                near += amount_SFWD[stage, 0, way, d]
                far += amount_SFWD[stage, 1, way, d]
            near *= messages.trans.near_beta * messages.one_way
            longest = max(longest, near, far * messages.trans.far_beta)
    return messages.trans.start + longest * messages.trans.expert_bytes


@compiled(None)
def _route(
    amount_SFWD: np.ndarray, number_SFWD: np.ndarray, stages_S: np.ndarray, messages: Messages, limit: float
) -> tuple[float, int]:
    """Return the seconds of Trans along a route of these stages, and the fastest number of pieces; ties go to fewer
    pieces. A route that takes at least `limit` seconds may take infinitely long."""
    if _least_seconds(amount_SFWD, stages_S, messages) >= limit:
        return np.inf, 1
    times = _batches(amount_SFWD, number_SFWD, stages_S, messages, messages.trans)
    staged_A = np.zeros(len(PIECES))
    for a in range(len(PIECES)):
        for batch in range(min(PIECES[a] + len(stages_S) - 1, 2 * len(stages_S))):
            first, count = _stages_of(batch, PIECES[a], len(stages_S))
            staged_A[a] = max(staged_A[a], times[2, first, count] * messages.agg.expert_bytes / PIECES[a])
    most = max(MOST_STAGED, staged_A.min())
    best = 1
    least = np.inf
    for a in range(len(PIECES)):
        if PIECES[a] + len(stages_S) - 1 >= messages.least_rounds and staged_A[a] <= most:
            seconds = _seconds(times, PIECES[a], messages.trans)
            if seconds < least:
                least = seconds
                best = PIECES[a]
    return least, best


@compiled(None)
def _stages_of(batch: int, pieces: int, stages: int) -> tuple[int, int]:
    """Return the first stage in a batch and the number of its stages; a piece advances one stage per batch."""
    first = max(0, batch - pieces + 1)
    return first, min(batch, stages - 1) + 1 - first


@compiled(None)
def _seconds(times: np.ndarray, pieces: int, lines: BatchLines) -> float:
    """Return the seconds of all batches."""
    total = lines.start
    stages = times.shape[1]
    full = max(0, pieces - stages)
    # Batches in the middle, with a piece in each stage, are alike
    for batch in range(pieces + stages - 1 - full):
        first, count = _stages_of(batch, pieces - full, stages)
        number = 1 + full if count == stages else 1
        total += number * (times[0, first, count] + times[1, first, count] / pieces)
    return total


@compiled("Tuple((float64, float64, int64, int64))(int64[::1], int64[::1], int64[::1], int64, Messages[::1])", Messages)
def fastest_sending(
    expert_M: np.ndarray, rank_M: np.ndarray, owner_E: np.ndarray, ranks: int, messages_1: np.ndarray
) -> tuple[float, float, int, int]:
    """Return the seconds of Trans and Agg of the fastest route, the number of its stages, and the number of pieces. The
    seconds are upper bounds, for ranks that begin and end every batch together. Guests are ordered by expert, then by
    rank; see `SendingModel.messages_1`."""
    if not len(expert_M):
        return 0.0, 0.0, 1, 1
    messages = messages_1[0]
    amount_SFWD = np.zeros((STAGES, 2, 2, ranks))
    number_SFWD = np.zeros((STAGES, 2, 2, ranks))
    begin_N = np.zeros(len(expert_M) + 1, np.int64)
    number = 0
    for m in range(1, len(expert_M) + 1):
        ends = m == len(expert_M) or expert_M[m] != expert_M[m - 1]
        if ends or rank_M[m] // messages.node_size != rank_M[m - 1] // messages.node_size:
            number += 1
            begin_N[number] = m
        if ends:
            owner = owner_E[expert_M[m - 1]]
            _add_expert(amount_SFWD, number_SFWD, rank_M, begin_N[: number + 1], owner, messages.node_size)
            begin_N[0] = m
            number = 0
    route_S = DIRECT_S
    trans, pieces = _route(amount_SFWD, number_SFWD, route_S, messages, np.inf)
    for table, other_S in ((EXCHANGED, EXCHANGED_S), (WITHIN_NODES, BY_NODE_S)):
        if number_SFWD[table].any():
            found = _route(amount_SFWD, number_SFWD, other_S, messages, trans)
            if found[0] < trans:
                route_S = other_S
                trans, pieces = found
    times = _batches(amount_SFWD, number_SFWD, route_S, messages, messages.agg)
    return trans, _seconds(times, pieces, messages.agg), len(route_S), pieces
