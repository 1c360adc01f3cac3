"""Chunks of rows to their experts and back, forward and backward, in a given order.

Exchanges run beside the computation: each starts when its rows are ready and is waited for where the order wants what
it brings. A backward pass is the same seven tasks with gradients, so that one function executes both.
Shape suffixes: R rows of this rank, H hidden, C chunks, D sources, S slots per host.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_balance.comm.alltoall import AllToAll, Exchange
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.comm.pipelined import Simultaneous
from megatron_balance.comm.sharded import Sharding, all_gather_rows, transposed
from megatron_balance.flow.chunks.chunking import Chunking
from megatron_balance.flow.chunks.order import ChunkTask, Order
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.plan import DispatchPlan

Moment = Literal["experts", "combine", "experts_backward", "dispatch_backward"]
"""What begins: the first expert to compute, what follows the last one, and the same in the backward pass."""

Begin = Callable[[Moment], None]

Collect = Callable[[AllToAll, torch.Tensor, torch.Tensor], Exchange]

Start = Callable[[torch.Tensor, torch.Tensor], Exchange]
"""Rows and the matrix [sources, hosts] of how many there are, to an exchange of them."""


@dataclass(frozen=True, eq=False)
class RowShare:
    """Rows that all ranks of a group have, of which each sends its own share through the experts (MP-Split)."""

    group: dist.ProcessGroup
    sizes_CM: torch.Tensor
    """[C, members] int64 in host memory: rows of each chunk that each member sends."""
    simultaneous: Simultaneous | None = None
    """What passes results on to all members while it collects them."""

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Rows of each member, one after the other."""
        return self.sizes_CM.sum(0).tolist()

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Those of this rank, of all."""
        return rows.split(self.sizes)[self.group.rank()]

    def all(self, rows: torch.Tensor) -> torch.Tensor:
        """Those of all members (MP-AllGather), of this rank's."""
        return all_gather_rows(self.group, rows, self.sizes)


