"""BalancedMoELayer: where a token goes, one verb after another.

enter -> route -> host -> plan -> reroute -> dispatch -> experts -> combine -> leave

enter      this rank's part of the layer's input, if tensor-parallel ranks share the tokens
route      the router chooses logical experts for each token; all ranks learn the load matrix
host       the Placement in force: which ranks host which experts; hosts have the weights when they compute
plan       how many tokens each source sends to each physical expert
reroute    each chosen expert becomes one of its physical experts
dispatch   one row for each token and chosen expert, grouped by destination
experts    rows travel to their experts, through them and back, chunk by chunk
combine    each token gets the weighted sum of its rows
leave      the layer's output for all of its input
"""

from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.config.run_config import BalanceConfig
from megatron_balance.flow.chunks.choice import ChunkChoice
from megatron_balance.flow.chunks.chunking import UNSPLIT, Chunking
from megatron_balance.flow.chunks.pipeline import Begin
from megatron_balance.flow.dispatcher import AllToAllDispatcher, Dispatcher, MegatronDispatcher
from megatron_balance.flow.experts import recomputes
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.plan import Choices, DispatchPlan, Split, by_host, make_dispatch_plan
from megatron_balance.flow.reroute import reroute
from megatron_balance.observe.profiling import record_function
from megatron_balance.placement.placement import Placement

Host = Callable[[torch.Tensor, bool], Placement]
"""(load matrix [D, E] of one forward pass, whether it trains) -> the placement, whose hosts have the weights of their
experts when they compute."""


class BalancedMoELayer(MoELayer):
    """Drop-in for megatron-core's MoELayer, named in the layer spec.

    It is a subclass because megatron-core's transformer layer recognizes MoE layers by their class. It uses neither the
    constructor nor the forward pass of MoELayer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        *,
        parallel: ParallelDispatch,
        balance: BalanceConfig,
        exchange: TokenExchange,
        chunks: ChunkChoice | None = None,
        **_: object,
    ) -> None:
        """`parallel`, `balance`, `exchange` and `chunks` come from the spec.

        megatron-core 0.19 also passes `pg_collection` and other arguments, which are not used here.
        """
        groups = parallel.groups
        BaseMoELayer.__init__(self, config, layer_number, groups)
        assert config.num_moe_experts is not None
        self.parallel = parallel
        self.submodules = submodules
        self.balance = balance
        self.moe_layer_recompute = recomputes(config, "moe")
        self.shared_experts_recompute = recomputes(config, "shared_experts")
        owners = Placement.identity(config.num_moe_experts, self.ep_group.size())
        self.host: Host = lambda counts_DE, training: owners
        self.placement = owners
        """The placement of the latest forward pass."""
        self.begin: Begin = lambda moment: None
        """Called when the experts begin and end their computation."""
        self.split: Split = "local_first"
        self.node_size = self.ep_group.size()
        """Number of consecutive hosts that share a node."""

        self.router = cast(Router, submodules.router(config=config, pg_collection=parallel.router_groups()))
        decide = self.router.routing
        self.router.routing = lambda logits, **options: decide(parallel.agree(logits), **options)
        self.dispatcher = self._build_dispatcher(exchange, chunks)
        home = owners.experts_of(self.ep_group.rank())
        self.experts = submodules.experts(home, config, pg_collection=groups)
        if self.use_shared_expert:
            self.shared_experts = submodules.shared_experts(
                config=config, pg_collection=groups, gate=config.moe_shared_expert_gate
            )

    def _build_dispatcher(self, exchange: TokenExchange, chunks: ChunkChoice | None) -> Dispatcher:
        if self.config.moe_token_dispatcher_type != "alltoall":
            return MegatronDispatcher(self.config, self.ep_group.rank(), self.parallel.groups)

        def chunking(plan: DispatchPlan) -> Chunking:
            if chunks is None:
                return UNSPLIT
            assert self.layer_number is not None, "megatron-core numbers a layer before its first forward pass"
            return chunks(self.layer_number, plan)

        return AllToAllDispatcher(self.config, self.parallel, exchange, chunking)

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Compute the mixture of experts over `hidden_states` [sequence, batch, H]; return the same shape and no bias.

        `padding_mask` [batch, sequence] marks tokens that do not count for the auxiliary losses.
        """
        assert intermediate_tensors is None, "partial CUDA graphs are refused by the command line"
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            return tensor_parallel.checkpoint(self._mixture, False, hidden_states, padding_mask), None
        return self._mixture(hidden_states, padding_mask), None

    def _mixture(self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None) -> torch.Tensor:
        shared = self.shared_experts_compute(hidden_states)
        entered, padding_mask = self.parallel.enter(hidden_states, padding_mask)
        tokens_TH, routing, counts_DE = self._route(entered, padding_mask)
        self.placement = self.host(by_host(counts_DE, self.ep_group.size()), self.training)
        plan = self._plan(counts_DE)
        routing = {source: reroute(*choices, plan, source) for source, choices in routing.items()}
        rows_RH, probs_R, handle = self.dispatcher.dispatch(tokens_TH, routing, plan)
        rows_RH = handle.compute(rows_RH, probs_R, self.experts, self.begin)
        output_TH = handle.combine(rows_RH)
        output = self.parallel.leave(output_TH, entered.shape)
        return output if shared is None else output + shared

    def _route(
        self, entered: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, Mapping[int, Choices], torch.Tensor]:
        """Return the tokens [T, H] that this rank dispatches, the choices sent by each source, and the load matrix."""
        with record_function("route"):
            own_TH = entered.reshape(-1, entered.shape[-1])
            chosen = Choices(*cast(Router, self.router)(entered, padding_mask))
            tokens_TH, routing = self.parallel.share(own_TH, chosen)
            return tokens_TH, routing, self._gather_counts(routing[self.parallel.source].map_TE)

    @torch.no_grad()
    def _gather_counts(self, map_TE: torch.Tensor) -> torch.Tensor:
        """Return the load matrix [D, E] on the host: tokens that each source routed to each expert."""
        counts_E = map_TE.sum(dim=0)
        counts_DE = counts_E.new_empty(self.parallel.sources.size() * counts_E.numel())
        dist.all_gather_into_tensor(counts_DE, counts_E, group=self.parallel.sources)
        # In half precision, the layer waits for the device only here: the exchange needs split sizes on the host
        return counts_DE.view(-1, counts_E.numel()).cpu()

    def _plan(self, counts_DE: torch.Tensor) -> DispatchPlan:
        with record_function("plan"):
            return make_dispatch_plan(counts_DE, self.placement, self.split, self.node_size)
