"""Costs of exchanges, computation, Trans and Agg: compiled loops, shared by the cost model and all searches.

Loops keep the order of sums, so all ranks get the same bits.

*Loads* are tokens [F, B, D] by feature, microbatch and rank: tokens that the rank computes, sends and receives within
its node, and sends to and receives from other nodes. Exchanges take amounts [4, D], the last four features.

In shapes, F counts the features of loads, and M guests.
"""

import math
from typing import Annotated, NamedTuple

import numpy as np

from megatron_balance.cost.layer import LayerLines
from megatron_balance.device.compiled import compiled

COMPUTED, NEAR_OUT, NEAR_IN, FAR_OUT, FAR_IN = range(5)
"""Features of loads."""

FEATURES = 5

MOST_PIECES = 64
"""Maximum number of pieces of an expert; each piece costs a call."""

LEAST_ALPHA = 1e-6
"""Minimum seconds of a message's latency for choosing pieces, because a line fitted to noisy times may have none."""

ROUNDING = 1e-9

_Numbers = Annotated[np.ndarray, "float64[::1]"]


class Links(NamedTuple):
    """Links and adapters of ranks, in seconds per unit (byte or token)."""

    node_size: int
    near: float
    """Seconds per unit that a rank sends within its node while it receives as much."""
    far: float
    """The same between nodes, for a rank with an adapter of its own."""
    near_one_way: float
    far_one_way: float
    """See `Level.one_way`."""
    adapters: float
    """See `Network.adapters`."""
    near_copies: float = 1.0
    """Copies of tokens that cross links within nodes, per row to another rank; see `Routing.copies`."""
    far_copies: float = 1.0
    """The same for links between nodes."""
    relayed: float = 0.0
    """Fraction of the rows from other nodes that are then sent on within the node. If it is not 0, ranks of a node
    receive equal parts of these rows."""


class SendingLine(NamedTuple):
    """Lines (latency alpha, seconds per byte beta) of a batch of Trans or of Agg."""

    near_alpha: float
    near_beta: float
    far_alpha: float
    far_beta: float
    """Within nodes (near) and between nodes (far)."""
    expert_bytes: float
    messages: float
    """Seconds to launch two messages within a node."""
    start: float
    """Seconds beyond those of batches."""


class SendingPrices(NamedTuple):
    """Arguments of `few_batches`; see SendingModel."""

    trans: SendingLine
    agg: SendingLine
    far: float
    least_rounds: int


class Prices(NamedTuple):
    """Numbers of a CostModel."""

    links: Links
    """Seconds of tokens."""
    sending: SendingPrices
    local_first: bool
    """Whether the split is `local_first` rather than `proportional`."""
    coding: float
    """See `CostModel.coding`."""
    layer: LayerLines


class CandidateCosts(NamedTuple):
    """Costs of A candidates."""

    work_ABD: Annotated[np.ndarray, "float64[:,:,::1]"]
    """Each rank's seconds of computation and exchanges (FlexMoE's Eq. 7 and 8), without latencies."""
    exchanging_A: _Numbers
    computed_A: _Numbers
    """`CostModel.work_of`."""
    more_A: _Numbers
    """Time in Trans that the candidate adds, summed over ranks."""
    trans_A: _Numbers
    agg_A: _Numbers
    """Seconds of Trans and of Agg on the busiest rank."""


@compiled(None)
def _busiest(sent: float, received: float, one_way: float) -> float:
    """Return the balanced amount, sent while as much is received, that takes as long as these amounts."""
    return one_way * max(sent, received) + (1.0 - one_way) * min(sent, received)


@compiled(None)
def _take_turns(work_S: np.ndarray, node_size: int, one_way: float) -> float:
    """Replace the work of a node's ranks by their completion times, and return the latest. If the directions of a link
    share its bandwidth, so do the ranks of a node. All active ranks have the same rate, which grows as ranks finish, up
    to 1 / `one_way` times the rate in a full node."""
    if one_way == 1.0:
        most = 0.0
        for work in work_S:
            most = max(most, work)
        return most
    done = 0.0
    before = 0.0
    at_work = len(work_S)
    for place in np.argsort(work_S):
        work = work_S[place]
        done += (work - before) * max(at_work / node_size, one_way)
        work_S[place] = done
        before = work
        at_work -= 1
    return float(done)


