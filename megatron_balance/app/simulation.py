"""Turns a configuration into a job whose iterations are simulated (simulate/), in one process without its memory.

Like a dry run, this builds the first rank of each pipeline stage, so schedules, groups, cost models and sizes are those
of the run. Times of computation come from the cluster's file; docs/simulator.md states how far predictions are off.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.app.dry_run import StageMemory, held, imagined_run, inspect, model_chunk
from megatron_balance.build.profiles import Profiles, expert_shape, layer_shape, microbatch_tokens
from megatron_balance.config.run_config import RunConfig
from megatron_balance.cost.exchange import DEFAULT, ExchangeModel, resized
from megatron_balance.cost.flex import FlexModel
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.network import Network
from megatron_balance.flow.chunks.choice import find_degrees
from megatron_balance.flow.chunks.order import find_order, sequential
from megatron_balance.flow.layer import moe_layers
from megatron_balance.job.groups import Topology
from megatron_balance.planning.policies import registered
from megatron_balance.profile.cluster_profile import ClusterProfile
from megatron_balance.profile.computation import Computation, kernels_of, recomputed
from megatron_balance.profile.flops import attended_width, key_value_width
from megatron_balance.profile.kernel_times import ACTIVATION, Passes, uneven_passes
from megatron_balance.simulate.context import ContextExchange, ContextGroups
from megatron_balance.simulate.engine import NOTHING, Work
from megatron_balance.simulate.job import SimulatedJob, SimulatedStage
from megatron_balance.simulate.layers import LayerModel, RowExchange
from megatron_balance.simulate.network import Fabric, TeamNetwork, one_after_another, ring
from megatron_balance.simulate.programs import StageSchedule
from megatron_balance.timeline import hooks
from megatron_balance.timeline.actions import chunk_start
from megatron_balance.timeline.lower import compute_order
from megatron_balance.training.run import Run

NO_TIME = Passes(0.0, 0.0)

LAUNCHES = {"flex": ((200, 2), (300, 4)), "alltoall": ((200, 10), (300, 11))}
"""By dispatcher: launches of an MoE layer's forward pass and of its backward pass, each with the further launches for
every expert of a rank. No source states these numbers; published runs agree with them
(docs/measurements/published_runs.md)."""

GRAPHS = {"none": 1.0, "router": 0.6, "attention": 0.35, "full": 0.0}
"""Launches of a layer outside experts that are left if CUDA graphs contain nothing, the router with the preparation of
its dispatch, attention too, or the whole iteration."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The machine that a simulated job runs on."""

    topology: Topology
    profile: Path
    """File for `--balance-profile`: a cluster's data sheet or a measured profile."""
    whole: ClusterProfile
    """Links among all ranks of the job, for messages beyond an expert-parallel group."""
    memory_bandwidth: float | None = None
    """Bytes per second of a device's memory, which limit the optimizer's step; None: the step takes no time."""
    burst: float = 0.0
    """See `Fabric.burst`."""
    fp8: bool = False
    """Whether products are those of 8-bit numbers, which training does not support."""
    graphs: str = "none"
    """What CUDA graphs contain, a name in GRAPHS: the host launches the other kernels one by one."""


def simulated_job(
    config: RunConfig, target: Target, plan_seconds: float | None = None
) -> tuple[SimulatedJob, list[StageMemory]]:
    """Return the job of a configuration, and each stage's memory; ValueError if it cannot be simulated or built."""
    _check(config)
    if target.fp8:
        transformer = copy.copy(config.transformer)
        transformer.fp8 = "e4m3"
        config = config.replace(transformer=transformer)
    topology = target.topology
    world_size = topology.world_size
    stages = config.transformer.pipeline_model_parallel_size
    has_policy = config.balance.balance_policy != "none"
    fabric = Fabric(world_size, topology.node_size, target.burst)
    # Only layers with a policy have cost models; any policy gives the same cost model
    policy = config.balance.balance_policy if has_policy else next(name for name in registered() if name != "none")
    balance = dataclasses.replace(config.balance, balance_policy=policy, balance_profile=str(target.profile))
    built = []
    memory = []
    microbatches = 0
    for stage in range(stages):
        rank = stage * world_size // stages
        with imagined_run(config.replace(balance=balance), rank, world_size) as run:
            microbatches = run.batches.get()
            built.append(_StageBuilder(config, run, fabric, stage, has_policy, target).build())
            found = inspect(config, run)
            memory.append(found if has_policy else found._replace(uses={**found.uses, "guests": 0}))
    job = SimulatedJob(
        fabric=fabric,
        stages=built,
        microbatches=microbatches,
        plans=has_policy and config.balance.balance_load == "predicted",
        moves_owners=has_policy and config.balance.balance_ownership == "transfer",
        plan_seconds=plan_seconds,
    )
    return job, memory


