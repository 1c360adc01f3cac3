"""Copies of tokens, one for each node that needs a token, for `--moe-comm-alltoall dedup` (comm/dedup.py).

A rank's tokens have rows, one for each chosen expert, as with every all-to-all. But only copies travel between nodes,
and each rank gets a token once. Three orders lead from tokens to rows; sums take them in reverse:

    tokens -> copies            at the source, one per node of the token's experts
    copies -> received tokens   at a copy's entry into the node, one per rank of the token's experts
    received tokens -> rows     at the host, one per expert

All three come from bitmaps of each copy's experts, which travel ahead of the first rows. The sizes of messages come
from one gathered tensor of `tally`.

In the shapes, C counts chunks, D sources, R ranks of the exchange (or, of one rank, its rows), N nodes, X the physical
experts of a node, U copies, M received tokens, and B the bytes of a bitmap.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from megatron_balance.comm.alltoall import AllToAll, Exchange
from megatron_balance.comm.blocks import STAYS, BlockMove, gathers
from megatron_balance.comm.codecs import Codec
from megatron_balance.comm.compressed import CompressedAllToAll
from megatron_balance.comm.dedup import CopyCounts, DedupAllToAll, NodeSteps
from megatron_balance.comm.sharded import Sharding
from megatron_balance.flow.chunks.pipeline import ChunkedRoute, Sorting
from megatron_balance.flow.rows import RowOrder, combine, gather_rows, row_order


class Destinations:
    """The physical experts of a source's tokens, and the ranks and nodes that need the tokens."""

    def __init__(self, chosen_TP: torch.Tensor, hosts: int, ranks: int, node_size: int) -> None:
        """Args:
        chosen_TP: bool, the physical experts of each token.
        ranks: ranks of the exchange: one for each host or, if tokens go to each shard of a host, for each shard.
        node_size: ranks of a node.
        """
        tokens, physicals = chosen_TP.shape
        nodes = -(-ranks // node_size)
        slots = physicals // hosts
        self.chosen_TP = chosen_TP
        of_ranks_TRS = chosen_TP.view(tokens, hosts, slots).repeat_interleave(ranks // hosts, dim=1)
        self.ranks_TR = of_ranks_TRS.any(2)
        # The last node may be smaller
        padded = F.pad(of_ranks_TRS, (0, 0, 0, nodes * node_size - ranks))
        self.chosen_TNX = padded.view(tokens, nodes, node_size * slots)
        self.nodes_TN = self.chosen_TNX.any(2)

    def tally(self, chunks: int) -> torch.Tensor:
        """Return [C, P + N + R] int64: how many tokens of each chunk need each physical expert, node and rank. Chunks
        are consecutive runs of tokens."""
        needed = torch.cat([self.chosen_TP, self.nodes_TN, self.ranks_TR], dim=1)
        return torch.stack([part.sum(0) for part in needed.tensor_split(chunks)])

    def copies(self, chunks: int, total: int) -> RowOrder:
        """Return the order of all `total` copies: by chunk, then by node, then by token."""
        if chunks == 1:
            return row_order(self.nodes_TN, total)
        # A token has copies in its own chunk only
        parts = [part.to(torch.uint8) for part in self.nodes_TN.tensor_split(chunks)]
        return row_order(torch.block_diag(*parts).bool(), total)

    def bitmaps(self, copies: RowOrder, chunks: int) -> torch.Tensor:
        """Return [U, B] uint8: the experts of each copy on its node."""
        tokens, nodes, experts = self.chosen_TNX.shape
        place_U = copies.rest.place_R
        place_U = place_U // (chunks * nodes) * nodes + place_U % nodes
        return packed(self.chosen_TNX.reshape(tokens * nodes, experts).index_select(0, place_U))


class Tally(NamedTuple):
    """The gathered `Destinations.tally` of all sources: int64, in host memory."""

    tokens_CDP: np.ndarray
    to_node_CDN: np.ndarray
    to_rank_CDR: np.ndarray

    @classmethod
    def of(cls, gathered_DCX: torch.Tensor, physicals: int, ranks: int) -> "Tally":
        found = gathered_DCX.transpose(0, 1).numpy()
        tokens_CDP = np.ascontiguousarray(found[:, :, :physicals])
        return cls(tokens_CDP, found[:, :, physicals:-ranks], found[:, :, -ranks:])

    def copy_counts(self, sources: slice) -> list[CopyCounts]:
        """Return the sizes of each chunk's exchange, given the sources that take part in this rank's exchange."""
        each = zip(self.to_node_CDN[:, sources], self.to_rank_CDR[:, sources], strict=True)
        return [CopyCounts(*one) for one in each]


def packed(bits_UX: torch.Tensor) -> torch.Tensor:
    """Pack bool [U, X] into bytes [U, B], eight in each."""
    width = -(-bits_UX.shape[1] // 8)
    bits = F.pad(bits_UX, (0, 8 * width - bits_UX.shape[1])).view(len(bits_UX), width, 8)
    return (bits * _powers(bits.device)).sum(2, dtype=torch.uint8)


def unpacked(bytes_UB: torch.Tensor, width: int) -> torch.Tensor:
    """Return the inverse of `packed`, for `width` bits."""
    bits = bytes_UB.unsqueeze(2).bitwise_and(_powers(bytes_UB.device)).bool()
    return bits.view(len(bytes_UB), 8 * bytes_UB.shape[1])[:, :width]


def _powers(device: torch.device) -> torch.Tensor:
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)


class ChunkCopies:
    """One chunk's copies on this rank: those that it sends, that enter at it, and that it receives."""

    def __init__(self, steps: NodeSteps, bitmaps_UB: torch.Tensor, received_DS: np.ndarray, by_slot: bool) -> None:
        """Args:
        steps: sizes of the messages.
        bitmaps_UB: see `Destinations.bitmaps`.
        received_DS: int64, the rows for each slot of this rank from each source of the exchange.
        by_slot: whether `spread` returns rows by slot, then by source; if not, in the reverse order, in which a host's
            shards then gather them.
        """
        self.steps = steps
        self.received_DS = received_DS
        self.by_slot = by_slot
        self._bitmaps_UB: torch.Tensor | None = bitmaps_UB
        """Until they are sent."""
        self._relays: dict[int, RowOrder] = {}
        """By step: order of the rows that this rank sends on; used on the exchange's thread or stream alone."""
        self._arrived: Exchange
        """The bitmaps [M, B] of the received tokens."""

    @functools.cached_property
    def rows(self) -> RowOrder:
        """Order of this rank's rows among the received tokens."""
        slots = self.received_DS.shape[1]
        arrived_MB = self._arrived.wait()
        first = (self.steps.rank - self.steps.here.start) * slots
        chosen_MS = unpacked(arrived_MB, first + slots)[:, first:]
        order = row_order(chosen_MS, int(self.received_DS.sum()))
        if self.by_slot:
            return order
        return order.moved(*gathers([BlockMove.transposed(self.received_DS.T, (1, 0))], arrived_MB.device))

    def spread(self, all_to_all: DedupAllToAll, codec: Codec | None, copies_UH: torch.Tensor) -> Exchange:
        """Start sending this rank's copies; the exchange returns the rows of this rank."""
        self._send_bitmaps(all_to_all)
        hidden = copies_UH.shape[1]
        dtype = copies_UH.dtype

        def relay(step: int, payload: torch.Tensor) -> torch.Tensor:
            return payload.index_select(0, self._relays[step].token_R)

        payload = copies_UH if codec is None else codec.encode(copies_UH)
        exchange = all_to_all.spread(payload, self.steps, relay)

        def wait() -> torch.Tensor:
            payload = exchange.wait()
            return gather_rows(payload if codec is None else codec.decode(payload, hidden, dtype), self.rows)

        return Exchange(wait)

    def collect(self, all_to_all: DedupAllToAll, codec: Codec | None, rows_RH: torch.Tensor) -> Exchange:
        """Start the transpose of `spread`: send sums of this rank's rows; the exchange returns a sum for each copy."""
        hidden = rows_RH.shape[1]
        dtype = rows_RH.dtype
        sums_MH = combine(rows_RH, self.rows)
        if codec is None:
            return all_to_all.collect(sums_MH, self.steps, lambda step, rows: combine(rows, self._relays[step]))

        def relay(step: int, payload: torch.Tensor) -> torch.Tensor:
            return codec.encode(combine(codec.decode(payload, hidden, dtype), self._relays[step]))

        exchange = all_to_all.collect(codec.encode(sums_MH), self.steps, relay)
        return Exchange(lambda: codec.decode(exchange.wait(), hidden, dtype))

    def _send_bitmaps(self, all_to_all: DedupAllToAll) -> None:
        """Before the first rows, send the bitmaps, from which every rank learns the orders."""
        if self._bitmaps_UB is None:
            return
        ranks = len(self.steps.here)
        slots = self.received_DS.shape[1]

        def relay(step: int, entered_UB: torch.Tensor) -> torch.Tensor:
            chosen_UX = unpacked(entered_UB, ranks * slots)
            needed_UY = chosen_UX.reshape(len(chosen_UX), ranks, slots).any(2)
            self._relays[step] = row_order(needed_UY, sum(self.steps.to_ranks(step)))
            return entered_UB.index_select(0, self._relays[step].token_R)

        self._arrived = all_to_all.spread(self._bitmaps_UB, self.steps, relay)
        self._bitmaps_UB = None


class _ChunkAllToAll(AllToAll):
    """An all-to-all of one chunk's rows, as a Sharding uses it: `spread` or `collect` of its ChunkCopies."""

    def __init__(self, all_to_all: AllToAll, run: Callable[[DedupAllToAll, Codec | None, torch.Tensor], Exchange]):
        super().__init__(all_to_all.group)
        self.run = run
        compressed = isinstance(all_to_all, CompressedAllToAll)
        self.codec = all_to_all.codec if compressed else None
        found = all_to_all.all_to_all if compressed else all_to_all
        assert isinstance(found, DedupAllToAll)
        self.all_to_all = found

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor, room: int = 0) -> Exchange:
        return self.run(self.all_to_all, self.codec, rows)


@dataclass(frozen=True, eq=False, kw_only=True)
class CopiesRoute(ChunkedRoute):
    """A route on which tokens travel once to each node. `order` and `cut` describe the rows' combine weights."""

    copies: RowOrder
    """Copies by chunk, then by node, then by token."""
    chunk_copies: Sequence[ChunkCopies]
    among_shards: Sharding
    """Exchanges of rows; those of combine weights use `sharding`."""

    @functools.cached_property
    def sorting(self) -> Sorting:
        weights = super().sorting
        stays = [STAYS] * len(self.chunk_copies)
        return weights._replace(to_slots=stays, to_sources=stays) if self.chunk_copies[0].by_slot else weights

    def rows_of(self, tokens_TH: torch.Tensor) -> dict[int, torch.Tensor]:
        sizes = [sum(chunk.steps.copies_by_node) for chunk in self.chunk_copies]
        return dict(enumerate(gather_rows(tokens_TH, self.copies).split(sizes)))

    def sums_of(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        return combine(results[0] if len(results) == 1 else torch.cat([*results]), self.copies)

    def spread(self, all_to_all: AllToAll, chunk: int, rows: torch.Tensor) -> Exchange:
        to_experts = _ChunkAllToAll(all_to_all, self.chunk_copies[chunk].spread)
        return self.among_shards.spread(to_experts, rows, self.cut.splits[chunk])

    def collect(self, all_to_all: AllToAll, chunk: int, rows: torch.Tensor) -> Exchange:
        to_sources = _ChunkAllToAll(all_to_all, self.chunk_copies[chunk].collect)
        return self.among_shards.collect(to_sources, rows, self.cut.splits[chunk])
