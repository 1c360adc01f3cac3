"""BalancedMoELayer: the path of a token, step by step.

enter -> route -> count -> prepare -> host -> plan -> dispatch -> experts -> combine -> leave

enter      take this rank's part of the layer's input, if tensor-parallel ranks share the tokens
route      the router chooses logical experts for each token
count      start gathering the load matrix: how many tokens each source routed to each expert
prepare    queue work that needs no load: the order of rows by expert, and shared experts
host       take the Placement in force: which ranks host which experts
plan       compute how many tokens each source sends to each physical expert; the host waits for the load only
dispatch   make a row for each token and chosen expert, grouped by destination; start the first exchange
experts    this rank's experts compute the received rows
combine    return results; each token gets the weighted sum of its rows
leave      restore the layer's output for all tokens of its input

With chunks, `combine` also executes the remaining tasks of dispatch and experts, in the order of the chunking: see
flow/chunks/pipeline.py.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.comm.alltoall import keep_until_read
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.comm.dedup import DedupAllToAll
from megatron_balance.config.run_config import BalanceConfig
from megatron_balance.device.host_memory import HostReader, Reading
from megatron_balance.device.recomputation import PassMemory
from megatron_balance.device.versions import number_of
from megatron_balance.flow.chunks.choice import ChunkChoice
from megatron_balance.flow.chunks.pipeline import Begin
from megatron_balance.flow.dedup_dispatcher import DedupDispatcher
from megatron_balance.flow.device_dispatcher import DeviceDispatcher, check_device
from megatron_balance.flow.device_plan import DevicePlan
from megatron_balance.flow.dispatcher import AllToAllDispatcher, Dispatcher, MegatronDispatcher, PendingRows, RowPlan
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.plan import Choices, DispatchPlan, by_host
from megatron_balance.job.collectives import start_gather
from megatron_balance.observe.profiler import record_function
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SplitName
from megatron_balance.profile.computation import recomputed

Host = Callable[[Reading, bool], Placement]
"""(load matrix [W, E] of the hosts in one forward pass, whether it trains) -> the placement in force."""


class PassLoad(NamedTuple):
    """The load matrix of one forward pass, in flight; its rows are sources."""

    on_device: Callable[[], torch.Tensor]
    """Returns the matrix [D, E] on the device; the current stream waits for it."""
    by_source: Reading
    """[D, E] in host memory."""
    by_host: Reading
    """[W, E] in host memory: sums over each host's sources."""


Decided = tuple[PassLoad, PendingRows]
"""Decisions of a forward pass, for its recomputation."""