def _check(config: RunConfig) -> None:
    transformer = config.transformer
    if transformer.num_moe_experts is None:
        raise ValueError("--num-experts: is missing; only models with experts can be simulated")
    if transformer.expert_model_parallel_size == 1:
        raise ValueError("--expert-model-parallel-size 1: nothing is exchanged; give at least 2")
    if transformer.moe_token_dispatcher_type == "allgather":
        raise ValueError("--moe-token-dispatcher-type allgather: cannot be simulated; give alltoall")
    if transformer.context_parallel_size > 1 and transformer.cp_comm_type == "a2a+p2p":
        raise ValueError("--cp-comm-type a2a+p2p: cannot be simulated; give p2p or a2a")
    if config.launch.use_tp_pp_dp_mapping:
        raise ValueError("--use-tp-pp-dp-mapping: other orders of ranks cannot be simulated; leave it out")
    if ":" in (policy := config.balance.balance_policy):
        raise ValueError(f"--balance-policy {policy}: only this package's policies can be simulated")


@dataclass(frozen=True, eq=False)
class _StageBuilder:
    """Turns the first rank of a pipeline stage, already built, into its simulation."""

    config: RunConfig
    run: Run
    fabric: Fabric
    number: int
    has_policy: bool
    target: Target

    @property
    def transformer(self) -> TransformerConfig:
        return self.config.transformer

    @property
    def size(self) -> int:
        """Ranks of the stage."""
        return self.fabric.num_ranks // self.transformer.pipeline_model_parallel_size

    @functools.cached_property
    def profile(self) -> ClusterProfile:
        """The profile; stages without MoE layers have no cost model to take it from."""
        topology = Topology(self.fabric.num_ranks, self.config.comm.moe_comm_node_size or self.fabric.num_ranks)
        return Profiles(self.run.config, self.run.groups, topology).experts

    def build(self) -> SimulatedStage:
        size = self.run.groups.tp_ep.size()
        ranks = [self.number * self.size + first + np.arange(size) for first in range(0, self.size, size)]
        stage = self._stage(len(ranks))
        assert self.run.balancer is not None
        states = self.run.balancer.layers
        if not states:
            return SimulatedStage(stage=stage, ranks=ranks)
        cost = next(iter(states.values())).manager.cost
        if self.config.balance.balance_inner_policy != "none":
            cost = dataclasses.replace(cost, split="proportional")
        return SimulatedStage(
            stage=stage,
            ranks=ranks,
            models=[self._model(cost, ranks_D) for ranks_D in ranks],
            managers={number: state.manager for number, state in states.items()},
            within={} if not self.has_policy else {n: state.within for n, state in states.items() if state.within},
            overlaps={number: state.overlap[:2] for number, state in states.items()},
        )

    def _stage(self, teams: int) -> StageSchedule:
        blocks = [[*moe_layers([chunk])] for chunk in self.run.model]
        passes = hooks.stage_passes(self.transformer, self.number, self.run.batches.get())
        schedule = compute_order(passes, blocks)
        balancer = self.run.balancer
        assert balancer is not None
        if self.has_policy and balancer.layers:
            schedule = balancer.schedule(self.run.batches.get())
        others, attention = self._others(blocks)
        context_teams, context = self._context(teams, attention)
        reductions, gathers = self._reductions()
        overlapped: list[Work] = []
        if self.config.ddp.overlap_grad_reduce:
            # Guests' gradients arrive after the next block's backward pass, so experts are reduced at the end
            overlapped, reductions = (reductions[:1], reductions[1:]) if self.has_policy else (reductions, [])
        gathered_late, gathers = (gathers, []) if self.config.ddp.overlap_param_gather else ([], gathers)
        return StageSchedule(
            number=self.number,
            stages=self.transformer.pipeline_model_parallel_size,
            teams=teams,
            passes=passes,
            blocks=blocks,
            schedule=schedule,
            others=others,
            shared=self._shared.forward,
            context=context,
            context_teams=context_teams,
            launching=self._launching(),
            beside=self._computation.kernels.beside,
            message=self._message(),
            early=_parts(one_after_another(overlapped), others),
            reduce=one_after_another(reductions),
            step=self._step(),
            gather=one_after_another(gathers),
            late=_parts(one_after_another(gathered_late), others),
        )

    def _model(self, cost: CostModel, ranks_D: np.ndarray) -> LayerModel:
        parallel = next(iter(moe_layers(self.run.model).values())).parallel
        groups = self.run.groups
        transformer = self.transformer
        shards = groups.expt_tp.size()
        whole = resized(self.profile, len(ranks_D), self.profile.node_size * shards)
        profile = whole if parallel.exchange_group is groups.tp_ep else self.profile
        comm = self.config.comm
        names = (comm.moe_comm_alltoall,)
        if names == ("auto",):
            names = (DEFAULT, "2dh", "1dh") if Network.of(profile).has_both_levels else (DEFAULT,)
        if cost.routing is None:
            models = tuple(ExchangeModel.of(profile, one) for one in names)
        else:
            among = len(ranks_D) // groups.ep.size() if profile is whole else 1
            models = (FlexModel.of(profile, cost.routing, cost.copied_by, among),)
        shape = layer_shape(self.config, groups)
        row_bytes = transformer.hidden_size * transformer.params_dtype.itemsize
        exchange = RowExchange(
            network=TeamNetwork(self.fabric, ranks_D, Network.of(whole)),
            profile=whole,
            models=models,
            steps=parallel.steps,
            shards=shards,
            copies=parallel.copies,
            simultaneous=parallel.simultaneous is not None,
            token_bytes=shape.tokens * row_bytes,
            topk=transformer.moe_router_topk,
            row_bytes=row_bytes,
        )
        return LayerModel(
            cost=cost,
            rows=exchange,
            degrees=find_degrees(comm.moe_comm_chunks),
            scheduler=find_order(comm.moe_comm_order) or sequential,
            repeats=transformer.recompute_granularity == "full" or "moe" in recomputed(transformer),
            uneven=uneven_passes(self._computation.kernels, *expert_shape(self.config, shards)[:2]),
        )

    def _others(self, blocks: Sequence[Sequence[int]]) -> tuple[dict[int, tuple[float, float]], dict[int, int]]:
        """Return seconds of the non-MoE part of every block and every chunk's start, and its number of attentions.

        The forward seconds are without shared experts.
        """
        others: dict[int, tuple[float, float]] = {}
        attention: dict[int, int] = {}
        computation = self._computation
        for index, (module, numbers) in enumerate(zip(self.run.model, blocks, strict=True)):
            parts = [NO_TIME]
            layers = [0]
            chunk = model_chunk(module)
            for moe in chunk.moe:
                parts[-1] = parts[-1].plus(self._layer_seconds(moe))
                layers[-1] += 1
                if moe:
                    parts.append(NO_TIME)
                    layers.append(0)
            # A layer for multi-token prediction projects two states to one and has its own logits
            heads = computation.head(self.run.vocab_size).times(chunk.head + chunk.predictions)
            parts[-1] = parts[-1].plus(heads, computation.joining().times(chunk.predictions))
            names = [chunk_start(index), *numbers]
            # Shared experts of a layer follow the non-MoE part of the block before it
            shared = [self._shared.forward] * len(numbers) + [0.0]
            for name, part, apart in zip(names, map(self._repeated, parts), shared, strict=True):
                others[name] = part.forward - apart, part.backward
            attention |= dict(zip(names, layers, strict=True))
        return others, attention

    def _context(self, teams: int, attention: Mapping[int, int]) -> tuple[int, dict[tuple[int, int], ContextExchange]]:
        """Return the number of teams that share context-parallel groups, and these groups' exchanges.

        Args:
            attention: number of attentions of each block.
        """
        config = self.transformer
        ranks = config.context_parallel_size
        if ranks == 1:
            return 1, {}
        tensor = config.tensor_model_parallel_size
        size = math.lcm(tensor * ranks, self.size // teams)
        node = self.fabric.node_size
        if max(size, node) % min(size, node):
            raise ValueError(
                f"--context-parallel-size {ranks}: nodes of {node} GPUs divide groups of {size} ranks unevenly; choose "
                "a size whose groups fill nodes, or of which several fill a node"
            )
        network = Network.of(resized(self.target.whole, size, min(size, node)))
        tokens = ACTIVATION * microbatch_tokens(self.config)
        keys_values = tokens * key_value_width(config)
        queries_outputs = tokens * attended_width(config) / tensor
        starts = range(self.number * self.size, (self.number + 1) * self.size, size)
        links = [TeamNetwork(self.fabric, first + np.arange(size), network) for first in starts]
        groups = [ContextGroups(one, tensor, ranks, str(config.cp_comm_type)) for one in links]
        passes_S = [one.exchanges(keys_values, queries_outputs) for one in groups]
        core = self._computation.attention_parts()[0]
        forward, backward = np.multiply(groups[0].hiding, core)
        if config.recompute_granularity == "full" or "core_attn" in recomputed(config):
            passes_S = [(one[0], one_after_another(one)) for one in passes_S]
            backward += forward
        return size // (self.size // teams), {
            (block, index): ContextExchange(
                [one_after_another([passes[index]] * layers) for passes in passes_S], layers * float(hiding)
            )
            for block, layers in attention.items()
            for index, hiding in enumerate((forward, backward))
            if layers
        }

    @functools.cached_property
    def _computation(self) -> Computation:
        config = self.transformer
        length = self.config.model.seq_length
        assert length is not None
        return Computation(kernels_of(self.profile, config), config, microbatch_tokens(self.config), length)

    @functools.cached_property
    def _shared(self) -> Passes:
        """Seconds of an MoE layer's shared experts."""
        inner = self.transformer.moe_shared_expert_intermediate_size
        return self._computation.mlp(inner, "shared_experts") if inner else NO_TIME

    def _layer_seconds(self, moe: bool) -> Passes:
        """Return the seconds of a layer, with tensor-parallel collectives but without routed experts."""
        config = self.transformer
        computation = self._computation
        assert config.ffn_hidden_size is not None
        parts = [computation.routing(), self._shared] if moe else [computation.mlp(config.ffn_hidden_size)]
        tensor = config.tensor_model_parallel_size
        if tensor > 1:
            whole = microbatch_tokens(self.config) * config.hidden_size * config.params_dtype.itemsize
            line = self.profile.link("all_gather", "intra")
            one = line.alpha + line.beta * whole * (tensor - 1) / tensor
            # A backward pass with sequence parallelism gathers inputs of products again, besides its own collectives
            parts.append(Passes(one, 1.5 * one).times(2 if moe else 4))
        return computation.attention().plus(*parts)

    def _launching(self) -> tuple[float, float]:
        """Return the host seconds to launch the kernels of an MoE layer's passes."""
        config = self.transformer
        assert config.num_moe_experts is not None
        experts = config.num_moe_experts // config.expert_model_parallel_size
        counts = LAUNCHES["flex" if config.moe_token_dispatcher_type == "flex" else "alltoall"]
        kernels = self._computation.kernels
        if self.target.graphs == "full":
            return 0.0, 0.0
        forward, backward = (GRAPHS[self.target.graphs] * layer + each * experts for layer, each in counts)
        backward += kernels.casts
        forward *= kernels.host
        backward *= kernels.host
        return forward, backward + (forward if config.recompute_granularity == "full" else 0.0)

    def _repeated(self, passes: Passes) -> Passes:
        """Return the seconds of a part with recomputation: full recomputation repeats the forward pass."""
        if self.transformer.recompute_granularity == "full":
            return passes._replace(backward=passes.forward + passes.backward)
        return passes

    def _message(self) -> float:
        """Return the seconds to send a microbatch's activations to the next stage."""
        config = self.transformer
        tokens = microbatch_tokens(self.config)
        if config.sequence_parallel:
            tokens //= config.tensor_model_parallel_size
        kind = "intra" if self.size < self.fabric.node_size else "inter"
        return self.target.whole.link("p2p", kind).seconds(tokens * config.hidden_size * config.params_dtype.itemsize)

    def _reductions(self) -> tuple[list[Work], list[Work]]:
        """Return the reductions of dense and expert gradients, and the all-gathers of their parameters."""
        ranks_D = self.number * self.size + np.arange(self.size)
        network = Network.of(self.target.whole)
        distributed = self.config.ddp.use_distributed_optimizer
        sizes = {
            "buffers": self.transformer.tensor_model_parallel_size,
            "expert_parallel_buffers": self.run.groups.tp_ep.size(),
        }
        reductions = []
        gathers = []
        for attribute, apart in sizes.items():
            buffers = [buffer for chunk in self.run.model for buffer in getattr(chunk, attribute)]
            gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
            parameters = sum(buffer.numel * buffer.param_dtype.itemsize for buffer in buffers)
            group_D = np.arange(self.size) % apart
            reductions.append(ring(self.fabric, network, ranks_D, group_D, gradients, 1 if distributed else 2))
            if distributed:
                gathers.append(ring(self.fabric, network, ranks_D, group_D, parameters, 1))
        return reductions, gathers

    def _step(self) -> float:
        """Return the seconds of the optimizer's step: read and write its state, read gradients and write parameters."""
        bandwidth = self.target.memory_bandwidth
        if bandwidth is None:
            return 0.0
        uses = held(self.run)
        shares = self.run.groups.dp_cp.size() if self.config.ddp.use_distributed_optimizer else 1
        return (2 * uses["optimizer"] + (uses["gradients"] + uses["parameters"]) / shares) / bandwidth


def _parts(reduction: Work, blocks: Collection[int]) -> dict[int, Work]:
    """Split a collective into equal parts, one for each block."""
    if reduction is NOTHING:
        return {}
    latency, resources, seconds = reduction
    return dict.fromkeys(blocks, Work(latency / len(blocks), resources, seconds / len(blocks)))
