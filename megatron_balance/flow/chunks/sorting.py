"""The orders of a layer's rows between the exchanges and the experts.

Rows travel by source or host; experts want them by slot. The weights of all chunks' rows travel in one exchange.
"""

from typing import NamedTuple

import numpy as np
import torch

from megatron_balance.comm.blocks import BlockMove, Gather, gathers


def weights_to_hosts(tokens_CHS: np.ndarray) -> BlockMove:
    """Return the move of the weights that a rank sends: by chunk, host, slot -> by host, chunk, slot.

    Args:
        tokens_CHS: rows of each chunk for each slot of each host.
    """
    return BlockMove.transposed(tokens_CHS, (1, 0, 2))


class Sorting(NamedTuple):
    """What moves the rows that arrive on a rank; [C] for each chunk's rows, the others for the weights of all rows."""

    to_slots: list[Gather]
    """By source, then slot -> by slot, then source."""
    to_sources: list[Gather]
    """The opposite."""
    weights_to_slots: Gather
    """By source, chunk, slot -> by chunk, slot, source: from how they arrive to how experts want them."""
    weights_to_sources: Gather
    """The opposite."""

    @classmethod
    def of(cls, tokens_CDS: np.ndarray, device: torch.device) -> "Sorting":
        """Return what sorts the rows on `device`.

        Args:
            tokens_CDS: rows of each chunk from each source for each of this rank's slots.
        """
        chunks = len(tokens_CDS)
        there = [BlockMove.transposed(tokens_DS, (1, 0)) for tokens_DS in tokens_CDS]
        if chunks > 1:
            there.append(BlockMove.transposed(tokens_CDS.transpose(1, 0, 2), (1, 2, 0)))
        # One copy to the device for all of them
        both = gathers([*there, *(move.back for move in there)], device)
        # The weights of a single chunk move as its rows
        return cls(both[:chunks], both[len(there) :][:chunks], both[len(there) - 1], both[-1])
