"""How a layer's tokens reach their physical experts and come back: one dispatcher for each kind of exchange."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.comm.blocks import STAYS, Move, gathers
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.flow.chunks.chunking import UNSPLIT, Chunking
from megatron_balance.flow.chunks.pipeline import Begin, ChunkedDispatch, RowShare, mixture
from megatron_balance.flow.chunks.sorting import weights_to_hosts
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.plan import Choices, DispatchPlan
from megatron_balance.flow.reroute import reroute
from megatron_balance.flow.rows import RowOrder, combine, gather_rows, gather_weights, row_order, sending
from megatron_balance.observe.profiling import record_function
from megatron_balance.placement.placement import Placement

Chunks = Callable[[DispatchPlan], Chunking]
"""A plan -> how its tokens are split into chunks, and the order of the chunks' tasks; the same on all ranks."""

Decide = Callable[[DispatchPlan], "Handle"]

Rows = tuple[torch.Tensor, torch.Tensor]
"""Rows [R, H] and their combine weights [R]."""


class Handle(ABC):
    """The decisions about one pass's rows. A pass that repeats another one, for recomputation, has the same handle."""

    @abstractmethod
    def dispatch(self, tokens_TH: torch.Tensor, chosen: Choices) -> Rows:
        """Make one row for each pair of a token and a physical expert that computes for it.

        Args:
            tokens_TH, chosen: tokens of this rank, and their choices.
        """

    @abstractmethod
    def compute(
        self, rows_RH: torch.Tensor, probs_R: torch.Tensor, experts: GroupedExperts, begin: Begin
    ) -> torch.Tensor:
        """Compute each row with its expert, weighted by its combine probability: [R, H].

        Args:
            rows_RH, probs_R: from `dispatch`.
            experts: this rank's experts.
            begin: called when the experts begin and end their computation, forward and backward.
        """

    @abstractmethod
    def combine(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """Add up the rows of each token: [R, H] -> [T, H]."""


class Dispatcher(ABC):
    """Takes every token to its physical experts and brings the results back."""

    @abstractmethod
    def prepare(self, tokens_TH: torch.Tensor, chosen: Choices, placement: Placement | None) -> Decide:
        """Queue what needs no plan; return the function that makes the handle from this pass's plan.

        The plan has the number of tokens from each source to each physical expert. It may come while the device still
        does what was queued; the function does not wait for it.

        Args:
            tokens_TH, chosen: what `Handle.dispatch` will get.
            placement: the plan's, if it is known already.
        """


class AllToAllDispatcher(Dispatcher):
    """Executes the plan with all-to-alls, in one chunk or in several."""

    def __init__(
        self, config: TransformerConfig, parallel: ParallelDispatch, exchange: TokenExchange, chunks: Chunks | None
    ) -> None:
        """`parallel` decides how rows reach all shards of their experts, and which ranks share rows; without `chunks`,
        all rows are one chunk."""
        self.rows_per_token = config.moe_router_topk if config.moe_expert_capacity_factor is None else None
        """The same for all tokens; None: capacities drop some."""
        self.parallel, self.sharding, self.exchange, self.chunks = parallel, parallel.sharding(), exchange, chunks

    def prepare(self, tokens_TH: torch.Tensor, chosen: Choices, placement: Placement | None) -> Decide:
        """Find the order of rows by expert; the plan cuts it, and moves its parts to where they are sent from.

        If no part will move, copy the rows as well.
        """
        map_TE, order, ahead = chosen.map_TE, None, None
        with record_function("dispatch"):
            if self.rows_per_token is not None:
                order = row_order(map_TE, len(map_TE) * self.rows_per_token)
                if placement is not None and self.chunks is None and self._in_place(placement):
                    ahead = _rows(tokens_TH, chosen, order)

        def decide(plan: DispatchPlan) -> Handle:
            with record_function("dispatch"):
                planned = sum(int(plan.tokens_DP[member].sum()) for member in self.parallel.members)
                if order is not None and planned == len(order.token_R):
                    return self._decide(plan, order, ahead)
                return self._decide(plan, row_order(map_TE, planned), None)

        return decide

    def _in_place(self, placement: Placement) -> bool:
        """Return whether rows in the order by expert are in the one in which they are sent, if there is one chunk."""
        return placement.tables.in_place and not self.parallel.splits_rows

    def _decide(self, plan: DispatchPlan, order: RowOrder, ahead: Rows | None) -> "_InChunks":
        parallel, hosts = self.parallel, plan.placement.num_ranks
        chunking = UNSPLIT if self.chunks is None else self.chunks(plan)
        device, source = order.token_R.device, parallel.source
        tokens_CDP = chunking.split(plan).numpy()
        moves: list[Move] = []
        if chunking.chunks > 1 or not self._in_place(plan.placement):
            moves.append(sending(plan.placement, tokens_CDP[:, parallel.members]))
        if chunking.chunks > 1:
            moves.append(weights_to_hosts(tokens_CDP[:, source].reshape(len(tokens_CDP), hosts, -1)))
        forth_and_back = gathers([one for move in moves for one in (move, move.back)], device)
        there, back, to_hosts, to_chunks = [*forth_and_back, *[STAYS] * 4][:4]
        share = None
        if parallel.splits_rows:
            sizes_CM = torch.from_numpy(tokens_CDP[:, parallel.members].sum(2))
            share = RowShare(parallel.groups.tp, sizes_CM, parallel.simultaneous)
        chunked = ChunkedDispatch(
            source=source,
            host=parallel.groups.ep.rank(),
            hosts=hosts,
            exchange=self.exchange,
            sharding=self.sharding,
            tokens_CDP=tokens_CDP,
            chunking=chunking,
            weights_to_hosts=to_hosts,
            weights_to_chunks=to_chunks,
            device=device,
            share=share,
        )
        return _InChunks(order.moved(there, back), chunked, ahead)


@dataclass(eq=False)
class _InChunks(Handle):
    """Rows are grouped by member, chunk, rank and slot; `compute` sends them, chunk by chunk."""

    order: RowOrder
    chunked: ChunkedDispatch
    ahead: Rows | None
    """The rows, if they were made before the plan."""

    def dispatch(self, tokens_TH: torch.Tensor, chosen: Choices) -> Rows:
        # A pass that repeats this one has a graph of its own
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            return ahead
        with record_function("dispatch"):
            return _rows(tokens_TH, chosen, self.order)

    def compute(
        self, rows_RH: torch.Tensor, probs_R: torch.Tensor, experts: GroupedExperts, begin: Begin
    ) -> torch.Tensor:
        return mixture(rows_RH, probs_R, self.chunked, experts=experts, begin=begin)

    def combine(self, rows_RH: torch.Tensor) -> torch.Tensor:
        with record_function("combine"):
            return combine(rows_RH, self.order)


def _rows(tokens_TH: torch.Tensor, chosen: Choices, order: RowOrder) -> Rows:
    return gather_rows(tokens_TH, order), gather_weights(chosen.probs_TE, order)


MEGATRON_DISPATCHERS = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
    "flex": MoEFlexTokenDispatcher,
}


