"""Plans of the policy `quota`, each made in one of several ways: compiled loops.

A plan is a table of guests [D, G]: the expert in each guest slot, and how many of its tokens the guest takes over from
the owner. A way of planning has two steps:

1. Localize experts: for the experts with most tokens on a node that does not own them, guests on this node take over
   the node's tokens, which then stay on the node.
2. Level the ranks (`planning/fit.py`), by moving tokens of owners and guests.

In shapes, G counts guest slots of a rank, P pairs of an expert and another node, and M guests.
"""

from typing import Annotated, NamedTuple

import numpy as np

from megatron_balance.cost.candidates import add_guests
from megatron_balance.cost.core import FEATURES, add_node, add_owners
from megatron_balance.device.compiled import compiled
from megatron_balance.planning.fit import Overload, fit

NOBODY = -1
"""Expert in an empty guest slot."""

ROUNDS = 2
"""Number of times that each of several microbatches is leveled, given the guests for the others."""

_Numbers = Annotated[np.ndarray, "float64[::1]"]
_Whole = Annotated[np.ndarray, "int64[::1]"]


class Way(NamedTuple):
    """A way of planning."""

    sent: int
    """Number of experts that may be sent to, or from, a rank to localize them."""
    target: float
    """Tokens of the busiest rank, over the mean, at which leveling aims."""
    order: int
    """Order of moves; see `planning/fit.py`."""
    far: int
    """See `Overload.far`; 0: the target applies to the busiest node's mean."""


class Layer(NamedTuple):
    """Numbers of a layer that all plans share."""

    counts_EBD: Annotated[np.ndarray, "float64[:,:,::1]"]
    """Tokens of each expert in each microbatch on each source rank."""
    tokens_EB: Annotated[np.ndarray, "float64[:,::1]"]
    """Sums over source ranks."""
    total_E: _Whole
    """Sums over microbatches, too."""
    owner_E: _Whole
    home_DS: Annotated[np.ndarray, "int64[:,::1]"]
    """Experts of each rank."""
    owned_FBD: Annotated[np.ndarray, "float64[:,:,::1]"]
    """`owner_loads` of all experts."""
    pair_P: _Whole
    """Pairs of an expert and a node that does not own it, whose ranks have at least as many tokens for it as those of
    an average pair: node * experts + expert - nodes * experts * tokens; ascending, so that most tokens come first."""
    slots: int
    """Number of a rank's guest slots."""


@compiled(None)
def _pairs(tokens_NE: np.ndarray) -> np.ndarray:
    """Return `Layer.pair_P`, not sorted, given tokens of nodes for experts that they do not own."""
    nodes, experts = tokens_NE.shape
    pair_P = np.empty(nodes * experts, np.int64)
    pairs = 0
    tokens = tokens_NE.sum()
    for node in range(nodes):
        for expert in range(experts):
            if tokens_NE[node, expert] * (nodes - 1) * experts >= tokens > 0:
                pair_P[pairs] = node * experts + expert - nodes * experts * tokens_NE[node, expert]
                pairs += 1
    return pair_P[:pairs]


