"""Costs of a search's candidates: changes of experts' hosts, and the guests of whole plans. See `cost/core.py`.

In shapes, A counts candidates or plans, and M the experts that a candidate changes, or the guests of all plans.
"""

import numpy as np

from megatron_balance.cost.core import (
    CandidateCosts,
    Prices,
    add_expert,
    add_node,
    few_batches,
    hosted_by,
    move_expert,
    sum_work,
)
from megatron_balance.device.compiled import compiled

_EXPERTS = "float64[:,:,::1], int64[:,::1], int64[::1], int64[::1]"
_PRICES = "Prices[::1], float64[::1], float64[::1]"


@compiled(
    f"void(float64[:,:,::1], float64[::1], float64[::1], {_EXPERTS}, int64[::1], int64[:,::1], int64[::1], "
    "Prices[::1])",
    Prices,
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
    prices_1: np.ndarray,
) -> None:
    """Give distinct experts other hosts, and update `loads_FBD` and `sent_D`."""
    prices = prices_1[0]
    for a in range(len(expert_A)):
        e = expert_A[a]
        counts_BD = counts_EBD[e]
        shares_D = shares_ED[e]
        owner = owner_E[e]
        move_expert(loads_FBD, sent_D, -1.0, counts_BD, shares_D, primary_E[e], owner, prices)
        primary_E[e] = primary_A[a]
        shares_D[:] = shares_AD[a]
        extra_E[e] = move_expert(loads_FBD, sent_D, 1.0, counts_BD, shares_D, primary_A[a], owner, prices)


@compiled(
    f"CandidateCosts(float64[:,:,::1], float64[::1], float64, {_EXPERTS}, int64[:,::1], int64[:,:,::1], int64[:,::1], "
    f"boolean[::1], {_PRICES})",
    CandidateCosts,
    Prices,
)
def try_(
    loads_FBD: np.ndarray,
    sent_D: np.ndarray,
    longest: float,
    counts_EBD: np.ndarray,
    shares_ED: np.ndarray,
    primary_E: np.ndarray,
    owner_E: np.ndarray,
    expert_MA: np.ndarray,
    shares_MAD: np.ndarray,
    primary_MA: np.ndarray,
    begins_A: np.ndarray,
    prices_1: np.ndarray,
    rate_D: np.ndarray,
    per_token_D: np.ndarray,
) -> CandidateCosts:
    """Return the costs of candidates that change experts' hosts; the last arguments are `CostModel.prices`.

    Args:
        loads_FBD: loads before the changes.
        sent_D: link times before the changes; see `link_times`.
        longest: maximum of `link_times`' second result before the changes.
        expert_MA: -1 for none.
        begins_A: whether a candidate is independent; otherwise it is applied on top of the previous candidate.
    """
    prices = prices_1[0]
    ways = len(begins_A)
    work_ABD = np.empty((ways, *loads_FBD.shape[1:]))
    numbers = np.empty((5, ways))
    costs = CandidateCosts(work_ABD, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4])
    more_FBD = np.zeros_like(loads_FBD)
    more_D = np.zeros_like(sent_D)
    extra = longest
    for a in range(ways):
        if begins_A[a]:
            more_FBD[:] = 0.0
            more_D[:] = 0.0
            extra = longest
        for m in range(len(expert_MA)):
            e = expert_MA[m, a]
            if e < 0:
                continue
            owner = owner_E[e]
            counts_BD = counts_EBD[e]
            move_expert(more_FBD, more_D, -1.0, counts_BD, shares_ED[e], primary_E[e], owner, prices)
            passed_on = move_expert(more_FBD, more_D, 1.0, counts_BD, shares_MAD[m, a], primary_MA[m, a], owner, prices)
            extra = max(extra, passed_on)
        costs.exchanging_A[a], costs.computed_A[a] = sum_work(
            loads_FBD, more_FBD, costs.work_ABD[a], prices, rate_D, per_token_D
        )
        busy = 0.0
        more = 0.0
        for d in range(len(sent_D)):
            busy = max(busy, sent_D[d] + more_D[d])
            more += more_D[d]
        costs.more_A[a] = more
        costs.trans_A[a], costs.agg_A[a] = few_batches(busy, extra, prices.sending)
    return costs


@compiled(
    f"void(float64[:,:,::1], {_EXPERTS}, int64, int64, boolean[:,::1], {_PRICES}, float64[:,::1], float64[:,:,::1], "
    "float64[::1])",
    Prices,
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
    prices_1: np.ndarray,
    rate_D: np.ndarray,
    per_token_D: np.ndarray,
    work_BD: np.ndarray,
    work_ABD: np.ndarray,
    found_A: np.ndarray,
) -> None:
    """Add `Hosting.involved_seconds`, without Trans and Agg, to `found_A`; reduce `work_ABD` of `rank` in place."""
    prices = prices_1[0]
    more_FBD = np.zeros_like(loads_FBD)
    rest_BD = np.empty_like(work_BD)
    shares_D = shares_ED[expert]
    ranks = work_BD.shape[1]
    primary = hosted_by(shares_D, primary_E[expert], owner_E[expert])
    size = prices.links.node_size
    add_expert(more_FBD, -1.0, counts_EBD[expert], shares_D, primary, size, prices.local_first)
    sum_work(loads_FBD, more_FBD, rest_BD, prices, rate_D, per_token_D)
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


@compiled(None)
def add_guests(
    added_FBD: np.ndarray,
    sign: float,
    counts_EBD: np.ndarray,
    tokens_EB: np.ndarray,
    owner_E: np.ndarray,
    expert_M: np.ndarray,
    rank_M: np.ndarray,
    share_M: np.ndarray,
    node_size: int,
) -> None:
    """Add, times `sign`, the changes of `owner_loads` by a plan's guests, for the split `proportional`.

    Args:
        tokens_EB: sums of `counts_EBD` over source ranks.
        expert_M, rank_M: guests, ordered by expert, then by rank; each once.
        share_M: fractions of the experts' tokens that the guests take over from the owners.
    """
    ranks = added_FBD.shape[2]
    is_whole = node_size >= ranks
    # Tokens keep their routes on nodes without hosts and, if there is one node, on ranks without hosts
    size = 1 if is_whole else node_size
    share_D = np.zeros(ranks)
    first = 0
    while first < len(expert_M):
        expert = expert_M[first]
        owner = owner_E[expert]
        share_D[owner] = 1.0
        after = first
        while after < len(expert_M) and expert_M[after] == expert:
            share_D[rank_M[after]] = share_M[after]
            share_D[owner] -= share_M[after]
            after += 1
        # The owner's node and those of guests, which ascend
        for m in range(first - 1, after):
            begin = (owner if m < first else rank_M[m]) // size * size
            if m >= first and (begin == owner // size * size or (m > first and begin == rank_M[m - 1] // size * size)):
                continue
            end = min(begin + size, ranks)
            for b in range(counts_EBD.shape[1]):
                some = counts_EBD[expert, b], share_D, tokens_EB[expert, b]
                add_node(added_FBD, b, sign, *some, begin, end, is_whole, owner)
        for m in range(first, after):
            share_D[rank_M[m]] = 0.0
        share_D[owner] = 0.0
        first = after
