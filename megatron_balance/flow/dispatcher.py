"""Dispatchers take a layer's tokens to their physical experts and back: one class for each kind of exchange.

Each step returns the object for the next step:

    Dispatcher.prepare -> PendingRows.dispatch -> SentChunks.compute or ArrivedRows.compute -> Combine

`PendingRows` keeps the Route that a plan determines, for the recomputation of the pass.
"""

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

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

from megatron_balance.comm.alltoall import keep_until_read
from megatron_balance.comm.blocks import STAYS, BlockMove, gathers, write_blocks
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.flow.chunks.order import UNSPLIT, Chunking
from megatron_balance.flow.chunks.pipeline import Begin, ChunkedRoute, Combine, SentChunks
from megatron_balance.flow.cut import RankCut, cut, cut_loop
from megatron_balance.flow.device_plan import DevicePlan
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.plan import Choices, DispatchPlan
from megatron_balance.flow.reroute import reroute
from megatron_balance.flow.rows import RowOrder, gather_rows, row_order, sending
from megatron_balance.observe.profiler import record_function
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import sums_by_host

RowPlan = DispatchPlan | DevicePlan


Route = Callable[[torch.Tensor, Choices], "SentChunks | ArrivedRows"]
"""(tokens [T, H], choices) -> rows in flight, one per token and chosen expert. Recomputation takes the same route."""


class PendingRows:
    """Rows of a pass that wait for the dispatch plan."""

    def __init__(self, decide: Callable[[Any], Route]) -> None:
        self._decide: Callable[[Any], Route] | None = decide
        self._route: Route
        self._placement: Placement

    def dispatch(self, plan: RowPlan, tokens_TH: torch.Tensor, choices: Choices) -> "SentChunks | ArrivedRows":
        """Send the rows by the plan of the first pass; recomputation repeats its route. Nothing here waits for the
        device. `tokens_TH` and `choices` are as in `Dispatcher.prepare`; recomputation passes equal values."""
        with record_function("dispatch"):
            if self._decide is not None:
                self._route = self._decide(plan)
                self._placement = plan.placement
                self._decide = None
            assert self._placement is plan.placement, "a placement changes between iterations only"
            return self._route(tokens_TH, choices)


class Dispatcher(ABC):
    """Takes every token to its physical experts and brings the results back."""

    plans_on_host = True
    """Whether the host decides the destinations of rows, and therefore waits for the load."""

    @abstractmethod
    def prepare(self, tokens_TH: torch.Tensor, choices: Choices, placement: Placement | None) -> PendingRows:
        """Queue the work on this rank's tokens that needs no plan; `placement` is the plan's, if already known."""