class MegatronDispatcher(Dispatcher):
    """One of megatron-core's own dispatchers (flex is DeepEP).

    These dispatchers treat every expert as a logical one. They therefore get a copy of the config that counts physical
    experts, one copy for each number of slots that placements use.
    """

    def __init__(self, config: TransformerConfig, rank: int, source: int, groups: ProcessGroupCollection) -> None:
        """`rank` and `source`: this rank among the hosts and among the sources."""
        self.config, self.rank, self.source, self.groups = config, rank, source, groups
        self._stages: dict[int, MoETokenDispatcher] = {}

    def _stages_for(self, placement: Placement) -> MoETokenDispatcher:
        slots = placement.slots_per_rank
        if slots not in self._stages:
            config = copy.copy(self.config)
            config.num_moe_experts = placement.num_physical
            indices = list(range(self.rank * slots, (self.rank + 1) * slots))
            self._stages[slots] = MEGATRON_DISPATCHERS[config.moe_token_dispatcher_type](
                slots, indices, config=config, pg_collection=self.groups
            )
        return self._stages[slots]

    def prepare(self, tokens_TH: torch.Tensor, chosen: Choices, placement: Placement | None) -> Decide:
        return lambda plan: _InStages(self._stages_for(plan.placement), plan, self.source)


@dataclass(eq=False)
class _InStages(Handle):
    stages: MoETokenDispatcher
    plan: DispatchPlan
    source: int
    tokens_per_slot: torch.Tensor | None = None

    def dispatch(self, tokens_TH: torch.Tensor, chosen: Choices) -> Rows:
        """Send rows to their experts; return the rows that this rank's experts compute."""
        with record_function("dispatch"):
            probs, chosen_TP = reroute(*chosen, self.plan, self.source)
            rows, probs = self.stages.dispatch_preprocess(tokens_TH, chosen_TP, probs)
            rows, probs = self.stages.token_dispatch(rows, probs)
            rows, self.tokens_per_slot, probs = self.stages.dispatch_postprocess(rows, probs)
            return rows, probs

    def compute(
        self, rows_RH: torch.Tensor, probs_R: torch.Tensor, experts: GroupedExperts, begin: Begin
    ) -> torch.Tensor:
        assert self.tokens_per_slot is not None, "dispatch comes first"
        with record_function("experts"):
            begin("experts")
            if rows_RH.requires_grad:
                rows_RH.register_hook(lambda gradient: begin("dispatch_backward"))
            rows_RH = experts(rows_RH, self.tokens_per_slot.cpu(), probs_R)
            begin("combine")
            if rows_RH.requires_grad:
                rows_RH.register_hook(lambda gradient: begin("experts_backward"))
            return rows_RH

    def combine(self, rows_RH: torch.Tensor) -> torch.Tensor:
        with record_function("combine"):
            stages = self.stages
            return stages.combine_postprocess(stages.token_combine(stages.combine_preprocess(rows_RH)))
