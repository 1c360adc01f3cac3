"""Plans of messages for Trans and Agg: which rank sends which piece of which expert to which rank, in rounds.

A *hop* is a message with one part of an expert. In stage 0, owners send; in later stages, guests pass on their parts.
An owner sends an expert only once, except with `direct`:

    direct      the owner sends the whole expert to every guest
    exchanged   the owner sends a different part to every guest, and guests exchange their parts
    by node     the same, but a part enters each node once, at a guest that passes it on within the node

So `direct` takes one batch of messages, `exchanged` two and `by node` three, for any number of guests. If an expert is
sent in several pieces, a piece overlaps with the next stage of the previous piece.

In shapes, X counts pairs of guests of one expert, or messages.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megatron_balance.placement.placement import Placement

ROUTES = ("direct", "exchanged", "by node")


class ExpertPiece(NamedTuple):
    """A message: a piece of one expert's weights, from a rank that holds it to another rank's guest slot."""

    expert: int
    source: int
    target: int
    piece: int
    """0 .. pieces - 1."""
    pieces: int = 1
    """Number of pieces of the expert, equal in all of its messages."""


@dataclass(frozen=True, eq=False)
class TransPlan:
    """Messages that bring experts from their owners to guest slots, piece by piece, in rounds of one batch each. A
    source is the expert's owner, or a guest that received the piece in an earlier round. Every piece reaches every
    occupied guest slot once. Trans runs the rounds forward. Agg runs them backward: targets send gradients to sources,
    which add them to their own, so a guest passes on the sum of its subtree."""

    expert_M: np.ndarray
    source_M: np.ndarray
    target_M: np.ndarray
    piece_M: np.ndarray
    pieces_M: np.ndarray
    """Fields of all messages, int64, ordered by round."""
    round_M: np.ndarray
    """Round of each message, ascending; no round is empty."""

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        return self.expert_M, self.source_M, self.target_M, self.piece_M, self.pieces_M, self.round_M

    @classmethod
    def of(cls, rounds: Iterable[Iterable[ExpertPiece]]) -> "TransPlan":
        rows = [(*message, number) for number, messages in enumerate(rounds) for message in messages]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)

    @classmethod
    def direct(cls, expert_M: np.ndarray, source_M: np.ndarray, target_M: np.ndarray) -> "TransPlan":
        """Return the plan that sends each of these experts whole, in one round."""
        order_M = np.lexsort((target_M, source_M, expert_M))
        nothing_M = np.zeros_like(expert_M)
        return cls(
            expert_M=expert_M[order_M],
            source_M=source_M[order_M],
            target_M=target_M[order_M],
            piece_M=nothing_M,
            pieces_M=nothing_M + 1,
            round_M=nothing_M,
        )

    @property
    def rounds(self) -> tuple[tuple[ExpertPiece, ...], ...]:
        """The messages as objects, for printing and tests."""
        rounds: list[list[ExpertPiece]] = [[] for _ in range(len(self))]
        for *fields, number in np.stack(self.columns, axis=1).tolist():
            rounds[number].append(ExpertPiece(*fields))
        return tuple(map(tuple, rounds))

    def __len__(self) -> int:
        return int(self.round_M[-1]) + 1 if len(self.round_M) else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransPlan):
            return NotImplemented
        return all(map(np.array_equal, self.columns, other.columns))

    @property
    def experts_sent(self) -> float:
        """Number of experts sent over links, counted per link; a part of a plan may have a fraction."""
        return float((1 / self.pieces_M).sum())

    def split(self, rounds: int) -> tuple["TransPlan", "TransPlan"]:
        """Split after `rounds` rounds. Trans runs the first result first, Agg the second."""
        sent = int(np.searchsorted(self.round_M, rounds))
        rest = TransPlan(*(column_M[sent:] for column_M in self.columns))
        return TransPlan(*(column_M[:sent] for column_M in self.columns)), replace(rest, round_M=rest.round_M - rounds)


EMPTY_PLAN = TransPlan.of(())
"""Nothing to send."""


class Hops(NamedTuple):
    """Messages with parts of experts, before parts are cut into pieces."""

    stage_M: np.ndarray
    expert_M: np.ndarray
    source_M: np.ndarray
    target_M: np.ndarray
    part_M: np.ndarray
    """Index of the expert's part, below `parts_M`."""
    parts_M: np.ndarray


def hops(placement: Placement, node_size: int, route: str) -> Hops:
    """Return the hops of all guests along a route of ROUTES, ordered by stage, then by expert. An expert's guests are
    in cyclic order after the owner, by node and by local rank. So the parts of different owners enter a node at
    different ranks."""
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
    # Pairs of the guest that has a part, and each other guest of its expert
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
    """Return [M] the size, and [M] the first index, of each key's group; equal keys are consecutive."""
    first_M, last_M = (np.searchsorted(key_M, key_M, side) for side in ("left", "right"))
    return last_M - first_M, first_M


def plan_hops(found: Hops, pieces: int) -> TransPlan:
    """Return the plan that sends every part in `pieces` pieces; a piece advances one stage per round."""
    turn_X = np.repeat(np.arange(pieces), len(found.stage_M))
    stage_X, expert_X, source_X, target_X, part_X, parts_X = (np.tile(column_M, pieces) for column_M in found)
    columns = [expert_X, source_X, target_X, turn_X * parts_X + part_X, parts_X * pieces, stage_X + turn_X]
    order_X = np.lexsort((*columns[3::-1], columns[5]))
    return TransPlan(*(column_X[order_X] for column_X in columns))
