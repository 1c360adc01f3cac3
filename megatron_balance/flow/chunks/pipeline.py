"""Chunks of rows to their experts and back, forward and backward, in a given order.

Exchanges overlap with the computation: each starts when its rows are ready, and the order determines where it is waited
for. A backward pass executes the same seven tasks with gradients, so that one function executes both.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_balance.comm.alltoall import AllToAll, Exchange
from megatron_balance.comm.blocks import transposed
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.comm.pipelined import Simultaneous
from megatron_balance.comm.sharded import Sharding, all_gather_rows
from megatron_balance.flow.chunks.chunking import Chunking
from megatron_balance.flow.chunks.order import ChunkTask, Order
from megatron_balance.flow.chunks.sorting import Sorting
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.plan import DispatchPlan
from megatron_balance.observe.profiling import record_function

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
    host: int
    """The host of this rank's experts."""
    exchange: TokenExchange
    sharding: Sharding
    plans: Sequence[DispatchPlan]
    """[C] plans, one for each chunk."""
    chunking: Chunking
    sorting: Sorting
    share: RowShare | None
    """How ranks share the rows; None: no other rank has them."""

    @functools.cached_property
    def splits(self) -> list[torch.Tensor]:
        """[C] matrices [D, hosts]: rows of each chunk from each source to each host."""
        return [plan.splits_DH for plan in self.plans]

    @functools.cached_property
    def all_splits_DH(self) -> torch.Tensor:
        """[D, hosts]: rows of all chunks from each source to each host."""
        return torch.stack(self.splits).sum(0)

    @functools.cached_property
    def sent(self) -> list[int]:
        """[C]: rows that this rank sends with each chunk."""
        return [int(splits_DH[self.source].sum()) for splits_DH in self.splits]

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


def mixture(
    rows_RH: torch.Tensor, probs_R: torch.Tensor, chunked: ChunkedDispatch, *, experts: GroupedExperts, begin: Begin
) -> torch.Tensor:
    """Compute each row with its expert, weighted: [R, H], each result where its row was; differentiable.

    Args:
        rows_RH: by member of the share, then by chunk, then by physical expert.
        probs_R: combine weight of each row.
        chunked: where the rows go.
        experts: this rank's experts.
        begin: called at each `Moment`.
    """
    weights = _weights(chunked, experts)
    return _Mixture.apply(rows_RH, probs_R, chunked, experts, begin, torch.is_grad_enabled(), *weights)


def _weights(chunked: ChunkedDispatch, experts: GroupedExperts) -> list[torch.Tensor]:
    """Return the leaves that the experts compute with."""
    return experts.tensors(chunked.plans[0].placement.slots_per_rank)


def _tokens_CDS(chunked: ChunkedDispatch) -> torch.Tensor:
    """Return [C, D, S]: rows of each chunk that this rank receives from each source for each of its slots."""
    return torch.stack([plan.received_DS(chunked.host) for plan in chunked.plans])


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
    rows: Sequence[torch.Tensor],
    splits: Sequence[torch.Tensor],
    *,
    there: Start,
    back: Start,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Send every chunk's rows to their experts, through `compute` and back, in the given order.

    Args:
        order: the computing tasks; the same on every rank.
        rows: [C] the rows that this rank sends.
        splits: [C] int64 matrices [D, hosts] in host memory: rows from each source to each host.
        there, back: exchanges that take rows to their experts, and results to the rows' sources.
        compute: called with a chunk's number and the rows that arrived; returns the rows that go back.

    Returns:
        [C] the results, in the order of the rows that this rank sent.
    """
    exchanges: dict[int, Exchange] = {}
    at_hand: dict[int, torch.Tensor] = dict(enumerate(rows))
    for task, chunk in order:
        if task is ChunkTask.C1:
            exchanges[chunk] = there(at_hand.pop(chunk), splits[chunk])
        elif task is ChunkTask.E:
            at_hand[chunk] = compute(chunk, at_hand.pop(chunk))
        elif task is ChunkTask.C2:
            exchanges[chunk] = back(at_hand.pop(chunk), splits[chunk])
        else:
            at_hand[chunk] = exchanges.pop(chunk).wait()
    return [at_hand[chunk] for chunk in range(len(rows))]


class _Graph(NamedTuple):
    """Ends of the autograd graph of one chunk's experts: gradients enter at `output` and leave at the other two."""

    output: GradientEdge
    rows: torch.Tensor
    probs: torch.Tensor


