"""Tokens to the ranks that compute them, and back: two verbs and one value between them.

`dispatch(...)` returns what the experts need and a frozen handle; `combine(output, handle)` undoes it.
Shape suffixes: T tokens of this rank, H hidden, P physical experts, R rows received by this rank (one per token and
chosen slot), D expert-parallel ranks, S slots per rank.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.flow.plan import DispatchPlan
from megatron_balance.placement.placement import Placement


@dataclass(frozen=True, eq=False)
class Dispatched:
    """What this rank's experts compute."""

    rows_RH: torch.Tensor
    """[R, H], grouped by slot."""

    probs_R: torch.Tensor
    """[R] combine weight of each row."""

    tokens_per_slot: torch.Tensor
    """[S] int64 on the host: rows of each slot; sums to R."""


@dataclass(frozen=True, eq=False)
class CombineHandle:
    """What combine has to know of the dispatch it undoes."""

    plan: DispatchPlan
    map_TP: torch.Tensor
    token_of_row: torch.Tensor
    """[rows sent] source token of each row, in the order in which they were sent."""


class Dispatcher(ABC):
    """Takes every token to its physical experts and brings the results back."""

    @abstractmethod
    def dispatch(
        self, tokens_TH: torch.Tensor, probs_TP: torch.Tensor, map_TP: torch.Tensor, plan: DispatchPlan
    ) -> tuple[Dispatched, object]:
        """Send each token to the physical experts that map_TP [T, P] bool names."""

    @abstractmethod
    def combine(self, rows_RH: torch.Tensor, handle: object) -> torch.Tensor:
        """Send the experts' (already weighted) rows back and sum them per token: [T, H]."""


class AllToAllDispatcher(Dispatcher):
    """Executes the plan over all-to-alls."""

    def __init__(self, config: TransformerConfig, rank: int, exchange: TokenExchange) -> None:
        self.fused = config.moe_permute_fusion
        self.rank = rank
        self.exchange = exchange

    def dispatch(
        self, tokens_TH: torch.Tensor, probs_TP: torch.Tensor, map_TP: torch.Tensor, plan: DispatchPlan
    ) -> tuple[Dispatched, CombineHandle]:
        # Copy each token once per chosen expert, grouped by destination rank and slot; 0.19 returns more (padding)
        rows, probs, token_of_row, *_ = permute(
            tokens_TH, map_TP, probs=probs_TP, num_out_tokens=int(plan.tokens_DP[self.rank].sum()), fused=self.fused
        )
        rows = self.exchange.dispatch(rows, plan.splits_DD)
        probs = self.exchange.probs(probs, plan.splits_DD)
        # Rows arrive grouped by source, then slot; experts want them grouped by slot
        rows, probs = self._regroup(rows, plan.received_DS(self.rank), probs)
        return Dispatched(rows, probs, plan.tokens_per_slot(self.rank)), CombineHandle(plan, map_TP, token_of_row)

    def combine(self, rows_RH: torch.Tensor, handle: CombineHandle) -> torch.Tensor:
        plan = handle.plan
        rows, _ = self._regroup(rows_RH, plan.received_DS(self.rank).T)
        rows = self.exchange.combine(rows, plan.splits_DD.T)
        return unpermute(
            rows,
            handle.token_of_row,
            restore_shape=torch.Size((handle.map_TP.shape[0], rows_RH.shape[1])),
            routing_map=handle.map_TP,
            fused=self.fused,
        )

    def _regroup(
        self, rows: torch.Tensor, sizes_AB: torch.Tensor, probs: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks laid out as [A, B] (sizes in `sizes_AB`) -> laid out as [B, A]."""
        if 1 in sizes_AB.shape:
            return rows, probs
        order = torch.arange(sizes_AB.numel()).view(sizes_AB.shape).T.reshape(-1)
        return sort_chunks_by_idxs(rows, sizes_AB.reshape(-1), order, probs=probs, fused=self.fused)


MEGATRON_DISPATCHERS = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
    "flex": MoEFlexTokenDispatcher,
}


class MegatronDispatcher(Dispatcher):
    """One of megatron-core's own dispatchers (flex is DeepEP) behind the two verbs.

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

    def dispatch(
        self, tokens_TH: torch.Tensor, probs_TP: torch.Tensor, map_TP: torch.Tensor, plan: DispatchPlan
    ) -> tuple[Dispatched, MoETokenDispatcher]:
        stages = self._stages_for(plan.placement)
        rows, probs = stages.dispatch_preprocess(tokens_TH, map_TP, probs_TP)
        rows, probs = stages.token_dispatch(rows, probs)
        rows, tokens_per_slot, probs = stages.dispatch_postprocess(rows, probs)
        return Dispatched(rows, probs, tokens_per_slot.cpu()), stages

    def combine(self, rows_RH: torch.Tensor, handle: MoETokenDispatcher) -> torch.Tensor:
        return handle.combine_postprocess(handle.token_combine(handle.combine_preprocess(rows_RH)))