@dataclass(frozen=True, eq=False)
class Job:
    """One pass of this rank's rows through a layer."""

    source: int
    """This rank's row in the plans."""
    host: int
    """The host that its experts are on."""
    exchange: TokenExchange
    sharding: Sharding
    experts: GroupedExperts
    plans: Sequence[DispatchPlan]
    """[C] of each chunk."""
    chunking: Chunking
    begin: Begin
    fused: bool
    """Whether rows are sorted by Transformer Engine's kernel."""
    share: RowShare | None
    """Of the rows of all tokens; None: they are this rank's alone."""

    @functools.cached_property
    def splits(self) -> list[torch.Tensor]:
        """[C] of [D, hosts]: rows of each chunk from each source to each host."""
        return [plan.splits_DH for plan in self.plans]

    @functools.cached_property
    def all_splits_DH(self) -> torch.Tensor:
        """[D, hosts] of all chunks together."""
        return torch.stack(self.splits).sum(0)

    @functools.cached_property
    def sent(self) -> list[int]:
        """[C]: rows that this rank sends."""
        return [int(splits_DH[self.source].sum()) for splits_DH in self.splits]

    @property
    def collect(self) -> Collect:
        """What brings rows back: this rank's, or those of all who share them."""
        saa = None if self.share is None else self.share.simultaneous
        return (saa or self.sharding).collect

    def joined(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows of all chunks, as `collect` brought them, in the order of all rows."""
        rows = chunks[0] if len(chunks) == 1 else torch.cat([*chunks])
        if self.share is None:
            return rows
        if self.share.simultaneous is None:
            return self.share.all(rows)
        return transposed(rows, self.share.sizes_CM, (1, 0))


def mixture(rows_RH: torch.Tensor, probs_R: torch.Tensor, job: Job) -> torch.Tensor:
    """Every row through its expert, weighted: [R, H], where the row was; differentiable.

    Args:
        rows_RH: by member of the job's share, then by chunk, then by physical expert.
        probs_R: combine weight of each row.
    """
    return _Mixture.apply(rows_RH, probs_R, job, torch.is_grad_enabled(), *_weights(job))


def _weights(job: Job) -> list[torch.Tensor]:
    """The leaves that the job's experts compute with."""
    return job.experts.tensors(job.plans[0].placement.slots_per_rank)


def _sent_CHS(job: Job) -> torch.Tensor:
    """[C, hosts, S]: rows of each chunk that this rank sends to each slot of each host."""
    hosts = job.plans[0].placement.num_ranks
    return torch.stack([plan.tokens_DP[job.source].view(hosts, -1) for plan in job.plans])


def _tokens_CDS(job: Job) -> torch.Tensor:
    """[C, D, S]: rows of each chunk that this rank gets from each source for each of its slots."""
    return torch.stack([plan.received_DS(job.host) for plan in job.plans])


def execute(
    order: Order,
    rows: Sequence[torch.Tensor],
    splits: Sequence[torch.Tensor],
    there: Start,
    back: Start,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Rows of every chunk there, through `compute`, and back, in the order given.

    Args:
        order: the computing tasks; the same on every rank.
        rows: [C] what this rank sends.
        splits: [C] of int64 [D, hosts] in host memory: rows from each source to each host.
        there, back: what takes them to their experts, and what brings results to where they were sent from.
        compute: called with a chunk's number and the rows that came; returns those that go back.

    Returns:
        [C] what came back, each where the rows that were sent had been.
    """
    flights: dict[int, Exchange] = {}
    at_hand: dict[int, torch.Tensor] = dict(enumerate(rows))
    for task, chunk in order:
        if task is ChunkTask.C1:
            flights[chunk] = there(at_hand.pop(chunk), splits[chunk])
        elif task is ChunkTask.E:
            at_hand[chunk] = compute(chunk, at_hand.pop(chunk))
        elif task is ChunkTask.C2:
            flights[chunk] = back(at_hand.pop(chunk), splits[chunk])
        else:
            at_hand[chunk] = flights.pop(chunk).wait()
    return [at_hand[chunk] for chunk in range(len(rows))]


class _Graph(NamedTuple):
    """Of one chunk's experts: where gradients enter, and where they come out."""

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
        """`leaves` stand for the weights in the chunks' graphs."""
        self.leaves = leaves
        self.totals: list[torch.Tensor | None] = [getattr(weight, "main_grad", None) for weight in weights]
        self.has_main_grad = [total is not None for total in self.totals]

    def add_chunk(self) -> None:
        """Move the gradients of a chunk, which others follow, out of the leaves."""
        for index, gradient in enumerate(self._taken()):
            total = self.totals[index]
            if total is None:
                self.totals[index] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            else:
                total.add_(gradient)

    def finish(self) -> list[torch.Tensor]:
        """The gradients to return to autograd after the last chunk, in the order of the weights."""
        return [
            gradient if total is None or has_main_grad else total.add_(gradient).to(gradient.dtype)
            for gradient, total, has_main_grad in zip(self._taken(), self.totals, self.has_main_grad, strict=True)
        ]

    def _taken(self) -> list[torch.Tensor]:
        """Autograd copies a gradient that anything else still refers to: the leaves let theirs go."""
        gradients = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        return gradients


class _Mixture(torch.autograd.Function):
    """Autograd sees one operation; inside it, each chunk's experts have a graph of their own.

    So the order of a backward pass is the job's, and autograd gets one gradient for each weight.
    """

    @staticmethod
    def forward(
        ctx: Any, rows_RH: torch.Tensor, probs_R: torch.Tensor, job: Job, with_graph: bool, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.job, ctx.graphs = job, {}
        ctx.leaves = [weight.detach().requires_grad_(with_graph) for weight in weights]
        stand_ins = dict(zip(weights, ctx.leaves, strict=True))
        tokens_CDS = _tokens_CDS(job)
        exchange, spread = job.exchange, job.sharding.spread
        if job.share is not None:
            rows_RH, probs_R = job.share.own(rows_RH), job.share.own(probs_R)
        # Weights of all chunks go at once, so that each host gets one message
        coming = spread(exchange.probs, transposed(probs_R, _sent_CHS(job), (1, 0, 2)), job.all_splits_DH)
        probs_by_chunk: list[torch.Tensor] = []

        def compute(chunk: int, rows: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(with_graph):
                if not probs_by_chunk:
                    probs = transposed(coming.wait(), tokens_CDS.transpose(0, 1), (1, 2, 0))
                    probs_by_chunk.extend(probs.split(tokens_CDS.sum((1, 2)).tolist()))
                    job.begin("experts")
                # Rows arrive grouped by source, then slot; experts want them grouped by slot
                rows = transposed(rows, tokens_CDS[chunk], (1, 0), job.fused).detach().requires_grad_(with_graph)
                probs = probs_by_chunk[chunk].detach().requires_grad_(with_graph)
                output = job.experts(rows, tokens_CDS[chunk].sum(0), probs, stand_ins)
                if with_graph:
                    ctx.graphs[chunk] = _Graph(get_gradient_edge(output), rows, probs)
                computed.append(chunk)
                if len(computed) == len(job.plans):
                    job.begin("combine")
            return transposed(output.detach(), tokens_CDS[chunk].T, (1, 0), job.fused)

        computed: list[int] = []
        there, back = functools.partial(spread, exchange.dispatch), functools.partial(job.collect, exchange.combine)
        return job.joined(execute(job.chunking.forward, rows_RH.split(job.sent), job.splits, there, back, compute))

    @staticmethod
    def backward(ctx: Any, gradient_RH: torch.Tensor) -> tuple:
        job = ctx.job
        exchange, spread = job.exchange, job.sharding.spread
        tokens_CDS = _tokens_CDS(job)
        of_weights = _WeightGradients(_weights(job), ctx.leaves)
        of_probs: dict[int, torch.Tensor] = {}
        going: list[Exchange] = []

        def compute(chunk: int, gradient: torch.Tensor) -> torch.Tensor:
            if not of_probs:
                job.begin("experts_backward")
            gradient = transposed(gradient, tokens_CDS[chunk], (1, 0), job.fused)
            graph = ctx.graphs.pop(chunk)
            # Not autograd.grad, which megatron-core's recomputation refuses
            torch.autograd.backward([graph.output], [gradient])
            of_probs[chunk] = graph.probs.grad
            if len(of_probs) < len(job.plans):
                of_weights.add_chunk()
            else:
                probs = torch.cat([of_probs[one] for one in range(len(job.plans))])
                probs = transposed(probs, tokens_CDS.permute(0, 2, 1), (2, 0, 1))
                job.begin("dispatch_backward")
                going.append(job.sharding.collect(exchange.probs.reverse, probs, job.all_splits_DH))
            return transposed(graph.rows.grad, tokens_CDS[chunk].T, (1, 0), job.fused)

        if job.share is not None:
            gradient_RH = job.share.own(gradient_RH)
        there = functools.partial(spread, exchange.combine.reverse)
        back = functools.partial(job.collect, exchange.dispatch.reverse)
        parts = gradient_RH.split(job.sent)
        of_rows = job.joined(execute(job.chunking.backward, parts, job.splits, there, back, compute))
        to_probs = transposed(going.pop().wait(), _sent_CHS(job).transpose(0, 1), (1, 0, 2))
        if job.share is not None:
            to_probs = job.share.all(to_probs)
        return of_rows, to_probs, None, None, *of_weights.finish()