@compiled(None)
def _carry(amount_FD: np.ndarray, links: Links, near_D: np.ndarray, far_D: np.ndarray, node_N: np.ndarray) -> float:
    """Set the seconds of links within nodes, shares of adapters, and nodes' adapters; return the maximum."""
    ranks = amount_FD.shape[1]
    longest = 0.0
    near_beta = links.near * links.near_copies
    far_beta = links.far * links.far_copies
    for node in range(len(node_N)):
        first = node * links.node_size
        last = min(first + links.node_size, ranks)
        sent = 0.0
        received = 0.0
        for d in range(first, last):
            sent += amount_FD[2, d]
            received += amount_FD[3, d]
        each = received / (last - first)
        for d in range(first, last):
            out = amount_FD[0, d] + links.relayed * each
            into = amount_FD[1, d] + links.relayed * amount_FD[3, d]
            arriving = each if links.relayed > 0 else amount_FD[3, d]
            near_D[d] = near_beta * _busiest(out, into, links.near_one_way)
            far_D[d] = far_beta * _busiest(amount_FD[2, d], arriving, links.far_one_way)
            longest = max(longest, far_D[d])
        near = _take_turns(near_D[first:last], links.node_size, links.near_one_way)
        node_N[node] = far_beta / links.adapters * _busiest(sent, received, links.far_one_way)
        longest = max(longest, near, node_N[node])
    return longest


