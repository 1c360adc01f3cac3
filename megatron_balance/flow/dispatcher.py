"""How a layer's tokens reach their physical experts and come back: one dispatcher for each kind of exchange."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.comm.blocks import STAYS, gathers, prepare_gathers
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.flow.chunks.chunking import UNSPLIT, Chunking
from megatron_balance.flow.chunks.pipeline import (
    Begin,
    ChunkedDispatch,
    Departure,
    RowShare,
    depart,
    mixture,
    sums_by_host,
)
from megatron_balance.flow.chunks.sorting import weights_to_hosts
from megatron_balance.flow.cut import cut, prepare_cuts
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.plan import Choices, DispatchPlan
from megatron_balance.flow.reroute import reroute
from megatron_balance.flow.rows import RowOrder, gather_rows, row_order, sending
from megatron_balance.observe.profiler import record_function
from megatron_balance.placement.placement import Placement

Chunks = Callable[[DispatchPlan], Chunking]
"""A plan -> how its tokens are split into chunks, and the order of the chunks' tasks; the same on all ranks."""

Decide = Callable[[DispatchPlan], "Handle"]

Rows = tuple[torch.Tensor, torch.Tensor]
"""Rows [R, H] and their combine weights [R]."""


class Handle(ABC):
    """The decisions about one pass's rows. A pass that repeats another one, for recomputation, has the same handle."""

    @abstractmethod
    def mixture(self, tokens_TH: torch.Tensor, chosen: Choices, experts: GroupedExperts, begin: Begin) -> torch.Tensor:
        """Compute each token with its experts, and return the sums weighted by combine probabilities: [T, H].

        Args:
            tokens_TH, chosen: tokens of this rank, and their choices.
            experts: this rank's experts.
            begin: called when the experts begin and end their computation, forward and backward.
        """


class Dispatcher(ABC):
    """Takes every token to its physical experts and brings the results back."""

    @abstractmethod
    def prepare(self, tokens_TH: torch.Tensor, chosen: Choices, placement: Placement | None) -> Decide:
        """Queue what needs no plan; return the function that makes the handle from this pass's plan.

        The plan has the number of tokens from each source to each physical expert. It may come while the device still
        does what was queued; the function does not wait for it.

        Args:
            tokens_TH, chosen: what `Handle.mixture` will get.
            placement: the plan's, if it is known already.
        """