class BalancedMoELayer(MoELayer):
    """Drop-in for megatron-core's MoELayer, without its constructor and forward pass. It is a subclass because
    megatron-core's transformer layer recognizes MoE layers by this class."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        *,
        parallel: ParallelDispatch,
        balance: BalanceConfig,
        exchange: TokenExchange,
        reader: HostReader,
        chunks: ChunkChoice | None = None,
        is_mtp_layer: bool = False,
        **_: object,
    ) -> None:
        """The layer's spec passes the arguments from `parallel` to `chunks`; megatron-core passes the others."""
        groups = parallel.groups
        BaseMoELayer.__init__(self, config, layer_number, groups)
        self.is_mtp_layer = is_mtp_layer
        assert config.num_moe_experts is not None
        self.parallel = parallel
        self.submodules = submodules
        self.balance = balance
        self.moe_layer_recompute = "moe" in recomputed(config)
        self.shared_experts_recompute = "shared_experts" in recomputed(config)
        owners = Placement.identity(config.num_moe_experts, self.ep_group.size())
        self.host: Host | None = None
        """None: each expert is hosted by its owner alone, and the load is not requested."""
        self.placement = owners
        """The placement of the latest forward pass."""
        self.decided: Callable[[], list[Decided]] = list
        """Returns the decisions of the current pass in this layer: see `PassMemory.of`."""
        self.begin: Begin = lambda work: None
        """See `Begin`."""
        self.split: SplitName = "local_first"
        self.node_size = self.ep_group.size()
        """Number of consecutive hosts that share a node."""
        self.limit: int | None = None
        """`certified_rows` of training passes; None: passes need no certificate."""

        self._reader = reader
        self.router = cast(Router, submodules.router(config=config, pg_collection=parallel.router_groups()))
        self.router.is_mtp_layer = is_mtp_layer  # pyright: ignore[reportArgumentType] (an attribute since 0.19)
        decide = self.router.routing
        self.router.routing = lambda logits, **options: decide(parallel.agree(logits), **options)
        self.dispatcher = self._build_dispatcher(exchange, chunks)
        home = owners.experts_of(self.ep_group.rank())
        self.experts = submodules.experts(home, config, pg_collection=groups)
        if self.use_shared_expert:
            self.shared_experts = submodules.shared_experts(
                config=config, pg_collection=groups, gate=config.moe_shared_expert_gate
            )
        if isinstance(self.dispatcher, DeviceDispatcher):
            check_device(self.experts)

    def _build_dispatcher(self, exchange: TokenExchange, chunks: ChunkChoice | None) -> Dispatcher:
        if self.balance.moe_flex_rows == "bound":
            return DeviceDispatcher(self.config, self.parallel.groups)
        if self.config.moe_token_dispatcher_type != "alltoall":
            return MegatronDispatcher(self.config, self.ep_group.rank(), self.parallel.source, self.parallel.groups)
        # megatron-core sets the layer's number after its construction
        chunking = None if chunks is None else lambda plan: chunks(number_of(self), plan)
        if isinstance(exchange.probs, DedupAllToAll):
            return DedupDispatcher(self.config, self.parallel, exchange, chunking, self._reader)
        return AllToAllDispatcher(self.config, self.parallel, exchange, chunking)

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Compute the mixture of experts over `hidden_states` [sequence, batch, H]; return the same shape and no bias.
        `padding_mask` [batch, sequence] marks tokens that do not count for the auxiliary losses."""
        assert intermediate_tensors is None, "partial CUDA graphs are refused by the command line"
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and self.training:
            # Each call keeps its own decisions
            mixture = functools.partial(self._mixture, [])
            return tensor_parallel.checkpoint(mixture, False, hidden_states, padding_mask), None
        return self._mixture(self.decided(), hidden_states, padding_mask), None

    def _mixture(
        self, decided: list[Decided], hidden_states: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the layer's output; a pass with gradients repeats the decisions in `decided`, if there are any."""
        entered, padding_mask = self.parallel.enter(hidden_states, padding_mask)
        tokens_TH, choices = self._route(entered, padding_mask)
        if decided and torch.is_grad_enabled():
            # The router repeats its choices, so this pass neither counts nor waits
            load, pending = decided.pop()
        else:
            load = self._count(choices)
            pending = self.dispatcher.prepare(tokens_TH, choices, self.placement if self.host is None else None)
        shared = self.shared_experts_compute(hidden_states)
        self.begin("load_wait")
        self.placement = self._host(load)
        plan = self._plan(load)
        sent = pending.dispatch(plan, tokens_TH, choices)
        if not torch.is_grad_enabled():
            decided.append((load, pending))
        combine = sent.compute(self.experts, self.begin)
        output = self.parallel.leave(combine(), entered.shape)
        return output if shared is None else output + shared

    def _route(self, entered: torch.Tensor, padding_mask: torch.Tensor | None) -> tuple[torch.Tensor, Choices]:
        with record_function("route"):
            own_TH = entered.reshape(-1, entered.shape[-1])
            choices = Choices(*cast(Router, self.router)(entered, padding_mask))
            return self.parallel.share(own_TH, choices)

    def _count(self, choices: Choices) -> PassLoad:
        """Start gathering the load matrix, if the plan or the placement needs it."""
        on_host = self.dispatcher.plans_on_host
        if self.host is None and not on_host:
            return PassLoad(_unwanted, Reading(_unwanted), Reading(_unwanted))
        with record_function("count"):
            counts_E = self.parallel.counts(choices.map_TE)
            group = self.parallel.sources
            gathered = start_gather(group, counts_E)

        def on_device() -> torch.Tensor:
            counts_DE = gathered()
            if not on_host:
                # The pass may end before the host has the load
                keep_until_read(counts_E, counts_DE)
            return counts_DE

        by_source = self._reader.read(on_device)
        hosts = self.ep_group.size()
        of_hosts = by_source if group.size() == hosts else by_source.then(functools.partial(by_host, hosts=hosts))
        return PassLoad(on_device, by_source, of_hosts)

    def _host(self, load: PassLoad) -> Placement:
        if self.dispatcher.plans_on_host:
            # Wait here, so that this wait is not measured as part of the exchange
            load.by_source()
        return self.placement if self.host is None else self.host(load.by_host, self.training)

    def _plan(self, load: PassLoad) -> RowPlan:
        if not self.dispatcher.plans_on_host:
            return DevicePlan(self.placement, load.on_device, self.split, self.node_size)
        counts_DE = load.by_source()
        with record_function("plan"):
            limit = self.limit if self.training else None
            return DispatchPlan(counts_DE, self.placement, self.split, self.node_size, limit)


def _unwanted() -> torch.Tensor:
    raise AssertionError("the plan reads a load, but the ranks exchange none when only owners compute")


def moe_layers(model: Iterable[torch.nn.Module]) -> dict[int, BalancedMoELayer]:
    """Return the MoE layers of `model`, a list of model chunks, by number."""
    modules = (module for chunk in model for module in chunk.modules())
    return {number_of(module): module for module in modules if isinstance(module, BalancedMoELayer)}


def remember(model: Sequence[torch.nn.Module]) -> None:
    """Let recomputation repeat the decisions of the MoE layers of `model`, a list of model chunks."""
    for chunk in model:
        memory = PassMemory(chunk)
        for layer in moe_layers([chunk]).values():
            layer.decided = functools.partial(memory.of, layer)