class AllToAllDispatcher(Dispatcher):
    """Executes the plan with all-to-alls, in one chunk or in several."""

    def __init__(
        self,
        config: TransformerConfig,
        parallel: ParallelDispatch,
        exchange: TokenExchange,
        chunks: Callable[[DispatchPlan], Chunking] | None,
    ) -> None:
        """`chunks` returns the chunking of a plan, the same on all ranks; None: one chunk."""
        self.rows_per_token = config.moe_router_topk
        self.drops = config.moe_expert_capacity_factor is not None
        """Whether tokens may have fewer rows, because of capacities."""
        self.parallel = parallel
        self.sharding = parallel.sharding()
        self.exchange = exchange
        self.chunks = chunks
        self.reads_all_splits = exchange.reads_all_splits
        # The first forward pass must not wait for numba
        write_blocks.prepare()
        if torch.cuda.is_available():
            cut_loop.prepare()

    def prepare(self, tokens_TH: torch.Tensor, choices: Choices, placement: Placement | None) -> PendingRows:
        """Find the order of rows by expert; later, the plan cuts this order into blocks and moves them to their place
        of sending. If no block will move, copy the rows as well: the first exchange then starts as soon as the plan is
        known."""
        order, copied = self._order(tokens_TH, choices.map_TE, placement)
        return PendingRows(partial(self._decide, choices.map_TE, order, copied))

    def _order(
        self, tokens_TH: torch.Tensor, map_TE: torch.Tensor, placement: Placement | None
    ) -> tuple[RowOrder | None, list[torch.Tensor]]:
        """Return the order of `_most_rows` rows by expert, and the rows if no block will move; None and [] where
        capacities may drop rows."""
        order = None
        copied = []
        with record_function("dispatch"):
            if not self.drops:
                order = row_order(map_TE, self._most_rows(map_TE))
                if placement is not None and self.chunks is None and self._in_place(placement):
                    # The autograd function of the whole mixture computes the tokens' gradient
                    copied.append(gather_rows(tokens_TH.detach(), order))
        return order, copied

    def _most_rows(self, map_TE: torch.Tensor) -> int:
        # Not len(), which torch implements in Python
        return map_TE.shape[0] * self.rows_per_token

    def _in_place(self, placement: Placement) -> bool:
        """Return whether one chunk's order by expert is the order of sending."""
        return placement.tables.in_place and not self.parallel.splits_rows

    def _decide(
        self, map_TE: torch.Tensor, order: RowOrder | None, copied: list[torch.Tensor], plan: DispatchPlan
    ) -> Route:
        """Return the route, given the results of `_order`."""
        device = map_TE.device
        chunking = UNSPLIT if self.chunks is None else self.chunks(plan)
        one_by_one = plan.counts_DE.shape[0] == plan.placement.num_ranks and not self.parallel.splits_rows
        if map_TE.is_cpu or chunking.chunks > 1 or not one_by_one:
            found = self._cut(plan, chunking.split(plan).numpy(), device)
        else:
            found = cut(plan, self.parallel.source, self._most_rows(map_TE), device, self.reads_all_splits)
        if order is None or found.rows != len(order):
            order = row_order(map_TE, found.rows)
            copied = []
        moved = order.moved(found.move, found.back)
        sent = [] if moved is not order else copied
        route = ChunkedRoute(
            moved, found, chunking, self.parallel, self.exchange, self.sharding, device, sent, plan.room
        )
        return route.dispatch

    def _cut(self, plan: DispatchPlan, tokens_CDP: np.ndarray, device: torch.device) -> RankCut:
        """Do the same as `cut`, for any number of chunks and sources. `tokens_CDP`: see `Chunking.split`."""
        parallel = self.parallel
        hosts = plan.placement.num_ranks
        members_CDP = tokens_CDP[:, parallel.members]
        moves: list[Any] = [STAYS]
        if len(tokens_CDP) > 1:
            own_CWS = tokens_CDP[:, parallel.source].reshape(len(tokens_CDP), hosts, -1)
            each = sending(plan.placement, members_CDP), BlockMove.transposed(own_CWS, (1, 0, 2))
            moves = gathers([one for move in each for one in (move, move.back)], device)
        elif not self._in_place(plan.placement):
            moves = gathers([sending(plan.placement, members_CDP)], device)
        received_CDS = tokens_CDP.reshape(*tokens_CDP.shape[:2], hosts, -1)[:, :, parallel.groups.ep.rank()]
        sizes_CD = torch.from_numpy(members_CDP.sum(2)) if parallel.splits_rows else None
        splits = [torch.from_numpy(splits_DW) for splits_DW in sums_by_host(tokens_CDP, hosts)]
        return RankCut(int(members_CDP.sum()), splits, received_CDS, *moves)._replace(sizes_CD=sizes_CD)


class ArrivedRows(NamedTuple):
    """All received rows of a pass."""

    tokens_TH: torch.Tensor
    """The tokens whose rows were sent."""
    rows_RH: torch.Tensor
    probs_R: torch.Tensor
    """Combine weights of the rows."""
    tokens_per_slot: torch.Tensor
    """See `GroupedExperts.forward`."""
    send_back: Callable[[torch.Tensor], torch.Tensor]
    """Sends results back and sums each token's results: [R, H] -> [T, H]."""

    def compute(self, experts: GroupedExperts, begin: Begin) -> Combine:
        """Compute the rows with this rank's experts; return the function that brings the results back."""
        with record_function("experts"):
            begin("dispatch_wait")
            begin("experts")
            _on_gradient(self.tokens_TH, begin, "dispatch_backward_wait")
            _on_gradient(self.rows_RH, begin, "dispatch_backward")
            rows_RH = experts(self.rows_RH, self.tokens_per_slot, self.probs_R)
            begin("combine")
            _on_gradient(rows_RH, begin, "combine_backward_wait", "experts_backward")

        def combine() -> torch.Tensor:
            with record_function("combine"):
                return self.send_back(rows_RH)

        return combine


