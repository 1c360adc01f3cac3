"""Tokens to the experts that compute them, through those, and back.

Shape suffixes: T tokens of this rank, H hidden, P physical experts, R rows (one per token and chosen slot), C chunks.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.flow.chunking import Chunking, in_chunks
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.pipeline import Begin, Job, mixture
from megatron_balance.flow.plan import DispatchPlan
from megatron_balance.placement.placement import Placement

Chunks = Callable[[DispatchPlan], Chunking]
"""How the tokens of a plan are to be split, and in which order chunks are worked on; the same on all ranks."""


@dataclass(frozen=True, eq=False)
class Routed:
    """This rank's tokens of one forward pass, and where they go."""

    tokens_TH: torch.Tensor
    probs_TP: torch.Tensor
    """[T, P] combine weights."""

    map_TP: torch.Tensor
    """[T, P] bool, the physical experts of each token."""

    plan: DispatchPlan
    """How many tokens go from each rank to each physical expert."""


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

    def __init__(self, config: TransformerConfig, rank: int, exchange: TokenExchange, chunks: Chunks) -> None:
        self.fused = config.moe_permute_fusion
        self.rank, self.exchange, self.chunks = rank, exchange, chunks

    def run(self, routed: Routed, experts: GroupedExperts, begin: Begin) -> torch.Tensor:
        plan, chunking = routed.plan, self.chunks(routed.plan)
        tokens_CDP = chunking.split(plan)
        probs, routing = in_chunks(routed.probs_TP, routed.map_TP, tokens_CDP[:, self.rank])
        # Copy each token once per chosen expert, grouped by chunk, rank and slot; 0.19 returns more (padding)
        rows, probs, token_of_row, *_ = permute(
            routed.tokens_TH,
            routing,
            probs=probs,
            num_out_tokens=int(plan.tokens_DP[self.rank].sum()),
            fused=self.fused,
        )
        plans = [DispatchPlan(plan.placement, tokens_DP) for tokens_DP in tokens_CDP]
        rows = mixture(rows, probs, Job(self.rank, self.exchange, experts, plans, chunking, begin, self.fused))
        shape = routed.tokens_TH.shape
        return unpermute(rows, token_of_row, restore_shape=shape, routing_map=routing, fused=self.fused)


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
        rows, probs = stages.dispatch_preprocess(routed.tokens_TH, routed.map_TP, routed.probs_TP)
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
