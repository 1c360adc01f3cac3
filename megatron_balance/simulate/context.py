"""Exchanges among context-parallel ranks, each of which has a part of every sequence.

    p2p         keys and values travel around a ring; attention to one part hides the passage of the next one
    all_gather  all keys and values before attention; in the backward pass again, and their gradients after it
    a2a         queries, keys and values for some heads before attention, and its outputs after it

Transformer Engine splits a sequence so that a ring's steps have equal amounts of attention.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_balance.simulate.engine import Work
from megatron_balance.simulate.network import TeamNetwork, ring


class ContextExchange(NamedTuple):
    """What context-parallel ranks exchange in a pass of a block."""

    works_S: Sequence[Work]
    """By set of teams whose ranks are in the same context-parallel groups."""
    hiding: float
    """Seconds of the block's computation during which the exchange is in progress."""


class ContextGroups(NamedTuple):
    """Context-parallel groups among some consecutive ranks of a pipeline stage."""

    network: TeamNetwork
    tensor: int
    """Number of consecutive ranks with the same tokens."""
    ranks: int
    """Number of ranks of a group; they have the same position among those with the same tokens."""
    kind: str
    """A value of `--cp-comm-type`."""

    def exchanges(self, keys_values: float, queries_outputs: float) -> tuple[Work, Work]:
        """Return the work of one layer's forward pass and of its backward pass.

        Args:
            keys_values: bytes of a rank's keys and values.
            queries_outputs: bytes of its queries and its attention's outputs.
        """
        if self.kind == "a2a":
            # In a backward pass, gradients of outputs arrive, and those of queries, keys and values return
            both = self._heads_for_tokens((keys_values + queries_outputs) / 4)
            return both, both
        if self.kind == "all_gather":
            return self._gather(keys_values, 1), self._gather(keys_values, 2)
        # In a backward pass, gradients follow a step behind keys and values
        return self._ring(keys_values), self._ring(2 * keys_values)

    @property
    def hiding(self) -> tuple[float, float]:
        """Fractions of attention's forward and backward pass that hide an exchange."""
        # Gradients still travel in the last step of a ring's backward pass
        return ((self.ranks - 1) / self.ranks, 1.0) if self.kind == "p2p" else (0.0, 0.0)

    @property
    def _group_D(self) -> np.ndarray:
        """[D] the context-parallel group of each rank."""
        ranks_D = np.arange(len(self.network.ranks_D))
        return ranks_D // (self.tensor * self.ranks) * self.tensor + ranks_D % self.tensor

    def _heads_for_tokens(self, num_bytes: float) -> Work:
        """Return the work of four all-to-alls: queries, keys, values, outputs."""
        return self._messages((self._group_D[:, None] == self._group_D) * (num_bytes / self.ranks), 4)

    def _ring(self, num_bytes: float) -> Work:
        """Return the work of passing on these bytes until all have been everywhere."""
        ranks_D = np.arange(len(self.network.ranks_D))
        whole = self.tensor * self.ranks
        after_D = ranks_D - ranks_D % whole + (ranks_D + self.tensor) % whole
        bytes_DD = np.zeros((len(ranks_D),) * 2)
        bytes_DD[ranks_D, after_D] = num_bytes
        return self._messages(bytes_DD, self.ranks - 1)

    def _gather(self, num_bytes: float, times: int) -> Work:
        network = self.network
        whole = self.ranks * num_bytes
        return ring(network.fabric, network.network, network.ranks_D, self._group_D, whole, times)

    def _messages(self, bytes_DD: np.ndarray, times: int) -> Work:
        """Return the work of batches of messages, one after another."""
        links = self.network.network
        np.fill_diagonal(bytes_DD, 0)
        return self.network.moving(links, times * bytes_DD, times * float(links.batch_seconds(bytes_DD)))
