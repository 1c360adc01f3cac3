"""Tokens to the experts that compute them, through those, and back.

Shape suffixes: T tokens of this rank, H hidden, P physical experts, R rows (one per token and chosen slot), C chunks.
"""

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
from megatron_balance.flow.chunks.pipeline import Begin, Job, RowShare, mixture
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.plan import DispatchPlan
from megatron_balance.flow.rows import fused_rows_of, rows_of
from megatron_balance.placement.placement import Placement

Chunks = Callable[[DispatchPlan], Chunking]
"""How the tokens of a plan are to be split, and in which order chunks are worked on; the same on all ranks."""


@dataclass(frozen=True, eq=False)
class Routed:
    """This rank's tokens of one forward pass, and where they go."""

    tokens_TH: torch.Tensor
    parts: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    """What each source sends of them: [T, P] combine weights, and [T, P] bool, the physical experts of each token. This
    rank alone; or all ranks that have the same tokens, where each sends a share of their rows."""

    plan: DispatchPlan
    """How many tokens go from each source to each physical expert."""


class Dispatcher(ABC):
    """Takes every token to its physical experts and brings the results back."""

    @abstractmethod
    def run(self, routed: Routed, experts: GroupedExperts, begin: Begin) -> torch.Tensor:
        """Each token through its physical experts: the sum of their weighted outputs.

        Args:
            experts: of this rank.
            begin: is told when they compute, forward and backward.

        Returns:
            [T, H].
        """


class AllToAllDispatcher(Dispatcher):
    """Executes the plan over all-to-alls, in one chunk or in several."""

    def __init__(
        self, config: TransformerConfig, path: ParallelDispatch, exchange: TokenExchange, chunks: Chunks
    ) -> None:
        """`path` says how rows get to all shards of their experts, and who shares them."""
        self.fused = config.moe_permute_fusion
        self.path, self.sharding, self.exchange, self.chunks = path, path.sharding(), exchange, chunks

    def run(self, routed: Routed, experts: GroupedExperts, begin: Begin) -> torch.Tensor:
        plan, chunking = routed.plan, self.chunks(routed.plan)
        tokens_CDP = chunking.split(plan)
        split = [in_chunks(*part, tokens_CDP[:, source]) for source, part in routed.parts.items()]
        probs, routing = (torch.cat(tensors, dim=1) for tensors in zip(*split, strict=True))
        sizes_CM = tokens_CDP[:, [*routed.parts]].sum(2)
        # Each token once per chosen expert, grouped by member, chunk, rank and slot
        copies = fused_rows_of if self.fused else rows_of
        rows, probs, combine = copies(routed.tokens_TH, probs, routing, int(sizes_CM.sum()))
        job = Job(
            self.path.source,
            self.path.groups.ep.rank(),
            self.exchange,
            self.sharding,
            experts,
            [DispatchPlan(plan.placement, tokens_DP) for tokens_DP in tokens_CDP],
            chunking,
            begin,
            self.fused,
            RowShare(self.path.groups.tp, sizes_CM, self.path.simultaneous) if len(routed.parts) > 1 else None,
        )
        return combine(mixture(rows, probs, job))


MEGATRON_DISPATCHERS = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
    "flex": MoEFlexTokenDispatcher,
}


class MegatronDispatcher(Dispatcher):
    """One of megatron-core's own dispatchers (flex is DeepEP).

    Those take every expert that they are told of for a logical one, so they are told of the physical experts: by a copy
    of the config, one for each number of slots that placements have in use.
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

    def run(self, routed: Routed, experts: GroupedExperts, begin: Begin) -> torch.Tensor:
        stages = self._stages_for(routed.plan.placement)
        ((probs, routing),) = routed.parts.values()
        rows, probs = stages.dispatch_preprocess(routed.tokens_TH, routing, probs)
        rows, probs = stages.token_dispatch(rows, probs)
        rows, tokens_per_slot, probs = stages.dispatch_postprocess(rows, probs)
        begin("experts")
        if rows.requires_grad:
            rows.register_hook(lambda gradient: begin("dispatch_backward"))
        rows = experts(rows, tokens_per_slot.cpu(), probs)
        begin("combine")
        if rows.requires_grad:
            rows.register_hook(lambda gradient: begin("experts_backward"))
        return stages.combine_postprocess(stages.token_combine(stages.combine_preprocess(rows)))
