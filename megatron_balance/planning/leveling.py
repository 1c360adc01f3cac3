"""The greedy search of Pro-Prophet's Algorithm 1; hosts share an expert's tokens by a fixed rule.

The search takes the heaviest rank's heaviest expert, and gives it the fewest guests (the paper's D - n) with which its
hosts have room for their shares. It counts only tokens. `fastest` times every step of several searches.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

import numpy as np

from megatron_balance.cost.core import COMPUTED
from megatron_balance.device.compiled import compiled
from megatron_balance.planning.hosting import Hosting

ANYWHERE, ALL_NODES, NEAR = 0, 1, 2
"""Ranks on which an expert gets guests: the lightest ones; first one on each node; only those on its owner's node."""

ROUNDING = 1e-9
"""Share of an expert below which room is rounding."""

_Numbers = Annotated[np.ndarray, "float64[::1]"]


class Copies(NamedTuple):
    """Experts that get guests, in order."""

    expert_M: Annotated[np.ndarray, "int64[::1]"]
    primary_M: Annotated[np.ndarray, "int64[::1]"]
    """The owner, or the only guest."""
    guests_MD: Annotated[np.ndarray, "boolean[:,::1]"]


class UnevenLoad(NamedTuple):
    """Initial state of a search: owners alone compute their experts."""

    rate_D: _Numbers
    """Relative speed of each rank."""
    free_D: Annotated[np.ndarray, "int64[::1]"]
    """Number of guests that each rank may take."""
    node_size: int
    experts_DS: Annotated[np.ndarray, "int64[:,::1]"]
    """Experts of each rank that may get guests, ascending by `tokens_E`."""
    tokens_E: _Numbers
    loads_D: _Numbers
    """Tokens that each rank computes."""
    tokens_ED: Annotated[np.ndarray, "float64[:,::1]"]
    """Tokens from each source rank: a guest computes its own tokens, as under `local_first`. No rows: equal shares."""


@compiled(None)
def _heaviest(room_D: np.ndarray, rate_D: np.ndarray) -> int:
    """Return the rank that takes longest for the tokens beyond its limit."""
    heaviest = 0
    least = room_D[0] / rate_D[0]
    for rank in range(1, len(room_D)):
        room = room_D[rank] / rate_D[rank]
        if room < least:
            heaviest = rank
            least = room
    return heaviest


