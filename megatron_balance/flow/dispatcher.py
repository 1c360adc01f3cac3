"""How a layer's tokens reach their physical experts and come back: one dispatcher for each kind of exchange."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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

from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.flow.chunks.chunking import Chunking, in_chunks
from megatron_balance.flow.chunks.pipeline import Begin, ChunkedDispatch, RowShare, mixture
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.plan import Choices, DispatchPlan
from megatron_balance.flow.rows import fused_rows_of, rows_of
from megatron_balance.observe.profiling import record_function
from megatron_balance.placement.placement import Placement

Chunks = Callable[[DispatchPlan], Chunking]
"""A plan -> how its tokens are split into chunks, and the order of the chunks' tasks; the same on all ranks."""


class Handle(ABC):
    """The decisions of `dispatch` about one pass's rows, for the two steps that follow it."""

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
    def dispatch(
        self, tokens_TH: torch.Tensor, routing: Mapping[int, Choices], plan: DispatchPlan
    ) -> tuple[torch.Tensor, torch.Tensor, Handle]:
        """Make one row for each pair of a token and a physical expert that it chose.

        Args:
            tokens_TH: tokens of this rank.
            routing: the choices that each source sends. The sources are this rank alone, or all ranks that have the
                same tokens, each of which sends a share of their rows.
            plan: number of tokens from each source to each physical expert.

        Returns:
            rows [R, H], their combine weights [R], and the handle that computes and combines them.
        """


class AllToAllDispatcher(Dispatcher):
    """Executes the plan with all-to-alls, in one chunk or in several."""

    def __init__(
        self, config: TransformerConfig, parallel: ParallelDispatch, exchange: TokenExchange, chunks: Chunks
    ) -> None:
        """`parallel` decides how rows reach all shards of their experts, and which ranks share rows."""
        self.fused = config.moe_permute_fusion
        self.parallel, self.sharding, self.exchange, self.chunks = parallel, parallel.sharding(), exchange, chunks

    def dispatch(
        self, tokens_TH: torch.Tensor, routing: Mapping[int, Choices], plan: DispatchPlan
    ) -> tuple[torch.Tensor, torch.Tensor, Handle]:
        """Group rows by member, chunk, rank and slot; `compute` sends them, chunk by chunk."""
        with record_function("dispatch"):
            chunking, groups = self.chunks(plan), self.parallel.groups
            tokens_CDP = chunking.split(plan)
            split = [in_chunks(*choices, tokens_CDP[:, source]) for source, choices in routing.items()]
            probs, chosen = (torch.cat(tensors, dim=1) for tensors in zip(*split, strict=True))
            sizes_CM = tokens_CDP[:, [*routing]].sum(2)
            copies = fused_rows_of if self.fused else rows_of
            rows = copies(tokens_TH, probs, chosen, int(sizes_CM.sum()))
            chunked = ChunkedDispatch(
                source=self.parallel.source,
                host=groups.ep.rank(),
                exchange=self.exchange,
                sharding=self.sharding,
                plans=[DispatchPlan(plan.placement, tokens_DP) for tokens_DP in tokens_CDP],
                chunking=chunking,
                fused=self.fused,
                share=RowShare(groups.tp, sizes_CM, self.parallel.simultaneous) if len(routing) > 1 else None,
            )
            return rows.rows_RH, rows.probs_R, _InChunks(chunked, rows.combine)


@dataclass(frozen=True, eq=False)
class _InChunks(Handle):
    chunked: ChunkedDispatch
    sums: Callable[[torch.Tensor], torch.Tensor]

    def compute(
        self, rows_RH: torch.Tensor, probs_R: torch.Tensor, experts: GroupedExperts, begin: Begin
    ) -> torch.Tensor:
        return mixture(rows_RH, probs_R, self.chunked, experts=experts, begin=begin)

    def combine(self, rows_RH: torch.Tensor) -> torch.Tensor:
        with record_function("combine"):
            return self.sums(rows_RH)


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

    def __init__(self, config: TransformerConfig, rank: int, groups: ProcessGroupCollection) -> None:
        self.config, self.rank, self.groups = config, rank, groups
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

    def dispatch(
        self, tokens_TH: torch.Tensor, routing: Mapping[int, Choices], plan: DispatchPlan
    ) -> tuple[torch.Tensor, torch.Tensor, Handle]:
        """Send rows to their experts; return the rows that this rank's experts compute."""
        with record_function("dispatch"):
            stages = self._stages_for(plan.placement)
            ((probs, chosen),) = routing.values()
            rows, probs = stages.dispatch_preprocess(tokens_TH, chosen, probs)
            rows, probs = stages.token_dispatch(rows, probs)
            rows, tokens_per_slot, probs = stages.dispatch_postprocess(rows, probs)
            return rows, probs, _InStages(stages, tokens_per_slot)


@dataclass(frozen=True, eq=False)
class _InStages(Handle):
    stages: MoETokenDispatcher
    tokens_per_slot: torch.Tensor

    def compute(
        self, rows_RH: torch.Tensor, probs_R: torch.Tensor, experts: GroupedExperts, begin: Begin
    ) -> torch.Tensor:
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
