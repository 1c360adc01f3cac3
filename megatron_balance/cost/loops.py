"""Loops over ranks in machine code: what hosts change, for one expert or for many candidates.

numpy would take a call for each line of these functions, and plans call them hundreds of times. No loop reorders sums,
so that all ranks get the same bits.

Letters are those of `cost/loads.py`: A counts candidates, K experts of one candidate, E experts, F is 5. P counts
prices.
"""

from typing import NamedTuple

import numpy as np

from megatron_balance.cost.few_batches import few_batches
from megatron_balance.device.compiled import compiled

NEAR, FAR, NEAR_WAY, FAR_WAY, ADAPTERS, CODING, SENT_FAR = range(7)
"""Prices: seconds in which a link within a node, or a rank's own between nodes, carries a token in one exchange; both
links' `Level.one_way`; `Network.adapters`; `CostModel.coding`; and `SendingModel.far`."""


class Prices(NamedTuple):
    """Numbers of a CostModel."""

    node_size: int
    local_first: bool
    """Whether hosts compute their own tokens, as under `local_first`; otherwise shares, as under `proportional`."""

    price_P: np.ndarray
    """See NEAR."""

    numbers_27: np.ndarray
    least_rounds: int
    """See `few_batches`."""

    rate_D: np.ndarray
    per_token_D: np.ndarray
    """Seconds in which each rank computes a token, forward and backward."""


_PRICES = "int64, boolean, float64[::1], float64[:,::1], int64, float64[::1], float64[::1]"
_LAYER = "float64[:,:,::1], int64[:,::1], int64[::1], int64[::1]"
"""Counts [E, B, D], shares [E, D], primary hosts and owners [E]."""


@compiled(None)
def _hosted_by(shares_D: np.ndarray, primary: int, owner: int) -> int:
    """Return the primary host, by the rule of `Placement.rehost`."""
    if shares_D[primary] > 0:
        return primary
    if shares_D[owner] > 0:
        return owner
    first = 0
    while shares_D[first] == 0:
        first += 1
    return first


@compiled(None)
def _add_alone(loads_FBD: np.ndarray, sign: float, counts_BD: np.ndarray, host: int, size: int) -> None:
    """Do what `_add` does for an expert with one host, which receives all tokens of other ranks."""
    ranks = loads_FBD.shape[2]
    first = host - host % size
    last = min(first + size, ranks)
    for b in range(loads_FBD.shape[1]):
        near = 0.0
        far = 0.0
        for d in range(first, last):
            loads_FBD[1, b, d] += sign * counts_BD[b, d]
            near += counts_BD[b, d]
        for d in range(first):
            loads_FBD[3, b, d] += sign * counts_BD[b, d]
            far += counts_BD[b, d]
        for d in range(last, ranks):
            loads_FBD[3, b, d] += sign * counts_BD[b, d]
            far += counts_BD[b, d]
        loads_FBD[0, b, host] += sign * (near + far)
        loads_FBD[1, b, host] -= sign * counts_BD[b, host]
        loads_FBD[2, b, host] += sign * (near - counts_BD[b, host])
        loads_FBD[4, b, host] += sign * far


@compiled(None)
def _quota(tokens: float, share: int, kept: bool, each: float, rest: float) -> float:
    """Return the tokens that a rank computes: its own and the rest as under `local_first`, or as `proportional`."""
    return (tokens if share > 0 else 0.0) + rest if kept else share * each