@compiled(None)
def _able(room_D: np.ndarray, free_D: np.ndarray, owner: int, node_size: int, reach: int) -> tuple[np.ndarray, int]:
    """Return the ranks that may take an expert, in order, and the minimum number of guests."""
    ranks = len(room_D)
    home = owner // node_size
    able = 0
    able_R = np.empty(ranks, np.int64)
    for d in range(ranks):
        # The owner's room is negative
        if room_D[d] > 0 and free_D[d] > 0 and (reach != NEAR or d // node_size == home):
            able_R[able] = d
            able += 1
    able_R = able_R[:able]
    able_R = able_R[np.argsort(-room_D[able_R], kind="mergesort")]
    if reach != ALL_NODES:
        return able_R, 1
    is_seen_N = np.zeros(ranks // node_size + 1, np.bool_)
    is_seen_N[home] = True
    is_later_R = np.ones(able, np.int64)
    for r in range(able):
        node = able_R[r] // node_size
        if not is_seen_N[node]:
            is_seen_N[node] = True
            is_later_R[r] = 0
    order_R = np.argsort(is_later_R, kind="mergesort")
    return able_R[order_R], max(1, able - is_later_R.sum())


@compiled(None)
def _even(able_R: np.ndarray, least: int, room_D: np.ndarray, size: float, kept: float, given_R: np.ndarray) -> int:
    """Choose the fewest guests with room for equal shares, or else those with the smallest excess; return their number.
    The owner may keep `kept` tokens. Set `given_R` to the tokens that each guest computes."""
    most = kept - size
    number = 0
    smallest = kept
    for index in range(len(able_R)):
        smallest = min(smallest, room_D[able_R[index]])
        if smallest <= most:
            break
        slack = smallest - size / (index + 2)
        if index + 1 >= least and slack > most:
            most = slack
            number = index + 1
            if slack >= -ROUNDING * size:
                break
    for index in range(number):
        given_R[index] = size / (number + 1)
    return number


@compiled(None)
def _local(
    able_R: np.ndarray,
    least: int,
    room_D: np.ndarray,
    owner: int,
    size: float,
    kept: float,
    tokens_D: np.ndarray,
    given_R: np.ndarray,
) -> int:
    """Choose the fewest guests that compute their own tokens, or one guest that computes all but the owner's tokens. In
    the first case, the guests are the ranks with most of the expert's tokens; put them first in `able_R` and return
    their number. In the second case, put the guest first in `able_R` and return -1."""
    left = size
    number = 0
    lightest = -1
    order_R = able_R[np.argsort(-tokens_D[able_R], kind="mergesort")]
    for d in able_R:
        if lightest < 0 or room_D[d] > room_D[lightest]:
            lightest = d
    for d in order_R:
        if left <= kept + ROUNDING * size and number >= least:
            break
        if 0 < tokens_D[d] <= room_D[d]:
            able_R[number] = d
            given_R[number] = tokens_D[d]
            left = left - tokens_D[d]
            number = number + 1
    others = size - tokens_D[owner]
    if (
        lightest >= 0
        and left > kept + ROUNDING * size
        and max(others - room_D[lightest], size - others - kept) < left - kept
    ):
        able_R[0] = lightest
        given_R[0] = others
        return -1
    return number


@compiled("Copies(UnevenLoad, float64, int64)", Copies, UnevenLoad)
def level(load: UnevenLoad, busiest: float, reach: int) -> Copies:
    """Return copies in order, until no rank is above its limit, or the ranks above it have no other experts. `busiest`
    is the number of tokens that a rank of rate 1 may compute."""
    rate_D = load.rate_D
    ranks = len(rate_D)
    experts = len(load.tokens_E)
    moves = 0
    free_D = load.free_D.copy()
    room_D = busiest * rate_D - load.loads_D
    left_D = np.full(ranks, load.experts_DS.shape[1])
    expert_M = np.empty(experts, np.int64)
    primary_M = np.empty(experts, np.int64)
    guests_MD = np.zeros((experts, ranks), np.bool_)
    given_R = np.empty(ranks)
    while True:
        owner = _heaviest(room_D, rate_D)
        excess = room_D[owner] / rate_D[owner]
        if excess >= 0 or left_D[owner] == 0:
            break
        left_D[owner] -= 1
        expert = load.experts_DS[owner, left_D[owner]]
        size = float(load.tokens_E[expert])
        if size <= 0:
            # The rank stays the heaviest
            break
        kept = size + room_D[owner]
        primary = owner
        if kept * ranks < size:
            # The owner's other experts alone exceed the limit, so reduce all its experts in proportion
            kept = size * busiest / (busiest - excess)
        able_R, least = _able(room_D, free_D, owner, load.node_size, reach)
        if len(load.tokens_ED):
            number = _local(able_R, least, room_D, owner, size, kept, load.tokens_ED[expert], given_R)
            if number < 0:
                number = 1
                primary = able_R[0]
        else:
            number = _even(able_R, least, room_D, size, kept, given_R)
        total = 0.0
        for index in range(number):
            rank = able_R[index]
            free_D[rank] -= 1
            room_D[rank] -= given_R[index]
            total += given_R[index]
            guests_MD[moves, rank] = True
        room_D[owner] += total
        if number:
            expert_M[moves] = expert
            primary_M[moves] = primary
            moves += 1
    return Copies(expert_M[:moves], primary_M[:moves], guests_MD[:moves])


def leveled(alone: Hosting, free_D: np.ndarray, targets: Sequence[float], *, even: bool = False) -> Iterator[Copies]:
    """Yield the copies of searches that aim at more or less even loads, with guests on one node or on several.

    Args:
        free_D: number of guests that each rank may take.
        targets: target loads of the heaviest rank, over the mean.
        even: whether hosts share tokens evenly, whatever the split.
    """
    layer = alone.layer
    cost = layer.cost
    local = cost.split == "local_first" and not even
    home_DS = np.sort(np.array(layer.placement.home))
    for counts_ED in _totals(alone):
        tokens_E = counts_ED.sum(1)
        load = UnevenLoad(
            rate_D=cost.rate_D,
            free_D=free_D,
            node_size=cost.network.node_size,
            experts_DS=np.take_along_axis(home_DS, np.argsort(tokens_E[home_DS], kind="stable"), 1),
            tokens_E=tokens_E,
            loads_D=tokens_E[np.array(layer.placement.home)].sum(1),
            tokens_ED=counts_ED if local else counts_ED[:0],
        )
        heaviest = float((load.loads_D / cost.rate_D).max())
        for reach in (ANYWHERE, ALL_NODES, NEAR) if cost.network.has_both_levels else (ANYWHERE,):
            for busiest in (target * layer.mean for target in targets):
                if busiest < heaviest:
                    yield level(load, busiest, reach)


def _totals(alone: Hosting) -> Iterator[np.ndarray]:
    """Yield loads [E, D] that represent all microbatches: their sum, and each owner's heaviest one, scaled."""
    counts_EBD = alone.layer.counts_EBD
    yield counts_EBD.sum(1)
    if counts_EBD.shape[1] > 1:
        tokens_B = counts_EBD.sum((0, 2))
        scale_B = tokens_B.sum() / np.maximum(tokens_B, 1)
        heaviest_D = (alone.loads_FBD[COMPUTED] * scale_B[:, None]).argmax(0)
        heaviest_E = heaviest_D[alone.layer.owner_E]
        yield counts_EBD[np.arange(len(heaviest_E)), heaviest_E] * scale_B[heaviest_E][:, None]


def fastest(alone: Hosting, searches: Iterable[Copies], min_gain: float, number: int) -> list[Hosting]:
    """Return at most `number` hostings that different searches pass through, the fastest first. Further copies must
    save the share `min_gain` of the seconds."""
    searches = [search for search in searches if len(search.expert_M)]
    if not searches:
        return []
    expert_A, primary_A, guests_AD = (np.concatenate(parts) for parts in zip(*searches, strict=True))
    shares_AD = (guests_AD | alone.layer.owned_ED[expert_A]).astype(np.int64)
    stops = np.cumsum([len(search.expert_M) for search in searches])
    begins_A = np.zeros(len(expert_A), dtype=bool)
    begins_A[[0, *stops[:-1]]] = True
    seconds_A = alone.layer.seconds(alone.under(expert_A[None], shares_AD[None], primary_A[None], begins_A))
    found: dict[float, slice] = {}
    for first, stop in zip([0, *stops[:-1].tolist()], stops.tolist(), strict=True):
        own_A = seconds_A[first:stop]
        kept = int((own_A <= own_A.min() * (1 + min_gain)).argmax())
        found.setdefault(float(own_A[kept]), slice(first, first + kept + 1))
    best = (found[seconds] for seconds in sorted(found)[:number])
    return [alone.changed(expert_A[part], shares_AD[part], primary_A[part]) for part in best]