@compiled("Tuple((float64[:,::1], float64[:,::1], float64[:,::1], float64[::1]))(float64[:,:,::1], Links[::1])", Links)
def carry(amount_XFD: np.ndarray, links_1: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return [X, D], [X, D], [X, N]: seconds that X exchanges use each resource; and [X]: the maximum."""
    links = links_1[0]
    exchanges, _, ranks = amount_XFD.shape
    near_XD = np.zeros((exchanges, ranks))
    far_XD = np.zeros((exchanges, ranks))
    node_XN = np.zeros((exchanges, (ranks - 1) // links.node_size + 1))
    longest_X = np.zeros(exchanges)
    for x in range(exchanges):
        longest_X[x] = _carry(amount_XFD[x], links, near_XD[x], far_XD[x], node_XN[x])
    return near_XD, far_XD, node_XN, longest_X


@compiled("void(float64[:,::1], int64, float64)")
def take_turns(work_XD: np.ndarray, node_size: int, one_way: float) -> None:
    """Replace ranks' work (seconds in a full, evenly loaded node) by completion times; see `_take_turns`."""
    for x in range(len(work_XD)):
        for first in range(0, work_XD.shape[1], node_size):
            _take_turns(work_XD[x, first : first + node_size], node_size, one_way)


@compiled(None)
def hosted_by(shares_D: np.ndarray, primary: int, owner: int) -> int:
    """Return the primary host by the rule of `Placement.rehost`."""
    if shares_D[primary] > 0:
        return primary
    if shares_D[owner] > 0:
        return owner
    first = 0
    while shares_D[first] == 0:
        first += 1
    return first


@compiled(None)
def _add_alone(
    loads_FBD: np.ndarray, b: int, sign: float, counts_D: np.ndarray, tokens: float, host: int, node_size: int
) -> None:
    """Do the same as `add_expert` in a microbatch, for an expert with one host, which receives all tokens of other
    ranks. `tokens` is the sum of the counts."""
    first = host - host % node_size
    last = min(first + node_size, len(counts_D))
    near = 0.0
    for d in range(first, last):
        loads_FBD[NEAR_OUT, b, d] += sign * counts_D[d]
        near += counts_D[d]
    for d in range(first):
        loads_FBD[FAR_OUT, b, d] += sign * counts_D[d]
    for d in range(last, len(counts_D)):
        loads_FBD[FAR_OUT, b, d] += sign * counts_D[d]
    loads_FBD[COMPUTED, b, host] += sign * tokens
    loads_FBD[NEAR_OUT, b, host] -= sign * counts_D[host]
    loads_FBD[NEAR_IN, b, host] += sign * (near - counts_D[host])
    loads_FBD[FAR_IN, b, host] += sign * (tokens - near)


@compiled(None, inline=True)
def add_node(
    loads_FBD: np.ndarray,
    b: int,
    sign: float,
    counts_D: np.ndarray,
    share_D: np.ndarray,
    tokens: float,
    first: int,
    last: int,
    is_whole: bool,
    owner: int,
) -> None:
    """Add, times `sign`, the loads of a node's ranks in a microbatch, if each computes its share of an expert's
    tokens. Tokens that stay on the node are distributed in proportion to the tokens that each rank sends or receives.
    If `is_whole`, the node has all ranks, and all tokens stay. Subtract the loads of this node's ranks if the owner
    alone computes the expert; `owner` is -1 if there is nothing to subtract."""
    out = 0.0
    into = 0.0
    here = 0.0
    for d in range(first, last):
        more = counts_D[d] - share_D[d] * tokens
        out += max(more, 0.0)
        into += max(-more, 0.0)
        here += counts_D[d]
    near = min(out, into)
    near_out, near_in = (near / out, near / into) if near > 0 else (0.0, 0.0)
    if is_whole:
        near_out = 1.0
        near_in = 1.0
    is_home = first <= owner < last
    was_near = 1.0 if is_home or (is_whole and owner >= 0) else 0.0
    was_far = 1.0 - was_near if owner >= 0 else 0.0
    for d in range(first, last):
        quota = share_D[d] * tokens
        sent = max(counts_D[d] - quota, 0.0)
        received = max(quota - counts_D[d], 0.0)
        loads_FBD[COMPUTED, b, d] += sign * quota
        loads_FBD[NEAR_OUT, b, d] += sign * (sent * near_out - was_near * counts_D[d])
        loads_FBD[NEAR_IN, b, d] += sign * (received * near_in)
        loads_FBD[FAR_OUT, b, d] += sign * (sent - sent * near_out - was_far * counts_D[d])
        loads_FBD[FAR_IN, b, d] += sign * (received - received * near_in)
    if is_home:
        others = tokens - counts_D[owner]
        near = others if is_whole else here - counts_D[owner]
        loads_FBD[COMPUTED, b, owner] -= sign * tokens
        loads_FBD[NEAR_OUT, b, owner] += sign * counts_D[owner]
        loads_FBD[NEAR_IN, b, owner] -= sign * near
        loads_FBD[FAR_IN, b, owner] -= sign * (others - near)


@compiled(None)
def add_expert(
    loads_FBD: np.ndarray,
    sign: float,
    counts_BD: np.ndarray,
    shares_D: np.ndarray,
    primary: int,
    node_size: int,
    local_first: bool,
) -> None:
    """Add an expert's loads, times `sign`."""
    ranks = loads_FBD.shape[2]
    weight = 0
    hosts = 0
    for d in range(ranks):
        weight += shares_D[d]
        hosts += shares_D[d] > 0
    if hosts == 1:
        for b in range(loads_FBD.shape[1]):
            _add_alone(loads_FBD, b, sign, counts_BD[b], counts_BD[b].sum(), primary, node_size)
        return
    quota_D = np.empty(ranks)
    for b in range(loads_FBD.shape[1]):
        total = 0.0
        hosted = 0.0
        for d in range(ranks):
            own = counts_BD[b, d] if shares_D[d] > 0 else 0.0
            total += counts_BD[b, d]
            hosted += own
            quota_D[d] = own
        if local_first:
            quota_D[primary] += total - hosted
        else:
            each = total / weight
            for d in range(ranks):
                quota_D[d] = shares_D[d] * each
        for first in range(0, ranks, node_size):
            last = min(first + node_size, ranks)
            add_node(loads_FBD, b, sign, counts_BD[b], quota_D, 1.0, first, last, node_size >= ranks, -1)


@compiled(None)
def _guests_of(shares_D: np.ndarray, owner: int) -> np.ndarray:
    """Return the expert's hosts other than its owner, ascending."""
    guest_M = np.empty(len(shares_D), np.int64)
    guests = 0
    for d in range(len(shares_D)):
        if shares_D[d] > 0 and d != owner:
            guest_M[guests] = d
            guests += 1
    return guest_M[:guests]


@compiled(None)
def send_expert(times_D: np.ndarray, sign: float, guest_M: np.ndarray, owner: int, node_size: int, far: float) -> float:
    """Add, times `sign`, the time for ranks to receive an expert, and for its owner to send it once. Return the time of
    a piece on links other than the slowest one, if guests pass it on one after another. The unit is the time of an
    expert within a node. An expert enters each node once: at the first guest after the owner in cyclic order of local
    ranks. `guest_M` ascends."""
    total = 0.0
    most = 0.0
    sends = 0.0
    home = owner // node_size
    first = 0
    while first < len(guest_M):
        node = guest_M[first] // node_size
        entry = guest_M[first]
        after = first
        while after < len(guest_M) and guest_M[after] // node_size == node:
            if (guest_M[after] - owner) % node_size < (entry - owner) % node_size:
                entry = guest_M[after]
            after += 1
        for guest in guest_M[first:after]:
            time = far if guest == entry and node != home else 1.0
            total += time
            most = max(most, time)
            times_D[guest] += sign * time
        sends = 1.0 if node == home or sends == 1.0 else far
        first = after
    times_D[owner] += sign * sends
    return max(total - most, 0.0)


@compiled(None)
def move_expert(
    loads_FBD: np.ndarray,
    sent_D: np.ndarray,
    sign: float,
    counts_BD: np.ndarray,
    shares_D: np.ndarray,
    primary: int,
    owner: int,
    prices: Prices,
) -> float:
    """Add the loads and link times of an expert with these hosts; return as `send_expert`."""
    size = prices.links.node_size
    add_expert(loads_FBD, sign, counts_BD, shares_D, hosted_by(shares_D, primary, owner), size, prices.local_first)
    return send_expert(sent_D, sign, _guests_of(shares_D, owner), owner, size, prices.sending.far)


@compiled(None)
def sum_work(
    loads_FBD: np.ndarray,
    more_FBD: np.ndarray,
    work_BD: np.ndarray,
    prices: Prices,
    rate_D: np.ndarray,
    per_token_D: np.ndarray,
) -> tuple[float, float]:
    """Return `CostModel.work_of` of the sum of two loads; set `work_BD` as in `CandidateCosts.work_ABD`."""
    _, microbatches, ranks = loads_FBD.shape
    links = prices.links
    exchanging = 0.0
    computed = 0.0
    near_D = np.empty(ranks)
    far_D = np.empty(ranks)
    node_N = np.empty((ranks - 1) // links.node_size + 1)
    near_beta = links.near * links.near_copies
    far_beta = links.far * links.far_copies
    for b in range(microbatches):
        longest = 0.0
        coded = 0.0
        total_FD = loads_FBD[:, b] + more_FBD[:, b]
        for d in range(ranks):
            out = total_FD[NEAR_OUT, d] + links.relayed * total_FD[FAR_OUT, d]
            into = total_FD[NEAR_IN, d] + links.relayed * total_FD[FAR_IN, d]
            near = near_beta * _busiest(out, into, links.near_one_way)
            far = far_beta * _busiest(total_FD[FAR_OUT, d], total_FD[FAR_IN, d], links.far_one_way)
            work_BD[b, d] = 4 * max(near, far) + total_FD[COMPUTED, d] * per_token_D[d]
            longest = max(longest, total_FD[COMPUTED, d] / rate_D[d])
            sent = total_FD[NEAR_OUT, d] + total_FD[FAR_OUT, d]
            coded = max(coded, sent, total_FD[NEAR_IN, d] + total_FD[FAR_IN, d])
        exchanging += _carry(total_FD[NEAR_OUT:], links, near_D, far_D, node_N) + prices.coding * coded
        computed += longest
    return exchanging, computed


@compiled("UniTuple(float64[::1], 2)(float64[:,:,:,::1], Prices[::1], float64[::1], float64[::1])", Prices)
def layer_work(
    loads_XFBD: np.ndarray, prices_1: np.ndarray, rate_D: np.ndarray, per_token_D: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return `CostModel.work_of`, [X] and [X]; the last arguments are `CostModel.prices`."""
    exchanging_X = np.zeros(len(loads_XFBD))
    computed_X = np.zeros(len(loads_XFBD))
    nothing_FBD = np.zeros(loads_XFBD.shape[1:])
    work_BD = np.empty(loads_XFBD.shape[2:])
    for x in range(len(loads_XFBD)):
        exchanging_X[x], computed_X[x] = sum_work(loads_XFBD[x], nothing_FBD, work_BD, prices_1[0], rate_D, per_token_D)
    return exchanging_X, computed_X


@compiled(None)
def _few_batches(busy: float, extra: float, line: SendingLine, far: float, least_rounds: int) -> float:
    if busy <= 0:
        return 0.0
    is_far = busy >= far * (1 - ROUNDING) and far > 1
    alpha = (line.far_alpha if is_far else line.near_alpha) + line.messages * extra
    last = line.expert_bytes * (line.near_beta * min(extra, 1.0) if extra < far else line.far_beta)
    pieces = min(max(np.rint(math.sqrt(last / max(alpha, LEAST_ALPHA))), 1.0), MOST_PIECES)
    more = 1.0 if extra > 0 or least_rounds > 1 else 0.0
    time = busy * (line.far_beta / far if is_far else line.near_beta) * line.expert_bytes
    return line.start + alpha * ((pieces if extra > 0 else 1.0) + more) + time + last / pieces


@compiled(None)
def few_batches(busy: float, extra: float, prices: SendingPrices) -> tuple[float, float]:
    """Return the seconds of Trans and Agg; see `SendingModel.seconds_of`."""
    trans = _few_batches(busy, extra, prices.trans, prices.far, prices.least_rounds)
    return trans, _few_batches(busy, extra, prices.agg, prices.far, prices.least_rounds)


@compiled("UniTuple(float64[::1], 2)(float64[:], float64[:], SendingPrices[::1])", SendingPrices)
def few_batches_each(busy_A: np.ndarray, extra_A: np.ndarray, sending_1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `few_batches` of each pair of numbers, [A] and [A]."""
    trans_A = np.zeros(len(busy_A))
    agg_A = np.zeros(len(busy_A))
    for a in range(len(busy_A)):
        trans_A[a], agg_A[a] = few_batches(busy_A[a], extra_A[a], sending_1[0])
    return trans_A, agg_A


@compiled("Tuple((float64[:,::1], float64[::1]))(int64[::1], boolean[:,:], int64, float64)")
def link_times(owner_A: np.ndarray, guests_AD: np.ndarray, node_size: int, far: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the results of `send_expert` for each expert, [A, D] and [A]."""
    times_AD = np.zeros(guests_AD.shape)
    extra_A = np.zeros(len(owner_A))
    for a in range(len(owner_A)):
        guest_M = _guests_of(guests_AD[a], owner_A[a])
        extra_A[a] = send_expert(times_AD[a], 1.0, guest_M, owner_A[a], node_size, far)
    return times_AD, extra_A


@compiled("void(float64[:,:,::1], float64[:,:,::1], int64[:,::1], int64[::1], int64, boolean)")
def add_loads(
    loads_FBD: np.ndarray,
    counts_EBD: np.ndarray,
    shares_ED: np.ndarray,
    primary_E: np.ndarray,
    node_size: int,
    local_first: bool,
) -> None:
    """Add the loads of all experts."""
    for e in range(len(primary_E)):
        add_expert(loads_FBD, 1.0, counts_EBD[e], shares_ED[e], primary_E[e], node_size, local_first)


@compiled("void(float64[:,:,::1], float64[:,:,::1], float64[:,::1], int64[::1], int64)")
def add_owners(
    loads_FBD: np.ndarray, counts_EBD: np.ndarray, tokens_EB: np.ndarray, owner_E: np.ndarray, node_size: int
) -> None:
    """Add the loads of all experts, each computed by its owner alone. `tokens_EB` has the sums over source ranks."""
    for e in range(len(owner_E)):
        for b in range(counts_EBD.shape[1]):
            _add_alone(loads_FBD, b, 1.0, counts_EBD[e, b], tokens_EB[e, b], owner_E[e], node_size)
