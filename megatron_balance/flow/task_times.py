"""How long the tasks of a chunk take: from a cluster profile and the split matrix, so that all ranks say the same.

An exchange takes what comm/auto.py predicts for its all-to-all; experts what the profile's line says, whose overhead is
what small chunks lose; a codec what the profile has measured. Each task counts as on the rank that it takes longest.
Shape suffixes: D expert-parallel ranks, P physical experts, S slots per rank.
"""

from dataclasses import dataclass

import numpy as np
import torch

from megatron_balance.comm.alltoall import AllToAll
from megatron_balance.comm.auto import exchange_seconds
from megatron_balance.comm.compressed import CompressedAllToAll, TokenExchange
from megatron_balance.flow.task_order import ChunkTimes
from megatron_balance.profile.cluster_profile import ClusterProfile, Throughput


@dataclass(frozen=True)
class TaskModel:
    """Seconds of the seven tasks, forward and backward."""

    profile: ClusterProfile
    exchange: TokenExchange
    codec: str
    """Name of what compresses, as the profile has it."""
    hidden: int
    dtype: torch.dtype

    def times(self, tokens_DP: np.ndarray) -> tuple[ChunkTimes, ChunkTimes]:
        """Of a chunk with tokens_DP[d, p] tokens (fractions too) from rank d for physical expert p."""
        ranks = len(tokens_DP)
        splits_DD = tokens_DP.reshape(ranks, ranks, -1).sum(2)
        exchange, profile = self.exchange, self.profile
        return (
            self._one_way(splits_DD, exchange.dispatch, profile.forward, exchange.combine),
            self._one_way(splits_DD, exchange.combine.reverse, profile.backward, exchange.dispatch.reverse),
        )

    def _one_way(self, splits_DD: np.ndarray, there: AllToAll, experts: Throughput, back: AllToAll) -> ChunkTimes:
        sent, received = float(splits_DD.sum(1).max()), float(splits_DD.sum(0).max())
        computing = experts.overhead + experts.seconds_per_token * received if received else 0.0
        return ChunkTimes(
            *self._leg(there, splits_DD, sent, received), computing, *self._leg(back, splits_DD.T, received, sent)
        )

    def _leg(
        self, all_to_all: AllToAll, splits_DD: np.ndarray, sent: float, received: float
    ) -> tuple[float, float, float]:
        """Compression on the rank that sends most, exchange, decompression on the rank that gets most."""
        if not isinstance(all_to_all, CompressedAllToAll):
            row_bytes = self.hidden * self.dtype.itemsize
            return 0.0, exchange_seconds(all_to_all, splits_DD * row_bytes, self.profile), 0.0
        row_bytes = all_to_all.codec.bytes_per_row(self.hidden, self.dtype)
        encode, decode = self.profile.codec(self.codec)
        return (
            encode.overhead + encode.seconds_per_token * sent,
            exchange_seconds(all_to_all.wire, splits_DD * row_bytes, self.profile),
            decode.overhead + decode.seconds_per_token * received,
        )
