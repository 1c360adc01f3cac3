"""How a layer's tokens reach their physical experts and come back: one dispatcher for each kind of exchange.

Each step returns what the next one needs:

    Dispatcher.prepare -> PendingRows.dispatch -> SentRows.compute -> ComputedRows.combine

What a plan decides is a Route. `PendingRows` keeps it for the pass that repeats this one.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

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

from megatron_balance.comm.blocks import STAYS, BlockMove, gathers, prepare_gathers
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.flow.chunks.order import UNSPLIT, Chunking
from megatron_balance.flow.chunks.pipeline import Begin, ChunkedRoute, RowShare
from megatron_balance.flow.cut import cut, prepare_cuts
from megatron_balance.flow.device_plan import DevicePlan
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.plan import Choices, DispatchPlan, sums_by_host
from megatron_balance.flow.reroute import reroute
from megatron_balance.flow.rows import RowOrder, gather_rows, row_order, sending
from megatron_balance.observe.profiler import record_function
from megatron_balance.placement.placement import Placement

Plan = DispatchPlan | DevicePlan


class ComputedRows(Protocol):
    """A pass whose rows the experts compute."""

    def combine(self) -> torch.Tensor:
        """Send results back; return each token's sum weighted by its combine probabilities: [T, H]."""
        ...


class SentRows(Protocol):
    """A pass whose rows are on their way to their experts."""

    def compute(self, experts: GroupedExperts, begin: Begin) -> ComputedRows:
        """Compute the rows that arrive with this rank's experts."""
        ...


class Route(Protocol):
    """Where the rows of a pass go. A pass that repeats it, for recomputation, takes the same route."""

    def dispatch(self, tokens_TH: torch.Tensor, choices: Choices) -> SentRows:
        """Make a row for each pair of a token and a chosen expert, and send it."""
        ...


class PendingRows:
    """The rows of a pass, which wait for their plan."""

    def __init__(self, decide: Callable[[Any], Route]) -> None:
        """`decide` makes the route from the plan."""
        self._decide: Callable[[Any], Route] | None = decide
        self._route: Route
        self._placement: Placement

    def dispatch(self, plan: Plan, tokens_TH: torch.Tensor, choices: Choices) -> SentRows:
        """Send the rows, by the plan of the pass that comes first.

        The plan may come while the device still does what was queued; nothing here waits for it.

        Args:
            plan: the number of tokens from each source to each physical expert.
            tokens_TH, choices: as in `Dispatcher.prepare`; those of a repeated pass are equal.
        """
        with record_function("dispatch"):
            if self._decide is not None:
                self._route = self._decide(plan)
                self._placement = plan.placement
                self._decide = None
            assert self._placement is plan.placement, "a placement changes between iterations only"
            return self._route.dispatch(tokens_TH, choices)


class Dispatcher(ABC):
    """Takes every token to its physical experts and brings the results back."""

    plans_on_host = True
    """Whether the host decides how many rows go where, and therefore waits for the load."""

    @abstractmethod
    def prepare(self, tokens_TH: torch.Tensor, choices: Choices, placement: Placement | None) -> PendingRows:
        """Queue what needs no plan.

        Args:
            tokens_TH, choices: tokens of this rank, and the experts that they chose.
            placement: the plan's, if it is known already.
        """


class _PreparedRows(NamedTuple):
    """What a device finds before the plan is known."""

    map_TE: torch.Tensor
    most_rows: int
    order: RowOrder | None
    """The order of `most_rows` rows by expert; None if there may be fewer."""
    copied: list[torch.Tensor]
    """The rows in this order, if they are copied already."""

    def ordered(self, rows: int) -> RowOrder:
        """Return the order by expert of so many rows."""
        return self.order if self.order is not None and rows == len(self.order) else row_order(self.map_TE, rows)