class AllToAllDispatcher(Dispatcher):
    """Executes the plan with all-to-alls, in one chunk or in several."""

    def __init__(
        self, config: TransformerConfig, parallel: ParallelDispatch, exchange: TokenExchange, chunks: Chunks | None
    ) -> None:
        """`parallel` decides how rows reach all shards of their experts, and which ranks share rows; without `chunks`,
        all rows are one chunk."""
        self.rows_per_token, self.drops = config.moe_router_topk, config.moe_expert_capacity_factor is not None
        """At most this many rows for a token; fewer only if capacities drop some."""
        self.parallel, self.sharding, self.exchange, self.chunks = parallel, parallel.sharding(), exchange, chunks
        self.reads_all_splits = exchange.reads_all_splits
        prepare_gathers()
        if torch.cuda.is_available():
            prepare_cuts()

    def prepare(self, tokens_TH: torch.Tensor, chosen: Choices, placement: Placement | None) -> Decide:
        """Find the order of rows by expert; the plan cuts it, and moves its parts to where they are sent from.

        If no part will move, copy the rows as well. When the plan is there, the first exchange of rows starts at once.
        """
        # `mixture` gives the tokens their gradient
        tokens_TH = tokens_TH.detach()
        map_TE = chosen.map_TE
        order = None
        ahead = None
        with record_function("dispatch"):
            # Not len: torch's is a function of Python
            most_rows = map_TE.shape[0] * self.rows_per_token
            if not self.drops:
                order = row_order(map_TE, most_rows)
                if placement is not None and self.chunks is None and self._in_place(placement):
                    ahead = gather_rows(tokens_TH, order)

        def ordered(planned: int) -> RowOrder:
            return order if order is not None and planned == len(order) else row_order(map_TE, planned)

        def decide(plan: DispatchPlan) -> Handle:
            nonlocal ahead
            with record_function("dispatch"):
                sent, chunked = self._decide(plan, ordered, most_rows, map_TE.device)
                rows_RH = ahead if ahead is not None and sent is order else gather_rows(tokens_TH, sent)
                ahead = None
                return _InChunks(sent, chunked, [depart(rows_RH, chunked)])

        return decide

    def _in_place(self, placement: Placement) -> bool:
        """Return whether rows in the order by expert are in the one in which they are sent, if there is one chunk."""
        return placement.tables.in_place and not self.parallel.splits_rows

    def _decide(
        self, plan: DispatchPlan, ordered: Callable[[int], RowOrder], most_rows: int, device: torch.device
    ) -> tuple[RowOrder, ChunkedDispatch]:
        """Return the order of the rows that are sent, and where they go, given the order of some number of rows."""
        chunking = UNSPLIT if self.chunks is None else self.chunks(plan)
        ranks = plan.placement.num_ranks
        one_by_one = plan.counts_DE.shape[0] == ranks and not self.parallel.splits_rows
        if device.type == "cpu" or chunking.chunks > 1 or not one_by_one:
            return self._decide_by_matrix(plan, chunking, ordered, device)
        found = cut(plan, self.parallel.source, most_rows, device, self.reads_all_splits)
        chunked = self._chunked(chunking, found.received_DS[None], [torch.from_numpy(found.splits_DH)], device)
        return ordered(found.rows).moved(found.there), chunked

    def _decide_by_matrix(
        self, plan: DispatchPlan, chunking: Chunking, ordered: Callable[[int], RowOrder], device: torch.device
    ) -> tuple[RowOrder, ChunkedDispatch]:
        """Do the same for any number of chunks and of sources."""
        parallel = self.parallel
        hosts = plan.placement.num_ranks
        tokens_CDP = chunking.split(plan).numpy()
        there = STAYS
        back = None
        moved = dict[str, Any]()
        if chunking.chunks > 1:
            moves = [
                sending(plan.placement, tokens_CDP[:, parallel.members]),
                weights_to_hosts(tokens_CDP[:, parallel.source].reshape(len(tokens_CDP), hosts, -1)),
            ]
            there, back, to_hosts, to_chunks = gathers([one for move in moves for one in (move, move.back)], device)
            moved |= {"weights_to_hosts": to_hosts, "weights_to_chunks": to_chunks}
        elif not self._in_place(plan.placement):
            (there,) = gathers([sending(plan.placement, tokens_CDP[:, parallel.members])], device)
        if parallel.splits_rows:
            sizes_CM = torch.from_numpy(tokens_CDP[:, parallel.members].sum(2))
            moved["share"] = RowShare(parallel.groups.tp, sizes_CM, parallel.simultaneous)
        received_CDS = tokens_CDP.reshape(*tokens_CDP.shape[:2], hosts, -1)[:, :, parallel.groups.ep.rank()]
        splits = [torch.from_numpy(splits_DH) for splits_DH in sums_by_host(tokens_CDP, hosts)]
        chunked = self._chunked(chunking, received_CDS, splits, device, **moved)
        return ordered(int(tokens_CDP[:, parallel.members].sum())).moved(there, back), chunked

    def _chunked(
        self,
        chunking: Chunking,
        received_CDS: np.ndarray,
        splits: list[torch.Tensor],
        device: torch.device,
        **more: Any,
    ) -> ChunkedDispatch:
        return ChunkedDispatch(
            source=self.parallel.source,
            exchange=self.exchange,
            sharding=self.sharding,
            received_CDS=received_CDS,
            splits=splits,
            chunking=chunking,
            device=device,
            **more,
        )