def _on_gradient(tensor: torch.Tensor, begin: Begin, *works: Any) -> None:
    """Begin works, one after the other, when the gradient of a tensor is complete."""
    if tensor.requires_grad:
        for work in works:
            tensor.register_hook(lambda gradient, work=work: begin(work))


class AtOnceDispatcher(Dispatcher):
    """Sends all rows before experts compute, by functions of megatron-core, whose buffers all layers share."""

    stream: torch.cuda.Stream | None = None
    """Executes exchanges and their backward passes one after the other; None: the pass's stream does, because no other
    pass runs at the same time."""

    @contextlib.contextmanager
    def exchanging(self, *sent: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Execute an exchange, given the tensors that it reads; the body adds those that it returns to the list."""
        arrived: list[torch.Tensor] = []
        if self.stream is None:
            yield arrived
            return
        own = torch.cuda.current_stream()
        self.stream.wait_stream(own)
        # Autograd computes the backward pass on the same stream
        with torch.cuda.stream(self.stream):
            keep_until_read(*sent)
            yield arrived
        own.wait_stream(self.stream)
        keep_until_read(*arrived)


MEGATRON_DISPATCHERS = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
    "flex": MoEFlexTokenDispatcher,
}


class MegatronDispatcher(AtOnceDispatcher):
    """One of megatron-core's own dispatchers; flex is DeepEP or HybridEP with host synchronization. These dispatchers
    know no replicas, so their config counts physical experts."""

    def __init__(self, config: TransformerConfig, rank: int, source: int, groups: ProcessGroupCollection) -> None:
        """`rank`: index of this rank among the hosts; `source`: its index among the sources."""
        self.config = config
        self.rank = rank
        self.source = source
        self.groups = groups
        self._stages: dict[tuple[int, torch.cuda.Stream], MoETokenDispatcher] = {}
        """By number of slots, and by stream: a stage keeps values of a pass, and passes side by side have different
        streams."""

    def prepare(self, tokens_TH: torch.Tensor, choices: Choices, placement: Placement | None) -> PendingRows:
        return PendingRows(self._decide)

    def _decide(self, plan: DispatchPlan) -> Route:
        slots = plan.placement.slots_per_rank
        key = slots, torch.cuda.current_stream()
        if key not in self._stages:
            config = copy.copy(self.config)
            config.num_moe_experts = plan.placement.num_physical
            indices = list(range(self.rank * slots, (self.rank + 1) * slots))
            self._stages[key] = MEGATRON_DISPATCHERS[config.moe_token_dispatcher_type](
                slots, indices, config=config, pg_collection=self.groups
            )
        return partial(self._dispatch, self._stages[key], plan)

    def _dispatch(
        self, stages: MoETokenDispatcher, plan: DispatchPlan, tokens_TH: torch.Tensor, choices: Choices
    ) -> ArrivedRows:
        def combine(rows_RH: torch.Tensor) -> torch.Tensor:
            with self.exchanging(rows_RH) as arrived:
                arrived.append(stages.combine_postprocess(stages.token_combine(stages.combine_preprocess(rows_RH))))
            return arrived[0]

        probs, chosen_TP = reroute(*choices, plan, self.source)
        with self.exchanging(tokens_TH, chosen_TP, probs) as arrived:
            rows, probs = stages.dispatch_preprocess(tokens_TH, chosen_TP, probs)
            rows, probs = stages.token_dispatch(rows, probs)
            rows, tokens_per_slot, probs = stages.dispatch_postprocess(rows, probs)
            arrived += rows, probs, tokens_per_slot
        return ArrivedRows(tokens_TH, rows, probs, tokens_per_slot.cpu(), combine)