class AllToAllDispatcher(Dispatcher):
    """Executes the plan with all-to-alls, in one chunk or in several."""

    def __init__(
        self,
        config: TransformerConfig,
        parallel: ParallelDispatch,
        exchange: TokenExchange,
        chunks: Callable[[DispatchPlan], Chunking] | None,
    ) -> None:
        """
        Args:
            parallel: decides how rows reach all shards of their experts, and which ranks share rows.
            chunks: returns how the tokens of a plan are split, the same on all ranks; None: all rows are one chunk.
        """
        self.rows_per_token = config.moe_router_topk
        self.drops = config.moe_expert_capacity_factor is not None
        """Whether tokens may have fewer rows, because capacities drop some."""
        self.parallel = parallel
        self.sharding = parallel.sharding()
        self.exchange = exchange
        self.chunks = chunks
        self.reads_all_splits = exchange.reads_all_splits
        prepare_gathers()
        if torch.cuda.is_available():
            prepare_cuts()

    def prepare(self, tokens_TH: torch.Tensor, choices: Choices, placement: Placement | None) -> PendingRows:
        """Find the order of rows by expert; the plan cuts it, and moves its parts to where they are sent from.

        If no part will move, copy the rows as well. When the plan is there, the first exchange of rows starts at once.
        """
        map_TE = choices.map_TE
        order = None
        copied = []
        with record_function("dispatch"):
            # Not len: torch's is a function of Python
            most_rows = map_TE.shape[0] * self.rows_per_token
            if not self.drops:
                order = row_order(map_TE, most_rows)
                if placement is not None and self.chunks is None and self._in_place(placement):
                    # The autograd function of the whole mixture gives the tokens their gradient
                    copied.append(gather_rows(tokens_TH.detach(), order))
        return PendingRows(partial(self._decide, _PreparedRows(map_TE, most_rows, order, copied)))

    def _in_place(self, placement: Placement) -> bool:
        """Return whether rows in the order by expert are in the one in which they are sent, if there is one chunk."""
        return placement.tables.in_place and not self.parallel.splits_rows

    def _decide(self, prepared: _PreparedRows, plan: DispatchPlan) -> ChunkedRoute:
        chunking = UNSPLIT if self.chunks is None else self.chunks(plan)
        one_by_one = plan.counts_DE.shape[0] == plan.placement.num_ranks and not self.parallel.splits_rows
        if prepared.map_TE.is_cpu or chunking.chunks > 1 or not one_by_one:
            return self._decide_by_matrix(prepared, plan, chunking)
        device = prepared.map_TE.device
        found = cut(plan, self.parallel.source, prepared.most_rows, device, self.reads_all_splits)
        order = prepared.ordered(found.rows).moved(found.move)
        return self._route(prepared, order, chunking, found.received_DS[None], found.splits_DW[None])

    def _decide_by_matrix(self, prepared: _PreparedRows, plan: DispatchPlan, chunking: Chunking) -> ChunkedRoute:
        """Return the same route as the loop of `cut`, for any number of chunks and of sources."""
        parallel = self.parallel
        device = prepared.map_TE.device
        hosts = plan.placement.num_ranks
        tokens_CDP = chunking.split(plan).numpy()
        members_CDP = tokens_CDP[:, parallel.members]
        to_sending = STAYS
        back = None
        more = dict[str, Any]()
        if chunking.chunks > 1:
            own_CWS = tokens_CDP[:, parallel.source].reshape(len(tokens_CDP), hosts, -1)
            moves = [sending(plan.placement, members_CDP), BlockMove.transposed(own_CWS, (1, 0, 2))]
            to_sending, back, to_hosts, to_chunks = gathers(
                [one for move in moves for one in (move, move.back)], device
            )
            more |= {"weights_to_hosts": to_hosts, "weights_to_chunks": to_chunks}
        elif not self._in_place(plan.placement):
            (to_sending,) = gathers([sending(plan.placement, members_CDP)], device)
        if parallel.splits_rows:
            sizes_CD = torch.from_numpy(members_CDP.sum(2))
            more["share"] = RowShare(parallel.groups.tp, sizes_CD, parallel.simultaneous)
        received_CDS = tokens_CDP.reshape(*tokens_CDP.shape[:2], hosts, -1)[:, :, parallel.groups.ep.rank()]
        order = prepared.ordered(int(members_CDP.sum())).moved(to_sending, back)
        return self._route(prepared, order, chunking, received_CDS, sums_by_host(tokens_CDP, hosts), **more)

    def _route(
        self,
        prepared: _PreparedRows,
        order: RowOrder,
        chunking: Chunking,
        received_CDS: np.ndarray,
        splits_CDW: np.ndarray,
        **more: Any,
    ) -> ChunkedRoute:
        return ChunkedRoute(
            order=order,
            source=self.parallel.source,
            exchange=self.exchange,
            sharding=self.sharding,
            received_CDS=received_CDS,
            splits=[torch.from_numpy(splits_DW) for splits_DW in splits_CDW],
            chunking=chunking,
            device=prepared.map_TE.device,
            copied=prepared.copied if order is prepared.order else [],
            **more,
        )


