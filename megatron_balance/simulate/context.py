"""Exchanges among context-parallel ranks, each of which has a part of every sequence.

    p2p         keys and values travel around a ring; attention to one part hides the passage of the next one
    all_gather  all keys and values before attention; in the backward pass again, and their gradients after it
    a2a         queries, keys and values for some heads before attention, and its outputs after it
    a2a+p2p     a2a within groups of consecutive ranks, p2p between these groups

Transformer Engine splits a sequence so that a ring's steps have equal amounts of attention.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_balance.simulate.engine import Work
from megatron_balance.simulate.network import TeamNetwork, one_after_another, ring


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
    gathering: int
    """Number of neighbors that exchange tokens for heads; 1 without a2a."""
    passing: int
    """Number of neighbors (or of groups of `gathering` ranks) in a ring or an all-gather; 1 with a2a."""
    at_once: bool = False
    """Whether an all-gather takes the place of the ring."""

    def exchanges(self, keys_values: float, queries_outputs: float) -> tuple[Work, Work]:
        """Return the work of one layer's forward pass and of its backward pass.

        Args:
            keys_values: bytes of a rank's keys and values.
            queries_outputs: bytes of its queries and its attention's outputs.
        """
        # In a backward pass, gradients of outputs arrive, and those of queries, keys and values return
        heads = self._heads_for_tokens((keys_values + queries_outputs) / 4)
        if self.at_once:
            forward, backward = (self._gather(keys_values, times) for times in (1, 2))
        else:
            # In a backward pass, gradients follow a step behind keys and values
            forward, backward = (self._ring(times * keys_values) for times in (1, 2))
        return one_after_another([heads, forward]), one_after_another([heads, backward])

    @property
    def hiding(self) -> tuple[float, float]:
        """Fractions of attention's forward and backward pass that hide a ring."""
        if self.passing == 1 or self.at_once:
            return 0.0, 0.0
        # Gradients still travel in the last step of a backward pass
        return (self.passing - 1) / self.passing, 1.0

    def _heads_for_tokens(self, num_bytes: float) -> Work:
        """Return the work of four all-to-alls: queries, keys, values, outputs."""
        ranks = np.arange(len(self.network.ranks_D))
        group = ranks // (self.tensor * self.gathering)
        together_DD = (group[:, None] == group) & self._same_shard
        return self._messages(together_DD * (num_bytes / self.gathering), 4)

    def _ring(self, num_bytes: float) -> Work:
        """Return the work of passing on these bytes until all have been everywhere."""
        ranks = np.arange(len(self.network.ranks_D))
        step = self.tensor * self.gathering
        whole = step * self.passing
        after = ranks - ranks % whole + (ranks % whole + step) % whole
        bytes_DD = np.zeros((len(ranks),) * 2)
        bytes_DD[ranks, after] = num_bytes
        return self._messages(bytes_DD, self.passing - 1)

    def _gather(self, num_bytes: float, times: int) -> Work:
        ranks = np.arange(len(self.network.ranks_D))
        group = ranks // (self.tensor * self.passing) * self.tensor + ranks % self.tensor
        network = self.network
        return ring(network.fabric, network.network, network.ranks_D, group, self.passing * num_bytes, times)

    @property
    def _same_shard(self) -> np.ndarray:
        shard = np.arange(len(self.network.ranks_D)) % self.tensor
        return shard[:, None] == shard

    def _messages(self, bytes_DD: np.ndarray, times: int) -> Work:
        """Return the work of batches of messages, one after another."""
        links = self.network.network
        np.fill_diagonal(bytes_DD, 0)
        return self.network.moving(links, times * bytes_DD, times * float(links.batch_seconds(bytes_DD)))
