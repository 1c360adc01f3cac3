"""How busy the routes of all experts keep every rank's links and every node's adapters: a lower bound on Trans.

A rank sends one piece at a time, and receives one. The first piece has to pass the links ahead of it on its route
first, and the last piece has to pass the links behind it afterwards. The unit of time is a piece within a node.

M counts guests, and links, because each guest receives its expert on one.
"""

from typing import NamedTuple

import numpy as np

from megatron_balance.device.compiled import compiled


class Links(NamedTuple):
    """The links of all routes, expert by expert, each after the one that brings the expert to its source."""

    expert_M: np.ndarray
    source_M: np.ndarray
    target_M: np.ndarray
    by_M: np.ndarray
    """The link that brings the expert to the source; M and more at the owner."""
    time_M: np.ndarray
    """Time of a piece on this link."""
    before_M: np.ndarray
    """Time of a piece from the owner to the source."""
    behind_M: np.ndarray
    """Time of a piece from the target to all guests behind it."""
    alone_M2: np.ndarray
    """Pairs of `link_lines`, of the links of one rank and expert."""


def find_links(
    owner_M: np.ndarray,
    expert_M: np.ndarray,
    rank_M: np.ndarray,
    *,
    num_ranks: int,
    node_size: int,
    fanout: int = 1,
    far: float = 1.0,
) -> Links:
    """Return the route of each expert from its owner to its guests: a chain with `fanout` 1, else a tree.

    In every step each rank that has the expert sends it to a rank that does not, at most `fanout` times in all; with an
    unbounded `fanout` the ranks that have it double. Other nodes come first, and each is entered once, because links
    between nodes may be slow and all guests of a node wait for them. The last send of a rank is for its own node, until
    all guests there are served. So a chain passes through the owner's node first, then node by node; a tree reaches all
    nodes in few steps and then works inside all of them in parallel. Nodes, and the ranks of each node, follow in
    cyclic order after the owner, so that experts of different owners use different links at the same time.

    Args:
        owner_M, expert_M, rank_M: the guests in any order, at least one: the owner of the expert, the expert, the rank;
            int64.
        node_size: ranks per node.
        far: time of a piece between nodes; within a node it is 1.
    """
    away_M = (rank_M // node_size - owner_M // node_size) % -(-num_ranks // node_size)
    order_M = np.lexsort(((rank_M - owner_M) % node_size, away_M, expert_M))
    owner_M, expert_M, rank_M = (part_M[order_M] for part_M in (owner_M, expert_M, rank_M))
    target_M, by_M, time_M, before_M = _links(owner_M, expert_M, rank_M, node_size, fanout, float(far))
    behind_M, alone_M2 = _behind(by_M, time_M, before_M)
    source_M = np.append(target_M, owner_M)[by_M]
    return Links(expert_M, source_M, target_M, by_M, time_M, before_M, behind_M, alone_M2)


def link_lines(found: Links, num_ranks: int, node_size: int, adapters: float) -> tuple[np.ndarray, float]:
    """Return pairs (m, x) in any order, and the time for which the busiest rank receives.

    Experts in c pieces take m * c + x at least, along the routes that were found.

    Args:
        adapters: number of ranks of a node that can send to other nodes at their full rate at the same time.
    """
    shared = float(adapters if adapters < node_size else 0)
    ends = found.source_M, found.target_M, found.time_M, found.before_M, found.behind_M
    busy_X, extra_X = _ends(*ends, num_ranks, node_size, shared)
    pairs = np.concatenate([np.stack([busy_X, extra_X], axis=1)[busy_X > 0], found.alone_M2])
    return pairs, float(busy_X[num_ranks : 2 * num_ranks].max())


@compiled(
    "Tuple((int64[::1], int64[::1], float64[::1], float64[::1]))(" + 3 * "int64[::1], " + "int64, int64, float64)"
)
def _links(
    owner_M: np.ndarray, expert_M: np.ndarray, rank_M: np.ndarray, node_size: int, fanout: int, far: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the links of all routes, expert by expert, for guests in the order of `find_links`.

    The results are the target of each link, the link that brings the expert to its source, its time, and the time from
    the owner to its source. Owners are sources of links from nowhere, whose numbers are M and more.
    """
    guests = len(rank_M)
    nodes = max(rank_M.max(), owner_M.max()) // node_size + 1
    target_M = rank_M.copy()
    by_M = np.zeros_like(rank_M)
    time_M = np.zeros(guests)
    before_M = np.zeros(guests)
    # Links by which ranks got the expert, and the number of ranks to which they send it
    has = np.zeros(2 * guests + 1, np.int64)
    left = np.zeros(2 * guests + 1, np.int64)
    first = 0
    while first < guests:
        # Guests of a node, of which the owner's comes first, follow each other
        next_N = np.zeros(nodes, np.int64)
        end_N = np.zeros(nodes, np.int64)
        after = first
        home = owner_M[first] // node_size
        while after < guests and expert_M[after] == expert_M[first]:
            node = rank_M[after] // node_size
            if end_N[node] == 0:
                next_N[node] = after
            after += 1
            end_N[node] = after
        link = first
        entered = max(first, end_N[home])
        index = 0
        number = 1
        has[0] = guests + first
        left[0] = fanout
        while index < number:
            by = has[index]
            more = left[index] - 1
            source = home if by >= guests else target_M[by] // node_size
            node = source
            index = index + 1
            if entered < after and (more or next_N[node] == end_N[node]):
                node = rank_M[entered] // node_size
                entered = end_N[node]
            if next_N[node] < end_N[node]:
                target_M[link] = rank_M[next_N[node]]
                by_M[link] = by
                time_M[link] = 1.0 if node == source else far
                before_M[link] = 0.0 if by >= guests else before_M[by] + time_M[by]
                has[number] = link
                left[number] = fanout
                next_N[node] = next_N[node] + 1
                link = link + 1
                number = number + 1
                if more:
                    has[number], left[number], number = by, more, number + 1
        first = after
    return target_M, by_M, time_M, before_M


@compiled("Tuple((float64[::1], float64[:,::1]))(int64[::1], float64[::1], float64[::1])")
def _behind(by_M: np.ndarray, time_M: np.ndarray, before_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the time of a piece from each link's target to all guests behind it, and pairs of `link_lines`.

    The pairs [M, 2] are those of the links of one rank and expert: what has the most time behind it is sent first.
    """
    guests = len(by_M)
    behind_M = np.zeros(guests)
    pairs_M2 = np.zeros((guests, 2))
    # The first link by which an expert is sent on, and for each link the next one
    sends = np.full(2 * guests, -1)
    next_M = np.full(guests, -1)
    for index in range(2 * guests):
        holder = index if index >= guests else guests - 1 - index
        spent = 0.0
        longest = 0.0
        link = sends[holder]
        while link >= 0:
            spent += time_M[link]
            end = spent + behind_M[link]
            pairs_M2[link, 0], pairs_M2[link, 1] = spent, before_M[link] + end - spent
            longest = max(longest, end)
            link = next_M[link]
        if holder < guests:
            behind_M[holder], earlier, later = longest, -1, sends[by_M[holder]]
            while later >= 0 and (behind_M[later], time_M[later]) > (longest, time_M[holder]):
                earlier = later
                later = next_M[later]
            next_M[holder] = later
            if earlier < 0:
                sends[by_M[holder]] = holder
            else:
                next_M[earlier] = holder
    return behind_M, pairs_M2


@compiled(
    "Tuple((float64[::1], float64[::1]))(int64[::1], int64[::1], " + 3 * "float64[::1], " + "int64, int64, float64)"
)
def _ends(
    source_M: np.ndarray,
    target_M: np.ndarray,
    time_M: np.ndarray,
    before_M: np.ndarray,
    behind_M: np.ndarray,
    ranks: int,
    node_size: int,
    adapters: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return [X] how long ranks and nodes are busy, and the least time ahead of their first piece and after their last.

    X counts ranks that send, ranks that receive, nodes that send and nodes that receive; these are left out without
    adapters.
    """
    nodes = (ranks - 1) // node_size + 1
    busy_X = np.zeros(2 * (ranks + nodes))
    before_X = np.full(2 * (ranks + nodes), np.inf)
    after_X = before_X.copy()
    for link in range(len(time_M)):
        source = source_M[link]
        target = target_M[link]
        source_node = 2 * ranks + source // node_size
        target_node = 2 * ranks + target // node_size
        crosses = adapters > 0 and source_node != target_node
        for index, end in enumerate((source, ranks + target, source_node, nodes + target_node)):
            if index < 2 or crosses:
                busy_X[end] += time_M[link] if index < 2 else time_M[link] / adapters
                before_X[end] = min(before_X[end], before_M[link])
                after_X[end] = min(after_X[end], behind_M[link])
    return busy_X, before_X + after_X


LOOPS = (_links, _behind, _ends)
"""What to prepare before lines are needed."""