@dataclass(eq=False)
class _InChunks(Handle):
    """Rows are grouped by member, chunk, rank and slot, and are sent chunk by chunk."""

    order: RowOrder
    chunked: ChunkedDispatch
    departed: list[Departure]
    """The rows of the first pass, which have left; a pass that repeats it sends them again."""

    def mixture(self, tokens_TH: torch.Tensor, chosen: Choices, experts: GroupedExperts, begin: Begin) -> torch.Tensor:
        return mixture(
            tokens_TH,
            chosen.probs_TE,
            self.order,
            self.chunked,
            experts=experts,
            begin=begin,
            departed=self.departed,
        )


MEGATRON_DISPATCHERS = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
    "flex": MoEFlexTokenDispatcher,
}


class MegatronDispatcher(Dispatcher):
    """One of megatron-core's own dispatchers; flex is DeepEP or HybridEP, and waits for the numbers of rows.

    These dispatchers treat every expert as a logical one. They therefore get a copy of the config that counts physical
    experts, one copy for each number of slots that placements use.
    """

    def __init__(self, config: TransformerConfig, rank: int, source: int, groups: ProcessGroupCollection) -> None:
        """`rank` and `source`: this rank among the hosts and among the sources."""
        self.config = config
        self.rank = rank
        self.source = source
        self.groups = groups
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


class AtOnce(Handle):
    """All rows are sent before experts compute, and all results after that."""

    tokens_per_slot: torch.Tensor | None = None
    """What `dispatch` sets, as `GroupedExperts` takes it."""

    @abstractmethod
    def dispatch(self, tokens_TH: torch.Tensor, chosen: Choices) -> Rows:
        """Make a row for each pair of a token and a physical expert, and send it; return the rows that arrive."""

    @abstractmethod
    def combine(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """Send results back, and add up those of each token: [R, H] -> [T, H]."""

    def mixture(self, tokens_TH: torch.Tensor, chosen: Choices, experts: GroupedExperts, begin: Begin) -> torch.Tensor:
        rows_RH, probs_R = self.dispatch(tokens_TH, chosen)
        assert self.tokens_per_slot is not None, "set by dispatch"
        return self.combine(self._compute(rows_RH, probs_R, self.tokens_per_slot, experts, begin))

    def _compute(
        self,
        rows_RH: torch.Tensor,
        probs_R: torch.Tensor,
        tokens_per_slot: torch.Tensor,
        experts: GroupedExperts,
        begin: Begin,
    ) -> torch.Tensor:
        with record_function("experts"):
            begin("experts")
            if rows_RH.requires_grad:
                rows_RH.register_hook(lambda gradient: begin("dispatch_backward"))
            rows_RH = experts(rows_RH, tokens_per_slot, probs_R)
            begin("combine")
            if rows_RH.requires_grad:
                rows_RH.register_hook(lambda gradient: begin("experts_backward"))
            return rows_RH


@dataclass(eq=False)
class _InStages(AtOnce):
    stages: MoETokenDispatcher
    plan: DispatchPlan
    source: int

    def dispatch(self, tokens_TH: torch.Tensor, chosen: Choices) -> Rows:
        """Send rows to their experts; return the rows that this rank's experts compute."""
        with record_function("dispatch"):
            probs, chosen_TP = reroute(*chosen, self.plan, self.source)
            rows, probs = self.stages.dispatch_preprocess(tokens_TH, chosen_TP, probs)
            rows, probs = self.stages.token_dispatch(rows, probs)
            rows, tokens_per_slot, probs = self.stages.dispatch_postprocess(rows, probs)
            self.tokens_per_slot = tokens_per_slot.cpu()
            return rows, probs

    def combine(self, rows_RH: torch.Tensor) -> torch.Tensor:
        with record_function("combine"):
            stages = self.stages
            return stages.combine_postprocess(stages.token_combine(stages.combine_preprocess(rows_RH)))
