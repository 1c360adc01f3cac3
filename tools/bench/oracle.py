"""The minimum modeled time of a layer over all placements of small cases, with which policies are compared.

It is the optimum of a mixed-integer program. Messages within nodes, messages between nodes and the adapters of nodes
are resources of their own, so a plan that ignores nodes is told apart from one that does not.

In the shapes, B counts microbatches and N nodes.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import Bounds, milp
from scipy.sparse import csr_array

from megatron_balance.cost.loads import by_microbatch
from megatron_balance.cost.model import CostModel, Overlap, owners
from megatron_balance.placement.placement import Placement

Term = tuple[np.ndarray, ArrayLike]
"""Indices of the variables of a linear form, and their coefficients, or one coefficient for all."""

MOST_NODES = 2_000
"""Maximum number of nodes of the solver's search tree; then the bound that it has proven counts."""


def least_seconds(counts: np.ndarray, current: Placement, cost: CostModel, *, copies: bool = False) -> float:
    """Return a lower bound of the layer time over all placements and all ways to share tokens among hosts.

    Owners are fixed, but need not host their experts; shares may be fractions of tokens. Exchanges and computation are
    exact. Trans and Agg are bounded from below, each for itself: the bound counts

    - the experts that a rank receives: between nodes, an expert enters each node once, in parts at any of its guests;
    - the experts with guests that an owner sends once, in parts within its node and to others;
    - the experts that enter a node, and those that leave their owner's node, on shared adapters;
    - one launch.

    So it is the minimum if there is one node, no expert has several guests, and the split can share tokens in the best
    way. It leaves out the messages that relays send, and all batches after the first one.

    Args:
        counts: tokens [D, E] or [B, D, E].
        current: defines the owners and the number of guest slots.
        cost: exchanges tokens in one chunk and without a codec.
        copies: only placements whose owners host their experts, with the split `local_first`.

    Raises:
        RuntimeError: the solver failed.
    """
    assert cost.degrees == (1,) and not cost.coding
    counts_BDE = by_microbatch(counts)
    # Solvers need numbers near 1: tokens in units of a rank's mean, seconds in units of the layer without guests
    unit = max(1.0, counts_BDE.sum() / current.num_ranks)
    plain = cost.layer_seconds(counts, current) or 1.0
    none, one = (np.array(cost.time_of(0.0, tokens, 0.0, 0.0)) / plain for tokens in (0.0, unit))
    slope = one - none
    program = _Program()
    hosts_ED = program.variables(current.num_experts, current.num_ranks, upper=1, integer=True)
    _slots(program, hosts_ED, current, copies=copies)
    exchanged_B = program.variables(len(counts_BDE))
    computed_B = program.variables(len(counts_BDE))
    for counts_DE, exchanged, computed in zip(counts_BDE, exchanged_B, computed_B, strict=True):
        shares = _Shares.of(program, hosts_ED, counts_DE / unit, current, cost, copies=copies)
        for rank, rate in enumerate(cost.rate_D):
            program.require(
                (computed[None], rate), *((part_ED[:, rank], -1) for part_ED in shares.computed if part_ED.size)
            )
        shares.exchange(program, exchanged[None], cost, unit * cost.token_bytes / plain)
    overlap = cost.overlap or Overlap(0.0, 0.0, experts=False)
    seen = program.variables(2)
    experts = overlap.experts / cost.microbatches
    for index, (variables, seconds) in enumerate(_sending(program, hosts_ED, current, cost)):
        # Trans and Agg overlap with a pass of the experts of a microbatch, and with the layers in between
        free = experts * none[1 + index] + overlap[index] / plain
        hiding = (computed_B, experts * slope[1 + index])
        program.require((seen[[index]], 1), hiding, (variables, -np.asarray(seconds) / plain), lower=-free)
    terms = (exchanged_B, 4), (computed_B, slope[1] + slope[2]), (seen, 1)
    return plain * float(none.sum() + program.least(*terms))


