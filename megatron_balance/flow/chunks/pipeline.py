"""Sends chunks of rows to their experts and back, forward and backward, in a given order.

`ChunkedRoute.dispatch` sends the first chunk. `SentChunks.compute` returns the function that executes the tasks of all
chunks. Each exchange starts when its rows are ready; the order determines when to wait for the exchange. A backward
pass executes the same seven tasks with gradients.

In the shapes, D counts the sources of rows, W the hosts, and S the slots of this rank.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from megatron_balance.comm.alltoall import AllToAll, Exchange
from megatron_balance.comm.blocks import BlockMove, Gather, gathers, transposed
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.comm.sharded import Sharding, all_gather_rows
from megatron_balance.flow.chunks.order import Chunking, ChunkTask, Order
from megatron_balance.flow.cut import RankCut
from megatron_balance.flow.experts import ExpertGradients, ExpertGraph, GroupedExperts
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.plan import Choices
from megatron_balance.flow.rows import RowOrder, combine, gather_rows, gather_weights, scatter_weights
from megatron_balance.observe.profiler import record_function

Begin = Callable[[Literal["experts", "combine", "experts_backward", "dispatch_backward"]], None]
"""Called when the named work begins: computation of the first chunk, or the steps after the last chunk's
computation."""

Combine = Callable[[], torch.Tensor]
"""Brings the experts' results back; returns the weighted sum of each token's results: [T, H]."""


class Sorting(NamedTuple):
    """Reorders received rows: one gather per chunk for its rows, and one gather for the combine weights of all rows."""

    to_slots: list[Gather]
    """By source, then slot -> by slot, then source."""
    to_sources: list[Gather]
    """The opposite."""
    weights_to_slots: Gather
    """By source, chunk, slot -> by chunk, slot, source: from the order of arrival to the order of the experts."""
    weights_to_sources: Gather
    """The opposite."""


@dataclass(frozen=True, eq=False)
class ChunkedRoute:
    """Route of the rows of one forward pass, chunk by chunk. Recomputation takes the same route."""

    order: RowOrder
    """Rows in the order of sending: by member that shares the rows, then by chunk, then by physical expert."""
    cut: RankCut
    chunking: Chunking
    parallel: ParallelDispatch
    exchange: TokenExchange
    sharding: Sharding
    device: torch.device
    copied: list[torch.Tensor]
    """The rows, if they have been copied from their tokens; the first pass pops them."""
    room: int
    """Rows for which the experts of a pass in one chunk have memory (`DispatchPlan.room`). Rows after those that arrive
    are undefined, and are never sent."""

    def dispatch(self, tokens_TH: torch.Tensor, choices: Choices) -> "SentChunks":
        """Start the first exchange of rows, outside of autograd."""
        waiting = self.rows_of(tokens_TH.detach())
        _, chunk = self.chunking.forward[0]
        exchange = self.spread(self.exchange.dispatch, chunk, waiting.pop(chunk))
        return SentChunks(self, tokens_TH, choices.probs_TE, waiting, {chunk: exchange})

    def rows_of(self, tokens_TH: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the rows that this rank sends, by chunk, given its tokens or the gradients of their sums."""
        return self.parts(self.copied.pop() if self.copied else gather_rows(tokens_TH, self.order))

    def sums_of(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return each token's sum [T, H] of the rows that `collect` returned, by chunk; the transpose of `rows_of`."""
        return combine(self.joined(results), self.order)

    def spread(self, all_to_all: AllToAll, chunk: int, rows: torch.Tensor) -> Exchange:
        """Start sending a chunk's rows to their experts."""
        room = {"room": self.room} if self.room else {}
        return self.sharding.spread(all_to_all, rows, self.cut.splits[chunk], **room)

    def collect(self, all_to_all: AllToAll, chunk: int, rows: torch.Tensor) -> Exchange:
        """Start sending results to the sources of their rows or, with SAA, to all members that share the rows."""
        sharding = self.parallel.simultaneous or self.sharding
        return sharding.collect(all_to_all, rows, self.cut.splits[chunk])

    @functools.cached_property
    def sorting(self) -> Sorting:
        """Reorders received rows by slot. Built while the rows are in flight."""
        received_CDS = self.cut.received_CDS
        chunks = len(received_CDS)
        moves = [BlockMove.transposed(received_DS, (1, 0)) for received_DS in received_CDS]
        if chunks > 1:
            moves.append(BlockMove.transposed(received_CDS.transpose(1, 0, 2), (1, 2, 0)))
        both = gathers([*moves, *(move.back for move in moves)], self.device)
        # With a single chunk, weights move like its rows
        return Sorting(both[:chunks], both[len(moves) :][:chunks], both[len(moves) - 1], both[-1])

    @functools.cached_property
    def tokens_CS(self) -> torch.Tensor:
        """[C, S] in host memory: rows of each chunk for each slot of this rank."""
        return torch.from_numpy(self.cut.received_CDS.sum(1))

    @functools.cached_property
    def arriving_C(self) -> list[int]:
        """Rows of each chunk that arrive at this rank."""
        return self.tokens_CS.sum(1).tolist()

    @functools.cached_property
    def all_splits_DW(self) -> torch.Tensor:
        """Rows of all chunks from each source to each host."""
        return self.cut.splits[0] if len(self.cut.splits) == 1 else torch.stack(self.cut.splits).sum(0)

    @functools.cached_property
    def member_sizes(self) -> list[int]:
        """Number of rows of each rank that shares the rows."""
        assert self.cut.sizes_CD is not None
        return self.cut.sizes_CD.sum(0).tolist()

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of all rows (MP-Split)."""
        return rows if self.cut.sizes_CD is None else rows.split(self.member_sizes)[self.parallel.groups.tp.rank()]

    def of_all_members(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all members (MP-AllGather), given this rank's share."""
        if self.cut.sizes_CD is None:
            return rows
        return all_gather_rows(self.parallel.groups.tp, rows, self.member_sizes)

    def parts(self, rows: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return this rank's part of all members' rows, by chunk."""
        rows = self.own(rows)
        if len(self.cut.splits) == 1:
            return {0: rows}
        sizes = [int(splits_DW[self.parallel.source].sum()) for splits_DW in self.cut.splits]
        return dict(enumerate(rows.split(sizes)))

    def joined(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Restore the order of sending, given all chunks' rows as `send_back` returned them."""
        rows = chunks[0] if len(chunks) == 1 else torch.cat([*chunks])
        if self.parallel.simultaneous is None:
            return self.of_all_members(rows)
        assert self.cut.sizes_CD is not None
        return transposed(rows, self.cut.sizes_CD, (1, 0))


class SentChunks(NamedTuple):
    """A pass whose first chunk has been sent to the experts; `tokens_TH` and `probs_TE` get gradients."""

    route: ChunkedRoute
    tokens_TH: torch.Tensor
    probs_TE: torch.Tensor
    waiting: dict[int, torch.Tensor]
    """Rows of chunks that have not been sent; `execute` pops them to free their memory early."""
    exchanges: dict[int, Exchange]
    """Exchanges in progress, by chunk; `execute` pops them."""

    def compute(self, experts: GroupedExperts, begin: Begin) -> Combine:
        """Return a differentiable function that executes the order, and returns each token's weighted sum."""
        with_graph = torch.is_grad_enabled()
        tokens = self.tokens_TH, self.probs_TE
        return functools.partial(_Mixture.apply, *tokens, self, experts, begin, with_graph, *experts.weights)


class ChunkTasks(ABC):
    """Tasks of each chunk in one direction; `execute` calls them in order."""

    spans: tuple[str, str]
    """Profiler spans of the exchanges to the experts and back."""

    def __init__(self, route: ChunkedRoute, to_experts: AllToAll, back: AllToAll) -> None:
        self.route = route
        self.to_experts = to_experts
        self.back = back

    def send(self, chunk: int, rows: torch.Tensor) -> Exchange:
        """Start sending a chunk's rows to their experts."""
        return self.route.spread(self.to_experts, chunk, rows)

    @abstractmethod
    def compute(self, chunk: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the experts' results for the rows that arrived."""

    def send_back(self, chunk: int, rows: torch.Tensor) -> Exchange:
        """Start sending a chunk's results back."""
        return self.route.collect(self.back, chunk, rows)

    def finish(self) -> None:  # noqa: B027
        """Do the work that no rank waits for; called when the results of all chunks have been sent."""


def execute(
    order: Order,
    rows: dict[int, torch.Tensor],
    tasks: ChunkTasks,
    exchanges: dict[int, Exchange] | None = None,
) -> list[torch.Tensor]:
    """Send each chunk's rows to their experts, compute them, and send the results back, in the given order.

    Args:
        order: the computing tasks; the same on every rank.
        rows: the rows that this rank sends, by chunk; popped, so that their memory is freed after their exchange.
        exchanges: exchanges of other chunks' rows that have started already, by chunk.
    Returns:
        [C] the results, in the order of the rows that this rank sent.
    """
    exchanges = {} if exchanges is None else exchanges
    to_experts, back = tasks.spans
    computing = len(rows) + len(exchanges)
    for task, chunk in order:
        if task is ChunkTask.C1:
            if chunk not in exchanges:
                with record_function(to_experts):
                    exchanges[chunk] = tasks.send(chunk, rows.pop(chunk))
        elif task is ChunkTask.E:
            rows[chunk] = tasks.compute(chunk, rows.pop(chunk))
        elif task is ChunkTask.C2:
            with record_function(back):
                exchanges[chunk] = tasks.send_back(chunk, rows.pop(chunk))
            computing -= 1
            if computing == 0:
                tasks.finish()
        else:
            with record_function(to_experts if task is ChunkTask.D1 else back):
                rows[chunk] = exchanges.pop(chunk).wait()
    return [rows.pop(chunk) for chunk in range(len(rows))]


class _Forward(ChunkTasks):
    spans = ("dispatch", "combine")

    def __init__(
        self, route: ChunkedRoute, weights: Exchange, experts: GroupedExperts, begin: Begin, with_graph: bool
    ) -> None:
        super().__init__(route, route.exchange.dispatch, route.exchange.combine)
        self.weights = weights
        self.experts = experts
        self.begin = begin
        self.with_graph = with_graph
        self.gradients = experts.gradients(route.tokens_CS.shape[1])
        self.graphs: dict[int, ExpertGraph | None] = {}
        """By computed chunk; None without gradients."""
        self._probs: Sequence[torch.Tensor] = ()
        """Combine weights of each chunk's rows, after they have arrived."""

    def compute(self, chunk: int, rows: torch.Tensor) -> torch.Tensor:
        route = self.route
        sorting = route.sorting
        # `begin` distinguishes a pass from its recomputation by `torch.is_grad_enabled()`
        with record_function("experts"), torch.set_grad_enabled(self.with_graph):
            if not self.graphs:
                probs_R = sorting.weights_to_slots(self.weights.wait(), route.room)
                self._probs = [probs_R] if route.room else probs_R.split(route.arriving_C)
                self.begin("experts")
            rows = sorting.to_slots[chunk](rows, route.room)
            output, self.graphs[chunk] = self.experts.graph(
                rows, route.tokens_CS[chunk], self._probs[chunk], self.gradients, self.with_graph
            )
            if len(self.graphs) == len(route.cut.splits):
                self.begin("combine")
        return sorting.to_sources[chunk](output, route.room)[: route.arriving_C[chunk]]


class _Backward(ChunkTasks):
    spans = ("combine backward", "dispatch backward")

    weights: Exchange
    """Exchange of the combine weights' gradients; set when all chunks are computed."""

    def __init__(
        self, route: ChunkedRoute, graphs: dict[int, ExpertGraph], gradients: ExpertGradients, begin: Begin
    ) -> None:
        super().__init__(route, route.exchange.combine.reverse, route.exchange.dispatch.reverse)
        self.graphs = graphs
        self.gradients = gradients
        self.begin = begin
        self.of_probs: dict[int, torch.Tensor] = {}
        self.of_weights: list[torch.Tensor | None] = []

    def compute(self, chunk: int, rows: torch.Tensor) -> torch.Tensor:
        route = self.route
        sorting = route.sorting
        with record_function("experts backward"):
            if not self.of_probs:
                self.begin("experts_backward")
            rows = sorting.to_slots[chunk](rows, route.room)
            rows, of_probs = self.graphs.pop(chunk).backward(rows)
            self.of_probs[chunk] = of_probs[: route.arriving_C[chunk]]
        if not self.graphs:
            probs = torch.cat([self.of_probs[one] for one in range(len(route.cut.splits))])
            probs = sorting.weights_to_sources(probs)
            self.begin("dispatch_backward")
            with record_function("dispatch backward"):
                self.weights = route.sharding.collect(route.exchange.probs.reverse, probs, route.all_splits_DW)
        return sorting.to_sources[chunk](rows, route.room)[: route.arriving_C[chunk]]

    def finish(self) -> None:
        with record_function("weight gradients"):
            self.of_weights = self.gradients.finish()


class _Mixture(torch.autograd.Function):
    """The whole mixture as one operation of autograd; each chunk has an inner graph for its experts. So the chunking
    determines the order of a backward pass, and autograd gets one gradient for each weight."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens_TH: torch.Tensor,
        probs_TE: torch.Tensor,
        sent: SentChunks,
        experts: GroupedExperts,
        begin: Begin,
        with_graph: bool,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        route = sent.route
        # Send the weights of all chunks together, one message per host, after the first rows
        with record_function("dispatch"):
            probs_R = route.cut.weights_to_hosts(route.own(gather_weights(probs_TE, route.order)))
            probs = route.sharding.spread(route.exchange.probs, probs_R, route.all_splits_DW)
            # Queue the rest of the order while the rows are in flight
            _ = route.order.rest
        tasks = _Forward(route, probs, experts, begin, with_graph)
        results = execute(route.chunking.forward, sent.waiting, tasks, sent.exchanges)
        ctx.route = route
        ctx.begin = begin
        ctx.graphs = tasks.graphs
        ctx.gradients = tasks.gradients
        ctx.probs_shape = probs_TE.shape
        with record_function("combine"):
            return route.sums_of(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        route = ctx.route
        with record_function("combine backward"):
            parts = route.rows_of(gradients[0])
        tasks = _Backward(route, ctx.graphs, ctx.gradients, ctx.begin)
        results = execute(route.chunking.backward, parts, tasks)
        with record_function("dispatch backward"):
            of_tokens = route.sums_of(results)
            of_probs = route.of_all_members(route.cut.weights_to_chunks(tasks.weights.wait()))
            to_probs = scatter_weights(of_probs, route.order, ctx.probs_shape)
        return of_tokens, to_probs, None, None, None, None, *tasks.of_weights
