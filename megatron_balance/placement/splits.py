"""Splits of an expert's tokens among its hosts, and the hosts of each source's tokens.

Every host has a quota: the number of an expert's tokens that it computes. A split derives quotas from the load:

    local_first    Pro-Prophet's rule: a host computes its own tokens; tokens of other ranks go to the primary host
    proportional   tokens in proportion to hosts' shares; with vExperts, FlexMoE's rule (Algorithm 3, lines 2 and 3)

Tokens then fill the quotas by locality: a host's own tokens first, then tokens of its node, then the others. A node has
`node_size` consecutive ranks. All numbers of tokens are whole.

In shapes, D counts ranks, N physical experts in use, K the hosts of one expert, and G groups of consecutive ranks.
"""

from typing import Annotated, NamedTuple

import numpy as np

from megatron_balance.device.compiled import compiled
from megatron_balance.placement.placement import MOST_TOKENS, Placement

SPLITS = ("local_first", "proportional")


_Numbers = Annotated[np.ndarray, "int64[::1]"]


class HostRules(NamedTuple):
    """Hosts of all experts and the rules for sharing tokens; see `Tables.hosting`."""

    first_E: _Numbers
    host_N: _Numbers
    share_N: _Numbers
    primary_E: _Numbers
    node_size: int
    local_first: bool


class SendRoom(NamedTuple):
    """Work arrays of `send`, large enough for any expert."""

    sent_KG: np.ndarray
    out_G: np.ndarray
    """Tokens that each group still has to send."""
    in_K: np.ndarray
    """Tokens that each host still has to receive."""
    remainder_K: np.ndarray


def traffic_of(split: str, counts_DE: np.ndarray, placement: Placement, node_size: int) -> np.ndarray:
    """Return [D, D] int64: tokens from each source rank to each computing rank; local tokens are on the diagonal."""
    rules = HostRules(*placement.tables.hosting, node_size, split == "local_first")
    return _traffic(np.ascontiguousarray(counts_DE, np.int64), rules)


@compiled("int64[:,::1](int64[:,::1], HostRules)", HostRules)
def _traffic(counts_DE: np.ndarray, rules: HostRules) -> np.ndarray:
    ranks, experts = counts_DE.shape
    rank_D = np.arange(ranks)
    room = room_of(rules.first_E, ranks)
    # Indexed by target first, so that the tokens to one host are consecutive in memory
    traffic_DD = np.zeros((ranks, ranks), np.int64)
    for expert in range(experts):
        sent_KD = send(expert, counts_DE, counts_DE, rank_D, rules, room)
        for k in range(len(sent_KD)):
            traffic_DD[rules.host_N[rules.first_E[expert] + k]] += sent_KD[k]
    return traffic_DD.T.copy()


@compiled(None)
def room_of(first_E: np.ndarray, groups: int) -> SendRoom:
    """Return work arrays of `send` for `groups` groups."""
    most = np.diff(first_E).max()
    return SendRoom(
        np.empty((most, groups), np.int64),
        np.empty(groups, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
    )


@compiled(None)
def send(
    expert: int,
    counts_DE: np.ndarray,
    sums_GE: np.ndarray,
    group_D: np.ndarray,
    rules: HostRules,
    room: SendRoom,
) -> np.ndarray:
    """Return [K, G]: tokens of an expert that each group of ranks sends to each of its hosts.

    Tokens that stay on a node are divided among its ranks in proportion to the tokens that they send or receive. A
    rank's tokens depend on other ranks only through sums, so results for a group of one rank equal the ungrouped
    results.

    Args:
        counts_DE: the load, with one source per host.
        sums_GE: the load of groups of consecutive ranks, each on one node.
        group_D: the group of each rank.
        room: `room_of` these groups; the result is a view of it.
    """
    begin = rules.first_E[expert]
    end = rules.first_E[expert + 1]
    hosts = end - begin
    host_K = rules.host_N[begin:end]
    node_size = rules.node_size
    out_G = room.out_G
    in_K = room.in_K
    sent_KG = room.sent_KG[:hosts]
    sent_KG[:] = 0
    total = 0
    for group in range(len(out_G)):
        out_G[group] = sums_GE[group, expert]
        total += out_G[group]
    _share(expert, total, counts_DE, rules, in_K, room.remainder_K)
    for k in range(hosts):
        rank = host_K[k]
        local = min(counts_DE[rank, expert], in_K[k])
        sent_KG[k, group_D[rank]] += local
        out_G[group_D[rank]] -= local
        in_K[k] -= local
    first = 0
    while first < hosts:
        node: int = host_K[first] // node_size
        after = first + 1
        while after < hosts and host_K[after] // node_size == node:
            after += 1
        until = min((node + 1) * node_size, len(group_D))
        _send_within(group_D[node * node_size], group_D[until - 1] + 1, first, after, out_G, in_K, sent_KG)
        first = after
    _send_within(0, len(out_G), 0, hosts, out_G, in_K, sent_KG)
    return sent_KG


@compiled(None)
def _send_within(
    first_group: int,
    after_group: int,
    first: int,
    after: int,
    out_G: np.ndarray,
    in_K: np.ndarray,
    sent_KG: np.ndarray,
) -> None:
    """Send as many tokens as possible from some groups to some hosts, matched in order along one line of tokens."""
    received = in_K[first:after].sum()
    if received == 0:
        return
    sent = out_G[first_group:after_group].sum()
    part = min(sent, received)
    if part == 0:
        return
    at = 0
    received_until = 0
    group = first_group - 1
    sent_until = 0
    group_end = 0
    for k in range(first, after):
        # Divisions dominate the time; skip them where `part` is the whole sum
        received_until += in_K[k]
        until = received_until if part == received else received_until * part // received
        while at < until:
            while group_end == at:
                group += 1
                sent_until += out_G[group]
                group_end = sent_until if part == sent else sent_until * part // sent
            step = min(group_end, until) - at
            sent_KG[k, group] += step
            out_G[group] -= step
            in_K[k] -= step
            at += step


@compiled(None)
def _share(
    expert: int,
    total: int,
    counts_DE: np.ndarray,
    rules: HostRules,
    computed_K: np.ndarray,
    remainder_K: np.ndarray,
) -> None:
    """Set how many of an expert's `total` tokens each of its hosts computes. `proportional` rounds up the largest
    remainders; ties go to the first host."""
    assert total <= MOST_TOKENS, "a product of two counts fits an int64"
    begin = rules.first_E[expert]
    end = rules.first_E[expert + 1]
    host_K = rules.host_N[begin:end]
    share_K = rules.share_N[begin:end]
    missing = total
    hosts = range(end - begin)
    shares = max(share_K.sum(), 1)
    for k in hosts:
        computed_K[k] = 0
        if not rules.local_first:
            product = total * share_K[k]
            computed_K[k] = product // shares
            remainder_K[k] = product - computed_K[k] * shares
        elif share_K[k]:
            computed_K[k] = counts_DE[host_K[k], expert]
        missing -= computed_K[k]
    if rules.local_first:
        for k in hosts:
            if host_K[k] == rules.primary_E[expert]:
                computed_K[k] += missing
        return
    for _ in range(missing):
        most = 0
        for k in hosts:
            if remainder_K[k] > remainder_K[most]:
                most = k
        computed_K[most] += 1
        remainder_K[most] = -1