class _Program:
    """A mixed-integer linear program that is built row by row."""

    def __init__(self) -> None:
        self._upper: list[float] = []
        self._integer: list[bool] = []
        self._rows: list[tuple[tuple[Term, ...], float, float]] = []

    def variables(self, *shape: int, upper: float = math.inf, integer: bool = False) -> np.ndarray:
        """Add variables of this shape, each at least 0, and return their indices."""
        first = len(self._upper)
        count = math.prod(shape)
        self._upper += [upper] * count
        self._integer += [integer] * count
        return np.arange(first, first + count).reshape(shape)

    def require(self, *terms: Term, lower: float = 0.0, upper: float = math.inf) -> None:
        """Bound the sum of the terms; a variable may be in several of them."""
        self._rows.append((terms, lower, upper))

    def least(self, *terms: Term) -> float:
        """Return the minimum of the sum of the terms, as the solver's bound.

        Raises:
            RuntimeError: the solver failed.
        """
        rows, lower, upper = zip(*self._rows, strict=True)
        found = milp(
            self._matrix([terms]).toarray()[0],
            constraints=(self._matrix(rows), lower, upper),
            integrality=np.array(self._integer),
            bounds=Bounds(np.zeros(len(self._upper)), np.array(self._upper)),
            options={"mip_rel_gap": 1e-6, "node_limit": MOST_NODES},
        )
        if found.mip_dual_bound is None or not np.isfinite(found.mip_dual_bound):
            raise RuntimeError(f"no bound: {found.message}")
        return float(found.mip_dual_bound)

    def _matrix(self, rows: "list[tuple[Term, ...]] | tuple[tuple[Term, ...], ...]") -> csr_array:
        cells = [
            (index, np.ravel(variables), np.broadcast_to(coefficients, np.shape(variables)).ravel())
            for index, terms in enumerate(rows)
            for variables, coefficients in terms
        ]
        row = np.concatenate([np.full(variables.size, index) for index, variables, _ in cells])
        column, value = (np.concatenate([cell[part] for cell in cells]) for part in (1, 2))
        return csr_array((value, (row, column)), shape=(len(rows), len(self._upper)))


def _slots(program: _Program, hosts_ED: np.ndarray, current: Placement, *, copies: bool) -> None:
    owner_E = owners(current)
    for expert, owner in enumerate(owner_E):
        program.require((hosts_ED[expert, [owner]] if copies else hosts_ED[expert], 1), lower=1)
    for rank in range(current.num_ranks):
        program.require((hosts_ED[owner_E != rank, rank], 1), upper=current.guest_slots)


