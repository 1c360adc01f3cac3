"""How long the tasks of a chunk take: from a cluster profile and the split matrix, so that all ranks say the same.

An exchange takes what comm/auto.py predicts for its all-to-all, and what gathers or adds up rows of an expert's shards
what the profile's line says; experts what the profile's line says, whose overhead is
what small chunks lose; a codec what the profile has measured. Each task counts as on the rank that it takes longest.
Shape suffixes: S sources, H hosts, P physical experts, W ranks of the all-to-all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_balance.comm.alltoall import AllToAll
from megatron_balance.comm.auto import exchange_seconds
from megatron_balance.comm.compressed import CompressedAllToAll, TokenExchange
from megatron_balance.comm.sharded import Sharding
from megatron_balance.flow.chunks.order import ChunkTimes
from megatron_balance.profile.cluster_profile import ClusterProfile, Throughput


@dataclass(frozen=True)
class TaskModel:
    """Seconds of the seven tasks, forward and backward."""

    profile: ClusterProfile
    """Of the ranks of the all-to-alls."""
    exchange: TokenExchange
    sharding: Sharding
    hosts: int
    codec: str
    """Name of what compresses, as the profile has it."""
    hidden: int
    dtype: torch.dtype

    def times(self, tokens_SP: np.ndarray) -> tuple[ChunkTimes, ChunkTimes]:
        """Of a chunk with tokens_SP[s, p] tokens (fractions too) from source s for physical expert p."""
        splits_SH = tokens_SP.reshape(len(tokens_SP), self.hosts, -1).sum(2)
        exchange, profile = self.exchange, self.profile
        return (
            self._one_way(splits_SH, exchange.dispatch, profile.forward, exchange.combine),
            self._one_way(splits_SH, exchange.combine.reverse, profile.backward, exchange.dispatch.reverse),
        )

    def _one_way(self, splits_SH: np.ndarray, there: AllToAll, experts: Throughput, back: AllToAll) -> ChunkTimes:
        received = float(splits_SH.sum(0).max())
        computing = experts.overhead + experts.seconds_per_token * received if received else 0.0
        wires = self.sharding.messages(splits_SH)
        spreading, collecting = (self._among_shards(name, received) for name in self.sharding.collectives)
        c1, a1, d1 = self._leg(there, wires)
        c2, a2, d2 = self._leg(back, [splits_WW.T for splits_WW in wires])
        # Shards wait for each other after rows arrive, and before results leave
        return ChunkTimes(c1, a1, d1 + spreading, computing, c2 + collecting, a2, d2)

    def _among_shards(self, collective: str | None, rows: float) -> float:
        """Seconds of a collective of an expert's shards, who share a node, over their rows."""
        if collective is None or not rows:
            return 0.0
        return self.profile.link(collective, "intra").seconds(rows * self.hidden * self.dtype.itemsize)

    def _leg(self, all_to_all: AllToAll, wires: Sequence[np.ndarray]) -> tuple[float, float, float]:
        """Compression on the rank that sends most, exchange, decompression on the rank that receives most."""
        compressed = isinstance(all_to_all, CompressedAllToAll)
        wire, row_bytes = all_to_all, self.hidden * self.dtype.itemsize
        if compressed:
            wire, row_bytes = all_to_all.wire, all_to_all.codec.bytes_per_row(self.hidden, self.dtype)
        seconds = max(exchange_seconds(wire, splits_WW * row_bytes, self.profile) for splits_WW in wires)
        if not compressed:
            return 0.0, seconds, 0.0
        sent, received = (max(float(splits_WW.sum(axis).max()) for splits_WW in wires) for axis in (1, 0))
        encode, decode = self.profile.codec(self.codec)
        return (
            encode.overhead + encode.seconds_per_token * sent,
            seconds,
            decode.overhead + decode.seconds_per_token * received,
        )
