"""The dispatcher of `--moe-comm-alltoall dedup`, which sends a token once to each node."""

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.comm.dedup import DedupAllToAll
from megatron_balance.comm.sharded import DirectAllToAll, Unsharded
from megatron_balance.device.host_memory import HostReader, Reading
from megatron_balance.flow.chunks.order import UNSPLIT, Chunking
from megatron_balance.flow.copies import ChunkCopies, CopiesRoute, Destinations, Tally
from megatron_balance.flow.dispatcher import AllToAllDispatcher, PendingRows, Route
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.plan import Choices, DispatchPlan
from megatron_balance.flow.reroute import reroute
from megatron_balance.flow.rows import RowOrder, row_order
from megatron_balance.job.collectives import start_gather
from megatron_balance.observe.profiler import record_function
from megatron_balance.placement.placement import Placement

Counted = tuple[Destinations, Reading]
"""Destinations of this rank's tokens, and the gathered tallies of all sources, [D, C, P + N + R]."""


class DedupDispatcher(AllToAllDispatcher):
    """Executes the plan with copies of tokens, in one chunk or in several.

    The sizes of messages between nodes do not follow from the load. So the ranks gather them as well, and the host
    waits twice. If each expert has its home as its only host and there is one chunk, the second gather is queued right
    behind that of the load. Otherwise, destinations depend on the plan, and the second gather follows the plan.
    """

    def __init__(
        self,
        config: TransformerConfig,
        parallel: ParallelDispatch,
        exchange: TokenExchange,
        chunks: Callable[[DispatchPlan], Chunking] | None,
        reader: HostReader,
    ) -> None:
        """`reader` brings the sizes to the host; the other arguments are those of AllToAllDispatcher."""
        super().__init__(config, parallel, exchange, chunks)
        assert isinstance(exchange.probs, DedupAllToAll)
        self.all_to_all = exchange.probs
        self.reader = reader
        self.among_shards = self.sharding
        if isinstance(self.sharding, DirectAllToAll):
            # Each shard is a rank of the exchange, which also adds up the results of shards
            self.among_shards = Unsharded()

    def prepare(self, tokens_TH: torch.Tensor, choices: Choices, placement: Placement | None) -> PendingRows:
        map_TE = choices.map_TE
        counted = None
        if placement is not None and placement.tables.in_place and self.chunks is None:
            with record_function("dispatch"):
                counted = self._count(map_TE, placement.num_ranks, 1)
        order, _ = self._order(tokens_TH, map_TE, None)
        return PendingRows(partial(self._decide_copies, map_TE, order, counted))

    def _count(self, chosen_TP: torch.Tensor, hosts: int, chunks: int) -> Counted:
        nodes = self.all_to_all.nodes
        destinations = Destinations(chosen_TP, hosts, nodes.ep.size(), nodes.node_size)
        return destinations, self.reader.read(start_gather(self.parallel.sources, destinations.tally(chunks)))

    def _decide_copies(
        self, map_TE: torch.Tensor, order: RowOrder | None, counted: Counted | None, plan: DispatchPlan
    ) -> Route:
        device = map_TE.device
        chunking = UNSPLIT if self.chunks is None else self.chunks(plan)
        assert chunking.shares is None and not self.parallel.splits_rows, "each chunk and rank has whole tokens"
        if counted is None:
            chosen_TP = reroute(map_TE, map_TE, plan, self.parallel.source).map_TE
            counted = self._count(chosen_TP, plan.placement.num_ranks, chunking.chunks)
        destinations, gathered = counted
        ranks = self.all_to_all.nodes.ep.size()
        tally = Tally.of(gathered(), plan.placement.num_physical, ranks)
        found = self._cut(plan, tally.tokens_CDP, device)
        order = order or row_order(map_TE, found.rows)
        # If a host's shards have exchanges of their own, the sources of each are one of every host
        exchanges = len(plan.counts_DE) // ranks
        sources = slice(self.parallel.source % exchanges, None, exchanges)
        steps = [self.all_to_all.steps(counts) for counts in tally.copy_counts(sources)]
        sizes = [sum(one.copies_by_node) for one in steps]
        copies = destinations.copies(chunking.chunks, sum(sizes))
        bitmaps = destinations.bitmaps(copies, chunking.chunks).split(sizes)
        by_slot = isinstance(self.among_shards, Unsharded)
        return CopiesRoute(
            order=order.moved(found.move, found.back),
            cut=found,
            chunking=chunking,
            parallel=self.parallel,
            exchange=self.exchange,
            sharding=self.sharding,
            device=device,
            copied=[],
            room=0,
            among_shards=self.among_shards,
            copies=copies,
            chunk_copies=[
                ChunkCopies(one, bitmaps_UB, received_DS[sources], by_slot)
                for one, bitmaps_UB, received_DS in zip(steps, bitmaps, found.received_CDS, strict=True)
            ],
        ).dispatch
