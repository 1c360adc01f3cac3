"""Splits of an expert's tokens among its hosts, and the hosts of each source's tokens.

Every host has a quota: the number of an expert's tokens that it computes. A split derives quotas from the load:

    local_first    Pro-Prophet's rule: a host computes its own tokens; tokens of other ranks go to the primary host
    proportional   tokens in proportion to hosts' shares; with vExperts, FlexMoE's rule (Algorithm 3, lines 2 and 3)

Tokens then fill the quotas by locality: a host's own tokens first, then tokens of its node, then the others. A node has
`node_size` consecutive ranks. All numbers of tokens are whole.

In shapes, D counts sources, W hosts, N physical experts in use, K the hosts of one expert, and G groups of consecutive
ranks. A rank is one source, or several in `tokens_of`.
"""

import functools
from typing import Annotated, Literal, NamedTuple, get_args

import numpy as np

from megatron_balance.device.compiled import compiled
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.tables import MOST_TOKENS

SplitName = Literal["local_first", "proportional"]

SPLITS: tuple[SplitName, ...] = get_args(SplitName)

_Numbers = Annotated[np.ndarray, "int64[::1]"]


class HostRules(NamedTuple):
    """Hosts of all experts and the rules for sharing tokens; see `Tables.hosting`."""

    first_E: _Numbers
    host_N: _Numbers
    share_N: _Numbers
    primary_E: _Numbers
    node_size: int
    local_first: bool

    @classmethod
    def of(cls, placement: Placement, split: str, node_size: int) -> "HostRules":
        return cls(*placement.tables.hosting, node_size, split == "local_first")


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
    rules = HostRules.of(placement, split, node_size)
    return sums_by_host(tokens_of(counts_DE, placement, rules), placement.num_ranks)


def tokens_of(counts_DE: np.ndarray, placement: Placement, rules: HostRules) -> np.ndarray:
    """Return [D, P] int64: tokens from each source to each physical expert, given the load [D, E] of sources. Each host
    has the same number of consecutive sources, which count as one; their tokens are then divided in order."""
    counts_DE = np.ascontiguousarray(counts_DE, np.int64)
    hosts = placement.num_ranks
    counts_WE = counts_DE if len(counts_DE) == hosts else counts_DE.reshape(hosts, -1, counts_DE.shape[1]).sum(1)
    tables = placement.tables
    return tokens_loop(counts_DE, counts_WE, rules, tables.physical_N, placement.slots_per_rank)


def sums_by_host(tokens: np.ndarray, hosts: int) -> np.ndarray:
    """Sum tokens over each host's physical experts: [..., P] -> [..., W]."""
    # Several times faster than a sum over a short last dimension
    slots = tokens.shape[-1] // hosts
    first, *others = (tokens[..., slot::slots] for slot in range(slots))
    return functools.reduce(np.add, others, first)


@compiled("int64[:, ::1](int64[:, ::1], int64[:, ::1], HostRules, int64[::1], int64)", HostRules)
def tokens_loop(
    counts_DE: np.ndarray, counts_WE: np.ndarray, rules: HostRules, physical_N: np.ndarray, slots: int
) -> np.ndarray:
    sources, experts = counts_DE.shape
    hosts = len(counts_WE)
    tokens_DP = np.zeros((sources, hosts * slots), dtype=np.int64)
    alone_E = np.full(experts, -1)
    group_W = np.arange(hosts)
    room = room_of(rules.first_E, hosts)
    for expert in range(experts):
        begin = rules.first_E[expert]
        end = rules.first_E[expert + 1]
        if end - begin == 1:
            alone_E[expert] = physical_N[begin]
            continue
        sent_KW = send(expert, counts_WE, counts_WE, group_W, rules, room)
        _among_sources(counts_DE, expert, sent_KW, physical_N[begin:end], tokens_DP)
    for source in range(sources):
        for expert in range(experts):
            if alone_E[expert] >= 0:
                tokens_DP[source, alone_E[expert]] = counts_DE[source, expert]
    return tokens_DP


@compiled(None)
def _among_sources(
    counts_DE: np.ndarray, expert: int, sent_KW: np.ndarray, physical_K: np.ndarray, tokens_DP: np.ndarray
) -> None:
    """Divide the tokens of each host for an expert's physical experts among the host's sources, in order."""
    hosts = sent_KW.shape[1]
    each = len(counts_DE) // hosts
    for host in range(hosts):
        source = host * each
        left = counts_DE[source, expert]
        for k in range(len(physical_K)):
            missing = sent_KW[k, host]
            while missing > 0:
                while left == 0:
                    source += 1
                    left = counts_DE[source, expert]
                step = min(left, missing)
                tokens_DP[source, physical_K[k]] += step
                left -= step
                missing -= step


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
