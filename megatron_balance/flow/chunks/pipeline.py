"""Chunks of rows to their experts and back, forward and backward, in a given order.

Exchanges overlap with the computation: each starts when its rows are ready, and the order determines where it is waited
for. A backward pass executes the same seven tasks with gradients, so that one function executes both.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import AllToAll, Exchange
from megatron_balance.comm.blocks import STAYS, Gather, transposed
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.comm.pipelined import Simultaneous
from megatron_balance.comm.sharded import Sharding, all_gather_rows
from megatron_balance.flow.chunks.chunking import Chunking
from megatron_balance.flow.chunks.order import ChunkTask, Order
from megatron_balance.flow.chunks.sorting import Sorting
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.rows import RowOrder, combine, gather_rows, gather_weights, scatter_weights
from megatron_balance.observe.profiler import record_function

Moment = Literal["experts", "combine", "experts_backward", "dispatch_backward"]
"""The work that begins: computation of the first chunk, or the steps after the last chunk's; forward and backward."""

Begin = Callable[[Moment], None]
"""Called at each `Moment` of a layer's passes."""

Collect = Callable[[AllToAll, torch.Tensor, torch.Tensor], Exchange]

Start = Callable[[torch.Tensor, torch.Tensor], Exchange]
"""Starts an exchange of rows, given the number of rows from each source to each host [D, hosts]."""


