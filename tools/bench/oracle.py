"""The minimum modeled time of a layer over all placements of small cases, with which policies are compared.

In the shapes, W counts the ways that Trans may take, P placements, N distinct cases of them, and C numbers of pieces.
"""

import itertools
import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import Bounds, milp

from megatron_balance.cost.model import MOST_CHUNKS, CostModel, Overlap, owners
from megatron_balance.placement.placement import Placement

Term = tuple[np.ndarray, ArrayLike]
"""Indices of the variables of a linear form, and their coefficients, or one coefficient for all."""


def least_seconds(counts_DE: np.ndarray, current: Placement, cost: CostModel) -> float:
    """Return the minimum layer time over all placements and all ways to share tokens among hosts: no policy is faster.

    Owners are fixed, but need not host their experts; shares may be fractions of tokens. With links `relay`, the result
    is a lower bound: Trans and Agg take the minimum time over all routes and pieces.

    Args:
        current: defines the owners and the number of guest slots.

    Raises:
        RuntimeError: the solver found no optimum.
    """
    # Solvers need numbers near 1: tokens in units of a rank's mean, seconds in units of the layer without guests
    unit, plain = max(1.0, counts_DE.sum() / current.num_ranks), cost.layer_seconds(counts_DE, current) or 1.0
    none, one = (np.array(cost.time_of(tokens, tokens, 0.0, 0.0)) / plain for tokens in (0.0, unit))
    slope = one - none
    program = _Program()
    hosts_ED, exchanged, computed = _shares(program, counts_DE / unit, current)
    overlap, seen = cost.overlap or Overlap(0.0, 0.0, experts=False), program.variables(2)
    experts = overlap.experts / cost.microbatches
    for index, (variables, seconds) in enumerate(_sending(program, hosts_ED, current, cost)):
        # Trans and Agg overlap with a pass of the experts of a microbatch, and with the layers in between
        free = experts * none[1 + index] + overlap[index] / plain
        hiding = (computed, experts * slope[1 + index])
        program.require((seen[[index]], 1), hiding, (variables, -np.asarray(seconds) / plain), lower=-free)
    terms = (exchanged, slope[0]), (computed, slope[1] + slope[2]), (seen, 1)
    return plain * float(none.sum() + program.least(*terms))


class _Program:
    """A mixed-integer linear program that is built row by row."""

    def __init__(self) -> None:
        self._upper: list[float] = []
        self._integer: list[bool] = []
        self._rows: list[tuple[tuple[Term, ...], float, float]] = []

    def variables(self, *shape: int, upper: float = math.inf, integer: bool = False) -> np.ndarray:
        """Add variables of this shape, each at least 0, and return their indices."""
        first, count = len(self._upper), math.prod(shape)
        self._upper += [upper] * count
        self._integer += [integer] * count
        return np.arange(first, first + count).reshape(shape)

    def require(self, *terms: Term, lower: float = 0.0, upper: float = math.inf) -> None:
        """Bound the sum of the terms."""
        self._rows.append((terms, lower, upper))

    def least(self, *terms: Term) -> float:
        """Return the minimum of the sum of the terms, as the solver's bound.

        Raises:
            RuntimeError: the solver found no optimum.
        """
        rows, lower, upper = zip(*self._rows, strict=True)
        found = milp(
            self._row(terms),
            constraints=(np.stack([self._row(row) for row in rows]), lower, upper),
            integrality=np.array(self._integer),
            bounds=Bounds(0, self._upper),
            options={"mip_rel_gap": 1e-9},
        )
        if found.status != 0:
            raise RuntimeError(f"no optimum: {found.message}")
        return float(found.mip_dual_bound)

    def _row(self, terms: tuple[Term, ...]) -> np.ndarray:
        row = np.zeros(len(self._upper))
        for variables, coefficients in terms:
            row[variables] = coefficients
        return row


