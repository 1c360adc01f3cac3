"""The orders of a chunk's rows between the exchanges and the experts.

Rows travel by source or host; experts want them by slot. The weights of all chunks travel in one exchange.
"""

from typing import NamedTuple

import numpy as np

from megatron_balance.comm.blocks import Gather, Move


class Sorting(NamedTuple):
    """What moves the rows of one pass; [C] for each chunk's rows, the others for the weights of all chunks' rows."""

    to_slots: list[Gather]
    """By source, then slot -> by slot, then source."""
    to_sources: list[Gather]
    """The opposite."""
    weights_to_hosts: Gather
    """By chunk, host, slot -> by host, chunk, slot: as they are sent."""
    weights_to_chunks: Gather
    """The opposite."""
    weights_to_slots: Gather
    """By source, chunk, slot -> by chunk, slot, source: from how they arrive to how experts want them."""
    weights_to_sources: Gather
    """The opposite."""


def moves(tokens_CDP: np.ndarray, source: int, host: int, hosts: int) -> list[Move]:
    """Return the moves of a `Sorting`.

    Args:
        tokens_CDP: rows of each chunk from each source to each physical expert.
        source, host: this rank among the sources and among the hosts.
    """
    chunks, sources, _ = tokens_CDP.shape
    tokens_CDS = tokens_CDP.reshape(chunks, sources, hosts, -1)[:, :, host]
    sent_CHS = tokens_CDP[:, source].reshape(chunks, hosts, -1)
    to_slots = [Move.transposed(tokens_DS, (1, 0)) for tokens_DS in tokens_CDS]
    to_hosts = Move.transposed(sent_CHS, (1, 0, 2))
    to_slots_of_chunks = Move.transposed(tokens_CDS.transpose(1, 0, 2), (1, 2, 0))
    weights = [to_hosts, to_hosts.back, to_slots_of_chunks, to_slots_of_chunks.back]
    return [*to_slots, *(move.back for move in to_slots), *weights]


def sorting(gathers: list[Gather]) -> Sorting:
    """Return what executes `moves`."""
    *of_rows, one, two, three, four = gathers
    chunks = len(of_rows) // 2
    return Sorting(of_rows[:chunks], of_rows[chunks:], one, two, three, four)