class ArrivedRows(NamedTuple):
    """All rows of a pass, at their experts: those of its tokens are sent before experts compute."""

    rows_RH: torch.Tensor
    probs_R: torch.Tensor
    """Combine weights of the rows."""
    tokens_per_slot: torch.Tensor
    """As `GroupedExperts` takes it."""
    combine: Callable[[torch.Tensor], torch.Tensor]
    """Sends results back, and adds up those of each token: [R, H] -> [T, H]."""

    def compute(self, experts: GroupedExperts, begin: Begin) -> "ResultRows":
        with record_function("experts"):
            begin("experts")
            if self.rows_RH.requires_grad:
                self.rows_RH.register_hook(lambda gradient: begin("dispatch_backward"))
            rows_RH = experts(self.rows_RH, self.tokens_per_slot, self.probs_R)
            begin("combine")
            if rows_RH.requires_grad:
                rows_RH.register_hook(lambda gradient: begin("experts_backward"))
            return ResultRows(rows_RH, self.combine)


class ResultRows(NamedTuple):
    """The experts' results for `ArrivedRows`."""

    rows_RH: torch.Tensor
    send_back: Callable[[torch.Tensor], torch.Tensor]

    def combine(self) -> torch.Tensor:
        with record_function("combine"):
            return self.send_back(self.rows_RH)


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

    def prepare(self, tokens_TH: torch.Tensor, choices: Choices, placement: Placement | None) -> PendingRows:
        return PendingRows(self._decide)

    def _decide(self, plan: DispatchPlan) -> "_InStages":
        slots = plan.placement.slots_per_rank
        if slots not in self._stages:
            config = copy.copy(self.config)
            config.num_moe_experts = plan.placement.num_physical
            indices = list(range(self.rank * slots, (self.rank + 1) * slots))
            self._stages[slots] = MEGATRON_DISPATCHERS[config.moe_token_dispatcher_type](
                slots, indices, config=config, pg_collection=self.groups
            )
        return _InStages(self._stages[slots], plan, self.source)


@dataclass(frozen=True, eq=False)
class _InStages:
    stages: MoETokenDispatcher
    plan: DispatchPlan
    source: int

    def dispatch(self, tokens_TH: torch.Tensor, choices: Choices) -> ArrivedRows:
        probs, chosen_TP = reroute(*choices, self.plan, self.source)
        rows, probs = self.stages.dispatch_preprocess(tokens_TH, chosen_TP, probs)
        rows, probs = self.stages.token_dispatch(rows, probs)
        rows, tokens_per_slot, probs = self.stages.dispatch_postprocess(rows, probs)
        return ArrivedRows(rows, probs, tokens_per_slot.cpu(), self._combine)

    def _combine(self, rows_RH: torch.Tensor) -> torch.Tensor:
        return self.stages.combine_postprocess(self.stages.token_combine(self.stages.combine_preprocess(rows_RH)))
