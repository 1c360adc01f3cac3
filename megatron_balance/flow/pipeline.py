"""Chunks of rows to their experts and back, forward and backward, in a given order.

Exchanges run beside the computation: each starts when its rows are ready and is waited for where the order wants what
it brings. A backward pass is the same seven tasks with gradients, so that one function executes both.
Shape suffixes: R rows of this rank, H hidden, C chunks, D expert-parallel ranks, S slots per rank.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_balance.comm.alltoall import AllToAll, Exchange
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.flow.chunking import Chunking
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.plan import DispatchPlan
from megatron_balance.flow.task_order import Order, Task

Moment = Literal["experts", "combine", "experts_backward", "dispatch_backward"]
"""What begins: the first expert to compute, what follows the last one, and the same in the backward pass."""

Begin = Callable[[Moment], None]


@dataclass(frozen=True, eq=False)
class Job:
    """One pass of this rank's rows through a layer."""

    rank: int
    exchange: TokenExchange
    experts: GroupedExperts
    plans: Sequence[DispatchPlan]
    """[C] of each chunk."""
    chunking: Chunking
    begin: Begin
    fused: bool
    """Whether rows are sorted by Transformer Engine's kernel."""

    @functools.cached_property
    def splits(self) -> list[torch.Tensor]:
        """[C] of [D, D]: rows of each chunk from each rank to each rank."""
        return [plan.splits_DD for plan in self.plans]

    @functools.cached_property
    def all_splits_DD(self) -> torch.Tensor:
        """[D, D] of all chunks together."""
        return torch.stack(self.splits).sum(0)

    @functools.cached_property
    def sent(self) -> list[int]:
        """[C]: rows that this rank sends."""
        return [int(splits_DD[self.rank].sum()) for splits_DD in self.splits]


def mixture(rows_RH: torch.Tensor, probs_R: torch.Tensor, job: Job) -> torch.Tensor:
    """Every row through its expert, weighted: [R, H], where the row was; differentiable.

    Args:
        rows_RH: by chunk, then by physical expert.
        probs_R: combine weight of each row.
    """
    ranks = job.plans[0].placement.num_ranks
    sent_CDS = torch.stack([plan.tokens_DP[job.rank].view(ranks, -1) for plan in job.plans])
    probs_R = transposed(probs_R, sent_CDS, (1, 0, 2))
    weights = job.experts.tensors(sent_CDS.shape[-1])
    return _Mixture.apply(rows_RH, probs_R, job, torch.is_grad_enabled(), *weights)


def transposed(rows: torch.Tensor, sizes: torch.Tensor, dimensions: Sequence[int], fused: bool = False) -> torch.Tensor:
    """Rows in blocks that are laid out as `sizes` -> laid out as `sizes.permute(dimensions)`."""
    order = torch.arange(sizes.numel()).view(sizes.shape).permute(*dimensions).reshape(-1)
    if bool((order.diff() > 0).all()):
        return rows
    return sort_chunks_by_idxs(rows, sizes.reshape(-1), order, fused=fused)[0]


def _tokens_CDS(job: Job) -> torch.Tensor:
    """[C, D, S]: rows of each chunk that this rank gets from each rank for each of its slots."""
    return torch.stack([plan.received_DS(job.rank) for plan in job.plans])


def execute(
    order: Order,
    rows: Sequence[torch.Tensor],
    splits: Sequence[torch.Tensor],
    there: AllToAll,
    back: AllToAll,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Rows of every chunk there, through `compute`, and back, in the order given.

    Args:
        order: the computing tasks; the same on every rank.
        rows: [C] what this rank sends.
        splits: [C] of int64 [D, D] on the host: rows from each rank to each rank.
        compute: called with a chunk's number and the rows that came; returns those that go back.

    Returns:
        [C] what came back, each where the rows that were sent had been.
    """
    flights: dict[int, Exchange] = {}
    at_hand: dict[int, torch.Tensor] = dict(enumerate(rows))
    for task, chunk in order:
        if task is Task.C1:
            flights[chunk] = there.start(at_hand.pop(chunk), splits[chunk])
        elif task is Task.E:
            at_hand[chunk] = compute(chunk, at_hand.pop(chunk))
        elif task is Task.C2:
            flights[chunk] = back.start(at_hand.pop(chunk), splits[chunk].T)
        else:
            at_hand[chunk] = flights.pop(chunk).wait()
    return [at_hand[chunk] for chunk in range(len(rows))]


class _Graph(NamedTuple):
    """Of one chunk's experts: where gradients enter, and where they come out."""

    output: GradientEdge
    rows: torch.Tensor
    probs: torch.Tensor


class _Mixture(torch.autograd.Function):
    """Autograd sees one operation; inside it, each chunk's experts have a graph of their own.

    So the order of a backward pass is the job's, and each weight gets its gradient once.
    """

    @staticmethod
    def forward(
        ctx: Any, rows_RH: torch.Tensor, probs_R: torch.Tensor, job: Job, with_graph: bool, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.job, ctx.graphs = job, {}
        # Gradients of all chunks add up in these
        ctx.leaves = [weight.detach().requires_grad_(with_graph) for weight in weights]
        stand_ins = dict(zip(weights, ctx.leaves, strict=True))
        tokens_CDS = _tokens_CDS(job)
        coming = job.exchange.probs.start(probs_R, job.all_splits_DD)
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
        exchange, parts = job.exchange, rows_RH.split(job.sent)
        return torch.cat(execute(job.chunking.forward, parts, job.splits, exchange.dispatch, exchange.combine, compute))

    @staticmethod
    def backward(ctx: Any, gradient_RH: torch.Tensor) -> tuple:
        job = ctx.job
        tokens_CDS = _tokens_CDS(job)
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
            if len(of_probs) == len(job.plans):
                probs = torch.cat([of_probs[one] for one in range(len(job.plans))])
                probs = transposed(probs, tokens_CDS.permute(0, 2, 1), (2, 0, 1))
                job.begin("dispatch_backward")
                going.append(job.exchange.probs.reverse.start(probs, job.all_splits_DD.T))
            return transposed(graph.rows.grad, tokens_CDS[chunk].T, (1, 0), job.fused)

        there, back = job.exchange.combine.reverse, job.exchange.dispatch.reverse
        of_rows = execute(job.chunking.backward, gradient_RH.split(job.sent), job.splits, there, back, compute)
        return torch.cat(of_rows), going.pop().wait(), None, None, *(leaf.grad for leaf in ctx.leaves)