@compiled(None)
def _add(
    loads_FBD: np.ndarray,
    sign: float,
    counts_BD: np.ndarray,
    shares_D: np.ndarray,
    primary: int,
    size: int,
    local: bool,
) -> None:
    """Add `expert_loads` of an expert, times `sign`, with nodes of `size` ranks, by `local_first` or `proportional`."""
    ranks = loads_FBD.shape[2]
    weight = 0
    hosts = 0
    for d in range(ranks):
        weight += shares_D[d]
        hosts += shares_D[d] > 0
    if hosts == 1:
        _add_alone(loads_FBD, sign, counts_BD, primary, size)
        return
    for b in range(loads_FBD.shape[1]):
        total = 0.0
        hosted = 0.0
        for d in range(ranks):
            total += counts_BD[b, d]
            hosted += counts_BD[b, d] if shares_D[d] > 0 else 0.0
        each = total / weight
        for first in range(0, ranks, size):
            last = min(first + size, ranks)
            out = 0.0
            into = 0.0
            for d in range(first, last):
                rest = total - hosted if d == primary else 0.0
                quota = _quota(counts_BD[b, d], shares_D[d], local, each, rest)
                out += max(counts_BD[b, d] - quota, 0.0)
                into += max(quota - counts_BD[b, d], 0.0)
            # Tokens that stay on the node are shared out in proportion to what each rank sends or receives
            near = min(out, into)
            near_out, near_in = (near / out, near / into) if near > 0 else (0.0, 0.0)
            if size >= ranks:
                near_out = 1.0
                near_in = 1.0
            for d in range(first, last):
                rest = total - hosted if d == primary else 0.0
                quota = _quota(counts_BD[b, d], shares_D[d], local, each, rest)
                sent = max(counts_BD[b, d] - quota, 0.0)
                received = max(quota - counts_BD[b, d], 0.0)
                loads_FBD[0, b, d] += sign * quota
                loads_FBD[1, b, d] += sign * (sent * near_out)
                loads_FBD[2, b, d] += sign * (received * near_in)
                loads_FBD[3, b, d] += sign * (sent - sent * near_out)
                loads_FBD[4, b, d] += sign * (received - received * near_in)


@compiled(None)
def _send(times_D: np.ndarray, sign: float, shares_D: np.ndarray, owner: int, size: int, far: float) -> float:
    """Add the times of `SendingModel.link_times`, times `sign`, and return the extra time of the expert's chain."""
    ranks = len(times_D)
    total = 0.0
    most = 0.0
    sends = 0.0
    home = owner // size
    for first in range(0, ranks, size):
        enters = -1
        place = size
        is_home = first // size == home
        last = min(first + size, ranks)
        for d in range(first, last):
            if shares_D[d] > 0 and d != owner and (d - owner) % size < place:
                enters = d
                place = (d - owner) % size
        if enters < 0:
            continue
        for d in range(first, last):
            if shares_D[d] > 0 and d != owner:
                time = far if d == enters and not is_home else 1.0
                total = total + time
                most = max(most, time)
                times_D[d] += sign * time
        sends = 1.0 if is_home or sends == 1.0 else far
    times_D[owner] += sign * sends
    return max(total - most, 0.0)


@compiled(None)
def _move(
    loads_FBD: np.ndarray,
    sent_D: np.ndarray,
    sign: float,
    counts_BD: np.ndarray,
    shares_D: np.ndarray,
    primary: int,
    owner: int,
    size: int,
    local: bool,
    far: float,
) -> float:
    """Add what an expert with these hosts makes ranks compute, exchange and send; return as `_send`."""
    _add(loads_FBD, sign, counts_BD, shares_D, _hosted_by(shares_D, primary, owner), size, local)
    return _send(sent_D, sign, shares_D, owner, size, far)


@compiled(None)
def _busiest(sent: float, received: float, one_way: float) -> float:
    """See `Level.busiest`."""
    return one_way * max(sent, received) + (1.0 - one_way) * min(sent, received)


@compiled(None)
def _shared(work_S: np.ndarray, size: int, one_way: float) -> float:
    """Return when the last rank of a node has done its work; see `Network.sharing`."""
    if one_way == 1.0:
        return work_S.max()
    done = 0.0
    before = 0.0
    at_work = len(work_S)
    for work in np.sort(work_S):
        done += (work - before) * max(at_work / size, one_way)
        before = work
        at_work -= 1
    return done