def _shares(program: _Program, tokens_DE: np.ndarray, current: Placement) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add the variables for hosts [E, D], exchanged tokens [1] and computed tokens [1].

    Only the number of tokens of each expert that a rank computes matters, and how many of them are its own: the others
    can be assigned in any way.
    """
    num_ranks, num_experts = tokens_DE.shape
    hosts_ED = program.variables(num_experts, num_ranks, upper=1, integer=True)
    computed_ED, local_ED = program.variables(num_experts, num_ranks), program.variables(num_experts, num_ranks)
    exchanged, computed = program.variables(1), program.variables(1)
    total_E, owner_E = tokens_DE.sum(0), owners(current)
    for expert, rank in itertools.product(range(num_experts), range(num_ranks)):
        host, share, own = hosts_ED[expert, [rank]], computed_ED[expert, [rank]], local_ED[expert, [rank]]
        program.require((host, total_E[expert]), (share, -1))
        program.require((host, tokens_DE[rank, expert]), (own, -1))
        program.require((share, 1), (own, -1))
    for expert in range(num_experts):
        program.require((computed_ED[expert], 1), lower=total_E[expert], upper=total_E[expert])
        program.require((hosts_ED[expert], 1), lower=1)
    for rank in range(num_ranks):
        program.require((hosts_ED[owner_E != rank, rank], 1), upper=current.guest_slots)
        program.require((computed, 1), (computed_ED[:, rank], -1))
        # A rank receives the tokens of others that it computes, and sends its own tokens that others compute
        program.require((exchanged, 1), (computed_ED[:, rank], -1), (local_ED[:, rank], 1))
        program.require((exchanged, 1), (local_ED[:, rank], 1), lower=tokens_DE[rank].sum())
    return hosts_ED, exchanged, computed


def _sending(program: _Program, hosts_ED: np.ndarray, current: Placement, cost: CostModel) -> tuple[Term, Term]:
    """Return the seconds of Trans and of Agg, including overlapped parts."""
    num_experts, num_ranks = hosts_ED.shape
    owned_ED = owners(current)[:, None] == np.arange(num_ranks)
    one = np.array([cost.trans_seconds(1, 1), cost.agg_seconds(1, 1)])
    if cost.links == "average":
        guests = hosts_ED[~owned_ED]
        return (guests, one[0] / num_ranks), (guests, one[1] / num_ranks)
    into = [hosts_ED[~owned_ED[:, rank], rank] for rank in range(num_ranks)]
    if cost.links == "direct":
        rounds = program.variables(1)
        out = [hosts_ED[owned_ED[:, rank]][:, np.arange(num_ranks) != rank] for rank in range(num_ranks)]
        for guests in (*into, *out):
            program.require((rounds, 1), (guests, -1))
        return (rounds, one[0]), (rounds, one[1])
    # A way has a number of experts on the busiest link, and a number of links to the last guest of an expert
    most = max(current.guest_slots, current.home_slots)
    depths = sorted({math.ceil(math.log2(ranks)) for ranks in range(2, num_ranks + 1)})
    ways_W2 = np.array([(0, 0), *itertools.product(range(1, most + 1), depths)])
    way_W = program.variables(len(ways_W2), upper=1, integer=True)
    program.require((way_W, 1), lower=1, upper=1)
    sent_E = program.variables(num_experts, upper=1)
    for expert, rank in zip(*(~owned_ED).nonzero(), strict=True):
        program.require((sent_E[[expert]], 1), (hosts_ED[expert, [rank]], -1))
    for guests in (*into, *(sent_E[owned_ED[:, rank]] for rank in range(num_ranks))):
        program.require((way_W, ways_W2[:, 0]), (guests, -1))
    for expert in range(num_experts):
        program.require((way_W, 2.0 ** ways_W2[:, 1] - 1), (hosts_ED[expert, ~owned_ED[expert]], -1))
    trans_W, agg_W = fewest_seconds(ways_W2[:, 0], ways_W2[:, 1], cost)
    return (way_W, trans_W), (way_W, agg_W)


def fewest_seconds(experts_N: np.ndarray, depth_N: np.ndarray, cost: CostModel) -> tuple[np.ndarray, np.ndarray]:
    """Return lower bounds of the seconds of Trans and of Agg over all routes and numbers of pieces, [N] each.

    Args:
        experts_N: number of whole experts that cross the busiest link.
        depth_N: rounds that a piece takes to the last of an expert's guests; by then, up to 2**depth ranks have it.
    """
    chunks_C, experts_N1 = np.arange(1, MOST_CHUNKS + 1), experts_N[:, None]
    rounds_NC = np.maximum(experts_N1 * chunks_C, chunks_C + depth_N[:, None] - 1) * (experts_N1 > 0)
    return cost.trans_seconds(rounds_NC, chunks_C).min(1), cost.agg_seconds(rounds_NC, chunks_C).min(1)


def best_seconds(counts_DE: np.ndarray, current: Placement, cost: CostModel) -> float:
    """Return the minimum layer time if owners host and the split is local_first, by trying all guests in all slots.

    With links `relay` it is a lower bound, see `least_seconds`. A rank's choice of guests moves tokens between it and
    the owners, independent of other ranks' choices, so every quantity of a placement is a sum over ranks of table rows.
    """
    assert cost.split == "local_first"
    num_ranks, slots = current.num_ranks, current.guest_slots
    owner_E = owners(current)
    owned_ED = owner_E[:, None] == np.arange(num_ranks)
    traffic_DD = cost.traffic(counts_DE, current)
    local_D = traffic_DD.diagonal()
    base = [traffic_DD.sum(0), traffic_DD.sum(0) - local_D, traffic_DD.sum(1) - local_D]
    # Tokens computed, received and sent; guests on each rank; guests of each expert. The axis of choices precedes that
    # of ranks [D] or of experts [E]
    sums = [*(part.astype(np.float64) for part in base), np.zeros(num_ranks), np.zeros(current.num_experts)]
    for rank in range(num_ranks):
        strangers = np.flatnonzero(owner_E != rank).tolist()
        options = [set_ for size in range(slots + 1) for set_ in itertools.combinations(strangers, size)]
        chosen_OE = np.zeros((len(options), current.num_experts))
        for row, option in enumerate(options):
            chosen_OE[row, list(option)] = 1
        moved_OD = chosen_OE * counts_DE[rank] @ owned_ED
        own_OD = np.zeros_like(moved_OD)
        own_OD[:, rank] = moved_OD.sum(1)
        taken_OD = np.zeros_like(moved_OD)
        taken_OD[:, rank] = chosen_OE.sum(1)
        changes = (own_OD - moved_OD, -moved_OD, -own_OD, taken_OD, chosen_OE)
        sums = [
            (part[..., None, :] + change).reshape(-1, change.shape[-1])
            for part, change in zip(sums, changes, strict=True)
        ]
    computed, received, sent = (part.max(-1) for part in sums[:3])
    trans, agg = _sending_seconds(sums[3], sums[4], owned_ED, cost)
    return float(cost.time_of(np.maximum(received, sent), computed, trans, agg).total.min())


def _sending_seconds(
    into_PD: np.ndarray, guests_PE: np.ndarray, owned_ED: np.ndarray, cost: CostModel
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds [P] of Trans and of Agg of placements, from the guests on each rank and of each expert."""
    if cost.links == "average":
        return cost.trans_seconds(into_PD.mean(-1), 1), cost.agg_seconds(into_PD.mean(-1), 1)
    if cost.links == "direct":
        rounds_P = np.maximum(into_PD.max(-1), (guests_PE @ owned_ED).max(-1))
        return cost.trans_seconds(rounds_P, 1), cost.agg_seconds(rounds_P, 1)
    started_PD = (guests_PE > 0) @ owned_ED.astype(np.float64)
    experts_P = np.maximum(into_PD.max(-1), started_PD.max(-1))
    depth_P = np.ceil(np.log2(guests_PE.max(-1) + 1))
    cases_2N, index_P = np.unique(np.stack([experts_P, depth_P]), axis=1, return_inverse=True)
    experts_N, depth_N = cases_2N
    trans_N, agg_N = fewest_seconds(experts_N, depth_N, cost)
    return trans_N[index_P.ravel()], agg_N[index_P.ravel()]
