"""BalancedMoELayer: the verbs of a mixture of experts, in order.

    route -> host -> plan -> reroute -> (dispatch -> experts -> combine)

What is in brackets is one step here, because tokens may go through it in chunks (flow/dispatcher.py). `host` is where
time meets space: it says who computes which expert in this iteration. Their weights are there when the experts compute.

Shape suffixes: T tokens of this rank, H hidden, E logical experts, P physical experts, D sources of tokens.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.config.run_config import BalanceConfig
from megatron_balance.flow.chunks.choice import ChunkChoice
from megatron_balance.flow.chunks.chunking import UNSPLIT
from megatron_balance.flow.chunks.pipeline import Begin
from megatron_balance.flow.dispatcher import AllToAllDispatcher, Dispatcher, MegatronDispatcher, Routed
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.plan import Split, by_host, make_dispatch_plan
from megatron_balance.flow.reroute import reroute
from megatron_balance.placement.placement import Placement

Host = Callable[[torch.Tensor, bool], Placement]
"""(load matrix [D, E] of one forward pass, whether it trains) -> the placement. Its experts are in their slots
when they compute."""


class BalancedMoELayer(MoELayer):
    """Drop-in for megatron-core's MoELayer, named in the layer spec.

    Subclassing is what megatron-core's transformer layer recognises an MoE layer by; nothing of MoELayer's own
    construction or forward pass is used.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        *,
        path: ParallelDispatch,
        balance: BalanceConfig,
        exchange: TokenExchange,
        chunks: ChunkChoice | None = None,
        **_: object,
    ) -> None:
        """`path`, `balance`, `exchange` and `chunks` come from the spec.

        0.19 also passes `pg_collection` and more, unused here.
        """
        groups = path.groups
        BaseMoELayer.__init__(self, config, layer_number, groups)
        self.path = path
        self.submodules = submodules
        self.balance = balance
        recompute = config.recompute_modules if config.recompute_granularity == "selective" else []
        self.moe_layer_recompute = "moe" in recompute
        self.shared_experts_recompute = "shared_experts" in recompute
        owners = Placement.identity(config.num_moe_experts, self.ep_group.size())
        self.host: Host = lambda counts_DE, training: owners
        self.placement = owners
        """Of the latest forward pass, for those who ask what a slot held."""
        self.begin: Begin = lambda moment: None
        """Told when its experts compute."""
        self.split: Split = "local_first"

        self.router = submodules.router(config=config, pg_collection=path.router_groups())
        decide = self.router.routing
        self.router.routing = lambda logits, **options: decide(path.agree(logits), **options)
        self.dispatcher = self._build_dispatcher(exchange, chunks)
        home = owners.experts_of(self.ep_group.rank())
        self.experts = submodules.experts(home, config, pg_collection=groups)
        if self.use_shared_expert:
            self.shared_experts = submodules.shared_experts(
                config=config, pg_collection=groups, gate=config.moe_shared_expert_gate
            )

    def _build_dispatcher(self, exchange: TokenExchange, chunks: ChunkChoice | None) -> Dispatcher:
        if self.config.moe_token_dispatcher_type == "alltoall":
            # A layer is told its number only later
            chosen = (lambda plan: UNSPLIT) if chunks is None else (lambda plan: chunks(self.layer_number, plan))
            return AllToAllDispatcher(self.config, self.path, exchange, chosen)
        return MegatronDispatcher(self.config, self.ep_group.rank(), self.path.groups)

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Mixture of experts over `hidden_states` [sequence, batch, H]; the same shape, and no bias, comes back.

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
        path, entered = self.path, self.path.enter(hidden_states)
        own_TH = entered.reshape(-1, hidden_states.shape[-1])

        probs_TE, map_TE = self.router(entered, None if padding_mask is None else path.enter(padding_mask))
        tokens_TH, probs_TE = (path.gather(path.alone(tensor)) for tensor in (own_TH, probs_TE))
        map_TE = path.gather(map_TE)
        shares = path.shares(probs_TE, map_TE)
        counts_DE = self._gather_counts(shares[path.source][1])
        self.placement = self.host(by_host(counts_DE, self.ep_group.size()), self.training)
        plan = make_dispatch_plan(counts_DE, self.placement, self.split)
        parts = {source: reroute(*share, plan, source) for source, share in shares.items()}
        output_TH = self.dispatcher.run(Routed(tokens_TH, parts, plan), self.experts, self.begin)

        output = path.leave(path.together(path.keep(output_TH)).view(entered.shape))
        return output if shared is None else output + shared

    @torch.no_grad()
    def _gather_counts(self, map_TE: torch.Tensor) -> torch.Tensor:
        """The load matrix [D, E] on the host: tokens that each source routed to each expert."""
        counts_E = map_TE.sum(dim=0)
        counts_DE = counts_E.new_empty(self.path.sources.size() * counts_E.numel())
        dist.all_gather_into_tensor(counts_DE, counts_E, group=self.path.sources)
        # In half precision the one wait for the device in this layer: the exchange needs its split sizes on the host
        return counts_DE.view(-1, counts_E.numel()).cpu()
