"""The fastest way to send a placement's guests, and the seconds of Trans and Agg, in a compiled loop.

The search of `quota` compares many plans and builds no placement for them. In shapes, M counts guests, S stages of a
route, and C columns.
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

NEAR_SENT, NEAR_RECEIVED, FAR_SENT, FAR_RECEIVED = range(4)
"""Columns of a rank's messages."""

COLUMNS = 4

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


@compiled(None, inline=True)
def _add(table_DC: np.ndarray, rank: int, way: int, near: float, far: float) -> None:
    """Add what a rank sends (way 0) or receives (way 1)."""
    table_DC[rank, NEAR_SENT + way] += near
    table_DC[rank, FAR_SENT + way] += far


@compiled(None, inline=True)
def _add_parts(
    amount_DC: np.ndarray, number_DC: np.ndarray, rank: int, way: int, near: float, far: float, part: float
) -> None:
    """Add messages with a part of an expert each."""
    _add(amount_DC, rank, way, near * part, far * part)
    _add(number_DC, rank, way, near, far)


@compiled(None)
def _entered(rank_M: np.ndarray, begin_N: np.ndarray, n: int, m: int, owner: int, size: int) -> int:
    """Return the number of parts from other nodes that enter a node at one of its guests."""
    place = 0
    for other in range(begin_N[n], begin_N[n + 1]):
        place += (rank_M[other] - owner) % size < (rank_M[m] - owner) % size
    entered = 0
    for k in range(len(begin_N) - 1):
        there = begin_N[k + 1] - begin_N[k]
        if k != n and there > place:
            entered += (there - place - 1) // (begin_N[n + 1] - begin_N[n]) + 1
    return entered


@compiled(None, inline=True)
def _add_expert(
    amount_SDC: np.ndarray, number_SDC: np.ndarray, rank_M: np.ndarray, begin_N: np.ndarray, owner: int, size: int
) -> None:
    """Add the messages of an expert's guests, which ascend, to each stage; see `placement/trans_plan.py`. The guests of
    a node begin at an entry of `begin_N`, and end at the next one."""
    nodes = len(begin_N) - 1
    guests = begin_N[nodes] - begin_N[0]
    part = 1.0 / guests
    at_home = 0
    for n in range(nodes):
        here = begin_N[n + 1] - begin_N[n]
        is_home = rank_M[begin_N[n]] // size == owner // size
        at_home += here if is_home else 0
        near = 1.0 if is_home else 0.0
        for m in range(begin_N[n], begin_N[n + 1]):
            rank = rank_M[m]
            _add_parts(amount_SDC[DIRECT], number_SDC[DIRECT], rank, 1, near, 1.0 - near, 1.0)
            _add_parts(amount_SDC[FIRST], number_SDC[FIRST], rank, 1, near, 1.0 - near, part)
            if guests == 1:
                continue
            for way in range(2):
                _add_parts(amount_SDC[EXCHANGED], number_SDC[EXCHANGED], rank, way, here - 1.0, guests - here, part)
            # Parts of other nodes enter a node at its guests in turn, in cyclic order after the owner
            entered = guests - here
            if here > 1:
                entered = _entered(rank_M, begin_N, n, m, owner, size)
            tables = amount_SDC[BETWEEN_NODES], number_SDC[BETWEEN_NODES]
            _add_parts(*tables, rank, 0, here - 1.0, nodes - 1.0, part)
            _add_parts(*tables, rank, 1, here - 1.0, entered, part)
            tables = amount_SDC[WITHIN_NODES], number_SDC[WITHIN_NODES]
            _add_parts(*tables, rank, 0, entered * (here - 1.0), 0.0, part)
            _add_parts(*tables, rank, 1, guests - here - entered, 0.0, part)
    _add_parts(amount_SDC[DIRECT], number_SDC[DIRECT], owner, 0, at_home, guests - at_home, 1.0)
    _add_parts(amount_SDC[FIRST], number_SDC[FIRST], owner, 0, at_home, guests - at_home, part)


@compiled(None, inline=True)
def _batch(
    amount_DC: np.ndarray, number_DC: np.ndarray, share_D: np.ndarray, size: int, lines: BatchLines
) -> tuple[float, float, float]:
    """Return one batch's latency, and its time in proportion to experts' sizes, if all ranks begin and end together;
    and the most that a rank sends."""
    latency = 0.0
    tensors = 0.0
    longest = 0.0
    most = 0.0
    sent = 0.0
    received = 0.0
    for d in range(len(share_D)):
        share = share_D[d]
        near = number_DC[d, NEAR_SENT] + number_DC[d, NEAR_RECEIVED]
        far = number_DC[d, FAR_SENT] + number_DC[d, FAR_RECEIVED]
        has_near = share if near else 0.0
        has_far = 1.0 if far else 0.0
        launched = max(lines.near_launch * has_near, lines.far_launch * has_far)
        launched += lines.near_message * share * near + lines.far_message * far
        latency = max(latency, lines.near_alpha * has_near, lines.far_alpha * has_far, launched)
        near = amount_DC[d, NEAR_SENT] + amount_DC[d, NEAR_RECEIVED]
        far = amount_DC[d, FAR_SENT] + amount_DC[d, FAR_RECEIVED]
        tensors = max(tensors, lines.near_message * share * near + lines.far_message * far)
        near = max(amount_DC[d, NEAR_SENT], amount_DC[d, NEAR_RECEIVED]) * share
        far = max(amount_DC[d, FAR_SENT], amount_DC[d, FAR_RECEIVED])
        longest = max(longest, near * lines.near_beta, far * lines.far_beta)
        most = max(most, amount_DC[d, NEAR_SENT] + amount_DC[d, FAR_SENT])
        if d % size == 0:
            sent = 0.0
            received = 0.0
        sent += amount_DC[d, FAR_SENT]
        received += amount_DC[d, FAR_RECEIVED]
        longest = max(longest, sent * lines.node_beta, received * lines.node_beta)
    return latency, lines.more_tensors * tensors + lines.expert_bytes * longest, most


