"""Plans of messages for Trans and Agg: which rank sends which piece of which expert to which rank, in rounds.

A *hop* is a message of one part of an expert. In stage 0 the owner sends; in later stages guests pass on what they
have. So no owner sends an expert more than once, except directly:

    direct      the owner sends the whole expert to every guest
    exchanged   the owner sends a different part to every guest; guests exchange their parts
    by node     the same, but a part enters each node once: at a guest that sends it on within its node

So `direct` takes one batch of messages, `exchanged` two and `by node` three, whatever the number of guests. Sent in
several pieces, one piece overlaps with the next stage of the piece before it.

In shapes, X counts pairs of guests of one expert, or messages.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megatron_balance.placement.placement import Placement

ROUTES = ("direct", "exchanged", "by node")


class ExpertPiece(NamedTuple):
    """A message: a piece of one expert's weights, from a rank that holds it to a guest slot of another."""

    expert: int
    source: int
    target: int
    piece: int
    """0 .. pieces - 1."""
    pieces: int = 1
    """Number of pieces that the expert is sent in, the same in all of its messages."""


@dataclass(frozen=True, eq=False)
class TransPlan:
    """The messages that bring experts from their owners to guest slots, piece by piece, in rounds of one batch each.

    A source is the expert's owner or a guest that received the piece in an earlier round. Every piece reaches every
    occupied guest slot once. Trans runs the rounds forward. Agg runs them backward: the target sends gradients to the
    source, which adds what it receives to its own, so a guest passes on the sum of its subtree.
    """

    expert_M: np.ndarray
    source_M: np.ndarray
    target_M: np.ndarray
    piece_M: np.ndarray
    pieces_M: np.ndarray
    """The fields of all messages, int64, round after round."""
    round_M: np.ndarray
    """The round of each message, ascending; no round is empty."""

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """All arrays."""
        return self.expert_M, self.source_M, self.target_M, self.piece_M, self.pieces_M, self.round_M

    @classmethod
    def of(cls, rounds: Iterable[Iterable[ExpertPiece]]) -> "TransPlan":
        """Return the plan with these rounds."""
        rows = [(*message, number) for number, messages in enumerate(rounds) for message in messages]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)

    @property
    def rounds(self) -> tuple[tuple[ExpertPiece, ...], ...]:
        """The messages, one by one: for people and tests."""
        rounds: list[list[ExpertPiece]] = [[] for _ in range(len(self))]
        for *fields, number in np.stack(self.columns, axis=1).tolist():
            rounds[number].append(ExpertPiece(*fields))
        return tuple(map(tuple, rounds))

    def __len__(self) -> int:
        """Return the number of rounds."""
        return int(self.round_M[-1]) + 1 if len(self.round_M) else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransPlan):
            return NotImplemented
        return all(map(np.array_equal, self.columns, other.columns))

    @property
    def experts_sent(self) -> float:
        """Number of experts that cross links, counted per link; part of a plan may send a fraction."""
        return float((1 / self.pieces_M).sum())

    def split(self, rounds: int) -> tuple["TransPlan", "TransPlan"]:
        """Split after `rounds` rounds. Trans runs the first part first, Agg the second part first."""
        sent = int(np.searchsorted(self.round_M, rounds))
        rest = TransPlan(*(column_M[sent:] for column_M in self.columns))
        return TransPlan(*(column_M[:sent] for column_M in self.columns)), replace(rest, round_M=rest.round_M - rounds)


EMPTY_PLAN = TransPlan.of(())
"""Nothing to send."""


class Hops(NamedTuple):
    """Messages of parts of experts, in one piece each."""

    stage_M: np.ndarray
    expert_M: np.ndarray
    source_M: np.ndarray
    target_M: np.ndarray
    part_M: np.ndarray
    """Index of the part of the expert, of `parts_M`."""
    parts_M: np.ndarray


def hops(placement: Placement, node_size: int, route: str) -> Hops:
    """Return the hops of all guests along a route of ROUTES, ordered by stage and expert.

    Nodes, and the ranks of each node, follow in cyclic order after the owner. The parts of different owners then enter
    a node at different ranks.
    """
    guests = placement.tables.guests
    nodes = -(-placement.num_ranks // node_size)
    away_M = (guests.rank_M // node_size - guests.owner_M // node_size) % nodes
    order_M = np.lexsort(((guests.rank_M - guests.owner_M) % node_size, away_M, guests.expert_M))
    owner_M, expert_M, rank_M, away_M = (column_M[order_M] for column_M in (*guests, away_M))
    if route == "direct":
        nothing_M = np.zeros_like(rank_M)
        return Hops(nothing_M, expert_M, owner_M, rank_M, nothing_M, nothing_M + 1)
    number_M, first_M = _groups(expert_M)
    index_M = np.arange(len(rank_M))
    part_M = index_M - first_M
    # Pairs: the guest that has a part, and each other guest of its expert
    has_X = np.repeat(index_M, number_M)
    gets_X = first_M[has_X] + np.arange(len(has_X)) - np.repeat(number_M.cumsum() - number_M, number_M)
    has_X, gets_X = has_X[has_X != gets_X], gets_X[has_X != gets_X]
    source_X = has_X
    if route == "by node":
        size_M, start_M = _groups(expert_M * nodes + away_M)
        entry_X = start_M[gets_X] + (has_X - start_M[has_X]) % size_M[gets_X]
        source_X = np.where((away_M[has_X] == away_M[gets_X]) | (entry_X == gets_X), has_X, entry_X)
    later = Hops(
        1 + (source_X != has_X),
        expert_M[has_X],
        rank_M[source_X],
        rank_M[gets_X],
        part_M[has_X],
        number_M[has_X],
    )
    found = Hops(np.zeros_like(rank_M), expert_M, owner_M, rank_M, part_M, number_M)
    joined = [np.concatenate(columns) for columns in zip(found, later, strict=True)]
    order = np.lexsort((joined[1], joined[0]))
    return Hops(*(column[order] for column in joined))


def _groups(key_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [M] the size and the first index of the group of equal, consecutive keys that each place belongs to."""
    first_M, last_M = (np.searchsorted(key_M, key_M, side) for side in ("left", "right"))
    return last_M - first_M, first_M


def plan_hops(found: Hops, pieces: int) -> TransPlan:
    """Return the plan that sends every part in `pieces` pieces; each piece passes a stage in every round."""
    # One row for each piece of a part
    turn_X = np.repeat(np.arange(pieces), len(found.stage_M))
    stage_X, expert_X, source_X, target_X, part_X, parts_X = (np.tile(column_M, pieces) for column_M in found)
    columns = [expert_X, source_X, target_X, turn_X * parts_X + part_X, parts_X * pieces, stage_X + turn_X]
    order_X = np.lexsort((*columns[3::-1], columns[5]))
    return TransPlan(*(column_X[order_X] for column_X in columns))
