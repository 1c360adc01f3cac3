"""Plans of messages for Trans and Agg: which rank sends which piece of which expert to which rank, in rounds."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_balance.device.compiled import compiled
from megatron_balance.placement.links import find_links
from megatron_balance.placement.placement import Placement


class Message(NamedTuple):
    """A piece of one expert's weights from a rank that holds it to a guest slot of another."""

    expert: int
    source: int
    target: int
    chunk: int
    """Index of the piece: 0 .. chunks - 1."""
    chunks: int = 1
    """Number of pieces that the expert is sent in, the same in all of its messages."""


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """The messages that bring experts from their owners to guest slots, piece by piece, in consecutive rounds.

    The messages of one round are one batch. A source is the expert's owner or a relay that received the piece in an
    earlier round. Every piece reaches every occupied guest slot once.

    Trans runs the rounds forward: the source sends weights to the target. Agg runs them backward: the target sends
    gradients to the source, which adds what it receives to its own, so a relay passes on the sum of its subtree.
    """

    messages_5M: np.ndarray
    """[5, M] int64: the fields of all messages, round after round."""
    ends_X: np.ndarray
    """[X] int64: number of messages in each round and in those before it. No round is empty."""

    @classmethod
    def of(cls, rounds: Iterable[Iterable[Message]]) -> "TransferPlan":
        """Return the plan with these rounds."""
        columns = [np.array([*messages], dtype=np.int64).T for messages in rounds]
        if not columns:
            return EMPTY_PLAN
        return cls(np.concatenate(columns, axis=1), np.cumsum([column.shape[1] for column in columns]))

    @property
    def rounds(self) -> tuple[tuple[Message, ...], ...]:
        """The messages, one by one: for people and tests."""
        messages = [*map(Message._make, self.messages_5M.T.tolist())]
        return tuple(tuple(messages[first:after]) for first, after in pairwise([0, *self.ends_X.tolist()]))

    @cached_property
    def round_M(self) -> np.ndarray:
        """[M]: the round of each message."""
        return np.repeat(np.arange(len(self)), np.diff(self.ends_X, prepend=0))

    def __len__(self) -> int:
        """Return the number of rounds."""
        return len(self.ends_X)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransferPlan):
            return NotImplemented
        pairs = ((self.ends_X, other.ends_X), (self.messages_5M, other.messages_5M))
        return all(np.array_equal(*pair) for pair in pairs)

    @property
    def experts_sent(self) -> float:
        """Number of experts that cross links, counted per link; part of a plan may send a fraction."""
        number_C = np.bincount(self.messages_5M[4])
        return float((number_C[1:] / np.arange(1, len(number_C))).sum())

    def split(self, rounds: int) -> tuple["TransferPlan", "TransferPlan"]:
        """Split after `rounds` rounds. Trans runs the first part first, Agg the second part first."""
        first_X = self.ends_X[:rounds]
        rest_X = self.ends_X[rounds:]
        sent = int(first_X[-1]) if len(first_X) else 0
        return (
            TransferPlan(self.messages_5M[:, :sent], first_X),
            TransferPlan(self.messages_5M[:, sent:], rest_X - sent),
        )


EMPTY_PLAN = TransferPlan(np.zeros((5, 0), dtype=np.int64), np.zeros(0, dtype=np.int64))
"""Nothing to send."""


def plan_transfers(placement: Placement, node_size: int, chunks: int, fanout: int = 1, far: float = 1) -> TransferPlan:
    """Schedule every expert's pieces along its route, where each rank relays a piece to at most `fanout` others.

    In one round a rank sends at most one message and receives at most one. Greedy list scheduling sends the most urgent
    piece first: the one with the most rounds left on its link and on the links behind it. Ties go to the earlier piece,
    then to the lower expert.

    Args:
        node_size, fanout, far: as in `find_links`.
    """
    if not placement.added_hosts:
        return EMPTY_PLAN
    found = find_links(
        *placement.tables.guests_3M, num_ranks=placement.num_ranks, node_size=node_size, fanout=fanout, far=far
    )
    return TransferPlan(
        *schedule_links(
            found.expert_M,
            found.source_M,
            found.target_M,
            found.by_M,
            found.time_M,
            found.behind_M,
            placement.num_ranks,
            chunks,
        )
    )


@compiled(
    "Tuple((int64[:, ::1], int64[::1]))(int64[::1], int64[::1], int64[::1], int64[::1], float64[::1], float64[::1], "
    "int64, int64)"
)
def schedule_links(
    expert_M: np.ndarray,
    source_M: np.ndarray,
    target_M: np.ndarray,
    by_M: np.ndarray,
    time_M: np.ndarray,
    behind_M: np.ndarray,
    num_ranks: int,
    chunks: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the fields of a TransferPlan; the arguments are those of `Links`. Here, M counts links."""
    links = len(expert_M)
    messages_5N = np.empty((5, links * chunks), np.int64)
    ends_X = np.empty(links * chunks, np.int64)
    left_M = np.full(links, chunks)
    urgency_M = np.empty(links)
    ready_M = np.empty(links, np.int64)
    # The last round in which a rank has sent, or received
    sent_D = np.full(num_ranks, -1)
    received_D = np.full(num_ranks, -1)
    done = 0
    number = 0
    while done < links * chunks:
        ready = 0
        for link in range(links):
            fed = by_M[link] >= links or left_M[by_M[link]] < left_M[link]
            if left_M[link] > 0 and fed:
                urgency_M[link] = left_M[link] * time_M[link] + behind_M[link]
                ready_M[ready] = link
                ready += 1
        by_left = ready_M[:ready][np.argsort(-left_M[ready_M[:ready]], kind="mergesort")]
        chosen_R = np.empty(ready, np.int64)
        chosen = 0
        for link in by_left[np.argsort(-urgency_M[by_left], kind="mergesort")]:
            if sent_D[source_M[link]] < number and received_D[target_M[link]] < number:
                sent_D[source_M[link]] = received_D[target_M[link]] = number
                chosen_R[chosen] = link
                chosen += 1
        chosen_R = chosen_R[:chosen]
        name_R = (expert_M[chosen_R] * num_ranks + source_M[chosen_R]) * num_ranks + target_M[chosen_R]
        for link in chosen_R[np.argsort(name_R, kind="mergesort")]:
            messages_5N[0, done] = expert_M[link]
            messages_5N[1, done] = source_M[link]
            messages_5N[2, done] = target_M[link]
            messages_5N[3, done] = chunks - left_M[link]
            messages_5N[4, done] = chunks
            left_M[link] -= 1
            done += 1
        ends_X[number] = done
        number += 1
    return messages_5N, ends_X[:number].copy()