@dataclass(frozen=True, eq=False)
class RowShare:
    """Rows that all ranks of a group have; each rank sends its own share of them through the experts (MP-Split)."""

    group: dist.ProcessGroup
    sizes_CM: torch.Tensor
    """[C, members] int64 in host memory: rows that each member sends with each chunk."""
    simultaneous: Simultaneous | None = None
    """Collects results and passes them on to all members at the same time (SAA); None: one after the other."""

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Number of rows of each member."""
        return self.sizes_CM.sum(0).tolist()

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of all rows."""
        return rows.split(self.sizes)[self.group.rank()]

    def all(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all members (MP-AllGather), given this rank's share."""
        return all_gather_rows(self.group, rows, self.sizes)


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkedDispatch:
    """Where the rows of one forward pass go, chunk by chunk."""

    source: int
    """This rank's row in the plans."""
    exchange: TokenExchange
    sharding: Sharding
    received_CDS: np.ndarray
    """Rows of each chunk that this rank receives from each source for each of its slots."""
    splits: list[torch.Tensor]
    """[C] int64 matrices [D, hosts] in host memory: rows of each chunk from each source to each host."""
    chunking: Chunking
    device: torch.device
    weights_to_hosts: Gather = STAYS
    """Moves the weights of the rows that this rank sends: by chunk, host, slot -> by host, chunk, slot."""
    weights_to_chunks: Gather = STAYS
    """The opposite."""
    share: RowShare | None = None
    """How ranks share the rows; None: no other rank has them."""

    @functools.cached_property
    def sorting(self) -> Sorting:
        """What sorts the rows that arrive. It is made when they are on their way."""
        return Sorting.of(self.received_CDS, self.device)

    @property
    def slots(self) -> int:
        """Number of physical experts of a host."""
        return self.received_CDS.shape[2]

    @functools.cached_property
    def tokens_CS(self) -> torch.Tensor:
        """[C, S] in host memory: rows of each chunk for each of this rank's slots."""
        return torch.from_numpy(self.received_CDS.sum(1))

    @functools.cached_property
    def all_splits_DH(self) -> torch.Tensor:
        """[D, hosts]: rows of all chunks from each source to each host."""
        return self.splits[0] if len(self.splits) == 1 else torch.stack(self.splits).sum(0)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of all rows."""
        return rows if self.share is None else self.share.own(rows)

    def parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return [C]: the rows that this rank sends with each chunk, of those of all members."""
        rows = self.own(rows)
        if len(self.splits) == 1:
            return [rows]
        return [*rows.split([int(splits_DH[self.source].sum()) for splits_DH in self.splits])]

    @property
    def collect(self) -> Collect:
        """The function that brings rows back: this rank's rows, or all members' rows."""
        saa = None if self.share is None else self.share.simultaneous
        return (saa or self.sharding).collect

    def joined(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put the rows of all chunks, as `collect` returned them, in the order in which they were sent."""
        rows = chunks[0] if len(chunks) == 1 else torch.cat([*chunks])
        if self.share is None:
            return rows
        if self.share.simultaneous is None:
            return self.share.all(rows)
        return transposed(rows, self.share.sizes_CM, (1, 0))


def sums_by_host(tokens_CDP: np.ndarray, hosts: int) -> np.ndarray:
    """Return [C, D, H], the rows for all slots of a host."""
    # Several times as fast as a sum over a short last dimension
    slots = tokens_CDP.shape[2] // hosts
    first, *others = (tokens_CDP[:, :, slot::slots] for slot in range(slots))
    return functools.reduce(np.add, others, first)


class Departure(NamedTuple):
    """Rows that leave for their experts. A pass takes them out, so that they last no longer than their exchanges."""

    parts: list[torch.Tensor]
    """[C] the rows that this rank sends with each chunk."""
    started: dict[int, Exchange]
    """Exchanges that have started, by chunk."""


def depart(rows_RH: torch.Tensor, chunked: ChunkedDispatch) -> Departure:
    """Start the first exchange of rows, which are copied from their tokens and need no gradient."""
    with record_function("dispatch"):
        parts = chunked.parts(rows_RH)
        (_, chunk) = chunked.chunking.forward[0]
        exchange = chunked.sharding.spread(chunked.exchange.dispatch, parts[chunk], chunked.splits[chunk])
        return Departure(parts, {chunk: exchange})


def mixture(
    tokens_TH: torch.Tensor,
    probs_TE: torch.Tensor,
    order: RowOrder,
    chunked: ChunkedDispatch,
    *,
    experts: GroupedExperts,
    begin: Begin,
    departed: list[Departure] | None = None,
) -> torch.Tensor:
    """Compute each row with its expert, and return the weighted sums of each token's rows: [T, H]; differentiable.

    Args:
        tokens_TH, probs_TE: tokens of this rank, and the combine weights of all experts.
        order: rows by member of the share, then by chunk, then by physical expert.
        chunked: where the rows go.
        experts: this rank's experts.
        begin: called at each `Moment`.
        departed: what `depart` returned, if the rows have left already; taken from the list.
    """
    with_graph = torch.is_grad_enabled()
    options = order, chunked, experts, begin, departed, with_graph
    return _Mixture.apply(tokens_TH, probs_TE, options, *experts.weights)


def _spanned(span: str, start: Start) -> Start:
    """Return `start` with a profiler span around its host work: starting the exchange, and waiting for it."""

    def starting(rows: torch.Tensor, splits_DH: torch.Tensor) -> Exchange:
        with record_function(span):
            exchange = start(rows, splits_DH)

        def wait() -> torch.Tensor:
            with record_function(span):
                return exchange.wait()

        return Exchange(wait)

    return starting


def execute(
    order: Order,
    rows: list[torch.Tensor],
    splits: Sequence[torch.Tensor],
    *,
    there: Start,
    back: Start,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
    started: dict[int, Exchange] | None = None,
) -> list[torch.Tensor]:
    """Send every chunk's rows to their experts, through `compute` and back, in the given order.

    Args:
        order: the computing tasks; the same on every rank.
        rows: [C] the rows that this rank sends; taken from the list, so that they last no longer than their exchange.
        splits: [C] int64 matrices [D, hosts] in host memory: rows from each source to each host.
        there, back: exchanges that take rows to their experts, and results to the rows' sources.
        compute: called with a chunk's number and the rows that arrived; returns the rows that go back.
        started: exchanges that take rows to their experts and have started already, by chunk.

    Returns:
        [C] the results, in the order of the rows that this rank sent.
    """
    exchanges = started or {}
    at_hand: dict[int, torch.Tensor] = dict(enumerate(rows))
    rows.clear()
    for chunk in exchanges:
        del at_hand[chunk]
    for task, chunk in order:
        if task is ChunkTask.C1 and chunk in at_hand:
            exchanges[chunk] = there(at_hand.pop(chunk), splits[chunk])
        elif task is ChunkTask.C1:
            assert chunk in exchanges, "rows leave once"
        elif task is ChunkTask.E:
            at_hand[chunk] = compute(chunk, at_hand.pop(chunk))
        elif task is ChunkTask.C2:
            exchanges[chunk] = back(at_hand.pop(chunk), splits[chunk])
        else:
            at_hand[chunk] = exchanges.pop(chunk).wait()
    return [at_hand[chunk] for chunk in range(len(at_hand))]


class _Mixture(torch.autograd.Function):
    """Autograd sees one operation; inside it, the experts have one graph for each chunk.

    So the chunking determines the order of a backward pass, and autograd gets one gradient for each weight. The host
    queues the first exchange as soon as it can, and what that does not need after it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens_TH: torch.Tensor,
        probs_TE: torch.Tensor,
        options: tuple[RowOrder, ChunkedDispatch, GroupedExperts, Begin, list[Departure] | None, bool],
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        order, chunked, experts, begin, departed, with_graph = options
        ctx.order = order
        ctx.chunked = chunked
        ctx.begin = begin
        ctx.graphs = {}
        exchange = chunked.exchange
        spread = chunked.sharding.spread
        parts, started = departed.pop() if departed else depart(gather_rows(tokens_TH, order), chunked)
        # Weights of all chunks go at once, so that each host gets one message, and not before the first rows
        with record_function("dispatch"):
            probs_R = chunked.weights_to_hosts(chunked.own(gather_weights(probs_TE, order)))
            coming = [spread(exchange.probs, probs_R, chunked.all_splits_DH)]
            order.complete()
        ctx.of_weights = experts.gradients(chunked.slots)
        probs_by_chunk: list[torch.Tensor] = []

        def compute(chunk: int, rows: torch.Tensor) -> torch.Tensor:
            # `begin` recognizes recomputation by whether gradients are enabled
            with record_function("experts"), torch.set_grad_enabled(with_graph):
                if not probs_by_chunk:
                    probs = chunked.sorting.weights_to_slots(coming.pop().wait())
                    probs_by_chunk.extend(probs.split(chunked.tokens_CS.sum(1).tolist()))
                    begin("experts")
                # Rows arrive grouped by source, then slot; experts want them grouped by slot
                rows = chunked.sorting.to_slots[chunk](rows)
                tokens = chunked.tokens_CS[chunk]
                probs = probs_by_chunk[chunk]
                output, ctx.graphs[chunk] = experts.graph(rows, tokens, probs, ctx.of_weights, with_graph)
                computed.append(chunk)
                if len(computed) == len(chunked.splits):
                    begin("combine")
            return chunked.sorting.to_sources[chunk](output)

        computed: list[int] = []
        there = _spanned("dispatch", functools.partial(spread, exchange.dispatch))
        back = _spanned("combine", functools.partial(chunked.collect, exchange.combine))
        results = execute(
            chunked.chunking.forward, parts, chunked.splits, there=there, back=back, compute=compute, started=started
        )
        with record_function("combine"):
            ctx.probs_shape = probs_TE.shape
            return combine(chunked.joined(results), order)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        chunked = ctx.chunked
        begin = ctx.begin
        exchange = chunked.exchange
        spread = chunked.sharding.spread
        of_probs: dict[int, torch.Tensor] = {}
        of_weights: list[torch.Tensor | None] = []
        going: list[Exchange] = []

        def compute(chunk: int, gradient: torch.Tensor) -> torch.Tensor:
            with record_function("experts backward"):
                if not of_probs:
                    begin("experts_backward")
                gradient = chunked.sorting.to_slots[chunk](gradient)
                rows, of_probs[chunk] = ctx.graphs.pop(chunk).backward(gradient)
            if len(of_probs) == len(chunked.splits):
                probs = torch.cat([of_probs[one] for one in range(len(chunked.splits))])
                probs = chunked.sorting.weights_to_sources(probs)
                begin("dispatch_backward")
                with record_function("dispatch backward"):
                    going.append(chunked.sharding.collect(exchange.probs.reverse, probs, chunked.all_splits_DH))
            return chunked.sorting.to_sources[chunk](rows)

        def back(rows: torch.Tensor, splits_DH: torch.Tensor) -> Exchange:
            back_started.append(send_back(rows, splits_DH))
            if len(back_started) == len(chunked.splits):
                with record_function("weight gradients"):
                    of_weights.extend(ctx.of_weights.finish())
            return back_started[-1]

        there = _spanned("combine backward", functools.partial(spread, exchange.combine.reverse))
        send_back = _spanned("dispatch backward", functools.partial(chunked.collect, exchange.dispatch.reverse))
        back_started: list[Exchange] = []
        with record_function("combine backward"):
            parts = chunked.parts(gather_rows(gradients[0], ctx.order))
        results = execute(chunked.chunking.backward, parts, chunked.splits, there=there, back=back, compute=compute)
        with record_function("dispatch backward"):
            of_tokens = combine(chunked.joined(results), ctx.order)
            to_probs = chunked.weights_to_chunks(going.pop().wait())
            if chunked.share is not None:
                to_probs = chunked.share.all(to_probs)
        return of_tokens, scatter_weights(to_probs, ctx.order, ctx.probs_shape), None, *of_weights