@compiled(None)
def _seconds(
    loads_FBD: np.ndarray,
    more_FBD: np.ndarray,
    work_BD: np.ndarray,
    size: int,
    price_P: np.ndarray,
    rate_D: np.ndarray,
    per_token_D: np.ndarray,
) -> tuple[float, float]:
    """Return `CostModel.work_of` the sum of two loads, and set `CostModel.rank_seconds`."""
    ranks = loads_FBD.shape[2]
    exchanging = 0.0
    computed = 0.0
    near_S = np.empty(min(size, ranks))
    for b in range(loads_FBD.shape[1]):
        longest = 0.0
        most_near = 0.0
        most_far = 0.0
        coded = 0.0
        for first in range(0, ranks, size):
            last = min(first + size, ranks)
            sent = 0.0
            received = 0.0
            for d in range(first, last):
                tokens = loads_FBD[0, b, d] + more_FBD[0, b, d]
                near_out = loads_FBD[1, b, d] + more_FBD[1, b, d]
                near_in = loads_FBD[2, b, d] + more_FBD[2, b, d]
                far_out = loads_FBD[3, b, d] + more_FBD[3, b, d]
                far_in = loads_FBD[4, b, d] + more_FBD[4, b, d]
                near = _busiest(near_out, near_in, price_P[NEAR_WAY])
                far = _busiest(far_out, far_in, price_P[FAR_WAY])
                exchanged = 4 * max(price_P[NEAR] * near, price_P[FAR] * far)
                work_BD[b, d] = exchanged + tokens * per_token_D[d]
                longest = max(longest, tokens / rate_D[d])
                near_S[d - first], most_far = near, max(most_far, far)
                coded = max(coded, near_out + far_out, near_in + far_in)
                sent = sent + far_out
                received = received + far_in
            most_near = max(most_near, _shared(near_S[: last - first], size, price_P[NEAR_WAY]))
            most_far = max(most_far, _busiest(sent, received, price_P[FAR_WAY]) / price_P[ADAPTERS])
        exchanging += max(price_P[NEAR] * most_near, price_P[FAR] * most_far) + price_P[CODING] * coded
        computed += longest
    return exchanging, computed


@compiled("void(float64[:,:,:,::1], float64[:,:,::1], int64[:,::1], int64[::1], int64, boolean)")
def add_loads(
    loads_XFBD: np.ndarray,
    counts_ABD: np.ndarray,
    shares_AD: np.ndarray,
    primary_A: np.ndarray,
    node_size: int,
    local_first: bool,
) -> None:
    """Add the loads of each expert to its own array, or to the only one."""
    for a in range(len(primary_A)):
        _add(loads_XFBD[a % len(loads_XFBD)], 1.0, counts_ABD[a], shares_AD[a], primary_A[a], node_size, local_first)


@compiled(
    f"void(float64[:,:,::1], float64[::1], float64[::1], {_LAYER}, int64[::1], int64[:,::1], int64[::1], {_PRICES})"
)
def change(
    loads_FBD: np.ndarray,
    sent_D: np.ndarray,
    extra_E: np.ndarray,
    counts_EBD: np.ndarray,
    shares_ED: np.ndarray,
    primary_E: np.ndarray,
    owner_E: np.ndarray,
    expert_A: np.ndarray,
    shares_AD: np.ndarray,
    primary_A: np.ndarray,
    node_size: int,
    local_first: bool,
    price_P: np.ndarray,
    numbers_27: np.ndarray,
    least_rounds: int,
    rate_D: np.ndarray,
    per_token_D: np.ndarray,
) -> None:
    """Give experts, each one once, other hosts, and add what that changes to `loads_FBD` and `sent_D`."""
    far = price_P[SENT_FAR]
    for a in range(len(expert_A)):
        e = expert_A[a]
        _move(
            loads_FBD, sent_D, -1.0, counts_EBD[e], shares_ED[e], primary_E[e], owner_E[e], node_size, local_first, far
        )
        primary_E[e] = primary_A[a]
        for d in range(len(sent_D)):
            shares_ED[e, d] = shares_AD[a, d]
        extra_E[e] = _move(
            loads_FBD, sent_D, 1.0, counts_EBD[e], shares_ED[e], primary_E[e], owner_E[e], node_size, local_first, far
        )