@compiled(
    "Layer(int64[:,:,::1], int64[::1], int64[:,::1], int64, int64)",
    Layer,
)
def make_layer(counts_BDE: np.ndarray, owner_E: np.ndarray, home_DS: np.ndarray, slots: int, node_size: int) -> Layer:
    """Return the numbers of a layer; `pair_P` is not sorted."""
    microbatches, ranks, experts = counts_BDE.shape
    counts_EBD = np.empty((experts, microbatches, ranks))
    tokens_EB = np.zeros((experts, microbatches))
    total_E = np.zeros(experts, np.int64)
    tokens_NE = np.zeros(((ranks - 1) // node_size + 1, experts), np.int64)
    home_E = owner_E // node_size
    for b in range(microbatches):
        for first in range(0, ranks, node_size):
            node = first // node_size
            for expert in range(experts):
                tokens = 0
                for d in range(first, min(first + node_size, ranks)):
                    counts_EBD[expert, b, d] = counts_BDE[b, d, expert]
                    tokens += counts_BDE[b, d, expert]
                tokens_EB[expert, b] += tokens
                total_E[expert] += tokens
                tokens_NE[node, expert] += tokens if home_E[expert] != node else 0
    owned_FBD = np.zeros((FEATURES, microbatches, ranks))
    add_owners(owned_FBD, counts_EBD, tokens_EB, owner_E, node_size)
    return Layer(
        counts_EBD,
        tokens_EB,
        total_E,
        owner_E,
        home_DS,
        owned_FBD,
        _pairs(tokens_NE),
        slots,
    )


@compiled(None, inline=True)
def slot_of(guest_DG: np.ndarray, rank: int, expert: int) -> int:
    """Return the rank's slot with an expert; -1: none."""
    for slot in range(guest_DG.shape[1]):
        if guest_DG[rank, slot] == expert:
            return slot
    return -1


@compiled(None)
def _take(guest_DG: np.ndarray, taken_DG: np.ndarray, expert: int, rank: int, tokens: int) -> None:
    """Let a guest take over more tokens; negative: fewer. A guest without tokens leaves."""
    slot = slot_of(guest_DG, rank, expert)
    if slot < 0:
        slot = slot_of(guest_DG, rank, NOBODY)
        guest_DG[rank, slot] = expert
    taken_DG[rank, slot] += tokens
    if not taken_DG[rank, slot]:
        guest_DG[rank, slot] = NOBODY


@compiled(None)
def localize(guest_DG: np.ndarray, taken_DG: np.ndarray, layer: Layer, way: Way, node_size: int, far: float) -> None:
    """Fill tables with guests of the experts with most tokens on other nodes, if they may be sent. Each is on the rank
    with the fewest tokens; an expert with more tokens than an average rank is on several."""
    guest_DG[:] = NOBODY
    taken_DG[:] = 0
    if not way.sent:
        return
    most = way.sent * far
    ranks = len(guest_DG)
    nodes = (ranks - 1) // node_size + 1
    loads_D = np.zeros(ranks, np.int64)
    for expert in range(len(layer.total_E)):
        loads_D[layer.owner_E[expert]] += layer.total_E[expert]
    mean = loads_D.sum() // ranks + 1
    free_D = np.full(ranks, layer.slots)
    free_N = np.full(nodes, layer.slots * min(node_size, ranks))
    open_nodes = nodes
    times_D = np.zeros(ranks)
    is_sent_E = np.zeros(len(layer.total_E), np.bool_)
    experts = len(layer.total_E)
    for coded in layer.pair_P:
        place = coded % (nodes * experts)
        node = place // experts
        expert = place % experts
        left = (place - coded) // (nodes * experts)
        owner = layer.owner_E[expert]
        if not open_nodes:
            break
        if not free_N[node] or (not is_sent_E[expert] and times_D[owner] + far > most):
            continue
        time = far
        while left and free_N[node]:
            found = -1
            for rank in range(node * node_size, min((node + 1) * node_size, ranks)):
                can_take = free_D[rank] and times_D[rank] + time <= most and slot_of(guest_DG, rank, expert) < 0
                if can_take and (found < 0 or loads_D[rank] < loads_D[found]):
                    found = rank
            if found < 0:
                # Without time for the node's first guest of an expert, there is none for later experts
                free_N[node] = 0 if time == far else free_N[node]
                break
            tokens = min(left, mean)
            _take(guest_DG, taken_DG, expert, found, tokens)
            loads_D[found] += tokens
            loads_D[owner] -= tokens
            free_D[found] -= 1
            free_N[node] -= 1
            times_D[found] += time
            if not is_sent_E[expert]:
                is_sent_E[expert] = True
                times_D[owner] += far
            left -= tokens
            time = 1.0
        open_nodes -= not free_N[node]


@compiled(None)
def _undo(guest_DG: np.ndarray, taken_DG: np.ndarray, moved_DG: np.ndarray) -> None:
    """Return the tokens that leveling of a microbatch has moved."""
    for rank in range(len(guest_DG)):
        for slot in range(guest_DG.shape[1]):
            if moved_DG[rank, slot]:
                taken_DG[rank, slot] -= moved_DG[rank, slot]
                moved_DG[rank, slot] = 0
                if not taken_DG[rank, slot]:
                    guest_DG[rank, slot] = NOBODY


@compiled(None)
def _top_up(
    guest_DG: np.ndarray,
    taken_DG: np.ndarray,
    moved_DG: np.ndarray,
    layer: Layer,
    microbatch: int,
    left_E: np.ndarray,
    above_D: np.ndarray,
) -> None:
    """Let guests take over more of their experts' tokens from owners above their capacity, because that takes no
    slot."""
    for rank in range(len(guest_DG)):
        for slot in range(layer.slots):
            expert = guest_DG[rank, slot]
            if expert == NOBODY:
                continue
            owner = layer.owner_E[expert]
            tokens = min(above_D[owner], -above_D[rank], left_E[expert])
            if tokens > 0:
                left_E[expert] -= tokens
                above_D[owner] -= tokens
                above_D[rank] += tokens
                more = tokens * layer.total_E[expert] // np.int64(layer.tokens_EB[expert, microbatch])
                taken_DG[rank, slot] += more
                moved_DG[rank, slot] += more


@compiled(None)
def _level(
    guest_DG: np.ndarray,
    taken_DG: np.ndarray,
    moved_DG: np.ndarray,
    layer: Layer,
    way: Way,
    microbatch: int,
    rate_D: np.ndarray,
    node_size: int,
) -> None:
    """Move a microbatch's tokens until all ranks meet the target, as far as rooms and slots suffice, and add the tokens
    that guests receive to `moved_DG`. A guest takes over the same share of its expert's tokens in all microbatches. A
    guest's tokens may move too, if there is one microbatch; otherwise, they may be there for others."""
    ranks, homes = layer.home_DS.shape
    tokens_DS = np.zeros((ranks, homes + layer.slots), np.int64)
    experts_DS = np.zeros((ranks, homes + layer.slots), np.int64)
    experts_DS[:, :homes] = layer.home_DS
    left_E = np.empty(len(layer.total_E), np.int64)
    for expert in range(len(left_E)):
        left_E[expert] = layer.tokens_EB[expert, microbatch]
    loads_D = np.zeros(ranks, np.int64)
    slots_D = np.full(ranks, layer.slots)
    for rank in range(ranks):
        for slot in range(layer.slots):
            expert = guest_DG[rank, slot]
            if expert != NOBODY:
                product = taken_DG[rank, slot] * np.int64(layer.tokens_EB[expert, microbatch])
                tokens = product // layer.total_E[expert]
                tokens_DS[rank, homes + slot] = tokens if layer.tokens_EB.shape[1] == 1 else 0
                experts_DS[rank, homes + slot] = expert
                # Rounded up, so that shares in all microbatches never add up to more than the expert's tokens
                left_E[expert] -= -(-product // layer.total_E[expert])
                loads_D[rank] += tokens
                loads_D[layer.owner_E[expert]] -= tokens
                slots_D[rank] -= 1
    for rank in range(ranks):
        for slot in range(homes):
            expert = layer.home_DS[rank, slot]
            tokens_DS[rank, slot] = max(left_E[expert], 0)
            loads_D[rank] += np.int64(layer.tokens_EB[expert, microbatch])
    mean = loads_D.sum() / rate_D.sum()
    busiest = mean
    if not way.far:
        # A node keeps its tokens
        for first in range(0, ranks, node_size):
            after = min(first + node_size, ranks)
            busiest = max(busiest, loads_D[first:after].sum() / rate_D[first:after].sum())
    above_D = np.empty(ranks, np.int64)
    for rank in range(ranks):
        capacity = max(np.ceil(mean * rate_D[rank]), np.floor(way.target * busiest * rate_D[rank]))
        above_D[rank] = loads_D[rank] - np.int64(capacity)
    moves = fit(Overload(tokens_DS, experts_DS, above_D, slots_D, node_size, way.far), way.order)
    for m in range(len(moves.expert_M)):
        expert = moves.expert_M[m]
        source = moves.source_M[m]
        target = moves.target_M[m]
        owner = layer.owner_E[expert]
        tokens = moves.tokens_M[m] * layer.total_E[expert] // np.int64(layer.tokens_EB[expert, microbatch])
        above_D[source] -= moves.tokens_M[m]
        above_D[target] += moves.tokens_M[m]
        if source != owner:
            _take(guest_DG, taken_DG, expert, source, -tokens)
        else:
            left_E[expert] -= moves.tokens_M[m]
        if target != owner:
            _take(guest_DG, taken_DG, expert, target, tokens)
            moved_DG[target, slot_of(guest_DG, target, expert)] += tokens
        else:
            left_E[expert] += moves.tokens_M[m]
    _top_up(guest_DG, taken_DG, moved_DG, layer, microbatch, left_E, above_D)


class Guests(NamedTuple):
    """Guests in the order of experts, then of ranks."""

    first_E: _Whole
    """[E + 1]: index of each expert's first guest, and the end of the last expert's."""
    expert_M: _Whole
    rank_M: _Whole
    slot_M: _Whole
    share_M: _Numbers
    """Fraction of the expert's tokens."""


@compiled(None)
def guests_of(guest_DG: np.ndarray, taken_DG: np.ndarray, total_E: np.ndarray) -> Guests:
    """Return a plan's guests."""
    first_E = np.zeros(len(total_E) + 1, np.int64)
    for expert in guest_DG.flat:
        if expert != NOBODY:
            first_E[expert + 1] += 1
    guests = 0
    for expert in range(len(first_E)):
        guests += first_E[expert]
        first_E[expert] = guests
    found = Guests(
        first_E,
        np.empty(guests, np.int64),
        np.empty(guests, np.int64),
        np.empty(guests, np.int64),
        np.empty(guests, np.float64),
    )
    next_E = first_E.copy()
    for rank in range(len(guest_DG)):
        for slot in range(guest_DG.shape[1]):
            expert = guest_DG[rank, slot]
            if expert != NOBODY:
                m = next_E[expert]
                next_E[expert] += 1
                found.expert_M[m] = expert
                found.rank_M[m] = rank
                found.slot_M[m] = slot
                found.share_M[m] = taken_DG[rank, slot] / total_E[expert]
    return found


class Hosts(NamedTuple):
    """All hosts of experts that have guests, in the order of experts, then of ranks."""

    expert_N: _Whole
    host_N: _Whole
    quota_N: _Whole


@compiled(
    "Hosts(int64[:,::1], int64[:,::1], int64[::1], int64[::1])",
    Hosts,
)
def hosts_of(guest_DG: np.ndarray, taken_DG: np.ndarray, total_E: np.ndarray, owner_E: np.ndarray) -> Hosts:
    """Return the hosts of a plan's experts. Owners with tokens left are hosts, too."""
    guests = guests_of(guest_DG, taken_DG, total_E)
    most = 2 * len(guests.expert_M)
    hosts = Hosts(np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64))
    n = 0
    for expert in range(len(total_E)):
        first = guests.first_E[expert]
        after = guests.first_E[expert + 1]
        left = total_E[expert]
        for m in range(first, after):
            left -= taken_DG[guests.rank_M[m], guests.slot_M[m]]
        owner_waits = first < after and left > 0
        for m in range(first, after + 1):
            if owner_waits and (m == after or guests.rank_M[m] > owner_E[expert]):
                owner_waits = False
                hosts.expert_N[n] = expert
                hosts.host_N[n] = owner_E[expert]
                hosts.quota_N[n] = left
                n += 1
            if m < after:
                hosts.expert_N[n] = expert
                hosts.host_N[n] = guests.rank_M[m]
                hosts.quota_N[n] = taken_DG[guests.rank_M[m], guests.slot_M[m]]
                n += 1
    return Hosts(hosts.expert_N[:n], hosts.host_N[:n], hosts.quota_N[:n])


@compiled(None)
def add_some(
    added_FBD: np.ndarray, sign: float, layer: Layer, guests: Guests, first: int, after: int, size: int
) -> None:
    """Add the loads of some guests."""
    some = guests.expert_M[first:after], guests.rank_M[first:after], guests.share_M[first:after]
    add_guests(added_FBD, sign, layer.counts_EBD, layer.tokens_EB, layer.owner_E, *some, size)


@compiled(None, inline=True)
def add_hosts(
    loads_FBD: np.ndarray,
    sign: float,
    layer: Layer,
    guest_DG: np.ndarray,
    taken_DG: np.ndarray,
    left_E: np.ndarray,
    expert: int,
    ends: tuple[int, int],
    size: int,
) -> None:
    """Add, times `sign`, all loads of an expert on the nodes of two ranks, and not only what its guests change as in
    `add_guests`. `left_E`: tokens that owners compute."""
    ranks = len(guest_DG)
    is_whole = size >= ranks
    # See `add_guests`
    size = 1 if is_whole else size
    owner = layer.owner_E[expert]
    share_D = np.empty(ranks)
    for end in range(1 if ends[0] // size == ends[1] // size else 2):
        first = ends[end] // size * size
        after = min(first + size, ranks)
        for rank in range(first, after):
            slot = slot_of(guest_DG, rank, expert)
            tokens = taken_DG[rank, slot] if slot >= 0 else left_E[expert] if rank == owner else 0
            share_D[rank] = tokens / layer.total_E[expert]
        for b in range(loads_FBD.shape[1]):
            tokens_D = layer.counts_EBD[expert, b]
            add_node(loads_FBD, b, sign, tokens_D, share_D, layer.tokens_EB[expert, b], first, after, is_whole, -1)


@compiled(None)
def level_all(
    guest_DG: np.ndarray,
    taken_DG: np.ndarray,
    layer: Layer,
    way: Way,
    order_B: np.ndarray,
    rate_D: np.ndarray,
    node_size: int,
) -> None:
    """Level the ranks in all microbatches, which `order_B` has in the order of leveling."""
    moved_BDG = np.zeros((len(order_B), *guest_DG.shape), np.int64)
    for _ in range(ROUNDS if len(order_B) > 1 else 1):
        for microbatch in order_B:
            _undo(guest_DG, taken_DG, moved_BDG[microbatch])
            _level(guest_DG, taken_DG, moved_BDG[microbatch], layer, way, microbatch, rate_D, node_size)