class _WeightGradients:
    """Sums the chunks' gradients of each weight in the precision of the main gradients.

    Every chunk but the last is added to the weight's `main_grad`. The last chunk's gradient is what autograd
    accumulates, so that the hook that adds it to `main_grad` (DDP's, or a guest's) runs once per backward pass. The
    gradient of a weight without `main_grad` is summed in float32 or better and rounded once.
    """

    def __init__(self, weights: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
        """`leaves` replace the weights in the chunks' graphs."""
        self.leaves = leaves
        self.totals: list[torch.Tensor | None] = [getattr(weight, "main_grad", None) for weight in weights]
        self.has_main_grad = [total is not None for total in self.totals]

    def add_chunk(self) -> None:
        """Move the gradients of a chunk that is not the last one out of the leaves."""
        for index, gradient in enumerate(self._taken()):
            total = self.totals[index]
            if total is None:
                self.totals[index] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            else:
                total.add_(gradient)

    def finish(self) -> list[torch.Tensor]:
        """Return the gradients for autograd after the last chunk, in the order of the weights."""
        return [
            gradient if total is None or has_main_grad else total.add_(gradient).to(gradient.dtype)
            for gradient, total, has_main_grad in zip(self._taken(), self.totals, self.has_main_grad, strict=True)
        ]

    def _taken(self) -> list[torch.Tensor]:
        """Take the leaves' gradients from them: autograd copies a gradient that anything else still refers to."""
        gradients = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        assert len(gradients) == len(self.leaves), "every chunk computes with all weights"
        for leaf in self.leaves:
            leaf.grad = None
        return gradients


class _Mixture(torch.autograd.Function):
    """Autograd sees one operation; inside it, the experts have one graph for each chunk.

    So the chunking determines the order of a backward pass, and autograd gets one gradient for each weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_RH: torch.Tensor,
        probs_R: torch.Tensor,
        chunked: ChunkedDispatch,
        experts: GroupedExperts,
        begin: Begin,
        with_graph: bool,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.chunked, ctx.experts, ctx.begin, ctx.graphs = chunked, experts, begin, {}
        ctx.leaves = [weight.detach().requires_grad_(with_graph) for weight in weights]
        stand_ins = dict(zip(weights, ctx.leaves, strict=True))
        tokens_CDS, sorting = _tokens_CDS(chunked), chunked.sorting
        exchange, spread = chunked.exchange, chunked.sharding.spread
        if chunked.share is not None:
            rows_RH, probs_R = chunked.share.own(rows_RH), chunked.share.own(probs_R)
        # Weights of all chunks go at once, so that each host gets one message
        with record_function("dispatch"):
            coming = spread(exchange.probs, sorting.weights_to_hosts(probs_R), chunked.all_splits_DH)
        probs_by_chunk: list[torch.Tensor] = []

        def compute(chunk: int, rows: torch.Tensor) -> torch.Tensor:
            with record_function("experts"), torch.set_grad_enabled(with_graph):
                if not probs_by_chunk:
                    probs = sorting.weights_to_slots(coming.wait())
                    probs_by_chunk.extend(probs.split(tokens_CDS.sum((1, 2)).tolist()))
                    begin("experts")
                # Rows arrive grouped by source, then slot; experts want them grouped by slot
                rows = sorting.to_slots[chunk](rows).detach().requires_grad_(with_graph)
                probs = probs_by_chunk[chunk].detach().requires_grad_(with_graph)
                output = experts(rows, tokens_CDS[chunk].sum(0), probs, stand_ins)
                if with_graph:
                    ctx.graphs[chunk] = _Graph(get_gradient_edge(output), rows, probs)
                computed.append(chunk)
                if len(computed) == len(chunked.plans):
                    begin("combine")
            return sorting.to_sources[chunk](output.detach())

        computed: list[int] = []
        there = _spanned("dispatch", functools.partial(spread, exchange.dispatch))
        back = _spanned("combine", functools.partial(chunked.collect, exchange.combine))
        parts = rows_RH.split(chunked.sent)
        results = execute(chunked.chunking.forward, parts, chunked.splits, there=there, back=back, compute=compute)
        with record_function("combine"):
            return chunked.joined(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        chunked, begin = ctx.chunked, ctx.begin
        exchange, spread = chunked.exchange, chunked.sharding.spread
        sorting = chunked.sorting
        of_weights = _WeightGradients(_weights(chunked, ctx.experts), ctx.leaves)
        of_probs: dict[int, torch.Tensor] = {}
        going: list[Exchange] = []

        def compute(chunk: int, gradient: torch.Tensor) -> torch.Tensor:
            with record_function("experts backward"):
                if not of_probs:
                    begin("experts_backward")
                gradient = sorting.to_slots[chunk](gradient)
                graph = ctx.graphs.pop(chunk)
                # Not autograd.grad, which megatron-core's recomputation refuses
                torch.autograd.backward([graph.output], [gradient])
                of_probs[chunk] = graph.probs.grad
            if len(of_probs) < len(chunked.plans):
                of_weights.add_chunk()
            else:
                probs = torch.cat([of_probs[one] for one in range(len(chunked.plans))])
                probs = sorting.weights_to_sources(probs)
                begin("dispatch_backward")
                with record_function("dispatch backward"):
                    going.append(chunked.sharding.collect(exchange.probs.reverse, probs, chunked.all_splits_DH))
            return sorting.to_sources[chunk](graph.rows.grad)

        (gradient_RH,) = gradients
        if chunked.share is not None:
            gradient_RH = chunked.share.own(gradient_RH)
        there = _spanned("combine backward", functools.partial(spread, exchange.combine.reverse))
        back = _spanned("dispatch backward", functools.partial(chunked.collect, exchange.dispatch.reverse))
        parts = gradient_RH.split(chunked.sent)
        results = execute(chunked.chunking.backward, parts, chunked.splits, there=there, back=back, compute=compute)
        with record_function("dispatch backward"):
            of_rows = chunked.joined(results)
            to_probs = sorting.weights_to_chunks(going.pop().wait())
            if chunked.share is not None:
                to_probs = chunked.share.all(to_probs)
        return of_rows, to_probs, None, None, None, None, *of_weights.finish()