class _Shares(NamedTuple):
    """Variables for the tokens of each expert that ranks compute, send and receive in one microbatch.

    Tokens of an expert are alike, so only their numbers matter: they can be assigned in any way.
    """

    tokens_DE: np.ndarray
    nodes: list[np.ndarray]
    """The ranks of each node."""
    local_ED: np.ndarray
    """Own tokens that a rank computes."""
    near_ED: np.ndarray
    """Tokens of other ranks of the node that a rank computes."""
    far_ED: np.ndarray
    """Tokens of other nodes that a rank computes; no variables if there is one node."""
    sent_ED: np.ndarray
    """Own tokens that a rank sends to other nodes; no variables if there is one node."""

    @classmethod
    def of(
        cls,
        program: _Program,
        hosts_ED: np.ndarray,
        tokens_DE: np.ndarray,
        current: Placement,
        cost: CostModel,
        *,
        copies: bool,
    ) -> "_Shares":
        """Add the variables and the rules for one microbatch."""
        num_experts, num_ranks = hosts_ED.shape
        nodes = np.split(np.arange(num_ranks), cost.network.first_N[1:])
        local_ED, near_ED = (program.variables(num_experts, num_ranks) for _ in range(2))
        far = (num_experts, num_ranks) if len(nodes) > 1 else (num_experts, 0)
        shares = cls(tokens_DE, nodes, local_ED, near_ED, program.variables(*far), program.variables(*far))
        total_E = tokens_DE.sum(0)
        for expert, rank in np.ndindex(hosts_ED.shape):
            host = hosts_ED[expert, [rank]]
            cell = (expert, slice(rank, rank + 1))
            own = shares.local_ED[cell]
            received = (shares.near_ED[cell], shares.far_ED[cell])
            program.require((host, tokens_DE[rank, expert]), (own, -1))
            program.require((host, total_E[expert]), (own, -1), *((part, -1) for part in received))
            program.require((own, 1), (shares.sent_ED[cell], 1), upper=tokens_DE[rank, expert])
            if copies:
                # A host computes its own tokens, and owners those of ranks that are no hosts
                program.require((host, tokens_DE[rank, expert]), (own, -1), upper=0)
                for part in received if current.owner(expert) != rank else ():
                    program.require((part, 1), upper=0)
        for expert in range(num_experts):
            shares._conserve(program, expert)
        return shares

    def _conserve(self, program: _Program, expert: int) -> None:
        """Require that tokens within a node, and between nodes, arrive where other ranks compute them."""
        sent = (self.sent_ED[expert], 1)
        received = (self.far_ED[expert], 1)
        for ranks in self.nodes:
            tokens = self.tokens_DE[ranks, expert].sum()
            inside = [(part_ED[expert, ranks], 1) for part_ED in (self.local_ED, self.near_ED)]
            if len(self.nodes) == 1:
                program.require(*inside, lower=tokens, upper=tokens)
                continue
            leaving, entering = ((part_ED[expert, ranks], 1) for part_ED in (self.sent_ED, self.far_ED))
            program.require(*inside, leaving, lower=tokens, upper=tokens)
            # What a node sends, other nodes receive
            program.require(sent, (leaving[0], -1), (entering[0], -1))
        if len(self.nodes) > 1:
            program.require(sent, (received[0], -1), upper=0)

    @property
    def computed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Variables whose sum over experts is what a rank computes."""
        return self.local_ED, self.near_ED, self.far_ED

    def exchange(self, program: _Program, exchanged: np.ndarray, cost: CostModel, byte: float) -> None:
        """Require that `exchanged` is no less than the time of any link or adapter.

        Args:
            byte: the factor from tokens and seconds per byte to the unit of `exchanged`.
        """
        network = cost.network
        byte = byte * cost.exchange.scale
        near = network.near.beta * byte
        far = network.far.beta * byte
        for rank, tokens_E in enumerate(self.tokens_DE):
            program.require((exchanged, 1), (self.near_ED[:, rank], -near))
            kept = [(self.local_ED[:, rank], near)]
            if len(self.nodes) > 1:
                kept.append((self.sent_ED[:, rank], near))
                for part_ED in (self.far_ED, self.sent_ED):
                    program.require((exchanged, 1), (part_ED[:, rank], -far))
            program.require((exchanged, 1), *kept, lower=near * tokens_E.sum())
        if len(self.nodes) > 1:
            for ranks, part_ED in itertools.product(self.nodes, (self.far_ED, self.sent_ED)):
                program.require((exchanged, 1), (part_ED[:, ranks], -far / network.adapters))


def _sending(program: _Program, hosts_ED: np.ndarray, current: Placement, cost: CostModel) -> tuple[Term, Term]:
    """Return the seconds of Trans and of Agg, including overlapped parts."""
    network = cost.network
    owner_E = owners(current)
    node_E = network.node_D[owner_E]
    nodes = np.split(np.arange(current.num_ranks), network.first_N[1:])
    used = program.variables(1, upper=1, integer=True)
    enters_EN = program.variables(current.num_experts, len(nodes))
    entry_ED = program.variables(*hosts_ED.shape)
    """Parts of experts that enter a node at a rank."""
    for expert, node in np.ndindex(enters_EN.shape):
        guests = hosts_ED[expert, nodes[node][nodes[node] != owner_E[expert]]]
        is_home = node == node_E[expert]
        for guest in guests:
            program.require((enters_EN[expert, [node]], 1), (guest[None], -1))
            program.require((used, 1), (guest[None], -1))
        program.require((guests, 1), (enters_EN[expert, [node]], -1))
        program.require((entry_ED[expert, nodes[node]], 1), (enters_EN[expert, [node]], -float(not is_home)))
        for rank in nodes[node]:
            program.require((hosts_ED[expert, [rank]], 1), (entry_ED[expert, [rank]], -1))
    near_E, far_E = _first_sends(program, enters_EN, node_E)
    terms = []
    for launch, near, far in cost.transport.at_least():
        # The unit of `busy` is the time of an expert within a node, or between nodes if that is free
        unit = near or far or 1.0
        busy = program.variables(1)
        inside = near / unit
        over = far / unit
        for rank, node in enumerate(network.node_D):
            entry = entry_ED[node_E != node, rank]
            program.require((busy, 1), (hosts_ED[owner_E != rank, rank], -inside), (entry, inside))
            program.require((busy, 1), (entry, -over))
            program.require((busy, 1), (near_E[owner_E == rank], -inside))
            program.require((busy, 1), (far_E[owner_E == rank], -over))
        for node in range(len(nodes)):
            program.require((busy, 1), (enters_EN[node_E != node, node], -over / network.adapters))
            program.require((busy, 1), (far_E[node_E == node], -over / network.adapters))
        terms.append((np.concatenate([used, busy]), np.array([launch, unit])))
    return terms[0], terms[1]


def _first_sends(program: _Program, enters_EN: np.ndarray, node_E: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts of each expert that its owner sends at least once: within its node, and to other nodes."""
    near_E = program.variables(len(enters_EN))
    far_E = program.variables(len(enters_EN))
    for expert, (enters_N, home) in enumerate(zip(enters_EN, node_E, strict=True)):
        others_N = np.delete(enters_N, home)
        program.require((enters_N[[home]], 1), (near_E[[expert]], -1))
        program.require((others_N, 1), (far_E[[expert]], -1))
        for enters in enters_N:
            program.require((near_E[[expert]], 1), (far_E[[expert]], 1), (enters[None], -1))
    return near_E, far_E