@compiled(None)
def _shares(amount_DC: np.ndarray, size: int, one_way: float) -> np.ndarray:
    """Return [D]: the time of a node's messages as a fraction of a full batch's time; see `BatchModel`."""
    ranks = len(amount_DC)
    share_D = np.ones(ranks)
    if one_way < 1:
        done_XD = np.empty((1, ranks))
        for d in range(ranks):
            done_XD[0, d] = (amount_DC[d, NEAR_SENT] + amount_DC[d, NEAR_RECEIVED]) / 2
        take_turns(done_XD, size, one_way)
        for first in range(0, ranks, size):
            after = min(first + size, ranks)
            done = done_XD[0, first:after].max()
            most = 0.0
            for d in range(first, after):
                most = max(most, amount_DC[d, NEAR_SENT], amount_DC[d, NEAR_RECEIVED])
            share_D[first:after] = min(max(done / most, one_way), 1.0) if most else 1.0
    return share_D


@compiled(None)
def _add_stage(sum_DC: np.ndarray, more_DC: np.ndarray) -> None:
    for d in range(len(sum_DC)):
        for c in range(COLUMNS):
            sum_DC[d, c] += more_DC[d, c]


@compiled(None)
def _batches(
    amount_SDC: np.ndarray, number_SDC: np.ndarray, stages_S: np.ndarray, messages: Messages, lines: BatchLines
) -> np.ndarray:
    """Return [3, stages, stages + 1]: the results of `_batch` for batches by their first stage and their number of
    stages."""
    found = np.zeros((3, len(stages_S), len(stages_S) + 1))
    for first in range(len(stages_S)):
        amount_DC = np.zeros(amount_SDC.shape[1:])
        number_DC = np.zeros(amount_SDC.shape[1:])
        for count in range(1, len(stages_S) - first + 1):
            _add_stage(amount_DC, amount_SDC[stages_S[first + count - 1]])
            _add_stage(number_DC, number_SDC[stages_S[first + count - 1]])
            share_D = _shares(amount_DC, messages.node_size, messages.one_way)
            latency, rest, most = _batch(amount_DC, number_DC, share_D, messages.node_size, lines)
            found[0, first, count] = latency
            found[1, first, count] = rest
            found[2, first, count] = most
    return found


@compiled(None)
def _least_seconds(amount_SDC: np.ndarray, stages_S: np.ndarray, messages: Messages) -> float:
    """Return a lower bound of Trans: the time of all bytes on a rank's link if all stages overlap."""
    longest = 0.0
    for d in range(amount_SDC.shape[1]):
        for way in range(2):
            near = 0.0
            far = 0.0
            for stage in stages_S:
                near += amount_SDC[stage, d, NEAR_SENT + way]
                far += amount_SDC[stage, d, FAR_SENT + way]
            near *= messages.trans.near_beta * messages.one_way
            longest = max(longest, near, far * messages.trans.far_beta)
    return messages.trans.start + longest * messages.trans.expert_bytes


@compiled(None)
def _route(
    amount_SDC: np.ndarray, number_SDC: np.ndarray, stages_S: np.ndarray, messages: Messages, limit: float
) -> tuple[float, int]:
    """Return the seconds of Trans along a route of these stages, and the fastest number of pieces; ties go to fewer
    pieces. A route that takes at least `limit` seconds may take infinitely long."""
    if _least_seconds(amount_SDC, stages_S, messages) >= limit:
        return np.inf, 1
    times = _batches(amount_SDC, number_SDC, stages_S, messages, messages.trans)
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
    amount_SDC = np.zeros((STAGES, ranks, COLUMNS))
    number_SDC = np.zeros((STAGES, ranks, COLUMNS))
    begin_N = np.zeros(len(expert_M) + 1, np.int64)
    number = 0
    for m in range(1, len(expert_M) + 1):
        ends = m == len(expert_M) or expert_M[m] != expert_M[m - 1]
        if ends or rank_M[m] // messages.node_size != rank_M[m - 1] // messages.node_size:
            number += 1
            begin_N[number] = m
        if ends:
            owner = owner_E[expert_M[m - 1]]
            _add_expert(amount_SDC, number_SDC, rank_M, begin_N[: number + 1], owner, messages.node_size)
            begin_N[0] = m
            number = 0
    route_S = DIRECT_S
    trans, pieces = _route(amount_SDC, number_SDC, route_S, messages, np.inf)
    for table, other_S in ((EXCHANGED, EXCHANGED_S), (WITHIN_NODES, BY_NODE_S)):
        if number_SDC[table].any():
            found = _route(amount_SDC, number_SDC, other_S, messages, trans)
            if found[0] < trans:
                route_S = other_S
                trans, pieces = found
    times = _batches(amount_SDC, number_SDC, route_S, messages, messages.agg)
    return trans, _seconds(times, pieces, messages.agg), len(route_S), pieces
