"""Predicts the seconds of a chunk's tasks from a cluster profile and the split matrix, the same on all ranks.

    exchange                            cost/exchange.py's prediction for its all-to-all
    gather or sum over expert shards    the profile's line of the collective
    experts                             the profile's line of the experts; its overhead is the cost of small chunks
    codec                               the profile's measurement

The time of each task is that of the slowest rank. In shapes, D counts sources and H hosts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_balance.comm.alltoall import AllToAll
from megatron_balance.comm.compressed import CompressedAllToAll, TokenExchange
from megatron_balance.comm.sharded import Sharding
from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.flow.chunks.order import ChunkTimes
from megatron_balance.profile.cluster_profile import ClusterProfile, Throughput


@dataclass(frozen=True, kw_only=True)
class TaskModel:
    """Predicts the seconds of the seven tasks, forward and backward."""

    profile: ClusterProfile
    """Profile of the ranks of the all-to-alls."""
    exchange: TokenExchange
    models: Sequence[ExchangeModel]
    """Models of the exchange's all-to-all without compression; the fastest one counts."""
    sharding: Sharding
    hosts: int
    codec: str
    """Name of the codec in the profile."""
    hidden: int
    dtype: torch.dtype

    def times(self, tokens_DP: np.ndarray) -> tuple[ChunkTimes, ChunkTimes]:
        """Return the times of a chunk with tokens_DP[d, p] tokens from source d for physical expert p.

        Numbers of tokens may be fractions.
        """
        splits_DH = tokens_DP.reshape(len(tokens_DP), self.hosts, -1).sum(2)
        exchange = self.exchange
        profile = self.profile
        return (
            self._one_way(splits_DH, exchange.dispatch, profile.forward, exchange.combine),
            self._one_way(splits_DH, exchange.combine.reverse, profile.backward, exchange.dispatch.reverse),
        )

    def _one_way(self, splits_DH: np.ndarray, there: AllToAll, experts: Throughput, back: AllToAll) -> ChunkTimes:
        received = float(splits_DH.sum(0).max())
        computing = experts.overhead + experts.seconds_per_token * received if received else 0.0
        wires = self.sharding.messages(splits_DH)
        spreading, collecting = (self._among_shards(name, received) for name in self.sharding.collectives)
        c1, a1, d1 = self._leg(there, wires)
        c2, a2, d2 = self._leg(back, [splits_WW.T for splits_WW in wires])
        # Shards wait for each other after rows arrive, and before results leave
        return ChunkTimes(c1, a1, d1 + spreading, computing, c2 + collecting, a2, d2)

    def _among_shards(self, collective: str | None, rows: float) -> float:
        """Return the seconds of a collective over `rows` rows among an expert's shards, which share a node."""
        if collective is None or not rows:
            return 0.0
        return self.profile.link(collective, "intra").seconds(rows * self.hidden * self.dtype.itemsize)

    def _leg(self, all_to_all: AllToAll, wires: Sequence[np.ndarray]) -> tuple[float, float, float]:
        """Return the seconds of compression on the busiest sender, exchange, decompression on the busiest receiver."""
        compressed = isinstance(all_to_all, CompressedAllToAll)
        row_bytes = self.hidden * self.dtype.itemsize
        if compressed:
            row_bytes = all_to_all.codec.bytes_per_row(self.hidden, self.dtype)
        seconds = max(min(model.seconds(splits_WW * row_bytes) for model in self.models) for splits_WW in wires)
        if not compressed:
            return 0.0, seconds, 0.0
        sent, received = (max(float(splits_WW.sum(axis).max()) for splits_WW in wires) for axis in (1, 0))
        encode, decode = self.profile.codec(self.codec)
        return (
            encode.overhead + encode.seconds_per_token * sent,
            seconds,
            decode.overhead + decode.seconds_per_token * received,
        )