@compiled(
    f"void(float64[:,:,::1], float64[::1], float64, {_LAYER}, int64[:,::1], int64[:,:,::1], int64[:,::1], "
    f"boolean[::1], {_PRICES}, float64[:,:,::1], float64[:,::1])"
)
def try_(
    loads_FBD: np.ndarray,
    sent_D: np.ndarray,
    longest: float,
    counts_EBD: np.ndarray,
    shares_ED: np.ndarray,
    primary_E: np.ndarray,
    owner_E: np.ndarray,
    expert_KA: np.ndarray,
    shares_KAD: np.ndarray,
    primary_KA: np.ndarray,
    begins_A: np.ndarray,
    node_size: int,
    local_first: bool,
    price_P: np.ndarray,
    numbers_27: np.ndarray,
    least_rounds: int,
    rate_D: np.ndarray,
    per_token_D: np.ndarray,
    work_ABD: np.ndarray,
    found_7A: np.ndarray,
) -> None:
    """Set what `Tried` describes: seconds of each rank, exchanging, computed, and the busiest rank's time and extra.

    Args:
        expert_KA: -1 for none.
        begins_A: whether a candidate is on its own; otherwise it comes after the one before it.
    """
    far = price_P[SENT_FAR]
    more_FBD = np.zeros_like(loads_FBD)
    more_D = np.zeros_like(sent_D)
    extra = longest
    for a in range(len(begins_A)):
        if begins_A[a]:
            more_FBD = np.zeros_like(loads_FBD)
            more_D = np.zeros_like(sent_D)
            extra = longest
        for k in range(len(expert_KA)):
            e = expert_KA[k, a]
            if e < 0:
                continue
            owner = owner_E[e]
            counts_BD = counts_EBD[e]
            shares_D = shares_KAD[k, a]
            _move(more_FBD, more_D, -1.0, counts_BD, shares_ED[e], primary_E[e], owner, node_size, local_first, far)
            extra = max(
                extra,
                _move(more_FBD, more_D, 1.0, counts_BD, shares_D, primary_KA[k, a], owner, node_size, local_first, far),
            )
        found_7A[0, a], found_7A[1, a] = _seconds(
            loads_FBD, more_FBD, work_ABD[a], node_size, price_P, rate_D, per_token_D
        )
        busy = 0.0
        more = 0.0
        for d in range(len(sent_D)):
            busy = max(busy, sent_D[d] + more_D[d])
            more = more + more_D[d]
        found_7A[2, a] = busy
        found_7A[3, a] = extra
        found_7A[4, a] = more
        found_7A[5, a], found_7A[6, a] = few_batches(busy, extra, numbers_27, far, least_rounds)


@compiled(
    f"void(float64[:,:,::1], {_LAYER}, int64, int64, boolean[:,::1], {_PRICES}, float64[:,::1], float64[:,:,::1],"
    "float64[::1])"
)
def involve(
    loads_FBD: np.ndarray,
    counts_EBD: np.ndarray,
    shares_ED: np.ndarray,
    primary_E: np.ndarray,
    owner_E: np.ndarray,
    expert: int,
    rank: int,
    involved_AD: np.ndarray,
    node_size: int,
    local_first: bool,
    price_P: np.ndarray,
    numbers_27: np.ndarray,
    least_rounds: int,
    rate_D: np.ndarray,
    per_token_D: np.ndarray,
    work_BD: np.ndarray,
    work_ABD: np.ndarray,
    found_A: np.ndarray,
) -> None:
    """Add `Hosting.involved_seconds`, without Trans and Agg; candidates' seconds of `rank` are reduced in place."""
    more_FBD = np.zeros_like(loads_FBD)
    rest_BD = np.empty_like(work_BD)
    shares_D = shares_ED[expert]
    ranks = work_BD.shape[1]
    primary = _hosted_by(shares_D, primary_E[expert], owner_E[expert])
    _add(more_FBD, -1.0, counts_EBD[expert], shares_D, primary, node_size, local_first)
    _seconds(loads_FBD, more_FBD, rest_BD, node_size, price_P, rate_D, per_token_D)
    for b in range(len(work_BD)):
        mean = 0.0
        for d in range(ranks):
            mean += work_BD[b, d] / ranks
        next_ = max(rest_BD[b, rank] - mean, 0.0)
        for a in range(len(found_A)):
            work_ABD[a, b, rank] -= next_
            most = 0.0
            everyone = True
            for d in range(ranks):
                everyone &= involved_AD[a, d]
                most = max(most, work_ABD[a, b, d] if involved_AD[a, d] else 0.0)
            found_A[a] += most if everyone else max(most, mean)
